"""How a run can end, as an exit code, a status and a message."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from mprun.cli import main
from mprun.record.metrics import read_metrics

from ..small import LM

AUTOENCODER = [
    "device=cpu",
    "threads=1",
    "model=conv_autoencoder",
    "data.image_size=32",
    "data.batch_size=16",
    "model.width=2",
    "model.code_size=4",
]


def record_of(run) -> dict:
    return json.loads((run / "run.json").read_text())


def test_done_is_0(tmp_path, capsys):
    assert main([*LM, "train.steps=2", f"output_dir='{tmp_path / 'r'}'"]) == 0
    assert record_of(tmp_path / "r")["status"] == "done"
    assert capsys.readouterr().out == f"run: {tmp_path / 'r'}\n"


def test_diverged_is_3_and_a_result(tmp_path, capsys):
    """Adam's eps of 1e-8 is 0 in FP16: 0 / 0 in the first update, NaN in the second loss."""
    run = tmp_path / "r"
    command = [
        *AUTOENCODER,
        "precision=fp16_naive",
        "train.steps=9",
        "train.log_every=3",
        "train.checkpoint_every=1",
        f"output_dir='{run}'",
    ]
    assert main(command) == 3
    printed = capsys.readouterr()
    record = record_of(run)
    assert record["status"] == "diverged" and record["cause"] == "non-finite loss"
    # The step of the first non-finite loss, not the step of the log line that found it.
    assert record["last_step"] == 2
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == 2
    assert "optim.eps" in printed.err and "diverged at step 2" in printed.err
    assert printed.out == f"run: {run}\n"
    # Weights that are not finite are never committed as a checkpoint to go on from.
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_scale_that_collapses_is_3(tmp_path, capsys):
    run = tmp_path / "r"
    # The floor itself overflows FP16, so that every update is skipped.
    command = [
        *LM,
        "precision=amp",
        "scaler.init_scale=16777216",
        "scaler.min_scale=16777216",
        "scaler.max_consecutive_skips=4",
        "train.steps=50",
        "train.log_every=1",
        f"output_dir='{run}'",
    ]
    assert main(command) == 3
    record = record_of(run)
    assert (record["status"], record["updates"]) == ("diverged", 0)
    assert "4 skipped updates in a row" in record["cause"]
    assert "4 skipped" in capsys.readouterr().err


def test_an_unwritable_folder_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    assert main([*LM, f"output_root='{tmp_path / 'file'}'"]) == 2
    assert "output_root" in capsys.readouterr().err


def start(run, *overrides, **streams) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "mprun",
        *LM,
        "precision=amp",
        "train.steps=1000000",
        "train.log_every=1",
        "train.checkpoint_every=1000000",
        *overrides,
        f"output_dir='{run}'",
    ]
    return subprocess.Popen(command, text=True, **streams)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_at_a_step_with_a_checkpoint(number, code, tmp_path, capsys):
    run = tmp_path / "r"
    process = start(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not process.stderr.readline().startswith("step "):
        assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out == f"run: {run}\n" and "Traceback" not in err
    record = record_of(run)
    assert (record["status"], record["cause"]) == ("preempted", number.name)
    step = record["last_step"]
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{step:08}"]
    # Every step that is done is in the record, and the run goes on from there.
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == step
    assert main([f"resume={run}", f"train.steps={step + 2}"]) == 0
    steps = [r["step"] for r in read_metrics(run / "metrics.jsonl") if r["split"] == "train"]
    assert steps == list(range(1, step + 3))
    assert record_of(run)["attempts"] == 2


@pytest.mark.slow
def test_a_terminal_gets_a_bar_and_stdout_stays_clean(tmp_path):
    run = tmp_path / "r"
    ours, theirs = pty.openpty()
    process = start(run, "train.steps=4", stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    drawn = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux: the other end of the terminal is closed
            break
        if not part:
            break
        drawn += part
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert (process.returncode, out) == (0, f"run: {run}\n")
    text = drawn.decode()
    assert "━" in text and "step 1/4  loss" in text and "step 4/4  loss" in text


def test_a_run_in_use_is_refused(tmp_path, capsys):
    run = tmp_path / "r"
    assert main([*LM, "train.steps=2", "train.checkpoint_every=1", f"output_dir='{run}'"]) == 0
    with open(run / ".lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main([f"resume={run}", "train.steps=4"]) == 2
        assert "in use" in capsys.readouterr().err
    assert main([f"resume={run}", "train.steps=4"]) == 0

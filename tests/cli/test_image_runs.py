"""Runs on image files from the command line: waiting for data, damaged data, lost processes."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mprun.cli import main
from mprun.data.loader import available_cores
from mprun.data.source import EpochOrder
from mprun.training import announcements as messages

from ..distributed.processes import children_of
from ..helpers import TINY_AUTOENCODER, but, record_of, refused, rows_of

COMMAND = but(TINY_AUTOENCODER, "data=image_folder", "data.value_range=tanh", "data.batch_size=4")


@pytest.fixture
def folder(tmp_path) -> Path:
    """data/train and data/val, two classes, 24 and 4 PNG files."""
    root = tmp_path / "data"
    for split, count in (("train", 24), ("val", 4)):
        for number in range(count):
            content = io.BytesIO()
            noise = np.random.default_rng(number).integers(0, 256, (40, 36, 3), np.uint8)
            Image.fromarray(noise).save(content, "PNG")
            path = root / split / f"class{number % 2}" / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.getvalue())
    return root


def arguments(folder: Path, run: Path, *more: str) -> list[str]:
    return [*COMMAND, f"data.root='{folder}'", f"output_dir='{run}'", *more]


def start(folder: Path, run: Path, *more: str) -> subprocess.Popen:
    """The run as a process in a group of its own."""
    command = [sys.executable, "-m", "mprun", *arguments(folder, run, *more)]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, **pipes, text=True, start_new_session=True)


def steps_done(run: Path) -> int:
    """The last step in metrics.jsonl; 0 before the first."""
    rows = rows_of(run) if (run / "metrics.jsonl").exists() else []
    return max([row["step"] for row in rows], default=0)


def wait_for(condition, seconds=300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_step(run: Path, step: int) -> None:
    wait_for(lambda: steps_done(run) >= step)


def loader_processes(root: int) -> list[int]:
    """Processes that descend from `root` by way of a fork server: its grandchildren."""
    return [process for child in children_of(root) for process in children_of(child)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.slow
def test_data_wait_is_recorded_and_told(folder, tmp_path, capsys, monkeypatch, workers):
    """Decoding in the calling thread takes a share of the time; the record says which."""
    monkeypatch.setattr(messages, "_LONG_ENOUGH_S", 0.0)
    run = tmp_path / "r"
    command = arguments(folder, run, f"data.workers={workers}", "train.steps=6")
    assert main([*command, "train.log_every=2"]) == 0
    shares = {r["step"]: r["data_wait"] for r in rows_of(run, "train") if "data_wait" in r}
    assert list(shares) == [2, 4, 6] and all(0 <= share <= 1 for share in shares.values())
    record = record_of(run)
    share = record["throughput"]["data_wait"]
    # Of the windows but the first, which are of about the same length.
    assert min(shares[4], shares[6]) - 1e-4 <= share <= max(shares[4], shares[6]) + 1e-4
    told = [line for line in capsys.readouterr().err.splitlines() if "data-bound" in line]
    assert len(told) == (share > 0.1)
    if workers == 0:
        assert share > 0
    if told:
        assert f"waited {100 * share:.0f} % of the time for data; " in told[0]
        cores = available_cores()
        assert (f"more data.workers (now {workers}, {cores} cores)" in told[0]) == (workers < cores)
    events = b"".join(path.read_bytes() for path in run.glob("events.*"))
    assert b"train/data_wait" in events


def test_a_source_in_memory_has_no_data_wait(tmp_path):
    run = tmp_path / "r"
    assert main([*TINY_AUTOENCODER, f"output_dir='{run}'", "train.steps=2"]) == 0
    assert all("data_wait" not in record for record in rows_of(run))
    assert set(record_of(run)["throughput"]) == {"samples_per_s", "windows", "sample"}
    assert "replaced" not in record_of(run)["data"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.slow
def test_a_damaged_first_batch_is_4_and_nothing_is_written(folder, tmp_path, capsys, workers):
    for path in folder.glob("train/*/*.png"):
        os.truncate(path, 500)
    run = tmp_path / "r"
    words = arguments(folder, run, f"data.workers={workers}", "train.steps=6")
    refused(capsys, *words, says=f"mprun: {folder}/train/class", code=4)
    assert not run.exists()


def test_a_short_run_says_nothing_of_waiting():
    """Start-up takes most of a run of a few seconds."""
    waiting = SimpleNamespace(workers=0)
    assert messages.data_bound(waiting, 0.9, 5.0) is None
    assert "waited 90 %" in messages.data_bound(waiting, 0.9, 60.0)
    assert messages.data_bound(waiting, 0.05, 60.0) is None


@pytest.mark.slow
def test_a_damaged_evaluation_keeps_the_work_and_it_goes_on_after_the_repair(
    folder, tmp_path, capsys
):
    """The evaluation that failed comes first; the end equals that of a run with whole files."""
    whole, run = tmp_path / "whole", tmp_path / "r"
    more = ("data.workers=0", "train.steps=5", "train.log_every=1")
    assert main(arguments(folder, whole, *more)) == 0
    path = folder / "val" / "class1" / "01.png"
    content = path.read_bytes()
    path.write_bytes(content[:500])
    assert main(arguments(folder, run, *more)) == 4
    printed = capsys.readouterr().err
    assert f"mprun: {path}: " in printed and "checkpoint at step 5 kept" in printed
    assert main([f"resume={run}", f"data.root='{folder}'"]) == 4  # still damaged
    path.write_bytes(content)
    capsys.readouterr()
    assert main([f"resume={run}", f"data.root='{folder}'"]) == 0
    assert "the data have changed since the run stopped" in capsys.readouterr().err
    record = record_of(run)
    assert record["status"] == "done" and len(record["data_before_repair"]) == 1
    assert record["final"] == record_of(whole)["final"]
    assert record["data"]["sha256"] == record_of(whole)["data"]["sha256"]


@pytest.mark.slow
def test_other_data_are_refused_on_resume(folder, tmp_path, capsys):
    run = tmp_path / "r"
    more = ("data.workers=0", "train.steps=4", "train.checkpoint_every=2")
    assert main(arguments(folder, run, *more)) == 0
    folder.rename(tmp_path / "moved")
    moved = f"data.root='{tmp_path / 'moved'}'"
    assert main([f"resume={run}", moved, "train.steps=6"]) == 0
    (tmp_path / "moved/train/class0/00.png").unlink()
    other = "the data differ from the data at the start of the run"
    refused(capsys, f"resume={run}", moved, "train.steps=8", says=other)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.few(1)
def test_a_damaged_file_is_4_and_named(folder, tmp_path, capsys, workers):
    # Of the second batch of seed 0, so that the run has begun.
    number = EpochOrder(0, 24, 4, torch.device("cpu")).indices(1)[0].item()
    path = sorted((folder / "train").glob("*/*.png"))[number]
    os.truncate(path, 500)
    run = tmp_path / "r"
    assert main(arguments(folder, run, f"data.workers={workers}", "train.steps=6")) == 4
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if path.name in line]
    assert line.startswith(f"mprun: {path}: ") and "Traceback" not in printed.err
    record = record_of(run)
    assert record["status"] == "failed"
    assert record["cause"] == f"DamagedData: {line.removeprefix('mprun: ')}"
    assert record["data"]["replaced"] == 0
    assert printed.out == f"run: {run}\n"


@pytest.mark.slow
def test_skip_is_counted_and_told(folder, tmp_path, capsys):
    names = [folder / "train" / "class1" / "07.png", folder / "val" / "class0" / "02.png"]
    for name in names:
        name.write_bytes(b"")
    run = tmp_path / "r"
    more = ("data.on_corrupt=skip", "train.steps=6", "data.workers=1", "train.checkpoint_every=2")
    assert main(arguments(folder, run, *more)) == 0
    data = record_of(run)["data"]
    assert data["replaced"] == 2 and data["replaced_files"] == [str(name) for name in names]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "on_corrupt" in line]
    assert line.startswith("mprun: data.on_corrupt=skip: 2 files replaced by the next usable one")
    assert all(str(name) in line for name in names)
    # The record can be read again, and a file that both attempts met counts once.
    assert main([f"resume={run}", f"data.root='{folder}'", "train.steps=8"]) == 0
    assert record_of(run)["data"] == data


@pytest.mark.slow
def test_a_folder_that_vanishes_while_running_is_4(folder, tmp_path):
    run = tmp_path / "r"
    process = start(folder, run, "train.steps=100000", "data.workers=2")
    wait_for_step(run, 5)
    (folder / "train").rename(tmp_path / "elsewhere")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 4 and "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("mprun: /")]
    assert line.startswith(f"mprun: {folder}/train/class") and line.endswith(".png: is gone")
    assert record_of(run)["status"] == "failed" and out == f"run: {run}\n"


@pytest.mark.slow
def test_a_lost_loader_process_is_5(folder, tmp_path):
    run = tmp_path / "r"
    process = start(folder, run, "train.steps=100000", "data.workers=1")
    wait_for_step(run, 5)
    (worker,) = loader_processes(process.pid)
    os.kill(worker, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 5 and "Traceback" not in err
    (line,) = [line for line in err.splitlines() if "loader process" in line]
    assert line.startswith("mprun: data.workers=1: a loader process is lost")
    assert record_of(run)["status"] == "failed"
    assert record_of(run)["cause"].startswith("Resource: data.workers=1")


@pytest.mark.slow
def test_a_signal_to_the_group_stops_the_run_not_its_loader_and_it_goes_on_bit_for_bit(
    folder, tmp_path
):
    """As a batch system or Ctrl-C sends it; with two workers before and none that differ after."""
    whole, run = tmp_path / "whole", tmp_path / "r"
    more = ["train.steps=40", "train.log_every=5", "data.workers=2"]
    assert main(arguments(folder, whole, *more)) == 0
    process = start(folder, run, *more)
    wait_for_step(run, 3)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert main([f"resume={run}", f"data.root='{folder}'"]) == 0
    timed = {"samples_per_s", "data_wait", "seconds"}
    records = []
    for path in (whole, run):
        rows = [r for r in rows_of(path) if r["split"] == "eval" or r["step"] <= 20]
        records.append([{key: r[key] for key in r if key not in timed} for r in rows])
    in_both = [record for record in records[1] if record in records[0]]
    assert in_both == records[1] and len(in_both) >= len(records[0]) - 1
    assert records[0][-1]["split"] == "eval" and records[0][-1] == records[1][-1]


@pytest.mark.slow
def test_killed_and_resumed_from_a_checkpoint(folder, tmp_path):
    """kill -9 leaves no loader process behind; the rest of the run is that of a whole one."""
    whole, run = tmp_path / "whole", tmp_path / "r"
    more = ["train.checkpoint_every=4", "train.log_every=1", "data.workers=2"]
    process = start(folder, run, *more, "train.steps=100000")
    wait_for_step(run, 9)
    workers = loader_processes(process.pid)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 120)
    last = steps_done(run) + 10
    assert main([f"resume={run}", f"data.root='{folder}'", f"train.steps={last}"]) == 0
    assert main(arguments(folder, whole, *more, f"train.steps={last}")) == 0
    losses = [[(r["split"], r["step"], r["loss"]) for r in rows_of(path)] for path in (whole, run)]
    assert losses[0] == losses[1]

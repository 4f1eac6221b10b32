"""How a run can end, as an exit code, a status and a message."""

import errno
import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from mprun.assembly import build
from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.distributed.ranks import Ranks
from mprun.execution.compiled_step import Compilation
from mprun.record.console import Progress
from mprun.record.keys import config_hash
from mprun.record.memory import SPARED, ran_out, shortage
from mprun.record.run_record import product_shares, shares_text
from mprun.training.announcements import what_fits
from mprun.training.loop import Loop
from mprun.training.signals import Interruption, Stopped

from ..helpers import (
    LM,
    TINY_AUTOENCODER,
    TINY_LM,
    but,
    record_of,
    refused,
    rows_of,
    run,
    seal_again,
)


def test_done_is_0(tmp_path, capsys, monkeypatch):
    evaluated = []
    monkeypatch.setattr(Progress, "evaluated", lambda self, *count: evaluated.append(count))
    assert run(tmp_path / "r", *LM, "train.steps=2", "precision=amp") == 0
    record = record_of(tmp_path / "r")
    assert record["status"] == "done"
    printed = capsys.readouterr()
    assert printed.out == f"run: {tmp_path / 'r'}\n"
    # What it is, before step 1, and what to do next.
    lines = printed.err.splitlines()
    size = sum(record["precision"]["effective_dtypes"]["model"]["parameters"].values())
    assert lines[0] == f"  model    lstm_lm, {size:,} parameters"
    assert lines[1].startswith("  data     docs_words, ") and lines[1].endswith(", 20 a step")
    emulated = "amp (fp16 products emulated), loss scale from 65536 (dynamic)"
    assert lines[2:4] == [f"  mode     {emulated}", "  device   cpu, 1 thread; steps 1 to 2"]
    assert lines[4] == f"  run      {tmp_path / 'r'}" and lines[6] == "computing step 1/2"
    # One definition of the share everywhere: that of `mprun show` and `mprun compare`.
    shares = shares_text(product_shares(record["audit"]))
    assert lines[7].startswith("step 1: ") and f"; products by calls: {shares} (" in lines[7]
    assert re.fullmatch(r"fp16 \d+ %, fp32 \d+ %", shares)
    assert lines[5] == f"  watch    tensorboard --logdir {tmp_path / 'r'}"
    assert lines[-2] == f"mprun: next: tensorboard --logdir {tmp_path / 'r'}"
    assert lines[-1].startswith("mprun: to train longer: begin again with train.steps=")
    counts, totals = zip(*evaluated, strict=True)
    held_out = int(re.search(r"([\d,]+) held out", lines[1])[1].replace(",", ""))
    assert list(counts) == sorted(counts) and set(totals) == {held_out}
    assert len(counts) > 1 and held_out - counts[-1] < 100


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "mprun: lstm_lm on docs_words, precision=fp32, device=auto ..."),
        (["resume=outputs/x"], "mprun: going on with outputs/x ..."),
    ],
)
def test_a_terminal_is_told_what_begins_before_torch_is_imported(
    words, line, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mprun.training.run", None)  # what imports torch
    monkeypatch.setitem(sys.modules, "mprun.training.continuation", None)
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
        assert main(words) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"{line}\n" if terminal else "Traceback")


def test_the_next_command_is_the_one_that_shows_most(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(name, mode, *overrides, **more):
        path = Path("outputs/small lm") / name
        path.mkdir(parents=True)
        record = {"overrides": [*overrides, f"precision={mode}"], "precision": {"mode": mode}}
        record |= {"status": "done", "steps": 300, "attempts": 1, "config": {"output_dir": None}}
        record |= {"choices": {"model": "lstm_lm", "precision": mode}} | more
        (path / "run.json").write_text(json.dumps(record))
        return path, record

    def _next(*run):
        return what_fits(*run).removeprefix("next: ")

    # The partner that is not there yet, with everything else as it was.
    alone = run("a", "fp32", "seed=1", "optim.lr=0.5")
    assert _next(*alone) == "mprun seed=1 optim.lr=0.5 precision=amp"
    assert _next(*run("b", "bf16_naive")) == "mprun precision=fp32"
    # Of another experiment, measured by advise, not ended: no partners.
    run("c", "fp32", measured_for="advise")
    run("d", "fp32", status="preempted")
    assert _next(*run("f", "amp", "name=x")) == "mprun name=x precision=fp32"
    assert _next(*run("g", "amp", "optim.lr=0.5", "seed=3")) == "mprun compare 'outputs/small lm'"
    # A resume made it longer: its partner is as long, and the shorter ones beside it are none.
    longer = run("i", "amp", "optim.lr=0.5", "train.steps=300", steps=900, attempts=2)
    assert _next(*longer) == "mprun optim.lr=0.5 train.steps=900 precision=fp32"
    own = {"model": "lstm_lm", "precision": "mymode"}
    assert _next(*run("h", "mymode", choices=own)) == "tensorboard --logdir 'outputs/small lm/h'"
    # A damaged record beside them would end the comparison.
    run("e", "fp32")[0].joinpath("run.json").write_text("[")
    last = run("j", "amp", "optim.lr=0.5", "seed=4")
    assert not _next(*last).startswith("mprun compare")


def test_diverged_is_3_and_a_result(tmp_path, capsys):
    """Adam's eps of 1e-8 is 0 in FP16: 0 / 0 in the first update, NaN in the second loss."""
    folder, mode = tmp_path / "r", [*TINY_AUTOENCODER, "precision=fp16_naive"]
    length = ["train.steps=9", "train.log_every=3", "train.checkpoint_every=1"]
    assert run(folder, *mode, *length) == 3
    printed = capsys.readouterr()
    record = record_of(folder)
    assert record["status"] == "diverged" and record["cause"] == "non-finite loss"
    # The step of the first non-finite loss, not the step of the log line that found it.
    assert record["last_step"] == rows_of(folder)[-1]["step"] == 2
    assert "optim.eps" in printed.err and "diverged at step 2" in printed.err
    assert printed.out == f"run: {folder}\n"
    # Weights that are not finite are never committed as a checkpoint to go on from.
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_scale_that_collapses_is_3(tmp_path, capsys):
    # The floor itself overflows FP16, so that every update is skipped.
    floor = ["scaler.init_scale=16777216", "scaler.min_scale=16777216"]
    length = ["scaler.max_consecutive_skips=4", "train.steps=50", "train.log_every=1"]
    assert run(tmp_path / "r", *LM, "precision=amp", *floor, *length) == 3
    record = record_of(tmp_path / "r")
    assert (record["status"], record["updates"]) == ("diverged", 0)
    assert "4 skipped updates in a row" in record["cause"]
    assert "4 skipped" in capsys.readouterr().err


class Two(Ranks):
    """The first of several ranks, which hears nothing of the others."""

    world = 2


@pytest.mark.parametrize(("steps", "status"), [(1, "done"), (2, "preempted")])
def test_a_signal_in_the_last_step_of_several_ranks_leaves_a_run_that_is_done(
    steps, status, tmp_path
):
    """One rank leaves its last evaluation at once; several take it, since each needs the others."""
    config = compose_config([*TINY_LM, f"train.steps={steps}"]).config
    built = build(config, torch.device("cpu"))
    built.task.ranks = Two()
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        outcome = Loop(built, config, tmp_path, interruption).train()
    assert (outcome.status, outcome.step, bool(outcome.final)) == (status, 1, status == "done")


def test_a_parser_without_a_descriptor_does_not_blame_the_command_line(monkeypatch, capsys):
    full = Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    monkeypatch.setattr("mprun.config.overrides.OverridesParser.parse_overrides", full)
    line = refused(capsys, "seed=5671", code=5)  # none that was parsed before
    assert line == "mprun: Too many open files\n"


# What torch, the driver, its libraries, Triton and NCCL say; what the line then tells of it.
NO_MEMORY = [
    (RuntimeError("can't start new thread"), "can't start new thread"),
    (RuntimeError("could not create a primitive"), "could not create a primitive"),
    (
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 "
                     "bytes. Error code 12 (Cannot allocate memory)"),
        "asked for 3.00 GiB",
    ),
    (MemoryError("Unable to allocate 2.50 GiB for an array with shape (1,)"), "asked for 2.5 GiB"),
    (MemoryError(), "of Python"),
    (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total "
                               "capacity of 9.00 GiB of which 1.00 GiB is free. See https://a.b/c"),
        "asked for 20 MiB",
    ),
    *(
        (kind(text), text.partition("\n")[0])
        for kind, text in (
            (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
            (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            (RuntimeError, "CUDA driver error: out of memory"),
            (torch.AcceleratorError, "CUDA error: out of memory\nSearch for `cudaErrorMemory`"),
            (RuntimeError, "Triton Error [CUDA]: out of memory"),
            (dist.DistBackendError, "NCCL error: unhandled cuda error\nFailure 2 'out of memory'"),
        )
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("error", "told"), NO_MEMORY)
def test_memory_that_ends_while_training_is_5(error, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mprun.training.loop.Loop.advance", Mock(side_effect=error))
    assert run(tmp_path / "r", *TINY_LM, "train.steps=1") == 5
    line = capsys.readouterr().err.splitlines()[-1]
    free = r"\d+\.\d\d GiB of the host free; try data.batch_size=1"
    assert re.fullmatch(rf"mprun: out of memory: {re.escape(told)}, with {free}", line)
    assert record_of(tmp_path / "r")["status"] == "failed"


def test_a_verb_that_runs_out_of_memory_ends_with_5(monkeypatch, capsys):
    monkeypatch.setattr("mprun.cli.doctor.main", Mock(side_effect=MemoryError))
    assert "mprun: out of memory: of Python" in refused(capsys, "doctor", code=5)


@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "FIND was unable to find an engine to execute this computation",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ],
)
def test_a_workspace_is_what_lacks_only_on_a_full_card(text, monkeypatch):
    assert not ran_out(RuntimeError(text))  # no card here
    for free, full in ((SPARED - 1, True), (SPARED, False)):
        monkeypatch.setattr("mprun.record.memory.card_memory", lambda free=free: (free, 2**34))
        assert ran_out(RuntimeError(text)) is full
    assert not ran_out(ValueError("out of memory"))


def test_what_the_failed_calls_held_is_given_back():
    """The error, which a caller may keep, holds their frames and so their tensors no longer."""

    def call():
        tensor = torch.zeros(3)
        seen.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    seen: list = []
    try:
        call()
    except RuntimeError as error:
        kept = error
    assert seen[0]() is not None
    shortage(kept)
    assert seen[0]() is None


def start(folder, *overrides, **more) -> subprocess.Popen:
    """A run of a million steps, but for what `overrides` say; more: of the process."""
    endless = ["train.steps=1000000", "train.log_every=1", "train.checkpoint_every=1000000"]
    words = but([*LM, "precision=amp", *endless], *overrides, f"output_dir='{folder}'")
    if any(word.startswith("data=") for word in overrides):  # which has no such keys
        words = [word for word in words if not word.startswith(("data.vocab", "data.seq"))]
    return subprocess.Popen([sys.executable, "-m", "mprun", *words], text=True, **more)


SIGNALS = [(signal.SIGINT, 130), (signal.SIGHUP, 75), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)]
SIGNALS += [(signal.SIGUSR2, 75), (signal.SIGXCPU, 75), (signal.SIGALRM, 75)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.few(2)
def test_a_signal_stops_at_a_step_with_a_checkpoint(number, code, tmp_path, monkeypatch, capfd):
    """Sent to this process, from within its third step: the step is ended first."""
    folder, show = tmp_path / "r", Progress.show

    def asked_to_stop(self, step, record):
        show(self, step, record)
        if step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Progress, "show", asked_to_stop)
    length = ["train.steps=1000", "train.log_every=1", "train.checkpoint_every=1000"]
    before = signal.signal(number, signal.SIG_DFL)  # nohup leaves SIGHUP ignored, and mprun too
    try:
        assert run(folder, *TINY_LM, "precision=amp", *length) == code
    finally:
        signal.signal(number, before)
    out, err = capfd.readouterr()
    assert out == f"run: {folder}\n" and "Traceback" not in err
    # What happens is said at once, how to go on at the end.
    assert f"mprun: {number.name}: stopping" in err and f"mprun resume={folder}" in err
    record = record_of(folder)
    assert (record["status"], record["cause"]) == ("preempted", number.name)
    step = record["last_step"]
    assert step in (3, 4)  # of a step that has been shown the next may have begun
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step-{step:08}"]
    # Every step that is done is in the record, and the run goes on from there.
    assert rows_of(folder)[-1]["step"] == step
    assert main([f"resume={folder}", "train.steps=6"]) == 0
    assert [row["step"] for row in rows_of(folder, "train")] == [1, 2, 3, 4, 5, 6]
    assert record_of(folder)["attempts"] == 2


@pytest.mark.slow
def test_a_terminal_gets_a_bar_and_stdout_stays_clean(tmp_path):
    folder = tmp_path / "r"
    ours, theirs = pty.openpty()
    process = start(folder, "train.steps=4", stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    drawn = b""
    with suppress(OSError):  # Linux: the other end of the terminal is closed
        while part := os.read(ours, 65536):
            drawn += part
    out, _ = process.communicate(timeout=300)
    os.close(ours)
    assert (process.returncode, out) == (0, f"run: {folder}\n")
    text = drawn.decode()
    assert "━" in text and "step 1/4  loss" in text and "step 4/4  loss" in text


def test_a_run_in_use_is_refused(tmp_path, capsys):
    folder = tmp_path / "r"
    assert run(folder, *TINY_LM, "train.steps=2", "train.checkpoint_every=1") == 0
    with open(folder / ".lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(capsys, f"resume={folder}", "train.steps=4", says="in use")
    assert main([f"resume={folder}", "train.steps=4"]) == 0


def wait_for(condition, process, seconds=300):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_an_evaluation_is_left_at_once_and_made_up_for(tmp_path, capsys):
    folder = tmp_path / "r"
    long = ["train.eval_every=2", "train.steps=4", "data=synthetic_tokens"]
    process = start(folder, *long, "data.eval_tokens=50000000", stderr=subprocess.PIPE)
    wait_for(lambda: (folder / "run.json").exists() and len(lines_of(folder)) == 2, process)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75 and "Traceback" not in err, err
    # Two seconds, and what a loaded machine takes beside: the evaluation itself takes minutes.
    assert time.monotonic() - asked < 60
    assert record_of(folder)["status"] == "preempted" and "checkpoint at step 2 kept" in err
    # Its records are those of the steps alone; the evaluation comes first when the run goes on.
    assert [record["split"] for record in lines_of(folder)] == ["train", "train"]
    # On fewer tokens, which only a test may do.
    for path in (folder / "config.yaml", folder / "run.json"):
        path.write_text(path.read_text().replace("50000000", "500"))
    record = record_of(folder)
    del record["data"]["sha256"]
    seal_again(folder, data=record["data"], config_hash=config_hash(record["config"]))
    assert main([f"resume={folder}"]) == 0
    kinds = [(record["split"], record["step"]) for record in lines_of(folder)]
    halves = [[("train", last - 1), ("train", last), ("eval", last)] for last in (2, 4)]
    assert kinds == sum(halves, [])


@pytest.mark.slow
def test_compiling_is_left_at_once_and_its_step_is_no_state_to_keep(tmp_path, monkeypatch):
    """It may take minutes, and has moved what is random, and BatchNorm, when it is left."""
    words = [*TINY_AUTOENCODER, "train.steps=3", "train.log_every=1", "train.compile=default"]

    def compiles(self, step):
        step()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # a signal is met here at the latest
        raise AssertionError("goes on")

    monkeypatch.setattr(Compilation, "first_step", compiles)
    folder, whole = tmp_path / "r", tmp_path / "whole"
    assert run(folder, *words) == 75
    assert (record_of(folder)["status"], record_of(folder)["last_step"]) == ("preempted", 0)
    assert not (folder / "checkpoints").exists()
    monkeypatch.setattr(Compilation, "first_step", lambda self, step: step())
    assert main([f"resume={folder}"]) == run(whole, *words) == 0
    losses = [[line["loss"] for line in rows_of(path)] for path in (folder, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


LATE = """
import torch
from torch import nn

@torch.compile(backend="eager", fullgraph=True)
def broken(x):
    torch._dynamo.graph_break()
    return x

class Late(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.out, self.calls = nn.Linear(4096, classes), 0

    def forward(self, images):
        self.calls += self.training
        found = self.out(images.flatten(1))
        return broken(found) if self.calls > 4 else found

def make(data):
    return Late(data.num_classes)
"""


@pytest.mark.slow
def test_an_exception_of_a_compiler_in_a_late_step_is_a_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "late_break.py").write_text(LATE)
    monkeypatch.chdir(tmp_path)
    words = ("model=custom", "model.task=classification", "model.factory=late_break:make")
    assert run(tmp_path / "r", *words, "data=digits_gray_64", "train.steps=9") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("mprun: torch.compile: Unsupported: ")
    assert record_of(tmp_path / "r")["status"] == "failed"


def lines_of(folder) -> list[dict]:
    """Return the record's lines of a run that may not have begun."""
    return rows_of(folder) if (folder / "metrics.jsonl").exists() else []


@pytest.mark.slow
def test_loading_is_left_at_once_and_nothing_is_written(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef make(**_):\n    print('loading', flush=True)\n    time.sleep(600)\n"
    )
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    own = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    process = start(tmp_path / "r", "data=custom", "data.factory=slow:make", env=own, **pipes)
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75 and "mprun: SIGTERM: stopping" in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "where", ["assembly.run.build_data", "record.run_directory.refuse_strange"]
)
def test_asked_to_stop_before_there_is_a_run(where, tmp_path, monkeypatch, capfd):
    """While data load, or between a run's directory and its first file: the same command again."""
    with monkeypatch.context() as patched:
        patched.setattr(f"mprun.{where}", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert run(tmp_path / "r", *TINY_LM, "train.steps=1") == 75
    assert capfd.readouterr().err == "mprun: SIGTERM: stopping\n"
    assert list(tmp_path.iterdir()) == []
    assert run(tmp_path / "r", *TINY_LM, "train.steps=1") == 0


@pytest.mark.parametrize(
    "ending", ["2>/dev/full", "2>&-", ">&- 2>&-", ">/dev/full", "2>&1 | head -1", "2> >(true)"]
)
@pytest.mark.slow
def test_a_terminal_that_goes_away_ends_no_run(ending, tmp_path):
    folder = tmp_path / "r"
    words = [*LM, "precision=amp", "train.steps=30", "train.log_every=1", f"output_dir={folder}"]
    command = f"set -o pipefail; {sys.executable} -m mprun {' '.join(words)} {ending}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert record_of(folder)["status"] == "done" and rows_of(folder)[-1]["step"] == 30


@pytest.mark.slow
def test_a_result_that_cannot_be_written_is_no_success(tmp_path):
    command = f"{sys.executable} -m mprun --cfg job > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 5 and done.stderr == "mprun: No space left on device\n"


@pytest.mark.slow
def test_a_killed_run_without_a_checkpoint_begins_again(tmp_path, capsys):
    folder, whole = tmp_path / "r", tmp_path / "whole"
    process = start(folder, stderr=subprocess.PIPE)
    wait_for(lambda: len(lines_of(folder)) > 3, process)
    process.kill()
    process.communicate()
    assert record_of(folder)["status"] == "running" and not (folder / "checkpoints").exists()
    assert main([f"resume={folder}", "train.steps=5"]) == 0
    assert "starting again at step 1" in capsys.readouterr().err
    assert run(whole, *LM, "precision=amp", "train.log_every=1", "train.steps=5") == 0
    losses = [[line["loss"] for line in rows_of(path)] for path in (folder, whole)]
    assert losses[0] == losses[1] and len(losses[0]) >= 5


def test_the_second_ctrl_c_stops_in_the_middle_of_a_step():
    """Where a state is half a step old: not as an evaluation is left, after which it is saved."""
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt) as stopped:
            os.kill(os.getpid(), signal.SIGINT)
        assert not isinstance(stopped.value, Stopped)
        with pytest.raises(Stopped), interruption.breaks():
            raise AssertionError("asked to stop before")


def test_a_break_that_a_compiler_swallows_is_made_again(monkeypatch):
    monkeypatch.setattr("mprun.training.signals._AGAIN_S", 0.05)
    began = time.monotonic()
    with pytest.raises(Stopped, match="SIGTERM"), Interruption() as interruption:
        with interruption.breaks():
            with suppress(BaseException):
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                time.sleep(20)
            finally:
                time.sleep(0.2)  # on its way out it is not broken again
    assert time.monotonic() - began < 19
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


RAISES_LATE = """
from torch import nn


class Late(nn.Linear):
    def forward(self, images):
        self.calls = getattr(self, "calls", 0) + self.training
        if self.calls > 4:
            raise IndexError("past the end")
        return super().forward(images.flatten(1))


def network(data):
    return Late(3 * 8 * 8, 10)
"""


def test_an_error_in_your_own_code_is_not_called_a_bug_in_mprun(tmp_path, monkeypatch, capsys):
    """Of a step long after the trial at the beginning, which is refused as bad input."""
    (tmp_path / "late.py").write_text(RAISES_LATE)
    monkeypatch.syspath_prepend(tmp_path)
    own = ["model=custom", "model.factory=late:network", "data=synthetic_images"]
    own += ["data.image_size=8", "data.train_size=64", "data.eval_size=16", "data.batch_size=8"]
    assert run(tmp_path / "r", "device=cpu", "threads=1", *own, "train.steps=9") == 1
    last = capsys.readouterr().err.splitlines()[-2:]
    place = "raised in or below late.py, line 9: an error there, or a bug in mprun"
    assert last == ["IndexError: past the end", f"mprun: {place}"]

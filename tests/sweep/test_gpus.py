"""Which GPUs there are, and that each run of a sweep has its own; no GPU is needed."""

import json
import os
import signal
import sys
from pathlib import Path

import pynvml
import pytest

from mprun.cli import main
from mprun.sweeps import attempt as processes
from mprun.sweeps import gpus, run
from mprun.sweeps.attempt import Attempt, Fork, start_child
from mprun.sweeps.gpus import Gpus, visible_gpus
from mprun.sweeps.jobs import Cell
from mprun.sweeps.plan import plan

from ..helpers import but, refused


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """``driver(count, nvml)``: a driver with so many GPUs, seen through NVML or /proc alone."""

    def has(count: int, nvml: bool):
        def begin():
            if not nvml:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        monkeypatch.setattr(pynvml, "nvmlInit", begin)
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: count)
        monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "proc")
        for number in range(count):
            (tmp_path / "proc" / f"0000:0{number}:00.0").mkdir(parents=True)

    return has


@pytest.mark.parametrize("nvml", [True, False])
@pytest.mark.parametrize("count", [0, 3])
def test_without_the_variable_the_driver_counts(count, nvml, driver):
    driver(count, nvml)
    assert visible_gpus() == ["0", "1", "2"][:count]


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("3,1", ["3", "1"]),
        (" 0, 2 ", ["0", "2"]),
        ("GPU-8932f937,MIG-4e2b", ["GPU-8932f937", "MIG-4e2b"]),
        ("MIG-GPU-8932f937/1/0", ["MIG-GPU-8932f937/1/0"]),
        ("0,-1,1", ["0"]),
        *((none, []) for none in ("", "-1", "NoDevFiles")),
    ],
)
def test_the_variable_counts_as_cuda_reads_it(listed, names, driver, monkeypatch):
    driver(8, nvml=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus() == names


def cell_of(name: str, devices: str = "1", device: str = "auto") -> Cell:
    return Cell((), Path(name), name, "fp32", "none", 0, device, devices)


def test_each_has_its_own_until_it_gives_them_back():
    machine = Gpus(["7", "GPU-a", "5"])
    pair, one, other = cell_of("pair", "2"), cell_of("one"), cell_of("other", "1", "cuda")
    on_cpu, whole = cell_of("cpu", "64", "cpu"), cell_of("all", "auto")
    assert machine.take(pair) == {"CUDA_VISIBLE_DEVICES": "7,GPU-a"}
    assert not machine.has_room(whole) and machine.has_room(on_cpu)
    assert machine.take(on_cpu) == {}
    assert machine.take(one) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert not machine.has_room(other)
    machine.give_back(pair)
    assert machine.take(other) == {"CUDA_VISIBLE_DEVICES": "7"}
    assert not machine.has_room(pair)
    for cell in (one, other):
        machine.give_back(cell)
    assert machine.take(whole) == {"CUDA_VISIBLE_DEVICES": "7,GPU-a,5"}


def test_without_gpus_nobody_needs_one():
    machine, cells = Gpus([]), [cell_of("a", "8"), cell_of("b", "auto"), cell_of("c", "1", "cuda")]
    assert machine.at_once(cells) == 3
    assert [machine.take(cell) for cell in cells] == [{}, {}, {}] and machine.has_room(cells[0])


def test_how_many_fit_at_once():
    pairs = [cell_of(f"{n}", "2") for n in range(3)]
    assert Gpus("0123").at_once(pairs) == 2
    assert Gpus("0123").in_words(pairs) == "4 GPUs hold 2 runs of devices=2 at a time"
    mixed = [*pairs, cell_of("a"), cell_of("b", "3"), cell_of("cpu", "1", "cpu")]
    assert Gpus("0123").at_once(mixed) == 3
    words = "4 runs of devices=1 or 2 runs of devices=2 or 1 run of devices=3"
    assert Gpus("0123").in_words(mixed) == f"4 GPUs hold {words} at a time"
    alone = Gpus("0").in_words([cell_of("a", "auto")])
    assert alone == "1 GPU holds 1 run of devices=auto at a time"


class Run:
    """In place of a process: ends, killed, after some looks at it."""

    pid = 2**30  # no process has such a number

    def __init__(self):
        self.looks = 0

    def poll(self) -> int | None:
        self.looks += 1
        return None if self.looks < 4 else -signal.SIGKILL


@pytest.fixture
def started(monkeypatch):
    """Return the GPUs of each run when it starts, and those of all runs at that time."""
    runs, found = {}, []

    def start(arguments, log, environment):
        own = environment.get("CUDA_VISIBLE_DEVICES", "none").split(",")
        runs[new := Run()] = own
        found.append((own, [gpus for one, gpus in runs.items() if one.looks < 4]))
        return new

    monkeypatch.setattr(run, "quickest_start", lambda: start)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("swept", "jobs", "given", "at_once", "told"),
    [
        (["seed=0,1,2,3,4"], 4, ["0", "GPU-b", "MIG-c", "3", "0"], 4, None),
        (["seed=0,1,2", "devices=2"], 8, ["0,GPU-b", "MIG-c,3", "0,GPU-b"], 2, "2 runs"),
        (["devices=3,2,1"], 2, ["0,GPU-b,MIG-c", "3", "0,GPU-b"], 2, None),
        (["seed=0,1", "devices=auto"], 2, ["0,GPU-b,MIG-c,3"] * 2, 1, "1 run"),
        (["seed=0,1"], 1, ["0", "0"], 1, None),
    ],
)
def test_no_gpu_has_two_runs(swept, jobs, given, at_once, told, tiny, started, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-b,MIG-c,3")
    # Each of them is killed, which a sweep ends with: its GPUs come back all the same.
    arguments = but(tiny, "device=auto", "train.accumulate=6", *swept)
    assert main(["-m", *arguments, "-j", str(jobs)]) == 5
    assert [",".join(own) for own, _ in started] == given
    for _, together in started:
        names = [name for own in together for name in own]
        assert len(set(names)) == len(names) <= 4
    assert max(len(together) for _, together in started) == at_once
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("mprun: -j")]
    words = f"mprun: -j {jobs}: 4 GPUs hold {told} of {swept[-1]} at a time"
    assert lines == ([words] if told else [])


def test_runs_on_the_cpu_take_none(tiny, started, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    arguments = [*tiny, "devices=6", "train.accumulate=6", "seed=0,1,2"]
    assert main(["-m", *arguments, "-j", "3"]) == 5
    assert started[-1] == (["none"], [["none"]] * 3)
    assert "mprun: -j" not in capfd.readouterr().err


@pytest.mark.parametrize("start", [start_child, Fork])
def test_a_process_has_the_variables_that_it_is_given(start, tmp_path, monkeypatch, wait_for):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" >&2\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    def child(arguments):
        return 0 * os.write(2, f"{os.environ['CUDA_VISIBLE_DEVICES']}\n".encode())

    monkeypatch.setattr(processes, "child", child)
    for given, seen in (({"CUDA_VISIBLE_DEVICES": "1"}, "1"), ({}, "0,1")):
        process = start(["1"], tmp_path / "log", given)
        wait_for(lambda process=process: process.poll() is not None)
        assert (process.poll(), (tmp_path / "log").read_text()) == (0, f"{seen}\n")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_run_goes_on_with_the_devices_that_it_gets_now(tiny):
    [cell] = plan([*tiny, "devices=2", "train.accumulate=2"], None).cells
    (cell.directory / "checkpoints" / "step-00000001").mkdir(parents=True)
    (cell.directory / ".lock").touch()
    record = {"status": "preempted", "config_hash": cell.config_hash, "config": {"devices": "8"}}
    (cell.directory / "run.json").write_text(json.dumps(record))
    given = []
    Attempt(cell, None, 0, lambda arguments, *more: given.extend(arguments) or Run())
    assert given[1:] == [f"resume={cell.directory}", "devices=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("visible", "arguments", "message"),
    [
        ("0,1,2,3", ["devices=1,8"], "devices=8: 4 GPUs here; must be a whole number from 1 to 4,"),
        ("5", ["devices=2"], "devices=2: 1 GPU here; must be 1 or auto"),
        ("", ["nodes=2"], "nodes=2: a run of a sweep uses one machine (allowed: 1); for several"),
        ("", ["nodes=1,2", "device=cpu"], "nodes=2: a run of a sweep uses one machine"),
    ],
)
def test_more_than_there_are(visible, arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sweep = ["-m", "model=resnet50", "train.accumulate=8", "seed=0,1", *arguments]
    refused(capsys, *sweep, says=f"mprun: {message}")
    assert list(tmp_path.iterdir()) == []


MODULE = """
import os, sys
from torch import nn

def network(data):
    print("GPUs:", os.environ["CUDA_VISIBLE_DEVICES"], file=sys.stderr)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
"""
OWN = ["threads=1", "model=custom", "model.factory=net:network", "data=digits_32", "train.steps=2"]


@pytest.mark.slow
def test_real_runs_see_their_own(tmp_path, start_sweep, monkeypatch):
    """Copies of the sweep; there are no GPUs of these names, so that they compute on the CPU."""
    (tmp_path / "net.py").write_text(MODULE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert start_sweep([*OWN, "seed=0,1", "-j", "2"], tmp_path).wait() == 0
    for cell, name in zip(plan([*OWN, "seed=0,1"], None).cells, "ab", strict=True):
        lines = (cell.directory / "console.log").read_text().splitlines()
        assert {line for line in lines if line.startswith("GPUs:")} == {f"GPUs: GPU-{name}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("swept", "given", "threads"),
    [
        (["seed=0,1", "-j", "1"], None, None),
        (["seed=0,1", "-j", "3"], None, "2"),
        (["seed=0,1", "-j", "8"], None, "1"),
        (["seed=0,1", "-j", "2", "devices=2", "train.accumulate=2"], None, "1"),
        (["seed=0,1", "-j", "3"], "5", None),  # it has that of the sweep
    ],
)
def test_runs_beside_each_other_share_the_cores(swept, given, threads, tiny, monkeypatch):
    found = []

    def start(arguments, log, environment):
        found.append(environment.get("OMP_NUM_THREADS"))
        return Run()

    monkeypatch.setattr(run, "quickest_start", lambda: start)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert main(["-m", *tiny, *swept]) == 5
    assert set(found) == {threads}

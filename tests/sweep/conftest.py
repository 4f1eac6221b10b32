"""Sweeps of tiny runs, and what happens to their processes from outside."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ..helpers import TINY_AUTOENCODER, numbers_of, record_of, run


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    """Runs and tables are written below the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny() -> list[str]:
    """Overrides of a model of a few ms a step."""
    return list(TINY_AUTOENCODER)


@pytest.fixture
def start_sweep():
    """``start_sweep(arguments, cwd)``: `mprun -m` as a process of its own; killed at the end."""
    started = []

    def start(arguments: list[str], cwd: Path) -> subprocess.Popen:
        number = len(started)
        with open(cwd / f"out{number}", "wb") as out, open(cwd / f"err{number}", "wb") as err:
            command = [sys.executable, "-m", "mprun", "-m", *arguments]
            process = subprocess.Popen(
                command, cwd=cwd, stdout=out, stderr=err, start_new_session=True
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def same_as_single(tmp_path):
    """``same_as_single(directory)``: assert that a cell has the records of a run by itself."""

    def compare(directory: Path) -> None:
        record, single = record_of(directory), tmp_path / "single" / directory.name
        run(single, *(o for o in record["overrides"] if not o.startswith("output_dir=")))
        expected = record_of(single)
        for key in ("status", "final", "last_step", "skipped", "config_hash"):
            assert record[key] == expected[key], (directory.name, key)
        assert numbers_of(directory) == numbers_of(single), directory.name

    return compare


@pytest.fixture
def held_at_first_step():
    """``held_at_first_step(directory)``: the id of the cell's process, stopped in its training.

    Waits for the process, then lets it go on for moments until its run.json is there.
    """

    def hold(directory: Path) -> int:
        process = wait_for(lambda: process_of(directory))
        os.kill(process, signal.SIGSTOP)
        while not (directory / "run.json").exists():
            os.kill(process, signal.SIGCONT)
            time.sleep(0.05)
            os.kill(process, signal.SIGSTOP)
        return process

    return hold


@pytest.fixture(name="wait_for")
def wait_for_fixture():
    return wait_for


def wait_for(found, seconds: float = 180.0):
    """Return the value of ``found()`` as soon as it is true."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return value


def process_of(directory: Path) -> int | None:
    """The process of the cell's run: the leader of its group, whose stderr is the cell's log."""
    log = directory.resolve().with_name(f".{directory.name}.log")
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and path.name != str(os.getpid()):
            with suppress(OSError):
                process = int(path.name)
                if os.readlink(path / "fd" / "2") == str(log) and os.getpgid(process) == process:
                    return process
    return None

"""Cells handed to a Hydra launcher, by a folder of files between the sweep and its workers.

    jobs.json      the cells to run
    alive          locked by the sweep while it lives
    stop           appears when the sweep wants its runs to end
    job-N.json     written by the worker of job N: {"state": "running" | "ended", ...}
    driver.log     the launcher's output

The launcher prints, and blocks while its jobs run, so it has a separate process, this module's.
Its workers are reused (joblib) or told to end early (submitit), so each starts a process for a run.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mprun.errors import DONE, PREEMPTED, RESOURCE
from mprun.file_system import is_held, lock
from mprun.record.run_directory import read_json, write_json
from mprun.sweeps.attempt import (
    Attempt,
    AttemptOutcome,
    ProcessEnd,
    attempts_of,
    outcome_of,
    printed_lines,
    start_child,
)
from mprun.sweeps.child import with_parent
from mprun.sweeps.jobs import Cell, State, state_of
from mprun.sweeps.plan import Plan, launch

_CLOSE_S = 60.0  # a launcher has nothing left to do by then


class Batch:
    """Start the launcher for `cells`; `jobs` are their attempts."""

    def __init__(self, planned: Plan, cells: list[Cell], stall_after: float):
        parent = planned.root.resolve() / ".launcher"
        parent.mkdir(parents=True, exist_ok=True)
        name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
        number = len(list(parent.glob(f"{name}*")))
        self.folder = parent / f"{name}-{number}"
        self.folder.mkdir()
        self.alive = open(self.folder / "alive", "w", encoding="utf-8")  # noqa: SIM115
        lock(self.alive)
        write_json(
            self.folder / "jobs.json",
            {
                "launcher": planned.launcher_overrides,
                "cells": [asdict(cell) | {"directory": str(cell.directory)} for cell in cells],
                "config_dir": planned.config_dir,
                "stall_after": stall_after,
                "working_folder": os.getcwd(),
                # On a cluster other machines may not see the lock.
                "ends_with_sweep": planned.launcher != "submitit_slurm",
                "visible_devices": _visible_devices(planned),
            },
        )
        words = [str(os.getpid()), str(self.folder)]
        self.driver = start_child(words, self.folder / "driver.log", {}, __name__)
        self.jobs = [Job(self, number, cell) for number, cell in enumerate(cells)]

    def kill(self) -> None:
        """Kill the launcher now; its workers' runs end with them."""
        with suppress(ProcessLookupError):
            os.killpg(self.driver.pid, signal.SIGKILL)

    def over(self) -> bool:
        """Return whether the launcher has ended; the runs that it left behind then end, too."""
        if self.driver.poll() is not None:
            self.alive.close()
        return self.alive.closed

    def close(self) -> None:
        """Wait until the launcher has cleaned up; all jobs have ended."""
        try:
            self.driver.wait(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.driver.wait()
        self.alive.close()


class Job:
    """The attempt at one cell of a batch; its worker may be on another machine."""

    def __init__(self, batch: Batch, number: int, cell: Cell):
        self.batch, self.cell = batch, cell
        self.path = batch.folder / f"job-{number}.json"
        self.attempts_before = attempts_of(cell)

    @property
    def begun(self) -> bool:  # by a worker
        return self.path.is_file()

    def poll(self) -> AttemptOutcome | None:
        """Return how the attempt ended, or None while it waits or goes on."""
        over = self.batch.over()  # before the file is read: a worker writes it last
        said: dict[str, Any] = read_json(self.path) if self.begun else {"state": "waiting"}
        if said["state"] == "ended":
            return AttemptOutcome(said["words"], said["code"], said["again"])
        # The worker may be gone while the run still saves.
        if not over or state_of(self.cell) is State.IN_USE:
            return None
        printed = printed_lines(self.batch.folder / "driver.log")
        code = f"exit code {self.batch.driver.returncode}"
        cause = f"launcher: {printed[-1] if printed else code}"
        if said["state"] == "running":
            return outcome_of(self.cell, ProcessEnd(RESOURCE, cause=cause), self.attempts_before)
        # Some launchers drop waiting jobs when a worker dies: try again. A launcher that never
        # started any job is broken.
        launched = any(job.begun for job in self.batch.jobs)
        return AttemptOutcome(f"failed: {cause}", RESOURCE, again=launched)

    def stop(self) -> None:
        """Ask all runs of the batch to write a checkpoint and end, and start no others."""
        (self.batch.folder / "stop").touch()

    def kill(self) -> None:
        self.stop()
        self.batch.kill()


def _visible_devices(planned: Plan) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for the runs, None: the launcher's value stays.

    submitit_local hides every GPU unless gpus_per_node is set; device=auto would then silently use
    the CPU.
    """
    overrides = planned.launcher_overrides
    asked = any(text.startswith("hydra.launcher.gpus_per_node=") for text in overrides)
    if planned.launcher != "submitit_local" or asked:
        return None
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all")


def drive(words: list[str]) -> int:
    """Run all jobs of a batch's folder, the only word, in the launcher's process."""
    (folder,) = words
    jobs = read_json(Path(folder) / "jobs.json")
    launch(jobs["launcher"], folder, len(jobs["cells"]), partial(run_job, Path(folder)))
    return DONE


def run_job(folder: Path, config: DictConfig) -> None:
    """Run the cell of `folder`/jobs.json that has Hydra's job number, and write how it ended."""
    jobs = read_json(folder / "jobs.json")
    number = HydraConfig.get().job.num
    os.chdir(jobs["working_folder"])
    if jobs["visible_devices"] == "all":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    elif jobs["visible_devices"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = jobs["visible_devices"]
    cell = cell_of(jobs["cells"][number])
    result = folder / f"job-{number}.json"
    if _unwanted(folder, jobs):
        _end(result, AttemptOutcome("stopped before its first step", PREEMPTED))
        return
    write_json(result, {"state": "running"})
    attempt = Attempt(cell, jobs["config_dir"], jobs["stall_after"])
    try:
        while (outcome := attempt.poll()) is None:
            if _unwanted(folder, jobs):
                attempt.stop()
            time.sleep(0.2)
    except BaseException as error:
        # submitit raises this when the time is up. After SystemExit it will call again.
        attempt.stop()
        while (outcome := attempt.poll()) is None:
            time.sleep(0.2)
        if isinstance(error, Exception):
            _end(result, outcome)
        raise
    _end(result, outcome)


def _end(result: Path, outcome: AttemptOutcome) -> None:
    write_json(result, {"state": "ended", **asdict(outcome)})


def cell_of(fields: dict) -> Cell:
    """Return a cell from its fields as JSON stores them."""
    return msgspec.convert(fields, Cell, dec_hook=lambda kind, text: kind(text))


def _unwanted(folder: Path, jobs: dict) -> bool:
    """Return whether the sweep wants its runs to stop, or is gone."""
    if (folder / "stop").exists():
        return True
    return jobs["ends_with_sweep"] and is_held(folder / "alive") is False


if __name__ == "__main__":
    raise SystemExit(with_parent(sys.argv[1:], drive))

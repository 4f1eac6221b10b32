"""Cells handed to a Hydra launcher: one folder of files between the sweep and its workers.

    jobs.json      what there is to run
    alive          locked by the sweep while it lives
    stop           appears when the sweep wants its runs to end
    job-N.json     written by the worker of job N: {"state": "running" | "ended", ...}
    driver.log     what the launcher prints

The launcher blocks while its jobs run, and prints, so that it has a process of its own.
"""

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime

from mprun.errors import RESOURCE
from mprun.record.run_directory import read_json, write_json
from mprun.sweep.attempt import Ended, Outcome, settle
from mprun.sweep.jobs import Cell, State, look, record_of
from mprun.sweep.launcher import ChosenLauncher
from mprun.sweep.plan import Plan

_CLOSE_S = 60.0  # a launcher has nothing left to do by then


class Batch:
    """Starts the launcher for `cells`; `jobs` are their attempts."""

    def __init__(self, planned: Plan, cells: list[Cell], stall_after: float):
        parent = planned.root.resolve() / ".launcher"
        parent.mkdir(parents=True, exist_ok=True)
        name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
        number = len(list(parent.glob(f"{name}*")))
        self.folder = parent / f"{name}-{number}"
        self.folder.mkdir()
        self.alive = open(self.folder / "alive", "w", encoding="utf-8")  # noqa: SIM115
        fcntl.flock(self.alive, fcntl.LOCK_EX)
        launcher = planned.launcher
        write_json(
            self.folder / "jobs.json",
            {
                "launcher": list(launcher.overrides),
                "cells": [asdict(cell) | {"directory": str(cell.directory)} for cell in cells],
                "config_dir": planned.config_dir,
                "stall_after": stall_after,
                "working_folder": os.getcwd(),
                # On a cluster a lock need not be seen from another machine.
                "ends_with_sweep": launcher.name != "submitit_slurm",
                "visible_devices": _visible_devices(launcher),
            },
        )
        with open(self.folder / "driver.log", "wb") as log:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "mprun.sweep.driver", str(os.getpid()), str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        self.jobs = [Job(self, number, cell) for number, cell in enumerate(cells)]

    def stop(self) -> None:
        """Let the workers end their runs; those that have none yet start none."""
        (self.folder / "stop").touch()

    def kill(self) -> None:
        """End the launcher now; runs of its workers end with them."""
        self.stop()
        with suppress(ProcessLookupError):
            os.killpg(self.driver.pid, signal.SIGKILL)

    def over(self) -> bool:
        """Whether the launcher has ended."""
        if self.driver.poll() is None:
            return False
        self.alive.close()
        return True

    def close(self) -> None:
        """Let the launcher put away its own things; all jobs have ended."""
        try:
            self.driver.wait(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.driver.wait()
        self.alive.close()

    def last_line(self) -> str:
        """What the launcher printed last."""
        text = (self.folder / "driver.log").read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.driver.returncode}"


class Job:
    """The attempt at one cell of a batch; the worker that makes it may be on another machine."""

    def __init__(self, batch: Batch, number: int, cell: Cell):
        self.batch, self.cell = batch, cell
        self.path = batch.folder / f"job-{number}.json"
        before = record_of(cell.directory)
        self.attempts_before = 0 if before is None else before.get("attempts", 0)

    @property
    def begun(self) -> bool:
        """Whether a worker has taken it up."""
        return self.path.is_file()

    def poll(self) -> Outcome | None:
        """How the attempt ended, or None while it waits or goes on."""
        over = self.batch.over()  # before the file is read: a worker writes it last
        found = read_json(self.path) if self.begun else {"state": "waiting"}
        if found["state"] == "ended":
            return Outcome(found["words"], found["code"], found["again"])
        if not over:
            return None
        if look(self.cell) is State.IN_USE:  # its worker is gone, and it writes its checkpoint
            return None
        return self._lost(found["state"])

    def stop(self) -> None:
        """Ask for a checkpoint and the end."""
        self.batch.stop()

    def kill(self) -> None:
        """End it now."""
        self.batch.kill()

    def _lost(self, state: str) -> Outcome:
        cause = f"launcher: {self.batch.last_line()}"
        if state == "running":
            return settle(self.cell, Ended(RESOURCE, cause=cause), self.attempts_before)
        # Some launchers drop what waits when one worker dies; one that runs nothing is broken.
        launched = any(job.begun for job in self.batch.jobs)
        return Outcome(f"failed: {cause}", RESOURCE, again=launched)


def _visible_devices(launcher: ChosenLauncher) -> str | None:
    """CUDA_VISIBLE_DEVICES for the runs, if the launcher's own is not to be used.

    submitit_local hides every GPU unless it is told a number of them: device=auto would silently
    be the CPU.
    """
    asked = any(o.startswith("hydra.launcher.gpus_per_node=") for o in launcher.overrides)
    if launcher.name != "submitit_local" or asked:
        return None
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all")

"""The loop of a sweep: start what waits, watch what runs, stop when asked.

Signals that ask it to stop are noted at once and obeyed by the loop.
"""

import os
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mprun.errors import ASKING, DONE, INTERRUPTED, PREEMPTED, BadInput, MprunError
from mprun.record.console import columns
from mprun.record.run_directory import is_at
from mprun.sweep.attempt import Attempt, Start, exit_code, failed_elsewhere, quickest_start
from mprun.sweep.batch import Batch, Job
from mprun.sweep.gpus import Gpus, available_cores, visible_gpus
from mprun.sweep.jobs import Cell, State, look
from mprun.sweep.plan import Plan, plan
from mprun.sweep.status_page import Board


class StopRequest:
    """While active, the first signal of `ASKING` sets `reason`.

    A second SIGINT sets `insisted`. SIGHUP stays ignored where it was (nohup).
    """

    def __init__(self):
        self.reason: str | None = None
        self.insisted = False
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """INTERRUPTED for Ctrl-C, PREEMPTED for any other signal."""
        return INTERRUPTED if self.reason == "SIGINT" else PREEMPTED

    def __enter__(self) -> "StopRequest":
        for number in ASKING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        if self.reason is None:
            self.reason = signal.Signals(number).name
        elif number == signal.SIGINT:
            self.insisted = True


STALL_AFTER_S = 1800.0
_POLL_S = 0.05
_LOOK_AGAIN_S = 1.0  # at cells that another process has


def sweep(
    overrides: list[str],
    config_dir: str | None = None,
    jobs: int | None = None,
    stall_after: float = STALL_AFTER_S,
    curves: Callable[[list[Path], Path], Path] | None = None,
) -> int:
    """Run all cells, `jobs` (None: 1) at a time; prints the table. 0 if every cell has an outcome.

    Each has GPUs of its own, so that fewer run at a time where there are not enough.

    Args:
        overrides: with several values where the cells differ.
        config_dir: of the user's own options.
        jobs: runs at a time, at most.
        stall_after: seconds without a heartbeat after which a run is killed; 0: never.
        curves: writes the mean curves of the runs in some folders below a root, and says where.
            With it the next commands are printed; without it somebody else goes on.
    """
    planned = plan(overrides, config_dir)
    if planned.launcher and jobs is not None:
        raise BadInput(f"-j {jobs}: not with a launcher, which has a number of its own")
    board = Board(planned, _command(overrides, jobs, config_dir))
    stop = run_planned(planned, board, jobs, stall_after)
    print(board.table(columns(1000, sys.stdout) if sys.stdout.isatty() else None))
    print(f"sweep: {planned.root}", flush=True)
    if curves is not None and stop.code != DONE:
        print(f"to go on: {board.command}", file=sys.stderr)
    if curves is not None and not stop.asked:
        _say_next(planned, curves)
    return stop.code


class Ended(NamedTuple):
    """How a sweep ended: its exit code, and whether it was asked to stop before its end."""

    code: int
    asked: bool


def run_planned(
    planned: Plan, board: Board, jobs: int | None = None, stall_after: float = STALL_AFTER_S
) -> Ended:
    """Run the cells that have no outcome yet, `jobs` (None: 1) at a time, told on `board`."""
    finished = [cell for cell in planned.cells if look(cell) is State.FINISHED]
    waiting = [cell for cell in planned.cells if cell not in finished]
    # A launcher places its jobs itself.
    gpus = Gpus([] if planned.launcher else visible_gpus())
    at_once = gpus.at_once(waiting)
    already = f", {len(finished) if waiting else 'all'} finished already" if finished else ""
    print(f"sweep of {len(planned.cells)} runs in {planned.root}{already}", file=sys.stderr)
    if at_once < min(jobs or 1, len(waiting)):
        print(f"mprun: -j {jobs}: {gpus.in_words(waiting)}", file=sys.stderr)
        jobs = at_once
    for cell in finished:
        board.finished(cell)
    with StopRequest() as stop:
        loop = _Loop(planned, jobs or 1, gpus, stall_after, board, stop)
        codes = loop.run(waiting)
    board.write(now=True)
    asked = stop.reason is not None
    return Ended(stop.exit_code if asked else exit_code(codes), asked)


def _say_next(planned: Plan, curves: Callable[[list[Path], Path], Path]) -> None:
    """The commands that come after a sweep, each in a line of its own."""
    folders = sorted({cell.directory.parent for cell in planned.cells})
    print(f"verdicts: {shlex.join(['mprun', 'compare', *map(str, folders)])}", file=sys.stderr)
    try:
        logdir = shlex.quote(str(curves(folders, planned.root)))
        print(f"curves: tensorboard --logdir {logdir}", file=sys.stderr)
    except (MprunError, OSError) as error:  # no reason to fail what has ended well
        print(f"mprun: no curves: {error}", file=sys.stderr)


def _command(overrides: list[str], jobs: int | None, config_dir: str | None) -> str:
    """What was typed, as one would type it again."""
    command = ["mprun", "-m", *overrides]
    for flag, value in (("-j", jobs), ("--config-dir", config_dir)):
        command += [] if value is None else [flag, str(value)]
    return shlex.join(command)


class _Loop:
    """Starts attempts while there is room for them, until every cell has had one."""

    def __init__(
        self,
        planned: Plan,
        jobs: int,
        gpus: Gpus,
        stall_after: float,
        board: Board,
        stop: StopRequest,
    ):
        self.plan, self.jobs, self.gpus, self.stall_after = planned, jobs, gpus, stall_after
        self.board, self.stop = board, stop
        self.waiting: deque[Cell] = deque()
        self.running: list[Attempt | Job] = []
        self.codes: list[int] = []
        self.look_again = 0.0
        self.told = False
        self.elsewhere: set[Cell] = set()  # cells that another process has had
        self.batch: Batch | None = None
        self.start: Start | None = None  # how a run is started, once one was
        # With one run at a time its progress is shown as it comes.
        self.console = _Console() if jobs == 1 and not planned.launcher else None

    def run(self, cells: list[Cell]) -> list[int]:
        """The exit codes of all attempts."""
        self.waiting.extend(cells)
        try:
            while self.waiting or self.running:
                if self.stop.reason is not None:
                    self._end_all()
                elif self.waiting and time.monotonic() >= self.look_again:
                    self._start()
                self._collect()
                self.board.write()
                time.sleep(_POLL_S)
        except BaseException:
            for attempt in self.running:
                attempt.stop()
            raise
        return self.codes

    def _start(self) -> None:
        room = self._room()
        if room < 1:
            return
        ready: dict[Cell, dict[str, str]] = {}  # with what their environment has more
        for cell in list(self.waiting):
            if len(ready) >= room:
                break
            if not self.gpus.has_room(cell):  # one behind it may need fewer
                continue
            state = look(cell)
            if state is State.IN_USE:
                self.board.in_use(cell)
                self.elsewhere.add(cell)
                continue
            self.waiting.remove(cell)
            outcome = failed_elsewhere(cell) if cell in self.elsewhere else None
            if state is State.FINISHED:
                self.board.finished(cell)
            elif outcome is not None:
                # The other sweep's attempt counts: it would fail here as well.
                self.codes.append(outcome.code)
                self.board.ended(cell, outcome)
            else:
                ready[cell] = self.gpus.take(cell)
        if not ready:
            self.look_again = time.monotonic() + _LOOK_AGAIN_S
        elif self.plan.launcher:
            self.batch = Batch(self.plan, self.plan.launcher, list(ready), self.stall_after)
            self.running = list(self.batch.jobs)
            self.board.words |= dict.fromkeys(ready, "waiting")
        else:
            for cell, environment in ready.items():
                environment |= self._share_of_cores(cell)
                self.board.started_run(cell)
                self.start = self.start or quickest_start()
                self.running.append(
                    Attempt(cell, self.plan.config_dir, self.stall_after, self.start, environment)
                )

    def _share_of_cores(self, cell: Cell) -> dict[str, str]:
        """The environment variable that lets processes beside each other share the cores.

        Where each has as many threads as there are cores, they wait for one another: 40 steps of a
        small GoogLeNet, two runs on two cores, took 8 to 17 s with two threads each, 3 s with one.
        """
        if self.jobs == 1 or "OMP_NUM_THREADS" in os.environ or cell.devices == "auto":
            return {}
        each = available_cores() // (self.jobs * int(cell.devices))
        return {"OMP_NUM_THREADS": str(max(1, each))}

    def _room(self) -> int:
        if self.plan.launcher:
            return 0 if self.running else len(self.waiting)
        return self.jobs - len(self.running)

    def _collect(self) -> None:
        for attempt in list(self.running):
            cell = attempt.cell
            if self.console is not None:
                self.console.follow(cell.log)
            if attempt.begun and self.board.words.get(cell) == "waiting":
                self.board.started_run(cell)
            outcome = attempt.poll()
            if outcome is None:
                continue
            self.running.remove(attempt)
            self.gpus.give_back(cell)
            self.look_again = 0.0  # what has waited for them
            if self.batch is not None and not self.running:
                self.batch.close()
            if self.console is not None:
                self.console.close()
            if not outcome.again:
                self.codes.append(outcome.code)
                self.board.ended(cell, outcome)
            else:
                self.board.words.pop(cell, None)
                self.waiting.append(cell)

    def _end_all(self) -> None:
        self.waiting.clear()
        if not self.told:
            self.told = True
            print(
                f"mprun: {self.stop.reason}: stopping {len(self.running)} runs at their next step"
                " (Ctrl-C again: kill them)",
                file=sys.stderr,
            )
        for attempt in self.running:
            if self.stop.insisted:
                attempt.kill()
            else:
                attempt.stop()


class _Console:
    """Copies what one run prints to stderr while it grows."""

    def __init__(self) -> None:
        self.file: BinaryIO | None = None

    def follow(self, path: Path) -> None:
        if self.file is None or not is_at(self.file, path):
            self.close()
            try:
                self.file = open(path, "rb")  # noqa: SIM115 - until the run has ended
            except FileNotFoundError:
                return
        _copy(self.file)

    def close(self) -> None:
        if self.file is not None:
            _copy(self.file)
            self.file.close()
            self.file = None


def _copy(file: BinaryIO) -> None:
    sys.stderr.write(file.read().decode("utf-8", "replace"))
    sys.stderr.flush()

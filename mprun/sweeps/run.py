"""The loop of a sweep: start waiting cells, watch running ones, stop when asked."""

import os
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mprun.errors import DAMAGED, DONE, INTERRUPTED, PREEMPTED, BadInput, MprunError
from mprun.record.console import columns, draws, to_watch
from mprun.record.run_directory import is_at
from mprun.sweeps.attempt import Attempt, Start, exit_code, failed_elsewhere, quickest_start
from mprun.sweeps.batch import Batch, Job
from mprun.sweeps.foresight import foresight
from mprun.sweeps.gpus import Gpus, available_cores, visible_gpus
from mprun.sweeps.jobs import Cell, State, damage_of, put_aside, state_of
from mprun.sweeps.plan import Plan, plan
from mprun.sweeps.status_page import StatusPage
from mprun.sweeps.until import SeedRounds
from mprun.training.signals import Interruption


class StopRequest(Interruption):
    """Note signals while active: the first sets `reason`, a second SIGINT sets `insisted`."""

    insisted = False

    @property
    def exit_code(self) -> int:
        """Return INTERRUPTED for Ctrl-C, PREEMPTED for any other signal."""
        return INTERRUPTED if self.reason == "SIGINT" else PREEMPTED

    def _note(self, number: int, frame) -> None:
        if self.reason is None:
            self.reason = signal.Signals(number).name
        elif number == signal.SIGINT:
            self.insisted = True


STALL_AFTER_S = 1800.0
_POLL_S = 0.05
_MOST_NAMED = 8  # stopped cells
_LOOK_AGAIN_S = 1.0  # between two looks at cells that another process has


def sweep(
    overrides: list[str],
    config_dir: str | None = None,
    jobs: int | None = None,
    stall_after: float = STALL_AFTER_S,
    rerun_damaged: bool = False,
    says_next: bool = False,
) -> int:
    """Run all cells and print the table; return 0 if every cell has an outcome, or the worst code.

    At most `jobs` (None: 1) runs go at a time, and fewer if they have too few GPUs.

    Args:
        overrides: with several values for the keys that differ between cells.
        stall_after: seconds without a heartbeat after which a run is killed; 0: never.
        rerun_damaged: whether finished runs with damaged files are put aside and run again.
        says_next: whether the commands that go on are printed, and mean curves written for them.
    """
    planned = plan(overrides, config_dir)
    if planned.launcher and jobs is not None:
        raise BadInput(
            f"-j {jobs}: is not allowed with a launcher, which sets its own number of jobs"
        )
    command = ["mprun", "-m", *overrides]
    for flag, value in (("-j", jobs), ("--config-dir", config_dir)):
        command += [] if value is None else [flag, str(value)]
    page = StatusPage(planned, shlex.join(command))
    loop = SweepLoop(page, jobs, stall_after, rerun_damaged)
    if loop.waiting and (line := foresight(planned)) is not None:
        print(line, file=sys.stderr)
    code = loop.run()
    print(page.table(columns(1000, sys.stdout) if sys.stdout.isatty() else None))
    if isinstance(loop.rounds, SeedRounds):
        loop.rounds.say()
    print(f"sweep: {planned.root}", flush=True)
    if not says_next:
        return code
    for line in page.to_finish()[:_MOST_NAMED]:
        print(line, file=sys.stderr)
    if code != DONE:
        again = " --rerun-damaged" if loop.left_damaged else ""
        print(f"to go on: {page.command}{again}", file=sys.stderr)
    if loop.stop.reason is None:
        _say_next(planned)
    return code


def _say_next(planned: Plan) -> None:
    from mprun.comparison.tensorboard_summary import write_means  # here: both load numpy
    from mprun.comparison.verdict import comparable

    folders = sorted({cell.directory.parent for cell in planned.cells})
    if comparable(*folders):
        words = ["mprun", "compare", *map(str, folders)]
        print(f"verdicts: {shlex.join(words)}", file=sys.stderr)
    try:
        print(to_watch(write_means(folders, planned.root)), file=sys.stderr)
    except (MprunError, OSError) as error:  # the sweep itself has ended well
        print(f"mprun: no curves: {error}", file=sys.stderr)


class SweepLoop:
    """Start attempts at the cells without an outcome while there is room, and report on `page`.

    jobs: runs at a time, at most; None: 1.
    """

    def __init__(
        self,
        page: StatusPage,
        jobs: int | None = None,
        stall_after: float = STALL_AFTER_S,
        rerun_damaged: bool = False,
    ):
        self.page, self.plan, self.stall_after = page, page.plan, stall_after
        self.stop = StopRequest()
        # A launcher places its jobs itself.
        self.gpus = Gpus([] if self.plan.launcher else visible_gpus())
        self.codes: list[int] = []
        self.rerun_damaged, self.left_damaged = rerun_damaged, False
        self.waiting: deque[Cell] = deque()
        self.rounds: Iterable[Sequence[Cell]] = [self.plan.cells]
        if self.plan.until is not None:
            self.rounds = SeedRounds(self.plan.cells, page)
        self.following = iter(self.rounds)
        finished = self._take(next(self.following))
        count, at_once = len(self.waiting), self.gpus.at_once(self.waiting)
        whole = "all" if finished == len(page.cells) else finished
        already = f", {whole} finished already" if finished else ""
        what = f"{len(page.cells)} runs in {self.plan.root}"
        if isinstance(self.rounds, SeedRounds) and self.plan.until is not None:
            what += f", then more until decided, at most {self.plan.until.most} seeds"
            already = f", {self.rounds.finished} finished already" if finished else ""
        print(f"sweep of {what}{already}", file=sys.stderr)
        self.jobs = jobs or 1
        if at_once < min(self.jobs, count):
            print(f"mprun: -j {jobs}: {self.gpus.in_words(self.waiting)}", file=sys.stderr)
            self.jobs = at_once
        self.running: list[Attempt | Job] = []
        self.look_again = 0.0
        self.announced = False  # whether the user has been told of the stop
        self.elsewhere: set[Cell] = set()  # cells that another process has had
        self.batch: Batch | None = None
        self.start: Start | None = None  # the way to start a run, chosen at the first one
        # A single run at a time shows its progress directly.
        self.console = _Console() if self.jobs == 1 and not self.plan.launcher else None
        page.follows = self.console is None and draws(sys.stderr)

    def _take(self, cells: Sequence[Cell]) -> int:
        """Let the cells of a round wait, but for the finished ones; return how many those are."""
        ended = (State.FINISHED, State.DAMAGED)
        finished = [cell for cell in cells if state_of(cell) in ended]
        found = ((cell, damage_of(cell.directory)) for cell in finished)
        damaged = {cell: damage for cell, damage in found if damage is not None}
        finished = [cell for cell in finished if cell not in damaged]
        left_out = {*finished, *(() if self.rerun_damaged else damaged)}
        if self.plan.until is not None:
            self.page.cells += cells
        self.waiting += (cell for cell in cells if cell not in left_out)
        self.left_damaged |= bool(damaged) and not self.rerun_damaged
        for cell, damage in damaged.items():
            if self.rerun_damaged:
                put_aside(cell, finished=True)
                print(f"mprun: {damage}; it is put aside and run again", file=sys.stderr)
            else:
                self.page.damaged(cell, damage)
                self.codes.append(DAMAGED)
        for cell in finished:
            self.page.finished(cell)
        return len(finished)

    def _goes_on(self) -> bool:
        """Return whether runs are left, of this round or of another one."""
        while not (self.waiting or self.running) and self.stop.reason is None:
            if (cells := next(self.following, None)) is None:
                return False
            self._take(cells)
        return bool(self.waiting or self.running)

    def run(self) -> int:
        """Run the cells; return the exit code of the sweep."""
        try:
            with self.stop:
                while self._goes_on():
                    if self.stop.reason is not None:
                        self._end_all()
                    elif self.waiting and time.monotonic() >= self.look_again:
                        self._start()
                    self._collect()
                    self.page.write()
                    self.page.follow()
                    time.sleep(_POLL_S)
        except BaseException:
            for attempt in self.running:
                attempt.stop()
            raise
        self.page.write(now=True)
        return exit_code(self.codes) if self.stop.reason is None else self.stop.exit_code

    def _start(self) -> None:
        room = self.jobs - len(self.running)
        if self.plan.launcher:
            room = 0 if self.running else len(self.waiting)
        if room < 1:
            return
        ready = self._ready(room)
        if not ready:
            self.look_again = time.monotonic() + _LOOK_AGAIN_S
        elif self.plan.launcher:
            self.batch = Batch(self.plan, list(ready), self.stall_after)
            self.running = list(self.batch.jobs)
            self.page.words |= dict.fromkeys(ready, "waiting")
        else:
            for cell, environment in ready.items():
                environment |= self._share_of_cores(cell)
                self.page.started_run(cell)
                self.start = self.start or quickest_start()
                self.running.append(
                    Attempt(cell, self.plan.config_dir, self.stall_after, self.start, environment)
                )

    def _ready(self, most: int) -> dict[Cell, dict[str, str]]:
        """Return waiting cells that can start now, with their additional environment variables.

        Those that have ended meanwhile, here or in another sweep, wait no longer.
        """
        ready: dict[Cell, dict[str, str]] = {}
        for cell in list(self.waiting):
            if len(ready) >= most:
                break
            if not self.gpus.has_room(cell):  # a later cell may need fewer
                continue
            state = state_of(cell)
            if state is State.IN_USE:
                self.page.in_use(cell)
                self.elsewhere.add(cell)
                continue
            self.waiting.remove(cell)
            outcome = failed_elsewhere(cell) if cell in self.elsewhere else None
            if state is State.FINISHED:
                self.page.finished(cell)
            elif outcome is not None:
                # The other sweep's attempt counts: the cell would fail here, too.
                self.codes.append(outcome.code)
                self.page.ended(cell, outcome)
            else:
                ready[cell] = self.gpus.take(cell)
                if state is State.RESUMABLE:
                    self.page.resumed.add(cell)
        return ready

    def _share_of_cores(self, cell: Cell) -> dict[str, str]:
        """Return the environment variable that makes simultaneous runs share the cores.

        Runs with as many threads each as there are cores wait for one another. 40 steps of a small
        GoogLeNet, two runs on two cores, took 8 to 17 s with two threads each, 3 s with one.
        """
        if self.jobs == 1 or "OMP_NUM_THREADS" in os.environ or cell.devices == "auto":
            return {}
        each = available_cores() // (self.jobs * int(cell.devices))
        return {"OMP_NUM_THREADS": str(max(1, each))}

    def _collect(self) -> None:
        for attempt in list(self.running):
            cell = attempt.cell
            if self.console is not None:
                self.console.follow(cell.log)
            if isinstance(attempt, Job) and attempt.begun and self.page.words[cell] == "waiting":
                self.page.started_run(cell)
            outcome = attempt.poll()
            if outcome is None:
                continue
            self.running.remove(attempt)
            self.gpus.give_back(cell)
            self.look_again = 0.0  # a cell may have waited for these GPUs
            if self.batch is not None and not self.running:
                self.batch.close()
            if self.console is not None:
                self.console.close()
            if not outcome.again:
                self.codes.append(outcome.code)
                self.page.ended(cell, outcome)
            else:
                self.page.words.pop(cell, None)
                self.waiting.append(cell)

    def _end_all(self) -> None:
        self.waiting.clear()
        if not self.announced:
            self.announced = True
            stopping = f"stopping {len(self.running)} runs at their next step"
            self.page.tell(f"mprun: {self.stop.reason}: {stopping} (Ctrl-C again: kill them)")
        for attempt in self.running:
            attempt.kill() if self.stop.insisted else attempt.stop()


class _Console:
    """Copy one run's growing log to stderr."""

    def __init__(self) -> None:
        self.file: BinaryIO | None = None

    def follow(self, path: Path) -> None:
        if self.file is None or not is_at(self.file, path):
            self.close()
            with suppress(FileNotFoundError):
                self.file = open(path, "rb")  # noqa: SIM115 - until the run has ended
        self._copy()

    def close(self) -> None:
        if self.file is not None:
            self._copy()
            self.file.close()
            self.file = None

    def _copy(self) -> None:
        if self.file is not None:
            sys.stderr.write(self.file.read().decode("utf-8", "replace"))
            sys.stderr.flush()

"""Commands side by side with a time limit each, ended with all processes that they started.

Each is started by `gpu_check_processes.py PARENT_ID COMMAND...` and ends with its parent.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 8  # time for a test run to report failures, for a run to write its record
LOOK_EVERY_S = 10  # most of a running step that a kill of everything can lose


@dataclass(frozen=True, slots=True)
class Step:
    """One command. share: of its part's time, where steps follow one another; most: seconds.

    accepted: exit codes that are no failure. table: a Markdown file from the command for the
    summary; None: its stdout is the table, in Markdown or `plain`. record: a JSON file, or a log of
    tests (.jsonl), from the command.
    """

    name: str
    command: list[str]
    share: float = 1.0
    most: float = float("inf")
    accepted: tuple[int, ...] = (0,)
    table: Path | None = None
    record: Path | None = None
    plain: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def allotted(remaining: float, weights: list[float]) -> float:
    """Return the seconds for the first of several pieces of work; the others get its rest."""
    return max(remaining, 0.0) * weights[0] / sum(weights)


class Running:
    """A started command, its stdout and stderr in files of `folder`.

    After `limit` seconds it is interrupted, like by Ctrl-C: pytest then reports failures, and mprun
    writes its record. `GRACE_S` later it is killed.

    Attributes:
        out, err: the files.
        seconds, code: of the command; the exit code is None if it was interrupted.
        ended, overran: whether it has.
    """

    def __init__(self, step: Step, limit: float, folder: Path, environment: dict[str, str]):
        self.step, self.limit = step, limit
        self.out, self.err = (folder / f"{step.name}.{kind}.txt" for kind in ("out", "err"))
        self.code: int | None = None
        self.ended = self.overran = False
        self._begun, self._seconds = time.monotonic(), 0.0
        self._interrupted: float | None = None
        self._descendants: set[int] = set()
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # In the background of a script interrupts are ignored, and children inherit that.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(self.out, "wb") as stdout, open(self.err, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(os.getpid()), *step.command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment | dict(step.environment),
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return self._seconds if self.ended else time.monotonic() - self._begun

    def check(self) -> None:
        """Notice the end of the command; bring it about where its time is over."""
        if self.ended:
            return
        if (code := self.process.poll()) is not None:
            self._end(None if self._interrupted else code)
        elif self._interrupted is None:
            if self.seconds >= self.limit:
                self.overran = True
                self.interrupt()
        elif time.monotonic() >= self._interrupted + GRACE_S:
            self._end(None)

    def interrupt(self) -> None:
        self._interrupted = time.monotonic()
        # Runs of a sweep have separate process groups: killing the group would not reach them, and
        # once their parent is gone nothing tells whose they are.
        self._descendants = _descendants(self.process.pid)
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGINT)

    def _end(self, code: int | None) -> None:
        for pid in self._descendants | _descendants(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver can hold a dead process for a while
            self.process.wait(2)
        self._seconds, self.code, self.ended = self.seconds, code, True


def wait_for(running: Sequence[Running], look: Callable[[], None] = lambda: None) -> None:
    """Wait until all have ended; whatever is raised meanwhile ends them first.

    look: called as each of them ends, and again and again while they run.
    """
    try:
        looked, left = time.monotonic(), len(running)
        while left:
            time.sleep(0.02)
            for one in running:
                one.check()
            still = sum(not one.ended for one in running)
            if still < left or time.monotonic() - looked >= LOOK_EVERY_S:
                looked, left = time.monotonic(), still
                look()
    except BaseException:
        for one in running:
            if not one.ended:
                one.interrupt()
        while not all(one.ended for one in running):
            time.sleep(0.02)
            for one in running:
                one.check()
        raise


def _descendants(pid: int) -> set[int]:
    """Return the descendants of `pid` that /proc now shows; none without /proc."""
    found, waiting = set(), [pid]
    while waiting:
        parent = waiting.pop()
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                new = {int(child) for child in children.read_text().split()} - found
                found |= new
                waiting += new
    return found


def _start(parent: int, command: list[str]) -> int:
    """Become the command; exit code 127 if it does not exist, as in a shell."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mprun.training.signals import end_with_parent

    if not end_with_parent(parent):
        return 127
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(_start(int(sys.argv[1]), sys.argv[2:]))

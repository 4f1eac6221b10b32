"""Commands with a time limit, ended with all processes that they started.

Each is started by `gpu_check_processes.py PARENT_ID COMMAND...` and ends with its parent.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 8  # time for a test run to report failures, for a run to write its record
LOOK_EVERY_S = 10  # most of a running step that a kill of everything can lose


@dataclass(frozen=True, slots=True)
class Step:
    """One command. share: share of its part's time, but `least` seconds of it. accepted: exit codes
    that are no failure.

    table: a Markdown file from the command for the summary; None: its stdout is the table, in
    Markdown or `plain`. record: a JSON file, or a log of tests (.jsonl), from the command.
    """

    name: str
    command: list[str]
    share: float = 1.0
    accepted: tuple[int, ...] = (0,)
    table: Path | None = None
    record: Path | None = None
    plain: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a command. code: exit code, None if it overran its limit and was ended."""

    code: int | None
    seconds: float


def allotted(remaining: float, weights: list[float]) -> float:
    """Return the seconds for the first of several pieces of work; the others get its rest."""
    return max(remaining, 0.0) * weights[0] / sum(weights)


def run_limited(
    step: Step,
    limit: float,
    out: Path,
    err: Path,
    environment: dict,
    look: Callable[[], None] = lambda: None,
) -> Ended:
    """Run the command, stdout and stderr into files; after `limit` seconds interrupt, then kill.

    The interrupt is like Ctrl-C: pytest then reports failures, and mprun writes its record. look:
    called again and again while the command runs.
    """
    started = time.monotonic()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In the background of a script interrupts are ignored, and our children would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid()), *step.command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment | dict(step.environment),
            start_new_session=True,
        )
        try:
            code = _wait(process, started, limit, look)
        except BaseException:
            _end(process)
            raise
        if code is None:
            _end(process)
    return Ended(code, time.monotonic() - started)


def _wait(process: subprocess.Popen, started: float, limit: float, look: Callable) -> int | None:
    """Return the exit code; None if the process still runs after `limit` seconds."""
    while (left := started + limit - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(min(left, LOOK_EVERY_S))
        look()
    return process.poll()


def _end(process: subprocess.Popen) -> None:
    """Interrupt the process; after `GRACE_S` kill it and its descendants.

    Runs of a sweep have separate process groups: killing the group would not reach them.
    """
    begun = _descendants(process.pid)
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    for pid in begun | _descendants(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


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

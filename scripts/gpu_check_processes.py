"""Commands with a time limit, ended with all that they have started."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 8  # a test run writes its report, a run its record


@dataclass(frozen=True, slots=True)
class Step:
    """One command. share: of its part's time. accepted: exit codes that are no failure.

    table: a file that the command writes, in Markdown, for the summary; None: its stdout is that,
    in Markdown or `plain`. record: a JSON file, or a JUnit report (.xml), that it writes.
    """

    name: str
    command: list[str]
    share: float = 1.0
    accepted: tuple[int, ...] = (0,)
    table: Path | None = None
    record: Path | None = None
    plain: bool = False
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. code: exit code, None where it overran its limit and was ended."""

    code: int | None
    seconds: float


def allotted(remaining: float, weights: list[float]) -> float:
    """Seconds for the first of several pieces of work; what it leaves goes to the others."""
    return max(remaining, 0.0) * weights[0] / sum(weights)


def run_limited(step: Step, limit: float, out: Path, err: Path, environment: dict) -> Ended:
    """Run the command, stdout and stderr into files; after `limit` seconds interrupt, then kill.

    Interrupted first, as by Ctrl-C: pytest then writes its report, and mprun its record.
    """
    started = time.monotonic()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background of a script: what we start would ignore the interruption too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        try:
            process = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment | dict(step.environment),
                start_new_session=True,
            )
        except OSError as error:
            stderr.write(f"{step.command[0]}: {error.strerror}\n".encode())
            return Ended(127, 0.0)
        try:
            code = process.wait(limit)
        except BaseException as error:
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
    return Ended(code, time.monotonic() - started)


def _end(process: subprocess.Popen) -> None:
    """Interrupt the process; after `GRACE_S` kill it and its descendants.

    Runs of a sweep are in process groups of their own, so the group alone would not reach them.
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
    """Processes started by `pid`, and by those, as /proc tells now; none without /proc."""
    found, waiting = set(), [pid]
    while waiting:
        parent = waiting.pop()
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                new = {int(child) for child in children.read_text().split()} - found
                found |= new
                waiting += new
    return found

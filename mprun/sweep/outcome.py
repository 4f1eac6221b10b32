"""How a cell ended, in words; and a run.json that tells it."""

import signal
from dataclasses import dataclass
from datetime import UTC, datetime

from mprun.errors import (
    BAD_INPUT,
    BUG,
    DAMAGED,
    DIVERGED,
    DONE,
    INTERRUPTED,
    PREEMPTED,
    RESOURCE,
    BadInput,
)
from mprun.record.run_directory import locked, write_json
from mprun.sweep.jobs import Cell, record_of
from mprun.sweep.mode_table import outcome_words
from mprun.sweep.processes import Ended

# From bad to bearable: a sweep ends with the first of these that one of its cells ended with.
_SEVERITY = (BUG, DAMAGED, RESOURCE, BAD_INPUT, INTERRUPTED, PREEMPTED)


_CODES = {"done": DONE, "diverged": DIVERGED, "preempted": PREEMPTED}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one attempt at a cell.

    code: an exit code of mprun's, RESOURCE for a process that was killed. again: another process
    has the cell, so that this attempt says nothing.
    """

    words: str
    code: int = DONE
    again: bool = False


def exit_code(codes: list[int]) -> int:
    """The exit code of a sweep: DONE if every cell has an outcome, else the worst."""
    return next((code for code in _SEVERITY if code in codes), DONE)


def settle(cell: Cell, ended: Ended, attempts_before: int) -> Outcome:
    """Say how the process of a cell ended, and correct a run.json that still says `running`.

    attempts_before: `attempts` of run.json before the process was started.
    """
    code = ended.code if ended.code >= 0 else RESOURCE
    record = record_of(cell.directory)
    if record is None or record.get("attempts", 0) <= attempts_before:
        # It ended before its first step.
        return Outcome(_without_record(cell, ended), code)
    if record["status"] == "running" or ended.hung_s is not None:
        try:
            with locked(cell.directory):
                record = _corrected(cell, ended)
        except BadInput:
            return Outcome("in use by another process", again=True)
        except OSError:  # a full disk must not end the sweep as well
            return Outcome(_without_record(cell, ended), code)
    if ended.hung_s is None:
        code = _CODES.get(record["status"], code)
    return Outcome(outcome_words(record), code)


def failed_elsewhere(cell: Cell) -> Outcome | None:
    """The outcome of a cell that another process had, if it failed there; None otherwise."""
    record = record_of(cell.directory)
    if record is None or record["status"] != "failed":
        return None
    words = outcome_words(record)
    return Outcome(words, BUG if words.startswith("failed") else RESOURCE)


def _corrected(cell: Cell, ended: Ended) -> dict:
    record = record_of(cell.directory)
    words = _without_record(cell, ended)
    if record["status"] == "running":
        # SIGTERM between the first record and the first step: interrupted, as a step later.
        stopped = ended.code == -signal.SIGTERM and ended.hung_s is None
        record["status"] = "preempted" if stopped else "failed"
        record["cause"] = "SIGTERM" if stopped else words.removeprefix("failed: ")
        record["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
    elif record["status"] == "preempted" and ended.hung_s is not None:
        # Slow rather than dead: it has written a checkpoint after all.
        record["cause"] = f"hung: no progress for {ended.hung_s:g} s, stopped"
    write_json(cell.directory / "run.json", record)
    return record


def _without_record(cell: Cell, ended: Ended) -> str:
    if ended.cause is not None:
        return f"failed: {ended.cause}"
    if ended.hung_s is not None:
        return f"hung: no progress for {ended.hung_s:g} s, killed"
    if ended.code in (PREEMPTED, INTERRUPTED, -signal.SIGTERM):
        return "stopped before its first step"
    if ended.code < 0:
        return f"killed by {_signal_name(-ended.code)}"
    return f"failed: {last_line(cell) or f'exit code {ended.code}'}"


def last_line(cell: Cell) -> str:
    """The last line that the process of a cell printed, without the name of the program."""
    for path in (cell.log, cell.directory / "console.log"):
        try:
            lines = path.read_bytes().decode("utf-8", "replace").splitlines()
        except OSError:
            continue
        lines = [line.strip() for line in lines if line.strip()]
        # Behind a traceback, whose own last line says more.
        if len(lines) > 1 and lines[-1] == "mprun: this is a bug in mprun":
            lines.pop()
        return lines[-1].removeprefix("mprun: ") if lines else ""
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"

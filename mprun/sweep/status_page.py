"""What is known about every cell of a sweep: printed line by line, kept up to date in a file."""

import hashlib
import json
import math
import os
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from mprun.record.console import markdown_table
from mprun.sweep.attempt import Outcome, last_line
from mprun.sweep.jobs import OUTCOMES, Cell, outcome_words, record_of
from mprun.sweep.mode_table import short, table, without_record
from mprun.sweep.plan import Plan

_EVERY_S = 10.0  # at least this often the file shows how far the runs are
_TAIL_BYTES = 8192  # of metrics.jsonl, for its last record


class Board:
    """The file `sweep-XXXXXXXX.md` in the sweep's root, named after its cells."""

    def __init__(self, planned: Plan, command: str):
        self.plan, self.command = planned, command
        names = sorted(self._name(cell) for cell in planned.cells)
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
        self.path = planned.root / f"sweep-{digest}.md"
        self.words: dict[Cell, str] = {}  # "waiting": in a launcher's queue
        self.since: dict[Cell, float] = {}
        self.seconds: dict[Cell, float] = {}
        self.started = _now()
        self.written = -math.inf
        self.numbers: dict[Cell, int] = {}  # in the order in which cells finish or start

    def finished(self, cell: Cell) -> None:
        """The cell has an outcome that this sweep did not make."""
        self._number(cell)
        self.words[cell] = outcome_words(record_of(cell.directory) or {"status": "failed"})
        self.written = -math.inf

    def started_run(self, cell: Cell) -> None:
        """A run of the cell starts."""
        self.words[cell], self.since[cell] = "running", time.monotonic()
        self._say(f"[{self._number(cell)}/{len(self.plan.cells)}] {cell.directory.name}")
        self.written = -math.inf

    def in_use(self, cell: Cell) -> None:
        """Another process has the cell: a second sweep, or a run that a killed sweep left."""
        words = "in use by another process"
        if self.words.get(cell) != words:
            self.words[cell] = words
            self._say(f"  {cell.directory.name}: {words}; waiting for it")

    def ended(self, cell: Cell, outcome: Outcome) -> None:
        """An attempt at the cell has ended."""
        self.words[cell] = outcome.words
        if cell in self.since:
            self.seconds[cell] = time.monotonic() - self.since[cell]
        self._say(f"  {cell.directory.name}: {outcome.words} (exit {outcome.code})")
        line = last_line(cell)
        if outcome.code not in (0, 3) and line and line not in outcome.words:
            self._say(f"    {line}")
        self.written = -math.inf

    def table(self) -> str:
        """The mode table over all cells that have been started."""
        records = [found for cell in self.plan.cells if (found := self._record(cell)) is not None]
        return table(records, self.plan.swept)

    def write(self, now: bool = False) -> None:
        """Rewrite the file if something has happened or its progress is old."""
        if not now and time.monotonic() - self.written < _EVERY_S:
            return
        self.written = time.monotonic()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        # A full disk must not end the runs that need none.
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self._text(), encoding="utf-8")
            os.replace(temporary, self.path)

    def _text(self) -> str:
        rows = [self._row(cell) for cell in self.plan.cells]
        header = ["run", "status", "step", "loss", "seconds"]
        return (
            f"# Sweep of {len(rows)} runs\n\n    {self.command}\n\n"
            f"started {self.started}, updated {_now()}\n\n"
            f"{markdown_table(header, rows)}\n\n{self.table()}\n"
        )

    def _row(self, cell: Cell) -> list[str]:
        record = record_of(cell.directory) or {}
        newest = _last_record(cell.directory / "metrics.jsonl")
        step = record.get("last_step") or newest.get("step")
        loss = record.get("final", {}).get("loss", newest.get("loss"))
        seconds = record.get("seconds") if record.get("status") in OUTCOMES else None
        if seconds is None and self.words.get(cell) == "running":
            seconds = time.monotonic() - self.since[cell]
        seconds = self.seconds.get(cell) if seconds is None else seconds
        return [
            self._name(cell),
            short(self._status(cell, record), 120),
            "" if step is None else f"{step}/{record.get('steps', '?')}",
            "" if loss is None else f"{float(loss):.4f}",
            "" if seconds is None else f"{seconds:.0f}",
        ]

    def _status(self, cell: Cell, record: dict) -> str:
        if cell in self.words:
            return self.words[cell]
        return outcome_words(record) if record.get("status") in OUTCOMES else "waiting"

    def _record(self, cell: Cell) -> dict | None:
        words = self.words.get(cell, "")
        if (record := record_of(cell.directory)) is not None:
            return record
        ended = words.startswith(("failed", "killed", "hung"))
        return without_record(cell, words) if ended else None

    def _name(self, cell: Cell) -> str:
        return cell.directory.relative_to(self.plan.root).as_posix()

    def _number(self, cell: Cell) -> int:
        return self.numbers.setdefault(cell, len(self.numbers) + 1)

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _last_record(path: Path) -> dict:
    """The last whole record of a metrics.jsonl, from its end; {} if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                return record
    return {}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

"""The status of every cell of a sweep: printed line by line, and kept up to date in a file."""

import hashlib
import json
import math
import os
import shutil
import statistics
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from mprun.errors import DIVERGED, DONE, PREEMPTED, shortened
from mprun.record.console import columns, counted, markdown_table
from mprun.record.keys import flat
from mprun.record.run_directory import write_text
from mprun.record.run_record import OUTCOMES, now
from mprun.sweeps.attempt import AttemptOutcome, last_line
from mprun.sweeps.jobs import Cell, State, outcome_words, record_of, state_of
from mprun.sweeps.mode_table import table, without_record
from mprun.sweeps.plan import Plan
from mprun.training.next_commands import commands

_LOOK_S = 1.0  # between two looks at running cells, for a terminal
_EVERY_S = 10.0  # longest time between two updates of the runs' progress in the file
_TAIL_BYTES = 8192  # of metrics.jsonl, read for its last record
_IN_USE = "in use by another process"
# Characters of a cell's end in a line about it, at most.
_LONGEST = 30


class StatusPage:
    """The file `sweep-XXXXXXXX.md` in the sweep's root, named after its cells."""

    def __init__(self, planned: Plan, command: str):
        self.plan, self.command = planned, command
        # Those wanted so far; rounds add to them.
        self.cells = list(planned.cells) if planned.until is None else []
        names = sorted(self._name(cell) for cell in planned.cells)
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
        self.path = planned.root / f"sweep-{digest}.md"
        self.shown = planned.swept - {"precision", "seed"}  # shown beside a cell's mode and seed
        self.words: dict[Cell, str] = {}  # "waiting": in a launcher's queue
        self.resumed: set[Cell] = set()  # those that an earlier attempt left a checkpoint
        self.since: dict[Cell, float] = {}
        self.seconds: dict[Cell, float] = {}
        self.outcomes: dict[Cell, dict] = {}  # run.json of the cells that have one
        self.started = now()
        self.written = -math.inf
        self.at_once = 1  # most runs seen running at the same time
        self.follows = False  # whether the last line of a terminal says how far running cells are
        self.looked = -math.inf

    def finished(self, cell: Cell) -> None:
        """Note that the cell has an outcome from before or from elsewhere."""
        self.words[cell] = outcome_words(record_of(cell.directory) or {"status": "failed"})
        self.written = -math.inf

    def damaged(self, cell: Cell, damage: str) -> None:
        """Report that the files of a cell with an outcome are damaged, so that it has none."""
        self.words[cell] = f"damaged: {damage}"
        print(f"mprun: {damage}; the run counts as failed", file=sys.stderr)

    def started_run(self, cell: Cell) -> None:
        """Report that a run of the cell starts, or goes on where an attempt was stopped."""
        self.words[cell], self.since[cell] = "running", time.monotonic()
        self.outcomes.pop(cell, None)
        self.at_once = max(self.at_once, list(self.words.values()).count("running"))
        self._say("", cell, "goes on from its checkpoint" if cell in self.resumed else "starts")
        self.written = -math.inf

    def in_use(self, cell: Cell) -> None:
        """Report that another process has the cell: a second sweep, or a killed sweep's run."""
        if self.words.get(cell) != _IN_USE:
            self.words[cell] = _IN_USE
            self._say("", cell, f"{_IN_USE}; waiting for it")

    def ended(self, cell: Cell, outcome: AttemptOutcome) -> None:
        """Report the end of an attempt: its outcome and loss, the number ended, the time left."""
        self.words[cell] = outcome.words
        cause = shortened(outcome.words, _LONGEST)
        words = ([] if outcome.code == DONE else [cause]) + _results(self._record(cell) or {})
        if cell in self.since:
            self.seconds[cell] = time.monotonic() - self.since[cell]
            words.append(_clock(self.seconds[cell]))
        ended = len(self.cells) - len(self._unfinished())
        if (left := self._left()) is not None:
            words.append(f"ETA {_clock(left)}")
        self._say(f"[{ended}/{len(self.cells)}] ", cell, ", ".join(words))
        line = last_line(cell) if cause == outcome.words else outcome.words
        if outcome.code not in (DONE, DIVERGED, PREEMPTED) and line and line not in cause:
            self.tell(f"    {cell.directory.name}: {line}")
        self.written = -math.inf

    def follow(self) -> None:
        """Draw, if it `follows`, how far the running cells are, as their newest records say."""
        if not self.follows or time.monotonic() - self.looked < _LOOK_S:
            return
        self.looked, parts = time.monotonic(), []
        for cell in (cell for cell, words in self.words.items() if words == "running"):
            record, step, loss = self._reached(cell)
            words = "starting"
            if step is not None and loss is not None:
                words = f"step {step}/{record.get('steps', '?')} loss {loss:.4f}"
            parts.append(" ".join([cell.mode, *self._swept(cell), f"s{cell.seed}: {words}"]))
        self._draw(shortened("; ".join(parts), columns(1000, sys.stderr) - 1))

    def tell(self, text: str) -> None:
        """Print a line on stderr, in place of what was drawn."""
        self._draw("")
        print(text, file=sys.stderr, flush=True)
        self.looked = -math.inf

    def _draw(self, text: str) -> None:
        if self.follows:
            stream = getattr(sys.stderr, "drawn", sys.stderr)  # past what escapes these
            stream.write(f"\r\x1b[K{text}")
            stream.flush()

    def table(self, width: int | None = None) -> str:
        """Return the mode table over all cells that have been started."""
        records = map(self._record, counted(self.cells, "reading the runs of the table"))
        return table([record for record in records if record is not None], self.plan.swept, width)

    def to_finish(self) -> list[str]:
        """Return a line for each cell that a command of its own finishes: status and command."""
        lines = []
        for cell in self.cells:
            if state_of(cell) is State.RESUMABLE:
                record: dict = record_of(cell.directory) or {}
                step, steps = record.get("last_step", "?"), record.get("steps", "?")
                words = f"{self.words.get(cell, 'stopped')} at step {step} of {steps}"
                fit = next(commands(cell.directory, record), None)
                how = "" if fit is None else f"; {fit}"
                lines.append(f"{cell.mode} s{cell.seed}: {words}{how}")
        return lines

    def write(self, now: bool = False) -> None:
        """Rewrite the file if something has happened or the shown progress is old."""
        if not now and time.monotonic() - self.written < _EVERY_S:
            return
        self.written = time.monotonic()
        # A full disk must not end runs that do not need it.
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, self._text())

    def _text(self) -> str:
        rows = [self._row(cell) for cell in self.cells]
        header = ["run", "status", "step", "loss", "seconds"]
        return (
            f"# Sweep of {len(rows)} runs\n\n    {self.command}\n\n"
            f"started {self.started}, updated {now()}\n\n"
            f"{markdown_table(header, rows)}\n\n{self.table()}\n"
        )

    def _row(self, cell: Cell) -> list[str]:
        record, step, loss = self._reached(cell)
        seconds = record.get("seconds") if record.get("status") in OUTCOMES else None
        if seconds is None and self.words.get(cell) == "running":
            seconds = time.monotonic() - self.since[cell]
        seconds = self.seconds.get(cell) if seconds is None else seconds
        before = outcome_words(record) if record.get("status") in OUTCOMES else "waiting"
        return [
            self._name(cell),
            shortened(self.words.get(cell, before), 120),
            "" if step is None else f"{step}/{record.get('steps', '?')}",
            "" if loss is None else f"{float(loss):.4f}",
            "" if seconds is None else f"{seconds:.0f}",
        ]

    def _reached(self, cell: Cell) -> tuple[dict, int | None, float | None]:
        """Return run.json of a cell, {} without one, and its newest step and loss, if known."""
        record: dict = self._read(cell) or {}
        newest = _last_record(cell.directory / "metrics.jsonl")
        step = record.get("last_step") or newest.get("step")
        return record, step, record.get("final", {}).get("loss", newest.get("loss"))

    def _read(self, cell: Cell) -> dict | None:
        """Return run.json; one with an outcome, which stays as it is, is read once."""
        if cell in self.outcomes:
            return self.outcomes[cell]
        record = record_of(cell.directory)
        if record is not None and record["status"] in OUTCOMES:
            self.outcomes[cell] = record
        return record

    def _record(self, cell: Cell) -> dict | None:
        words, record = self.words.get(cell, ""), self._read(cell)
        if record is None or words.startswith("damaged"):
            ended = words.startswith(("failed", "killed", "hung", "damaged"))
            return without_record(cell, words) if ended else None
        return record

    def _name(self, cell: Cell) -> str:
        return cell.directory.relative_to(self.plan.root).as_posix()

    def _unfinished(self) -> list[Cell]:
        states = ("waiting", "running", _IN_USE)
        return [cell for cell in self.cells if self.words.get(cell, "waiting") in states]

    def _left(self) -> float | None:
        """Estimate the seconds until the last cell ends from those that ended; None: unknown."""
        rest = self._unfinished()
        if not self.seconds or not rest:
            return None
        each, now = statistics.fmean(self.seconds.values()), time.monotonic()
        running = [cell for cell in rest if self.words.get(cell) == "running"]
        done = sum(min(each, now - self.since[cell]) for cell in running)
        return (each * len(rest) - done) / min(self.at_once, len(rest))

    def _swept(self, cell: Cell) -> list[str]:
        return [text for text in cell.overrides if text.partition("=")[0] in self.shown]

    def _say(self, count: str, cell: Cell, words: str) -> None:
        """Print a line about a cell that fits the terminal; its overrides are cut first."""
        width = shutil.get_terminal_size().columns
        swept = self._swept(cell)
        ends = f"{count}{cell.mode} ", f"s{cell.seed}: {words}"
        room = width - len("".join(ends)) - 1
        shown = ""
        if swept and room >= len("..."):  # a value is shown whole or not at all
            fits = len(swept[0]) + len(" ...") <= room
            shown = f"{shortened(' '.join(swept), room) if fits else '...'} "
        self.tell(shortened(shown.join(ends), width))


def _last_record(path: Path) -> dict:
    """Return the last whole record with a loss from a metrics.jsonl's end; {} if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError, TypeError, LookupError):
            record: dict = json.loads(line)
            return record | {"step": int(record["step"]), "loss": float(record["loss"])}
    return {}


def _results(record: dict) -> list[str]:
    """Return final loss and judged metric if finite; of a run without an outcome its last step."""
    if record.get("status") not in OUTCOMES:
        return [f"at step {record['last_step']}"] if record.get("last_step") else []
    final = record.get("final") or {}
    metric = flat(record.get("config", {})).get("compare.metric", "loss")
    known = {key: float(final[key]) for key in dict.fromkeys(("loss", metric)) if key in final}
    return [f"{key} {value:.5g}" for key, value in known.items() if math.isfinite(value)]


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))

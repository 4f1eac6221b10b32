"""`mprun ls`: the runs below a folder, each with its status and last value; what to do next."""

import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mprun.cli.arguments import Arguments, hanging
from mprun.cli.show import status_of
from mprun.compare.grouping import comparable
from mprun.compare.load import run_directories
from mprun.errors import DONE, BadInput, Damaged
from mprun.record.console import columns
from mprun.record.metrics_columns import read_columns
from mprun.record.run_record import Record, read_record
from mprun.training.next_commands import OUTCOMES, commands

_WHAT = """\
The runs below a folder: mode, seed, status, last value, and the commands that go on.

The value is that of the last evaluation, of the metric that the run is judged by, else the last
training loss ("at" its step). PATH is searched to any depth; nothing is written."""
_HEADER: tuple[str, ...] = ("run", "mode", "seed", "status", "last")
_MOST_COMMANDS = 8


def main(words: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    arguments = Arguments("ls", _WHAT)
    arguments.add_argument("path", nargs="?", type=Path, default=Path("outputs"), metavar="PATH")
    folder = arguments.parse(words).path
    if not folder.exists() and folder == Path("outputs"):
        raise BadInput("outputs: no such folder here; name one that holds runs (mprun ls PATH)")
    rows: list[tuple[str, ...]] = []
    ended: list[tuple[Path, Record]] = []  # otherwise than as done
    for directory in run_directories(folder):
        try:
            record = read_record(directory, "status", "precision.mode", "config")
            rows.append(_row(directory, folder, record))
        except (Damaged, OSError) as error:
            rows.append((_name(directory, folder), "-", "-", "damaged", str(error)))
            continue
        if record["status"] != "done":
            ended.append((directory, record))
    has_width = sys.stdout.isatty() or bool(os.environ.get("COLUMNS"))  # else names stay
    for line in _table(rows, columns(160) if has_width else None):
        print(line)
    for line in _next(folder, rows, ended):
        print(line)
    return DONE


def _row(directory: Path, folder: Path, record: Record) -> tuple[str, ...]:
    metric = (record["config"].get("compare") or {}).get("metric") or "loss"
    final, step = record.get("final") or {}, record.get("last_step")
    last = f"{metric} {final[metric]:.4g}" if isinstance(final.get(metric), float) else ""
    if not last:
        measured = read_columns(directory / "metrics.jsonl")
        step, losses = measured.last_step, list(measured.train.get("loss", []))
        last = f"loss {losses[-1]:.4g} at {step:,}" if losses else "-"
    status = status_of(directory, record, step or 0).partition("\n")[0]
    if "measured_for" in record:
        status = f"measured for {record['measured_for']}"
    seed, mode = str(record.get("seed", "-")), record["precision"]["mode"]
    return _name(directory, folder), mode, seed, status.partition(": ")[0], last


def _name(directory: Path, folder: Path) -> str:
    return str(directory.relative_to(folder)) if directory != folder else str(directory)


def _table(rows: list[tuple[str, ...]], width: int | None) -> Iterator[str]:
    """Yield lines of at most `width` columns, None: any. A long name loses parts of its folder."""
    whole = [_HEADER, *rows]
    others = [max(len(row[place]) for row in whole) for place in range(1, len(_HEADER))]
    room = 1000 if width is None else width - sum(others[:-1]) - min(others[-1], 24)
    room = max(20, room - 2 * len(others))
    for name, *cells in whole:
        name = _fitted(name, room)
        longest = min(room, max(len(row[0]) for row in whole))
        texts = [name.ljust(longest)]
        texts += [cell.ljust(size) for cell, size in zip(cells, others, strict=True)]
        yield "  ".join(texts).rstrip()[:width]


def _fitted(name: str, room: int) -> str:
    """Shorten a name: first its folder, since the rest tells it from its neighbours."""
    if len(name) <= room:
        return name
    folder, _, own = name.rpartition("/")
    if folder and len(own) + 8 <= room:
        return f"{folder[: room - len(own) - 4]}.../{own}"
    return f"{name[: room // 2 - 2]}...{name[-(room - room // 2 - 1) :]}"


def _next(
    folder: Path, rows: list[tuple[str, ...]], ended: list[tuple[Path, Record]]
) -> Iterator[str]:
    counts = Counter(row[3].partition(" ")[0].rstrip(",") for row in rows)
    yield ""
    yield ", ".join(f"{count} {status}" for status, count in counts.items())
    modes = {row[1] for row in rows if row[3].startswith(OUTCOMES)}
    if len(modes) > 1 and comparable(folder):
        yield f"  {shlex.join(['mprun', 'compare', str(folder)])}"
    for directory, record in ended[:_MOST_COMMANDS]:
        fits = (fit.command for fit in commands(directory, record) if not fit.in_script)
        if command := next(fits, None):
            yield hanging(command, columns(160), 4, "  ")
    if len(ended) > _MOST_COMMANDS:
        yield f"  ... and {len(ended) - _MOST_COMMANDS} more (mprun show RUN)"

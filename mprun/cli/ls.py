"""`mprun ls`: list the runs below a folder, with their status, and say what to do next."""

import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mprun.cli.arguments import Arguments
from mprun.cli.show import status_of
from mprun.comparison.load import run_directories
from mprun.comparison.verdict import comparable
from mprun.errors import DONE, BadInput, Damaged
from mprun.record.console import columns
from mprun.record.layout import aligned, hanging
from mprun.record.metrics_columns import read_columns
from mprun.record.run_record import OUTCOMES, Record, read_record
from mprun.training.next_commands import commands

_WHAT = """\
The runs below folders: path, mode, seed, status, last value, and the commands that go on.

The value is that of the last evaluation, of the metric that the run is judged by, else the last
training loss ("at" its step). PATH (outputs by default) is searched
to any depth; nothing is written."""
_HEADER: tuple[str, ...] = ("run", "mode", "seed", "status", "last")
_MOST_COMMANDS = 8


def main(words: list[str]) -> int:
    arguments = Arguments("ls", _WHAT)
    arguments.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    folders = arguments.parse(words).paths or [Path("outputs")]
    if folders == [Path("outputs")] and not folders[0].exists():
        raise BadInput(
            "outputs: this folder does not exist here; name a folder with runs (mprun ls PATH)"
        )
    rows: list[tuple[str, ...]] = []
    ended: list[tuple[Path, Record]] = []  # otherwise than as done
    for directory in dict.fromkeys(run for one in folders for run in run_directories(one)):
        try:
            record = read_record(directory, "status", "precision.mode", "config")
            rows.append(_row(directory, record))
        except (BadInput, Damaged, OSError) as error:
            why = str(error).replace(f"{directory}{os.sep}", "")
            status = "unknown" if isinstance(error, BadInput) else "damaged"
            rows.append((_name(directory), "-", "-", status, why))
            continue
        if record["status"] != "done":
            ended.append((directory, record))
    has_width = sys.stdout.isatty() or bool(os.environ.get("COLUMNS"))  # else names stay
    for line in aligned([_HEADER, *rows], set(_HEADER), columns(160) if has_width else None):
        print(line.replace("\0", " "))
    for line in _next(folders, rows, ended):
        print(line)
    return DONE


def _row(directory: Path, record: Record) -> tuple[str, ...]:
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
    return _name(directory), mode, seed, status.partition(": ")[0], last


def _name(directory: Path) -> str:
    """Return the path that `mprun show` takes, as a shell does; its blanks break no line."""
    return shlex.quote(str(directory)).replace(" ", "\0")


def _next(
    folders: list[Path], rows: list[tuple[str, ...]], ended: list[tuple[Path, Record]]
) -> Iterator[str]:
    counts = Counter(row[3].partition(" ")[0].rstrip(",") for row in rows)
    yield ""
    yield ", ".join(f"{count} {status}" for status, count in counts.items())
    modes = {row[1] for row in rows if row[3].startswith(OUTCOMES)}
    if len(modes) > 1 and comparable(*folders):
        yield f"  {shlex.join(['mprun', 'compare', *map(str, folders)])}"
    for directory, record in ended[:_MOST_COMMANDS]:
        fits = (fit.command for fit in commands(directory, record) if not fit.in_script)
        if command := next(fits, None):
            yield hanging(command, columns(160), 4, "  ")
    if len(ended) > _MOST_COMMANDS:
        yield f"  ... and {len(ended) - _MOST_COMMANDS} more (mprun show RUN)"

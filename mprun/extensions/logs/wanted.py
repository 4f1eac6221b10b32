"""The curve that is looked for in a log: its cells as numbers, the order of its steps."""

import gzip
import re
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mprun.errors import BadInput, Damaged
from mprun.spelling import did_you_mean, nearest

# Names that count steps, the best first; a log with several of them uses the first.
STEPS = (
    *("step", "global_step", "_step", "trainer/global_step", "train/global_step", "step_num"),
    *("iteration", "iter", "iterations", "num_updates", "update", "updates", "samples_count"),
    *("timesteps", "total_timesteps", "time/total_timesteps", "epoch", "epoch_num"),
    *("steps", "epochs"),
)
# Folders, files and lines with another of these words hold another curve of the same run.
PARTS = "train training val valid validation validate eval evaluation evaluate test testing dev"
# In "val loss 2.1" it is part of a metric's name, in "Train Epoch: 1" it is not.
_PART = re.compile(
    rf"(?<![\w/.-])(?:train_inner|{'|'.join(PARTS.split())})(?![\w/.-])"
    r"(?!\s+(?!epoch|step|iter|batch)[a-z]\w*\s*[:=]?\s*[-+.\d])",
    re.IGNORECASE,
)
LINE = "kind of line"  # the field that holds `part_of` a line
# Fields that tell one curve of a name from another.
SPLITS = (
    *("split", "phase", "stage", "mode", "subset", "partition", "dataset", "type", "kind"),
    *("tag", "metric", "key", "name", "run", "run_id", "run_name", "rank", "fold", "seed"),
    LINE,
)
EXPONENT = r"(?:[eE][-+]?\d+)?"
_WITH_COMMA = re.compile(rf"[-+]?(?=[,\d])\d*(?:,\d*)?{EXPONENT}|[-+]?(?:nan|inf|infinity)", re.I)
_OF_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2},\d{3}")  # or, as well, three decimals
_EMPTY = ("", None)
Row = tuple[str, dict[str, Any]]  # its place ("line 3"), name -> cell


@dataclass(slots=True)
class Log:
    """The curve of one run as it was written."""

    path: Path  # a file, or a folder of event files or of an MLflow run
    run: str  # its name in a file of several runs, else ""
    points: np.ndarray  # float64 [points, 2]: step and value, in the order of the file
    steps: str  # the name of the step count: "step", "epoch"; "" for places in a list
    named: bool = True  # whether the log itself says that the values belong to the scalar
    places: Sequence[str] = ()  # that of each point in the file, such as "line 3", if it has one
    notes: list[str] = field(default_factory=list)  # what was read by a rule, a line each
    seed: int | None = None  # as the command line or a name tells it, which no log does

    @property
    def name(self) -> str:
        """Return path and run, as on the command line."""
        return f"{self.path}#{self.run}" if self.run else str(self.path)


@dataclass
class Wanted:
    """The curve that is looked for in a log, and what is raised if it is not there."""

    path: Path  # a file, or a folder from `logs_in`
    scalar: str  # its name
    step: str | None = None  # the name of the step count, if it is not a usual one
    notes: list[str] = field(default_factory=list)  # what was read by a rule, a line each

    @cached_property
    def text(self) -> str:
        """Return the content of the file, unpacked if it ends in .gz; every line ends in "\\n".

        Raises Damaged if it is no text or a broken archive, BadInput if it cannot be read.
        """
        opened = gzip.open if self.path.suffix == ".gz" else open
        try:
            with opened(self.path, "rt", encoding="utf-8-sig") as file:
                return file.read()
        except UnicodeDecodeError as error:
            raise Damaged(f"{self.path}: is not a text file ({error})") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Damaged(f"{self.path}: is not a complete gzip archive ({error})") from None
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be read ({error.strerror})") from None

    def lines(self) -> list[str]:
        """Return the lines of the file without one that is cut off, which is noted.

        A writer that is killed leaves a last line without its end, in which "0.0" was to be 0.034.
        """
        *lines, last = self.text.split("\n")
        if last.strip():
            self.note_cut(len(lines) + 1)
        return lines

    def note_cut(self, number: int) -> None:
        """Note that the last line is left out."""
        self.notes.append(f"line {number} does not end: it may be cut off, and is left out")

    def told(self, rows: list[Row]) -> list[Row]:
        """Return the rows with the scalar; "valid/loss" also means `loss` in those of `valid`."""
        if told := [(where, row) for where, row in rows if self.scalar in row]:
            return told
        split, among, name = self.scalar.rpartition("/")
        return [
            (where, row | {self.scalar: row[name]})
            for where, row in rows
            if among and name in row and split in _kinds(row)
        ]

    def of_records(self, rows: list[Row]) -> list[Log]:
        """Return the one run of records, which may be of several kinds."""
        told = self.told(rows)
        if not told:
            names = [name for _, row in rows for name in row if name != LINE]
            raise self.no_scalar(dict.fromkeys(names))
        names = [name for name in told[0][1] if all(name in row for _, row in told)]
        return self.of_columns(told, self.steps(names), {self.scalar: ("", True)})

    def of_columns(
        self, rows: list[Row], steps: str, values: dict[str, tuple[str, bool]]
    ) -> list[Log]:
        """Return a run for each column of values; rows without a value are left out.

        steps: the column of the steps. values: column -> (run, `Log.named`). BadInput if the rows
        tell by a field of `SPLITS` that they are not all of one curve.
        """
        logs = []
        for name, (run, named) in values.items():
            told = [number for number, (_, row) in enumerate(rows) if row[name] not in _EMPTY]
            if not told:
                raise BadInput(f"{self.path}: column {name!r} is empty")
            self._refuse_several([rows[number][1] for number in told], steps, name)
            after = [row for row in rows[told[-1] + 1 :] if row[1][steps] not in _EMPTY]
            places = [rows[number][0] for number in told]
            cells = [
                (where, rows[number][1][key])
                for key in (steps, name)
                for where, number in zip(places, told, strict=True)
            ]
            numbers = self._numbers(cells + [(where, row[steps]) for where, row in after])
            points = np.array(numbers[: len(cells)], np.float64).reshape(2, -1).T
            # The table of a single run must have a value in its last rows, too, or there was one
            # that its writer left out, as some do with nan. In one of several runs they end there.
            if after and not run:
                counted, end = points[:, 0], max(numbers[len(cells) :])
                if end - counted[-1] > np.diff(counted, prepend=counted[0]).max():
                    raise BadInput(
                        f"{self.path}: {after[0][0]}: from here to step {end:g} {name!r} has no "
                        "value; remove these rows, or write nan for values that were not finite"
                    )
            logs.append(Log(self.path, run, points, steps, named, places))
        return logs

    def _refuse_several(self, rows: list[dict[str, Any]], steps: str, name: str) -> None:
        for key in dict.fromkeys(key for row in rows for key in splits(row)):
            found = sorted({str(row.get(key, "")) or "none" for row in rows})
            if key not in (steps, name) and len(found) > 1:
                raise BadInput(
                    f"{self.path}: --scalar {self.scalar}: has rows with several values of "
                    f"{key!r} ({listed(found)}); choose one, e.g. --scalar "
                    f"{found[-1]}/{self.scalar}. "
                    f"If all these rows are one curve, remove the field {key!r}"
                )

    def _numbers(self, cells: Sequence[tuple[str, Any]]) -> list[float]:
        """Return cells, each with its place, as numbers, with decimal points or decimal commas.

        BadInput if each comma may be a mark of thousands as well, Damaged for what is no number.
        """
        with suppress(ValueError):
            return [number_of(cell) for _, cell in cells]
        commas = [(where, cell) for where, cell in cells if "," in str(cell)]
        numbers = []
        for where, cell in cells:
            try:
                numbers.append(number_of(cell, comma=True))
            except ValueError:
                beside = next((f" beside {c!r} in {at}" for at, c in commas if c != cell), "")
                hint = "; write numbers with a decimal point alone" if commas else ""
                wrong = f"{cell!r} is not a number{beside}{hint}"
                raise Damaged(f"{self.path}: {where}: {wrong}") from None
        if all(_OF_THOUSANDS.fullmatch(cell) for _, cell in commas):
            where, cell = commas[0]
            raise BadInput(
                f"{self.path}: {where}: {cell!r} may mean {cell.replace(',', '')} or "
                f"{cell.replace(',', '.')}; write numbers with a decimal "
                "point and without commas"
            )
        self.notes.append("numbers are read as written like 0,5")
        return numbers

    def steps(self, names: Sequence[str]) -> str:
        """Return the name of the column that counts the steps."""
        by_lower = {name.lower(): name for name in reversed(names)}
        usual = (by_lower[name] for name in (*STEPS, "") if name in by_lower)
        of_that_name = (name for name in names if name == self.step)
        found = next(usual if self.step is None else of_that_name, None)
        if found is None:
            raise self.no_steps(names)
        return found

    def no_steps(self, names: Sequence[str]) -> BadInput:
        """Return the error for a log with the scalar that counts its steps under a strange name."""
        if self.step is not None:
            return BadInput(
                f"{self.path}: --step {self.step}: no such column; there are {listed(names)}"
            )
        return BadInput(
            f"{self.path}: no column 'step' or 'epoch'; has {listed(names)}; say with "
            "--step COLUMN which one counts the steps"
        )

    def no_scalar(self, known: Iterable[str]) -> BadInput:
        """Return the error that names the existing scalars."""
        names = list(known)
        ends = [name for name in names if re.split("[./]", name)[-1] == self.scalar][:3]
        hint = f"; {did_you_mean(ends)}" if ends else nearest(self.scalar, names)
        return BadInput(
            f"{self.path}: --scalar {self.scalar}: no such column; there are {listed(names)}{hint}"
        )


def number_of(cell: Any, comma: bool = False) -> float:
    """Return a cell as a number; comma: its decimal mark. ValueError if it is none."""
    if isinstance(cell, bool):
        raise ValueError
    if comma and isinstance(cell, str):
        if not _WITH_COMMA.fullmatch(cell):
            raise ValueError
        cell = cell.replace(",", ".")
    try:
        return float(cell)
    except (TypeError, OverflowError):
        raise ValueError from None


def splits(row: dict[str, Any]) -> list[str]:
    """Return the fields of a row that tell its curve from others of the name."""
    return [key for key in row if key.lower().rpartition(".")[2] in SPLITS]


def _kinds(row: dict[str, Any]) -> set[str]:
    return {str(row[key]) or "none" for key in splits(row)} or {"none"}


def part_of(line: str) -> str:
    """Return the words in a line that tell training from evaluation, "" if there is none."""
    return " ".join(dict.fromkeys(word.lower() for word in _PART.findall(line)))


_Back = tuple[str, float, float, list[float]]  # place, its step, the step before, steps it replaces


def in_order(log: Log) -> None:
    """Let the steps of a log rise; a note says what was written again.

    A run that was resumed goes back to the step of its checkpoint: what it wrote from there on
    counts, and what an earlier attempt had written does not.

    Raises BadInput if the log begins again, if a step has two values without a step back, if most
    steps were written twice, or what follows a step back is not as dense as what it replaces.
    """
    steps = log.points[:, 0]
    if (np.diff(steps) > 0).all():
        return
    places = log.places or [f"value {number}" for number in range(1, len(steps) + 1)]
    kept: dict[float, tuple[float, str]] = {}  # step -> value, place
    backwards: list[_Back] = []
    again = 0
    for where, (step, value) in zip(places, log.points.tolist(), strict=True):
        last = next(reversed(kept), -np.inf)
        old, before = kept.get(step, (None, ""))
        if old == value or (old is not None and old != old and value != value):
            again += 1
            continue
        if step == last:
            raise BadInput(
                f"{log.name}: step {step:g} has two values, {old:g} in {before} and {value:g} in "
                f"{where}: there may be two curves of one name. Give each curve its own name or "
                f"log, or name the column of steps with --step COLUMN"
            )
        if step < last:
            if step <= steps[0]:
                raise BadInput(
                    f"{log.name}: {where}: begins again, at step {step:g} after {last:g}: there "
                    f"may be a second run or attempt; give each its own log"
                )
            lost = []
            while (end := next(reversed(kept))) >= step:
                lost.append(end)
                del kept[end]
            backwards.append((where, step, last, lost))
        kept[step] = (value, where)
    if len(backwards) > len(kept) / 2:
        raise BadInput(
            f"{log.name}: {len(backwards)} of {len(kept)} steps appear twice with different "
            f"values, so the log may hold several runs; give each run its own file or folder"
        )
    if again:
        log.notes.append(f"{log.name}: {again} steps written twice, with the same value")
    _refuse_another_curve(log, [*kept], backwards)
    if backwards:
        (where, step, last, _), *more = backwards
        left_out = sum(one != step for _, step, _, lost in backwards for one in lost)
        log.notes.append(
            f"{log.name}: {where}: goes back to step {step:g} after {last:g}"
            f"{f' (and {len(more)} times more)' if more else ''}: what is written from there on "
            f"counts, and of what was before it {left_out} values do not"
        )
    log.points, log.places = table([(step, value) for step, (value, _) in kept.items()]), ()


def _refuse_another_curve(log: Log, kept: Sequence[float], backwards: Sequence[_Back]) -> None:
    """Raise BadInput if what follows a step back is not as dense as what it replaces.

    A resumed run writes as often as before; another curve of the name need not.
    """
    for where, step, last, lost in backwards:
        gone = sum(one <= kept[-1] for one in lost)
        come = sum(step <= one <= last for one in kept)
        if max(gone, come) > 2 * min(gone, come) + 2:
            raise BadInput(
                f"{log.name}: {where}: goes back to step {step:g} after {last:g}, with {come} "
                f"values for these steps instead of {gone}. If the log holds two curves of one "
                f"name, give each its own log"
            )


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return the first names as text, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    shown = [name if name.isprintable() else repr(name) for name in names[:most]]
    return (", ".join(shown) or "none") + more


def table(points: list) -> np.ndarray:
    return np.array(points, dtype=np.float64).reshape(-1, 2)

"""Read a scalar from a log that another tool wrote: steps and values of every run in it.

`FORMATS` has the formats; the content of a log determines which one it is. An installed package
adds its own by an entry point of the group `mprun.log_formats` that names a `LogFormat`.
"""

import ast
import csv
import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mprun.compare.load import natural_order
from mprun.config.fields import nearest
from mprun.config.keys import flat
from mprun.entry_points import announced, loaded
from mprun.errors import BadInput, Damaged

# Names that count steps, the best first; a log with several of them uses the first.
_STEPS = (
    *("step", "global_step", "_step", "trainer/global_step", "train/global_step", "step_num"),
    *("iteration", "iter", "iterations", "update", "updates", "num_updates", "samples_count"),
    *("timesteps", "total_timesteps", "time/total_timesteps", "epoch", "epoch_num"),
)
_SPLITS = ("split", "phase", "stage", "mode")  # fields that tell training from evaluation records
# A number in a text, maybe with marks of thousands.
_EXPONENT = r"(?:[eE][-+]?\d+)?"
_NUMBER = rf"[-+]?(?:\d+(?:[.,'’]\d+)*\.?{_EXPONENT}|[.,]\d+{_EXPONENT}|nan|inf(?:inity)?)\b"
# How a whole number is written, by its decimal mark; the other mark groups thousands, as blanks and
# apostrophes do.
_WRITTEN = {
    decimal: re.compile(
        rf"[-+]?(?=[{decimal}\d])(?:[1-9]\d{{0,2}}(?P<by>[{thousands}'’ \u00a0\u202f])\d{{3}}"
        rf"(?:(?P=by)\d{{3}})*|\d*)(?:[{decimal}]\d*)?{_EXPONENT}"
    )
    for decimal, thousands in (".,", ",.")
}
# What Python prints for a number that is none of its literals: nan, np.float64(0.5), tensor(0.5).
_PRINTED = re.compile(r"(?:[\w.]*float\d*|tensor)\(([^(),]*)[^()]*\)|(?<![\w'])(-?(?:nan|inf))\b")
_EMPTY, _NOT_FINITE = ("", None), ("nan", "inf", "infinity")
Row = tuple[str, dict[str, Any]]  # its place ("line 3"), name -> cell


@dataclass(slots=True)
class Log:
    """The curve of one run as it was written."""

    path: Path  # a file, or a folder of event files or of an MLflow run
    run: str  # its name in a file of several runs, else ""
    points: np.ndarray  # float64 [points, 2]: step and value, in the order of the file
    steps: str  # the name of the step count: "step", "epoch"; "" for places in a list
    named: bool = True  # whether the log itself says that the values belong to the tag
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
    tag: str  # the scalar
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
            raise Damaged(f"{self.path}: not a text file ({error})") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Damaged(f"{self.path}: not a whole gzip archive ({error})") from None
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

    def of_records(self, rows: list[Row]) -> list[Log]:
        """Return the one run of records, which may be of several kinds."""
        told = [(where, row) for where, row in rows if self.tag in row]
        if not told:
            names = [name for _, row in rows for name in row]
            names = [name.partition(".")[0] for name in names] if len(rows) == 1 else names
            raise self.no_tag(dict.fromkeys(names))
        for key in _SPLITS:
            found = sorted({str(row[key]) for _, row in told if key in row})
            if len(found) > 1:
                raise BadInput(
                    f"{self.path}: --tag {self.tag}: is of several values of {key!r} "
                    f"({listed(found)}); must be of one, in a file of its own"
                )
        names = [name for name in told[0][1] if all(name in row for _, row in told)]
        return self.of_columns(told, self.steps(names), {self.tag: ("", True)})

    def of_columns(
        self, rows: list[Row], steps: str, values: dict[str, tuple[str, bool]]
    ) -> list[Log]:
        """Return a run for each column of values; rows without a value are left out.

        steps: the column of the steps. values: column -> (run, `Log.named`).
        """
        logs = []
        for name, (run, named) in values.items():
            told = [number for number, (_, row) in enumerate(rows) if row[name] not in _EMPTY]
            if not told:
                raise BadInput(f"{self.path}: column {name!r} is empty")
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
                        "value; cut these rows off, or write nan where it was not finite"
                    )
            logs.append(Log(self.path, run, points, steps, named, places))
        return logs

    def _numbers(self, cells: Sequence[tuple[str, Any]]) -> list[float]:
        """Return cells, each with its place, as numbers.

        A comma is the decimal mark or one of thousands, whichever all cells allow. BadInput if they
        allow both and the numbers differ, Damaged if they allow neither.
        """
        with suppress(ValueError):
            return [_plain(cell) for _, cell in cells]
        ways = [_read([cell for _, cell in cells], decimal) for decimal in _WRITTEN]
        whole = [way for way in ways if len(way) == len(cells)]
        if not whole:
            where, cell = cells[max(map(len, ways))]
            raise Damaged(f"{self.path}: {where}: {cell!r} is not a number")
        for (where, cell), one, other in zip(cells, whole[0], whole[-1], strict=True):
            if one != other and one == one:
                raise BadInput(
                    f"{self.path}: {where}: {cell!r} is {one:.10g} or {other:.10g}, and no other "
                    "number tells which; write it without marks of thousands, with a point"
                )
        example = "1,234.5" if whole[0] is ways[0] else "1.234,5"
        self.notes.append(f"numbers are read as written like {example}")
        return whole[0]

    def steps(self, names: Sequence[str]) -> str:
        """Return the name of the column that counts the steps."""
        if self.step is None:
            by_lower = {name.lower(): name for name in reversed(names)}
            found = next((by_lower[name] for name in (*_STEPS, "") if name in by_lower), None)
            if found is not None:
                return found
            raise BadInput(
                f"{self.path}: no column 'step' or 'epoch'; has {listed(names)}; say with "
                "--step COLUMN which one counts the steps"
            )
        if self.step not in names:
            raise BadInput(f"{self.path}: --step {self.step}: not there; has {listed(names)}")
        return self.step

    def no_tag(self, known: Iterable[str]) -> BadInput:
        """Return the error that names the existing tags."""
        names = list(known)
        return BadInput(
            f"{self.path}: --tag {self.tag}: not there; has {listed(names)}"
            f"{nearest(self.tag, names)}"
        )


def _plain(cell: Any) -> float:
    try:
        if isinstance(cell, bool):
            raise ValueError
        return float(cell)
    except (TypeError, OverflowError):
        raise ValueError from None


def _read(cells: Iterable[Any], decimal: str) -> list[float]:
    """Return the first cells as numbers, up to one that is none with this decimal mark."""
    numbers = []
    for cell in cells:
        try:
            if isinstance(cell, str) and _WRITTEN[decimal].fullmatch(cell):
                cell = re.sub(rf"[^\deE+{decimal}-]", "", cell).replace(decimal, ".")
            elif isinstance(cell, str) and cell.lower().lstrip("+-") not in _NOT_FINITE:
                break
            numbers.append(_plain(cell))
        except ValueError:
            break
    return numbers


class LogFormat(NamedTuple):
    """A form in which tools write scalars."""

    name: str  # the form and its tools, in words
    # Returns every run of a log, at least one; None if the log is in another form.
    read: Callable[[Wanted], list[Log] | None]
    # Takes a folder's entries, in natural order, and returns the logs among them; their parent, if
    # the folder itself is the log.
    logs_in: Callable[[list[Path]], list[Path]] | None = None


def formats() -> tuple[LogFormat, ...]:
    """Return every format in the order of trial: those without text, installed ones, the others."""
    installed = map(loaded, announced("mprun.log_formats").values())
    return (*_NO_TEXT, *installed, *FORMATS)


def read_logs(path: Path, tag: str, step: str | None = None) -> list[Log]:
    """Read every run in a file, or the one of a folder from `logs_in`; at least one.

    tag: the scalar. step: the name of the step count, if it is not a usual one.

    Raises BadInput if tag or steps are missing (it lists the existing names), and Damaged for an
    invalid number or a file that is not text.
    """
    wanted = Wanted(path, tag, step)
    for form in formats():
        wanted.notes.clear()
        found = form.read(wanted)
        if found is not None:
            for log in found:
                if not np.isfinite(log.points[:, 0]).all():
                    raise Damaged(f"{path}: {log.steps}: steps must be finite numbers")
                log.notes += [f"{path}: {note}" for note in dict.fromkeys(wanted.notes)]
                _order(log)
            return found
    first = [cell.strip() for cell in wanted.text.partition("\n")[0].split(",")]
    raise wanted.no_tag(_words_before_numbers(wanted.text) or filter(None, first))


def _order(log: Log) -> None:
    """Let the steps of a log rise; a note says what was written again.

    A run that was resumed goes back to the step of its checkpoint: what it wrote from there on
    counts, and what an earlier attempt had written does not.

    Raises BadInput if the log begins again, or if most of its steps were written twice.
    """
    steps = log.points[:, 0]
    if (np.diff(steps) > 0).all():
        return
    places = log.places or [f"value {number}" for number in range(1, len(steps) + 1)]
    kept: dict[float, float] = {}
    again, other, left_out, back = 0, 0, 0, ""
    for where, (step, value) in zip(places, log.points.tolist(), strict=True):
        if step in kept and (kept[step] == value or kept[step] != kept[step] and value != value):
            again += 1
            continue
        if kept and step <= (last := next(reversed(kept))):
            if step == last:
                again, other = again + 1, other + 1
            elif step <= steps[0]:
                raise BadInput(
                    f"{log.name}: {where}: begins again, at step {step:g} after {last:g}: a second "
                    "run or attempt? Give each a log of its own"
                )
            else:
                back = back or f"{where}: goes back to step {step:g} after {last:g}"
                left_out += sum(earlier > step for earlier in kept)
            while kept and next(reversed(kept)) >= step:
                kept.popitem()
        kept[step] = value
    if other > len(kept) / 2:
        raise BadInput(
            f"{log.name}: {other} of {len(kept)} steps are written again, with another value: "
            "several runs in one log? Give each a file or a folder of its own"
        )
    if again:
        log.notes.append(f"{log.name}: {again} steps written twice; the last value counts")
    if back:
        log.notes.append(
            f"{log.name}: {back}: what is written from there on counts, and of what "
            f"was before it {left_out} values do not"
        )
    log.points, log.places = _table([*kept.items()]), ()


def logs_in(folder: Path) -> list[Path]:
    """Return the logs in the folder itself: those of the first format that has some."""
    entries = sorted(folder.iterdir(), key=lambda entry: natural_order(entry.name))
    found = (form.logs_in(entries) for form in formats() if form.logs_in is not None)
    return next(filter(None, found), [])


def _mlflow(wanted: Wanted) -> list[Log] | None:
    """Read the file of the tag in the folder of an MLflow run."""
    metrics = wanted.path / "metrics"
    if not _is_mlflow(wanted.path):
        return None
    names = [str(file.relative_to(metrics)) for file in metrics.rglob("*") if file.is_file()]
    if wanted.tag not in names:
        raise wanted.no_tag(sorted(names, key=natural_order))
    return read_logs(metrics / wanted.tag, wanted.tag, wanted.step)


def _is_mlflow(folder: Path) -> bool:
    return (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()


def _mlflow_in(entries: list[Path]) -> list[Path]:
    return [entry.parent for entry in entries[:1] if _is_mlflow(entry.parent)]


def _is_events(path: Path) -> bool:
    """Return whether the name is a TensorBoard event file's, by TensorBoard's own rule."""
    return "tfevents" in path.name and path.is_file()


def _events_in(entries: list[Path]) -> list[Path]:
    return [entry.parent for entry in entries if _is_events(entry)][:1]


def _events(wanted: Wanted) -> list[Log] | None:
    """Read the event files of torch.utils.tensorboard, TensorFlow and Keras.

    Source: tensorboard.backend.event_processing.event_accumulator.
    """
    path, tag = wanted.path, wanted.tag
    if not (path.is_dir() or _is_events(path)):
        return None
    if wanted.step is not None:
        raise BadInput(f"{path}: --step {wanted.step}: event files have steps of their own")
    # Imported here, so that only this function pays for it.
    from tensorboard.backend.event_processing import event_accumulator as reader
    from tensorboard.util import tensor_util

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    # 0 keeps every point; the default draws 10,000 at random. One is enough of everything else.
    for file in [path] if path.is_file() else filter(_is_events, sorted(path.iterdir())):
        if not _ends_whole(file):
            wanted.notes.append(f"{file.name} ends within a record: read up to there")
    limits = dict.fromkeys(reader.DEFAULT_SIZE_GUIDANCE, 1) | {reader.SCALARS: 0}
    events = reader.EventAccumulator(str(path), size_guidance=limits).Reload()
    known = events.Tags()
    if tag in known[reader.SCALARS]:
        points = [(point.step, point.value) for point in events.Scalars(tag)]
        return [Log(path, "", _table(points), "step")]
    # TensorFlow 2 writes scalars as tensors.
    scalars = [
        name
        for name in known[reader.TENSORS]
        if events.SummaryMetadata(name).plugin_data.plugin_name == "scalars"
    ]
    if tag not in scalars:
        raise wanted.no_tag([*known[reader.SCALARS], *scalars])
    limits[reader.TENSORS] = 0
    events = reader.EventAccumulator(str(path), size_guidance=limits).Reload()
    read = tensor_util.make_ndarray
    points = [(point.step, float(read(point.tensor_proto))) for point in events.Tensors(tag)]
    return [Log(path, "", _table(points), "step")]


def _ends_whole(path: Path) -> bool:
    """Return whether an event file ends where a record does: its length, 4 bytes, it, 4 bytes."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        while (place := file.tell()) < size:
            length = int.from_bytes(file.read(8), "little")
            if place + 16 + length > size:
                return False
            file.seek(place + 16 + length)
    return True


def _states_in(entries: list[Path]) -> list[Path]:
    """Return trainer_state.json of a Hugging Face folder, else that of the newest checkpoint."""
    newest = [entry for entry in entries[::-1] if entry.name.startswith("checkpoint-")]
    folders = [entry.parent for entry in entries[:1]] + newest
    states = (folder / "trainer_state.json" for folder in folders)
    return [state for state in states if state.is_file()][:1]


def _tables_in(entries: list[Path]) -> list[Path]:
    tables = (".csv", ".tsv", ".jsonl")
    names = ((entry, entry.name.lower().removesuffix(".gz")) for entry in entries)
    return [entry for entry, name in names if name.endswith(tables) and entry.is_file()]


def _cells(wanted: Wanted) -> list[Log] | None:
    """Read a table; None if the first line is not a header that names steps or values."""
    path, tag, first = wanted.path, wanted.tag, wanted.text.partition("\n")[0]
    between = max(",\t;", key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
    try:
        # ultralytics pads the names with blanks.
        header = [cell.strip() for cell in next(csv.reader([first], delimiter=between), [])]
        known = {*_STEPS, tag.lower(), "value", (wanted.step or tag).lower()}
        if not any(n.lower() in known or n.endswith(f" - {tag}") for n in header):
            return None
        steps = wanted.steps(list(filter(None, header)))  # an index has no name
        values = _value_names(wanted, header)
        places = [header.index(name) for name in (steps, *values)]
        for name in (steps, *values):
            if header.count(name) > 1:
                several = f"{header.count(name)} columns are called {name!r}"
                raise BadInput(f"{path}: line 1: {several}; rename all but one")
        reader = csv.reader(wanted.lines(), delimiter=between)
        rows: list[Row] = []
        for row in reader:
            # A logger that resumes after an interruption may repeat its header.
            if not row or [cell.strip() for cell in row] == header:
                continue
            if len(row) <= max(places) or any(row[len(header) :]):
                wrong = f"{len(row)} cells, the header has {len(header)}"
                raise Damaged(f"{path}: line {reader.line_num}: {wrong}")
            found = {header[place]: row[place].strip() for place in places}
            rows.append((f"line {reader.line_num}", found))
    except csv.Error as error:
        raise Damaged(f"{path}: not a table ({error})") from None
    return wanted.of_columns(rows, steps, values)


def _value_names(wanted: Wanted, names: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Return the columns of values as `Wanted.of_columns` takes them."""
    path, tag = wanted.path, wanted.tag
    if tag in names:
        return {tag: ("", True)}
    # "RUN - TAG" of Weights & Biases, beside "RUN - TAG__MIN" and "RUN - TAG__MAX".
    exported = [name for name in names if name.endswith(f" - {tag}")]
    if exported:
        return {name: (name.removesuffix(f" - {tag}"), True) for name in exported}
    if "Value" in names:
        # TensorBoard's export is called run-NAME-tag-TAG.csv, with "/" as "_".
        _, told, rest = path.name.removesuffix(".gz").removesuffix(".csv").partition("-tag-")
        if told and rest != tag.replace("/", "_"):
            raise BadInput(f"{path}: --tag {tag}: the file is an export of the tag {rest}")
        return {"Value": ("", bool(told))}
    raise wanted.no_tag(name for name in names if name.lower() not in _STEPS)


def _printed(wanted: Wanted) -> list[Log] | None:
    """Read dictionaries as Python prints them, one a line; None if there is none with the tag."""
    rows: list[Row] = []
    for number, line in enumerate(wanted.lines(), start=1):
        start, stop = line.find("{'"), line.rfind("}") + 1
        if not 0 <= start < stop:
            continue
        for text in (line[start:stop], _PRINTED.sub(r"'\1\2'", line[start:stop])):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                told = ast.parse(text, mode="eval").body
                record = ast.literal_eval(told)
                break
        else:
            if f"'{wanted.tag}'" in line:
                raise Damaged(f"{wanted.path}: line {number}: not one dictionary")
            continue
        if isinstance(told, ast.Dict) and len(record) < len(told.keys):
            raise BadInput(f"{wanted.path}: line {number}: a name stands twice in it")
        if isinstance(record, dict):
            rows.append((f"line {number}", flat(record)))
    begins = wanted.text.lstrip().startswith("{'")
    return wanted.of_records(rows) if begins or any(wanted.tag in row for _, row in rows) else None


def _json(wanted: Wanted) -> list[Log] | None:
    """Read records, or a list or mapping of values per name; None if the text is not JSON."""
    path, text, tag = wanted.path, wanted.text, wanted.tag
    start = text.lstrip()[:1]
    if start not in ("{", "["):
        return None
    try:
        content = _loaded(text, f"{path}: a record")
    except (ValueError, RecursionError):
        if start == "[":  # a text may begin like this: "[rank0]: step: 1"
            return None
        return wanted.of_records(_json_lines(wanted))
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        content = content["log_history"]  # trainer_state.json
    if isinstance(content, dict) and isinstance(content.get(tag), (list, dict)):
        content = _records_of_columns(path, content, tag, wanted.step)
    records = content if isinstance(content, list) else [content]
    if not all(isinstance(record, dict) for record in records):
        raise Damaged(f"{path}: not a list of records")
    rows = [(f"record {place}", flat(record)) for place, record in enumerate(records, start=1)]
    return wanted.of_records(rows)


def _json_lines(wanted: Wanted) -> list[Row]:
    rows, lines = [], wanted.text.split("\n")
    for number, line in enumerate(lines, start=1):
        where = f"{wanted.path}: line {number}"
        try:
            record = _loaded(line, where) if line.strip() else {}
        except (ValueError, RecursionError):
            if number < len(lines):
                raise Damaged(f"{where}: not a JSON record") from None
            wanted.note_cut(number)
            break
        if not isinstance(record, dict):
            raise Damaged(f"{where}: not a JSON record")
        rows.append((f"line {number}", flat(record)))
    return rows


def _loaded(text: str, where: str) -> Any:
    """Decode JSON; raise BadInput if a name stands twice in a record."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadInput(f"{where}: {twice!r} stands twice in it")
        return record

    return json.loads(text, object_pairs_hook=once)


def _records_of_columns(path: Path, content: dict, tag: str, step: str | None) -> list[dict]:
    """Make one record a step from {"loss": [2.1, 1.9]}, {"loss": {"10": 2.1}} or Megatron's.

    If nothing counts the steps, the places in the list do, under the name "".
    """
    column = content[tag]
    steps: Iterable[Any]
    counted = step or "step"
    if isinstance(column, dict) and "values" in column:  # Megatron
        values = column["values"]
        first, every = column.get("start_step", 1), column.get("step_interval", 1)
        steps = values if isinstance(values, dict) else range(first, 10**12, max(1, every))
    else:
        values, steps = column, column if isinstance(column, dict) else range(1, 10**12)
        counted = counted if isinstance(column, dict) else ""
        for name in [step] if step else [n for n in _STEPS if n in content and n != tag]:
            if name not in content:
                raise BadInput(f"{path}: --step {name}: not there; has {listed(list(content))}")
            steps = content[name]
            steps, counted = (steps.values() if isinstance(steps, dict) else steps), name
            break
    values = values.values() if isinstance(values, dict) else values
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise Damaged(f"{path}: {tag!r} is no list of values")
    return [{counted: at, tag: one} for at, one in zip(steps, values, strict=False)]


def _mlperf(wanted: Wanted) -> list[Log] | None:
    """Read lines ":::MLLOG {"key": ..., "value": ..., "metadata": {...}}"; None without one."""
    rows: list[Row] = []
    for number, line in enumerate(wanted.lines(), start=1):
        _, told, rest = line.partition(":::MLLOG ")
        if told:
            try:
                entry = json.loads(rest)
                rows.append((f"line {number}", {**entry["metadata"], entry["key"]: entry["value"]}))
            except (ValueError, KeyError, TypeError):
                raise Damaged(f"{wanted.path}: line {number}: not an entry of MLPerf") from None
    return wanted.of_records(rows) if rows else None


def _plain_numbers(wanted: Wanted) -> list[Log] | None:
    """Read "timestamp value step" (MLflow) or "step value" lines; None if it is anything else."""
    tag, rows = wanted.tag, []
    for number, line in enumerate(wanted.lines(), start=1):
        cells = line.split()
        if all(len(_read(cells, decimal)) < len(cells) for decimal in _WRITTEN):
            return None
        # The first of three is a time since 1970.
        if len(cells) == 3 and max(_read(cells[:1], "."), default=0.0) >= 1e9:
            rows.append(
                (f"line {number}", {"step": cells[2], tag: cells[1], "timestamp": cells[0]})
            )
        elif len(cells) == 2:
            rows.append((f"line {number}", {"step": cells[0], tag: cells[1]}))
        elif cells:
            return None
    if len({len(row) for _, row in rows}) != 1:
        return None
    named = str(wanted.path).endswith(f"/{tag}")
    return wanted.of_columns(rows, "step", {tag: ("", named)})


def _words(wanted: Wanted) -> list[Log] | None:
    """Read lines with names before their numbers; None if none holds steps and values."""
    # A name follows the line's start, a mark, a number or two blanks: "val loss" is not "loss".
    before = r"(?:^|[|,;:)\]-]\s*|\s{2,}|\d\s+)"
    value = re.compile(rf"{before}{re.escape(wanted.tag)}\s*[:=]?\s*({_NUMBER})", re.IGNORECASE)
    told = []
    for number, line in enumerate(wanted.lines(), start=1):
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)  # colours
        if found := value.findall(line):
            told.append((f"line {number}", line, found))
    for name in (wanted.step,) if wanted.step else _STEPS:
        count = re.compile(rf"{before}{re.escape(name)}\s*[:=]?\s*({_NUMBER})", re.IGNORECASE)
        rows: list[Row] = []
        for where, line, found in told:
            if at := count.search(line):
                if len(set(found)) > 1:
                    both = " and ".join(found)
                    raise BadInput(f"{wanted.path}: {where}: {wanted.tag} is {both}: must be one")
                rows.append((where, {name: at[1], wanted.tag: found[0]}))
        if rows:
            return wanted.of_columns(rows, name, {wanted.tag: ("", True)})
    return None


def _words_before_numbers(text: str) -> list[str]:
    names = re.findall(rf"([A-Za-z][\w/.@ -]*?)\s*[:=]\s*{_NUMBER}", text[:100_000])
    return [name for name in dict.fromkeys(names) if name.lower() not in _STEPS]


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return the first names as text, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def _table(points: list) -> np.ndarray:
    return np.array(points, dtype=np.float64).reshape(-1, 2)


_NO_TEXT = (
    LogFormat("run folders of MLflow", _mlflow, _mlflow_in),
    LogFormat("event files of torch, TensorFlow, Keras; one run a folder", _events, _events_in),
)
FORMATS = (
    LogFormat("dictionaries as Python prints them: Hugging Face's Trainer", _printed),
    LogFormat("JSON: Hugging Face's state, records, a list a name (Keras)", _json, _states_in),
    LogFormat('":::MLLOG" lines of MLPerf', _mlperf),
    LogFormat(
        "tables with a header row (commas, tabs, semicolons): Lightning, Keras, timm, ultralytics, "
        "exports of TensorBoard and of Weights & Biases (all runs in one file)",
        _cells,
        _tables_in,
    ),
    LogFormat('"timestamp value step" (metric files of MLflow) or "step value"', _plain_numbers),
    LogFormat(
        'names before numbers ("step: 10  loss: 2.1"): torchtitan, Megatron, nanoGPT', _words
    ),
)

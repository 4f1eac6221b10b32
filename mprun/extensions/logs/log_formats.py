"""Read a scalar from a log that another tool wrote: steps and values of every run in it.

`FORMATS` has the formats; the content of a log determines which one it is. An installed package
adds its own by an entry point of the group `mprun.log_formats` that names a `LogFormat`.
"""

import csv
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)\b"
Row = tuple[str, dict[str, Any]]  # its place ("line 3"), name -> cell


@dataclass(slots=True)
class Log:
    """The curve of one run as it was written."""

    path: Path  # a file, or a folder of event files or of an MLflow run
    run: str  # its name in a file of several runs, else ""
    points: np.ndarray  # float64 [points, 2]: step and value, in the order of the file
    steps: str  # the name of the step count: "step", "epoch"; "" for places in a list
    named: bool = True  # whether the log itself says that the values belong to the tag
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

    @cached_property
    def text(self) -> str:
        """Return the content of the file; raise Damaged if it is not text, BadInput without it."""
        try:
            return self.path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise Damaged(f"{self.path}: not a text file ({error})") from None
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be read ({error.strerror})") from None

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
            points = [
                [self._number(where, row[key]) for key in (steps, name)]
                for where, row in rows
                if row[name] not in ("", None)
            ]
            if not points:
                raise BadInput(f"{self.path}: column {name!r} is empty")
            logs.append(Log(self.path, run, _table(points), steps, named))
        return logs

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

    def _number(self, where: str, cell: Any) -> float:
        try:
            if isinstance(cell, bool):
                raise ValueError
            return float(cell)
        except (TypeError, ValueError, OverflowError):
            raise Damaged(f"{self.path}: {where}: {cell!r} is not a number") from None


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
        found = form.read(wanted)
        if found is not None:
            if not all(np.isfinite(log.points[:, 0]).all() for log in found):
                raise Damaged(f"{path}: {found[0].steps}: steps must be finite numbers")
            return found
    first = [cell.strip() for cell in wanted.text.partition("\n")[0].split(",")]
    raise wanted.no_tag(_words_before_numbers(wanted.text) or filter(None, first))


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


def _states_in(entries: list[Path]) -> list[Path]:
    """Return trainer_state.json of a Hugging Face folder, else that of the newest checkpoint."""
    newest = [entry for entry in entries[::-1] if entry.name.startswith("checkpoint-")]
    folders = [entry.parent for entry in entries[:1]] + newest
    states = (folder / "trainer_state.json" for folder in folders)
    return [state for state in states if state.is_file()][:1]


def _tables_in(entries: list[Path]) -> list[Path]:
    tables = (".csv", ".tsv", ".jsonl")
    return [entry for entry in entries if entry.suffix.lower() in tables and entry.is_file()]


def _cells(wanted: Wanted) -> list[Log] | None:
    """Read a table; None if the first line is not a header that names steps or values."""
    path, tag, lines = wanted.path, wanted.tag, wanted.text.splitlines()
    first = next(iter(lines), "")
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
        reader = csv.reader(lines, delimiter=between)
        rows: list[Row] = []
        for row in reader:
            # A logger that resumes after an interruption may repeat its header.
            if not row or [cell.strip() for cell in row] == header:
                continue
            if len(row) <= max(places):
                raise Damaged(f"{path}: line {reader.line_num}: {len(row)} cells, not a row")
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
        _, told, rest = path.stem.partition("-tag-")
        if told and rest != tag.replace("/", "_"):
            raise BadInput(f"{path}: --tag {tag}: the file is an export of the tag {rest}")
        return {"Value": ("", bool(told))}
    raise wanted.no_tag(name for name in names if name.lower() not in _STEPS)


def _json(wanted: Wanted) -> list[Log] | None:
    """Read records, or a list or mapping of values per name; None if the text is not JSON."""
    path, text, tag = wanted.path, wanted.text, wanted.tag
    start = text.lstrip()[:1]
    if start not in ("{", "["):
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        if start == "[":  # a text may begin like this: "[rank0]: step: 1"
            return None
        content = _json_lines(path, text)
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        content = content["log_history"]  # trainer_state.json
    if isinstance(content, dict) and isinstance(content.get(tag), (list, dict)):
        content = _records_of_columns(path, content, tag, wanted.step)
    records = content if isinstance(content, list) else [content]
    if not all(isinstance(record, dict) for record in records):
        raise Damaged(f"{path}: not a list of records")
    rows = [(f"record {place}", flat(record)) for place, record in enumerate(records, start=1)]
    return wanted.of_records(rows)


def _json_lines(path: Path, text: str) -> list[Any]:
    records, lines = [], text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            if number == len(lines):
                break  # torn: the run was killed while writing
            raise Damaged(f"{path}: line {number}: not a JSON record") from None
    return records


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
    for number, line in enumerate(wanted.text.splitlines(), start=1):
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
    rows = [line.split() for line in wanted.text.splitlines() if line.strip()]
    try:
        table = [[float(cell) for cell in row] for row in rows]
    except ValueError:
        return None
    widths = {len(row) for row in rows}
    # The first of three is a time since 1970.
    if widths not in ({2}, {3}) or (widths == {3} and table[0][0] < 1e9):
        return None
    points = [(row[-1], row[1]) for row in table] if widths == {3} else table
    named = str(wanted.path).endswith(f"/{wanted.tag}")
    return [Log(wanted.path, "", _table(points), "step", named)]


def _words(wanted: Wanted) -> list[Log] | None:
    """Read lines with names before their numbers; None if none holds steps and values."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", wanted.text)  # colours
    # A name follows the line's start, a mark, a number or two blanks: "val loss" is not "loss".
    before = r"(?:^|[|,;:)\]-]\s*|\s{2,}|\d\s+)"
    value = re.compile(rf"{before}{re.escape(wanted.tag)}\s*[:=]?\s*({_NUMBER})", re.IGNORECASE)
    told = [(line, found[1]) for line in text.splitlines() if (found := value.search(line))]
    for name in (wanted.step,) if wanted.step else _STEPS:
        count = re.compile(rf"{before}{re.escape(name)}\s*[:=]?\s*(\d+)\b", re.IGNORECASE)
        points = [
            (float(at[1]), float(found)) for line, found in told if (at := count.search(line))
        ]
        if points:
            return [Log(wanted.path, "", _table(points), name)]
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

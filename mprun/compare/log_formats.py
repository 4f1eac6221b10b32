"""Read a scalar from a log that another tool wrote: steps and values of every run in it.

What a file is, its content says:

- TensorBoard event files (torch, TensorFlow, Keras), one run a folder
- tables with a header row, cells between commas, tabs or semicolons: Lightning, Keras, timm,
  ultralytics, exports of TensorBoard and of Weights & Biases (all runs in one file)
"""

import csv
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mprun.compare.load import natural_order
from mprun.config.rules import nearest
from mprun.errors import BadInput, Damaged

# What counts steps, the best first; of a log that has several of them the first is taken.
_STEPS = (
    *("step", "global_step", "_step", "trainer/global_step", "train/global_step", "step_num"),
    *("iteration", "iter", "iterations", "update", "updates", "num_updates", "samples_count"),
    *("timesteps", "total_timesteps", "time/total_timesteps", "epoch", "epoch_num"),
)
_MOST_TAGS_SHOWN = 10
_Row = tuple[str, dict[str, Any]]  # where it stands ("line 3"), name -> cell


@dataclass(slots=True)
class Log:
    """The curve of one run as it was written."""

    path: Path  # a file, or a folder of event files or of an MLflow run
    run: str  # its name in a file that holds several, else ""
    points: np.ndarray  # float64 [points, 2]: step and value, in the order of the file
    steps: str  # what counts the steps: "step", "epoch"; "" for the places in a list
    named: bool = True  # whether the log itself says that the values are of the tag

    @property
    def name(self) -> str:
        """Path and run, as they are given on the command line."""
        return f"{self.path}#{self.run}" if self.run else str(self.path)


def read_logs(path: Path, tag: str, step: str | None = None) -> list[Log]:
    """Every run in a file, or the one of a folder as `logs_in` gives it; at least one.

    tag: the scalar. step: what counts the steps, where it is none of the usual names.

    Raises BadInput where tag or steps are missing (it lists what there is), Damaged for a number
    that is none and for a file that is no text.
    """
    if path.is_dir() or is_events(path):
        if step is not None:
            raise BadInput(f"{path}: --step {step}: event files have steps of their own")
        return [Log(path, "", read_events(path, tag), "step")]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Damaged(f"{path}: not a text file ({error})") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    for read in (_cells,):
        found = read(path, text, tag, step)
        if found is not None:
            if not all(np.isfinite(log.points[:, 0]).all() for log in found):
                raise Damaged(f"{path}: {found[0].steps}: steps must be finite numbers")
            return found
    first = [cell.strip() for cell in text.partition("\n")[0].split(",")]
    raise _no_tag(path, tag, list(filter(None, first)))


def logs_in(folder: Path) -> list[Path]:
    """The logs of a folder itself: event files are one, each table is another."""
    entries = sorted(folder.iterdir(), key=lambda entry: natural_order(entry.name))
    if any(is_events(entry) for entry in entries):
        return [folder]
    tables = (".csv", ".tsv")
    return [entry for entry in entries if entry.suffix.lower() in tables and entry.is_file()]


def is_events(path: Path) -> bool:
    """Whether this is a TensorBoard event file, by its name, as TensorBoard itself decides."""
    return "tfevents" in path.name and path.is_file()


def read_events(path: Path, tag: str) -> np.ndarray:
    """Steps and values, float64 [points, 2], of the scalar `tag` in an event file or a folder.

    Reads what torch.utils.tensorboard, TensorFlow and Keras write. BadInput where the tag is
    missing. Source: tensorboard.backend.event_processing.event_accumulator.
    """
    # Here, not at the top: nobody else pays for the import.
    from tensorboard.backend.event_processing import event_accumulator as reader
    from tensorboard.util import tensor_util

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    # 0 keeps every point; by default 10,000 are drawn at random. Of all else one is enough.
    limits = dict.fromkeys(reader.DEFAULT_SIZE_GUIDANCE, 1) | {reader.SCALARS: 0}
    events = reader.EventAccumulator(str(path), size_guidance=limits).Reload()
    known = events.Tags()
    if tag in known[reader.SCALARS]:
        return _table([(point.step, point.value) for point in events.Scalars(tag)])
    # TensorFlow 2 writes scalars as tensors.
    scalars = [
        name
        for name in known[reader.TENSORS]
        if events.SummaryMetadata(name).plugin_data.plugin_name == "scalars"
    ]
    if tag not in scalars:
        raise _no_tag(path, tag, [*known[reader.SCALARS], *scalars])
    limits[reader.TENSORS] = 0
    events = reader.EventAccumulator(str(path), size_guidance=limits).Reload()
    read = tensor_util.make_ndarray
    return _table([(point.step, float(read(point.tensor_proto))) for point in events.Tensors(tag)])


def _cells(path: Path, text: str, tag: str, step: str | None) -> list[Log] | None:
    """A table; None where the first line is no header that names steps or values."""
    lines = text.splitlines()
    first = next(iter(lines), "")
    between = max(",\t;", key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
    try:
        # ultralytics pads the names with blanks.
        header = [cell.strip() for cell in next(csv.reader([first], delimiter=between), [])]
        known = {*_STEPS, tag.lower(), "value", (step or tag).lower()}
        if not any(n.lower() in known or n.endswith(f" - {tag}") for n in header):
            return None
        steps = _step_name(path, list(filter(None, header)), step)  # an index has no name
        values = _value_names(path, header, tag)
        places = [header.index(name) for name in (steps, *values)]
        reader = csv.reader(lines, delimiter=between)
        rows: list[_Row] = []
        for row in reader:
            # A logger that goes on after an interruption may write its header again.
            if not row or [cell.strip() for cell in row] == header:
                continue
            if len(row) <= max(places):
                raise Damaged(f"{path}: line {reader.line_num}: {len(row)} cells, not a row")
            found = {header[place]: row[place].strip() for place in places}
            rows.append((f"line {reader.line_num}", found))
    except csv.Error as error:
        raise Damaged(f"{path}: not a table ({error})") from None
    return _curves(path, rows, steps, values)


def _value_names(path: Path, names: Sequence[str], tag: str) -> dict[str, tuple[str, bool]]:
    """Column -> (run, whether it or the file says that the values are of `tag`)."""
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
    raise _no_tag(path, tag, [name for name in names if name.lower() not in _STEPS])


def _step_name(path: Path, names: Sequence[str], step: str | None) -> str:
    """The name of what counts the steps."""
    if step is None:
        by_lower = {name.lower(): name for name in reversed(names)}
        found = next((by_lower[name] for name in (*_STEPS, "") if name in by_lower), None)
        if found is not None:
            return found
        raise BadInput(
            f"{path}: no column 'step' or 'epoch'; has {_listed(names)}; say with --step COLUMN "
            "which one counts the steps"
        )
    if step not in names:
        raise BadInput(f"{path}: --step {step}: not there; has {_listed(names)}")
    return step


def _curves(
    path: Path, rows: list[_Row], steps: str, values: dict[str, tuple[str, bool]]
) -> list[Log]:
    """One log a column of values; rows without a value are left out."""
    logs = []
    for name, (run, named) in values.items():
        points = [
            [_number(path, where, row[key]) for key in (steps, name)]
            for where, row in rows
            if row[name] not in ("", None)
        ]
        if not points:
            raise BadInput(f"{path}: column {name!r} is empty")
        logs.append(Log(path, run, _table(points), steps, named))
    return logs


def _number(path: Path, where: str, cell: Any) -> float:
    try:
        if isinstance(cell, bool):
            raise ValueError
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        raise Damaged(f"{path}: {where}: {cell!r} is not a number") from None


def _no_tag(path: Path, tag: str, known: list[str]) -> BadInput:
    return BadInput(f"{path}: --tag {tag}: not there; has {_listed(known)}{nearest(tag, known)}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_TAGS_SHOWN]) or "none"
    more = len(names) - _MOST_TAGS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _table(points: list) -> np.ndarray:
    return np.array(points, dtype=np.float64).reshape(-1, 2)

"""Read one curve, all of its points, from TensorBoard event files or a CSV file."""

import csv
import logging
from pathlib import Path

import numpy as np

from mprun.config.rules import nearest
from mprun.errors import BadInput, Damaged

_STEP_COLUMNS = ("step", "Step", "_step", "global_step", "trainer/global_step")
_MOST_TAGS_SHOWN = 10


def is_events(path: Path) -> bool:
    """Whether this is a TensorBoard event file, by its name, as TensorBoard itself decides."""
    return "tfevents" in path.name and path.is_file()


def read_events(path: Path, tag: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, float64 [points], of the scalar `tag` in an event file or a folder of them.

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
    found = events.Tags()
    if tag in found[reader.SCALARS]:
        points = [(point.step, point.value) for point in events.Scalars(tag)]
        return _columns(points)
    # TensorFlow 2 writes scalars as tensors.
    scalars = [name for name in found[reader.TENSORS] if _is_scalar(events, name)]
    if tag not in scalars:
        raise _no_tag(path, tag, [*found[reader.SCALARS], *scalars])
    limits[reader.TENSORS] = 0
    events = reader.EventAccumulator(str(path), size_guidance=limits).Reload()
    points = [
        (point.step, float(tensor_util.make_ndarray(point.tensor_proto)))
        for point in events.Tensors(tag)
    ]
    return _columns(points)


def _is_scalar(events, tag: str) -> bool:
    return events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"


def read_csv(path: Path, tag: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, float64 [rows], of a CSV file with a header row.

    The value is the column `tag`, one that ends with " - TAG" (an export of Weights & Biases), or
    `Value` (an export of TensorBoard: Wall time, Step, Value); the step is the column `step` or
    `Step`. Rows without a value are left out. BadInput where a column is missing, Damaged where a
    cell is no number.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            step_at, value_at = _step_column(path, header), _value_column(path, header, tag)
            points = []
            for row in rows:
                if len(row) <= max(step_at, value_at) and row:
                    raise Damaged(f"{path}: line {rows.line_num}: {len(row)} cells, not a row")
                if row and row[value_at].strip():
                    points.append(
                        [_float(path, rows.line_num, row[i]) for i in (step_at, value_at)]
                    )
    except (UnicodeDecodeError, csv.Error) as error:
        raise Damaged(f"{path}: not a CSV file ({error})") from None
    if not points:
        raise BadInput(f"{path}: column {header[value_at]!r} is empty")
    steps, values = _columns(points)
    if not np.isfinite(steps).all():
        raise Damaged(f"{path}: column {header[step_at]!r}: steps must be finite numbers")
    return steps, values


def names_no_tag(path: Path, tag: str) -> bool:
    """Whether `read_csv` would take the column `Value` of a file that does not name its tag."""
    if is_events(path) or not path.is_file():
        return False
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next(csv.reader(file), [])
    named = tag in header or any(name.endswith(f" - {tag}") for name in header)
    return "Value" in header and not named and "-tag-" not in path.name


def _step_column(path: Path, header: list[str]) -> int:
    for name in _STEP_COLUMNS:
        if name in header:
            return header.index(name)
    raise BadInput(f"{path}: no column 'step' or 'Step'; has {_listed(header)}")


def _value_column(path: Path, header: list[str], tag: str) -> int:
    if tag in header:
        return header.index(tag)
    exported = [name for name in header if name.endswith(f" - {tag}")]
    if len(exported) > 1:
        raise BadInput(f"{path}: --tag {tag}: could be {_listed(exported)}; give one of them")
    if exported:
        return header.index(exported[0])
    if "Value" in header:
        # TensorBoard's export is called run-NAME-tag-TAG.csv, with "/" as "_".
        _, told, rest = path.stem.partition("-tag-")
        if told and rest != tag.replace("/", "_"):
            raise BadInput(f"{path}: --tag {tag}: the file is an export of the tag {rest}")
        return header.index("Value")
    raise _no_tag(path, tag, [name for name in header if name not in _STEP_COLUMNS])


def _no_tag(path: Path, tag: str, known: list[str]) -> BadInput:
    return BadInput(f"{path}: --tag {tag}: not there; has {_listed(known)}{nearest(tag, known)}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_TAGS_SHOWN]) or "none"
    more = len(names) - _MOST_TAGS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _float(path: Path, line: int, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise Damaged(f"{path}: line {line}: {cell!r} is not a number") from None


def _columns(points: list) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]

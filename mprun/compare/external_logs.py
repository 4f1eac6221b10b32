"""Read one curve, all of its points, from TensorBoard event files or a CSV file.

Curves that mprun did not record: TensorBoard events and CSV files, one arm per label.

    mprun compare --tag train/loss fp32=logs/base amp=logs/amp_s0,logs/amp_s1,logs/amp_s2

LABEL=PATH[,PATH...]: each PATH is one run (an event file, a folder with event files, a CSV file)
or a folder that holds several, taken in the order of their names (s2 before s10). The baseline is
the label `fp32` or `baseline`, else the first. Foreign logs tell no seed: runs are numbered from 0
as they are listed, and paired by that number. The log's steps say where a run ended.
"""

import csv
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mprun.compare.findings import Arm, RunData
from mprun.compare.grouping import ProtoGroup
from mprun.compare.load import natural_order, search
from mprun.config.rules import nearest
from mprun.errors import BadInput, Damaged

_STEP_COLUMNS = ("step", "Step", "_step", "global_step", "trainer/global_step")
_MOST_TAGS_SHOWN = 10


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


def read_csv(path: Path, tag: str) -> tuple[np.ndarray, bool]:
    """Steps and values, float64 [rows, 2], of a CSV file with a header row; whether it names `tag`.

    The value is the column `tag`, one that ends with " - TAG" (an export of Weights & Biases), or
    `Value` (an export of TensorBoard: Wall time, Step, Value); the step is the column `step` or
    `Step`. Rows without a value are left out. BadInput where a column is missing, Damaged where a
    cell is no number.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            step_name = next((name for name in _STEP_COLUMNS if name in header), None)
            if step_name is None:
                raise BadInput(f"{path}: no column 'step' or 'Step'; has {_listed(header)}")
            value_name, named = _value_column(path, header, tag)
            places = [header.index(name) for name in (step_name, value_name)]
            points = []
            for row in filter(None, rows):
                if len(row) <= max(places):
                    raise Damaged(f"{path}: line {rows.line_num}: {len(row)} cells, not a row")
                if row[places[1]].strip():
                    points.append([_float(path, rows.line_num, row[i]) for i in places])
    except (UnicodeDecodeError, csv.Error) as error:
        raise Damaged(f"{path}: not a CSV file ({error})") from None
    if not points:
        raise BadInput(f"{path}: column {value_name!r} is empty")
    table = _table(points)
    if not np.isfinite(table[:, 0]).all():
        raise Damaged(f"{path}: column {step_name!r}: steps must be finite numbers")
    return table, named


def _value_column(path: Path, header: list[str], tag: str) -> tuple[str, bool]:
    """The column of the values, and whether it or the file's name says that they are of `tag`."""
    if tag in header:
        return tag, True
    exported = [name for name in header if name.endswith(f" - {tag}")]
    if len(exported) > 1:
        raise BadInput(f"{path}: --tag {tag}: could be {_listed(exported)}; give one of them")
    if exported:
        return exported[0], True
    if "Value" in header:
        # TensorBoard's export is called run-NAME-tag-TAG.csv, with "/" as "_".
        _, told, rest = path.stem.partition("-tag-")
        if told and rest != tag.replace("/", "_"):
            raise BadInput(f"{path}: --tag {tag}: the file is an export of the tag {rest}")
        return "Value", "-tag-" in path.name
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


def _table(points: list) -> np.ndarray:
    return np.array(points, dtype=np.float64).reshape(-1, 2)


_BASELINES = ("fp32", "baseline")
_DRAWN = 500


def load_foreign(specs: Sequence[str], tag: str) -> ProtoGroup:
    """One group of the curves `tag`, with notes on how they were taken.

    specs: LABEL=PATH[,PATH...] each. A run's `evals` hold "step", "updates" (the same) and `tag`,
    float64, all points that were written. Imports no torch.

    Raises BadInput for a malformed spec, a path that is missing or holds no log, and a tag that a
    log does not have (it lists those that exist); Damaged for a CSV file with broken numbers.
    """
    paths = _paths(specs)
    unnamed: list[str] = []
    notes: list[str] = []
    arms = {label: Arm(label, label, []) for label in paths}
    for label, runs in paths.items():
        for number, path in enumerate(runs):
            if path.is_file() and not is_events(path):
                table, named = read_csv(path, tag)
            else:
                table, named = read_events(path, tag), True
            if not named:
                unnamed.append(f"{path}: names no tag; its column Value is taken for {tag}")
            arms[label].runs.append(_run(path, tag, label, number, table, notes))
    baseline = _baseline(list(paths))
    if baseline.lower() not in _BASELINES:
        notes.append(f"no label is fp32 or baseline: the first one, {baseline}, is the baseline")
    notes.append("foreign logs: runs are paired by their position in the list, not by seed")
    others = [arm for label, arm in arms.items() if label != baseline]
    return ProtoGroup(tag, "foreign", arms[baseline], others, {}, unnamed + notes)


def _paths(specs: Sequence[str]) -> dict[str, list[Path]]:
    """Label -> its runs, in the order in which they are listed."""
    paths: dict[str, list[Path]] = {}
    for spec in specs:
        label, _, listed = spec.partition("=")
        if not label or not listed:
            raise BadInput(f"{spec}: with --tag give LABEL=PATH[,PATH...], e.g. fp32=logs/base_s0")
        if label in paths:
            raise BadInput(f"{spec}: label {label!r} is given twice; list all its paths at once")
        paths[label] = [run for part in listed.split(",") for run in _runs_at(Path(part))]
    if len(paths) < 2:
        raise BadInput(f"{specs[0]}: needs a baseline and at least one other LABEL=PATH")
    return paths


def refuse_same_logs(group: ProtoGroup) -> None:
    """BadInput where one log stands for several runs: it would match itself."""
    seen = set()
    for arm in (group.baseline, *group.arms):
        for run in arm.runs:
            path = Path(run.path).resolve()
            if path in seen:
                raise BadInput(f"{run.path}: listed twice; every path must be another run")
            seen.add(path)


def _baseline(labels: list[str]) -> str:
    named = [label for label in labels if label.lower() in _BASELINES]
    if len(named) > 1:
        raise BadInput(f"{named[0]}, {named[1]}: two labels name a baseline; rename one")
    return named[0] if named else labels[0]


def _runs_at(path: Path) -> list[Path]:
    """The runs that a path names: itself, or all below it in the order of their names."""
    if not path.exists():
        raise BadInput(f"{path}: no such file or directory")
    runs = [path] if path.is_file() else list(search(path, _logs_in))
    if not runs:
        raise BadInput(f"{path}: holds neither TensorBoard events nor CSV files")
    return runs


def _logs_in(folder: Path) -> list[Path]:
    """The folder itself if it holds events, else its CSV files."""
    entries = sorted(folder.iterdir(), key=lambda entry: natural_order(entry.name))
    if any(is_events(entry) for entry in entries):
        return [folder]
    return [entry for entry in entries if entry.suffix.lower() == ".csv" and entry.is_file()]


def _run(
    path: Path, tag: str, label: str, number: int, table: np.ndarray, notes: list[str]
) -> RunData:
    steps, values = table.T
    # A run that was resumed may have written steps twice: the last word counts.
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    newest = np.append(steps[1:] != steps[:-1], True)
    if not newest.all():
        notes.append(f"{path}: {int((~newest).sum())} steps written twice; the last value counts")
    steps, values = steps[newest], values[newest]
    strange = int((~np.isfinite(values)).sum())
    if strange:
        notes.append(
            f"{path}: {strange} of {len(values)} values of {tag} are not finite; they count only "
            "where the outcome is taken, at the end"
        )
    shown = np.arange(len(steps))
    if len(steps) > _DRAWN:
        shown = np.linspace(0, len(steps) - 1, _DRAWN).round().astype(np.int64)
    nothing = np.zeros(len(shown))
    return RunData(
        path=str(path),
        mode=label,
        scaler="none",
        seed=number,
        status="done",
        cause=None,
        last_step=int(steps[-1]),
        evals={"step": steps, "updates": steps, tag: values},
        train={
            "step": steps[shown],
            "updates": steps[shown],
            "skipped": nothing,
            "loss": values[shown],
            "loss_scale": nothing + 1.0,
        },
        # Whether these are the first steps, and each of them, a foreign log does not say.
        first_losses=np.empty(0),
        last_losses=values[len(values) - -(-len(values) // 10) :],
        foreign=True,
    )

"""Summary runs for TensorBoard: per mode the mean over its seeds, the lowest and the highest seed.

TensorBoard cannot average runs, so the averages are runs of their own, `_summary/<group>/<mode>`,
with a custom-scalars layout of margin charts (a line with its band) and the verdict table as text.
Written with tensorboard's own event writer; needs no torch. Events are what
https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto says.
"""

import math
import time
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from mprun.compare.findings import Band, Comparison, Curve, Group, Row, RunData, band, curve, grid
from mprun.compare.load import SUMMARY_FOLDER
from mprun.compare.text import group_markdown

_SUFFIX = ".mprun-compare"  # of the event files, so that a later comparison finds its own
_POINTS = 200  # TensorBoard would keep 1,000 of a tag, but draws a dot on each
_BOUNDS = ("mean", "low", "high")
_TAGS = {"mean": "mean", "low": "lower", "high": "upper"}


def write_summaries(comparison: Comparison, root: Path) -> Path:
    """Replace the summary runs below `root/_summary` by those of `comparison`; return that folder.

    Tags: `<slug>/train_loss/mean`, `.../lower`, `.../upper` and the same for `eval_<metric>`, over
    steps; non-finite points are left out. The baseline's run has the layout and the text `verdict`.
    Only event files that this function wrote are deleted.
    """
    folder = root / SUMMARY_FOLDER
    _remove_old(folder)
    for group in comparison.groups:
        bands = _bands(group)
        rows = [group.baseline, *group.rows]
        for row, name in zip(rows, _folder_names(rows), strict=True):
            events = _scalars(group, bands.get(id(row), {}))
            if row is group.baseline:
                events = [_layout(group, bands), _text(comparison, group), *events]
            _write(folder / group.slug / name, events)
    return folder


def _bands(group: Group) -> dict[int, dict[str, Band]]:
    """Per row (by identity) the bands of the quantities that it recorded: name -> Band."""
    found: dict[int, dict[str, Band]] = {}
    rows = (group.baseline, *group.rows)
    for name in ("train_loss", f"eval_{group.metric}"):
        curves = {id(row): [_named(run, name) for run in row.arm.runs] for row in rows}
        x = grid([one for own in curves.values() for one in own], _POINTS)
        for row in rows:
            one = band(curves[id(row)], x)
            if np.isfinite(one.mean).any():
                found.setdefault(id(row), {})[name] = one
    return found


def _named(run: RunData, name: str) -> Curve:
    split, _, column = name.partition("_")
    return curve(run.train if split == "train" else run.evals, "step", column)


def _scalars(group: Group, bands: dict[str, Band]) -> list[Event]:
    events = []
    for name, one in bands.items():
        tags = [f"{group.slug}/{name}/{_TAGS[bound]}" for bound in _BOUNDS]
        for step, *values in zip(one.x, one.mean, one.low, one.high, strict=True):
            if all(math.isfinite(value) for value in values):
                value = [
                    Summary.Value(tag=tag, simple_value=value)
                    for tag, value in zip(tags, values, strict=True)
                ]
                events.append(Event(step=round(step), summary=Summary(value=value)))
    return events


def _layout(group: Group, bands: dict[int, dict[str, Band]]) -> Event:
    """One margin chart per quantity; TensorBoard draws every run that has its tags."""
    names = list(dict.fromkeys(name for own in bands.values() for name in own))
    charts = []
    for name in names:
        tag = f"{group.slug}/{name}"
        series = layout_pb2.MarginChartContent.Series(
            value=f"{tag}/mean", lower=f"{tag}/lower", upper=f"{tag}/upper"
        )
        margin = layout_pb2.MarginChartContent(series=[series])
        title = name.replace("_", ": ", 1) + " (mean, lowest and highest seed)"
        charts.append(layout_pb2.Chart(title=title, margin=margin))
    layout = layout_pb2.Layout(category=[layout_pb2.Category(title=group.title, chart=charts)])
    return _tensor(
        custom_scalar.CONFIG_SUMMARY_TAG,
        custom_scalar.create_summary_metadata(),
        layout.SerializeToString(),
    )


def _text(comparison: Comparison, group: Group) -> Event:
    return _tensor(
        f"{group.slug}/verdict",
        text_plugin.create_summary_metadata(None, "What mprun compare found."),
        group_markdown(comparison, group).encode(),
    )


def _tensor(tag: str, metadata, content: bytes) -> Event:
    tensor = TensorProto(dtype="DT_STRING", string_val=[content])
    return Event(
        step=0, summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
    )


def _write(folder: Path, events: list[Event]) -> None:
    writer = EventFileWriter(str(folder), filename_suffix=_SUFFIX)
    now = time.time()
    for event in events:
        event.wall_time = now
        writer.add_event(event)
    writer.close()


def _folder_names(rows: list[Row]) -> list[str]:
    """Each label as one path component, with a number where two labels become the same."""
    names: list[str] = []
    for row in rows:
        plain = "".join(c if c.isalnum() or c in "_-.=" else "_" for c in row.arm.label)
        name, number = plain.strip(".") or "_", 2
        while name in names:
            name, number = f"{plain}.{number}", number + 1
        names.append(name)
    return names


def _remove_old(folder: Path) -> None:
    for path in sorted(folder.rglob(f"events.out.tfevents.*{_SUFFIX}")):
        path.unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()

"""Summary runs for TensorBoard: per mode the mean over its seeds, the lowest and the highest seed.

TensorBoard cannot average runs, so the averages are runs of their own, `_summary/<group>/<mode>`,
with a custom-scalars layout of margin charts (a line with its band) and the verdict table as text.
Written with tensorboard's own event writer; needs no torch. Events are what
https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto says.
"""

import math
import time
from functools import partial
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from mprun.compare.findings import Band, Comparison, Curve, Group, Row, RunData, bands, curve
from mprun.compare.load import SUMMARY_FOLDER
from mprun.compare.text import group_markdown

_SUFFIX = ".mprun-compare"  # of the event files, so that a later comparison finds its own
_POINTS = 200  # TensorBoard would keep 1,000 of a tag, but draws a dot on each
_BOUNDS = ("mean", "lower", "upper")  # of the tags


def write_summaries(comparison: Comparison, root: Path) -> Path:
    """Replace the summary runs below `root/_summary` by those of `comparison`; return that folder.

    Tags: `<slug>/train_loss/mean`, `.../lower`, `.../upper` and the same for `eval_<metric>`, over
    steps; non-finite points are left out. The baseline's run has the layout and the text `verdict`.
    Only event files that this function wrote are deleted.
    """
    folder = root / SUMMARY_FOLDER
    _remove_old(folder)
    for group in comparison.groups:
        names = ("train_loss", f"eval_{group.metric}")
        found = {name: bands(group, partial(_named, name), _POINTS) for name in names}
        quantities = [name for name in names if found[name]]
        for row, place in zip(group.every_row, _folder_names(group.every_row), strict=True):
            events = []
            if row is group.baseline:
                events = [_layout(group, quantities), _text(comparison, group)]
            own = [(name, band) for name in names for one, band in found[name] if one is row]
            for name, band in own:
                events += _scalars(f"{group.slug}/{name}", band)
            _write(folder / group.slug / place, events)
    return folder


def _named(name: str, run: RunData) -> Curve:
    """The curve "train_COLUMN" or "eval_COLUMN" of a run."""
    split, _, column = name.partition("_")
    return curve(run.train if split == "train" else run.evals, "step", column)


def _scalars(tag: str, band: Band) -> list[Event]:
    events = []
    for step, *values in zip(band.x, band.mean, band.low, band.high, strict=True):
        if all(map(math.isfinite, values)):
            named = zip(_BOUNDS, values, strict=True)
            value = [Summary.Value(tag=f"{tag}/{bound}", simple_value=v) for bound, v in named]
            events.append(Event(step=round(step), summary=Summary(value=value)))
    return events


def _layout(group: Group, quantities: list[str]) -> Event:
    """One margin chart per quantity; TensorBoard draws every run that has its tags."""
    charts = []
    for name in quantities:
        tags = (f"{group.slug}/{name}/{bound}" for bound in _BOUNDS)
        named = zip(("value", "lower", "upper"), tags, strict=True)
        series = layout_pb2.MarginChartContent.Series(**dict(named))
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

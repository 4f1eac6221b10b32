"""Write curves for TensorBoard that load fast: one run per precision mode, mean over its seeds.

TensorBoard selects no run by default above 40 runs (500 in its Time Series), colours runs and not
modes, and cannot average. So each mean is a separate run, `_summary/<mode>`: one per mode and not
per cell, each with one colour. Beside the mean (`eval/loss`, `train/loss`) there is its difference
from FP32, over the seeds that both have. Lowest and highest seed make margin charts on the
custom-scalars page; `mprun compare` adds its table as text.

tensorboard's own event writer writes the files, without torch. The event format is
https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from mprun.compare.findings import (
    OUTCOMES,
    Arm,
    Comparison,
    Curve,
    RunData,
    band,
    curve,
    grid,
    on_grid,
)
from mprun.compare.grouping import (
    BASELINE,
    ProtoGroup,
    SeedGroup,
    arm_label,
    canonical,
    cells_of,
    name_groups,
    title_of,
)
from mprun.compare.load import SUMMARY_FOLDER, load_runs
from mprun.compare.wording import group_markdown

_SUFFIX = ".mprun-compare"  # ends the names of event files: a later comparison finds its own
_POINTS = 200  # TensorBoard would keep 1,000 per tag, but draws a dot on each
# Sections are sorted by name and the first two are open: this one comes after eval and train.
_RANGE = "variation"
_NO_METRIC = ("step", "updates")  # columns of an evaluation that are not metrics


@dataclass(slots=True)
class _Section:
    """The runs that share charts.

    slug: the section of their tags; empty if they are the only ones. baseline: its name.
    """

    title: str
    slug: str
    metric: str
    arms: Sequence[Arm]  # the baseline first
    baseline: str | None
    text: str | None = None

    def tag(self, name: str) -> str:
        """Return the tag of "eval/loss", with one slash: long titles are cut before the last."""
        return f"{self.slug}/{name.replace('/', ' ')}" if self.slug else name

    def bounds(self, name: str) -> list[str]:
        """Return the tags of the lowest and the highest seed of "eval/loss"."""
        plain = f"{self.slug} {name}".strip().replace("/", " ")
        return [f"{_RANGE}/{plain} {bound}" for bound in ("lowest", "highest")]


def write_summaries(comparison: Comparison, root: Path) -> Path:
    """Replace the summary runs below `root/_summary` by those of `comparison`; return that folder.

    Tags, over steps: the means `eval/<metric>` and `train/loss`; `eval/loss vs FP32 (%)` and
    `train/loss vs FP32 (%)`; `variation/eval <metric> lowest` and so on. With several groups they
    are `<slug>/eval <metric>`, ..., `variation/<slug> eval <metric> lowest`. Non-finite points are
    left out. Only event files that this module wrote are deleted.
    """
    several = len(comparison.groups) > 1
    sections = [
        _Section(
            group.title,
            group.slug if several else "",
            group.metric,
            [row.arm for row in group.every_row],
            group.baseline.arm.reference,
            group_markdown(comparison, group),
        )
        for group in comparison.groups
    ]
    return _write_sections(sections, root)


def write_means(folders: Sequence[Path], root: Path) -> Path:
    """Write the same without verdicts, for the runs below the folders; no baseline is needed.

    A mode without a finished run is drawn as far as its runs have come. Raises BadInput or Damaged
    if the runs cannot be read.
    """
    families: dict[str, list[SeedGroup]] = {}
    for cell in cells_of(load_runs(folders)[0], None, ()):
        families.setdefault(canonical(cell.shared), []).append(cell)
    groups, baselines = [], []
    for family in families.values():
        family.sort(key=lambda cell: (not cell.is_baseline, cell.first.mode != BASELINE))
        first, arms = family[0], []
        for cell in family:
            ended = [run for run in cell.runs if run.status in OUTCOMES]
            label = arm_label(cell, first, family)
            arms.append(Arm(label, cell.first.mode, ended or cell.runs))
        groups.append(ProtoGroup(title_of(first.first), "", arms[0], arms[1:], first.first.keys))
        baselines.append(arms[0].reference if first.is_baseline else None)
    name_groups(groups)
    sections = [
        _Section(
            group.title,
            group.slug if len(groups) > 1 else "",
            str(group.keys.get("compare.metric", "loss")),
            [group.baseline, *group.arms],
            baseline,
        )
        for group, baseline in zip(groups, baselines, strict=True)
    ]
    return _write_sections(sections, root)


def _write_sections(sections: Sequence[_Section], root: Path) -> Path:
    folder = root / SUMMARY_FOLDER
    _remove_old(folder)
    labels = list(dict.fromkeys(arm.label for section in sections for arm in section.arms))
    events: dict[str, list[Event]] = {label: [] for label in labels}
    events[labels[0]].append(_layout(sections))
    for section in sections:
        if section.text is not None:
            events[section.arms[0].label].append(_text(section))
        for label, tag, x, values in _curves(section):
            events[label] += _scalars(tag, x, values)
    for label, place in zip(labels, _folder_names(labels), strict=True):
        if events[label]:
            _write(folder / place, events[label])
    return folder


def _curves(section: _Section) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Yield (label, tag, steps, values) of every curve: all evaluation metrics, and the loss.

    The loss and the judged metric also have their extreme seeds; losses have the difference to
    FP32.
    """
    runs = [run for arm in section.arms for run in arm.runs]
    metrics = dict.fromkeys(key for run in runs for key in run.evals if key not in _NO_METRIC)
    for name in [*(f"eval/{metric}" for metric in metrics), "train/loss"]:
        every = [[_named(name, run) for run in arm.runs] for arm in section.arms]
        x = grid([one for own in every for one in own], _POINTS)
        for arm, own in zip(section.arms, every, strict=True):
            found = band(own, x)
            yield arm.label, section.tag(name), x, found.mean
            if name in _charted(section):
                lowest, highest = section.bounds(name)
                yield arm.label, lowest, x, found.low
                yield arm.label, highest, x, found.high
            if section.baseline and name.endswith("/loss"):
                tag = section.tag(f"{name} vs {section.baseline} (%)")
                yield arm.label, tag, x, _percent(name, arm, section.arms[0], x)


def _percent(name: str, arm: Arm, baseline: Arm, x: np.ndarray) -> np.ndarray:
    """Return the arm's difference to the baseline at each x: the mean over seeds that both have.

    Foreign logs have no seeds; for them it is the difference of the means.
    """
    if baseline.foreign:
        means = [band([_named(name, run) for run in one.runs], x).mean for one in (arm, baseline)]
        with np.errstate(divide="ignore", invalid="ignore"):
            return 100 * (means[0] / means[1] - 1)
    bases = {run.seed: on_grid(*_named(name, run), x) for run in baseline.runs}
    with np.errstate(divide="ignore", invalid="ignore"):
        pairs = [
            (x, 100 * (on_grid(*_named(name, run), x) / bases[run.seed] - 1))
            for run in arm.runs
            if run.seed in bases
        ]
    return band(pairs, x).mean


def _named(name: str, run: RunData) -> Curve:
    """Return the curve "train/COLUMN" or "eval/COLUMN" of a run."""
    split, _, column = name.partition("/")
    return curve(run.train if split == "train" else run.evals, "step", column)


def _charted(section: _Section) -> tuple[str, str]:
    """Return the names of the curves with a margin chart."""
    return "train/loss", f"eval/{section.metric}"


def _scalars(tag: str, x: np.ndarray, values: np.ndarray) -> list[Event]:
    return [
        Event(step=round(step), summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))
        for step, value in zip(x, values, strict=True)
        if math.isfinite(value)
    ]


def _layout(sections: Sequence[_Section]) -> Event:
    """Build one margin chart per quantity; TensorBoard draws every run that has its tags."""
    categories = []
    for section in sections:
        charts = []
        for name in _charted(section):
            lowest, highest = section.bounds(name)
            series = layout_pb2.MarginChartContent.Series(
                value=section.tag(name), lower=lowest, upper=highest
            )
            margin = layout_pb2.MarginChartContent(series=[series])
            title = f"{name} (mean, lowest and highest seed)"
            charts.append(layout_pb2.Chart(title=title, margin=margin))
        categories.append(layout_pb2.Category(title=section.title, chart=charts))
    return _tensor(
        custom_scalar.CONFIG_SUMMARY_TAG,
        custom_scalar.create_summary_metadata(),
        layout_pb2.Layout(category=categories).SerializeToString(),
    )


def _text(section: _Section) -> Event:
    return _tensor(
        section.tag("verdict"),
        text_plugin.create_summary_metadata(None, "What mprun compare found."),
        (section.text or "").encode(),
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


def _folder_names(labels: Sequence[str]) -> list[str]:
    """Return each label as one path component, numbered if two labels become the same."""
    names: list[str] = []
    for label in labels:
        plain = "".join(c if c.isalnum() or c in "_-.=" else "_" for c in label)
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

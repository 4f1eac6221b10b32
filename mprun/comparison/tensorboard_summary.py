"""Write curves for TensorBoard that load fast: one run per precision mode, mean over its seeds.

TensorBoard selects no run by default above 40 runs (500 in its Time Series), colours runs and not
modes, and cannot average. So each mean is a separate run, `_summary/<mode>`, with one colour. The
lowest and the highest seed make margin charts on the custom-scalars page.

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

from mprun.comparison import grouping
from mprun.comparison.findings import (
    Arm,
    Comparison,
    Curve,
    RunData,
    at_shared_steps,
    band,
    curve,
    grid,
)
from mprun.comparison.load import SUMMARY_FOLDER, load_runs
from mprun.comparison.text_outputs import group_markdown
from mprun.record.console import counted, printable
from mprun.record.metrics_columns import NO_METRIC
from mprun.record.run_directory import refuse_link
from mprun.record.run_record import OUTCOMES

_SUFFIX = ".mprun-compare"  # ends the names of event files: a later comparison finds its own
_POINTS = 200  # TensorBoard would keep 1,000 per tag, but draws a dot on each
# Sections are sorted by name and the first two are open: this one comes after eval and train.
_RANGE = "variation"


@dataclass(slots=True)
class _Section:
    """The runs that share charts."""

    title: str
    slug: str  # the section of their tags; empty if they are the only ones
    metric: str
    arms: Sequence[Arm]  # the baseline first
    baseline: str | None  # its name
    text: str = ""

    @property
    def charted(self) -> tuple[str, str]:
        """Return the names of the curves with a margin chart."""
        return "train/loss", f"eval/{self.metric}"

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
    `train/loss vs FP32 (%)`, over the seeds that both have; `variation/eval <metric> lowest` and so
    on. With several groups they are `<slug>/eval <metric>`, ..., `variation/<slug> eval <metric>
    lowest`. Non-finite points are left out. Only event files that this module wrote are deleted.
    """
    sections = []
    for group in comparison.groups:
        arms, told = [row.arm for row in group.every_row], group_markdown(comparison, group)
        named = group.title, group.slug, group.metric
        sections.append(_Section(*named, arms, arms[0].reference, told))
    return _write_sections(sections, root)


def write_means(folders: Sequence[Path], root: Path) -> Path:
    """Write the same without verdicts, for the runs below the folders; no baseline is needed.

    A mode without a finished run is drawn as far as its runs have come. Errors: see `load_runs`.
    """
    groups, baselines = [], []
    for family in grouping.families(grouping.cells_of(load_runs(folders)[0])):
        family.sort(key=lambda cell: (not cell.is_baseline, cell.first.mode != grouping.BASELINE))
        first, varied, arms = family[0].first, grouping.varied_keys(family), []
        for cell in family:
            ended = [run for run in cell.runs if run.status in OUTCOMES]
            label = grouping.arm_label(cell, family[0], varied)
            arms.append(Arm(label, cell.first.mode, ended or cell.runs))
        title = grouping.title_of(first)
        groups.append(grouping.ProtoGroup(title, "", arms[0], arms[1:], first.keys))
        baselines.append(arms[0].reference if family[0].is_baseline else None)
    grouping.name_groups(groups)
    sections = []
    for group, baseline in zip(groups, baselines, strict=True):
        named = group.title, group.slug, str(group.keys.get("compare.metric", "loss"))
        sections.append(_Section(*named, [group.baseline, *group.arms], baseline))
    return _write_sections(sections, root)


def _write_sections(sections: Sequence[_Section], root: Path) -> Path:
    folder = refuse_link(root / SUMMARY_FOLDER)
    if len(sections) == 1:
        sections[0].slug = ""
    labels = list(dict.fromkeys(arm.label for section in sections for arm in section.arms))
    places = [refuse_link(folder / name) for name in _folder_names(labels)]
    _remove_old(folder)
    # Serialized, a tenth of the size of the objects.
    events: dict[str, list[bytes]] = {label: [] for label in labels}
    events[labels[0]].append(_layout(sections).SerializeToString())
    for section in counted(sections, "averaging configurations"):
        if section.text:
            about = text_plugin.create_summary_metadata(None, "What mprun compare found.")
            told = _tensor(section.tag("verdict"), about, printable(section.text).encode())
            events[section.arms[0].label].append(told.SerializeToString())
        for label, found in _scalars(section).items():
            events[label] += [event.SerializeToString() for event in found]
    for label, place in counted([*zip(labels, places, strict=True)], "writing the curves of modes"):
        if events[label]:
            now = time.time()
            writer = EventFileWriter(str(place), 1000, filename_suffix=_SUFFIX)
            for content in events.pop(label):
                event = Event.FromString(content)
                event.wall_time = now
                writer.add_event(event)
            writer.close()
    return folder


def _curves(section: _Section) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Yield (label, tag, steps, values) of every curve.

    They are all evaluation metrics and the training loss, the extreme seeds of that and of the
    judged metric, and of losses the difference to the baseline.
    """
    runs = [run for arm in section.arms for run in arm.runs]
    metrics = dict.fromkeys(key for run in runs for key in run.evals if key not in NO_METRIC)
    for name in [*(f"eval/{metric}" for metric in metrics), "train/loss"]:
        x = grid(_named(name, runs), _POINTS)
        for arm in section.arms:
            found = band(_named(name, arm.runs), x)
            yield arm.label, section.tag(name), x, found.mean
            if name in section.charted:
                lowest, highest = section.bounds(name)
                yield arm.label, lowest, x, found.low
                yield arm.label, highest, x, found.high
            if section.baseline and name.endswith("/loss"):
                tag = section.tag(f"{name} vs {section.baseline} (%)")
                yield arm.label, tag, *_percent(name, arm, section.arms[0])


def _percent(name: str, arm: Arm, baseline: Arm) -> tuple[np.ndarray, np.ndarray]:
    """Return the shared steps, and there the arm's difference in % of the baseline's mean.

    Means are over the seeds that both have, as in a verdict; foreign logs have none.
    """
    runs = arm.runs, baseline.runs
    if not baseline.foreign:
        own, base = ({run.seed: run for run in one} for one in runs)
        shared = [seed for seed in own if seed in base]
        runs = [own[seed] for seed in shared], [base[seed] for seed in shared]
    judged = [run.judged[-1] for one in runs for run in one if run.judged is not None]
    every = at_shared_steps(_named(name, [*runs[0], *runs[1]]), max(judged, default=np.inf))
    x, count = grid(every, _POINTS), len(runs[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, reference = (band(one, x).mean for one in (every[:count], every[count:]))
        return x, 100 * (mean - reference) / np.abs(reference)


def _named(name: str, runs: Sequence[RunData]) -> list[Curve]:
    """Return the curve "train/COLUMN" or "eval/COLUMN" of each run."""
    split, _, column = name.partition("/")
    return [curve(run.train if split == "train" else run.evals, "step", column) for run in runs]


def _scalars(section: _Section) -> dict[str, list[Event]]:
    """Return for each mode one event a step: an event for each number would take far longer."""
    found: dict[str, dict[int, list[Summary.Value]]] = {}  # label -> step -> values
    for label, tag, x, values in _curves(section):
        by_step = found.setdefault(label, {})
        for step, value in zip(x.tolist(), values.tolist(), strict=True):
            if math.isfinite(value):
                shown = Summary.Value(tag=tag, simple_value=value)
                by_step.setdefault(round(step), []).append(shown)
    return {
        label: [Event(step=step, summary=Summary(value=own)) for step, own in sorted(steps.items())]
        for label, steps in found.items()
    }


def _layout(sections: Sequence[_Section]) -> Event:
    """Build one margin chart per quantity; TensorBoard draws every run that has its tags."""
    categories = []
    for section in sections:
        charts = []
        for name in section.charted:
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


def _tensor(tag: str, metadata, content: bytes) -> Event:
    tensor = TensorProto(dtype="DT_STRING", string_val=[content])
    return Event(
        step=0, summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
    )


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

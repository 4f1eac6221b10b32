"""Draw the figures of one group in the order of the report: the decision first, costs last."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import cast

import numpy as np
from matplotlib.axes import Axes

from mprun.comparison import wording as text
from mprun.comparison.curves import curves, difference_rows, loss_scale
from mprun.comparison.decision import GAN_LOSSES
from mprun.comparison.findings import Group, Row, is_gan
from mprun.comparison.gap_growth import TRAINING, evaluation
from mprun.comparison.numerics import ProbedMode, numerics_figures
from mprun.plots.panel import GREY, INK, MARKS, Drawing, Style, round_multiple, rows_panel

# Margins to either side of the interval plot: up to the first the scale is linear, an arrow marks
# values beyond the second.
_LINEAR, _REACH = 8, 1000
_MOST_POINTS = 500  # more than a panel of this width can show
_MOST_MODES = 24  # beside the baseline: colours repeat, and a picture has a largest size


def group_figures(
    group: Group,
    styles: dict[str, Style],
    points: int = 240,
    probes: Sequence[ProbedMode] = (),
    most: int | None = None,
) -> list[Drawing]:
    """Draw the figures that the group has data for; call it inside `mprun.plots.panel.settings()`.

    Of many modes the first ones are drawn, which the captions say.

    points: most points of a curve. most: so many figures, the first ones; None: all.
    """
    points, every = min(points, _MOST_POINTS), len(group.rows)
    group = replace(group, rows=group.rows[:_MOST_MODES])
    runs = group.baseline.arm.runs
    adversarial = any(is_gan(run.keys) for run in runs)
    metrics = [group.metric]
    if group.metric != "sliced_wasserstein" or adversarial:
        metrics += [name for name in ("d_loss", "g_loss") if name != group.metric]
    # A foreign log has one tag and no count of updates; the metric's curve below shows it.
    plots = () if all(run.foreign for run in runs) else TRAINING
    # Without a skipped update every step is an applied update.
    plots = plots if any(run.skipped for run in group.every_run) else plots[:1]
    # A GAN's losses show who is winning; their difference says nothing.
    compared = [] if adversarial and group.metric in GAN_LOSSES else [evaluation(group.metric)]
    compared += [] if adversarial else plots[:1]

    def drawings() -> Iterator[Drawing | None]:
        yield intervals(group, styles)
        yield from (difference_rows(group, styles, plot, points) for plot in compared)
        yield from (curves(group, styles, plot, points) for plot in plots)
        yield from (curves(group, styles, evaluation(metric), points) for metric in metrics)
        yield loss_scale(group, styles, points)
        if text.costs_shown(group):
            yield from (throughput(group, styles), memory(group, styles))
        yield from numerics_figures(list(probes), styles)

    found = [*islice(filter(None, drawings()), most)]
    for drawing in found:
        drawing.caption += f" The first {_MOST_MODES} of {every} modes." * (every > _MOST_MODES)
    return found


def intervals(group: Group, styles: dict[str, Style]) -> Drawing | None:
    """Draw difference and interval per mode against the margin; None if nothing was judged."""
    found = [_interval(group, row) for row in group.rows]
    known = [shown for shown in found if shown is not None]
    if not known:
        return None
    margin = group.factor * group.margin_setting
    _, lows, highs = zip(*known, strict=True)
    # Show the intervals whole, and both ways at least a bit more than the margin.
    left, right = (max(1.6 * margin, 1.1 * far) for far in (-min(lows), max(highs)))
    is_wide = max(left, right) > _LINEAR * margin
    if is_wide:  # to a round number, which has a tick
        ends = (max(2 * margin, far) for far in (-min(lows), max(highs)))
        left, right = (min(round_multiple(end, margin), _REACH * margin) for end in ends)
    results = [f"{row.arm.label}: {_result(group, row)}" for row in group.rows]
    around = f"±{text.margin_text(group)}"
    marks = [MARKS[row.verdict.name][0] for row in group.rows]
    figure, axes, at = rows_panel(
        f"Difference to {text.baseline_name(group)} in {group.metric}",
        list(map("{} {}".format, marks, results)),
        f"difference{f' in {text.unit(group)}' if text.unit(group) else ''}, worse →",
        f"Matches = interval inside the shaded margin ({around}).",
    )
    if is_wide:
        axes.set_xscale("asinh", linear_width=margin / 2)
        ticks = [0, *(-tick for tick in _ticks(margin, left)), *_ticks(margin, right)]
        axes.set_xticks(ticks, [f"{tick:+,g}" if tick else "0" for tick in ticks])
        for label, tick in zip(axes.get_xticklabels(), ticks, strict=True):  # inside the picture
            label.set_ha({-left: "left", right: "right"}.get(tick, "center"))
    axes.set_xlim(-left, right)
    axes.axvspan(-margin, margin, color=GREY, alpha=0.22, linewidth=0)
    for y, row, shown in zip(at, group.rows, found, strict=True):
        _draw_interval(axes, y, shown, (-left, right), styles[row.arm.label].colour)
    beyond = max(highs) > right or min(lows) < -left
    return Drawing(
        "intervals",
        f"Dot: difference; line: its {text.level_text(group)} confidence interval; shaded: the "
        f"margin, {around}. To the right is worse."
        + " Logarithmic far from zero." * is_wide
        + " An arrow points to what lies outside the picture." * beyond,
        f"Interval plot, margin {around}. {'; '.join(results)}.",
        figure,
    )


def _ticks(margin: float, end: float) -> list[float]:
    """Return the margin, ten times of it and so on, and the end of the axis."""
    return [margin, *(at for power in (1, 2) if (at := margin * 10.0**power) < end / 1.9), end]


def _draw_interval(
    axes: Axes,
    y: float,
    interval: tuple[float, float, float] | None,
    frame: tuple[float, float],
    colour: str,
) -> None:
    """Draw a dot and a line, and an arrow at each edge of the frame that it crosses."""
    if interval is None:
        return
    (middle, low, high), (left, right) = interval, frame
    axes.vlines([0], [y - 0.22], [y + 0.22], color=INK, linewidth=1)
    if low <= right and high >= left:
        axes.plot([max(low, left), min(high, right)], [y, y], color=colour, linewidth=2.5)
    if left <= middle <= right:
        axes.plot([middle], [y], "o", color=colour, markersize=6.5)
    for beyond, edge, marker in ((high > right, right, ">"), (low < left, left, "<")):
        if beyond:
            axes.plot([edge], [y], marker, color=colour, markersize=8, clip_on=False)


def throughput(group: Group, styles: dict[str, Style]) -> Drawing | None:
    """Draw the samples per second of each mode."""
    speeds = [(row, row.samples_per_s) for row in group.every_row]
    bars = [(row, speed) for row, speed in speeds if speed and math.isfinite(speed)]
    if not bars:
        return None
    per_second = f"{bars[0][0].arm.runs[0].sample}s/s"
    texts = [
        f"{row.arm.label}: {text.marked(row, f'{text.count_text(speed)} {per_second}')}"
        + (f", {text.ratio_text(row.speedup)}" if row.speedup and row is not group.baseline else "")
        for row, speed in bars
    ]
    caption = (
        f"Median over the seeds; ratios: over {text.baseline_name(group)}'s on the same device."
    )
    if any(run.environment.get("device") == "cpu" for run in group.every_run):
        caption += (
            " Measured on a CPU, where 16-bit arithmetic is emulated or slow: this speed says "
            "nothing about a GPU."
        )
    return _bars("Throughput", caption, texts, bars, styles, per_second)


def memory(group: Group, styles: dict[str, Style]) -> Drawing | None:
    """Draw the peak memory of each mode, and its activation memory."""
    rows = [row for row in group.every_row if row.peak_bytes]
    if not rows:
        return None
    texts = []
    for row in rows:
        peak = text.marked(row, text.bytes_text(row.peak_bytes))
        if row is not group.baseline:
            peak += f", {text.ratio_text(row.memory_ratio)}" if row.memory_ratio else ""
            kept = row.activation_ratio
            peak += f"; activations {text.ratio_text(kept)}" if kept else ""
        texts.append(f"{row.arm.label}: {peak}")
    measures = sorted({run.memory_measure for row in rows for run in row.arm.runs} - {""})
    caption = "Largest over the seeds"
    caption += f", measured as: {', '.join(measures)}." if measures else "."
    caption += f" Ratios: over {text.baseline_name(group)}'s; activations: what autograd keeps."
    if "process resident set" in measures:
        caption += (
            " The resident set is that of the whole process: Python, torch and the emulation's "
            "temporary FP32 copies are in it."
        )
    bars = [(row, (row.peak_bytes or 0) / 2**20) for row in rows]
    return _bars("Peak memory", caption, texts, bars, styles, "MiB")


def _bars(
    title: str,
    caption: str,
    texts: list[str],
    bars: list[tuple[Row, float]],
    styles: dict[str, Style],
    xlabel: str,
) -> Drawing:
    """Draw a bar for each row below its text."""
    figure, axes, at = rows_panel(title, texts, xlabel)
    for y, (row, value) in zip(at, bars, strict=True):
        style = styles[row.arm.label]
        hatch = "///" if style.dashes else None
        axes.barh(y, value, 0.34, color=style.colour, hatch=hatch, edgecolor="white", linewidth=0)
    axes.set_xlim(0, 1.04 * float(np.max([value for _, value in bars])))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    name = title.lower().removeprefix("peak ")
    return Drawing(name, caption, f"{title}. {'; '.join(texts)}.", figure)


def _interval(group: Group, row: Row) -> tuple[float, float, float] | None:
    """Return the displayed difference, low and high; None unless all three are known."""
    *parts, _ = text.shown(group, row.verdict).values()
    if any(part is None or not math.isfinite(part) for part in parts):
        return None
    return cast(tuple[float, float, float], tuple(parts))


def _result(group: Group, row: Row) -> str:
    if _interval(group, row) is None:
        return text.answer(group, row).removeprefix(row.arm.label).strip(" :.")
    return f"{text.difference_text(group, row.verdict)}, {row.verdict.name}"

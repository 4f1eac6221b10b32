"""The figures of one group, in the order of the report: the decision first, costs last."""

import math
from collections.abc import Sequence

import numpy as np

from mprun.compare.arms import is_gan
from mprun.compare.figures_curves import evaluation, loss_scale, training_loss
from mprun.compare.figures_numerics import numerics_figures
from mprun.compare.findings import Group, Row
from mprun.compare.formatting import (
    answer,
    baseline_name,
    bytes_text,
    count_text,
    difference_text,
    level_text,
    margin_text,
    ratio_text,
    scaled,
    unit,
)
from mprun.compare.probed_modes import ProbedMode
from mprun.plots.palette import INK, MARKS, Style
from mprun.plots.panel import GREY, Drawing, rows_panel

_REACH = 8  # margins that the interval plot shows to either side; further out is an arrow


def group_figures(
    group: Group,
    styles: dict[str, Style],
    points: int = 240,
    probes: Sequence[ProbedMode] = (),
) -> list[Drawing]:
    """All figures that the group has data for; call it inside `canvas.settings()`.

    points: how many a curve has at most; 500 are more than a panel of this width can show.
    probes: what `probed_modes` found in the group.
    """
    points = min(points, 500)
    metrics = [group.metric]
    if group.metric != "sliced_wasserstein" or _is_gan(group):
        metrics += [name for name in ("d_loss", "g_loss") if name != group.metric]
    # A foreign log has one tag and no count of updates; its curve is that of the metric below.
    axes = () if all(run.foreign for run in group.baseline.arm.runs) else ("step", "updates")
    drawings = [
        intervals(group, styles),
        *(training_loss(group, styles, axis, points) for axis in axes),
        *(evaluation(group, styles, metric, points) for metric in metrics),
        loss_scale(group, styles, points),
        throughput(group, styles),
        memory(group, styles),
        *numerics_figures(list(probes), styles),
    ]
    return [drawing for drawing in drawings if drawing is not None]


def intervals(group: Group, styles: dict[str, Style]) -> Drawing | None:
    """Difference and interval per mode against the margin; None where nothing was judged."""
    rows = [(row, _interval(group, row)) for row in group.rows]
    known = [interval for _, interval in rows if interval is not None]
    if not known:
        return None
    margin = (100 if group.relative else 1) * group.margin_setting
    left = -min(max(1.6 * margin, -1.1 * min(low for _, low, _ in known)), _REACH * margin)
    right = min(max(1.6 * margin, 1.1 * max(high for _, _, high in known)), _REACH * margin)
    labels = [
        f"{MARKS[row.verdict.name][0]} {row.arm.label}: {_result(group, row)}" for row in group.rows
    ]
    measure = f" in {unit(group)}" if unit(group) else ""
    figure, axes, at = rows_panel(
        f"Difference to {baseline_name(group)} in {group.metric}",
        labels,
        f"difference{measure}, worse →",
        f"Matches = interval inside the shaded margin (±{margin_text(group)}).",
    )
    axes.set_xlim(left, right)
    axes.axvspan(-margin, margin, color=GREY, alpha=0.22, linewidth=0)
    for y, (row, interval) in zip(at, rows, strict=True):
        if interval is None:
            continue
        colour = styles[row.arm.label].colour
        middle, low, high = interval
        axes.vlines([0], [y - 0.22], [y + 0.22], color=INK, linewidth=1)
        if low <= right and high >= left:
            axes.plot([max(low, left), min(high, right)], [y, y], color=colour, linewidth=2.5)
        if left <= middle <= right:
            axes.plot([middle], [y], "o", color=colour, markersize=6.5)
        for beyond, edge, marker in ((high > right, right, ">"), (low < left, left, "<")):
            if beyond:
                axes.plot([edge], [y], marker, color=colour, markersize=8, clip_on=False)
    texts = "; ".join(f"{row.arm.label}: {_result(group, row)}" for row in group.rows)
    return Drawing(
        "intervals",
        f"Dot: difference; line: its {level_text(group)} confidence interval; shaded: the margin, "
        f"±{margin_text(group)}. To the right is worse; an arrow points to what lies outside the "
        "picture.",
        f"Interval plot, margin ±{margin_text(group)}. {texts}.",
        figure,
    )


def throughput(group: Group, styles: dict[str, Style]) -> Drawing | None:
    """Samples per second of each mode."""
    rows = [
        row
        for row in (group.baseline, *group.rows)
        if row.samples_per_s and math.isfinite(row.samples_per_s)
    ]
    if not rows:
        return None
    sample = rows[0].arm.runs[0].sample
    texts = [
        f"{row.arm.label}: {count_text(row.samples_per_s)} {sample}s/s"
        + (f", {ratio_text(row.speedup)}" if row.speedup and row is not group.baseline else "")
        for row in rows
    ]
    figure = _bars(
        "Throughput", texts, [row.samples_per_s for row in rows], rows, styles, f"{sample}s/s"
    )
    caption = f"Median over the seeds; ratios: over {baseline_name(group)}'s on the same device."
    if on_cpu(group):
        caption += " " + CPU_SPEED
    return Drawing("throughput", caption, "Throughput. " + "; ".join(texts) + ".", figure)


CPU_SPEED = (
    "Measured on a CPU, where 16-bit arithmetic is emulated or slow: this speed says nothing about "
    "a GPU."
)


def memory(group: Group, styles: dict[str, Style]) -> Drawing | None:
    """Peak memory of each mode, and what it keeps for the backward pass."""
    rows = [row for row in (group.baseline, *group.rows) if row.peak_bytes]
    if not rows:
        return None
    texts = [
        f"{row.arm.label}: {bytes_text(row.peak_bytes)}"
        + ("" if row is group.baseline else _memory_ratios(row))
        for row in rows
    ]
    figure = _bars(
        "Peak memory", texts, [row.peak_bytes / 2**20 for row in rows], rows, styles, "MiB"
    )
    measures = sorted({run.memory_measure for row in rows for run in row.arm.runs} - {""})
    caption = "Largest over the seeds"
    caption += f", measured as: {', '.join(measures)}." if measures else "."
    caption += f" Ratios: over {baseline_name(group)}'s; for backward: tensors kept until then."
    if "process resident set" in measures:
        caption += (
            " The resident set is that of the whole process: Python, torch and the emulation's "
            "temporary FP32 copies are in it."
        )
    return Drawing("memory", caption, "Peak memory. " + "; ".join(texts) + ".", figure)


def _memory_ratios(row: Row) -> str:
    text = f", {ratio_text(row.memory_ratio)}" if row.memory_ratio else ""
    return text + (f"; for backward {ratio_text(row.saved_ratio)}" if row.saved_ratio else "")


def on_cpu(group: Group) -> bool:
    """Whether a run of the group says that it ran on a CPU."""
    return any(
        run.environment.get("device") == "cpu"
        for row in (group.baseline, *group.rows)
        for run in row.arm.runs
    )


def _bars(title, texts, values, rows: list[Row], styles: dict[str, Style], xlabel: str):
    figure, axes, at = rows_panel(title, texts, xlabel)
    for y, value, row in zip(at, values, rows, strict=True):
        style = styles[row.arm.label]
        hatch = "///" if style.dashes else None
        axes.barh(y, value, 0.34, color=style.colour, hatch=hatch, edgecolor="white", linewidth=0)
    axes.set_xlim(0, 1.04 * float(np.max(values)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    return figure


def _interval(group: Group, row: Row) -> tuple[float, float, float] | None:
    verdict = row.verdict
    parts = [scaled(group, verdict, v) for v in (verdict.difference, verdict.low, verdict.high)]
    if any(part is None or not math.isfinite(part) for part in parts):
        return None
    return tuple(parts)


def _result(group: Group, row: Row) -> str:
    if _interval(group, row) is None:
        return answer(group, row).removeprefix(row.arm.label).strip(" :.")
    return f"{difference_text(group, row.verdict)}, {row.verdict.name}"


def _is_gan(group: Group) -> bool:
    return any(is_gan(run.keys) for run in group.baseline.arm.runs)

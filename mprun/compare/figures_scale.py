"""The loss scale of each mode that scales, and the updates that it skipped."""

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mprun.compare.findings import Group, Row, RunData
from mprun.compare.seed_bands import curve
from mprun.plots.palette import Style
from mprun.plots.panel import Drawing, line_entry, mark_entry, panel, thousands

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def loss_scale(group: Group, styles: dict[str, Style], points: int):
    """The loss scale of one seed per mode and its skipped updates; None if no mode scales."""
    traces = [(row, _scaling_run(row)) for row in (group.baseline, *group.rows)]
    traces = [(row, run) for row, run in traces if run is not None]
    if not traces:
        return None
    entries = [line_entry(row.arm.label, styles[row.arm.label]) for row, _ in traces]
    entries.append(mark_entry("skipped update (a row per mode)", "|"))
    figure, axes = panel("Loss scale", 1.9, entries)
    for layer, (row, run) in enumerate(traces):
        # The first is the widest, so that equal traces stay visible below each other.
        width = 1.5 + min(1.4, 4 / len(traces)) * (len(traces) - 1 - layer)
        style = styles[row.arm.label]
        step, scale = curve(run.train, "step", "loss_scale")
        keep = np.isfinite(scale) & (scale > 0)
        step, power = _corners(step[keep], np.log2(scale[keep]), points)
        axes.plot(
            step,
            power,
            color=style.colour,
            linestyle=style.linestyle,
            linewidth=width,
            drawstyle="steps-post",
        )
    _skip_rows(axes, traces, styles)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: "2" + f"{value:.0f}".translate(_SUPERSCRIPT))
    )
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.set(xlabel="step", ylabel="loss scale")
    axes.grid()
    which = ", ".join(f"{row.arm.label} seed {run.seed}" for row, run in traces)
    skipped = ", ".join(f"{row.arm.label} {row.skipped}" for row, _ in traces)
    return Drawing(
        "loss-scale",
        f"One run per mode ({which}). Skipped updates over all seeds: {skipped}.",
        f"Loss scale over steps of {which}. Skipped updates over all seeds: {skipped}.",
        figure,
    )


def _skip_rows(axes, traces: list[tuple[Row, RunData]], styles: dict[str, Style]) -> None:
    """Below the traces one row per mode with a tick at each skipped update."""
    axes.margins(0.03, 0.08)
    low, high = axes.get_ylim()
    low = min(low, high - 2)
    ticks = MaxNLocator(nbins=6, integer=True).tick_values(low, high)
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    share = min(0.09 * len(traces), 0.4)  # of the height, for the rows
    axes.set_ylim(low - share / (1 - share) * (high - low), high)
    for number, (row, run) in enumerate(traces):
        skips = _every(np.asarray(run.skip_steps, float), 200)
        axes.plot(
            skips,
            np.full(len(skips), share * (1 - (number + 0.5) / len(traces))),
            "|",
            color=styles[row.arm.label].colour,
            markersize=8,
            markeredgewidth=1.2,
            transform=axes.get_xaxis_transform(),
        )


def _scaling_run(row: Row) -> RunData | None:
    """The run of the lowest seed that scaled its loss and recorded it."""
    for run in sorted(row.arm.runs, key=lambda run: run.seed):
        if run.scale_range is not None and len(curve(run.train, "step", "loss_scale")[0]):
            return run
    return None


def _corners(x: np.ndarray, y: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """What a step curve needs: its ends and the places where it changes."""
    if len(x) > 2:
        keep = np.ones(len(x), bool)
        keep[1:-1] = y[1:-1] != y[:-2]
        x, y = x[keep], y[keep]
    chosen = _every(np.arange(len(x)), 2 * points)
    return x[chosen], y[chosen]


def _every(values: np.ndarray, most: int) -> np.ndarray:
    """At most `most` of the values, equally spaced, first and last among them."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).astype(int)]

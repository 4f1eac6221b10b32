"""Curves of a group: training loss and evaluation metric, mean and seed band of every mode.

The loss scale of each mode that scales, and the updates that it skipped.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mprun.compare.findings import Band, Curve, Group, Row, RunData, bands, curve
from mprun.plots.panel import Drawing, Style, line_entry, mark_entry, panel, power_of_two, thousands

_HEIGHT = 2.5  # inches
_NOTE = "Band: min to max over seeds; not the test."


@dataclass(frozen=True, slots=True)
class Plot:
    """Which columns of the runs a figure of curves shows, and what they are called."""

    name: str
    title: str
    xlabel: str
    ylabel: str
    x: str
    y: str
    of_evals: bool = False

    def curve_of(self, run: RunData) -> Curve:
        """What a run recorded."""
        return curve(run.evals if self.of_evals else run.train, self.x, self.y)


TRAINING = tuple(
    Plot(name, f"Training loss over {title}", xlabel, "training loss", x, "loss")
    for name, title, xlabel, x in (
        ("loss-steps", "steps", "step", "step"),
        ("loss-updates", "applied updates", "applied updates", "updates"),
    )
)


def evaluation(metric: str) -> Plot:
    """A metric of the evaluations over steps."""
    name = "".join(c if c.isalnum() or c in "_-" else "_" for c in metric)
    return Plot(f"eval-{name}", f"Evaluation: {metric}", "step", metric, "step", metric, True)


def curves(group: Group, styles: dict[str, Style], plot: Plot, points: int) -> Drawing | None:
    """Mean and seed band per mode, the baseline on top; None where there is no curve to show."""
    found = bands(group, plot.curve_of, points)
    longest = max(len(plot.curve_of(run)[0]) for run in group.every_run)
    if not found or longest < (2 if plot.of_evals else 1):
        return None
    # The baseline comes first and is drawn last.
    drawn = sorted(found, key=lambda item: item[0] is group.baseline)
    entries = _entries(found, styles)
    ends = sum((_ends(row, plot) for row, _ in drawn), [])
    if ends:
        entries.append(mark_entry("diverged", "x"))
    seeds = max(len(row.arm.runs) for row, _ in found)
    figure, axes = panel(plot.title, _HEIGHT, entries, _NOTE if seeds > 1 else "")
    for layer, (row, b) in enumerate(drawn):
        _draw(axes, b, styles[row.arm.label], 2 + layer, plot.of_evals)
    limits, logarithmic = _limits([b for _, b in drawn], drawn[-1][1])
    _set_y(axes, limits, logarithmic)
    axes.set(xlabel=plot.xlabel, ylabel=plot.ylabel + " (log scale)" * logarithmic)
    for label, at, value in ends:
        cross = {"color": styles[label].colour, "markersize": 8, "markeredgewidth": 2}
        height = _inside(value, limits, logarithmic)
        axes.plot([at], [height], "x", zorder=40, clip_on=False, **cross)
    caption = _caption(seeds, bool(ends), longest, len(found[0][1].x))
    return Drawing(plot.name, caption, f"{plot.title}, mean over seeds: {_courses(found)}.", figure)


def _entries(shown: list[tuple[Row, Any]], styles: dict[str, Style]) -> list[Line2D]:
    return [line_entry(row.arm.label, styles[row.arm.label]) for row, _ in shown]


def _caption(seeds: int, any_ended: bool, records: int, points: int) -> str:
    caption = "Mean over the seeds" if seeds > 1 else "One seed per mode"
    caption += " that still ran; a cross marks where a run diverged." if any_ended else "."
    if records > points:
        caption += f" {points} points, each the mean of about {-(-records // points)} records."
    return caption


def _draw(axes: Axes, b: Band, style: Style, layer: int, markers: bool) -> None:
    if np.nanmax(b.high - b.low) > 0:
        area: dict[str, Any] = {"color": style.colour, "alpha": 0.16, "linewidth": 0}
        axes.fill_between(b.x, b.low, b.high, zorder=layer, **area)
    known = np.isfinite(b.mean)  # without this a mode with few points would break up into dots
    x, mean, marker = b.x[known], b.mean[known], "." if markers and known.sum() <= 40 else None
    dots: dict[str, Any] = {"marker": marker, "markersize": 5}
    axes.plot(x, mean, **style.line, linewidth=1.5, zorder=layer + 20, **dots)


def _set_y(axes: Axes, limits: tuple[float, float], logarithmic: bool) -> None:
    """The frame, and what stands at its ticks."""
    if logarithmic:
        # Labels at minor ticks where the axis spans little more than a decade.
        few = limits[1] / limits[0] < 100
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(
            FuncFormatter(lambda v, _: f"{v:g}" if few and f"{v:.0e}"[0] in "25" else "")
        )
        axes.tick_params(axis="y", which="minor", labelsize=8)
    axes.set_ylim(*limits)
    axes.margins(x=0.02)
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.grid()


def _limits(bands: list[Band], baseline: Band) -> tuple[tuple[float, float], bool]:
    """((low, high) of the y axis, logarithmic?): curves that explode leave through the top.

    The frame holds the whole baseline, once its range above and below, and what the other modes
    do most of the time unless that is ten times its range away.
    """
    low, high = np.nanmin(baseline.low), np.nanmax(baseline.high)
    room = high - low if high > low else 0.1 * abs(high) or 1.0
    usual = [np.nanmedian(b.high) for b in bands], [np.nanmedian(b.low) for b in bands]
    top = max(high + room, min(max(usual[0]), high + 10 * room))
    bottom = min(low - room, max(min(usual[1]), low - 10 * room))
    highest = min(max(np.nanmax(b.high) for b in bands), top)
    lowest = max(min(np.nanmin(b.low) for b in bands), bottom)
    if lowest > 0 and highest / lowest > 8:
        edge = (highest / lowest) ** 0.05
        return (lowest / edge, highest * edge), True
    edge = 0.05 * (highest - lowest) or 0.05 * abs(highest) or 0.1
    return (lowest - edge, highest + edge), False


def _inside(value: float, limits: tuple[float, float], logarithmic: bool) -> float:
    """The value, or the place near the edge of the frame where it would be."""
    low, high = np.log(limits) if logarithmic else limits
    edge = 0.03 * (high - low)
    value = np.log(max(value, 1e-300)) if logarithmic else value
    value = float(np.clip(value, low + edge, high - edge))
    return float(np.exp(value)) if logarithmic else value


def _ends(row: Row, plot: Plot) -> list[tuple[str, float, float]]:
    """(label, x, last finite y) of each diverged run that has a curve."""
    steps = {outcome.seed: outcome.step for outcome in row.outcomes if outcome.diverged}
    found = []
    for run in row.arm.runs:
        x, y = plot.curve_of(run)
        finite = np.isfinite(x) & np.isfinite(y)
        if run.seed not in steps or not finite.any():
            continue
        told = steps[run.seed]
        at = float(run.last_step if told is None else told)
        if plot.x == "updates":
            step, updates = curve(run.train, "step", "updates")
            at = float(np.interp(at, step, updates)) if len(step) else np.nan
        if np.isfinite(at):
            found.append((row.arm.label, at, float(y[finite][-1])))
    return found


def _courses(bands: list[tuple[Row, Band]]) -> str:
    known = [(row.arm.label, b.mean[np.isfinite(b.mean)]) for row, b in bands]
    return "; ".join(f"{label} from {mean[0]:.3g} to {mean[-1]:.3g}" for label, mean in known)


def loss_scale(group: Group, styles: dict[str, Style], points: int) -> Drawing | None:
    """The loss scale of one seed per mode and its skipped updates; None if no mode scales."""
    found = [(row, _scaling_run(row)) for row in group.every_row]
    traces = [(row, run) for row, run in found if run is not None]
    if not traces:
        return None
    entries = _entries(traces, styles)
    entries.append(mark_entry("skipped update (a row per mode)", "|"))
    figure, axes = panel("Loss scale", 1.9, entries)
    for layer, (row, run) in enumerate(traces):
        # The first is the widest, so that equal traces stay visible below each other.
        width = 1.5 + min(1.4, 4 / len(traces)) * (len(traces) - 1 - layer)
        step, scale = curve(run.train, "step", "loss_scale")
        keep = np.isfinite(scale) & (scale > 0)
        step, power = _corners(step[keep], np.log2(scale[keep]), points)
        line = styles[row.arm.label].line
        axes.plot(step, power, drawstyle="steps-post", linewidth=width, **line)
    _skip_rows(axes, traces, styles)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_two(round(value))))
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


def _skip_rows(axes: Axes, traces: list[tuple[Row, RunData]], styles: dict[str, Style]) -> None:
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
        height = np.full(len(skips), share * (1 - (number + 0.5) / len(traces)))
        tick: dict[str, Any] = {
            "color": styles[row.arm.label].colour,
            "markersize": 8,
            "markeredgewidth": 1.2,
        }
        axes.plot(skips, height, "|", transform=axes.get_xaxis_transform(), **tick)


def _scaling_run(row: Row) -> RunData | None:
    """The run of the lowest seed that scaled its loss and recorded it."""
    scaled = (run for run in row.arm.runs if run.scale_range is not None)
    recorded = (run for run in scaled if len(curve(run.train, "step", "loss_scale")[0]))
    return min(recorded, key=lambda run: run.seed, default=None)


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

"""Draw the curves of a group: training loss, evaluation metric, loss scale and skipped updates.

A curve is the mean over the seeds of a mode. The baseline alone also has a band of its seeds, so no
two colours mix.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from mprun.comparison.equivalence import FEWEST_SEEDS
from mprun.comparison.findings import Band, Curve, Gap, Group, Row, RunData, bands, curve
from mprun.comparison.gap_growth import Plot, differences, shared_curves
from mprun.comparison.wording import baseline_name, margin_text, signed, unit
from mprun.plots.panel import (
    GREY,
    INK,
    Drawing,
    Style,
    line_entry,
    live_values,
    mark_entry,
    panel,
    power_of_two,
    round_multiple,
    thousands,
)

_HEIGHT = 2.5  # inches
_ROW = 0.92  # inches, for each mode in `difference_rows`
_TEXT = 0.28  # inches of that, for its text
_DASH = 3.5  # points, the length of the shortest dash


def curves(group: Group, styles: dict[str, Style], plot: Plot, points: int) -> Drawing | None:
    """Draw the mean of every mode, so that none hides another; None if there is no curve."""
    foreign = group.baseline.arm.foreign  # drawn where they are compared, as in other figures
    own = [plot.curve_of(run) for run in group.every_run]
    read = shared_curves(group, plot) if foreign else own
    found, longest = bands(group, read, points), max(len(x) for x, _ in read)
    if not found or longest < (2 if plot.of_evals else 1):
        return None
    base = found[0][1] if found[0][0] is group.baseline else None
    inks, lines = _inks(group, styles), _lines(group, styles)
    labels = [row.arm.label for row, _ in found]
    entries = [line_entry(label, styles[label], **lines[label]) for label in labels]
    every = [(row.arm.label, *end) for row, _ in found for end in _ends(row, plot)]
    ends = [end for end in every if np.isfinite(end[2])]
    if ends:
        entries.append(mark_entry("diverged", "x"))
    banded = base is not None and bool(np.nanmax(base.high - base.low) > 0)
    note = f"Band: {baseline_name(group)}, min to max over seeds; not the test." if banded else ""
    figure, axes = panel(plot.title, _HEIGHT, entries, note)
    if banded and base is not None:
        _fill(axes, base.x, base.low, base.high, inks[group.baseline.arm.label], 0.12)
    for row, b in found:
        known = np.isfinite(b.mean)  # without this a mode with few points would break into dots
        marker = "." if plot.of_evals and known.sum() <= 40 else None
        axes.plot(b.x[known], b.mean[known], **lines[row.arm.label], marker=marker, markersize=5)
    limits, logarithmic = _limits([b for _, b in found], base or found[-1][1])
    _set_y(axes, limits, logarithmic)
    axes.set(xlabel=plot.xlabel, ylabel=plot.ylabel + " (log scale)" * logarithmic)
    for label, at, value in ends:
        _cross(axes, at, _inside(value, limits, logarithmic), inks[label])
    seeds = max(len(row.arm.runs) for row, _ in found)
    caption = "Mean over the seeds" if seeds > 1 else "One seed per mode"
    caption += " that still ran; a cross marks where a run diverged." if ends else "."
    known = [(row.arm.label, b.mean[np.isfinite(b.mean)]) for row, b in found]
    told = "; ".join(f"{label} from {mean[0]:.3g} to {mean[-1]:.3g}" for label, mean in known)
    x, means = found[0][1].x, {_number(group, row): b.mean for row, b in found}
    caption += _binning(longest, len(x))
    label = f"{plot.title}, mean over seeds: {told}."
    return Drawing(plot.name, caption, label, figure, live_values(axes, x, means))


def _number(group: Group, row: Row) -> int:
    """Return the number by which a page's script finds a mode: its place in the table."""
    return [other.arm.label for other in group.every_row].index(row.arm.label)


def _inks(group: Group, styles: dict[str, Style]) -> dict[str, dict[str, Any]]:
    """Return for each mode its colour, and the name by which a page's script finds its drawing."""
    return {
        row.arm.label: {"color": styles[row.arm.label].colour, "gid": f"series-{number}"}
        for number, row in enumerate(group.every_row)
    }


def _lines(group: Group, styles: dict[str, Style]) -> dict[str, dict[str, Any]]:
    """Return the line style of each mode; equal curves come out striped.

    The baseline is wide and pale below all others. Each of n modes is a bit thinner than the
    previous one and is drawn over 1/n less of its length.
    """
    inks = _inks(group, styles)
    lines = {group.baseline.arm.label: {"linewidth": 6.0, "alpha": 0.35, "zorder": 10}}
    modes = [row.arm.label for row in group.rows]
    for layer, label in enumerate(modes):
        left = len(modes) - layer
        width = 1.5 + 1.2 * (left - 1) / len(modes)
        period = max(10.0, _DASH * len(modes)) / width  # dashes are in units of the width
        on = period * left / len(modes)
        gaps = (on, period - on) if layer and not styles[label].dashes else styles[label].dashes
        line = Style(styles[label].colour, gaps).line
        lines[label] = {**line, "linewidth": width, "zorder": 20 + layer}
    return {label: {**inks[label], **line} for label, line in lines.items()}


def _fill(
    axes: Axes, x: np.ndarray, low: np.ndarray, high: np.ndarray, ink: dict[str, Any], alpha: float
) -> None:
    """Fill the area between two curves where both are known."""
    known = np.isfinite(low) & np.isfinite(high)
    for part in np.split(np.arange(len(x)), np.flatnonzero(np.diff(known)) + 1):
        if len(part) > 1 and known[part[0]]:
            outline = [*x[part], *x[part][::-1]], [*low[part], *high[part][::-1]]
            axes.fill(*outline, alpha=alpha, linewidth=0, zorder=5, **ink)


def _cross(axes: Axes, at: float, height: float, ink: dict[str, Any]) -> None:
    """Draw a cross where a run diverged."""
    size: dict[str, Any] = {"markersize": 8, "markeredgewidth": 2}
    axes.plot([at], [height], "x", zorder=40, clip_on=False, **size, **ink)


def _binning(records: int, points: int) -> str:
    if records <= points:
        return ""
    return f" {points} points, each the mean of about {-(-records // points)} records."


def _set_y(axes: Axes, limits: tuple[float, float], logarithmic: bool) -> None:
    """Set the limits of the y axis, the tick labels and the grid."""
    if logarithmic:
        # Label the minor ticks if the axis spans less than two decades.
        few = limits[1] / limits[0] < 100
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        axes.yaxis.set_minor_formatter(
            lambda v, _: f"{v:g}" if few and f"{v:.0e}"[0] in "25" else ""
        )
        axes.tick_params(axis="y", which="minor", labelsize=8)
    axes.set_ylim(*limits)
    axes.margins(x=0.02)
    axes.xaxis.set_major_formatter(thousands)
    axes.grid()


def _limits(bands: list[Band], baseline: Band) -> tuple[tuple[float, float], bool]:
    """Return ((low, high) of the y axis, logarithmic?); exploding curves leave through the top.

    The frame holds the whole baseline plus its range above and below. It also holds where the other
    modes are most of the time, unless that is over ten times its range away.
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
    """Return the value, clipped to just inside the frame."""
    low, high = np.log(limits) if logarithmic else limits
    edge = 0.03 * (high - low)
    value = np.log(max(value, 1e-300)) if logarithmic else value
    value = float(np.clip(value, low + edge, high - edge))
    return float(np.exp(value)) if logarithmic else value


def _ends(row: Row, plot: Plot) -> list[tuple[float, float]]:
    """Return (x, last finite y or NaN) of each diverged run."""
    steps = {outcome.seed: outcome.step for outcome in row.outcomes if outcome.diverged}
    found = []
    for run in (run for run in row.arm.runs if run.seed in steps):
        x, y = plot.curve_of(run)
        finite = np.isfinite(x) & np.isfinite(y)
        told = steps[run.seed]
        at = float(run.last_step if told is None else told)
        if plot.x == "updates":
            step, updates = curve(run.train, "step", "updates")
            at = float(np.interp(at, step, updates)) if len(step) else np.nan
        if np.isfinite(at):
            found.append((at, float(y[finite][-1]) if finite.any() else np.nan))
    return found


def difference_rows(
    group: Group, styles: dict[str, Style], plot: Plot, points: int
) -> Drawing | None:
    """Draw `differences`, a row a mode, the margin shaded if it applies; None without points."""
    found = differences(group, plot, points)
    if max((np.isfinite(b.mean).sum() for _, b, _ in found), default=0) < 2:
        return None
    judged = plot.of_evals or group.metric == "loss" or group.as_logarithm
    linear = group.factor * group.margin_setting if judged else 1.0
    suffix = unit(group) if plot.of_evals else "%"
    rows, inks = _Rows.of([b for _, b, _ in found], linear), _inks(group, styles)
    title = f"Difference to {baseline_name(group)} over steps: {plot.ylabel}"
    figure, axes = panel(title, _ROW * len(found))
    texts, ended = [_row_text(row, b, linear, suffix, plot.of_evals) for row, b, _ in found], []
    for place, (row, b, _) in enumerate(found):
        ink = inks[row.arm.label]
        if judged:
            margin = rows.y(place, -linear), rows.y(place, linear)
            axes.axhspan(*margin, color=GREY, alpha=0.22, lw=0)
        axes.axhline(rows.y(place, 0.0), color=INK, linewidth=0.8)
        _fill(axes, b.x, rows.y(place, b.low), rows.y(place, b.high), ink, 0.3)
        known = np.isfinite(b.mean)
        marker = "." if plot.of_evals and known.sum() <= 40 else None
        line = {**styles[row.arm.label].line, **ink, "linewidth": 1.5, "zorder": 20}
        axes.plot(*(b.x[known], rows.y(place, b.mean[known])), **line, marker=marker, markersize=5)
        if row.gap is not None and row.gap.of_evals == plot.of_evals:
            _draw_trend(axes, rows, place, row.gap)
        for at, _ in _ends(row, plot):
            ended.append(at)
            _cross(axes, at, rows.y(place, rows.high) + 0.07, ink)
        beside = blended_transform_factory(figure.transFigure, axes.transData)
        axes.text(0.02, place + _TEXT / 2, texts[place], transform=beside, va="center")
    _set_rows(axes, rows, len(found))
    axes.set(xlabel=plot.xlabel)
    caption = _difference_caption(group, plot, found, judged)
    caption += " A cross marks where a run diverged." if ended else ""
    longest = max(len(x) for x, _ in shared_curves(group, plot))
    x, means = found[0][1].x, {_number(group, row): b.mean for row, b, _ in found}
    caption += _binning(longest, len(x))
    name = "difference" + "-training" * (not plot.of_evals)
    live = live_values(axes, x, means, suffix, y=False)
    return Drawing(name, caption, f"{title}. {'; '.join(texts)}.", figure, live)


def _draw_trend(axes: Axes, rows: "_Rows", place: int, gap: Gap) -> None:
    """Draw the tested mean slope over the tested steps."""
    if gap.slope is None or gap.end is None or gap.per is None or gap.steps is None:
        return
    x = np.linspace(*gap.steps, 20)  # several points: the line is straight only on a linear scale
    y = rows.y(place, gap.end + gap.slope / gap.per * (x - x[-1]))
    axes.plot(x, y, color=INK, linewidth=1.0, linestyle=(0, (3, 2)), zorder=30)


def _set_rows(axes: Axes, rows: "_Rows", count: int) -> None:
    """Set the limits for `count` rows, and the ticks of each."""
    places = [rows.y(place, value) for place in range(count) for value in rows.ticks]
    axes.set_yticks(places, [f"{value:+g}" if value else "0" for value in rows.ticks] * count)
    axes.tick_params(axis="y", labelsize=7.5, left=False, pad=3)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(count, 0)
    axes.margins(x=0.02)
    axes.xaxis.set_major_formatter(thousands)
    axes.grid(axis="x")


@dataclass(frozen=True, slots=True)
class _Rows:
    """The positions of values in the rows of one figure: a row is one unit high, its text on top.

    All rows share one scale: linear near zero, logarithmic from about `linear` on. A margin and a
    hundred margins are thus both visible. Values beyond `low` and `high` are drawn at the row's
    edge.
    """

    low: float
    high: float
    linear: float

    @classmethod
    def of(cls, bands: list[Band], linear: float) -> "_Rows":
        """Fit the scale to the bands' 10th to 90th percentiles and ends: 1.4 to 1,000 `linear`.

        Beyond 1.4 it ends at a round number, which gets a tick.
        """
        reach = []
        for b in bands:
            parts = [part[np.isfinite(part)] for part in (b.mean, b.low, b.high)]
            reach += [*parts[0][-1:]]
            reach += [end for part in parts if len(part) for end in np.percentile(part, (10, 90))]

        def edge(far: float) -> float:
            is_near = 1.1 * far <= 1.4 * linear
            return 1.4 * linear if is_near else round_multiple(min(far, 1000 * linear), linear)

        return cls(-edge(-min(reach)), edge(max(reach)), linear)

    def y(self, row: int, values: Any) -> Any:
        """Return the y positions of one or several values in a row; y grows downwards."""
        low, high, at = (
            np.arcsinh(2 * part / self.linear)
            for part in (self.low, self.high, np.clip(values, self.low, self.high))
        )
        return row + 0.97 - (at - low) / (high - low) * (0.97 - _TEXT)

    @property
    def ticks(self) -> list[float]:
        """Return 0, ±`linear` and the ends of the scale beyond it."""
        ends = [end for end in (self.low, self.high) if abs(end) > 1.5 * self.linear]
        return [-self.linear, 0.0, self.linear, *ends]


def _row_text(row: Row, b: Band, margin: float, suffix: str, of_evals: bool) -> str:
    lost, runs = sum(bool(outcome.diverged) for outcome in row.outcomes), len(row.outcomes)
    parts = [f"diverged in {lost} of {runs} runs"] if lost else []
    known = b.mean[np.isfinite(b.mean)].tolist()
    if known and lost < runs:
        parts.append(f"ends at {signed(known[-1], margin, known[-1:])} {suffix}".rstrip())
    parts += ["grows"] if row.gap and row.grows and row.gap.of_evals == of_evals else []
    return f"{row.arm.label}: {', '.join(parts)}"


def _difference_caption(
    group: Group, plot: Plot, found: list[tuple[Row, Band, str]], judged: bool
) -> str:
    base = baseline_name(group)
    percent = not plot.of_evals or group.relative
    of_it = f" in % of {base}'s mean at that step" if percent else ""
    unpaired = [row.arm.label for row, _, method in found if method != "paired"]
    how = "mean over the seeds, paired by seed"
    if len(unpaired) == len(found):
        how = "difference of the means over the runs, which are not paired"
    elif unpaired:
        how += f" ({', '.join(unpaired)}: unpaired, difference of the means)"
    text = f"Mode minus {base}{of_it}, {how}; above zero is worse."
    if any(np.isfinite(b.low).any() for _, b, _ in found):
        few = all(len(row.arm.runs) < FEWEST_SEEDS for row, _, _ in found)
        band = "both seeds" if few else "90 % interval of the mean"
        text += f" Band: {band}, at each point alone: not the verdict's test."
    if judged:
        text += f" Shaded: the margin, ±{margin_text(group)}"
        text += "." if plot.of_evals else ", which is set for the final evaluation."
    tested = any(
        r.gap and r.gap.of_evals == plot.of_evals and r.gap.slope is not None for r, *_ in found
    )
    text += " Dashed: the mean slope of the last half, which is tested." if tested else ""
    return text + " One scale for all rows, logarithmic far from zero."


def loss_scale(group: Group, styles: dict[str, Style], points: int) -> Drawing | None:
    """Draw the loss scale of one seed per mode and its skipped updates; None if no mode scales."""
    traces = []
    for row in group.every_row:
        scaled = (run for run in row.arm.runs if run.scale_range and len(_scale(run)[0]))
        traces += [(row, run) for run in islice(scaled, 1)]
    if not traces:
        return None
    lines = _lines(group, styles)
    labels = [row.arm.label for row, _ in traces]
    entries = [line_entry(label, styles[label], **lines[label]) for label in labels]
    entries.append(mark_entry("skipped update (a row per mode)", "|"))
    figure, axes = panel("Loss scale", 1.9, entries)
    values = {}
    at = _every(np.unique(np.concatenate([_scale(run)[0] for _, run in traces])), points)
    for row, run in traces:
        x, power = _scale(run)
        held = np.searchsorted(x, at, side="right") - 1  # the newest record
        ended = (held < 0) | (at > x[-1])
        values[_number(group, row)] = np.where(ended, np.nan, 2.0 ** power[held])
        corner = np.ones(len(x), bool)  # a step curve needs its ends and where it changes
        corner[1:-1] = power[1:-1] != power[:-2]
        drawn = _every(x[corner], 2 * points), _every(power[corner], 2 * points)
        axes.plot(*drawn, drawstyle="steps-post", **lines[row.arm.label])
    _skip_rows(axes, traces, _inks(group, styles))
    axes.yaxis.set_major_formatter(lambda value, _: power_of_two(round(value)))
    axes.xaxis.set_major_formatter(thousands)
    axes.set(xlabel="step", ylabel="loss scale")
    axes.grid()
    which = ", ".join(f"{row.arm.label} seed {run.seed}" for row, run in traces)
    skipped = ", ".join(f"{row.arm.label} {row.skipped}" for row, _ in traces)
    skipped = f"Skipped updates over all seeds: {skipped}."
    caption, label = f"One run per mode ({which}).", f"Loss scale over steps of {which}."
    texts = f"{caption} {skipped}", f"{label} {skipped}"
    return Drawing("loss-scale", *texts, figure, live_values(axes, at, values, y=False))


def _scale(run: RunData) -> Curve:
    """Return the steps and log2 of the loss scale."""
    step, scale = curve(run.train, "step", "loss_scale")
    keep = np.isfinite(scale) & (scale > 0)
    return step[keep], np.log2(scale[keep])


def _skip_rows(
    axes: Axes, traces: list[tuple[Row, RunData]], inks: dict[str, dict[str, Any]]
) -> None:
    """Draw one row per mode below the traces, with a tick at each skipped update."""
    axes.margins(0.03, 0.08)
    low, high = axes.get_ylim()
    low = min(low, high - 2)
    ticks = MaxNLocator(nbins=6, integer=True).tick_values(low, high)
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    share = min(0.09 * len(traces), 0.4)  # part of the height for the rows
    axes.set_ylim(low - share / (1 - share) * (high - low), high)
    for number, (row, run) in enumerate(traces):
        skips = _every(np.asarray(run.skip_steps, float), 200)
        height = np.full(len(skips), share * (1 - (number + 0.5) / len(traces)))
        tick = {"markersize": 8, "markeredgewidth": 1.2, **inks[row.arm.label]}
        axes.plot(skips, height, "|", transform=axes.get_xaxis_transform(), **tick)


def _every(values: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` of the values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).astype(int)]

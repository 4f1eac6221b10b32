"""The scales that several scalers took over one trace, with their skipped updates."""

from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mprun.numerics.overflow_trace import OverflowTrace
from mprun.numerics.scaler_replay import Replay
from mprun.plots.palette import styles
from mprun.plots.panel import line_entry, mark_entry, panel, settings, thousands

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TICKS = 400  # drawn skipped updates of one scaler at most


def draw_replays(replays: dict[str, Replay], trace: OverflowTrace, paths: list[Path]) -> None:
    """Write one figure to every path, in the format of its ending (.png, .svg).

    Above: the scale of each scaler over steps, a cross where it collapsed. Below: a row for each
    scaler with a tick at each skipped update.
    """
    with settings():
        figure = _figure(replays, trace)
        for path in paths:
            figure.savefig(path, dpi=160)


def _figure(replays: dict[str, Replay], trace: OverflowTrace):
    looks = styles(replays)
    entries = [line_entry(name, looks[name]) for name in replays]
    entries.append(mark_entry("collapsed", "x"))
    height = 2.4 + 0.13 * len(replays)
    figure, axes = panel("Loss scale of each scaler on one trace", height, entries)
    for layer, (name, found) in enumerate(replays.items()):
        end = trace.first_step + found.steps
        steps = [step for step, _ in found.changes] + [end]
        power = np.log2([scale for _, scale in found.changes] + [found.changes[-1][1]])
        axes.plot(
            steps,
            power,
            color=looks[name].colour,
            linestyle=looks[name].linestyle,
            # The first is the widest, so that equal scales stay visible below each other.
            linewidth=1.2 + 2.4 * (1 - (layer + 1) / len(replays)),
            drawstyle="steps-post",
        )
        if found.collapsed_at is not None:
            axes.plot(end, power[-1], "x", color=looks[name].colour, markersize=8, zorder=9)
    axes.margins(0.03, 0.08)
    low, high = axes.get_ylim()
    low = min(low, high - 2)
    ticks = MaxNLocator(nbins=6, integer=True).tick_values(low, high)
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    share = 0.13 * len(replays) / height  # of the height, for the rows of skipped updates
    axes.set_ylim(low - share / (1 - share) * (high - low), high)
    for number, (name, found) in enumerate(replays.items()):
        shown = found.skipped
        if len(shown) > _TICKS:
            shown = shown[np.linspace(0, len(shown) - 1, _TICKS).astype(int)]
        axes.plot(
            shown,
            np.full(len(shown), share * (1 - (number + 0.5) / len(replays))),
            "|",
            color=looks[name].colour,
            markersize=6,
            markeredgewidth=1.2,
            transform=axes.get_xaxis_transform(),
        )
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: "2" + f"{value:.0f}".translate(_SUPERSCRIPT))
    )
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.set(xlabel="step (ticks below: skipped updates, a row for each scaler)")
    axes.set_ylabel("loss scale")
    axes.grid()
    return figure

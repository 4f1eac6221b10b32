"""One overflow trace through any loss scale: which updates it skips, and where its scale goes.

The loss scales are the ones that training uses, on the CPU. The trace stays as it is: a scale that
skips other updates would have trained differently from there on, which no replay can know.

The scales that several scalers took over one trace, with their skipped updates.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mprun.numerics.overflow_trace import OverflowTrace
from mprun.plots.palette import styles
from mprun.plots.panel import line_entry, mark_entry, panel, settings, thousands
from mprun.precision import DynamicLossScale, LogMaxLossScale, LossScale


@dataclass(slots=True)
class Replay:
    """What one loss scale did on a trace; steps are numbered as in the trace.

    changes: (step, scale): the scale that this step and those after it used, first step included.
    skipped: int64, steps whose update it skipped. final: the scale after the last step. lowest,
    highest: of the scales that steps used. collapsed_at: the step on which its own rule for giving
    up came true (a run ends there and so does the replay), or None. steps: how many it saw.
    known, assumed, unknown: how many of them the trace decides by the step itself, by other steps,
    or not at all (taken as clean); skipped_known: skipped updates of the first kind.
    """

    changes: list[tuple[int, float]] = field(default_factory=list)
    skipped: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    final: float = 1.0
    lowest: float = 1.0
    highest: float = 1.0
    collapsed_at: int | None = None
    steps: int = 0
    known: int = 0
    assumed: int = 0
    unknown: int = 0
    skipped_known: int = 0


def replay(scale: LossScale, trace: OverflowTrace, stop_at_collapse: bool = True) -> Replay:
    """Run a fresh CPU loss scale (not `none`) over the trace, to its end or its collapse.

    ValueError for a logmax scale on a trace without `grad_max`. A stretch of clean steps in which
    nothing but the counters moves is one update and an addition to them, so that 100,000 steps take
    a tenth of a second; logmax, which moves at every step, takes some 10 seconds.
    """
    if scale.needs_grad_max and trace.grad_max is None:
        raise ValueError("logmax needs the largest gradient magnitude of every step")
    result, skipped, index = Replay(), [], 0
    overflow = trace.likely_overflow.tolist()
    one, zero = torch.ones(()), torch.zeros(())
    with torch.no_grad():
        while index < len(trace) and not (stop_at_collapse and result.collapsed_at):
            value = scale.scale.item()
            if not result.changes or result.changes[-1][1] != value:
                result.changes.append((trace.first_step + index, value))
            if value < overflow[index]:
                _record(scale, trace, index, zero)
                scale.update()
                index += 1
                if scale.scale.item() == value:
                    index += _count_clean_steps(scale, trace.next_overflow(value, index) - index)
                continue
            skipped.append(index)
            _record(scale, trace, index, one)
            scale.update()
            if result.collapsed_at is None and bool(scale.collapsed()):
                result.collapsed_at = trace.first_step + index
            index += 1
    result.final, result.steps = scale.scale.item(), index
    _sum_up(result, trace, np.array(skipped, np.int64))
    return result


def _count_clean_steps(scale: LossScale, most: int) -> int:
    """Let the scale pass clean steps at which its rule only counts, `most` at most; how many."""
    if isinstance(scale, LogMaxLossScale):
        return 0
    if isinstance(scale, DynamicLossScale):
        # All but the step that grows.
        most = min(most, scale.growth_interval - 1 - int(scale.growth_tracker))
        scale.growth_tracker.add_(most)
        if scale.tolerance > 0:
            scale.steps_since_rescale.add_(most)
    return most


def _record(scale: LossScale, trace: OverflowTrace, index: int, found_inf: torch.Tensor) -> None:
    largest = None
    if scale.needs_grad_max:
        largest = torch.tensor(trace.grad_max[index], dtype=torch.float32)
    scale.record(found_inf, largest)


def _sum_up(result: Replay, trace: OverflowTrace, skipped: np.ndarray) -> None:
    result.skipped = skipped + trace.first_step
    starts = np.array([step for step, _ in result.changes]) - trace.first_step
    values = np.array([value for _, value in result.changes])
    result.lowest, result.highest = float(values.min()), float(values.max())
    used = np.repeat(values, np.diff(starts, append=result.steps))
    known, likely = trace.decided(used)
    result.known, result.unknown = int(known.sum()), int((~likely).sum())
    result.assumed = result.steps - result.known - result.unknown
    result.skipped_known = int(known[skipped].sum())


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

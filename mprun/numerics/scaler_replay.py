"""One overflow trace through any loss scale: which updates it skips, and where its scale goes.

The loss scales are the ones that training uses, on the CPU. The trace stays as it is: a scale that
skips other updates would have trained differently from there on, which no replay can know.

The trace of a recorded run comes from its skipped updates, its scales and its probes, which show
how far gradients were from overflow. Beside them: the scales that several scalers took, drawn.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mprun.errors import BadInput, Damaged
from mprun.numerics.overflow_trace import OverflowTrace, trace_from_bounds
from mprun.numerics.probe_record import GRADIENT_KINDS, ProbeRecord, read_probes
from mprun.plots.panel import line_entry, mark_entry, panel, settings, styles, thousands
from mprun.precision import DynamicLossScale, LogMaxLossScale, LossScale
from mprun.record.metrics import read_metrics


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

    A stretch of clean steps in which nothing but the counters moves is one update and an addition
    to them, so that 100,000 steps take a tenth of a second; logmax, which moves at every step,
    takes some 10 seconds.

    Raises:
        ValueError: for a logmax scale on a trace without `grad_max`.
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
    if scale.needs_grad_max and trace.grad_max is not None:
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


def probed_bounds(
    directory: Path, steps: int, every_dtype: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """(clean, overflow, grad_max, probes) of the steps 1 to `steps` of a run directory.

    clean: float64 [steps], the largest scale (in powers of two from the run's own) at which no
    gradient that was probed overflows FP16, 0 where there was no probe; others, inside a kernel,
    may. overflow: twice that, at which one does; inf where there was no probe. Gradients in FP16
    count, or with `every_dtype` all of them, as if they were FP16. grad_max: largest unscaled
    weight gradient, of the nearest probe before the step (for the first ones, after it) that was
    finite; None if none was.
    """
    clean, overflow = np.zeros(steps), np.full(steps, np.inf)
    largest = np.full(steps, np.nan)
    probes = 0
    for probe in read_probes(directory):
        exponent = _limit_exponent(probe, every_dtype)
        if not 1 <= probe.step <= steps or exponent is None:
            continue
        probes += 1
        clean[probe.step - 1], overflow[probe.step - 1] = 2.0**exponent, 2.0**exponent * 2
        largest[probe.step - 1] = _largest(probe)
    return clean, overflow, _carried(largest), probes


def _limit_exponent(probe: ProbeRecord, every_dtype: bool) -> float | None:
    """log2 of a scale without overflow of which the double overflows; None if it cannot tell."""
    exponents = []
    for learner in probe.learners.values():
        scales = {probe.log2_loss_scale[name] for name in learner.loss_scales}
        if len(scales) > 1:
            return None
        scale = scales.pop() if scales else 0.0
        for kind in GRADIENT_KINDS:
            for stats in learner.tensors.get(kind, {}).values():
                if not every_dtype and "fp16" not in stats.dtype.split("+"):
                    continue
                if stats.counts.inf or stats.counts.nan:
                    return None
                if stats.counts.headroom is not None:
                    exponents.append(scale + stats.counts.headroom)
    return min(exponents, default=None)


def _largest(probe: ProbeRecord) -> float:
    found = []
    for learner in probe.learners.values():
        scale = max((2.0 ** probe.log2_loss_scale[name] for name in learner.loss_scales), default=1)
        found += [s.amax / scale for s in learner.tensors.get("weight_gradients", {}).values()]
    return max(found, default=math.nan)


def _carried(values: np.ndarray) -> np.ndarray | None:
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return None
    before = np.searchsorted(known, np.arange(len(values)), side="right") - 1
    return values[known[np.maximum(before, 0)]]


def run_trace(directory: Path, record: dict[str, Any], own: LossScale) -> OverflowTrace:
    """The trace of a run directory; `record` is its run.json, `own` a fresh scale as it had.

    Every skipped update is recorded with its scale. Of the clean steps most are not recorded; their
    scale is found by running `own` over the skips, which must agree with every recorded scale.
    Probes show how far the gradients were from overflow: for other scales than the run's own.
    Raises BadInput for a run that skips nothing by its rule and has no probes, or that has several
    scales (their overflows are recorded together); Damaged for records that contradict each other.
    """
    path = directory / "metrics.jsonl"
    per = record["config"]["scaler"].get("per", "shared")
    if per != "shared":
        raise BadInput(
            f"{directory}: scaler.per={per} records the overflows of several scales as one; "
            "use a run with scaler.per=shared"
        )
    rows = _train_rows(path)
    if not rows:
        raise BadInput(f"{directory}: no step recorded yet")
    last = rows[-1]["step"]
    skips = own.skips_nonfinite
    probably_clean, probed, grad_max, probes = probed_bounds(directory, last, not skips)
    if not skips and not probes:
        raise BadInput(
            f"{directory}: scaler=none skips nothing, so its overflows are not recorded; use a run "
            "with another scaler, or with numerics=on"
        )
    if skips:
        skipped = _skipped_steps(path, rows)
        scales, notes = _scales(rows, skipped, last, own)
        overflowed = np.zeros(last, bool)
        overflowed[np.array(sorted(skipped), np.int64) - 1] = True
        clean = np.where(overflowed | np.isnan(scales), 0.0, scales)
        overflow = np.where(overflowed, scales, np.inf)
        notes.insert(0, f"known: {last} steps, {len(skipped)} skipped, each at the run's own scale")
        overflow = np.where((probed > clean) & (probed < overflow), probed, overflow)
    else:
        clean, overflow = np.zeros(last), probed
        notes = [f"{last} steps without a scaler; what its gradients would do in FP16 is assumed"]
    if probes:
        notes.append(
            f"{probes} probes show the scale from which on a probed gradient overflows; gradients "
            "inside kernels may overflow below it"
        )
    if grad_max is not None:
        notes.append("largest gradient for logmax: of the nearest probe before each step")
    return trace_from_bounds(1, clean, overflow, grad_max, notes, probably_clean)


def _train_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = [row for row in read_metrics(path) if row.get("split") == "train"]
    for row in rows:
        whole = isinstance(row.get("step"), int) and isinstance(row.get("skipped"), int)
        if not whole or row["step"] < 1 or not isinstance(row.get("loss_scale"), float | int):
            raise Damaged(f"{path}: a record without step, skipped or loss_scale: {row}"[:150])
    return rows


def _skipped_steps(path: Path, rows: list[dict[str, Any]]) -> set[int]:
    """Steps whose update was skipped; each has a record of its own."""
    skipped, before = set(), 0
    for row in rows:
        if row["skipped"] - before not in (0, 1):
            raise Damaged(f"{path}: step {row['step']}: skipped {row['skipped']} after {before}")
        if row["skipped"] > before:
            skipped.add(row["step"])
        before = row["skipped"]
    for a, b in pairwise(row["step"] for row in rows):
        if b <= a:
            raise Damaged(f"{path}: step {b} after {a}")
    return skipped


def _scales(
    rows: list[dict[str, Any]], skipped: set[int], last: int, own: LossScale
) -> tuple[np.ndarray, list[str]]:
    """The scale of each step, float64 [last], NaN where it is not known; and what to say of it."""
    recorded = np.full(last, np.nan)
    for row in rows:
        recorded[row["step"] - 1] = row["loss_scale"]
    if own.needs_grad_max:
        return recorded, ["logmax moves at every step: known are the steps with a record alone"]
    found = _by_own_rule(skipped, last, own)
    given = np.flatnonzero(~np.isnan(recorded))
    wrong = given[found[given] != recorded[given]]
    if not len(wrong):
        return found, []
    note = (
        f"the recorded scale of step {wrong[0] + 1} is not that of the run's own rule; between two "
        "records the scale is known where both have the same"
    )
    return _between_records(recorded), [note]


def _by_own_rule(skipped: set[int], last: int, own: LossScale) -> np.ndarray:
    """float64 [last]: the scales of `own` when exactly the steps in `skipped` overflow."""
    clean, overflow = np.full(last, np.inf), np.full(last, np.inf)
    at = np.array(sorted(skipped), np.int64) - 1
    clean[at], overflow[at] = 0.0, 0.0
    found = replay(own, trace_from_bounds(1, clean, overflow), stop_at_collapse=False)
    scales = np.empty(last)
    for (step, scale), (after, _) in pairwise([*found.changes, (last + 1, 0.0)]):
        scales[step - 1 : after - 1] = scale
    return scales


def _between_records(recorded: np.ndarray) -> np.ndarray:
    """Between two records with the same scale that scale (a change back shows as a skip)."""
    scales = recorded.copy()
    for a, b in pairwise(np.flatnonzero(~np.isnan(recorded)).tolist()):
        if recorded[a] == recorded[b]:
            scales[a:b] = recorded[a]
    return scales


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

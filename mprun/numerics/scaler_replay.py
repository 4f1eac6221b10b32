"""One overflow trace through any loss scale: which updates it skips, and where its scale goes.

The loss scales are the ones that training uses, on the CPU. The trace stays as it is: a scale that
skips other updates would have trained differently from there on, which no replay can know.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from mprun.numerics.overflow_trace import OverflowTrace
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

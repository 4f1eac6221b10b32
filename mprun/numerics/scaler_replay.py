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
    if isinstance(scale, LogMaxLossScale) and trace.grad_max is None:
        raise ValueError("logmax needs the largest gradient magnitude of every step")
    result, skipped, index = Replay(), [], 0
    counts, known_skips = np.zeros(3, np.int64), 0
    one = torch.ones(())
    with torch.no_grad():
        while index < len(trace) and not (stop_at_collapse and result.collapsed_at):
            value = scale.scale.item()
            if not result.changes or result.changes[-1][1] != value:
                result.changes.append((trace.first_step + index, value))
            end = trace.next_overflow(value, index)
            if end == index:
                skipped.append(trace.first_step + index)
                _record(scale, trace, index, one)
                scale.update()
                found = trace.evidence(value, index, index + 1)
                known_skips += int(found[0])
                if result.collapsed_at is None and bool(scale.collapsed()):
                    result.collapsed_at = trace.first_step + index
                taken = 1
            else:
                taken = _clean_steps(scale, trace, index, end)
                found = trace.evidence(value, index, index + taken)
            counts += found
            index += taken
    used = [value for _, value in result.changes]
    result.lowest, result.highest = min(used), max(used)
    result.skipped, result.final, result.steps = (
        np.array(skipped, np.int64),
        scale.scale.item(),
        index,
    )
    result.known, result.assumed, result.unknown = counts.tolist()
    result.skipped_known = known_skips
    return result


def _clean_steps(scale: LossScale, trace: OverflowTrace, index: int, end: int) -> int:
    """Clean updates from `index` on, none at or after `end` and none after the scale moved."""
    before = scale.scale.item()
    _record(scale, trace, index, torch.zeros(()))
    scale.update()
    ahead = end - index - 1
    if isinstance(scale, LogMaxLossScale) or scale.scale.item() != before or ahead == 0:
        return 1
    if isinstance(scale, DynamicLossScale):
        # Up to the step before the one that grows a clean step only counts; growth is an update.
        ahead = min(ahead, scale.growth_interval - 1 - int(scale.growth_tracker))
        scale.growth_tracker.add_(ahead)
        if scale.tolerance > 0:
            scale.steps_since_rescale.add_(ahead)
    return 1 + ahead


def _record(scale: LossScale, trace: OverflowTrace, index: int, found_inf: torch.Tensor) -> None:
    largest = None
    if scale.needs_grad_max:
        largest = torch.tensor(trace.grad_max[index], dtype=torch.float32)
    scale.record(found_inf, largest)

"""What is known of a training run's overflows: at which scale each step would have overflowed.

A step overflows at loss scale S when its largest gradient, times S, does not fit FP16. So each step
has a limit, and overflows at every scale above it. A recorded run shows one side of that limit:
a skipped update at scale S says "below S", a clean step at scale S says "S or above".
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

SCAN = 256  # steps looked at first for the next overflow


@dataclass(slots=True)
class OverflowTrace:
    """Per step the scales known, assumed and not known to overflow; one entry for each step.

    first_step: number of the first step; the entries are consecutive steps.
    clean: float64 [n], largest scale at which this very step is known not to overflow; 0: none is.
    overflow: float64 [n], smallest scale at which this very step is known to overflow; inf: none.
    likely_clean, likely_overflow: float64 [n], the same with what other steps show (see `carry`).
    grad_max: float64 [n], largest unscaled gradient magnitude, or None where the trace has none.
    notes: what a reader must know of where the numbers come from.
    """

    first_step: int
    clean: np.ndarray
    overflow: np.ndarray
    likely_clean: np.ndarray
    likely_overflow: np.ndarray
    grad_max: np.ndarray | None
    notes: list[str]

    def __len__(self) -> int:
        return len(self.clean)

    def next_overflow(self, scale: float, start: int) -> int:
        """First index from `start` on whose step is taken to overflow at `scale`; else the length.

        What is not known at all is taken as clean.
        """
        width = SCAN
        while start < len(self):
            found = np.flatnonzero(scale >= self.likely_overflow[start : start + width])
            if len(found):
                return start + int(found[0])
            start, width = start + width, 2 * width
        return len(self)

    def decided(self, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(known, likely): bool [m]: what the trace says of its first m steps at `scales` [m].

        known: the step itself shows whether it overflows; likely: it does or other steps do.
        """
        steps = slice(len(scales))
        known = (scales <= self.clean[steps]) | (scales >= self.overflow[steps])
        likely = (scales <= self.likely_clean[steps]) | (scales >= self.likely_overflow[steps])
        return known, known | likely


def trace_from_bounds(
    first_step: int,
    clean: np.ndarray,
    overflow: np.ndarray,
    grad_max: np.ndarray | None = None,
    notes: list[str] | None = None,
    probably_clean: np.ndarray | None = None,
) -> OverflowTrace:
    """A trace from what each step shows of itself; see `OverflowTrace` and `carry`.

    probably_clean: float64 [n], as `clean`, but taken for likely alone; 0 where there is no word.
    """
    low = clean if probably_clean is None else np.maximum(clean, probably_clean)
    low = np.where(low < overflow, low, clean)
    likely_clean, likely_overflow = carry(low, overflow)
    return OverflowTrace(
        first_step, clean, overflow, likely_clean, likely_overflow, grad_max, notes or []
    )


def carry(clean: np.ndarray, overflow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(likely_clean, likely_overflow): each step's own bounds and the tightest of other steps.

    clean, overflow: float64 [n] as in `OverflowTrace`. A bound is carried forward until a later
    step contradicts it, then the next looser one that nothing contradicts is carried. Where there
    is none yet the bound is carried backward from later steps, by the same rule. An overflow at a
    scale that had been clean before, with a clean step next, is an event of that step alone and
    not carried: one odd batch says nothing of its neighbours.
    """
    carried = ~_single_events(clean, overflow)
    ahead = _walk(clean, overflow, carried, range(len(clean)))
    back = _walk(clean, overflow, carried, range(len(clean) - 1, -1, -1))
    likely_overflow = np.where(np.isinf(ahead[1]), back[1], ahead[1])
    likely_overflow = np.minimum(likely_overflow, overflow)
    likely_clean = np.where(back[0] < likely_overflow, np.maximum(ahead[0], back[0]), ahead[0])
    likely_clean = np.maximum(likely_clean, clean)
    return np.where(likely_clean < likely_overflow, likely_clean, clean), likely_overflow


def _single_events(clean: np.ndarray, overflow: np.ndarray) -> np.ndarray:
    """bool [n]: overflowed at a scale seen clean before, and the next step that tells is clean."""
    single = np.zeros(len(clean), bool)
    telling = np.flatnonzero((clean > 0) | np.isfinite(overflow))
    overflowed = (clean[telling] == 0).tolist()
    bounds = zip(clean[telling].tolist(), overflow[telling].tolist(), strict=True)
    seen = 0.0
    for position, (low, high) in enumerate(bounds):
        if low == 0 and high <= seen:
            if overflowed[position + 1 : position + 2] == [False]:
                single[telling[position]] = True
            else:
                seen = 0.0
        elif np.isfinite(high):
            seen = max(low, seen if seen < high else 0.0)
        else:
            seen = max(low, seen)
    return single


def _walk(
    clean: np.ndarray, overflow: np.ndarray, carried: np.ndarray, order: range
) -> tuple[np.ndarray, np.ndarray]:
    """Tightest bounds that no step has contradicted so far, at each step, in the given order."""
    likely_clean, likely_overflow = np.zeros(len(clean)), np.full(len(clean), np.inf)
    lows, highs, counts = clean.tolist(), overflow.tolist(), carried.tolist()
    low: list[float] = []  # ascending, all below all of `high`
    high: list[float] = []  # ascending
    for index in order:
        if counts[index]:
            del high[: bisect_right(high, lows[index])]
            del low[bisect_left(low, highs[index]) :]
            if lows[index] > 0:
                _insert(low, lows[index])
            if highs[index] < np.inf:
                _insert(high, highs[index])
        # What a step shows of itself comes before what other steps show.
        below = bisect_left(low, highs[index])
        above = bisect_right(high, lows[index])
        likely_clean[index] = low[below - 1] if below else 0.0
        likely_overflow[index] = high[above] if above < len(high) else np.inf
    return likely_clean, likely_overflow


def _insert(ascending: list[float], value: float) -> None:
    at = bisect_left(ascending, value)
    if at == len(ascending) or ascending[at] != value:
        ascending.insert(at, value)

"""Which loss scales FP16 can hold the gradients of several probes with, on the host.

Everything is asked in powers of two k: what would become of the gradients of the unscaled loss,
times 2^k, when they are rounded to FP16?
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mprun.numerics.exponent_shares import FP16_LOST, HIGHEST, LOWEST
from mprun.numerics.probe_record import TensorStats

# No FP32 value (exponents -149 to 127) that was measured at a scale of 2^-126 to 2^126 needs more.
_SMALLEST, _LARGEST = -300, 300


class Gradients:
    """Histograms of gradients that belong together, each with the scale it was measured at.

    A histogram in which gradients of losses with different scales are mixed counts with the
    largest of them for underflow and with the smallest for overflow: the worse case of both.
    """

    def __init__(self):
        # (lowest, highest shift): log2 of what takes a measured value to its value at scale 1.
        self.parts: dict[tuple[float, float], TensorStats] = {}

    def add(self, stats: TensorStats, log2_scales: Iterable[float]) -> None:
        """Add a histogram measured with loss scales 2^s for each s of `log2_scales`."""
        scales = list(log2_scales)
        self._add((-max(scales), -min(scales)), stats)

    def merge(self, other: "Gradients") -> None:
        """Add all histograms of `other`."""
        for shifts, stats in other.parts.items():
            self._add(shifts, stats)

    def _add(self, shifts: tuple[float, float], stats: TensorStats) -> None:
        before = self.parts.get(shifts)
        self.parts[shifts] = stats if before is None else before.merge(stats)

    @property
    def nonzero(self) -> int:
        """Finite elements that are not zero: what shares are parts of."""
        return sum(stats.counts.nonzero for stats in self.parts.values())

    @property
    def zero_share(self) -> float:
        """Part (0 to 1) of all elements that are exactly zero; no scale changes these."""
        total = sum(stats.counts.total for stats in self.parts.values())
        return sum(stats.counts.zeros for stats in self.parts.values()) / total if total else 0.0

    @property
    def finite(self) -> bool:
        """Whether every value was, also of those that were not counted."""
        return all(math.isfinite(stats.amax) for stats in self.parts.values())

    @property
    def largest(self) -> float:
        """Largest absolute value at scale 1."""
        return max((s.amax * 2.0 ** shifts[1] for shifts, s in self.parts.items()), default=0.0)

    def underflow(self, k: int) -> float:
        """Part (0 to 1) of the non-zero elements that are zero in FP16 at scale 2^k."""
        lost = sum(
            stats.counts.shares(math.floor(k + low)).underflow * stats.counts.nonzero
            for (low, _), stats in self.parts.items()
        )
        return lost / self.nonzero if self.nonzero else 0.0

    def underflow_of_sum(self, k: int) -> float:
        """The same of the sum of absolute values, to about 10 %: small values make small sums."""
        lost = total = 0.0
        for (low, _), stats in self.parts.items():
            counts = stats.counts.by_class().sum(axis=1)
            exponents = np.arange(LOWEST, HIGHEST + 1)
            # All mantissas count as 1.5, and 2^-25 itself, the one tie, with what is above it.
            sums = counts * np.exp2(exponents.astype(np.float64))
            total += float(sums.sum()) * 2.0**low
            lost += float(sums[exponents + math.floor(k + low) < FP16_LOST].sum()) * 2.0**low
        return lost / total if total else 0.0

    def lowest(self, share: float) -> int | None:
        """The smallest k with an underflow share of at most `share`; None without a gradient."""
        if not self.nonzero:
            return None
        low, high = _SMALLEST, _LARGEST
        while low < high:  # the share falls with k
            middle = (low + high) // 2
            low, high = (low, middle) if self.underflow(middle) <= share else (middle + 1, high)
        return low

    def highest(self) -> int | None:
        """The largest k at which nothing overflows; None without a gradient."""
        found = [
            math.floor(stats.headroom - high)
            for (_, high), stats in self.parts.items()
            if stats.headroom is not None
        ]
        return min(found, default=None)


@dataclass(frozen=True, slots=True)
class ScaleRange:
    """Static loss scales 2^k for one set of gradients.

    lowest: smallest k that keeps the underflow share of every kind at or below `share`. highest:
    largest k at which nothing overflowed in any probe. headroom: powers of two to be left below
    that. recommended: the middle of [lowest, highest - headroom] (the upper one of two), or, where
    that is empty, highest - headroom.
    """

    share: float
    headroom: int
    lowest: int
    highest: int
    recommended: int

    @property
    def top(self) -> int:
        """The largest k that leaves the headroom."""
        return self.highest - self.headroom

    @property
    def fits(self) -> bool:
        """Whether a scale keeps underflow below the share and leaves the headroom."""
        return self.lowest <= self.top


def scale_range(kinds: Iterable[Gradients], share: float, headroom: int) -> ScaleRange | None:
    """The scales that suit all kinds at once; None if no gradient was different from zero."""
    kinds = [kind for kind in kinds if kind.nonzero]
    if not kinds:
        return None
    # Of gradients that are not zero both are known.
    lowest = max(kind.lowest(share) or 0 for kind in kinds)
    highest = min(kind.highest() or 0 for kind in kinds)
    top = highest - headroom
    # Below lies silent underflow, above lie skipped updates: as far as possible from both, because
    # gradients shrink and peak over a whole run.
    recommended = math.ceil((lowest + top) / 2) if lowest <= top else top
    return ScaleRange(share, headroom, lowest, highest, recommended)

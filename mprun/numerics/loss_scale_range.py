"""The loss scales that measured gradients allow.

Everything about loss scales is asked in powers of two k: what would become of the gradients of the
unscaled loss, times 2^k, when they are rounded to FP16?
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mprun.numerics.exponent_shares import ratio
from mprun.numerics.probe_record import TensorStats

# Any FP32 value (exponents -149 to 127) measured at a scale of 2^-126 to 2^126 fits.
_SMALLEST, _LARGEST = -300, 300


class Gradients:
    """Histograms of related gradients, each with the scale of its measurement.

    If a histogram mixes gradients of losses with different scales, underflow uses the largest scale
    and overflow the smallest: the worse case of both.
    """

    def __init__(self):
        # (lowest, highest shift): log2 of the factor from a measured value to its value at scale 1.
        self.parts: dict[tuple[float, float], TensorStats] = {}

    def add(self, stats: TensorStats, log2_scales: Iterable[float]) -> None:
        """Add a histogram measured with loss scales 2^s for each s of `log2_scales`."""
        scales = list(log2_scales)
        self.merge({(-max(scales), -min(scales)): stats})

    def merge(self, parts: Mapping[tuple[float, float], TensorStats]) -> None:
        """Add all histograms of another object's `parts`."""
        for shifts, stats in parts.items():
            known = self.parts.get(shifts)
            self.parts[shifts] = stats if known is None else known.merge(stats)

    @property
    def nonzero(self) -> int:
        """Return the number of finite non-zero elements, the base of the shares."""
        return sum(stats.counts.nonzero for stats in self.parts.values())

    @property
    def zero_share(self) -> float:
        """Return the part (0 to 1) of all elements that are exactly 0; no scale changes these."""
        total = sum(stats.counts.total for stats in self.parts.values())
        return ratio(sum(stats.counts.zeros for stats in self.parts.values()), total)

    @property
    def finite(self) -> bool:
        """Return whether every value was finite, including uncounted ones."""
        return all(math.isfinite(stats.amax) for stats in self.parts.values())

    @property
    def largest(self) -> float:
        """Return the largest absolute value at scale 1."""
        return max(stats.amax * 2.0**high for (_, high), stats in self.parts.items())

    def underflow(self, k: int) -> float:
        """Return the part (0 to 1) of the non-zero elements that are zero in FP16 at scale 2^k.

        NaN without any; of elements that are FP16 already it is at least this part.
        """
        lost = sum(
            stats.counts.shares(math.floor(k + low)).underflow * stats.counts.nonzero
            for (low, _), stats in self.parts.items()
            if stats.counts.nonzero
        )
        return ratio(lost, self.nonzero)

    def underflow_of_sum(self, k: int) -> float:
        """Return the lost part of the sum of absolute values, to about 10 %."""
        lost, total = 0.0, 0.0
        for (low, _), stats in self.parts.items():
            part, whole = stats.counts.sums(math.floor(k + low))
            lost, total = lost + part * 2.0**low, total + whole * 2.0**low
        return ratio(lost, total)

    def lowest(self, share: float) -> int | None:
        """Return the smallest k with at most `share` underflow; None without a gradient."""
        if not self.nonzero:
            return None
        scales = range(_SMALLEST, _LARGEST)  # the share falls with k
        return _SMALLEST + bisect_left(scales, True, key=lambda k: self.underflow(k) <= share)

    def highest(self) -> int | None:
        """Return the largest k at which nothing overflows; None without a gradient."""
        known = [(stats.headroom, high) for (_, high), stats in self.parts.items()]
        return min((math.floor(k - high) for k, high in known if k is not None), default=None)


@dataclass(frozen=True, slots=True)
class ScaleRange:
    """The static loss scales 2^k for one set of gradients.

    lowest: smallest k that keeps the underflow share of every kind at or below `share`. highest:
    largest k at which nothing overflowed in any probe. headroom: powers of two to leave below that.
    recommended: the middle of [lowest, top] (the upper one of two), or, if that is empty, top.
    """

    share: float
    headroom: int
    lowest: int
    highest: int
    recommended: int

    @property
    def top(self) -> int:
        """Return the largest k that leaves the headroom."""
        return self.highest - self.headroom

    @property
    def fits(self) -> bool:
        """Return whether a scale keeps underflow below the share and leaves the headroom."""
        return self.lowest <= self.top


def scale_range(
    kinds: Iterable[Gradients], share: float, headroom: int, limits: Iterable[Gradients] = ()
) -> ScaleRange | None:
    """Return the scales that suit all kinds at once; None if all gradients were zero.

    limits: gradients that must not overflow, whatever of them underflows.
    """
    kinds = [kind for kind in kinds if kind.nonzero]
    if not kinds:
        return None
    lowest = max(kind.lowest(share) or 0 for kind in kinds)  # known: the gradients are not 0
    known = (kind.highest() for kind in (*kinds, *limits))
    highest = min(k for k in known if k is not None)
    top = highest - headroom
    # Below is silent underflow, above are skipped updates. The middle is farthest from both,
    # because gradients shrink and peak over a whole run.
    recommended = math.ceil((lowest + top) / 2) if lowest <= top else top
    return ScaleRange(share, headroom, lowest, highest, recommended)

"""Derive FP16's losses from a histogram over binary exponents, on the host; needs no torch.

A value m * 2^e (1 <= m < 2) is kept as its exponent e and the class of its mantissa m:

    class 0: m == 1                        2^-25 rounds to 0, everything above it to 2^-24 or more
    class 1: 1 < m < 2 - 2^-10
    class 2: 2 - 2^-10 <= m < 2 - 2^-11    in [2^-15, 2^-14) rounds up to the smallest normal
    class 3: m >= 2 - 2^-11                in [2^15, 2^16) is 65520 or more: rounds to infinity

This suffices to know exactly what FP16 (round to nearest, ties to even) makes of a value times 2^k,
for every integer k. Below exponent -25 the value is 0, and so is class 0 at -25. Up to -15 it is
subnormal, except classes 2 and 3 at -15. Class 3 at 15 is infinite, and so is everything above 15.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from operator import add
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from mprun.record.run_directory import json_number

LOWEST, HIGHEST = -149, 127  # exponents of FP32, subnormals by their true exponent
CLASSES = 4
# Bin 0: zeros. Bins 4 * (e + 150) + class: values. Then infinities in one bin and NaN in three.
_FIRST = CLASSES
FP16_MAX = 65504.0
FP16_LOST = -25  # values with a lower exponent are 0 in FP16, and so is 2^-25 itself
_INFINITE = CLASSES * (HIGHEST - LOWEST + 2)
BINS = _INFINITE + CLASSES


class Shares(NamedTuple):
    """Parts (0 to 1) of the non-zero finite values that FP16 changes in kind.

    underflow: rounded to zero. subnormal: not zero, below 2^-14. overflow: rounded to infinity.
    NaN where there is no such value.
    """

    underflow: float
    subnormal: float
    overflow: float


def fp16_headroom(value: float) -> int:
    """Return the largest k for which a positive value times 2^k does not overflow FP16."""
    mantissa, exponent = math.frexp(value)  # mantissa below 1
    # From 65520 = 2^16 * (1 - 2^-12) on, rounding gives infinity, not 65504.
    return 16 - exponent - (mantissa >= 1 - 2.0**-12)


class ExponentCounts:
    """A histogram over binary exponents and mantissa classes; bins: from `exponent_counts`."""

    __slots__ = ("bins",)

    def __init__(self, bins: np.ndarray | None = None):
        bins = np.zeros(BINS, np.int64) if bins is None else np.asarray(bins, np.int64)
        if bins.shape != (BINS,):
            raise ValueError(f"bins of shape {bins.shape}: must be ({BINS},)")
        # All NaN mantissas count as one kind, so that equal histograms have equal bins.
        nan = bins[_INFINITE + 1 :].sum()
        self.bins = np.concatenate([bins[: _INFINITE + 1], [nan, 0, 0]])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExponentCounts) and bool((self.bins == other.bins).all())

    def __repr__(self) -> str:
        return f"ExponentCounts.from_json({self.to_json()})"

    @property
    def total(self) -> int:
        """Return the number of elements, including zeros, infinities and NaN."""
        return int(self.bins.sum())

    @property
    def zeros(self) -> int:
        return int(self.bins[:_FIRST].sum())

    @property
    def inf(self) -> int:
        return int(self.bins[_INFINITE])

    @property
    def nan(self) -> int:
        return int(self.bins[_INFINITE + 1 :].sum())

    @property
    def nonzero(self) -> int:
        """Return the number of finite non-zero elements, the base of the shares."""
        return int(self.bins[_FIRST:_INFINITE].sum())

    def by_class(self) -> np.ndarray:
        """Return finite non-zero counts, int64 [277, 4]: row e + 149: exponent e, column: class."""
        return self.bins[_FIRST:_INFINITE].reshape(-1, CLASSES)

    def by_exponent(self) -> dict[int, int]:
        """Return exponent -> count, ascending, without exponents that do not occur."""
        counts = self.by_class().sum(axis=1)
        return {int(i) + LOWEST: int(counts[i]) for i in np.flatnonzero(counts)}

    @property
    def headroom(self) -> int | None:
        """Return the largest k for which no finite element times 2^k overflows FP16.

        None if no finite element is non-zero.
        """
        exponent = max(self.by_exponent(), default=None)
        if exponent is None:
            return None
        in_class_3 = self.by_class()[exponent - LOWEST, 3] > 0
        return fp16_headroom(2.0**exponent * (2 - 2.0**-11 if in_class_3 else 1))

    def shares(self, log2_scale: int = 0) -> Shares:
        """Return what rounding to FP16 does to the elements times 2^log2_scale; exact."""
        counts, total = self.by_class(), self.nonzero
        exponents = np.arange(LOWEST, HIGHEST + 1) + log2_scale
        underflow = counts[exponents < FP16_LOST].sum() + counts[exponents == FP16_LOST, 0].sum()
        below_normal = counts[exponents < -15].sum() + counts[exponents == -15, :2].sum()
        overflow = counts[exponents > 15].sum() + counts[exponents == 15, 3].sum()
        found = (underflow, below_normal - underflow, overflow)
        return Shares(*(ratio(int(count), total) for count in found))

    def sums(self, log2_scale: int = 0) -> tuple[float, float]:
        """Return the part of the sum of magnitudes that FP16 makes zero at 2^log2_scale, and the
        sum, to about 10 %: all mantissas count as 1.5, and 2^-25 itself, the one tie, is kept."""
        exponents = np.arange(LOWEST, HIGHEST + 1)
        sums = self.by_class().sum(axis=1) * np.exp2(exponents.astype(np.float64))
        return float(sums[exponents + log2_scale < FP16_LOST].sum()), float(sums.sum())

    def merge(self, other: "ExponentCounts") -> "ExponentCounts":
        return ExponentCounts(self.bins + other.bins)

    def to_json(self) -> dict:
        """Return plain values: zeros, inf, nan, and per class the non-zero counts by exponent."""
        classes = [
            {str(int(i) + LOWEST): int(column[i]) for i in np.flatnonzero(column)}
            for column in self.by_class().T
        ]
        return {"zeros": self.zeros, "inf": self.inf, "nan": self.nan, "classes": classes}

    @classmethod
    def from_json(cls, content: Mapping) -> "ExponentCounts":
        """Invert `to_json`; KeyError, TypeError or ValueError for anything else."""
        bins = np.zeros(BINS, np.int64)
        bins[0] = content["zeros"]
        bins[_INFINITE], bins[_INFINITE + 1] = content["inf"], content["nan"]
        if len(content["classes"]) != CLASSES:
            raise ValueError(f"{len(content['classes'])} classes: must be {CLASSES}")
        for number, counts in enumerate(content["classes"]):
            for exponent, count in counts.items():
                if not LOWEST <= int(exponent) <= HIGHEST:
                    raise ValueError(f"exponent {exponent}: must be {LOWEST} to {HIGHEST}")
                bins[CLASSES * (int(exponent) - LOWEST + 1) + number] = count
        if (bins < 0).any():
            raise ValueError("a negative count")
        return cls(bins)


Part = TypeVar("Part")


def merged(parts: Iterable[Part]) -> Part | None:
    """Return the merge of all, which have a method `merge`; None if there are none."""
    total: Any = None
    for part in parts:
        total = part if total is None else total.merge(part)
    return total


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, NaN for a denominator of 0."""
    return numerator / denominator if denominator else math.nan


class Sums:
    """A dataclass of counts or sums over elements; each field has 0 or 0.0 as its default."""

    __slots__ = ()

    def merge(self, other: Self) -> Self:
        return type(self)(*map(add, astuple(self), astuple(other)))  # type: ignore[call-overload]

    def to_json(self) -> dict[str, float | str]:
        return {name: json_number(value) for name, value in asdict(self).items()}  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, content: Mapping) -> Self:
        """Invert `to_json`; KeyError, TypeError or ValueError for anything else."""
        zeros: dict[str, Any] = {one.name: one.default for one in fields(cls)}  # type: ignore[arg-type]
        found = {name: type(zeros[name])(value) for name, value in content.items()}
        if any(isinstance(value, int) and abs(value) >= 2**63 for value in found.values()):
            raise ValueError("a count exceeds int64")
        return cls(**found)


FORMATS = ("fp16", "bf16")


@dataclass(frozen=True, slots=True)
class LostUpdates(Sums):
    """The lost updates of a module or a model: how many of its `total` weights have them.

    zero: the update is exactly 0. nonfinite: weight or update is NaN or infinite. fp16, bf16: of
    the others, those whose update rounds away in that format.
    """

    total: int = 0
    zero: int = 0
    nonfinite: int = 0
    fp16: int = 0
    bf16: int = 0

    @property
    def nonzero(self) -> int:
        """Return the number of finite non-zero updates, the base of the shares."""
        return self.total - self.zero - self.nonfinite

    def share(self, format: str) -> float:
        """Return the part (0 to 1) of the non-zero updates lost in one of FORMATS; NaN without."""
        return ratio(getattr(self, format), self.nonzero)


@dataclass(frozen=True, slots=True)
class AppliedUpdates(Sums):
    """The applied updates of 16-bit weights, as sums over the weights of a module or a model.

    Single updates say little about 16-bit weights: stochastic rounding leaves most of them
    unchanged, and is right on average. applied: the change of the weight, including Kahan's
    compensation, times the sign of the wanted update. wanted: the magnitude of the wanted update,
    computed by the same rule in float64 from the weight, gradient and state before the step.
    squares: the square of applied minus wanted.
    """

    applied: float = 0.0
    wanted: float = 0.0
    squares: float = 0.0

    @property
    def ratio(self) -> float:
        """Return applied / wanted: 1 without bias, 0 for weights that stand still; NaN if 0 / 0."""
        return ratio(self.applied, self.wanted)

"""Medians, quartiles, and ratios with an interval, of a handful of windows.

Intervals are percentile bootstraps (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
section 13.3), drawn with a fixed seed, so that one set of windows always gives the same interval.
With fewer than some ten windows they are narrower than 95 % coverage would ask for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

RESAMPLES, CONFIDENCE, SEED = 4000, 0.95, 20171010


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles (linear interpolation between order statistics) of n values."""

    median: float
    q1: float
    q3: float
    n: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two rates with a bootstrap interval at 95 %.

    paired: of windows that followed one another in the same round, so that drift of clock and
    temperature cancels; else of two medians, from windows at different times.
    """

    median: float
    low: float
    high: float
    n: int
    paired: bool


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value; ValueError for none."""
    if not len(values):
        raise ValueError("no values")
    q1, median, q3 = numpy.percentile(numpy.asarray(values, dtype=float), (25, 50, 75))
    return Spread(float(median), float(q1), float(q3), len(values))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Median of the ratios pair by pair; pairs are resampled. ValueError for unequal lengths."""
    if len(numerators) != len(denominators) or not len(numerators):
        raise ValueError(f"{len(numerators)} and {len(denominators)} values make no pairs")
    ratios = numpy.asarray(numerators, dtype=float) / numpy.asarray(denominators, dtype=float)
    draws = _draws(len(ratios), numpy.random.default_rng(SEED))
    low, high = _interval(numpy.median(ratios[draws], axis=1))
    return Ratio(float(numpy.median(ratios)), low, high, len(ratios), True)


def unpaired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Ratio of the two medians; each side is resampled on its own. ValueError for an empty one."""
    if not len(numerators) or not len(denominators):
        raise ValueError("no values")
    above = numpy.asarray(numerators, dtype=float)
    below = numpy.asarray(denominators, dtype=float)
    random = numpy.random.default_rng(SEED)
    resampled = numpy.median(above[_draws(len(above), random)], axis=1)
    resampled = resampled / numpy.median(below[_draws(len(below), random)], axis=1)
    low, high = _interval(resampled)
    ratio = float(numpy.median(above) / numpy.median(below))
    return Ratio(ratio, low, high, min(len(above), len(below)), False)


def _draws(n: int, random: numpy.random.Generator) -> numpy.ndarray:
    return random.integers(0, n, (RESAMPLES, n))


def _interval(resampled: numpy.ndarray) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(resampled, (tail, 1 - tail))
    return float(low), float(high)

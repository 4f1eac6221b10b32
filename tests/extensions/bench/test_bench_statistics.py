"""Medians, quartiles and bootstrap intervals against hand values, all resamples, and scipy."""

import itertools

import numpy
import pytest
from scipy import stats

from mprun.extensions.bench.summary import RESAMPLES, ratio_of, spread


def test_spread_by_hand():
    """Quartiles of 1 2 3 4 10: positions 1, 2 and 3 of the order statistics; of two: between."""
    found = spread([10, 1, 3, 2, 4])
    assert found == {"median": 3.0, "q1": 2.0, "q3": 4.0, "n": 5}
    assert spread([1.0, 2.0])["q1"] == 1.25
    assert spread([7.0])["q3"] == 7.0


def test_pairing_cancels_a_drift_that_unpaired_windows_keep():
    drift = numpy.array([1.0, 1.5, 2.0, 2.5, 3.0])
    paired, unpaired = (ratio_of(1.1 * drift, drift, paired=pairs) for pairs in (True, False))
    assert paired["high"] - paired["low"] < 1e-12 and paired["median"] == pytest.approx(1.1)
    assert unpaired["median"] == pytest.approx(1.1) and not unpaired["paired"]
    assert unpaired["low"] < 0.9 and unpaired["high"] > 1.3


def test_the_interval_is_that_of_all_resamples():
    """Three ratios have 27 resamples. The median is the smallest in 7 of them (all three, or two of
    three draws), so both ends of a 95 % interval are the extreme ratios.
    """
    ratios = [1.0, 1.2, 1.5]
    medians = sorted(numpy.median(draw) for draw in itertools.product(ratios, repeat=3))
    assert medians.count(1.0) == medians.count(1.5) == 7
    # One interval of one set of windows.
    found, again = (ratio_of(ratios, [1.0, 1.0, 1.0], paired=True) for _ in range(2))
    assert (found["low"], found["high"]) == (1.0, 1.5) and again == found
    # A constant ratio has an interval of no width.
    found = ratio_of([2.0, 4.0, 8.0], [1.0, 2.0, 4.0], paired=True)
    assert found == {"median": 2.0, "low": 2.0, "high": 2.0, "n": 3, "paired": True}


def test_the_interval_agrees_with_scipy():
    """Two bootstraps with draws of their own: a quantile at p has a standard error of
    sqrt(p (1 - p) / N) in probability, 0.0025 for p = 0.025 and 4000 draws. So the ends lie between
    scipy's at 0.025 - 0.01 and 0.025 + 0.01, four standard errors away."""
    random = numpy.random.default_rng(0)
    above, below = random.normal(10, 1, 40), random.normal(5, 0.2, 40)
    found = ratio_of(above, below, paired=True)

    def end(level):
        answer = stats.bootstrap(
            (above / below,),
            numpy.median,
            n_resamples=RESAMPLES,
            method="percentile",
            confidence_level=level,
            random_state=numpy.random.default_rng(1),
        )
        return answer.confidence_interval

    wide, narrow = end(0.97), end(0.93)
    assert wide.low <= found["low"] <= narrow.low
    assert narrow.high <= found["high"] <= wide.high

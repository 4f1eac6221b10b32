"""The stricter alpha of planned looks, against published constants and a simulation of its own."""

import math

import numpy as np
import pytest
from scipy import stats

from mprun.comparison import planned_looks
from mprun.comparison.equivalence import (
    DRAWS,
    level_after_a_test,
    nominal_alpha,
    p_values,
)
from mprun.errors import BadInput

from ..helpers import raises_line

# Standard error of the level that the calibration reaches, and of its alpha near `alpha`.
LEVEL_ERROR = math.sqrt(0.05 * 0.95 / DRAWS)


@pytest.mark.parametrize("looks", [[], [5], [2, 5], [3, 3], [3, 10, 5], ["3", "x"]])
def test_looks_that_are_none(looks):
    words = f"--looks {','.join(map(str, looks))}: must be two or more numbers of seeds, ascending"
    with raises_line(BadInput, words):
        planned_looks(looks)


def test_looks_are_numbers_as_text_or_not():
    assert planned_looks([3, 5, 10]) == planned_looks(["3", "5", "10"]) == [3, 5, 10]


@pytest.mark.parametrize(("count", "constant"), [(2, 1.875), (3, 1.992), (5, 2.122)])
@pytest.mark.few(1)
def test_pocock_constants(count, constant):
    """Equal groups so large that t is normal: Jennison and Turnbull (2000), table 2.1, alpha 0.1.

    That table is two-sided; crossing both sides is too rare to matter. The constants have three
    decimals: half a unit of the last is about 0.000035 of alpha here. One standard error of the
    simulated alpha is at most LEVEL_ERROR, because alpha moves slower than the level does.
    """
    looks = tuple(10_000 * (index + 1) for index in range(count))
    assert nominal_alpha(looks) == pytest.approx(stats.norm.sf(constant), abs=4 * LEVEL_ERROR)


@pytest.mark.parametrize("looks", [(3, 5, 10), (3, 4), (4, 6, 7, 12)])
@pytest.mark.slow
def test_level_recomputed_seed_by_seed(looks):
    """Another generator, raw values instead of blocks, scipy's t test: the level is 5 %."""
    draws = 60_000
    values = np.random.default_rng(12345).standard_normal((draws, looks[-1]))
    alpha = nominal_alpha(looks)
    crossed = np.zeros(draws, dtype=bool)
    for look in looks:
        test = stats.ttest_1samp(values[:, :look], 0.0, axis=1, alternative="less")
        crossed |= test.pvalue <= alpha
    error = math.hypot(math.sqrt(0.05 * 0.95 / draws), LEVEL_ERROR)
    assert abs(crossed.mean() - 0.05) < 4 * error


def test_one_look_alone_is_an_ordinary_test():
    (smallest,) = p_values((6,), 100_000, np.random.default_rng(7))
    # A p-value is uniform: largest distance to it, Kolmogorov's bound at a chance of 1e-4.
    assert stats.kstest(smallest, "uniform").pvalue > 1e-4


def test_more_looks_are_stricter():
    alphas = [nominal_alpha(looks) for looks in ((3, 7), (3, 5, 7))]
    assert 0.05 > alphas[0] > alphas[1] > 0.05 / 3  # never below Bonferroni's


def test_the_alpha_does_not_change_from_call_to_call():
    first = nominal_alpha((3, 7))
    assert nominal_alpha.__wrapped__((3, 7)) == first  # beside the cache
    other = nominal_alpha((3, 7), seed=1)
    assert other != first
    assert other == pytest.approx(first, abs=4 * math.sqrt(2) * LEVEL_ERROR)


@pytest.mark.parametrize(("looks", "level"), [((3, 7), 0.069), ((5, 10), 0.067)])
@pytest.mark.few(1)
def test_looks_planned_after_a_test_do_not_hold_the_level(looks, level):
    """Recomputed value by value: the first test at 5 %, the second at the alpha of both looks."""
    values = np.random.default_rng(11).standard_normal((40_000, looks[1]))
    tests = [stats.ttest_1samp(values[:, :n], 0.0, axis=1, alternative="less") for n in looks]
    crossed = (tests[0].pvalue <= 0.05) | (tests[1].pvalue <= nominal_alpha(looks))
    assert level_after_a_test(looks) == pytest.approx(crossed.mean(), abs=0.006)
    assert level_after_a_test(looks) == pytest.approx(level, abs=0.003)

"""The stricter alphas of looks, against published constants and simulations of their own."""

import math

import numpy as np
import pytest
from scipy import stats

from mprun.comparison import looks, planned_looks
from mprun.comparison.equivalence import estimate, paired_interval
from mprun.comparison.looks import (
    DRAWS,
    NEVER,
    hopeless,
    level_after_a_test,
    nominal_alpha,
    p_values,
    spent_alphas,
)
from mprun.errors import BadInput

from ..helpers import raises_line

# Standard error of the level that the calibration reaches, and of its alpha near `alpha`.
LEVEL_ERROR = math.sqrt(0.05 * 0.95 / DRAWS)


def below_zero(values, look):
    """The p of scipy's one-sided t test of the first `look` values of each row."""
    return stats.ttest_1samp(values[:, :look], 0.0, axis=1, alternative="less").pvalue


@pytest.mark.parametrize("looks", [[], [5], [2, 5], [3, 3], [3, 10, 5], ["3", "x"]])
def test_looks_that_are_none(looks):
    words = f"--looks {','.join(map(str, looks))}: must be two or more numbers of seeds, ascending"
    with raises_line(BadInput, words):
        planned_looks(looks)
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
    crossed = np.any([below_zero(values, look) <= alpha for look in looks], axis=0)
    error = math.hypot(math.sqrt(0.05 * 0.95 / draws), LEVEL_ERROR)
    assert abs(crossed.mean() - 0.05) < 4 * error


def test_one_look_alone_is_an_ordinary_test():
    (smallest,) = p_values((6,), 100_000, np.random.default_rng(7))
    # A p-value is uniform: largest distance to it, Kolmogorov's bound at a chance of 1e-4.
    assert stats.kstest(smallest, "uniform").pvalue > 1e-4


@pytest.mark.slow
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
    first, second = (below_zero(values, look) for look in looks)
    crossed = (first <= 0.05) | (second <= nominal_alpha(looks))
    assert level_after_a_test(looks) == pytest.approx(crossed.mean(), abs=0.006)
    assert level_after_a_test(looks) == pytest.approx(level, abs=0.003)


# In percent, of another program: 300,000 paths for 10 seeds, 200,000 for the others.
SPENT = {
    5: [2.32, 2.20, 2.73],
    6: [1.82, 1.67, 2.07, 2.63],
    8: [1.21, 0.91, 1.22, 1.55, 1.94, 2.42],
    10: [0.80, 0.69, 0.84, 1.05, 1.31, 1.61, 1.92, 2.34],
    12: [0.65, 0.50, 0.61, 0.77, 1.00, 1.18, 1.42, 1.66, 1.95, 2.27],
}


def spent_by(count, most):
    return 0.05 * (count / most) ** 1.5


@pytest.mark.parametrize("most", SPENT)
def test_spent_alphas(most):
    """The error of an alpha is about that of the share that crossed up to its look."""
    alphas = spent_alphas(3, most)
    assert alphas[0] == spent_by(3, most)  # nothing to simulate
    assert alphas[1:] == tuple(round(alpha, 6) for alpha in alphas[1:])  # on every processor
    for count, (alpha, percent) in enumerate(zip(alphas, SPENT[most], strict=True), 3):
        error = math.sqrt(spent_by(count, most) * (1 / DRAWS + 1 / 200_000))
        assert alpha == pytest.approx(percent / 100, abs=4 * error + 0.00005)


@pytest.mark.parametrize(("first", "most"), [(3, 10), (5, 7)])
@pytest.mark.few(1)
def test_spent_share_recomputed_value_by_value(first, most):
    draws = 40_000
    values = np.random.default_rng(99).standard_normal((draws, most))
    crossed = np.zeros(draws, dtype=bool)
    for count, alpha in enumerate(spent_alphas(first, most), first):
        crossed |= below_zero(values, count) <= alpha
        spent = spent_by(count, most)
        assert abs(crossed.mean() - spent) < 4 * math.sqrt(spent * (1 / draws + 1 / DRAWS))


@pytest.mark.slow
def test_spent_alphas_where_a_look_gets_few_paths():
    """At 3 of 400 seeds 0.003 % are spent: 13 of all paths. Here 21 crossed, those of 4 seeds."""
    alphas = spent_alphas(3, 400, seed=19)
    assert len(alphas) == 398 and min(alphas) > 0 and max(alphas) == alphas[-1] < 0.05


def test_as_many_paths_cross_as_are_spent(monkeypatch):
    monkeypatch.setattr(looks, "DRAWS", 1000)
    crossed = np.zeros(1000, dtype=bool)
    paths = p_values((3, 4, 5), 1000, np.random.default_rng(0))
    for count, alpha, p in zip((3, 4, 5), spent_alphas.__wrapped__(3, 5), paths, strict=True):
        crossed |= p <= alpha + 1e-6  # alphas are rounded
        assert count == 3 or crossed.sum() == round(1000 * spent_by(count, 5))


@pytest.mark.parametrize("looks", [(1, 5), (5, 4)])
def test_looks_that_spend_nothing(looks):
    with pytest.raises(ValueError, match=r"first=\d, most=\d: must be 2"):
        spent_alphas(*looks)
    assert spent_alphas(10, 10) == spent_alphas(2, 2) == (0.05,)  # one look spends all


def test_spent_alphas_do_not_change_from_call_to_call():
    assert spent_alphas.__wrapped__(3, 6) == spent_alphas(3, 6) != spent_alphas(3, 6, seed=1)


FIVE = [-2.0, -1.0, 0.0, 1.0, 2.0]  # variance 2.5, t(0.95, 4) = 2.131847
T4 = 2.131847**2


@pytest.mark.parametrize(
    ("shift", "margin", "most", "needed"),
    [
        (0.0, 1.0, 3, 12),  # 11.36
        (0.0, 1.0, 4, None),  # at most 12 are tried
        (3.0, 1.0, 3, None),  # outside: 2.84
        (0.5, 1.0, 10, 46),  # 45.4
        (-0.5, 1.0, 10, 46),
        (1.5, 1.0, 10, 46),  # outside by as much
        (1.0, 1.0, 10, NEVER),
        (1.0 + 1e-9, 1.0, 10, NEVER),
    ],
)
def test_hopeless(shift, margin, most, needed):
    own, base = [value + shift for value in FIVE], [0.0] * 5
    assert hopeless(paired_interval(own, base), margin, most) == needed
    # The level of a look plays no role, nor do units that squares of floats do not hold.
    assert hopeless(paired_interval(own, base, 0.001), margin, most) == needed
    for unit in (2.0**-700, 2.0**700):
        tiny = paired_interval([value * unit for value in own], base)
        assert hopeless(tiny, margin * unit, most) == needed


def test_hopeless_of_a_ratio_and_of_samples_that_are_no_pairs():
    own, base = [4.0 + value / 100 for value in FIVE], [4.0] * 5
    ratio = estimate(own, base, "paired", relative=True)  # 2.5 * (0.01 / 4)^2
    assert hopeless(ratio, 0.001, 10) == math.ceil(T4 * 2.5 * 6.25e-6 / 0.001**2) == 72
    samples = estimate(own, own, "Welch", relative=False)  # 8 degrees of freedom
    needed = math.ceil(stats.t.ppf(0.95, 8) ** 2 * 2 * 2.5e-4 / 0.004**2)
    assert hopeless(samples, 0.004, 10) == needed == 109


def test_nobody_gives_up_too_early():
    assert hopeless(paired_interval(FIVE[1:], [0.0] * 4), 0.1, 10) is None
    assert hopeless(paired_interval([1.0] * 5, [0.0] * 5), 2.0, 10) is None
    unknown = estimate(FIVE, FIVE[::-1], "paired", relative=True)  # the baseline's mean is 0
    assert hopeless(unknown, 0.1, 10) is None

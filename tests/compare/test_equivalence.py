"""Intervals by hand and against scipy.stats; every row of the verdict table at its boundary."""

import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats

from mprun.comparison.equivalence import (
    Interval,
    decide,
    estimate,
    outlier,
    paired_interval,
    paired_ratio,
    permutation_p,
    seeds_needed,
    t_quantile,
    welch_interval,
    welch_ratio,
)
from mprun.comparison.findings import Question
from mprun.comparison.planned import more_needed
from mprun.comparison.sentence import sentence
from mprun.comparison.wording import decimals_for

PERCENT = Question(metric="loss")  # of a baseline mean of 1
OWN = Question(metric="score", unit="own", relative=False)


def interval(low: float, high: float, n: int = 5) -> Interval:
    middle = (low + high) / 2
    return Interval(middle, low, high, 0.9, "paired", (n, n), (1.0, 0.0), False)


def test_paired_by_hand():
    # Differences 3, 1, 5: mean 3, deviations 0, -2, 2, variance 8 / 2 = 4, s = 2.
    # t(0.95, 2) = 2.91999 (table); h = 2.91999 * 2 / sqrt(3) = 3.37171.
    found = paired_interval([13.0, 21.0, 45.0], [10.0, 20.0, 40.0])
    assert found.difference == 3.0
    assert found.variances == (4.0 / 4**found.exponent, 0.0) and 45 < 2**found.exponent
    assert found.low == pytest.approx(3 - 3.37171, abs=1e-4)  # the table has six digits
    assert found.high == pytest.approx(3 + 3.37171, abs=1e-4)
    assert (found.level, found.method, found.counts) == (0.9, "paired", (3, 3))


def test_welch_by_hand():
    # Means 5 and 2, variances 1 and 1 over 3 each: standard error sqrt(1/3 + 1/3) = 0.816497,
    # degrees (2/3)^2 / ((1/3)^2/2 + (1/3)^2/2) = 4, t(0.95, 4) = 2.13185; h = 1.74064.
    found = welch_interval([4.0, 5.0, 6.0], [1.0, 3.0, 2.0])
    assert found.difference == 3.0
    assert found.low == pytest.approx(3 - 1.74064, abs=1e-4)
    assert found.high == pytest.approx(3 + 1.74064, abs=1e-4)


@pytest.mark.parametrize("exponent", [-990, -500, 500, 990])
@pytest.mark.parametrize(
    "interval_of", [paired_interval, welch_interval, paired_ratio, welch_ratio]
)
def test_numbers_of_any_size_compare(interval_of, exponent):
    """A power of two changes no digit, so every bit of an interval is the same."""
    own, base = [2.021, 2.034, 2.017, 2.029], [2.0201, 2.0307, 2.0143, 2.0292]
    small = interval_of(own, base)
    scaled = interval_of(*([math.ldexp(value, exponent) for value in arm] for arm in (own, base)))
    power = 0 if interval_of in (paired_ratio, welch_ratio) else exponent  # a ratio has no unit
    for name in ("difference", "low", "high"):
        assert getattr(scaled, name) == math.ldexp(getattr(small, name), power) != 0
    assert scaled.variances == small.variances
    for margin in (0.02, 0.0175, 0.001):
        large = math.ldexp(margin, power)
        assert decide(scaled, large) == decide(small, margin)
        assert seeds_needed(scaled, large) == seeds_needed(small, margin)


def test_alpha_sets_the_level():
    found = paired_interval([1.0, 2.0, 4.0], [0.0, 0.0, 0.0], alpha=0.025)
    # t(0.975, 2) = 4.30265; variance of 1, 2, 4 is 7/3.
    assert found.high - found.difference == pytest.approx(4.30265 * math.sqrt(7 / 9), abs=1e-4)
    assert found.level == 0.95


values = st.floats(-1e3, 1e3).map(lambda x: round(x, 6))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(values, values), min_size=3, max_size=12), st.sampled_from([0.05, 0.02]))
def test_intervals_equal_those_of_scipy(pairs, alpha):
    own, base = (list(arm) for arm in zip(*pairs, strict=True))
    # scipy warns of cancellation below
    for one in (own, base, [a - b for a, b in pairs]):
        assume(max(one) - min(one) > 1e-3)
    fewer = own[:-1] if max(own[:-1]) - min(own[:-1]) > 1e-3 else own  # unequal numbers
    for found, test in (
        (paired_interval(own, base, alpha), stats.ttest_rel(own, base)),
        (welch_interval(fewer, base, alpha), stats.ttest_ind(fewer, base, equal_var=False)),
    ):
        expected = test.confidence_interval(1 - 2 * alpha)
        # float64: about 16 digits, less a few in a difference of numbers up to 1,000.
        ends = expected.low, expected.high
        assert (found.low, found.high) == pytest.approx(ends, rel=1e-9, abs=1e-9)


def t_test(own, base, method, u):
    """scipy's test of mean(own) - mean(base) - u * |mean(base)|."""
    own, base = np.array(own), np.array(base)
    shifted = base * (1 + u * np.sign(base.mean()))
    if method == "paired":
        return stats.ttest_1samp(own - shifted, 0)
    return stats.ttest_ind(own, shifted, equal_var=False)


@st.composite
def arms(draw):
    """A method and two arms whose mean may be of any sign, with noise of many sizes."""
    method = draw(st.sampled_from(["paired", "Welch"]))
    counts = [draw(st.integers(3, 10)) for _ in range(2)]
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    mean = draw(st.sampled_from([2.0, -3.0, 1e-8, 1e12]))
    scatter, noise, shift = (draw(st.sampled_from([1e-6, 1e-3, 0.1, 0.4])) for _ in range(3))
    base = 1 + scatter * generator.standard_normal(counts[method == "paired"])
    shared = base if method == "paired" else 1.0
    own = shared + shift + noise * generator.standard_normal(len(base) if method == "paired" else 5)
    return method, (mean * own).tolist(), (mean * base).tolist()


# The root comes to its last digit from below, while the other end stays where it began.
FROM_BELOW = (
    "Welch",
    [1000001040910.5854, 1000002334140.9498, 1000001172586.4393, 1000001753621.6361]
    + [999999509873.1995],
    [1176837745206.3894, 1144575261487.3394, 1129032313235.3965, 836468705055.8865],
)


@settings(deadline=None, max_examples=80)
@given(arms(), st.sampled_from([0.05, 0.02]))
@example(FROM_BELOW, 0.02)
def test_a_relative_interval_inverts_scipy_s_tests(found, alpha):
    """Word and interval agree with the tests of own - (1 +- margin) * base, whatever the margin."""
    method, own, base = found
    interval = estimate(own, base, method, True, alpha)
    zero = stats.ttest_1samp(base, 0).pvalue >= 2 * alpha
    assert zero == (interval.low == -math.inf) == (interval.high == math.inf)
    if zero:
        assert decide(interval, 1e9) == "inconclusive"
        return
    for end, sign in ((interval.low, 1), (interval.high, -1)):
        test = t_test(own, base, method, end)
        assert test.pvalue / 2 == pytest.approx(alpha, rel=1e-5) and sign * test.statistic > 0
    # What tells how many seeds are needed: the variances that the test has at the difference.
    own_values, mean = np.array(own), np.mean(base)
    shifted = np.array(base) * (1 + interval.difference * np.sign(mean))
    samples = (own_values, shifted) if method == "Welch" else (own_values - shifted, 0 * shifted)
    variances = [np.var(one, ddof=1) / mean**2 for one in samples]
    ours = [4.0**interval.exponent * one for one in interval.variances]
    # own - shifted cancels about as many digits as the noise of 1e-6 leaves out of 16.
    assert ours == pytest.approx(variances, rel=1e-5, abs=1e-18)
    for margin in (1e-3, 0.01, 0.1, 0.3, abs(interval.difference)):
        above, below = (t_test(own, base, method, u) for u in (margin, -margin))
        claims = {
            "matches": (above.statistic < 0 < below.statistic, max(above.pvalue, below.pvalue)),
            "worse": (above.statistic > 0, above.pvalue),
            "better": (below.statistic < 0, below.pvalue),
        }
        word = decide(interval, margin)
        for name, (side, p) in claims.items():
            if not math.isclose(p / 2, alpha, rel_tol=1e-5):
                assert (word == name) == (side and p / 2 < alpha)


def test_a_relative_interval_by_hand():
    # Base 10, 20, 30 and 2 above each: the ratio is 2 / 20. Fieller's ends are 2 / (20 +- h) with
    # h = 2.919986 * 10 / sqrt(3) = 16.8586, the baseline's own half width.
    found = paired_ratio([12.0, 22.0, 32.0], [10.0, 20.0, 30.0])
    assert found.difference == pytest.approx(0.1, rel=1e-12)
    assert (found.low, found.high) == pytest.approx((2 / 36.8586, 2 / 3.1414), rel=1e-4)
    # 25 % above each: exactly that ratio, on the side of the margin that it is.
    for own, word in (([10.0, 12.5, 15.0], "worse"), ([6.0, 7.5, 9.0], "better")):
        exact = paired_ratio(own, [8.0, 10.0, 12.0])
        assert exact.low == exact.difference == exact.high and abs(exact.low) == 0.25
        assert decide(exact, 0.25) == word and decide(exact, 0.26) == "matches"
    # Below zero the mode 1 above -2 is worse by half of the mean.
    for found in (paired_ratio([-1.0] * 3, [-2.0] * 3), welch_ratio([-1.0] * 3, [-2.0] * 3)):
        assert (found.low, found.difference, found.high) == (0.5, 0.5, 0.5)
    for of in (paired_ratio, welch_ratio):
        same = of([0.1, 0.1, 0.1], [0.1, 0.1, 0.1])
        assert same.identical and (same.low, same.high) == (0, 0)


def test_a_relative_interval_of_arms_of_very_different_size():
    own, base = [1e300, 1.1e300, 0.9e300], [1e-5, 1.1e-5, 1.05e-5]
    for of in (paired_ratio, welch_ratio):
        found = of(own, base)
        assert 0.5e305 < found.low < found.difference < found.high < 2e305
        assert decide(found, 0.01) == "worse"
        above = of([1e308, 1e307, 2e307], [1e-308, 1.1e-308, 1.2e-308])
        assert not above.difference < 1e308 and decide(above, 0.01) != "matches"
        assert of([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]).low != 0  # no number, and no error
    assert paired_interval([1.7e308] * 3, [-1.7e308] * 3).low == math.inf


def test_an_arm_without_variance_leaves_the_other_ones_degrees_of_freedom():
    found = welch_interval([1.0, 1.0, 1.0], [0.0, 2.0, 4.0])
    half = t_quantile(0.05, 2) * math.sqrt(4 / 3)  # only the baseline varies: variance 4, degrees 2
    assert found.high - found.difference == pytest.approx(half, rel=1e-12)


def test_what_has_no_interval_and_what_is_no_margin_is_refused():
    for interval_of in (paired_interval, welch_interval):
        with pytest.raises(ValueError, match="an interval needs at least 2"):
            interval_of([1.0], [1.0])
    with pytest.raises(ValueError, match="zip"):
        paired_interval([1.0, 2.0, 3.0], [1.0, 2.0])
    for margin in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="must be above 0"):
            decide(interval(-1, 1), margin)


BELOW = math.nextafter(1.0, 0.0)  # the largest double below a margin of 1
ABOVE_ZERO = math.nextafter(0.0, 1.0)


@pytest.mark.parametrize(
    ("low", "high", "name", "opposite"),
    [
        (-BELOW, BELOW, "matches", "matches"),
        (-0.5, 1.0, "inconclusive", "inconclusive"),  # the margin itself is not inside
        (0.5, 0.6, "matches", "matches"),  # off zero and yet inside
        (1.0, 3.0, "worse", "better"),
        (BELOW, 3.0, "likely worse", "likely better"),
        (ABOVE_ZERO, 1.0, "likely worse", "likely better"),
        (0.0, 1.0, "inconclusive", "inconclusive"),
        (-2.0, 2.0, "inconclusive", "inconclusive"),
        (-math.inf, math.inf, "inconclusive", "inconclusive"),
    ],
)
def test_verdict_table(low, high, name, opposite):
    assert decide(interval(low, high), 1.0) == name
    assert decide(interval(-high, -low), 1.0) == opposite


def test_constant_offset_has_no_width_and_follows_the_table():
    # Halves and quarters are exact in binary, so that the differences are equal to the last bit.
    base = [1.0, 2.0, 4.0]
    for offset, name in ((0.25, "matches"), (0.5, "worse"), (-0.5, "better"), (-0.25, "matches")):
        found = paired_interval([value + offset for value in base], base)
        assert (found.low, found.high) == (offset, offset) and not found.identical
        assert decide(found, 0.5) == name


def test_equal_values_are_identical_though_their_mean_rounds():
    # 0.1 + 0.1 + 0.1 is not 0.3 in binary; equal values must have no variance all the same.
    runs = [0.1, 0.1, 0.1]
    assert welch_interval(runs, runs).identical and not welch_interval([2.0] * 3, runs).identical
    pairs = paired_interval([0.3, 0.1, 0.7], [0.3, 0.1, 0.7])
    assert pairs.identical and (pairs.low, pairs.high) == (0.0, 0.0)
    assert decide(pairs, 0.01) == "matches"
    # Equal means alone are no equal values, with scatter in one arm or in both.
    for interval_of in (paired_interval, welch_interval, paired_ratio, welch_ratio):
        for other in ([3.0, 2.0, 1.0], [2.0, 2.0, 2.0]):
            assert not interval_of([1.0, 2.0, 3.0], other).identical
            assert not interval_of(other, [1.0, 2.0, 3.0]).identical


@pytest.mark.parametrize("counts", [(2, 2), (2, 9), (9, 2)])
def test_two_seeds_decide_nothing(counts):
    own, base = [0.0] * counts[0], [5.0] * counts[1]
    assert decide(welch_interval(own, base), 1.0) == "inconclusive"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(values, values), min_size=3, max_size=10), st.randoms())
def test_exchanged_arms_turn_the_interval_and_the_order_of_pairs_changes_nothing(pairs, generator):
    own, base = zip(*pairs, strict=True)
    for interval_of in (paired_interval, welch_interval):
        there, back = interval_of(own, base), interval_of(base, own)
        assert (there.low, there.high) == (-back.high, -back.low)
    generator.shuffle(pairs)
    # math.fsum rounds once, whatever the order: equal to the last bit.
    assert paired_interval(*zip(*pairs, strict=True)) == paired_interval(own, base)


def needed(n: int, difference: float, s: float, margin: float) -> int | None:
    found = Interval(difference, -9, 9, 0.9, "paired", (n, n), (s**2, 0.0), False)
    return seeds_needed(found, margin)


def test_seeds_needed_by_hand():
    # Difference 0, s = margin: t(0.95, m - 1) <= sqrt(m). m = 4: 2.353 > 2; m = 5: 2.132 < 2.236.
    assert needed(3, 0.0, 1.0, 1.0) == 2
    # Difference of half the margin, s half of it: the same inequality.
    assert needed(3, 0.5, 0.5, 1.0) == 2
    # Outside, half of the difference is allowed: t / sqrt(m) <= 0.5 for s = 2 = difference.
    # m = 12: 1.796 / 3.464 = 0.518; m = 13: 1.782 / 3.606 = 0.494.
    assert needed(3, 2.0, 2.0, 1.0) == 10
    assert needed(12, 2.0, 2.0, 1.0) == 1
    assert needed(2, 0.0, 1.0, 1.0) == 1  # to three
    # t(0.95, 49) / sqrt(50) = 1.677 / 7.071 = 0.2371 is the narrowest that 50 seeds get.
    assert needed(3, 0.0, 1 / 0.2370, 1.0) is None
    assert needed(3, 0.0, 1 / 0.2372, 1.0) == 47
    assert needed(3, 0.0, math.inf, 1.0) is None


def test_a_difference_of_exactly_the_margin_needs_what_shows_its_sign():
    """Half of the difference is allowed: t / sqrt(m) <= 0.5 for s = 1, which is m = 13 again."""
    found = Interval(1.0, -9, 9, 0.9, "paired", (12, 12), (1.0, 0.0), False)
    assert seeds_needed(found, 1.0) == 1
    # Of a plan to 5: s = 0.1 gives half an interval of 0.2 at the next look.
    at_first = Interval(-1.0, -9, 9, 0.9, "paired", (3, 3), (0.01, 0.0), False)
    assert more_needed(at_first, 1.0, 3, 5) == 1


def test_seeds_needed_by_welch():
    def of(counts):
        return seeds_needed(Interval(0.0, -9, 9, 0.9, "Welch", counts, (1.0, 1.0), False), 1.0)

    # t(0.95, 2m - 2) sqrt(2 / m) <= 1. m = 6: 1.812 * 0.577 = 1.046; m = 7: 1.782 * 0.535 = 0.953.
    assert of((3, 3)) == 4
    # A baseline of 10 stays at 10; 5 of the mode: standard error sqrt(1/5 + 1/10) = 0.548, degrees
    # 0.3^2 / (0.2^2 / 4 + 0.1^2 / 9) = 8.1, t = 1.857 (8 degrees: 1.860; 9: 1.833), h = 1.017.
    # 6: sqrt(1/6 + 1/10) = 0.516, degrees 10.6, t = 1.80, h = 0.93.
    assert of((3, 10)) == 3


@pytest.mark.parametrize(
    ("margin", "decimals"), [(1.0, 2), (0.5, 2), (10.0, 1), (250.0, 0), (0.1, 3), (0.02, 3)]
)
def test_decimals(margin, decimals):
    assert decimals_for(margin) == decimals


def said(low: float, high: float, margin: float = 0.01, question: Question = PERCENT) -> str:
    found = interval(low, high)
    return sentence(decide(found, margin), found, margin, question)


def test_sentences():
    assert said(-0.002, 0.006) == (
        "matches FP32: difference +0.20 % (90 % CI -0.20 to +0.60 %) is inside the margin of "
        "±1.00 %, 5 seeds, paired."
    )
    small = "A small consistent difference exists: 0 is outside the interval."
    assert said(0.002, 0.006).endswith(small) and said(-0.006, -0.002).endswith(small)
    assert said(0.012, 0.016) == (
        "worse than FP32 by at least 1.20 %: difference +1.40 % (90 % CI +1.20 to +1.60 %), "
        "outside the margin of ±1.00 %, 5 seeds, paired."
    )
    assert said(-0.016, -0.012) == (
        "better than FP32 by at least 1.20 %: difference -1.40 % (90 % CI -1.60 to -1.20 %), "
        "outside the margin of ±1.00 %, 5 seeds, paired; check for a difference other than "
        "precision."
    )
    assert said(0.002, 0.016) == (
        "likely worse than FP32: difference +0.90 % (90 % CI +0.20 to +1.60 %) is above zero but "
        "may be within the margin of ±1.00 %, 5 seeds, paired."
    )
    assert "is below zero but may be within" in said(-0.016, -0.002)
    # Of an accuracy it says which way is worse.
    top1 = Question(metric="top1", unit="points", relative=False, higher_is_better=True)
    assert said(-0.1, 0.3, margin=0.5, question=top1).startswith(
        "matches FP32: difference +0.10 points (90 % CI -0.10 to +0.30 points; positive is worse)"
    )
    same = paired_interval([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert sentence("matches", same, 0.01, PERCENT, "amp") == (
        "matches amp (identical): no difference in any run compared, 3 seeds, paired."
    )


def test_sentence_of_an_inconclusive_interval():
    found = paired_interval([1.0, -1.0, 0.0], [0.0, 0.0, 0.0])  # s = 1, so that m = 5 suffices
    assert sentence("inconclusive", found, 1.0, OWN) == (
        "inconclusive: needs about 2 more seeds; difference 0.00 (90 % CI -1.69 to +1.69) "
        "includes zero and reaches the margin of ±1.00, 3 seeds, paired."
    )
    unbounded = estimate([1.0, -1.0, 0.0], [1.0, 2.0, -0.5], "paired", True)
    waiting = sentence("inconclusive", unbounded, 1.0, OWN, remedy="wait")
    assert waiting.startswith("inconclusive: wait; ")
    assert "difference -1.00 (90 % CI without bounds)" in waiting
    too_few = sentence("inconclusive", found, 0.1, OWN)
    assert "not reachable with more seeds (needs over 50)" in too_few


def test_a_value_far_from_others_is_rare_among_normal_ones():
    draws = np.random.default_rng(5).standard_normal((4000, 10))
    for count in (3, 5, 10):
        found = sum(outlier(row[:count]) is not None for row in draws.tolist())
        assert found / len(draws) < 0.035


@pytest.mark.parametrize("paired", [True, False])
def test_permutation_p_equals_scipy_s(paired):
    generator = np.random.default_rng(3)
    own, base = generator.normal(0.3, 1, 7), generator.normal(0, 1, 7)
    expected = stats.permutation_test(
        (own - base - 0.1,) if paired else (own - 0.1, base),
        lambda x, *y, axis: x.mean(axis) - (y[0].mean(axis) if y else 0),
        permutation_type="samples" if paired else "independent",
        alternative="greater",
        n_resamples=np.inf,
    ).pvalue
    assert permutation_p("worse", own, base, paired, 0.1)[0] == pytest.approx(expected, abs=1e-12)


def test_all_rearrangements_of_few_values_are_counted():
    for paired, few, all_of_them in ((True, 12, 2**12), (False, 7, math.comb(14, 7))):
        for count, number in ((few, all_of_them), (few + 1, 5000)):
            values = [float(value) for value in range(count)]
            assert permutation_p("worse", values, values, paired, 1.0)[1] == 1 / number


def test_permutation_takes_the_margin_of_each_value():
    own, base = np.array([2.2, 4.1, 8.9, 3.1]), np.array([2.0, 4.0, 8.0, 3.0])
    for name, sign in (("worse", 1), ("better", -1)):
        expected = permutation_p(name, own - sign * 0.01 * base, base, True, 0.0)
        assert permutation_p(name, own, base, True, 0.01 * base) == expected

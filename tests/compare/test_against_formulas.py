"""Statistics equal those of scipy, of fractions or a second formula, over generated inputs."""

import itertools
import math
import statistics
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats

from mprun.comparison.decision import pairing
from mprun.comparison.equivalence import Interval, estimate, outlier, permutation_p, seeds_needed
from mprun.comparison.gap_growth import _difference, last_half, paired_gaps, slope_interval
from mprun.comparison.looks import hopeless
from mprun.comparison.planned import more_needed

quick = settings(deadline=None, max_examples=30)
small = st.integers(-4, 4)


def counted(own, base, margins, side, paired):
    """Return how often side * (own - base - margin) is as large, rearranged, and of how many."""
    if paired:
        values = [side * (a - b - m) for a, b, m in zip(own, base, margins, strict=True)]
        signs = itertools.product([1, -1], repeat=len(values))
        sums = [sum(s * v for s, v in zip(row, values, strict=True)) for row in signs]
    else:
        values = [*own, *(b + m for b, m in zip(base, margins, strict=True))]
        sums = []
        for places in itertools.combinations(range(len(values)), len(own)):
            one = [values[i] for i in places]
            other = [values[i] for i in range(len(values)) if i not in places]
            gap = Fraction(sum(one), len(one)) - Fraction(sum(other), len(other))
            sums.append(side * gap)
    return Fraction(sum(one >= sums[0] for one in sums), len(sums)), len(sums)


@quick
@given(
    st.lists(st.tuples(small, small, st.integers(0, 3)), min_size=3, max_size=6),
    st.integers(3, 4), st.booleans(), st.sampled_from(["matches", "worse", "better"]),
)  # fmt: skip
def test_permutation_p_is_the_share_of_all_rearrangements(rows, own_count, paired, claim):
    own, base, margins = (list(column) for column in zip(*rows, strict=True))
    own = own if paired else own[:own_count]
    above, below = (
        counted(own, base, [sign * m for m in margins], side, paired)
        for sign, side in ((-1, 1), (1, -1))
    )  # above the negative margin, below the positive one
    expected, count = {
        "matches": max(above, below),
        "worse": counted(own, base, margins, 1, paired),
        "better": counted(own, base, [-m for m in margins], -1, paired),
    }[claim]
    found, least = permutation_p(claim, own, base, paired, margins)
    assert found == pytest.approx(float(expected), abs=1e-12) and least == 1 / count


@pytest.mark.parametrize("paired", [True, False])
def test_drawn_rearrangements_give_about_the_p_of_all(paired):
    """The standard error of a share p of 5,000 draws is sqrt(p (1 - p) / 5,000): five of them."""
    generator = np.random.default_rng(5)
    own, base = generator.normal(0.5, 1, 13), generator.normal(0, 1, 13)
    found, least = permutation_p("worse", own, base, paired, 0.05)
    assert least == 1 / 5000
    if paired:
        weights = 1 - 2 * ((np.arange(2**13)[:, None] >> np.arange(13)) & 1)
        sums = weights @ (own - base - 0.05)
        exact = np.mean(sums >= sums[0] - 1e-12)
    else:
        test = stats.permutation_test(
            (own, base + 0.05), lambda x, y, axis: x.mean(axis) - y.mean(axis), vectorized=True,
            alternative="greater", n_resamples=20_000, rng=np.random.default_rng(1),
        )  # fmt: skip
        exact = test.pvalue
    assert 0.01 < exact < 0.5
    assert found == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / 4000))


@quick
@given(st.lists(st.integers(-6, 6) | st.sampled_from([-700, 61, 120, 700]), max_size=7))
@example([2.0, 2.01, 9.9, 2.002, 1.991])  # the third
@example([2.0, 2.01, 2.1, 2.002, 1.991])  # none: 0.1 away, the others 0.02 apart
@example([-5.0, 2.0, 2.01])
@example([1.5, 2.0, 2.01])  # none: 0.5 away, of three values so in more than 3 %
@example([2.0, 2.0, 2.0, 9.0])  # none: no scatter to tell by
def test_an_outlier_is_far_from_the_median_of_the_others(values):
    found = []
    for place in range(len(values) if len(values) >= 3 else 0):
        others = values[:place] + values[place + 1 :]
        distance = abs(values[place] - statistics.median_high(others))
        spread = max(others) - min(others)
        if distance > (60 if len(others) == 2 else 10) * spread > 0:
            found.append(place)
    assert outlier(values) == (found[0] if found else None)


@pytest.mark.parametrize("rises", [1, -1])
def test_the_near_end_of_a_ratio_keeps_its_digits_where_the_other_is_far(rises):
    """The roots u of (mean(own - base) - u mean(base))^2 = t^2 / n * var(own - base - u base)."""
    t = stats.t.ppf(0.95, 2)
    mean = math.sqrt(t * t / 3 * (1 + 1e-10))  # a little less, and there were no bounds
    base, own = [mean - 1, mean, mean + 1], [mean - 1 + 0.3 * rises, mean + 0.2, mean + 1.1]
    with localcontext(prec=60):
        gaps = [Decimal(a) - Decimal(b) for a, b in zip(own, base, strict=True)]
        exact = [*map(Decimal, base)]

        def part(x, y):
            means, pairs = (sum(x) / 3, sum(y) / 3), zip(x, y, strict=True)
            covariance = sum((a - means[0]) * (b - means[1]) for a, b in pairs) / 2
            return means[0] * means[1] - Decimal(t) ** 2 / 3 * covariance

        a, b, c = part(exact, exact), part(gaps, exact), part(gaps, gaps)
        ends = [(b + sign * (b * b - a * c).sqrt()) / a for sign in (-1, 1)]
    found = estimate(own, base, "paired", True)
    near, far = (found.low, found.high)[::rises]
    assert near == pytest.approx(float(ends[::rises][0]), rel=1e-12) and abs(far) > 1e9


def half(method, variances, counts, alpha):
    """Return half of scipy's interval for samples of these variances."""

    def sample(variance, count):
        values = np.arange(count) - (count - 1) / 2
        return values * math.sqrt(variance / values.var(ddof=1))

    own, base = (sample(*one) for one in zip(variances, counts, strict=True))
    paired = method == "paired"
    test = stats.ttest_1samp(own, 0) if paired else stats.ttest_ind(own, base, equal_var=False)
    return float(test.confidence_interval(1 - 2 * alpha).high)


@st.composite
def intervals(draw):
    method = draw(st.sampled_from(["paired", "Welch"]))
    counts = tuple(draw(st.integers(2, 12)) for _ in range(2))
    counts = counts[:1] * 2 if method == "paired" else counts
    sds = [draw(st.floats(0.05, 3)) for _ in range(2)]
    variances = (sds[0] ** 2, 0.0 if method == "paired" else sds[1] ** 2)
    difference = draw(st.floats(-2, 2).filter(lambda value: abs(abs(value) - 1) > 1e-3))
    alpha = draw(st.sampled_from([0.05, 0.02]))
    reach = half(method, variances, counts, alpha)
    ends = difference - reach, difference + reach
    return Interval(difference, *ends, 1 - 2 * alpha, method, counts, variances, False)


def allowed(interval):
    """Return the half width that decides at a margin of 1."""
    distance = abs(interval.difference)
    return 1 - distance if distance < 1 else distance / 2


@quick
@given(intervals())
def test_the_seeds_needed_are_the_first_whose_interval_is_narrow_enough(interval):
    fewest, found = min(interval.counts), seeds_needed(interval, 1.0)
    if fewest < 3:
        assert found == 3 - fewest
        return

    def enough(count):
        counts = tuple(max(own, count) for own in interval.counts)
        alpha = (1 - interval.level) / 2
        return half(interval.method, interval.variances, counts, alpha) <= allowed(interval)

    if found is None:
        assert not enough(50)
    else:
        assert found >= 1 and fewest + found <= 50 and enough(fewest + found)
        assert found == 1 or not enough(fewest + found - 1)


@quick
@given(intervals(), st.integers(5, 12))
def test_hopeless_is_three_times_the_most_seeds(interval, most):
    seeds = min(interval.counts)
    reach = half(interval.method, interval.variances, interval.counts, 0.05)
    needed = seeds * (reach / abs(1 - abs(interval.difference))) ** 2
    assume(abs(needed / (3 * most) - 1) > 1e-9 and abs(needed - round(needed)) > 1e-9)
    expected = math.ceil(needed) if seeds >= 5 and needed > 3 * most else None
    assert hopeless(interval, 1.0, most) == (expected and min(expected, 1_000_000))


@quick
@given(intervals())
def test_a_plan_needs_the_first_later_look_that_is_narrow_enough(interval):
    alphas = dict(zip(range(3, 9), [0.0115, 0.0105, 0.0125, 0.0142, 0.0158, 0.0172], strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mprun.comparison.planned.spent_alphas", lambda *ends: [*alphas.values()])
        found = more_needed(interval, 1.0, 3, 8)
    fewest = min(interval.counts)
    later = (
        look - fewest
        for look, alpha in alphas.items()
        if look > fewest
        and half(interval.method, interval.variances, (look, look), alpha) <= allowed(interval)
    )
    assert found == next(later, None)


@quick
@given(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)), st.booleans())
def test_seeds_are_paired_if_three_are_shared_or_one_list_holds_the_other(own, base, by_seed):
    paired = by_seed and (len(own & base) >= 3 or own <= base or base <= own)
    both = sorted(own & base)
    expected = ("paired", both, both) if paired else ("Welch", sorted(own), sorted(base))
    assert pairing(sorted(own, reverse=True), list(base), by_seed) == expected


@quick
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(3, 20), st.sampled_from([1, -1]))
def test_gaps_are_the_influence_of_each_seed_on_the_ratio_of_means(seed, seeds, points, sign):
    """Their mean is own / base - 1 in percent; a seed's share is own - base * own / base."""
    generator = np.random.default_rng(seed)
    base = sign * generator.uniform(1, 3, (seeds, points))
    own = base + generator.normal(0, 1, (seeds, points))
    ratio = own.mean(0) / base.mean(0)
    expected = 100 * (sign * (ratio - 1) + (own - base * ratio) / np.abs(base.mean(0)))
    np.testing.assert_allclose(paired_gaps(own, base, True), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(paired_gaps(own, base, False), own - base)
    x = np.sort(generator.choice(1000, points, replace=False)).astype(float)
    slopes = [stats.linregress(x, gap).slope for gap in own]
    assume(np.std(slopes) > 1e-9)
    for alpha in (0.05, 0.01):
        found = slope_interval(x, own, alpha)
        ends = stats.ttest_1samp(slopes, 0).confidence_interval(1 - 2 * alpha)
        assert found.difference == pytest.approx(np.mean(slopes), rel=1e-7, abs=1e-12)
        assert (found.low, found.high) == pytest.approx(tuple(ends), rel=1e-7, abs=1e-12)
    own[:, generator.integers(points)] = np.nan
    late, of_them = last_half(x, own)
    known = [i for i in range(points) if not np.isnan(own[:, i]).any()]
    kept = [i for i in known if x[i] >= x[known[-1]] / 2]
    np.testing.assert_array_equal(late, x[kept])
    np.testing.assert_array_equal(of_them, own[:, kept])


@quick
@given(st.data())
def test_a_difference_at_a_point_is_the_verdict_s(data):
    """Three seeds that still run have the interval; two have their range, one none."""
    method = data.draw(st.sampled_from(["paired", "Welch"]))
    relative = data.draw(st.booleans())
    counts = [data.draw(st.integers(1, 5)) for _ in range(2)]
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    arms = [4 + generator.standard_normal(counts[method == "Welch" and i]) for i in range(2)]
    for arm in arms:
        for place in data.draw(st.sets(st.integers(0, len(arm) - 1), max_size=2)):
            arm[place] = data.draw(st.sampled_from([np.nan, np.inf]))
    own, base = (arm[np.isfinite(arm)] for arm in arms)
    if method == "paired":
        both = np.isfinite(arms[0] + arms[1])
        own, base = (arm[both] for arm in arms)
    found = _difference(*arms, method, relative)
    if not len(own) or not len(base):
        assert np.isnan(found).all()
        return
    unit = 100 / abs(base.mean()) if relative else 1.0
    assert found[0] == pytest.approx(unit * (own.mean() - base.mean()), abs=1e-9)
    if min(len(own), len(base)) >= 3:
        interval = estimate(own.tolist(), base.tolist(), method, relative)
        ends = [(100 if relative else 1) * end for end in (interval.low, interval.high)]
        assert found[1:] == pytest.approx(ends if np.isfinite(ends).all() else (np.nan,) * 2,
                                          nan_ok=True)  # fmt: skip
    elif method == "paired" and len(own) == len(arms[0]) == 2:
        gaps = unit * (own - base)
        assert found[1:] == pytest.approx((gaps.min(), gaps.max()), abs=1e-9)
    else:
        assert np.isnan(found[1:]).all()

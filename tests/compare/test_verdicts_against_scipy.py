"""Verdicts agree with scipy's tests over generated arms: seeds, pairing, sign, unit, looks."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from mprun.comparison.decision import pairing
from mprun.comparison.equivalence import paired_interval
from mprun.comparison.findings import Question
from mprun.comparison.looks import nominal_alpha, spent_alphas
from mprun.comparison.planned import more_needed
from mprun.comparison.verdict import judge

from .made_runs import made_arm

quick = settings(deadline=None, max_examples=30)


def two_sided(own, base, method, shift):
    """Return scipy's test of own - base - shift * |its mean|; shift 0: of a difference."""
    if method == "paired":
        return stats.ttest_1samp(own - base - shift, 0)
    return stats.ttest_ind(own, base + shift, equal_var=False)


def word_of(own, base, method, margin, relative, alpha):
    """Return the verdict's name by scipy; None: a p is within rounding of alpha."""
    claims = {}
    share = base * np.sign(base.mean()) if relative else np.ones(len(base))
    for name, side, at in (
        ("above", -1, -margin), ("below", 1, margin), ("worse", -1, margin), ("better", 1, -margin),
        ("likely worse", -1, 0.0), ("likely better", 1, 0.0),
    ):  # fmt: skip
        test = two_sided(own, base, method, at * share)
        p = test.pvalue / 2 if side * test.statistic < 0 else 1 - test.pvalue / 2
        if math.isclose(p, alpha, rel_tol=1e-4):
            return None
        claims[name] = p < alpha
    if claims.pop("above") & claims.pop("below"):
        return "matches"
    return next((name for name, shown in claims.items() if shown), "inconclusive")


@quick
@given(st.data())
def test_a_verdict_is_that_of_scipy_s_tests_at_its_seeds_in_its_unit(data):
    """Seeds, pairing, sign, logarithm, margin and looks lead to the same name."""
    of = data.draw(st.sampled_from([("loss", "relative"), ("top1", "points"), ("perplexity",) * 2]))
    higher, log = of[0] == "top1", of[1] == "perplexity"
    relative = of[1] != "points" and (log or data.draw(st.booleans()))
    looks = data.draw(st.sampled_from([(), (3, 5), (4, 6, 9)]))
    margin = data.draw(st.sampled_from([0.02, 0.1]))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    seeds = [data.draw(st.sampled_from([range(3), range(6), range(1, 9), range(2, 5)]))
             for _ in "ab"]  # fmt: skip
    gap, noise = (
        data.draw(st.sampled_from(sizes)) for sizes in ([0, 0.01, -0.07, 0.3], [3e-3, 0.05])
    )
    level = dict(enumerate(3 + 0.1 * generator.standard_normal(9)))
    arms = [
        {seed: level[seed] + here + noise * generator.standard_normal() for seed in own}
        for own, here in zip(seeds, (gap, 0), strict=True)
    ]
    made = [
        made_arm({s: math.exp(v) if log else v for s, v in arm.items()}, mode, metric=of[0])
        for arm, mode in zip(arms, ("amp", "fp32"), strict=True)
    ]
    question = Question(
        metric=of[0], higher_is_better=higher, unit=of[1], relative=relative,
        margin_setting=margin, looks=looks, window=1,
    )  # fmt: skip
    verdict, ends = judge(*made, question)
    method, *used = pairing(*(list(arm) for arm in arms))
    assert [end.value for end in ends] == [run.evals[of[0]][-1] for run in made[0].runs]
    assert verdict.method == method
    fewest = min(map(len, used))
    taken = [look for look in looks if look <= fewest] or ([] if looks else [fewest])
    values = [
        (-1) ** higher * np.array([arm[seed] for seed in own])
        for arm, own in zip(arms, used, strict=True)
    ]
    if not taken or fewest < 3:
        assert verdict.name in ("inconclusive", "one pair")
        assert verdict.needed == (looks[0] if looks else 3) - fewest
        assert verdict.difference == pytest.approx(values[0].mean() - values[1].mean(), abs=1e-9)
        return
    alpha = nominal_alpha(looks) if looks else 0.05
    for look in taken:
        own, base = (arm[:look] if looks else arm for arm in values)
        expected = word_of(own, base, method, margin, relative, alpha)
        assume(expected is not None)
        if expected in ("matches", "worse", "better"):
            break
    assert (verdict.name, verdict.look) == (expected, look if looks else None)
    seen = [own[:look] if looks else own for own in used]
    assert [verdict.seeds, verdict.baseline_seeds] == seen
    whole = abs(base.mean()) if relative else 1.0
    assert verdict.level == 1 - 2 * alpha
    assert verdict.margin == pytest.approx(margin * whole)
    assert verdict.difference == pytest.approx(own.mean() - base.mean(), abs=1e-9)
    if not relative:
        ends = two_sided(own, base, method, 0.0).confidence_interval(1 - 2 * alpha)
        assert (verdict.low, verdict.high) == pytest.approx(tuple(ends), rel=1e-6, abs=1e-9)
    wide = (verdict.high - verdict.low) / 2
    decided = verdict.name in ("matches", "worse", "better")
    least = wide if not decided and math.inf > wide > verdict.margin else None
    assert verdict.least_margin == (least and pytest.approx(least))
    following = next((one for one in looks if one > look), None)
    if decided or (looks and following is None) or (not looks and expected != "inconclusive"):
        assert verdict.needed is None
    elif looks:
        assert verdict.needed == following - fewest


@quick
@given(st.integers(0, 2**32), st.integers(3, 6), st.integers(7, 9), st.floats(0.004, 0.015))
def test_a_plan_s_verdict_needs_what_its_later_looks_need(seed, seeds, most, scatter):
    differences = scatter * np.random.default_rng(seed).standard_normal(seeds)
    keys = {"compare.plan": [0, 3, most]}
    finals = [{seed: 2 + 0.1 * seed + by * gap for seed, gap in enumerate(differences)}
              for by in (1, 0)]  # fmt: skip
    arms = [
        made_arm(own, mode, keys=keys) for own, mode in zip(finals, ("amp", "fp32"), strict=True)
    ]
    found, _ = judge(*arms, Question(metric="loss", relative=False, margin_setting=0.02))
    gaps = [finals[0][seed] - finals[1][seed] for seed in range(len(differences))]
    for look in range(3, len(gaps) + 1):
        alpha = spent_alphas(3, most)[look - 3]
        interval = paired_interval(gaps[:look], [0.0] * look, alpha)
        ends = interval.low, interval.high
        assume(all(abs(abs(end) - 0.02) > 1e-9 for end in ends))
        if (-0.02 < ends[0] and ends[1] < 0.02) or ends[0] > 0.02 or ends[1] < -0.02:
            assert (found.look, found.needed) == (look, None)
            return
    assert (found.look, found.most) == (len(gaps), most)
    assert found.needed == more_needed(interval, 0.02, 3, most)

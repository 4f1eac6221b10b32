"""From made runs to a verdict: curves of every kind, pairing, margins, looks."""

import math

import pytest

from mprun.comparison.decision import pairing
from mprun.comparison.findings import Arm, Question
from mprun.comparison.verdict import assess, judge
from mprun.errors import BadInput
from mprun.record.metric_facts import Metric

from ..helpers import raises_line
from .made_runs import made_arm, made_run, together

LOSS = {"metric": "loss", "higher_is_better": False, "relative": True, "margin_setting": 0.01}
TOP1 = {"metric": "top1", "higher_is_better": True, "unit": "points", "relative": False}
TOP1 |= {"margin_setting": 0.5}
# Seeds differ by ten times the jitter, so that a test which did not pair would see nothing.
FP32 = {0: 1.97, 1: 1.99, 2: 2.02, 3: 1.98, 4: 2.04}  # mean 2: the margin of 1 % is 0.02
JITTER = {0: 0.004, 1: -0.004, 2: 0.002, 3: -0.002, 4: 0.0}  # s = sqrt(4e-5 / 4) = 0.00316


def shifted(by: float, of: dict[int, float] = FP32) -> Arm:
    return made_arm({seed: value + by + JITTER[seed] for seed, value in of.items()}, mode="amp")


def verdict_of(own: Arm, base: Arm, question=LOSS, **more):
    return judge(own, base, Question(**question, **more))[0]


# h = t(0.95, 4) * 0.00316 / sqrt(5) = 2.132 * 0.001414 = 0.003015, margin 0.02. A hundredth of
# the seeds' own scatter, uncorrelated with the jitter, changes no end by 0.00005.
@pytest.mark.parametrize(
    ("shift", "name"),
    [
        (0.0, "matches"),
        (0.0169, "matches"),  # high 0.0199
        (0.0171, "likely worse"),  # high 0.0201
        (0.0229, "likely worse"),  # low 0.0199
        (0.0231, "worse"),  # low 0.0201
        (-0.0169, "matches"),
        (-0.0171, "likely better"),
        (-0.0231, "better"),
        (5.0, "worse"),
    ],
)
@pytest.mark.few(5)
def test_shifted_curves(shift, name):
    verdict = verdict_of(shifted(shift), made_arm(FP32))
    assert (verdict.name, verdict.method) == (name, "paired")
    assert verdict.margin == pytest.approx(0.02, rel=1e-12)
    assert verdict.difference == pytest.approx(shift, abs=1e-12)
    assert shift == 5 or verdict.high - verdict.low == pytest.approx(2 * 0.003015, abs=1e-4)
    assert verdict.seeds == verdict.baseline_seeds == [0, 1, 2, 3, 4]
    assert verdict.sentence.startswith(name)
    named = verdict_of(shifted(shift), made_arm(FP32, mode="bf16_master"))
    assert named.name == name and "FP32" not in named.sentence


def test_a_claim_that_a_permutation_test_does_not_confirm_says_so():
    # Over the margin of 0.02 by 0, 0, 0, 0, 0.06, 0.06, 0.06: p = 1/8 of 1/128 that there could be.
    base = dict.fromkeys(range(7), 2.0)
    own = {seed: 2.02 + 0.06 * (seed > 3) for seed in base}
    verdict = verdict_of(made_arm(own, mode="amp"), made_arm(base))
    assert verdict.name == "worse"
    assert "p = 12 % for what is claimed at 5 %; run more seeds." in verdict.sentence
    even = {seed: 2.05 + JITTER[seed % 5] for seed in base}
    assert "Not confirmed" not in verdict_of(made_arm(even, mode="amp"), made_arm(base)).sentence


@pytest.mark.parametrize("question", [LOSS, TOP1])
def test_a_mode_of_which_no_run_ended(question):
    base = made_arm({0: 50.0, 1: 51.0, 2: 50.5}, metric=question["metric"])
    verdict = verdict_of(Arm("amp", "amp", []), base, question)
    assert verdict.sentence.startswith("inconclusive: needs at least 3 seeds (has 0). Left out")
    assert verdict.needed == 3 and verdict.margin is verdict.difference is None


def test_noisy_curves():
    own = made_arm({0: 2.27, 1: 1.79, 2: 2.12, 3: 1.68, 4: 2.14}, mode="amp")
    verdict = verdict_of(own, made_arm(FP32))
    # Differences of a tenth, a margin of a hundredth.
    assert (verdict.name, verdict.needed) == ("inconclusive", None)
    assert "not reachable" in verdict.sentence
    # Variance (0.09 + 0.04 + 0.01 + 0.09 + 0.01) / 4 = 0.06; margin 0.2 of 2. t s / sqrt(m):
    # 6 seeds 2.015 * 0.1 = 0.2015, 7 seeds 1.943 * 0.0926 = 0.18.
    verdict = verdict_of(own, made_arm(FP32), LOSS | {"margin_setting": 0.1})
    assert (verdict.name, verdict.needed) == ("inconclusive", 2)
    assert verdict.sentence.startswith("inconclusive: needs about 2 more seeds; difference")


def test_arms_of_other_lengths_are_refused_by_name():
    own, base = shifted(0.0), made_arm(FP32)
    own.runs[3] = made_run(3, 2.5, mode="amp", steps=[50])
    with raises_line(BadInput, "runs/amp/s3: was last evaluated at step 50, but runs/fp32/s0 at"):
        verdict_of(own, base)
    with raises_line(BadInput, "at step 2000000, but ", " at step 100. Runs of different length"):
        verdict_of(made_arm(FP32, mode="amp", steps=[2_000_000]), base)


def test_evaluations_at_other_steps_within_the_window_are_refused():
    own, base = made_arm(FP32, mode="amp"), made_arm(FP32)
    for arm, first in ((own, 100), (base, 200)):
        arm.runs = [made_run(seed, 9.0, 2.0, steps=[first, 300]) for seed in FP32]
    assert verdict_of(own, base).name == "matches"  # of the last evaluation alone
    with raises_line(BadInput, "at step 100, 300, ", " at step 200, 300"):
        assess(together(base, own, window=2))


def test_nan_is_a_divergence():
    own = shifted(0.0)
    own.runs[2].evals["loss"][-1] = math.nan
    verdict, found = judge(own, made_arm(FP32), Question(**LOSS))
    assert verdict.name == "diverged"
    assert verdict.sentence == (
        "diverged in 1 of 5 runs (first at step 100: non-finite loss in an evaluation). "
        "FP32 diverged in 0 of 5."
    )
    assert math.isnan(found[2].value) and found[1].value == pytest.approx(1.986)
    assert (found[2].diverged, found[2].step) == ("non-finite loss in an evaluation", 100)


def test_diverged_runs_need_no_evaluation_and_no_length():
    own, dead = shifted(0.0), {"status": "diverged", "cause": "non-finite loss"}
    for seed, step in ((1, 70), (4, 30)):
        own.runs[seed] = made_run(seed, mode="amp", last_step=step, **dead)
    verdict = verdict_of(own, made_arm(FP32))
    assert verdict.sentence == (
        "diverged in 2 of 5 runs (first at step 30: non-finite loss). FP32 diverged in 0 of 5."
    )
    assert verdict.difference is None and verdict.seeds == [0, 1, 2, 3, 4]
    # One of one is enough, and one of a GAN.
    alone = made_arm({0: 2.0}, mode="fp16_naive", nonfinite_step=3)
    for gan in (False, True):
        assert verdict_of(alone, made_arm(FP32), gan=gan).name == "diverged"
    # Of runs without an evaluation nobody knows that the metric is none of theirs.
    arms = [made_arm({0: 2.0}, mode, evals={}, **dead) for mode in ("fp32", "amp")]
    assert assess(together(*arms)).rows[0].verdict.name == "invalid baseline"


def test_a_baseline_that_diverged_is_none():
    base = made_arm(FP32)
    base.runs[0].nonfinite_step = 17
    verdict = verdict_of(shifted(0.0), base)
    assert verdict.name == "invalid baseline"
    assert verdict.sentence == (
        "FP32 itself diverged in 1 of 5 runs (first at step 17: non-finite loss); fix the recipe "
        "first. This mode diverged in 0 of 5 runs."
    )


def test_learning_nothing_is_a_divergence_whatever_the_metric():
    base = made_arm(FP32, train=[2.0] * 20 + [1.0] * 80)
    stuck = made_arm(FP32, mode="fp16_naive", train=[2.0] * 100)
    assert verdict_of(stuck, base).name == "diverged"
    assert verdict_of(stuck, base, gan=True).name == "not assessed"


def test_a_missing_seed_leaves_its_partner_out():
    own = shifted(0.0)
    del own.runs[:3]
    verdict, found = judge(own, made_arm(FP32), Question(**LOSS))
    assert [outcome.seed for outcome in found] == [3, 4]
    assert (verdict.name, verdict.needed) == ("inconclusive", 1)
    # Differences -0.002 and 0 of a baseline whose seeds 3 and 4 have mean 2.01.
    assert verdict.sentence == (
        "inconclusive: needs at least 3 seeds (has 2). Difference so far: -0.05 %. "
        "Left out, having no partner: seeds 0, 1, 2 of FP32."
    )


def test_without_any_run():
    verdict = verdict_of(Arm("amp", "amp", []), made_arm(FP32))
    assert (verdict.name, verdict.needed, verdict.difference) == ("inconclusive", 3, None)
    assert verdict_of(shifted(0.0), Arm("fp32", "fp32", [])).name == "inconclusive"


@pytest.mark.parametrize(
    ("own", "base", "expected"),
    [
        ([0, 1, 2], [0, 1, 2], ("paired", [0, 1, 2], [0, 1, 2])),
        ([2, 1, 0, 7], [0, 1, 2, 9], ("paired", [0, 1, 2], [0, 1, 2])),
        ([0, 1], [2, 1, 0], ("paired", [0, 1], [0, 1])),  # contained
        ([0, 1, 2], [1], ("paired", [1], [1])),
        ([0, 1, 2], [1, 2, 3], ("Welch", [0, 1, 2], [1, 2, 3])),  # two shared, neither contained
        ([7, 5, 6], [0, 1, 2, 3], ("Welch", [5, 6, 7], [0, 1, 2, 3])),
        ([], [0, 1], ("paired", [], [])),
    ],
)
def test_pairing(own, base, expected):
    assert pairing(own, base) == expected


def test_extra_seeds_are_left_out_and_named():
    base = made_arm(FP32 | {5: 2.0, 6: 2.0})
    own = shifted(0.0)
    own.runs.append(made_run(9, 77.0, mode="amp"))
    verdict = verdict_of(own, base)
    assert verdict.name == "matches" and verdict.margin == pytest.approx(0.02)  # of the seeds used
    assert verdict.left_out == ["having no partner: seed 9 of this mode; seeds 5, 6 of FP32"]
    # Means 87 / 6 = 14.5 and 14 / 7 = 2 of all: unpaired they are 625 % of 2 apart.
    assert (
        " Left out, having no partner: seed 9 of this mode; seeds 5, 6 of FP32. Over all, "
        "unpaired: inconclusive, difference +625.00 % (" in verdict.sentence
    )


def test_other_seeds_are_tested_by_welch():
    base = made_arm({0: 2.00, 1: 2.01, 2: 1.99})  # variance 1e-4
    own = made_arm({5: 2.00, 6: 2.01, 7: 1.99}, mode="fp32")
    verdict = verdict_of(own, base)
    # Welch with 4 degrees: h = 2.13185 * sqrt(2e-4 / 3) = 0.017406, margin 0.02. At the upper end,
    # 0.87 % above, the baseline's variance counts 1.0087^2 times: sqrt((1 + 1.0175) / 2) h.
    assert (verdict.name, verdict.method) == ("matches", "Welch")
    assert verdict.high == pytest.approx(0.017483, abs=1e-6)
    assert verdict.sentence.endswith("3 and 3 seeds.")
    assert (verdict.seeds, verdict.baseline_seeds) == ([5, 6, 7], [0, 1, 2])


def test_accuracy_is_turned_and_in_points():
    base = made_arm({0: 90.0, 1: 91.0, 2: 92.0}, metric="top1")
    # Differences turned: 0.7, 0.6, 0.8; s = 0.1, h = 2.92 * 0.1 / sqrt(3) = 0.1686: low 0.531.
    own = made_arm({0: 89.3, 1: 90.4, 2: 91.2}, mode="amp", metric="top1")
    verdict, found = judge(own, base, Question(**TOP1))
    assert (verdict.name, verdict.margin) == ("worse", 0.5)
    assert verdict.difference == pytest.approx(0.7)
    assert [outcome.value for outcome in found] == [89.3, 90.4, 91.2]  # as recorded
    assert verdict.sentence == (
        "worse than FP32 by at least 0.53 points: difference +0.70 points (90 % CI +0.53 to +0.87 "
        "points; positive is worse), outside the margin of ±0.50 points, 3 seeds, paired."
    )


def top1(samples: int, margin=0.5):
    arms = [made_arm(dict.fromkeys(range(3), 90.0), mode, metric="top1") for mode in ("a", "b")]
    return together(*arms, metric="top1", margin=margin, **{"data.eval_samples": samples})


def test_a_split_whose_samples_are_coarser_than_half_the_margin_is_told():
    # 100 / 400 is half the margin of 0.5 points, 100 / 399 is more.
    assert assess(top1(400)).notes == []
    [note] = assess(top1(399)).notes
    assert note.startswith("one evaluated sample is 0.25 points, too coarse for a margin of 0.5")
    # Of a fraction a sample is 1 / n.
    fraction = Metric("top1", unit="fraction", higher_is_better=True, counts_samples=True)
    for samples, notes in ((400, 0), (399, 1)):
        proto = top1(samples, margin=0.005)
        for run in proto.every_run:
            run.metrics = {"top1": fraction}
            run.evals["top1"] = run.evals["top1"] / 100
        assert [note.partition(",")[0] for note in assess(proto).notes] == [
            "one evaluated sample is 0.0025"
        ] * notes


def test_runs_that_contradict_each_other_on_a_metric_are_refused():
    proto = top1(None)
    for run, higher in zip(proto.every_run, (True, True, False, True, True, True), strict=True):
        run.metrics = {"top1": Metric("top1", unit="points", higher_is_better=higher)}
    with raises_line(BadInput, "compare.metric=top1: runs contradict each other: more is better"):
        assess(proto)


@pytest.mark.parametrize(
    ("options", "as_recorded"),
    [
        ({}, True),
        ({"metric": "loss", "margin": 0.02}, True),
        ({"margin": 0.01}, False),
        ({"metric": "other", "margin": 0.02}, False),
        ({"absolute": True}, False),
    ],
)
def test_a_stated_scatter_counts_for_the_recorded_metric_and_margin_alone(options, as_recorded):
    proto = together(*(made_arm({0: 2.0}, mode) for mode in ("fp32", "amp")), margin=0.02)
    for run in proto.every_run:
        run.keys = {"compare.pair_sd": 0.001, "compare.pair_sd_source": "12 seeds"}
        run.evals["other"] = run.evals["loss"]
        run.metrics["other"] = Metric("other", unit="relative", higher_is_better=False)
    [row] = assess(proto, **options).rows
    assert (row.verdict.facts["test"] is not None) == as_recorded
    assert (row.verdict.facts["no_test"] is None) == as_recorded


@pytest.mark.parametrize(("margin", "allowed"), [(0.5, False), (math.nextafter(0.5, 0), True)])
def test_a_relative_margin_is_below_a_half(margin, allowed):
    """At a half the baseline and zero are as close to what is judged."""
    base, own = made_arm(FP32, train=[3.0, 2.0]), made_arm(FP32, "amp", train=[3.0, 2.5])
    proto = together(base, own, margin=margin)
    if allowed:
        group = assess(proto)
        assert group.rows[0].verdict.name == "matches" and group.keys == proto.keys
        assert group.rows[0].first_steps == 0.125  # between 0 and a quarter
        return
    with pytest.raises(BadInput, match="margin 0.5: is relative .* must be below 0.5"):
        assess(proto)


def test_an_absolute_margin_is_below_half_of_the_mean():
    question = {**LOSS, "relative": False}  # the mean is 2
    assert verdict_of(shifted(0), made_arm(FP32), question | {"margin_setting": 0.999}).name
    with pytest.raises(BadInput, match="must be below 1, half of the mean loss"):
        verdict_of(shifted(0), made_arm(FP32), question | {"margin_setting": 1.0})


def test_perplexity_is_judged_as_its_logarithm():
    losses = {0: 4.0, 1: 4.1, 2: 3.9}  # nats; mean 4, margin 0.04
    base, own = (
        made_arm({s: math.exp(v + by) for s, v in losses.items()}, metric="perplexity")
        for by in (0, 0.05)
    )
    verdict = verdict_of(own, base, LOSS | {"metric": "perplexity", "unit": "perplexity"})
    assert verdict.name == "worse" and "difference +1.25 %" in verdict.sentence  # 0.05 of 4
    assert (verdict.difference, verdict.margin) == pytest.approx((0.05, 0.04), abs=1e-12)


def test_a_relative_margin_around_zero_and_below_it():
    base = made_arm({0: 1.0, 1: -1.0, 2: 0.0})
    with raises_line(BadInput, "compare.margin=0.01: cannot be a share of the mean loss of FP32"):
        verdict_of(made_arm({0: 1.0, 1: -1.0, 2: 0.0}, mode="amp"), base)
    # Of two seeds the mean alone tells.
    with raises_line(BadInput, "cannot be a share of the mean loss of FP32, 0, which 2 seeds"):
        verdict_of(made_arm({0: 1.0, 1: -1.0}, mode="amp"), made_arm({0: 1.0, 1: -1.0}))
    assert verdict_of(made_arm({0: 1.0, 1: 1.0}, "amp"), made_arm({0: 1.0, 1: 1.0})).margin == 0.01
    absolute, zero = {**LOSS, "relative": False}, {0: 0.0, 1: 0.0}
    assert verdict_of(made_arm(zero, "amp"), made_arm(zero), absolute).margin == 0.01
    # 2.7 standard errors above 0; for three seeds t(0.95, 2) = 2.92 of them are needed.
    base = made_arm({0: 1.0, 1: 3.0, 2: 1.2})
    with raises_line(BadInput, "1.73, which 3 seeds cannot distinguish from 0. Pass --margin X"):
        verdict_of(made_arm({0: 1.0, 1: 3.0, 2: 1.2}, mode="amp"), base)
    # One run far from the others does not make the mean 0, but a ratio has no bounds then.
    alike = {0: 1.0, 1: 3.0, 2: 1.001}
    assert verdict_of(made_arm(alike, mode="amp"), made_arm(alike)).name == "matches"
    far = verdict_of(shifted(0.0), made_arm(FP32 | {4: 40.0}))
    assert far.name == "inconclusive" and "90 % CI without bounds" in far.sentence
    assert "One stands out" in far.sentence and far.least_margin is None
    base = made_arm({0: -2.0, 1: -2.0, 2: -2.0})
    verdict = verdict_of(made_arm({0: -1.0, 1: -1.1, 2: -0.9}, mode="amp"), base)
    assert (verdict.name, verdict.margin) == ("worse", 0.02)
    assert "difference +50.00 %" in verdict.sentence


@pytest.mark.parametrize("metric", ["loss", "d_loss", "g_loss", "sliced_wasserstein"])
def test_gan_losses_are_not_assessed_and_metrics_of_its_samples_are(metric):
    question, arm = LOSS | {"metric": metric}, made_arm(FP32, metric=metric)
    verdict = verdict_of(arm, arm, question, gan=True)
    assessed = metric == "sliced_wasserstein"
    assert verdict.name == ("matches" if assessed else "not assessed")
    assert assessed or f"the {metric} of a GAN" in verdict.sentence
    assert verdict_of(arm, arm, question, gan=False).name == "matches"

"""Verdicts at planned looks: which look decides, and what waits."""

from dataclasses import replace

import pytest

from mprun.comparison.findings import Arm, Question, Verdict
from mprun.comparison.looks import nominal_alpha
from mprun.comparison.verdict import judge
from mprun.errors import BadInput

from .made_runs import made_arm

JITTER = (0.004, -0.004, 0.002, -0.002, 0.0)


def verdict_of(own: Arm, base: Arm, looks=()) -> Verdict:
    """With a margin of 1 % of the baseline's mean, which is 2: 0.02."""
    return judge(own, base, Question(metric="loss", margin_setting=0.01, looks=looks))[0]


TEN = {seed: 2.0 for seed in range(10)}


def differing(*differences: float) -> Arm:
    """An arm whose seeds 0, 1, ... differ from a baseline of 2 by these."""
    return made_arm({s: 2.0 + d for s, d in enumerate(differences)}, mode="amp")


PLAN = (3, 5, 10)
WIDE = (0.03, -0.03, 0.0)
WAITING = (*WIDE, 9.0)
LATER = (*WIDE, 0.001, -0.001, *[0.0] * 5)
# Seeds 0 to 2 hardly differ; the later ones would say worse.
EARLY = (0.001, -0.001, 0.0, *[0.5] * 7)
ABOVE = (0.015, 0.02, 0.025)
LAST = [0.05, -0.05] * 5


@pytest.mark.parametrize(
    ("differences", "looks", "found", "said"),
    [
        (JITTER, (8, 10), ("inconclusive", None, 3), ["needs at least 8 seeds (has 5)."]),
        (EARLY, PLAN, ("matches", 3, None), ["plan 3, 5, 10; it stands, 7 seeds not used."]),
        (WAITING, PLAN, ("inconclusive", 3, 1), ["wait for the look at 5 seeds; diff"]),
        (WAITING, PLAN, ("inconclusive", 3, 1), ["next needs 1 seed more, 1 seed waiting for it."]),
        (WIDE, PLAN, ("inconclusive", 3, 2), ["; the next needs 2 seeds more. Left out"]),
        # Variance 2 * (0.03^2 + 0.001^2) / 9 = 2.0e-4; half width near 2.4 * 0.0045 = 0.011 < 0.02.
        (LATER, (3, 10), ("matches", 10, None), [" Look at 10 seeds of the plan 3, 10."]),
        # At 3 seeds: mean 0.02, s = 0.005, h = t * 0.005 / sqrt(3) with t near 4.6 (2 degrees,
        # 2.3 %): 0.013, so the interval is (0.007, 0.033), which is not conclusive.
        (ABOVE, (3, 10), ("likely worse", 3, 7), ["likely worse"]),
        # At 10 seeds: mean 0.034, s = 0.0102, h = t * 0.0102 / sqrt(10), t near 2.3: low 0.026.
        ((*ABOVE, *[0.04] * 7), (3, 10), ("worse", 10, None), ["worse"]),
        (LAST, (3, 5), ("inconclusive", 5, None), ["this was the last look; ", "beyond it not us"]),
    ],
)
def test_which_look_decides_and_what_waits(differences, looks, found, said):
    verdict = verdict_of(differing(*differences), made_arm(TEN), looks=looks)
    assert (verdict.name, verdict.look, verdict.needed) == found
    assert all(part in verdict.sentence for part in said)
    if verdict.look is not None:
        assert verdict.seeds == list(range(verdict.look))
        assert verdict.level == pytest.approx(1 - 2 * nominal_alpha(looks))


def test_looks_at_other_seeds_take_the_first_of_both_arms():
    base = made_arm({seed: 2.0 + JITTER[seed % 5] for seed in range(10)})
    own = made_arm({20 + seed: 2.0 + JITTER[seed] for seed in range(4)}, mode="amp")
    verdict = verdict_of(own, base, looks=[3, 5, 10])
    assert (verdict.method, verdict.look) == ("Welch", 3)
    assert (verdict.seeds, verdict.baseline_seeds) == ([20, 21, 22], [0, 1, 2])


def test_logs_without_seeds_have_no_order_in_which_looks_could_take_them():
    own, base = differing(*JITTER), made_arm(dict.fromkeys(range(5), 2.0))
    question = Question(metric="loss", looks=[3, 5], by_seed=False)
    verdict, _ = judge(own, base, question)
    assert (verdict.look, verdict.method, verdict.seeds) == (5, "Welch", [0, 1, 2, 3, 4])
    own.runs.pop()
    # As many as a look in one arm, or as many as no look in both, say nothing either.
    for first, last, others in ((3, 5, 5), (3, 4, 5), (3, 5, 4)):
        del base.runs[others:]
        said = f"--looks {first},{last}: 4 and {others} runs record no seeds, so mprun cannot"
        with pytest.raises(BadInput, match=said):
            judge(own, base, replace(question, looks=[first, last]))

"""Verdicts of sweeps until decided: the plan in the records, its looks, the rounds of seeds."""

from dataclasses import replace

import numpy as np
import pytest

import mprun
from mprun.comparison import decision, planned
from mprun.comparison.equivalence import paired_interval
from mprun.comparison.findings import Arm, Question, Verdict
from mprun.comparison.looks import NEVER, spent_alphas
from mprun.comparison.rounds import Rounds, SweptArm, _state
from mprun.comparison.verdict import judge
from mprun.errors import BadInput
from mprun.record.seed_plan import FEWEST, MOST, MOST_BY_DEFAULT, SEED_WORDS, SeedPlan

from ..helpers import refused
from .made_runs import made_arm
from .run_folders import compared, write_run
from .test_error_rates import above

PLAN = [0, 3, 10]
QUESTION = Question(metric="loss", margin_setting=0.02, relative=False)
# Differences that 3 seeds show to be inside 0.02: the half width is 5.8 * 0.001 / sqrt(3) = 0.003.
CLOSE = (0.001, -0.001, 0.0)
WIDE = (0.03, -0.03, 0.0)
BASE = (2.0, 2.3, 1.8, 2.2, 1.9, 2.4, 2.1, 2.05, 1.95, 2.15)


def arm(differences, mode="amp", plan=PLAN, first=0) -> Arm:
    """A mode that ends so far from the baseline of the same seeds."""
    finals = {first + s: BASE[first + s] + d for s, d in enumerate(differences)}
    return made_arm(finals, mode=mode, keys={"compare.plan": plan} if plan else {})


def baseline(seeds=10, plan=PLAN) -> Arm:
    return arm([0.0] * seeds, "fp32", plan)


def verdict_of(own: Arm, base: Arm) -> Verdict:
    return judge(own, base, QUESTION)[0]


def test_each_look_has_its_own_level_and_the_first_conclusive_one_decides():
    alphas = spent_alphas(3, 10)
    found = verdict_of(arm(CLOSE), baseline(3))
    assert (found.name, found.look, found.most) == ("matches", 3, 10)
    assert found.level == 1 - 2 * alphas[0]
    open_ = verdict_of(arm(WIDE), baseline(3))
    assert (open_.name, open_.look, open_.level) == ("inconclusive", 3, 1 - 2 * alphas[0])
    # By hand: at 5 % these seven are inside, at the level of the look at 7 not.
    seven = [0.0155, 0.01, 0.0, 0.0, -0.01, 0.004, 0.02]
    at = [paired_interval(seven, [0.0] * 7, alpha) for alpha in (0.05, alphas[4])]
    least, most = (interval.high for interval in at)
    question = replace(QUESTION, margin_setting=(least + most) / 2)
    for plan, name in ((None, "matches"), (PLAN, "inconclusive")):
        verdict, _ = judge(arm(seven, plan=plan), baseline(7, plan), question)
        assert verdict.name == name
    assert verdict.high == pytest.approx(most)


def test_a_word_stays_though_the_baseline_gets_more_seeds_and_one_of_them_diverges():
    own, base = arm(CLOSE), baseline(10)
    base.runs[7].status, base.runs[7].cause = "diverged", "loss is nan"
    found = verdict_of(own, base)
    assert (found.name, found.look, found.left_out) == ("matches", 3, [])
    assert found.baseline_seeds == [0, 1, 2]
    assert "Decided after 3 of at most 10 seeds (planned looks, 5 % over all)." in found.sentence
    # For a mode that had this seed the baseline is invalid.
    other = verdict_of(arm([0.5] * 8), base)
    assert (other.name, other.most) == ("invalid baseline", 10)
    # Seeds beyond the look that decided change nothing.
    later = verdict_of(arm((*CLOSE, 1.0, 1.0)), baseline(10))
    assert (later.name, later.look, later.high) == ("matches", 3, found.high)


def test_runs_outside_of_the_plan_are_left_out():
    own = arm(CLOSE)
    own.runs += arm([1.0] * 3, plan=None, first=3).runs
    found = verdict_of(own, baseline(6))
    assert (found.name, found.seeds) == ("matches", [0, 1, 2])
    assert found.left_out == ["seeds 3-5 of amp, recorded outside of its plan"]
    own.runs = own.runs[:4]
    assert verdict_of(own, baseline(6)).left_out == ["seed 3 of amp, recorded outside of its plan"]
    # A baseline without the plan serves: its values tell nothing of the mode.
    assert verdict_of(arm(CLOSE), baseline(10, plan=None)).left_out == []


def test_two_plans_of_a_mode_and_other_looks_are_refused():
    own = arm(CLOSE)
    own.runs += arm([0.0], plan=[0, 3, 20], first=3).runs
    with pytest.raises(BadInput, match=r"amp: the runs have two plans, seeds 0 to 9 \(looks fr"):
        verdict_of(own, baseline())
    refusal = "--looks 3,5: the records of amp contain a plan for verdicts at 3"
    with pytest.raises(BadInput, match=refusal):
        judge(arm(CLOSE), baseline(), replace(QUESTION, looks=[3, 5]))


def test_hopeless_is_said_from_five_seeds_on_and_binds_nobody():
    # s = 0.0255, t(.95, 4) = 2.13: (2.13 * .0255 / .02)^2 = 7.4 seeds, below 3 * 10.
    assert verdict_of(arm([0.03, -0.03, 0.02, -0.02, 0.0]), baseline()).hopeless is None
    noisy = [0.3, -0.3, 0.2, -0.2, 0.0]  # ten times as wide: 739
    assert verdict_of(arm(noisy[:4]), baseline()).hopeless is None
    found = verdict_of(arm(noisy), baseline())
    assert found.hopeless == pytest.approx(739, abs=1)
    for said in ("needs about 739 seeds", "Stopped after 5 of at most 10"):
        assert said in found.sentence
    # Who goes on has all looks: with s = 0.28 the ten differ by 0.6.
    further = verdict_of(arm([d + 0.6 for d in noisy] + [0.6] * 5), baseline())
    assert further.name == "worse"


def test_the_seeds_that_are_still_needed_count_at_their_own_alphas():
    interval = paired_interval([0.0, 0.01, -0.01], [0.0] * 3, spent_alphas(3, 10)[0])
    # s = 0.01; t(1 - .0069, 3) = 5.2: 0.026 at 4 seeds; t(1 - .0084, 4) = 3.95: 0.0177 at 5.
    assert planned.more_needed(interval, 0.02, 3, 10) == 2
    assert planned.more_needed(interval, 0.03, 3, 10) == 1
    assert planned.more_needed(interval, 0.001, 3, 10) is None
    # s = 0.0267: t(1 - .0234, 9) s / sqrt(10) = 0.0194; one look before t(1 - .0197, 8) s / 3 =
    # 0.0219.
    assert verdict_of(arm([0.0267, -0.0267, 0.0]), baseline()).needed == 7


def false_matches(draws: int, plan=PLAN) -> float:
    """Return how often modes that differ by exactly the margin match, judged as shipped."""
    generator, found = np.random.default_rng(1), 0
    for sd in (0.004, 0.012):
        for differences in 0.02 + sd * generator.standard_normal((draws // 2, 10)):
            found += verdict_of(arm(differences, plan=plan), baseline()).name == "matches"
    return found / draws


@pytest.mark.slow
def test_a_difference_of_the_margin_rarely_matches_at_any_look(monkeypatch):
    assert false_matches(400) < above(0.05, 400)
    monkeypatch.setattr(decision, "spent_alphas", lambda first, most: [0.05] * (most + 1 - first))
    assert false_matches(400) > above(0.05, 400)  # 14 to 15 % where each look has 5 %


@pytest.mark.slow
def test_the_rate_at_more_draws():
    draws = 8000
    assert false_matches(draws) < above(0.05, draws)
    assert false_matches(draws, [0, 3, 5]) < above(0.05, draws)


def in_rounds(folder, modes, plan=(0, 3, 10), lost=(), diverged=()):
    """Train by numbers: mode -> difference by seed; return the rounds' seeds, and the lines."""
    rounds = Rounds([SweptArm(mode, SeedPlan(*plan)) for mode in modes])
    names, asked, ended, failed = [*modes], {mode: [] for mode in modes}, {}, set()
    while cells := rounds.following():
        for place, seed in cells:
            mode = names[place]
            asked[mode].append(seed)
            if (mode, seed) in lost:
                failed.add((place, seed))
                continue
            final = BASE[seed] + modes[mode][seed]
            status = "diverged" if (mode, seed) in diverged else "done"
            more = {"status": status, "overrides": {"compare.plan": [*plan]}}
            path = folder / f"{mode}-s{seed}"
            ended[place, seed] = write_run(path, mode, seed, final=final, **more)
        rounds.judge(ended, failed)
    return asked, rounds.lines()


EVERY = [0.001, -0.001, 0.0, 0.0005, -0.0005] * 2
SLOWER = [0.01, -0.01, 0.005, -0.006, 0.008, -0.005, 0.0, 0.002, -0.002, 0.0]


def test_only_open_modes_and_their_baseline_get_another_seed(tmp_path, capsys):
    modes = {"fp32": [0.0] * 10, "amp": EVERY, "amp_bf16": SLOWER}
    asked, lines = in_rounds(tmp_path, modes)
    assert asked["amp"] == [0, 1, 2]
    # By hand: at 6 seeds s = 0.0084, t(1 - .0105, 5) = 3.3, half the width 0.011; 1 % is 0.021.
    assert asked["fp32"] == asked["amp_bf16"] == [0, 1, 2, 3, 4, 5]
    words = "of at most 10 seeds (planned looks, 5 % over all)"
    assert lines == [f"amp: matches after 3 {words}", f"amp_bf16: matches after 6 {words}"]
    # `compare` finds the same in the records.
    found = compared(capsys, tmp_path)["groups"][0]["modes"]
    verdicts = {one["label"]: one["verdict"] for one in found}
    assert [(v["name"], v["look"]) for v in verdicts.values()] == [("matches", 3), ("matches", 6)]
    assert "Seeds added until decided, at most 10" in str(mprun.compare(tmp_path))


def test_what_is_undecided_hopeless_diverged_or_lost_is_said(tmp_path):
    noisy = [d * 1.4 for d in (0.03, -0.03, 0.02, -0.02, 0.0, 0.03, -0.03, 0.02, -0.02, 0.0)]
    asked, lines = in_rounds(tmp_path / "1", {"fp32": [0.0] * 10, "amp": noisy}, (0, 3, 5))
    assert asked["amp"] == [0, 1, 2, 3, 4] and lines == ["amp: undecided after 5"]
    wide = {"fp32": [0.0] * 10, "amp": [10 * d for d in noisy]}
    asked, [line] = in_rounds(tmp_path / "2", wide)
    assert asked["amp"] == [0, 1, 2, 3, 4] and line.startswith("amp: stopped after 5: needs about ")
    asked, [line] = in_rounds(tmp_path / "3", wide, diverged=[("amp", 1)])
    assert asked["fp32"] == [0, 1, 2] and line.startswith("amp: diverged in 1 of 3 runs")
    never = Verdict("inconclusive", "", look=5, hopeless=NEVER)
    assert _state(never, SeedPlan(0, 3, 10), True)[1].endswith("needs over 1,000,000 seeds")
    asked, [line] = in_rounds(tmp_path / "4", wide, diverged=[("fp32", 1)])
    assert asked["amp"] == [0, 1, 2] and line.startswith("amp: invalid baseline: FP32 itself div")
    slower = {"fp32": [0.0] * 10, "amp": SLOWER}
    asked, [line] = in_rounds(tmp_path / "5", slower, lost=[("amp", 1)])
    assert asked["amp"] == [*range(len(asked["amp"]))] and "; no outcome of seed 1" in line
    assert line.startswith(f"amp: matches after {len(asked['amp']) - 1} of at most 10 seeds")
    gone = [("amp", seed) for seed in range(10)]
    asked, lines = in_rounds(tmp_path / "6", wide, lost=gone)
    assert asked["fp32"] == [0, 1, 2]
    assert lines[1:] == ["amp: no run has an outcome; no outcome of seeds 0-2"]
    asked, lines = in_rounds(tmp_path / "7", wide, lost=[("fp32", s) for s in range(10)])
    assert asked["amp"] == [0, 1, 2] and "no FP32 runs" in lines[1]


def test_an_equal_configuration_that_a_sweep_has_twice_is_judged_once_and_says_so(tmp_path):
    rounds = Rounds([SweptArm(name, SeedPlan(0, 3, 5)) for name in ("fp32", "amp", "amp again")])
    ended = {}
    for place, seed in rounds.following():
        mode, final = ("fp32", "amp", "amp")[place], BASE[seed] + CLOSE[seed] * (place > 0)
        keys = {"compare.plan": [0, 3, 5], "train.log_every": 1 + place}  # changes no number
        folder = tmp_path / f"{place}-s{seed}"
        ended[place, seed] = write_run(folder, mode, seed, final=final, overrides=keys)
    rounds.judge(ended)
    first, again = rounds.lines()
    assert first.startswith("amp: matches after 3 of at most 5 seeds")
    assert again == "amp again: its runs repeat those of an equal configuration"
    assert rounds.news == [first, again]


def test_a_baseline_that_loses_its_runs_ends_the_rounds(tmp_path):
    modes = {"fp32": [0.0] * 10, "amp": [10 * d for d in WIDE] + [0.0] * 7}
    lost = [("fp32", 1), ("fp32", 3), ("fp32", 4)]
    asked, [line] = in_rounds(tmp_path, modes, lost=lost)
    assert asked["amp"] == [0, 1, 2, 3, 4]
    assert line == "amp: not decided, no outcome of seeds 1, 3-4 of fp32"


def test_the_next_round_has_open_modes_and_their_own_baselines():
    """Two configurations: of the second all modes are decided, of the first one is open."""
    names = ("fp32", "amp", "bf16", "fp32 lr", "amp lr", "no runs")
    arms = [SweptArm(name, SeedPlan(4, 3, 6), open=False) for name in names]
    rounds = Rounds(arms)
    assert rounds.following() == [(place, seed) for seed in (4, 5, 6) for place in range(6)]
    for place, baseline in ((0, 0), (1, 0), (2, 0), (3, 3), (4, 3)):
        arms[place].baseline = arms[baseline]
    assert rounds.following() == []
    arms[0].open = arms[3].open = True  # a baseline goes on for others alone
    assert rounds.following() == []
    arms[1].open = True
    assert rounds.following() == [(0, 9), (1, 9)]  # the fourth round's seed
    assert rounds.following() == []  # the plan has no more seeds


def test_a_comparison_in_the_middle_says_what_is_open(tmp_path, capsys):
    for mode in ("fp32", "amp"):
        for seed in range(4):
            final = BASE[seed] + (WIDE[seed % 3] if mode == "amp" else 0)
            status = "running" if (mode, seed) == ("amp", 3) else "done"
            given = {"final": final, "status": status, "overrides": {"compare.plan": PLAN}}
            write_run(tmp_path / f"{mode}-s{seed}", mode, seed, **given)
    found = compared(capsys, tmp_path)["groups"][0]["modes"][0]["verdict"]
    assert (found["look"], found["most"], found["name"]) == (3, 10, "inconclusive")
    assert "Open: look at 3 of at most 10 seeds (planned looks, 5 % over all)." in found["sentence"]
    line = "--looks 3,5: the records of amp contain a plan for verdicts at 3"
    refused(capsys, "compare", tmp_path, "--looks", "3,5", says=line)


@pytest.mark.parametrize("given", [[0, 3], [0, 2, 10], [0, 5, 4], [-1, 3, 10], [0, 3, 51], "x"])
def test_a_plan_that_is_none_is_refused(given):
    with pytest.raises(ValueError, match=r"compare.plan=.*: must be \[first seed, seeds of"):
        SeedPlan.of(given)
    assert SeedPlan.of([4, 3, 5]).seeds == range(4, 9) and SeedPlan.of(None) is None
    assert f"({MOST_BY_DEFAULT}; at most {MOST})" in SEED_WORDS["max_seeds"]
    assert f"({FEWEST})" in SEED_WORDS["min_seeds"]

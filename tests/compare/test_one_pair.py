"""One run of a mode beside one of the baseline: what is said, and what decides `--check`."""

import math
import re
import statistics

import numpy as np
import pytest
from scipy.stats import norm

from mprun.cli import main
from mprun.comparison.findings import VERDICTS, Question
from mprun.comparison.one_pair import pair_facts, pair_lines
from mprun.comparison.verdict import judge

from ..helpers import refused
from .made_runs import made_arm, made_run
from .run_folders import compared, write_study

LOSS = Question(metric="loss")
POINTS = {"metric": "top1", "higher_is_better": True, "unit": "points", "relative": False}
GAPS = [0.01, 0.03, 0.02, 0.02, 0.01, 0.02, 0.04, 0.042]  # mean 0.024
STEPS = [10, 20, 30, 40, 50, 60, 70, 80]
SOURCE = "12 seeds of this recipe"


def late(losses, steps=STEPS, skips=(), **more):
    """A run whose last tenth of the records is `losses`."""
    of_last = {"last_losses": np.array(losses, float), "last_steps": np.array(steps, np.int64)}
    return made_run(0, 2.0, last_skips=np.isin(steps, skips), **of_last, **more)


def stated(sd, source=SOURCE) -> dict:
    return {"keys": {"compare.pair_sd": sd, "compare.pair_sd_source": source}}


def facts_of(gaps=GAPS, question=LOSS, outcome=(0.0, 2.0), base=2.0, **more):
    """Return facts beside a constant baseline at `base`."""
    steps = STEPS[: len(gaps)]
    own = late([base + gap for gap in gaps], steps, mode="amp", **more)
    return pair_facts(own, late([base] * len(gaps), steps, **more), question, outcome)


def test_the_gap_of_the_last_tenth_and_its_quarters():
    facts = facts_of()
    assert facts["difference"] == pytest.approx(0.024) and facts["level"] == 2.0
    assert facts["quarters"] == pytest.approx([0.02, 0.02, 0.015, 0.041])
    around = [gap - 0.024 for gap in GAPS]
    products = sum(a * b for a, b in zip(around, around[1:], strict=False))
    steps = facts["steps"]
    assert steps["sd"] == pytest.approx(statistics.stdev(GAPS))
    assert steps["lag1"] == pytest.approx(products / sum(a * a for a in around))
    assert (steps["count"], steps["first"], steps["last"], steps["left_out"]) == (8, 10, 80, 0)
    assert facts["bar"]["gap"] == pytest.approx(0.012) and not facts["bar"]["inside"]
    first, second, third = pair_lines(facts, LOSS)
    assert first == "one pair (seed 0): facts, no verdict."
    assert second == (
        "Over the last tenth of the records (8 matched steps, 10 to 80): training loss +1.20 % "
        "(+0.024), its quarters +1.00 +1.00 +0.75 +2.05 %; bar 1 %: this gap is outside by 0.20 %."
    )
    assert third.startswith("Not seen: how other seeds would shift it; a flat gap is no evidence")
    # The bar in nats.
    nats = Question(metric="loss", relative=False, margin_setting=0.05)
    _, second, _ = pair_lines(facts_of(question=nats), nats)
    assert second.endswith(
        "training loss +0.024 (+1.2 %), its quarters +0.020 +0.020 +0.015 +0.041; bar 0.05: this "
        "gap is inside by 0.026."
    )


def test_no_word_of_the_verdict_table_is_said():
    for sd in (0.001, 0.1, None):
        text = " ".join(pair_lines(facts_of(**stated(sd)), LOSS))
        assert [name for name in VERDICTS if re.search(rf"\b{name}\b", text)] == ["one pair"]
    verdict, _ = judge(made_arm({0: 2.0}, "amp"), made_arm({0: 2.0}), LOSS)
    assert (verdict.name, verdict.needed, verdict.low) == ("one pair", 2, None)


def test_only_steps_that_both_runs_took_count():
    # In common are 20, 40, 60 and 80; at 40 the mode skipped, at 60 the baseline was not finite.
    own = late([5.0, 2.1, 5.0, 9.0, 5.0, 2.1, 5.0, 2.3], skips=[40], mode="amp")
    base = late([2.0, 2.0, math.nan, 2.0, 7.0], [20, 40, 60, 80, 100])
    facts = pair_facts(own, base, LOSS, (0.0, 2.0))
    assert facts["difference"] == pytest.approx(0.2) and facts["quarters"] == []
    assert facts["steps"]["count"] == 2 and facts["steps"]["left_out"] == 2
    _, second, _ = pair_lines(facts, LOSS)
    assert "(2 matched steps, 20 to 80, without 2 skipped or not finite)" in second
    # Nothing in common: the evaluations are held against the bar.
    facts = pair_facts(own, late([2.0], [5]), LOSS, (0.01, 2.0))
    _, second, _ = pair_lines(facts, LOSS)
    assert second == (
        "At no step of the last tenth did both runs record a finite training loss; loss of the "
        "final evaluation +0.50 %; bar 1 %: this gap is inside by 0.50 %."
    )


def test_the_first_common_step_is_told():
    def run(mode, steps, times):
        made = made_run(0, 1.0, mode=mode, keys={"data.sha256": "a"})
        made.train = {"step": np.array(steps, float), "loss": times * 4.0 / np.array(steps)}
        return made

    def first(times):
        own, base = run("amp", range(4, 10), times), run("fp32", range(2, 9, 2), 1.0)
        facts = pair_facts(own, base, LOSS, (0.0, 2.0))
        assert facts["compared"] == 3 and facts["first_step"] == 4.0  # in common are 4, 6, 8
        return next(pair_lines(facts, LOSS))

    assert first(1.04) == "one pair (seed 0, same data, +0.04 at step 4): facts, no verdict."
    same = "one pair (seed 0, same data, equal at all 3 compared steps, bit for bit): facts, no"
    assert first(1.0).startswith(same)


@pytest.mark.parametrize("data, same", [("ab", False), ("aa", True), ([None] * 2, False)])
def test_losses_that_are_no_numbers_in_both_runs_are_equal_and_data_by_its_sum(data, same):
    pair = [made_run(0, 1.0, keys={"data.sha256": one} if one else {}) for one in data]
    for run in pair:
        run.train = {"step": np.array([1.0, 2.0]), "loss": np.array([2.0, np.nan])}
    facts = pair_facts(*pair, LOSS, (0.0, 2.0))
    assert facts["identical"] and facts["same_data"] == same


def test_an_accuracy_is_held_against_the_bar_itself():
    """A training loss has no points; it stands beside."""
    top1 = Question(**POINTS, margin_setting=0.5)
    facts = facts_of(question=top1, outcome=(0.3, -90.0), **stated(0.1))
    assert facts["level"] == facts_of(base=-2.0)["level"] == 2.0
    assert facts["bar"] == {"of": "top1", "gap": 0.3, "size": 0.5, "inside": True}
    _, second, _, test = pair_lines(facts, top1)
    assert second.endswith(
        "training loss +1.20 % (+0.024), its quarters +1.00 +1.00 +0.75 +2.05 %; top1 of the final "
        "evaluation +0.30 points (positive is worse); bar 0.5 points: this gap is inside by 0.20 "
        "points."
    )
    assert test.startswith("Inside 0.5 points at 5 % if the scatter of pairs is 0.1 points (12 se")


def test_the_losses_of_a_gan_are_not_compared():
    question = Question(metric="sliced_wasserstein", gan=True, margin_setting=0.1, window=5)
    facts = facts_of(question=question, outcome=(0.4, 2.0))
    assert facts["steps"] is None
    _, second, _ = pair_lines(facts, question)
    assert second == (
        "sliced_wasserstein of the last 5 evaluations +20.0 %; bar 10 %: this gap is outside by "
        "10.0 %."
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_the_test_at_its_boundary(sign):
    """The gap is 0.4 % to either side, the bar 1 %; 0.6 % are left for 1.645 sd."""
    assert facts_of(**stated(-0.5))["test"] is None  # no scatter
    largest = 0.006 / float(norm.ppf(0.95))
    for sd, inside in ((largest * (1 - 1e-9), True), (largest * (1 + 1e-9), False)):
        facts = facts_of([sign * 0.008] * 4, **stated(sd))
        assert facts["test"]["inside"] is inside and facts["test"]["fixed"]
        *_, test = pair_lines(facts, LOSS)
        said = "Inside 1 % at 5 % if" if inside else "Not shown inside 1 % if"
        sum_of = "0.4 + 1.645 * 0.3648 = 1 %."
        assert test == f"{said} the scatter of pairs is 0.3648 % ({SOURCE}): {sum_of}"


@pytest.mark.slow
def test_of_pairs_at_the_bar_five_per_cent_are_inside():
    """A true gap of 1 %, the bar, with a known scatter of 0.1 %; standard error 0.44 %."""
    drawn = np.random.default_rng(0).normal(0.02, 0.002, 2500)
    inside = [facts_of([gap], **stated(0.001))["test"]["inside"] for gap in drawn]
    assert 0.04 < np.mean(inside) < 0.06
    # Half of the true scatter promises too much: P(z < -1.645 / 2) = 20.5 %.
    inside = [facts_of([gap], **stated(0.0005))["test"]["inside"] for gap in drawn[:500]]
    assert 0.16 < np.mean(inside) < 0.25


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Write runs/, one of FP32 and one of amp; the gap of the losses is 0.196 % (0.004 nats).

    The last tenth of 22 records is the steps 20, 30 and 40, at 2 + 13 / 360.
    """
    monkeypatch.chdir(tmp_path)

    def write(fp32=None, amp=None, finals=(2.0, 2.004)):
        for mode, own, final in zip(("fp32", "amp"), (fp32, amp), finals, strict=True):
            write_study(tmp_path / "runs", {mode: [final]}, overrides=own)

    return write


def fixed(sd, source=SOURCE) -> dict:
    return stated(sd, source)["keys"]


FOUR, SIX = fixed(0.004), fixed(0.006)  # 0.196 + 1.645 * 0.4 = 0.854 and, with 0.6, 1.183 %


@pytest.mark.parametrize(
    ("fp32", "amp", "words", "code", "says"),
    [
        (FOUR, FOUR, [], 0, "Inside 1 % at 5 %"),
        (SIX, SIX, [], 3, "Not shown inside 1 % if"),
        (None, None, [], 3, "three seeds of each give a verdict"),
        (FOUR, None, [], 3, "No test: compare.pair_sd is null and 0.004 (12 seeds of"),
        (FOUR, fixed(0.003), [], 3, "must be equal in both records"),
        (FOUR, fixed(0.004, "other runs"), [], 3, "must be equal in both records"),
        (None, None, ["--pair-sd", "0.004"], 3, "(--pair-sd, chosen after the runs)"),
        (SIX, SIX, ["--pair-sd", "0.004"], 3, "Inside 1 % at 5 %"),
        (FOUR, FOUR, ["--bar", "0.02"], 3, "No test: compare.pair_sd is of the"),
        (FOUR, FOUR, ["--bar", "0.01"], 0, "Inside 1 % at 5 %"),
    ],
)
def test_check_is_decided_by_a_scatter_that_was_fixed_before(
    pair, capsys, fp32, amp, words, code, says
):
    pair(fp32, amp)
    found = compared(capsys, "runs", *words, "--check", code=code)
    [row] = found["groups"][0]["modes"]
    assert row["verdict"]["name"] == "one pair" and says in row["verdict"]["sentence"]
    assert row["verdict"]["facts"]["bar"]["gap"] == pytest.approx(0.004 / (2 + 13 / 360))
    stamped = [line for line in found["stamps"] if line.startswith("--pair-sd")]
    assert stamped == ["--pair-sd 0.004: chosen after the runs"] * ("--pair-sd" in words)


def test_why_the_check_fails(pair, capsys):
    pair(fixed(0.006), fixed(0.006))
    assert main(["compare", "runs", "--no-report", "--check"]) == 3
    assert "--check: amp: one pair, not shown inside the bar\n" in capsys.readouterr().out


def test_another_run_after_a_look_does_not_pass(pair, capsys, tmp_path):
    """A scatter is no other configuration: the first run of it counts, and the other is told."""
    pair()
    for mode, final in (("fp32", 2.0), ("amp", 2.004)):
        later = {"created": "2026-11-21T10:00:00+00:00", "overrides": fixed(0.001)}
        write_study(tmp_path / "runs/again", {mode: [final]}, **later)
    found = compared(capsys, "runs", "--check", code=3)
    [row] = found["groups"][0]["modes"]
    assert row["verdict"]["facts"]["test"] is None and row["verdict"]["left_out"]


def test_other_numbers_of_runs_are_no_pair(tmp_path, capsys):
    write_study(tmp_path / "two", {"fp32": [2.0, 2.1], "amp": [2.0]})
    [group] = compared(capsys, tmp_path / "two")["groups"]
    assert group["modes"][0]["verdict"]["name"] == "inconclusive"
    assert group["modes"][0]["verdict"]["facts"] == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compare", "runs", "--pair-sd", "0"], "--pair-sd 0: must be a number above 0"),
        (["compare", "runs", "--pair-sd", "-1"], "--pair-sd -1: must be a number above 0"),
        (["compare", "runs", "--pair-sd", "nan"], "--pair-sd nan: must be a number above 0"),
        (["compare", "runs", "--bar", "0"], "--margin 0: must be a number above 0"),
        (["compare.pair_sd=0", "compare.pair_sd_source=x"], "compare.pair_sd=0.0: must be > 0"),
        (["compare.pair_sd=-1", "compare.pair_sd_source=x"], "compare.pair_sd=-1.0: must be > 0"),
        (["compare.pair_sd=0.001"], "compare.pair_sd=0.001: needs compare.pair_sd_source"),
        (["compare.pair_sd=0.001", "compare.pair_sd_source=' '"], "needs compare.pair_sd_source"),
        (["compare.pair_sd_source=x"], "compare.pair_sd_source=x: needs compare.pair_sd"),
    ],
)
def test_bad_input_is_refused(pair, capsys, words, says, tmp_path):
    pair()
    before = sorted(tmp_path.rglob("*"))
    refused(capsys, *words, says=says)
    assert sorted(tmp_path.rglob("*")) == before


def test_four_lines_fit_a_terminal(pair, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    pair(fixed(0.004), fixed(0.004))
    assert main(["compare", "runs", "--no-report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line[:13] for line in lines if re.match("  amp: |    [A-Z]", line)]
    assert heads == ["  amp: one pa", "    Over the ", "    Not seen:", "    Inside 1 "]


def test_a_pair_of_logs_is_held_against_the_bar_over_its_judged_steps():
    """A log has no final evaluation: any metric of it counts at its last steps."""
    own, base = (
        made_run(0, *values, metric="top1", foreign=True, judged=np.array([200.0, 300.0]))
        for values in ([9.0, 5.0, 7.0], [9.0, 4.0, 4.0])
    )
    facts = pair_facts(own, base, Question(**POINTS, margin_setting=2.5), (-3.0, -4.0))
    # More points are better: 1 and 3 more, 2 on average.
    bar = {"of": "top1", "gap": -2.0, "size": 2.5, "inside": True}
    assert facts["bar"] == bar and facts["steps"]["count"] == 2

"""The promised error rates, by the simulation of benchmarks/error_rates.py."""

import importlib
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi, linregress, norm, t

from mprun.comparison.decision import CONCLUSIVE
from mprun.comparison.equivalence import decide, paired_ratio
from mprun.comparison.findings import Question
from mprun.comparison.verdict import judge

from .made_runs import made_arm

ROOT = Path(__file__).parents[2]
FEW, MANY = 1_000, 20_000


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("error_rates")


@pytest.fixture
def sweeps(simulated):
    return importlib.import_module("error_rates_sweeps")


@pytest.fixture
def pairs(simulated):
    return importlib.import_module("error_rates_pair")


@pytest.fixture
def rates(simulated):
    return simulated.rates


@pytest.fixture
def committed():
    return json.loads((ROOT / "docs" / "error_rates.json").read_text(encoding="utf-8"))


def above(rate: float, draws: int) -> float:
    """A rate that so many draws stay below but once in 30,000 times (four standard errors)."""
    return rate + 4 * math.sqrt(rate * (1 - rate) / draws)


@pytest.mark.slow
@pytest.mark.parametrize("paired", [True, False], ids=["paired", "Welch"])
@pytest.mark.parametrize(("count", "looks"), [(5, ()), (10, (3, 5, 10))], ids=["fixed", "looks"])
def test_a_difference_of_the_margin_rarely_matches(rates, count, looks, paired):
    found = rates(1, 0.004, (count, count), FEW, paired=paired, looks=looks)
    assert found["matches"] < above(0.05, FEW)


@pytest.mark.few(2)
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize(
    ("shift", "sd", "difference_sd"),
    [("additive", 0.1, 0.0005), ("additive", 0.2, 0.0001), ("scaled", 0.1, 0.0005)],
)
def test_seeds_that_scatter_more_than_their_differences(simulated, shift, sd, difference_sd, seeds):
    """A margin computed from the baseline's mean and taken for known: 0.4 to 46 % "matches"."""
    arms = simulated.paired_losses(1, sd, seeds, 2 * FEW, shift, difference_sd)
    found = [paired_ratio(*pair) for pair in zip(*(arm.tolist() for arm in arms), strict=True)]
    words = Counter(decide(one, 0.01) for one in found)
    few, many = (norm.ppf([3e-5, 1 - 3e-5]) * math.sqrt(0.05 * 0.95 / (2 * FEW)) + 0.05).tolist()
    for word in ("matches", "worse"):  # each of the two tests at the margin, at exactly 5 %
        assert few < words[word] / (2 * FEW) < many


@pytest.mark.slow
@pytest.mark.parametrize("looks", [(), (3, 5, 10)], ids=["fixed", "looks"])
def test_equal_modes_are_rarely_called_worse_or_better(rates, looks):
    found = rates(0, 0.01, (10, 10), FEW, looks=looks)
    assert found["worse"] + found["likely worse"] < above(0.05, FEW)
    assert found["better"] + found["likely better"] < above(0.05, FEW)


@pytest.mark.slow
def test_naive_looks_do_break_the_rate(rates):
    # What --looks is for; were this to pass without it, the tests above would show nothing.
    found = rates(1, 0.004, (10, 10), FEW, looks=(3, 5, 10), naive=True)
    assert found["matches"] > above(0.05, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("draws", [FEW, MANY])
def test_equal_modes_mostly_match(rates, draws):
    assert rates(0, 0.004, (5, 5), draws)["matches"] > 1 - above(0.05, draws)


KINDS = ["independent", "AR(1) 0.95", "random walk"]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [3, 5])
def test_gaps_that_wander_are_rarely_said_to_grow(simulated, kind, seeds):
    assert simulated.growth(kind, seeds, 0.0, FEW) < above(0.05, FEW)


def test_a_test_that_counted_steps_would_break_the_rate(simulated):
    # The slope of the mean gap of three seeds, each of its points taken for a new observation.
    gaps = simulated.gap_noise("AR(1) 0.95", (300, 3, 60), np.random.default_rng(5)).mean(1)
    tests = [linregress(np.arange(30), gap, alternative="greater") for gap in gaps[:, 30:]]
    assert np.mean([test.pvalue < 0.05 for test in tests]) > 0.25


def test_planted_growth_is_found(simulated):
    # By 0.25 % over the last half, five times the standard deviation of a gap within a seed.
    assert simulated.growth("AR(1) 0.95", 3, 0.0025, FEW) > 0.93
    assert simulated.growth("AR(1) 0.95", 5, 0.0025, FEW) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("sd", [0.002, 0.004, 0.006, 0.01])
@pytest.mark.parametrize("looks", [(), (3, 5, 10)], ids=["fixed", "looks"])
def test_false_matches_at_full_size(rates, sd, looks):
    assert rates(1, sd, (10, 10), MANY, looks=looks)["matches"] <= 0.055


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 5])
def test_logs_in_the_order_of_their_values_match_no_more_often(count):
    """Logs without seeds, both arms sorted, the means a margin of 1 % apart."""
    draws = 1 + 0.004 * np.random.default_rng(3).standard_normal((8 * FEW, 2, count))
    question = Question(metric="loss", by_seed=False)
    matches = 0
    for own, base in draws.tolist():
        arms = (made_arm(dict(enumerate(sorted(v)))) for v in ([1.01 * x for x in own], base))
        matches += judge(*arms, question)[0].name == "matches"
    assert matches / len(draws) <= 0.055


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_published_rates_cover_skewed_differences(committed, seeds):
    """Without the shipped code: t intervals of lognormal differences whose mean is the margin."""
    draws = np.exp(np.random.default_rng(7).standard_normal((MANY, seeds)))
    scale = 0.4 / math.sqrt(math.e * (math.e - 1))  # of a margin of 1
    differences = 1 + scale * (draws - math.exp(0.5))
    middle = differences.mean(1)
    half = t.ppf(0.95, seeds - 1) * differences.std(1, ddof=1) / math.sqrt(seeds)
    found = np.mean((middle - half > -1) & (middle + half < 1))
    worst = committed["summary"]["false_matches_skewed difference"]
    assert 0.2 < found < above(worst, MANY)


def test_the_committed_results_keep_what_is_promised(committed, simulated):
    assert committed["draws"] == MANY and committed["noises"] == simulated.NOISES
    summary = committed["summary"]
    assert summary["false_matches_normal"] <= 0.055
    assert summary["false_claims_when_equal_normal"] <= 0.055
    # Satterthwaite's degrees of freedom are too many there; the page says so.
    assert summary["false_matches_uneven_welch"] <= 0.07
    assert summary["matches_when_equal_sd_0.4_n_5"] >= 0.95
    assert max(summary[f"false_growth_{kind}"] for kind in KINDS) <= 0.055
    assert summary == simulated.summary(committed)
    text = (ROOT / "docs" / "error_rates.md").read_text(encoding="utf-8")
    assert text == simulated.document(committed)


# By a program of its own, normal differences against a known margin: sd of the difference and true
# difference in percent, then of each rule but that of 3 seeds (5, 10, every, looks, until) the
# right words in percent and the mean number of seeds.
OTHER_PROGRAM = {
    (0.4, 0): [(99.5, 5), (100, 10), (100, 3.3), (100, 4.4), (100, 4.6)],
    (0.4, 0.5): [(74.2, 5), (97.6, 10), (98.7, 4.4), (93.6, 6.9), (94.7, 6.4)],
    (0.6, 0): [(84.1, 5), (99.9, 10), (99.9, 4.1), (99.1, 6.7), (99.5, 6.1)],
    (0.6, 0.5): [(46.1, 5), (78.4, 10), (85.0, 5.9), (65.3, 8.3), (68.9, 8.0)],
    (0.6, 2): [(91.5, 5), (99.9, 10), (100, 3.7), (99.5, 5.6), (99.7, 5.4)],
    (1, 0): [(29.5, 5), (79.4, 10), (86.5, 6.6), (57.7, 9.2), (64.5, 8.7)],
    (1, 2): [(58.2, 5), (89.7, 10), (93.7, 5.2), (79.1, 7.7), (83.1, 7.3)],
}


@pytest.mark.parametrize(("sd", "true"), OTHER_PROGRAM)
def test_sweeps_agree_with_another_program(committed, sweeps, sd, true):
    """Two simulations of 20,000 draws, of which the other has a margin known beforehand."""
    _, *names = sweeps.RULES
    cells = {(one["seed_sd"], one["sd"], one["true"]): one for one in committed["sweeps"]}
    rates = cells[0.01, sd / 100, true]["rates"]
    for name, (percent, seeds) in zip(names, OTHER_PROGRAM[sd, true], strict=True):
        found = rates[name]
        word, share = "worse" if true > 1 else "matches", percent / 100
        error = math.sqrt(2 * max(share * (1 - share), 0.0005) / MANY)
        assert found[word] == pytest.approx(share, abs=4 * error + 0.003), (name, found)
        assert found["seeds"] == pytest.approx(seeds, abs=0.1 + 0.05)


def test_sweeps_until_decided_keep_what_is_promised(committed):
    summary = committed["summary"]
    for name in ("false_matches", "false_worse"):
        assert summary[f"{name}_until"] <= summary[f"{name}_patient"] + 0.002
        assert summary[f"{name}_patient"] < above(0.05, MANY)
    assert summary["false_claims_when_equal_until"] < 0.05
    assert summary["false_matches_every_seed"] > 0.1  # what the alphas are for


def pair_inside(bar, true, pairs, factor):
    """Integrate over the chi of the stated scatter, without the shipped code."""
    scatters, weights = np.ones(1), np.ones(1)
    if pairs:
        scatters = np.linspace(1e-4, 4, 40_000)
        weights = chi.pdf(scatters * math.sqrt(pairs - 1), pairs - 1)
        weights /= weights.sum()
    reach = bar - norm.ppf(0.95) * factor * scatters
    shares = norm.cdf(reach - true * bar) - norm.cdf(-reach - true * bar)
    return float(weights @ np.where(reach > 0, shares, 0.0))


def test_pairs_with_a_stated_scatter_keep_what_is_promised(committed, pairs):
    for cell in committed["pair"]:
        how = pairs.STATED[cell["stated"]]
        for true, name in ((1, "at_bar"), (0, "equal")):
            for bar, found in cell[name].items():
                share = pair_inside(float(bar), true, *how)
                error = math.sqrt(max(share * (1 - share), 0.0002) / MANY)
                assert found == pytest.approx(share, abs=4 * error), (cell["stated"], bar, true)
    of = [pair_inside(10, 1, *how) for how in ((None, 1), (None, 0.5), (3, 2.919986 / 1.644854))]
    assert of == pytest.approx([0.05, norm.sf(1.644854 / 2), 0.05], abs=0.0005)


def test_the_page_of_seeds_has_these_figures(committed, sweeps, pairs):
    page = (ROOT / "docs" / "how_many_seeds.md").read_text(encoding="utf-8")
    for module in (sweeps, pairs):
        assert "\n".join(module.seeds_page_rows(committed)) in page


@pytest.mark.few(1)
def test_sweeps_say_what_compare_says(simulated, sweeps):
    """The words and seeds of the rules beside those of `judge`, on the same draws."""
    values = simulated.paired_losses(0.5, 0.01, 10, 100, "additive", 0.006)
    how = {"metric": "loss", "margin_setting": 0.01}
    for own, base in zip(*(arm.tolist() for arm in values), strict=True):
        arms = [made_arm(dict(enumerate(arm))) for arm in (own, base)]
        for rule, given in (
            ("10 seeds", {}),
            ("`--looks 3,5,10`", {"looks": (3, 5, 10)}),
            (sweeps.PATIENT, {"looks": tuple(range(3, 11)), "spending": True}),
        ):
            verdict, _ = judge(*arms, Question(**how, **given))
            word = verdict.name if verdict.name in CONCLUSIVE else "undecided"
            expected = sweeps.swept(sweeps.Draw(own, base), sweeps.RULES[rule])[0]
            assert (word, len(verdict.seeds)) == expected

"""The tables and sentences of docs/error_rates.md, from the results of error_rates.py."""

import math

from error_rates_pair import pair_lines, pair_summary, widened
from error_rates_sweeps import PATIENT, UNTIL, right, sweep_summary, sweep_tables

# Tables that were drawn before this day took the margin of a relative verdict for known.
RATIO_SINCE = "2026-11-28"


def wrong(found: dict[str, float], true: int) -> dict[str, float]:
    """Return the rates of the wrong claims in a cell."""
    if true:
        return {"matches": found["matches"]}
    return {
        "worse": found["worse"] + found["likely worse"],
        "better": found["better"] + found["likely better"],
    }


def markdown(results: dict) -> str:
    """Format the tables, each row with all truths of one setting."""
    lines = ["### Same seeds (paired)", ""]
    lines += _table(
        ["seed sd", "seeds"],
        [([_percent(c["sd"]), str(c["seeds"])], c) for c in results["paired"]],
    )
    lines += ["", "### Different seeds (Welch)", ""]
    lines += _table(
        ["seed sd", "seeds"],
        [
            ([_percent(c["sd"]), f"{c['seeds']} and {c['baseline_seeds']}"], c)
            for c in results["welch"]
        ],
    )
    lines += ["", "### Looks at 3, 5 and 10 seeds", ""]
    lines += _table(
        ["seed sd", "way"],
        [([_percent(c["sd"]), c["way"]], c) for c in results["looks"]],
        with_seeds=True,
    )
    lines += ["", "### Noise that is not normal (paired, seed sd 0.4 %)", ""]
    lines += _table(
        ["noise", "seeds"],
        [
            ([c["noise"], "looks 3, 5, 10" if c["looks"] else str(c["seeds"])], c)
            for c in results["noise"]
        ],
        with_warnings=True,
    )
    lines += ["", "### Seeds that scatter more than their differences, and uneven arms", ""]
    lines += _table(
        ["seed sd", "sd of the difference", "shift", "seeds"],
        [(_of_scatter(cell), cell) for cell in results["scatter"]],
    )
    lines += ["", "### Growth of the gap over steps", ""]
    planted = results["growth"][0]["rates"]
    heads = ["noise", "seeds", *(f"grows by {_percent(float(by))}: said" for by in planted)]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for cell in results["growth"]:
        row = [cell["noise"], str(cell["seeds"]), *map(_percent, cell["rates"].values())]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _of_scatter(cell: dict) -> list[str]:
    if "shift" in cell:
        of_difference = _percent(cell["difference_sd"])
        return [_percent(cell["sd"]), of_difference, cell["shift"], str(cell["seeds"])]
    seeds = f"{cell['seeds']} and {cell['baseline_seeds']} (Welch)"
    return [_percent(cell["sd"]), "", "", seeds]


def summary(results: dict) -> dict[str, float]:
    """Return the rates that the method promises, the worst over their cells."""
    uneven = [cell for cell in results["scatter"] if "baseline_seeds" in cell]
    honest = [
        cell
        for part in ("paired", "welch", "looks", "noise", "scatter")
        for cell in results[part]
        if cell.get("noise", "normal") == "normal" and cell.get("way") != "naive looks"
        if cell not in uneven
    ]
    naive = [cell for cell in results["looks"] if cell["way"] == "naive looks"]
    (power,) = (
        cell["rates"]["matches"]
        for cell in results["paired"]
        if (cell["sd"], cell["seeds"], cell["true"]) == (0.004, 5, 0)
    )
    return {
        "false_matches_normal": _worst(honest, 1),
        "false_claims_when_equal_normal": _worst(honest, 0),
        "false_matches_uneven_welch": _worst(uneven, 1),
        "false_claims_when_equal_uneven_welch": _worst(uneven, 0),
        "false_matches_naive_looks": _worst(naive, 1),
        "false_claims_when_equal_naive_looks": _worst(naive, 0),
        "matches_when_equal_sd_0.4_n_5": power,
        **{
            f"{name}_{kind}": _worst([c for c in results["noise"] if c["noise"] == kind], true)
            for kind in results["noises"]
            if kind != "normal"
            for name, true in (("false_matches", 1), ("false_claims_when_equal", 0))
        },
        **{
            f"false_growth_{kind}": max(c["rates"]["0"] for c in _growth(results, kind))
            for kind in results["gaps"]
        },
        "growth_of_0.25_found_n_3": min(c["rates"]["0.0025"] for c in _growth(results, seeds=3)),
        **sweep_summary(results),
        **pair_summary(results),
    }


def _growth(results: dict, kind: str | None = None, seeds: int | None = None) -> list[dict]:
    """Select cells of the growth table by noise, or by seeds without the skewed ones."""
    return [
        cell
        for cell in results["growth"]
        if (kind is None or cell["noise"] == kind)
        and (seeds is None or (cell["seeds"] == seeds and cell["noise"] != "skewed slopes"))
    ]


def document(results: dict) -> str:
    """Return docs/error_rates.md; its sentences hold for any numbers."""
    rate = {name: _percent(value) for name, value in results["summary"].items()}
    noises = "\n".join(f"- *{name}*: {text}." for name, text in results["noises"].items())
    others = "\n".join(
        f'| false "matches", noise: {kind} | {rate[f"false_matches_{kind}"]} |\n'
        f'| false "worse" or "better", noise: {kind} | '
        f"{rate[f'false_claims_when_equal_{kind}']} |"
        for kind in results["noises"]
        if kind != "normal"
    )
    growing = "\n".join(
        f'| "grows" although the gap does not, gaps within a seed: {kind} | '
        f"{rate[f'false_growth_{kind}']} |"
        for kind in results["gaps"]
    )
    gaps = "\n".join(f"- *{name}*: {text}." for name, text in results["gaps"].items())
    shifts = "\n".join(f"- *{name}*: {text}." for name, text in results["shifts"].items())
    refused = _percent(max(cell["rates"].get("refused", 0.0) for cell in results["scatter"]))
    drawn = results["drawn"]
    days = "\n".join(
        f"- {day}: {', '.join(name for name in drawn if drawn[name] == day)}"
        for day in sorted(set(drawn.values()))
    )
    old = [name for name, day in drawn.items() if day < RATIO_SINCE]
    earlier = (
        f"\nSome are older than the ratio test: {', '.join(old)}. Their margin was computed\n"
        "from the baseline's mean and taken for known. This is nearly the same where seeds\n"
        "scatter by at most 1 %.\n"
        if old
        else ""
    )
    return f"""# Error rates of `mprun compare`

This page says how often a verdict is wrong, by simulation with the shipped code.

A cell has {results["draws"]:,} draws. Each draw fills two arms of runs with final losses of known
truth and asks the shipped code, `mprun.comparison.verdict.judge`, for the verdict. The margin is
1 % of the baseline's mean. The correlation is 0.3 between arms that share seeds, 0 between those
that do not.
One standard error of a rate near 5 % is {_percent(math.sqrt(0.05 * 0.95 / results["draws"]))}.

    {results["command"]}

{results["versions"]}; CPU only, {results["seconds"]:.0f} s in one process. The same
numbers are in `error_rates.json`. The tables were drawn on these days:

{days}
{earlier}
| what | worst rate over the cells |
|---|---|
| "matches" although the true difference equals the margin, normal noise, looks included | \
{rate["false_matches_normal"]} |
| "worse" or "likely worse" (or "better" or "likely better") although equal, normal noise, looks \
included | {rate["false_claims_when_equal_normal"]} |
| the same, three seeds of the baseline against 10 or 20 others of the mode (Welch): "matches" | \
{rate["false_matches_uneven_welch"]} |
| "worse" or "better" although equal there | \
{rate["false_claims_when_equal_uneven_welch"]} |
| "matches" when truly equal: seed sd 0.4 %, 5 shared seeds | \
{rate["matches_when_equal_sd_0.4_n_5"]} |
| false "matches" of naive looks at 3, 5, 10 seeds (not offered) | \
{rate["false_matches_naive_looks"]} |
| false "worse" or "better" of naive looks (not offered) | \
{rate["false_claims_when_equal_naive_looks"]} |
| sweeps with `until=decided max_seeds=10`: false "matches" at the margin | \
{rate["false_matches_until"]} |
| false "worse" at the margin there | {rate["false_worse_until"]} |
| "worse" or "better" although equal there | {rate["false_claims_when_equal_until"]} |
| false "matches" of a test after every seed (not offered) | {rate["false_matches_every_seed"]} |
| one pair of runs, true scatter stated: "inside" although the gap is the bar | \
{rate["inside_at_the_bar_the true one"]} |
| half the true scatter stated: the same | {rate["inside_at_the_bar_half of it"]} |
{others}
{growing}

## Why a relative margin is tested as a ratio

"Within 1 % of FP32" bounds a ratio of two means, and FP32's mean is known no better than its seeds
allow. A margin may be computed from that mean and then taken for known. Where equal seeds end
nearly alike, but seeds scatter, it is wrong by more than the differences are. At a true difference
of the margin it moves with the seeds. So the test takes own - (1 +- margin) * base for each seed,
and the interval is Fieller's, the ratios that this test does not reject. The t statistic of such a
combination is exact for normal noise at any correlation ("scatter" in the tables). Welch's test of
the same two combinations is approximate. With three seeds against many its interval is too short.
If the mean of FP32 may be 0 by its own scatter, no such interval exists. Then the comparison is
refused. This happens in up to {refused} of the draws, with three seeds that scatter by 20 %.

## How `--looks` keeps its rate

A test at 3, then 5, then 10 seeds has three chances of a wrong claim. `--looks 3,5,10`
therefore tests every look at the same stricter one-sided alpha (Pocock 1977),
{_percent(results["nominal_alpha"])} instead of 5 %, with intervals of \
{_percent(1 - 2 * results["nominal_alpha"])} confidence. At a
true difference equal to the margin the t statistics of nested looks have a joint distribution. It
depends only on the numbers of seeds, so this alpha is found by simulating it (400,000 draws, fixed
seed). It is derived for shared seeds and also used for Welch; the table shows its rates there. The
price is a lower rate of "matches" at the last look than a fixed test of 10 seeds has. The gain is
that clear cases end early (column "seeds used").

## Sweeps that run until they are decided

`until=decided max_seeds=10` has an interim look after every seed from the third on. It has spent
(n / 10)^1.5 of the 5 % after n seeds (Kim and DeMets 1987). It spends little at the first looks and
most at the last, where it decides most. The alpha of each look is simulated as Pocock's is. From
five seeds on it gives up where 5 % without looks would take more than 30 seeds. That is not
binding, so it only lowers the rates. {_compared(results)}

A program of its own, which knows the margin beforehand, gave the same shares of right words to
within 0.8 points. Its numbers of seeds were the same to within 0.1 (29 November 2026; the figures
are in tests/compare/test_error_rates.py). Only where it gave up did it end
sooner, by 0.2 to 0.4 seeds.

Seeds that scatter much while equal seeds end alike change nothing: the test is the same ratio test.
Noise that is not normal does, and looking early makes it worse: a few seeds often contain no bad
one. False "matches" at the margin are:

{_noise_lines(results)}

MLPerf's records end on few values. In 11 % of the draws of three seeds all differences of equal
seeds are equal, and so is the margin itself. Rounding decides between two words there. The ratio
test takes FP32's scatter into account there; the table of other noises at the end was drawn
before.

## One pair of runs

A pair gets no verdict, because one seed says nothing about others. Who knows how the gap of such a
pair scatters, in standard deviations, states it: `compare.pair_sd`. A pair then passes if |gap| +
1.645 sd is less than the bar. The rate of this test is exactly 5 % if the statement is
true and the scatter is normal ("pair" in the tables). Half the true scatter gives \
{rate["inside_at_the_bar_half of it"]} instead of 5 %. A scatter from a few earlier pairs is a draw
itself: from three pairs the rate is {rate["inside_at_the_bar_that of 3 earlier pairs"]}, from five
{rate["inside_at_the_bar_that of 5 earlier pairs"]}, from ten \
{rate["inside_at_the_bar_that of 10 earlier pairs"]}. The rate is 5 % again if the scatter is
stated {widened(3):.2f} times as large (three pairs), {widened(5):.2f} times (five) or \
{widened(10):.2f} times (ten).
This puts t(0.95, n - 1) in the place of 1.645.

## Whether a gap grows

The test takes each seed's least-squares slope of the gap to the baseline over the last half of the
steps. One t test of these slopes is one-sided at 5 % (`mprun.comparison.gap_growth`). Within a seed
the gap at one step predicts the next one, so no test may count steps. Slopes of separate seeds are
independent, and the test counts only these. The table at the end is drawn with curves of 60
points over 6,000 steps. Their gaps have a standard deviation of 0.05 % of the loss. The curves fall
from 6 to 2 nats and scatter by 1 % over seeds. A growth of 0.25 % of
the loss over the last half is found in at least {rate["growth_of_0.25_found_n_3"]}
of comparisons with three seeds. The rates hold for slopes that
are normal over seeds. If one seed in many falls much, a few seeds often contain none of these, and
up to {rate["false_growth_skewed slopes"]} of comparisons report "grows". The rate is that of one
mode; nothing is corrected for their number. This table alone:

    python benchmarks/error_rates.py --only growth --write docs

## What this does not say

- The t interval assumes that differences are normal over seeds. If only tails are heavy, or both
  arms are skewed alike (their difference is symmetric), the rates above hold and only power
  changes. If only the mode is skewed, a few seeds often contain no bad one. They then look better,
  and more alike, than the mode is: false "matches" up to \
{rate["false_matches_skewed mode"]}. There are more where equal seeds end alike but for a
  skewed loss of the mode. They are up to {rate["false_matches_exponential difference"]} if that \
loss is exponential, and
  up to {rate["false_matches_skewed difference"]} if it is lognormal (sigma 1). The rate grows with
  the skew without a limit, whatever its size beside the margin. Runs drawn from published
  references of MLPerf Training: up to \
{rate["false_matches_MLPerf records"]}.
  **Rare bad seeds defeat any test of few seeds.** If one seed in ten ends 10 % worse and nine are
  as good as FP32, the mean differs by the margin. Up to {rate["false_matches_rare bad seeds"]} of
  comparisons then report "matches", because no bad seed was among those that were run. Bad seeds
  that meet the divergence rule count as diverged; milder ones take more seeds to see.
- From seven shared seeds on (four and four others) each claim is tested again by permutation, which
  does not assume normal noise. If that does not confirm it, the verdict says so ("not confirmed" in
  the last table). It gives few false alarms and finds few of the wrong claims: no test of the drawn
  seeds shows the others. The rates of normal noise are an assumption; the table of other noises
  shows the rates without it.
- A verdict is on final losses with the seeds' noise; it covers no other seeds, data or lengths.
- Each mode of a comparison has its own 5 %. Among ten modes that truly differ by the margin, four
  in ten comparisons contain a false "matches" (1 - 0.95^10, if they were independent).

## Tables

"true 0", "true 1 %" (the margin), "true 2 %": the difference of the means. (L)W: worse and likely
worse together, (L)B: better and likely better together.

Noise over seeds, its standard deviation in column "seed sd":

{noises}

Shift of the mode in the table of seeds that scatter ("true 1 %" is additive or scaled):

{shifts}

Noise of a gap from step to step, in the last table ("grows by 0.00 %: said" is a false alarm):

{gaps}

{markdown(results)}

### Sweeps until decided, and other rules on the same draws

Each entry has the share of draws that end with this word, and the mean number of seeds used. A
column is one true difference of the two arms. In correlated draws the seeds "scatter"; shifts are
as above. A test after every seed is for comparison.

{sweep_tables(results)}

### One pair of runs with a stated scatter

Bars in true standard deviations of a pair's gap. The first columns are wrong, the last are right.

{pair_lines(results)}
"""


def _compared(results: dict) -> str:
    """Tell seeds and words of giving up, in its costliest and its cheapest cell."""
    normal = [c for c in results["sweeps"] if c["seed_sd"] == 0.01]
    lost = max(
        (c for c in normal if c["true"] != 1), key=lambda c: right(c, PATIENT) - right(c, UNTIL)
    )
    at_margin = [c["rates"] for c in normal if c["true"] == 1 and c["sd"] >= 0.004]
    saved = [max(found[rule]["seeds"] for found in at_margin) for rule in (PATIENT, UNTIL)]
    lost_words = 100 * (right(lost, PATIENT) - right(lost, UNTIL))
    return f"""It costs at most {lost_words:.1f} points of right
words (equal seeds differ by {_percent(lost["sd"])}, a true difference of {lost["true"]:g} %). Where
nothing can be decided it stops after {saved[1]:.1f} seeds instead of {saved[0]:.1f}."""


def _noise_lines(results: dict) -> str:
    """Return a small table of false matches over the rules that are offered."""
    rules = ("10 seeds", "`--looks 3,5,10`", UNTIL)
    lines = ["| noise | " + " | ".join(rules) + " |", "|" + "---|" * (1 + len(rules))]
    for cell in results["sweep_noise"]:
        if cell["true"] == 1:
            shares = (_percent(cell["rates"][rule]["matches"]) for rule in rules)
            lines.append(f"| {cell['noise']} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def _table(
    names: list[str],
    rows: list[tuple[list[str], dict]],
    with_seeds: bool = False,
    with_warnings: bool = False,
) -> list[str]:
    truths = sorted({cell["true"] for _, cell in rows})
    merged: dict[tuple[str, ...], list[dict]] = {}
    for key, cell in rows:
        merged.setdefault(tuple(key), []).append(cell["rates"])
    header = [*names, "true 0: matches", "(L)W", "(L)B", "inconclusive", "true 1 %: matches"]
    if 2 in truths:
        header += ["true 2 %: matches", "(L)W"]
    if with_seeds:
        header += ["seeds used, true 0", "true 1 %"]
    if with_warnings:
        header += ["of these not confirmed", "of those at true 0"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for key, cells in merged.items():
        equal, at_margin = cells[:2]
        claims = wrong(equal, 0)
        numbers = [equal["matches"], claims["worse"], claims["better"], equal["inconclusive"]]
        numbers.append(at_margin["matches"])
        if 2 in truths:
            numbers += [cells[2]["matches"], wrong(cells[2], 0)["worse"]]
        row = [*key, *(_percent(number) for number in numbers)]
        if with_seeds:
            row += [f"{equal['seeds']:.1f}", f"{at_margin['seeds']:.1f}"]
        if with_warnings:
            row += [_percent(at_margin["warned"]), _percent(equal["warned"])]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def _worst(cells: list[dict], true: int) -> float:
    return max(max(wrong(cell["rates"], true).values()) for cell in cells if cell["true"] == true)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"

"""The tables and sentences of docs/error_rates.md, from the results of error_rates.py."""

import math

from error_rates_pair import pair_lines, pair_summary, widened
from error_rates_sweeps import PATIENT, UNTIL, right, sweep_summary, sweep_tables

# Tables that were drawn before this day took the margin of a relative verdict for known.
RATIO_SINCE = "2026-11-28"
BY_MARGIN = "that differs by the margin"
NONE = "a rule that mprun does not have"


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
    heads = ["noise", "seeds", *(f'"grows" at {_percent(float(by))}' for by in planted)]
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
        f'| false "matches" of a mode {BY_MARGIN}, if the [noise](#tables) is *{kind}* | '
        f"{rate[f'false_matches_{kind}']} |\n"
        f'| false "worse" or "better" despite equal means, if the [noise](#tables) is *{kind}* | '
        f"{rate[f'false_claims_when_equal_{kind}']} |"
        for kind in results["noises"]
        if kind != "normal"
    )
    growing = "\n".join(
        f'| false "grows" of a gap that does not grow, if its [noise](#tables) is *{kind}* | '
        f"{rate[f'false_growth_{kind}']} |"
        for kind in results["gaps"]
    )
    gaps = "\n".join(f"- *{name}*: {text}." for name, text in results["gaps"].items())
    shifts = "\n".join(f"- *{name}*: {text}." for name, text in results["shifts"].items())
    refused = _percent(max(cell["rates"].get("refused", 0.0) for cell in results["scatter"]))
    drawn = results["drawn"]
    days = "\n".join(
        f"| {day} | {', '.join(f'`{name}`' for name in drawn if drawn[name] == day)} |"
        for day in sorted(set(drawn.values()))
    )
    estimates = "\n".join(
        f"| {n} pairs | {rate[f'inside_at_the_bar_that of {n} earlier pairs']} | {widened(n):.2f} |"
        for n in (3, 5, 10)
    )
    old = [name for name, day in drawn.items() if day < RATIO_SINCE]
    earlier = (
        f"\nThe results {', '.join(f'`{name}`' for name in old)} are older than the ratio test.\n"
        "Their margin is computed from the baseline's mean, as if this mean were exact. The ratio\n"
        "test gives nearly the same rates, if the seeds' standard deviation is at most 1 %.\n"
        if old
        else ""
    )
    return f"""# Error rates of `mprun compare`

This page shows how often verdicts are wrong, measured by simulation with the code of mprun itself.

Each case has {results["draws"]:,} draws. Each draw generates final losses of runs for a mode and
for the baseline, with a known true difference; `mprun.comparison.verdict.judge` gives the verdict.
The margin is 1 % of the baseline's mean. The losses of a mode and a baseline that share seeds have
a correlation of 0.3, all others a correlation of 0. A rate near 5 % has a standard error of
{_percent(math.sqrt(0.05 * 0.95 / results["draws"]))}.

```bash
{results["command"]}
```

The simulation took {results["seconds"]:.0f} s in one process on a CPU, with {results["versions"]}.
The file `error_rates.json` contains all results, under the following names:

| date | results computed on this date |
|---|---|
{days}
{earlier}
| claim | worst rate over all cases |
|---|---|
| false "matches" of a mode {BY_MARGIN}, with normal noise (interim looks included) | \
{rate["false_matches_normal"]} |
| false "worse" or "better" (also "likely") of a mode equal to FP32, with normal noise (interim \
looks included) | \
{rate["false_claims_when_equal_normal"]} |
| false "matches" of a mode {BY_MARGIN}, with three baseline seeds and 10 or 20 seeds of the \
mode (Welch) | \
{rate["false_matches_uneven_welch"]} |
| false "worse" or "better" of a mode equal to FP32, with three baseline seeds and 10 or 20 seeds \
of the mode | \
{rate["false_claims_when_equal_uneven_welch"]} |
| correct "matches" of a mode equal to FP32, with 5 shared seeds and losses whose standard \
deviation over seeds is 0.4 % of their mean | \
{rate["matches_when_equal_sd_0.4_n_5"]} |
| false "matches" of uncorrected tests at 3, 5 and 10 seeds ({NONE}) | \
{rate["false_matches_naive_looks"]} |
| false "worse" or "better" of uncorrected tests at 3, 5 and 10 seeds ({NONE}) | \
{rate["false_claims_when_equal_naive_looks"]} |
| sweeps with `until=decided max_seeds=10`: false "matches" of a mode {BY_MARGIN} | \
{rate["false_matches_until"]} |
| sweeps with `until=decided max_seeds=10`: false "worse" of a mode {BY_MARGIN} | \
{rate["false_worse_until"]} |
| sweeps with `until=decided max_seeds=10`: false "worse" or "better" of a mode equal to FP32 | \
{rate["false_claims_when_equal_until"]} |
| false "matches" of a mode {BY_MARGIN}, if a 5 % test follows each added seed ({NONE}) | \
{rate["false_matches_every_seed"]} |
| false "inside" of one pair of runs whose true gap equals the bar, if `compare.pair_sd` is the \
true standard deviation | \
{rate["inside_at_the_bar_the true one"]} |
| false "inside" of one pair of runs whose true gap equals the bar, if `compare.pair_sd` is half \
of the true standard deviation | \
{rate["inside_at_the_bar_half of it"]} |
{others}
{growing}

## Why a relative margin is tested as a ratio

"Within 1 % of FP32" bounds the ratio of two means, and the FP32 mean is itself uncertain. A simpler
test computes the margin from the FP32 mean and treats this mean as exact. The simpler test gives
too many wrong verdicts if seeds scatter widely but runs with equal seeds end close together. In
this case, the margin is more uncertain than the difference between mode and FP32. So mprun uses the
ratio test, which computes mode - (1 +- margin) * baseline for each seed. The interval contains all
ratios of the means that the ratio test does not reject (Fieller's interval). For normal noise, the
t statistic of mode - (1 +- margin) * baseline is exact at any correlation between mode and
baseline. Without shared seeds, mprun applies Welch's test to mode and (1 +- margin) * baseline,
which is approximate. If three baseline seeds are compared with 10 or 20 seeds of the mode, the
interval of Welch's test is too short. If the mean of the FP32 seeds cannot be distinguished from 0,
Fieller's interval does not exist, and mprun refuses the comparison. In simulations with three seeds
that scatter by 20 %, mprun refuses up to {refused} of the draws.

## How `--looks` keeps its rate

Tests at 3, then 5, then 10 seeds have three chances of a wrong claim. So `--looks 3,5,10` uses
the same stricter one-sided alpha (error rate) at every look (Pocock 1977): \
{_percent(results["nominal_alpha"])}
instead of 5 %, with intervals of \
{_percent(1 - 2 * results["nominal_alpha"])} confidence. If the
true difference equals the margin, the t statistics of nested looks have a known joint distribution.
The joint distribution depends only on the numbers of seeds, so a simulation finds the stricter
alpha (400,000 draws, fixed seed). The alpha is computed for shared seeds and also used for Welch's
test; the table shows the error rates of both. The disadvantage of interim looks is a lower rate of
"matches" at the last look, compared with a single test of 10 seeds. The advantage of interim looks
is that clear cases end early (column "seeds used").

## Sweeps that run until they are decided

`until=decided max_seeds=10` has an interim look after every seed, starting with the third. All
looks at up to n seeds together may use (n / 10)^1.5 of the 5 % error rate (Kim and DeMets 1987).
So the first looks use little of the error rate, and leave most of it for the last looks, which
decide most cases. A simulation finds the alpha of each look, as for Pocock's method. From five
seeds on, a sweep gives up a mode (adds no more seeds) if a plain 5 % test would need more than 30
seeds. Giving up can only lower the error rates, because a sweep that gives up makes no
claim. {_compared(results)}

On 29 November 2026, we compared the rates of mprun with those of an independent program. That
program assumes an exactly known margin; mprun computes the margin from the FP32 runs. The figures
are in tests/compare/test_error_rates.py. In the shares of correct verdicts, the two programs differ
by at most 0.8 percentage points. In the mean numbers of seeds, they differ by at most 0.1, except
where the independent program gives up. There it takes 0.2 to 0.4 seeds fewer than mprun.

If seeds scatter widely and runs with equal seeds end close together, `until=decided` keeps its
error rates, because each look is a ratio test. Noise that is not normal changes the rates. Interim
looks increase the effect of such noise, because a few seeds often include no bad seed. This table
shows the rates of false "matches" of a mode whose true difference equals the margin:

{_noise_lines(results)}

The final losses in MLPerf's records take only a few values. In 11 % of the draws of three seeds,
the difference between mode and baseline equals the margin for each of the three seeds.
In these draws, rounding decides which of two verdicts is given. The table above uses the ratio
test, which takes the scatter of FP32 into account. The table "Noise that is not normal" at the end
of this page is older, and treats the FP32 mean as exact.

## One pair of runs

A single pair of runs gets no verdict, because one seed says nothing about other seeds. If you know
the standard deviation (sd) of the gap over pairs of the same configuration, state it as
`compare.pair_sd`. The pair then passes a test if |gap| + 1.645 sd is less than the bar (the largest
acceptable gap). If the stated sd is true and the gaps are normally distributed, exactly 5 % of
pairs whose true gap equals the bar pass. If half of the true sd is stated,
{rate["inside_at_the_bar_half of it"]} of pairs pass instead of 5 %. An sd that is estimated from n
earlier pairs is itself random, so too many pairs pass. To return to 5 %, multiply the estimate by
the factor in this table, which replaces 1.645 by t(0.95, n - 1):

| sd estimated from | pairs that pass although the gap equals the bar | factor |
|---|---|---|
{estimates}

## Whether a gap grows

For each seed, the test computes the least-squares slope of the gap to the baseline over the last
half of the steps. A one-sided t test at 5 % decides whether the mean slope over the seeds is above
0 (`mprun.comparison.gap_growth`). Within a seed, the gap at one step predicts the gap at the next
step, so steps must not be counted as samples. Slopes of different seeds are independent, so the
test counts one slope per seed. The simulated curves have 60 points over 6,000 steps, fall from 6 to
2 nats, and scatter by 1 % over seeds. The gap between a simulated curve and the baseline has a
standard deviation of 0.05 % of the loss. If the gap grows by 0.25 % of the loss over the last half,
at least {rate["growth_of_0.25_found_n_3"]} of comparisons with three seeds report "grows".

These error rates and shares hold if the slopes are normally distributed over seeds. If the gap
falls strongly for only one seed in many, a few seeds often include no such seed. In this case, up
to {rate["false_growth_skewed slopes"]} of comparisons falsely report "grows". The rates apply to
each mode separately; the test does not correct for the number of modes. The following command
computes only the table "Growth of the gap over steps":

```bash
python benchmarks/error_rates.py --only growth --write docs
```

## Limits of these rates

- The t interval assumes that differences are normally distributed over seeds. If noise has heavy
  tails, or is equally skewed in mode and baseline (so their difference is symmetric), the rates
  above hold. If only the noise of the mode is skewed, a few seeds often include no bad seed. With
  such seeds, the mode seems better and less scattered than it is, and false "matches" reach
  {rate["false_matches_skewed mode"]}. False "matches" are more frequent if the loss of the mode is
  the baseline's loss for the same seed plus a skewed amount. The rate of false "matches" reaches
  {rate["false_matches_exponential difference"]} if the amount is exponential, and
  {rate["false_matches_skewed difference"]} if it is lognormal (sigma 1). The rate increases with
  the skewness without a limit, for any size of the margin. If runs are drawn from published
  references of MLPerf Training, false "matches" reach {rate["false_matches_MLPerf records"]}.
- **Rare bad seeds defeat any test of few seeds.** Suppose that one seed in ten ends 10 % worse, and
  the other nine are as good as FP32. The mean of the mode then differs from FP32 by 1 %, the
  margin. Up to {rate["false_matches_rare bad seeds"]} of comparisons report "matches", because the
  seeds that were run include no bad seed. Bad seeds that meet the divergence rule count as
  diverged; finding less extreme ones takes more seeds.
- From seven shared seeds on (or four seeds each, if seeds differ), a permutation test checks each
  claim. The permutation test does not assume normal noise. If the permutation test does not
  confirm a claim, the verdict says so ("not confirmed" in the table "Noise that is not normal").
  The permutation test rarely rejects a correct claim, but it detects only few wrong claims. No test
  of the same seeds can detect the other wrong claims.
- A verdict describes final losses and the noise over seeds. The verdict does not cover other
  seeds, data or training lengths.
- In a comparison of several modes, each mode has an error rate of 5 %. If ten modes truly differ
  by the margin, four in ten comparisons contain a false "matches" (1 - 0.95^10, if the modes were
  independent).

## Tables

"true 0", "true 1 %" (the margin) and "true 2 %" are true differences of the means. (L)W counts
"worse" and "likely worse" together, and (L)B counts "better" and "likely better".

The column "seed sd" is the standard deviation of the noise over seeds. The simulation uses these
kinds of noise:

{noises}

In the table "Seeds that scatter more than their differences", the mode is worse than the baseline
in one of two ways (column "shift"):

{shifts}

In the table "Growth of the gap over steps", the gap has one of four kinds of noise from step to
step. The column for a growth of 0.00 % shows the rate of false alarms:

{gaps}

{markdown(results)}

### Sweeps until decided, and other rules on the same draws

Each entry contains the share of draws that end with the verdict in the column head, and the mean
number of seeds used. Each column shows one true difference between mode and baseline. In tables
with two standard deviations, the mode is worse by the same amount for every seed. The exception is
the table below the words "by the same share". A test after every seed is only for comparison.

{sweep_tables(results)}

### One pair of runs with a stated scatter

The bars in this table are multiples of the true standard deviation (sd) of a pair's gap. Pairs that
pass although the gap equals the bar are errors, and pairs that pass without a gap are correct.

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
    return f"""Giving up costs at most {lost_words:.1f} percentage points of
correct verdicts. Giving up costs most if the difference between runs with equal seeds has a
standard deviation of {_percent(lost["sd"])} and a mean of {lost["true"]:g} %. If the true
difference equals the margin, few sweeps reach a verdict. They stop after {saved[1]:.1f} seeds on
average; a sweep that never gives up takes {saved[0]:.1f}."""


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

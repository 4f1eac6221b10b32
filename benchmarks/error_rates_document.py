"""The tables and sentences of docs/error_rates.md, from the results of error_rates.py."""

import math

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
    uneven = [cell for cell in results["scatter"] if "shift" not in cell]
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
    days = "; ".join(f"{name} on {day}" for name, day in drawn.items())
    old = [name for name, day in drawn.items() if day < RATIO_SINCE]
    earlier = (
        "\nDrawn when a margin was computed from the baseline's mean and taken for known, which\n"
        f"is nearly the same where seeds scatter by at most 1 %: {', '.join(old)}.\n"
        if old
        else ""
    )
    return f"""# Error rates of `mprun compare`

Simulated through the shipped code: each of {results["draws"]:,} draws a cell fills two arms of runs
with final losses of known truth and asks `mprun.comparison.verdict.judge` for the verdict. Margin
1 % of the baseline's mean, correlation 0.3 between arms that share seeds, 0 between those that do
not.
One standard error of a rate near 5 % is {_percent(math.sqrt(0.05 * 0.95 / results["draws"]))}.

    {results["command"]}

{results["versions"]}; CPU only, {results["seconds"]:.0f} s in one process. The same
numbers are in `error_rates.json`. Tables drawn: {days}.
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
{others}
{growing}

## Why a relative margin is tested as a ratio

"Within 1 % of FP32" bounds a ratio of two means, and FP32's mean is known no better than its seeds
allow. Where equal seeds end nearly alike, but seeds scatter, a margin that is computed from that
mean and then taken for known is wrong by more than the differences are: at a true difference of the
margin it moves with the seeds. The test is therefore of own - (1 +- margin) * base for each seed,
and the interval is Fieller's, the ratios that this test does not reject. The t statistic of such a
combination is exact for normal noise at any correlation ("scatter" in the tables). Welch's test is
approximate: it is of the same two combinations, and with three seeds against many it is too short.
Where FP32's mean cannot be told from 0 there is no such interval, and the comparison is refused: up
to {refused} of the draws there, three seeds that scatter by 20 %.

## How `--looks` keeps its rate

A test at 3, then 5, then 10 seeds has three chances of a wrong claim. `--looks 3,5,10`
therefore tests every look at the same stricter one-sided alpha (Pocock 1977),
{_percent(results["nominal_alpha"])} instead of 5 %, with intervals of \
{_percent(1 - 2 * results["nominal_alpha"])} confidence. At a
true difference equal to the margin the t statistics of nested looks have a joint distribution that
depends only on the numbers of seeds, so this alpha is found by simulating it (400,000 draws, fixed
seed). It is derived for shared seeds and also used for Welch; the table shows its rates there. The
price is a lower rate of "matches" at the last look than a fixed test of 10 seeds has; the gain is
that clear cases end early (column "seeds used").

## Whether a gap grows

The test takes each seed's least-squares slope of the gap to the baseline over the last half of the
steps. One t test of these slopes is one-sided at 5 % (`mprun.comparison.gap_growth`). Within a seed
the gap at one step predicts the next one, so no test may count steps. Slopes of separate seeds are
independent, and the test counts only these. The table at the end has gaps of 60 points over 6,000
steps with a standard deviation of 0.05 % of the loss, on curves that fall from 6 to 2 nats and
scatter by 1 % over seeds. A growth of 0.25 % of the loss over the last half is found in at least
{rate["growth_of_0.25_found_n_3"]} of comparisons with three seeds. The rates hold for slopes that
are normal over seeds. If one seed in many falls much, a few seeds often contain none of these, and
up to {rate["false_growth_skewed slopes"]} of comparisons report "grows". The rate is that of one
mode; nothing is corrected for their number. This table alone:

    python benchmarks/error_rates.py --only growth --write docs

## What this does not say

- The t interval assumes that differences are normal over seeds. If only tails are heavy, or both
  arms are skewed alike (their difference is symmetric), the rates above hold and only power
  changes. If only the mode is skewed, a few seeds often contain no bad one. They then look better,
  and more alike, than the mode is: false "matches" up to \
{rate["false_matches_skewed mode"]}. Where equal seeds end alike but for a skewed loss of the
  mode it is more: up to {rate["false_matches_exponential difference"]} if that is exponential,
  up to {rate["false_matches_skewed difference"]} if it is lognormal (sigma 1). The rate grows with
  the skew without a limit, whatever its size beside the margin. Runs drawn from published
  references of MLPerf Training: up to \
{rate["false_matches_MLPerf records"]}.
  **Rare bad seeds defeat any test of few seeds**: if one seed in ten ends 10 % worse and nine are
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
"""


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

"""The table of error_rates.py for one pair of runs whose scatter is stated."""

import numpy as np
from error_rates_draws import MARGIN, MEAN
from scipy.special import stdtrit

from mprun.comparison.equivalence import ALPHA
from mprun.comparison.findings import Question
from mprun.comparison.one_pair import QUANTILE
from mprun.comparison.verdict import judge

# Bars in true standard deviations of a pair's gap: where the gap is the bar, and where it is 0.
AT_BAR, EQUAL = (3, 6), (3, 4.3, 6)


def widened(pairs: int) -> float:
    """Return by what to multiply the scatter of so many earlier pairs, which is itself a draw."""
    return float(stdtrit(pairs - 1, 1 - ALPHA)) / QUANTILE


STATED = {  # number of earlier pairs (None: the true scatter), and a factor
    "the true one": (None, 1.0),
    "half of it": (None, 0.5),
    "twice it": (None, 2.0),
    **{f"that of {n} earlier pairs": (n, 1.0) for n in (3, 5, 10)},
    **{f"{widened(n):.2f} times that of {n} earlier pairs": (n, widened(n)) for n in (3, 5, 10)},
}


def inside(bar: float, true: int, stated: tuple[int | None, float], draws: int, arms) -> float:
    """Return how often a pair is said to be inside the bar, at 5 %.

    bar: in true standard deviations. true: the gap's mean, in bars.
    """
    pairs, factor = stated
    generator = np.random.default_rng(list(repr((bar, true, stated)).encode()))
    sd = MARGIN / bar
    gaps = true * MARGIN + sd * generator.standard_normal(draws)
    scatter = np.full(draws, sd)
    if pairs:
        scatter *= np.sqrt(generator.chisquare(pairs - 1, draws) / (pairs - 1))
    own, base = arms
    base.runs[0].evals["loss"][0] = MEAN
    found, how = 0, {"metric": "loss", "margin_setting": MARGIN}
    for gap, said in zip(gaps.tolist(), (factor * scatter).tolist(), strict=True):
        own.runs[0].evals["loss"][0] = MEAN * (1 + gap)
        verdict, _ = judge(own, base, Question(pair_sd=said, **how))
        found += verdict.facts["test"]["inside"]
    return found / draws


def pair_table(draws: int, arms) -> list[dict]:
    """Return a cell a stated scatter; arms: two of one run each, of the same seed."""
    return [
        {
            "stated": name,
            "at_bar": {str(bar): inside(bar, 1, stated, draws, arms) for bar in AT_BAR},
            "equal": {str(bar): inside(bar, 0, stated, draws, arms) for bar in EQUAL},
        }
        for name, stated in STATED.items()
    ]


def pair_summary(results: dict) -> dict[str, float]:
    """Return the worst rate of "inside" at the bar, for each stated scatter."""
    return {
        f"inside_at_the_bar_{cell['stated']}": max(cell["at_bar"].values())
        for cell in results["pair"]
    }


def _in_words(stated: str) -> str:
    """Return the cell of a table for a name in `STATED`."""
    words = {"half of it": "half the true one", "twice it": "twice the true one"}
    said = words.get(stated, stated).replace("times that of", "times the estimate from")
    return said.replace("that of", "estimated from")


def pair_lines(results: dict) -> str:
    """Format the table."""
    heads = [
        "stated standard deviation",
        *(f"pairs that pass: gap equals the bar of {bar} sd" for bar in AT_BAR),
        *(f"pairs that pass: no gap, bar of {bar} sd" for bar in EQUAL),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for cell in results["pair"]:
        shares = [*cell["at_bar"].values(), *cell["equal"].values()]
        row = [_in_words(cell["stated"]), *(f"{100 * share:.2f} %" for share in shares)]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def seeds_page_rows(results: dict) -> list[str]:
    """Return the rows of docs/how_many_seeds.md: what a stated scatter is worth."""
    heads = ["stated standard deviation", "pairs that pass: gap equals the bar"]
    heads.append("pairs that pass: no gap, bar of 4.3 sd")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for cell in results["pair"]:
        shares = cell["at_bar"]["6"], cell["equal"]["4.3"]
        row = [_in_words(cell["stated"]), *(f"{100 * share:.1f} %" for share in shares)]
        lines.append("| " + " | ".join(row) + " |")
    return lines

"""Tables of error_rates.py for sweeps that look after every seed, and for one pair of runs.

A draw of a sweep is ten seeds of both arms. Every rule tests the same draws by the functions that
`mprun compare` tests with, `equivalence.estimate` and `equivalence.decide`, at its own alphas.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from error_rates_draws import CORRELATION, MARGIN, final_losses, paired_losses

from mprun.comparison.decision import CONCLUSIVE
from mprun.comparison.equivalence import ALPHA, Interval, decide, estimate
from mprun.comparison.looks import hopeless, nominal_alpha, spent_alphas

FIRST, MOST = 3, 10
LOOKS = (3, 5, 10)
SHIFTED = {"additive": "amount", "scaled": "share of the baseline's loss"}
SEED_SD = 0.01  # of the baseline; the differences of equal seeds have their own
UNTIL = "until=decided"
PATIENT = "until=decided, never giving up"
RULES = {  # the alpha of each look
    "3 seeds": {3: ALPHA},
    "5 seeds": {5: ALPHA},
    "10 seeds": {10: ALPHA},
    "a test after every seed (not offered)": dict.fromkeys(range(FIRST, MOST + 1), ALPHA),
    "`--looks 3,5,10`": dict.fromkeys(LOOKS, nominal_alpha(LOOKS)),
    PATIENT: dict(zip(range(FIRST, MOST + 1), spent_alphas(FIRST, MOST), strict=True)),
}
NOISES = (
    "heavy tails",
    "skewed mode",
    "exponential difference",
    "skewed difference",
    "MLPerf records",
    "rare bad seeds",
)
Found = tuple[str, int]  # a word, and the seeds that were used


class Draw:
    """The seeds of a mode and of the baseline, tested at 5 % once for all rules."""

    def __init__(self, own: Sequence[float], base: Sequence[float]) -> None:
        self.values = own, base
        self._usual: dict[int, tuple[Interval, str]] = {}

    def usual(self, count: int) -> tuple[Interval, str]:
        """Return the interval of the first seeds at ALPHA, and its word."""
        if count not in self._usual:
            self._usual[count] = self.tested(count, ALPHA)
        return self._usual[count]

    def tested(self, count: int, alpha: float) -> tuple[Interval, str]:
        """Return the interval of the first seeds, and its word."""
        own, base = (values[:count] for values in self.values)
        interval = estimate(own, base, "paired", True, alpha)
        return interval, decide(interval, MARGIN)


def swept(draw: Draw, alphas: dict[int, float]) -> list[Found]:
    """Return what a rule says, and what it says if it gives up where `hopeless` does.

    Words that decide nothing are "undecided". A stricter interval contains the usual one, so it is
    asked only where that one decides.
    """
    stopped = None
    for count, alpha in alphas.items():
        interval, word = draw.usual(count)
        if word in CONCLUSIVE and alpha < ALPHA:
            _, word = draw.tested(count, alpha)
        if word in CONCLUSIVE:
            return [(word, count), stopped or (word, count)]
        if stopped is None and count < MOST and hopeless(interval, MARGIN, MOST):
            stopped = "undecided", count
    last = "undecided", max(alphas)
    return [last, stopped or last]


def sweep_rates(values: tuple[np.ndarray, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return of each rule the share of each word, and "seeds", the mean number that it used.

    values: float64 [draws, MOST] of the mode and of the baseline.
    """
    found: dict[str, Counter] = {rule: Counter() for rule in (*RULES, UNTIL)}
    for own, base in zip(*(arm.tolist() for arm in values), strict=True):
        draw = Draw(own, base)
        for rule, alphas in RULES.items():
            patient, giving_up = swept(draw, alphas)
            found[rule][patient] += 1
            if rule == PATIENT:
                found[UNTIL][giving_up] += 1
    return {rule: _shares(counted) for rule, counted in found.items()}


def _shares(counted: Counter) -> dict[str, float]:
    draws = counted.total()
    words = Counter()
    for (word, _), times in counted.items():
        words[word] += times
    seeds = sum(count * times for (_, count), times in counted.items()) / draws
    return {word: words[word] / draws for word in (*CONCLUSIVE, "undecided")} | {"seeds": seeds}


def sweeps_table(draws: int) -> list[dict]:
    """Return cells of normal noise; `sd` is that of the difference of equal seeds."""
    cells = [
        {"seed_sd": SEED_SD, "sd": sd, "shift": "additive", "true": true}
        for sd in (0.002, 0.004, 0.006, 0.01, 0.015)
        for true in ((0, 0.5, 1, 2) if 0.002 < sd < 0.015 else (0, 1))
    ]
    cells += [
        {"seed_sd": seed_sd, "sd": sd, "shift": shift, "true": true}
        for seed_sd, sd, shift in (
            (0.1, 0.0005, "additive"),
            (0.2, 0.0001, "additive"),
            (0.1, 0.0005, "scaled"),
        )
        for true in (0, 1)
    ]
    for cell in cells:
        how = cell["seed_sd"], MOST, draws, cell["shift"], cell["sd"]
        cell["rates"] = sweep_rates(paired_losses(cell["true"], *how))
    return cells


def sweep_noise_table(draws: int) -> list[dict]:
    cells = [{"noise": kind, "true": true} for kind in NOISES for true in (0, 1)]
    for cell in cells:
        how = 0.004, (MOST, MOST), draws, cell["noise"], CORRELATION
        cell["rates"] = sweep_rates(final_losses(cell["true"], *how))
    return cells


def correlated_table(draws: int) -> list[dict]:
    """Return cells of normal noise whose arms share so much of it; `sd` is that of the seeds."""
    cells = [
        {"sd": sd, "correlation": correlation, "true": true}
        for sd in (0.004, 0.05)
        for correlation in (0.5, 0.9, 0.99)
        for true in (0, 1)
    ]
    for cell in cells:
        how = cell["sd"], (MOST, MOST), draws, "normal", cell["correlation"]
        cell["rates"] = sweep_rates(final_losses(cell["true"], *how))
    return cells


def sweep_summary(results: dict) -> dict[str, float]:
    """Return the worst rates of wrong words of sweeps until decided."""
    cells = results["sweeps"] + results["correlated"]
    at_margin = [cell["rates"] for cell in cells if cell["true"] == 1]
    equal = [cell["rates"] for cell in cells if cell["true"] == 0]
    naive = "a test after every seed (not offered)"
    return {
        "false_matches_until": max(found[UNTIL]["matches"] for found in at_margin),
        "false_worse_until": max(found[UNTIL]["worse"] for found in at_margin),
        "false_matches_patient": max(found[PATIENT]["matches"] for found in at_margin),
        "false_worse_patient": max(found[PATIENT]["worse"] for found in at_margin),
        "false_claims_when_equal_until": max(
            max(found[UNTIL]["worse"], found[UNTIL]["better"]) for found in equal
        ),
        "false_matches_fixed": max(
            found[f"{count} seeds"]["matches"] for found in at_margin for count in (3, 5, 10)
        ),
        "false_matches_every_seed": max(found[naive]["matches"] for found in at_margin),
        **{
            f"false_matches_until_{kind}": cell["rates"][UNTIL]["matches"]
            for kind in NOISES
            for cell in results["sweep_noise"]
            if (cell["noise"], cell["true"]) == (kind, 1)
        },
    }


def right(cell: dict, rule: str) -> float:
    """Return the share of the right word; at the margin that of the wrong one, "matches"."""
    return cell["rates"][rule]["worse" if cell["true"] > 1 else "matches"]


def sweep_tables(results: dict) -> str:
    """Format the tables: a row a rule, a column a truth."""
    lines = []
    settings = dict.fromkeys((c["seed_sd"], c["sd"], c["shift"]) for c in results["sweeps"])
    for setting in settings:
        cells = [c for c in results["sweeps"] if (c["seed_sd"], c["sd"], c["shift"]) == setting]
        seed_sd, sd, shift = setting
        lines += ["", f"Over seeds, the losses have a standard deviation of {100 * seed_sd:g} % of"]
        lines[-1] += " their mean. For the difference between mode and baseline with the same seed,"
        lines[-1] += f" it is {_percent(sd)}"
        if seed_sd != SEED_SD:
            lines[-1] += ". If the true difference equals the margin, every seed of the mode also"
            lines[-1] += f" ends higher by the same {SHIFTED[shift]}"
        lines[-1] += ":"
        lines += ["", *_rows(cells)]
    for sd, shared in dict.fromkeys((c["sd"], c["correlation"]) for c in results["correlated"]):
        cells = [c for c in results["correlated"] if (c["sd"], c["correlation"]) == (sd, shared)]
        known = f"{_percent(sd)} of their mean. Mode and baseline have a correlation of {shared:g}"
        lines += ["", f"Over seeds, the losses have a standard deviation of {known}:", ""]
        lines += _rows(cells)
    for kind in NOISES:
        cells = [cell for cell in results["sweep_noise"] if cell["noise"] == kind]
        lines += ["", f"The [noise](#tables) over seeds is *{kind}*, with a standard deviation of"]
        lines[-1] += " 0.4 % of the mean loss:"
        lines += ["", *_rows(cells)]
    return "\n".join(lines).strip()


def _rows(cells: list[dict]) -> list[str]:
    names = {0: "0", 0.5: "half the margin", 1: "the margin", 2: "twice the margin"}
    words = {0: '"matches"', 0.5: '"matches"', 1: 'false "matches"', 2: '"worse"'}
    truths = [c["true"] for c in cells]
    heads = ["rule", *(f"true difference = {names[t]}: {words[t]} / seeds used" for t in truths)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for rule in (*RULES, UNTIL):
        row = [f"{_percent(right(c, rule))} / {c['rates'][rule]['seeds']:.1f}" for c in cells]
        lines.append("| " + " | ".join([rule, *row]) + " |")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def seeds_page_rows(results: dict) -> list[str]:
    """Return the rows of docs/how_many_seeds.md: how often the right word comes."""
    heads = ["sd of the difference at equal seeds", "true difference", "correct verdict"]
    heads += ["3 seeds", "5 seeds", "10 seeds", "`--looks 3,5,10`", f"`{UNTIL}`"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    truths = {0: ("none", "matches"), 0.5: ("half the margin", "matches")}
    truths[2] = ("twice the margin", "worse")
    cells = [c for c in results["sweeps"] if c["seed_sd"] == SEED_SD and c["true"] in truths]
    for cell in sorted(cells, key=lambda c: (c["true"], c["sd"])):
        row = [f"{cell['sd'] / MARGIN:g} x margin", *truths[cell["true"]]]
        for rule in ("3 seeds", "5 seeds", "10 seeds"):
            row.append(f"{right(cell, rule):.0%}")
        for rule in ("`--looks 3,5,10`", UNTIL):
            row.append(f"{right(cell, rule):.0%} / {cell['rates'][rule]['seeds']:.1f}")
        lines.append("| " + " | ".join(row).replace("%", " %") + " |")
    return lines

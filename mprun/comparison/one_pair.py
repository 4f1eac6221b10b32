"""Compare one run of a mode with one of the baseline, of the same seed: facts, and no verdict.

No interval from within one run is shown. It covers no effect of a mode: it sees 1/7 to 1/28 of the
scatter between equal runs, however many steps it has. One test is sound, for who knows from
elsewhere how the gap of a pair scatters: |gap| + 1.645 sd < bar holds for at most 5 % of pairs
whose true gap is the bar.
"""

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

import numpy as np

from mprun.comparison.equivalence import ALPHA
from mprun.comparison.findings import Question, RunData
from mprun.comparison.wording import number_of, signed, suffix

QUANTILE = NormalDist().inv_cdf(1 - ALPHA)  # 1.645
CHOSEN_AFTER = "--pair-sd, chosen after the runs"
_NOT_SEEN = (
    "Not seen: how other seeds would shift it; a flat gap is no evidence (intervals from within "
    "one run held 0 in 6 to 13 % of 703 pairs of equal runs, not in 90 %)"
)


def pair_facts(
    own: RunData, base: RunData, question: Question, outcome: tuple[float, float]
) -> dict[str, Any]:
    """Return what one run of each tells; docs/reference/run_directory.md names the fields.

    outcome: own - base of the judged values, positive is worse, and the baseline's. A loss is held
    against the bar over the last tenth of the training, where one evaluation scatters more; another
    metric of an evaluation by its outcome.
    """
    facts: dict[str, Any] = {"seed": own.seed if question.by_seed else None}
    hashes = own.keys.get("data.sha256"), base.keys.get("data.sha256")
    facts |= {"same_data": hashes[0] is not None and hashes[0] == hashes[1]}
    facts |= _beginning(own, base, question) | _window(own, base, question)
    by_loss = own.foreign or question.metric == "loss" or question.as_logarithm
    of, gap, whole = question.metric, outcome[0], abs(outcome[1])
    if by_loss and facts["steps"] is not None:
        of, gap, whole = facts["of"], facts["difference"], facts["level"]
    facts |= {"bar": None, "test": None, "no_test": _why_no_test(own, base, question)}
    if whole or not question.relative:
        gap, size = gap / whole if question.relative else gap, question.margin_setting
        facts["bar"] = {"of": of, "gap": gap, "size": size, "inside": abs(gap) < size}
        if facts["no_test"] is None:
            facts["test"] = _test(gap, size, _scatter(own, question))
    return facts


def _beginning(own: RunData, base: RunData, question: Question) -> dict[str, Any]:
    """Return whether the recorded curves are equal, and the gap at their first common step."""
    columns = (run.evals if run.foreign else run.train for run in (own, base))
    names, nothing = ("step", question.metric if own.foreign else "loss"), np.empty(0)
    (steps, ours), (base_steps, theirs) = ([of.get(n, nothing) for n in names] for of in columns)
    steps, at, base_at = np.intersect1d(steps, base_steps, return_indices=True)
    ours, theirs = ours[at], theirs[base_at]
    facts = {
        "compared": len(steps),
        "identical": bool(np.array_equal(ours, theirs, equal_nan=True)),
    }
    known = np.flatnonzero(np.isfinite(ours) & np.isfinite(theirs))
    if not len(known):
        return facts | {"first_step": None, "first": None}
    gap = float(ours[known[0]] - theirs[known[0]])
    gap = -gap if own.foreign and question.higher_is_better else gap
    return facts | {"first_step": float(steps[known[0]]), "first": gap}


def _window(own: RunData, base: RunData, question: Question) -> dict[str, Any]:
    """Return the mean gap over the last tenth of the records, at the steps that both runs have.

    Of a foreign log these are the steps at which it is judged. A GAN has none: the difference of
    its losses says nothing.
    """
    foreign = own.foreign
    facts: dict[str, Any] = {"of": question.metric if foreign else "training loss", "steps": None}
    if question.gan:
        return facts
    if foreign:
        steps, arms = (
            own.judged,
            [(run.evals["step"], run.evals[facts["of"]]) for run in (own, base)],
        )
        steps = np.empty(0) if steps is None else steps
        ours, theirs = (values[np.isin(at, steps)] for at, values in arms)
        skipped = np.zeros(len(steps), bool)
    else:
        steps, at, base_at = np.intersect1d(own.last_steps, base.last_steps, return_indices=True)
        ours, theirs = own.last_losses[at], base.last_losses[base_at]
        skipped = own.last_skips[at] | base.last_skips[base_at]
    with np.errstate(all="ignore"):
        if foreign and question.as_logarithm:
            ours, theirs = np.log(ours), np.log(theirs)
        kept = np.isfinite(ours) & np.isfinite(theirs) & ~skipped
        gaps = ours[kept] - theirs[kept]
        gaps = -gaps if foreign and question.higher_is_better else gaps
        if not len(gaps):
            return facts
        around = gaps - gaps.mean()
        spread, count = float(around @ around), len(gaps)
        lag1 = float(around[1:] @ around[:-1]) / spread if spread else None
    facts["steps"] = {
        "count": count,
        "first": float(steps[kept][0]),
        "last": float(steps[kept][-1]),
        "left_out": len(steps) - count,
        "sd": math.sqrt(spread / (count - 1)) if count > 1 else None,
        "lag1": lag1,
    }
    quarters = [float(part.mean()) for part in np.array_split(gaps, 4)] if count > 3 else []
    facts |= {"difference": float(gaps.mean()), "level": abs(float(theirs[kept].mean()))}
    return facts | {"quarters": quarters}


def _stated(run: RunData) -> tuple[Any, Any]:
    sd = run.keys.get("compare.pair_sd")
    stated = isinstance(sd, float | int) and 0 < sd < math.inf
    return (sd, run.keys.get("compare.pair_sd_source")) if stated else (None, None)


def _why_no_test(own: RunData, base: RunData, question: Question) -> str | None:
    """Return why the records state a scatter that is not used; None if they state none, too."""
    said = [_stated(own), _stated(base)]
    if question.pair_sd is not None or not any(sd for sd, _ in said):
        return None
    if said[0] != said[1]:
        told = " and ".join("null" if sd is None else f"{sd} ({source})" for sd, source in said)
        return f"compare.pair_sd is {told}: must be equal in both records"
    if not question.as_recorded:
        return "compare.pair_sd is of the recorded compare.metric and margin; give --pair-sd"
    return None


def _scatter(own: RunData, question: Question) -> dict[str, Any] | None:
    """Return the stated sd of a pair's gap, its source, and whether it stood before the runs."""
    if question.pair_sd is not None:
        return {"sd": question.pair_sd, "source": CHOSEN_AFTER, "fixed": False}
    sd, source = _stated(own)
    return {"sd": sd, "source": str(source), "fixed": True} if sd else None


def _test(gap: float, bar: float, scatter: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `scatter` with the gap's upper bound at 5 %, and whether it is inside the bar.

    A pair whose true gap is the bar, with such a normal scatter, is inside in 5 % of cases.
    """
    if scatter is None:
        return None
    bound = abs(gap) + QUANTILE * scatter["sd"]
    return scatter | {"bound": bound, "inside": bound < bar}


def decided(facts: dict[str, Any]) -> bool:
    """Return whether `--check` may pass: a scatter that was fixed before the runs shows it."""
    test = facts.get("test")
    return bool(test and test["fixed"] and test["inside"])


def pair_lines(facts: dict[str, Any], question: Question) -> Iterator[str]:
    """Yield `pair_facts` in words: which pair, its gap and the bar, what is not seen, the test."""
    about = [f"seed {facts['seed']}"] * (facts["seed"] is not None)
    about += ["same data"] * facts["same_data"]
    if facts["identical"] and facts["compared"]:
        about.append(f"equal at all {number_of(facts['compared'], 'compared step')}, bit for bit")
    elif facts["first"] is not None:
        apart = f"{facts['first']:+.2g} at step {facts['first_step']:g}"
        about.append(apart if facts["first"] else "equal first step")
    known = f" ({', '.join(about)})" * bool(about)
    yield f"one pair{known}: facts, no verdict."
    yield "; ".join(_gaps(facts, question)) + "."
    yield f"{_NOT_SEEN}; three {question.counted}s of each give a verdict."
    if (test := facts["test"]) is not None:
        unit, factor = suffix(question), question.factor
        bar, sd, gap, bound = (
            f"{factor * value:.4g}"
            for value in (facts["bar"]["size"], test["sd"], abs(facts["bar"]["gap"]), test["bound"])
        )
        shown = f"Inside {bar}{unit} at 5 %" if test["inside"] else f"Not shown inside {bar}{unit}"
        yield (
            f"{shown} if the scatter of pairs is {sd}{unit} ({' '.join(test['source'].split())}): "
            f"{gap} + {QUANTILE:.3f} * {sd} = {bound}{unit}."
        )
    if facts["no_test"] is not None:
        yield f"No test: {facts['no_test']}."


def _gaps(facts: dict[str, Any], question: Question) -> Iterator[str]:
    """Yield the parts of the second line."""
    bar, steps, unit = facts["bar"], facts["steps"], suffix(question)
    margin, factor = question.margin_setting, question.factor
    by_steps = steps is not None and (bar is None or bar["of"] == facts["of"])
    if steps is not None:
        yield _over_steps(facts, question, by_steps)
    elif not question.gan:
        yield f"At no step of the last tenth did both runs record a finite {facts['of']}"
    if bar is None:
        yield "no bar: it is relative to 0"
        return
    turned = " (positive is worse)" * question.higher_is_better
    if not by_steps:
        gap = signed(bar["gap"], margin, [bar["gap"]], factor)
        several = f"last {question.window} evaluations" if question.window > 1 else ""
        yield f"{bar['of']} of the {several or 'final evaluation'} {gap}{unit}{turned}"
    away = abs(margin - abs(bar["gap"]))
    away_text = signed(away, margin, [away], factor).lstrip("+")
    side = "inside" if bar["inside"] else "outside"
    yield f"bar {factor * margin:g}{unit}: this gap is {side} by {away_text}{unit}"


def _over_steps(facts: dict[str, Any], question: Question, by_bar: bool) -> str:
    """Return the gap over the last tenth with its quarters; by_bar: in the bar's unit first."""
    steps, level, gap = facts["steps"], facts["level"], facts["difference"]
    # Of another metric the bar tells no digits of the training loss.
    size, relative = (question.margin_setting, question.relative) if by_bar else (0.01, True)
    forms = [(1.0, size * level if relative and level else size, "")]  # factor, digits of, unit
    if level:
        forms.append((100 / level, 100 * (size if relative else size / level), " %"))
    first, *more = reversed(forms) if relative else forms
    factor, digits, unit = first
    texts = [signed(own * gap, of, [own * gap]) + name for own, of, name in (first, *more)]
    quarters = [factor * part for part in facts["quarters"]]
    count = number_of(steps["count"], "matched step")
    without = f", without {steps['left_out']} skipped or not finite" * bool(steps["left_out"])
    where = f"{count}, {steps['first']:,.12g} to {steps['last']:,.12g}{without}"
    beside = f" ({texts[-1]})" * len(more)
    text = f"Over the last tenth of the records ({where}): {facts['of']} {texts[0]}{beside}"
    told = " ".join(signed(part, digits, quarters) for part in quarters)
    text += f", its quarters {told}{unit}" * bool(quarters)
    return text + " (positive is worse)" * (question.higher_is_better and by_bar)

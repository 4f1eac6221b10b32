"""Put a decision into words: the sentence of a verdict, part by part in the order of reading."""

import math
from collections.abc import Iterator

from mprun.comparison.decision import CONCLUSIVE, Decision, Look, Tested, TooFew, Values
from mprun.comparison.equivalence import (
    MOST_SEEDS,
    Interval,
    outlier,
    seeds_needed,
)
from mprun.comparison.findings import Outcome, Question
from mprun.comparison.looks import level_after_a_test
from mprun.comparison.one_pair import pair_lines
from mprun.comparison.wording import number_of, signed, size_text, suffix

ROUNDING = 1e-6  # of the margin: below it a difference is that of rounding, not worth a word


def sentence_of(decision: Decision) -> str:
    """Return all that is said of a mode: what was found, then what limits it.

    Of one pair of runs it is several lines.
    """
    return ("\n" if decision.facts else " ").join(_parts(decision))


def _parts(decision: Decision) -> Iterator[str]:
    result = decision.result
    if result is None:
        yield _beforehand(decision)
        return
    if decision.facts:
        yield from pair_lines(decision.facts, decision.question)
    elif isinstance(result, TooFew):
        yield from _too_few(result)
    else:
        yield from _tested(result, decision.look)
        if decision.look is not None:
            at_look = _of_sweep if decision.look.spending else _at_look
            yield at_look(decision.look, result.name)
        elif decision.needed:
            yield _after_a_test(result.values, decision.needed)
    if without := without_partner(decision):
        yield f"Left out, {without}."
    if (other := decision.unpaired) is not None:
        found = difference_text(other.interval, decision.question, other.margin.size)
        yield f"Over all, unpaired: {other.name}, {found}."
    if decision.left_out:
        yield f"Left out: {'; '.join(decision.left_out)}."


def _beforehand(decision: Decision) -> str:
    """Say why no test was needed."""
    (own, base), reference = decision.ends, decision.arms[1].reference
    bad, bad_base = ([o for o in arm if o.diverged is not None] for arm in (own, base))
    of_own = f"diverged in {len(bad)} of {len(own)} runs"
    if decision.name == "diverged":
        return f"{of_own} ({_first(bad)}). {reference} diverged in 0 of {len(base)}."
    if decision.name == "not assessed":
        return (
            f"not assessed: the {decision.question.metric} of a GAN does not measure the quality "
            "of its samples; runs with compare.metric=sliced_wasserstein are judged "
            "(docs/sample_metric.md)."
        )
    if decision.unlearned is not None:
        return (
            f"{reference} itself learned next to nothing ({decision.unlearned}): agreement would "
            "say nothing; train longer or fix the recipe."
        )
    return (
        f"{reference} itself diverged in {len(bad_base)} of {len(base)} runs "
        f"({_first(bad_base)}); fix the recipe first. This mode {of_own}."
    )


def _first(diverged: list[Outcome]) -> str:
    first = min(diverged, key=lambda o: math.inf if o.step is None else o.step)
    return f"first at step {'unknown' if first.step is None else first.step}: {first.diverged}"


def _too_few(found: TooFew) -> Iterator[str]:
    values, question = found.values, found.values.question
    yield f"inconclusive: needs at least {found.wanted} {question.counted}s (has {values.fewest})."
    if found.margin is not None and found.difference is not None:
        difference = found.difference / found.margin.whole
        so_far = signed(difference, found.margin.size, [difference], question.factor)
        turned = " (positive is worse)" if question.higher_is_better else ""
        yield f"Difference so far: {so_far}{suffix(question)}{turned}."


def _tested(found: Tested, look: Look | None) -> Iterator[str]:
    values, question, remedy = found.values, found.values.question, None
    if look is not None:
        following = look.following
        remedy = (
            f"wait for the look at {following} seeds" if following else "this was the last look"
        )
        if look.hopeless is not None:
            remedy = f"needs about {look.hopeless:,} seeds"
    margin, reference = found.margin.size, values.arms[1].reference
    yield sentence(found.name, found.interval, margin, question, reference, remedy)
    counted = number_of(values.fewest, question.counted)
    if found.least is not None:
        least = size_text(question, found.least, margin)
        yield f"{counted} with this scatter can show no margin below ±{least}."
    if found.unconfirmed is not None:
        yield (
            "Not confirmed by a permutation test, which does not assume that noise is normal: "
            f"p = {100 * found.unconfirmed:.2g} % for what is claimed at {100 * found.alpha:.2g} "
            f"%; run more {question.counted}s."
        )
    yield from _strange(values)


def _at_look(look: Look, name: str) -> str:
    """Say which look of the plan it was, and what the plan still has."""
    text, rest = f"Look at {look.at} seeds of the plan {', '.join(map(str, look.plan))}", ""
    unused = number_of(look.available - look.at)
    if name in CONCLUSIVE:
        rest = f"; it stands, {unused} not used"
    elif (following := look.following) is not None:
        text += f"; the next needs {number_of(following - look.available)} more"
        rest = f", {unused} waiting for it"
    else:
        rest = f"; {unused} beyond it not used"
    return f"{text}{rest if look.available > look.at else ''}."


def _of_sweep(look: Look, name: str) -> str:
    """Say how far a sweep until decided is with a mode."""
    of_most = f"{look.at} of at most {look.plan[-1]} seeds (planned looks, 5 % over all)"
    if name in CONCLUSIVE:
        unused = number_of(look.available - look.at)
        return f"Decided after {of_most}{f'; {unused} not used' * (look.available > look.at)}."
    if look.following is None:
        return f"Undecided after {look.at} seeds, the most that were planned."
    if look.hopeless is not None:
        return f"Stopped after {of_most}."
    return f"Open: look at {of_most}."


def _after_a_test(values: Values, needed: int) -> str:
    looks = values.fewest, values.fewest + needed
    return (
        f"A test of all {looks[1]} after this one (--looks {looks[0]},{looks[1]}) holds about "
        f"{100 * level_after_a_test(looks):.2g} % instead of 5 %; for 5 % plan the looks before "
        f"the first test, or test new {values.question.counted}s alone."
    )


def _strange(values: Values) -> Iterator[str]:
    """Say what speaks against the test in the values: no scatter, or one far from all."""
    question, (mode, baseline) = values.question, values.arms
    arms = [
        (values.own, values.own_seeds, "this mode", mode),
        (values.base, values.base_seeds, baseline.reference, baseline),
    ]
    for shown, _, whose, _ in arms:
        if baseline.foreign and len(set(shown)) == 1:
            yield (
                f"All {len(shown)} runs of {whose} ended with the same value: such a test says "
                "nothing of other runs."
            )
    verb, of, sign = "ended", "at ", -1 if question.higher_is_better else 1
    if values.method == "paired":  # the differences are tested; positive stays worse
        both = [a - b for a, b in zip(values.own, values.base, strict=True)]
        verb, of, sign, arms = "differs", "by ", 1, [(both, *arms[0][1:])]
    for judged, seeds, whose, arm in arms:
        place = outlier(judged)
        if place is None:
            continue
        shown = [sign * value for value in judged]
        if verb == "ended" and question.as_logarithm:
            shown = [math.exp(value) for value in shown]
        others = [*shown[:place], *shown[place + 1 :]]
        run = next(run for run in arm.runs if run.seed == seeds[place])
        yield (
            f"One stands out: {run.path if run.foreign else f'seed {run.seed}'} of {whose} {verb} "
            f"{of}{shown[place]:.4g}, the others {of}{min(others):.4g} to {max(others):.4g}; look "
            "at that run before more are made."
        )


def without_partner(decision: Decision) -> str:
    """Name the seeds that pairing left out: "having no partner: seed 6 of this mode"."""
    names = "this mode", decision.arms[1].reference
    parts = [
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))} of {name}"
        for seeds, name in zip(decision.alone, names, strict=True)
        if seeds
    ]
    return f"having no partner: {'; '.join(parts)}" if parts else ""


def sentence(
    name: str,
    interval: Interval,
    margin: float,
    question: Question,
    reference: str = "FP32",
    remedy: str | None = None,
) -> str:
    """Return one sentence with the numbers for `name`, a verdict of `equivalence.decide`.

    remedy: what an inconclusive sentence begins with; by default, how many more seeds are needed.
    """
    found = difference_text(interval, question, margin)
    around = f"the margin of ±{size_text(question, margin, margin)}"
    (own, base), counted = interval.counts, question.counted
    paired = interval.method == "paired"
    seeds = f"{own} {counted}s, paired" if paired else f"{own} and {base} {counted}s"
    if name == "matches":
        if interval.identical:
            return f"matches {reference} (identical): no difference in any run compared, {seeds}."
        text = f"matches {reference}: {found} is inside {around}, {seeds}."
        rounding = ROUNDING * margin
        consistent = interval.low > rounding or interval.high < -rounding
        more = " A small consistent difference exists: 0 is outside the interval."
        return text + more * consistent
    if name == "inconclusive":
        if remedy is None:
            needed = seeds_needed(interval, margin)
            remedy = f"not reachable with more {counted}s (needs over {MOST_SEEDS})"
            if needed is not None:
                remedy = f"needs about {number_of(needed, f'more {counted}')}"
        return f"inconclusive: {remedy}; {found} includes zero and reaches {around}, {seeds}."
    worse = name.endswith("worse")
    if name.startswith("likely"):
        may = f"is {'above' if worse else 'below'} zero but may be within"
        return f"{name} than {reference}: {found} {may} {around}, {seeds}."
    least = size_text(question, interval.low if worse else -interval.high, margin)
    other = "" if worse else "; check for a difference other than precision"
    text = f"{name} than {reference} by at least {least}: {found}, outside {around}"
    return f"{text}, {seeds}{other}."


def difference_text(interval: Interval, question: Question, margin: float) -> str:
    """Return the difference with its interval: "difference +0.12 % (90 % CI -0.10 to +0.34 %)"."""
    bounds = (interval.difference, interval.low, interval.high)
    middle, low, high = (signed(bound, margin, bounds, question.factor) for bound in bounds)
    level, unit = f"{100 * interval.level:.3g} % CI", suffix(question)
    if not math.isfinite(interval.high - interval.low):
        return f"difference {middle}{unit} ({level} without bounds)"
    turned = "; positive is worse" * question.higher_is_better
    return f"difference {middle}{unit} ({level} {low} to {high}{unit}{turned})"

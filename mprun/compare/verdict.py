"""From the runs of a mode and of its baseline to a verdict.

Divergence first, then the outcome of each run, the pairing by seed, the margin, and the
equivalence test, at fixed seeds or at planned looks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mprun.compare import equivalence
from mprun.compare import equivalence as planned
from mprun.compare.divergence import baseline_progress, ended_runs, outcomes, refuse_other_lengths
from mprun.compare.equivalence import FEWEST_SEEDS, Unit
from mprun.compare.findings import Arm, Outcome, Verdict
from mprun.errors import BadInput

GAN_LOSSES = ("loss", "d_loss", "g_loss")
POINTS = ("top1", "top5")  # recorded in percent
CONCLUSIVE = ("matches", "worse", "better")


@dataclass(frozen=True, slots=True)
class _Values:
    """Judged values of the arms after pairing: seeds ascending, lower is better."""

    method: str  # "paired" or "Welch"
    own_seeds: list[int]
    base_seeds: list[int]
    own: list[float]
    base: list[float]

    def first(self, count: int) -> "_Values":
        """The first `count` seeds of both arms."""
        cut = slice(count)
        return _Values(
            self.method, self.own_seeds[cut], self.base_seeds[cut], self.own[cut], self.base[cut]
        )


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked about the values."""

    metric: str
    higher_is_better: bool
    relative: bool
    margin_setting: float
    reference: str  # what the baseline is called


def judge(
    arm: Arm,
    baseline: Arm,
    *,
    metric: str,
    higher_is_better: bool,
    relative: bool,
    margin_setting: float,
    window: int = 1,
    looks: Sequence[int] = (),
    gan: bool = False,
) -> tuple[Verdict, list[Outcome]]:
    """The verdict on `arm` against `baseline`, and the outcomes of the arm's runs.

    margin_setting: above 0; times |mean of the baseline's judged values| if `relative`, else in the
    metric's unit. looks: numbers of seeds, ascending from 3, or empty for one test of all seeds.
    gan: losses measure no progress. Runs that did not end are no outcome and their seeds missing.

    Raises BadInput for a metric that a run did not record, for runs of different length, and for a
    relative margin around 0; ValueError for looks that are none.
    """
    own = outcomes(arm, baseline, metric=metric, window=window, gan=gan)
    base = outcomes(baseline, baseline, metric=metric, window=window, gan=gan)
    reference = "FP32" if baseline.label == "fp32" else baseline.label
    verdict = _diverged(own, base, reference)
    if verdict is None and gan and metric in GAN_LOSSES:
        verdict = Verdict(
            "not assessed",
            f"not assessed: the {metric} of a GAN does not measure the quality of its samples; "
            "runs with compare.metric=sliced_wasserstein are judged (docs/sample_metric.md).",
            seeds=[outcome.seed for outcome in own],
            baseline_seeds=[outcome.seed for outcome in base],
        )
    if verdict is None:
        unlearned = baseline_progress(ended_runs(baseline), metric, gan=gan)
        if unlearned is not None:
            verdict = Verdict(
                "invalid baseline",
                f"{reference} itself learned next to nothing ({unlearned}): agreement would say "
                "nothing; train longer or fix the recipe.",
                seeds=[outcome.seed for outcome in own],
                baseline_seeds=[outcome.seed for outcome in base],
            )
    if verdict is None:
        refuse_other_lengths(arm, baseline, window)
        question = _Question(metric, higher_is_better, relative, margin_setting, reference)
        values = _values(own, base, question)
        verdict = _at_looks(values, question, looks) if looks else _at_all_seeds(values, question)
        verdict.sentence += _without_partner(own, base, values, reference)
    return verdict, own


def pairing(own: Sequence[int], base: Sequence[int]) -> tuple[str, list[int], list[int]]:
    """("paired" or "Welch", seeds used of the mode, of the baseline), ascending.

    Paired where at least 3 seeds are shared or one list contains the other; else Welch over all
    seeds. Nothing but the seed lists decides, never which interval comes out shorter.
    """
    shared = set(own) & set(base)
    if len(shared) >= FEWEST_SEEDS or len(shared) == min(len(set(own)), len(set(base))):
        return "paired", sorted(shared), sorted(shared)
    return "Welch", sorted(own), sorted(base)


def _diverged(own: list[Outcome], base: list[Outcome], reference: str) -> Verdict | None:
    bad, bad_base = ([o for o in arm if o.diverged is not None] for arm in (own, base))
    if not bad and not bad_base:
        return None
    own_text = f"diverged in {len(bad)} of {len(own)} runs"
    if bad_base:
        name = "invalid baseline"
        sentence = (
            f"{reference} itself diverged in {len(bad_base)} of {len(base)} runs "
            f"({_first(bad_base)}); fix the recipe first. This mode {own_text}."
        )
    else:
        name = "diverged"
        sentence = f"{own_text} ({_first(bad)}). {reference} diverged in 0 of {len(base)}."
    return Verdict(
        name,
        sentence,
        seeds=[outcome.seed for outcome in own],
        baseline_seeds=[outcome.seed for outcome in base],
    )


def _first(diverged: list[Outcome]) -> str:
    first = min(diverged, key=lambda o: math.inf if o.step is None else o.step)
    return f"first at step {'unknown' if first.step is None else first.step}: {first.diverged}"


def _values(own: list[Outcome], base: list[Outcome], question: _Question) -> _Values:
    own_by_seed, base_by_seed = (
        {outcome.seed: _judged(outcome.value, question) for outcome in arm} for arm in (own, base)
    )
    method, own_seeds, base_seeds = pairing(list(own_by_seed), list(base_by_seed))
    return _Values(
        method,
        own_seeds,
        base_seeds,
        [own_by_seed[seed] for seed in own_seeds],
        [base_by_seed[seed] for seed in base_seeds],
    )


def _judged(value: float, question: _Question) -> float:
    """The value in the unit that is tested, lower is better."""
    judged = math.log(value) if question.metric == "perplexity" else value
    return -judged if question.higher_is_better else judged


def _margin_and_unit(base: list[float], question: _Question) -> tuple[float, Unit]:
    """The margin in the unit of the judged values, and how differences are shown."""
    setting, turned = question.margin_setting, question.higher_is_better
    if not question.relative:
        return setting, Unit(1.0, " points" if question.metric in POINTS else "", turned)
    mean = abs(math.fsum(base) / len(base))
    if mean == 0:
        judged = "log perplexity" if question.metric == "perplexity" else question.metric
        raise BadInput(
            f"compare.margin={setting:g}: is relative to the mean {judged} of "
            f"{question.reference}, which must not be 0; choose another --metric"
        )
    return setting * mean, Unit(100 / mean, " %", turned)


def _at_all_seeds(values: _Values, question: _Question) -> Verdict:
    if min(len(values.own), len(values.base)) < FEWEST_SEEDS:
        return _too_few(values, question, FEWEST_SEEDS)
    verdict = _tested(values, question, equivalence.ALPHA)
    if verdict.needed:
        total = min(len(values.own), len(values.base)) + verdict.needed
        verdict.sentence += (
            f" Then test with --looks {len(values.own)},{total}: a second test without it raises "
            "the error rate above 5 %."
        )
    return verdict


def _at_looks(values: _Values, question: _Question, looks: Sequence[int]) -> Verdict:
    """The first conclusive look stands; else the last one that the seeds suffice for."""
    plan = planned.checked_looks(looks)
    available = min(len(values.own), len(values.base))
    taken = [look for look in plan if look <= available]
    if not taken:
        return _too_few(values, question, plan[0])
    alpha = planned.nominal_alpha(plan)
    for look in taken:
        later = [other for other in plan if other > look]
        remedy = f"wait for the look at {later[0]} seeds" if later else "this was the last look"
        verdict = _tested(values.first(look), question, alpha, remedy)
        if verdict.name in CONCLUSIVE:
            break
    verdict.look = look
    verdict.needed = None
    of_plan = f" Look at {look} seeds of the plan {', '.join(map(str, plan))}"
    unused = available - look
    if verdict.name in CONCLUSIVE:
        end = f"; it stands, {_seeds_word(unused)} not used." if unused else "."
    elif not later:
        end = f"; {_seeds_word(unused)} beyond it not used." if unused else "."
    else:
        verdict.needed = later[0] - available
        end = f"; the next needs {_seeds_word(verdict.needed)} more"
        end += f", {_seeds_word(unused)} waiting for it." if unused else "."
    verdict.sentence += of_plan + end
    return verdict


def _tested(
    values: _Values, question: _Question, alpha: float, remedy: str | None = None
) -> Verdict:
    margin, unit = _margin_and_unit(values.base, question)
    paired = values.method == "paired"
    estimate = equivalence.paired_interval if paired else equivalence.welch_interval
    interval = estimate(values.own, values.base, alpha)
    name = equivalence.decide(interval, margin)
    needed = equivalence.seeds_needed(interval, margin) if name == "inconclusive" else None
    remedy = remedy or equivalence.needs_text(needed)
    return Verdict(
        name,
        equivalence.sentence(name, interval, margin, unit, question.reference, remedy),
        method=values.method,
        seeds=values.own_seeds,
        baseline_seeds=values.base_seeds,
        difference=interval.difference,
        low=interval.low,
        high=interval.high,
        margin=margin,
        level=interval.level,
        needed=needed,
    )


def _too_few(values: _Values, question: _Question, wanted: int) -> Verdict:
    """No verdict below `wanted` seeds; the difference so far is told where there is one."""
    has = min(len(values.own), len(values.base))
    difference = margin = unit = None
    if values.base:
        margin, unit = _margin_and_unit(values.base, question)
    if has:
        own, base = (math.fsum(arm) / len(arm) for arm in (values.own, values.base))
        difference = own - base
    return Verdict(
        "inconclusive",
        equivalence.too_few_sentence(has, wanted, difference, margin, unit),
        method=values.method,
        seeds=values.own_seeds,
        baseline_seeds=values.base_seeds,
        difference=difference,
        margin=margin,
        needed=wanted - has,
    )


def _without_partner(
    own: list[Outcome], base: list[Outcome], values: _Values, reference: str
) -> str:
    """Names the seeds that pairing left out."""
    parts = []
    for arm, used, name in (
        (own, values.own_seeds, "this mode"),
        (base, values.base_seeds, reference),
    ):
        extra = [outcome.seed for outcome in arm if outcome.seed not in used]
        if extra:
            word = "seed" if len(extra) == 1 else "seeds"
            parts.append(f"{word} {', '.join(map(str, extra))} of {name}")
    return f" Left out, having no partner: {'; '.join(parts)}." if parts else ""


def _seeds_word(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}"

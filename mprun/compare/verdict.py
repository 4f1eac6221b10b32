"""From the runs of a group to its verdicts, costs and warnings.

Of each mode: divergence first, then the outcome of each run, the pairing by seed, the margin, and
the equivalence test, at fixed seeds or at planned looks.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mprun.compare import equivalence
from mprun.compare.divergence import baseline_progress, ended_runs, outcomes, refuse_other_lengths
from mprun.compare.equivalence import FEWEST_SEEDS, Unit
from mprun.compare.findings import Arm, Group, Outcome, Row, RunData, Verdict, is_gan
from mprun.compare.grouping import BASELINE, ProtoGroup
from mprun.compare.load import post_mortems
from mprun.config.check import ACCURACIES, default_margin
from mprun.errors import BadInput

GAN_LOSSES = ("loss", "d_loss", "g_loss")
CONCLUSIVE = ("matches", "worse", "better")
# Same-seed losses of a correct mode stay within about 1 % for 20 steps (measured on one small
# model); an error in a cast or in unscaling shows here first. A warning, never a verdict.
FIRST_STEPS_WARNING = 0.05


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
    reference = "FP32" if baseline.label == BASELINE else baseline.label
    beforehand = _diverged(own, base, reference)
    if beforehand is None and gan and metric in GAN_LOSSES:
        beforehand = (
            "not assessed",
            f"not assessed: the {metric} of a GAN does not measure the quality of its samples; "
            "runs with compare.metric=sliced_wasserstein are judged (docs/sample_metric.md).",
        )
    if beforehand is None:
        unlearned = baseline_progress(ended_runs(baseline), metric, gan=gan)
        if unlearned is not None:
            beforehand = (
                "invalid baseline",
                f"{reference} itself learned next to nothing ({unlearned}): agreement would say "
                "nothing; train longer or fix the recipe.",
            )
    if beforehand is not None:
        seeds, base_seeds = ([outcome.seed for outcome in every] for every in (own, base))
        return Verdict(*beforehand, seeds=seeds, baseline_seeds=base_seeds), own
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


def _diverged(own: list[Outcome], base: list[Outcome], reference: str) -> tuple[str, str] | None:
    """Name and sentence of the verdict where a run of either arm diverged."""
    bad, bad_base = ([o for o in arm if o.diverged is not None] for arm in (own, base))
    own_text = f"diverged in {len(bad)} of {len(own)} runs"
    if bad_base:
        return "invalid baseline", (
            f"{reference} itself diverged in {len(bad_base)} of {len(base)} runs "
            f"({_first(bad_base)}); fix the recipe first. This mode {own_text}."
        )
    if bad:
        sentence = f"{own_text} ({_first(bad)}). {reference} diverged in 0 of {len(base)}."
        return "diverged", sentence
    return None


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
        return setting, Unit(1.0, " points" if question.metric in ACCURACIES else "", turned)
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
    plan = equivalence.checked_looks(looks)
    available = min(len(values.own), len(values.base))
    taken = [look for look in plan if look <= available]
    if not taken:
        return _too_few(values, question, plan[0])
    alpha = equivalence.nominal_alpha(plan)
    for look in taken:
        later = [other for other in plan if other > look]
        remedy = f"wait for the look at {later[0]} seeds" if later else "this was the last look"
        verdict = _tested(values.first(look), question, alpha, remedy)
        if verdict.name in CONCLUSIVE:
            break
    verdict.look, verdict.needed = look, None
    unused = f"{available - look} seed{'' if available - look == 1 else 's'}"
    ends = []
    if verdict.name in CONCLUSIVE:
        rest = f"; it stands, {unused} not used"
    elif not later:
        rest = f"; {unused} beyond it not used"
    else:
        verdict.needed = later[0] - available
        ends = [f"; the next needs {verdict.needed} seed{'' if verdict.needed == 1 else 's'} more"]
        rest = f", {unused} waiting for it"
    ends += [rest] if available > look else []
    of_plan = f" Look at {look} seeds of the plan {', '.join(map(str, plan))}"
    verdict.sentence += f"{of_plan}{''.join(ends)}."
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


def assess(
    proto: ProtoGroup,
    *,
    metric: str | None = None,
    margin: float | None = None,
    looks: Sequence[int] = (),
    higher_is_better: bool = False,
) -> Group:
    """Judge every arm of `proto` against its baseline.

    metric, margin: instead of what the runs' configuration says. higher_is_better: for a foreign
    tag; the runs' own metrics are known. BadInput: see `judge`.
    """
    keys, foreign = proto.keys, proto.baseline.runs[0].foreign
    metric = metric or keys.get("compare.metric")
    if metric is None or (not foreign and "compare.window" not in keys):
        raise BadInput("compare.metric, compare.window: the runs differ in it; give --metric")
    accuracy = higher_is_better if foreign else metric in ACCURACIES
    margin = _margin_setting(keys, metric) if margin is None else margin
    if not accuracy and margin >= 0.5:
        raise BadInput(f"margin {margin:g}: is relative, 0.01 means 1 %; must be below 0.5")
    window = keys.get("compare.window", 1)
    gan = is_gan(keys)
    base = outcomes(proto.baseline, proto.baseline, metric=metric, window=window, gan=gan)
    group = Group(
        title=proto.title,
        slug=proto.slug,
        metric=metric,
        higher_is_better=accuracy,
        relative=not accuracy,
        margin_setting=margin,
        baseline=_row(proto.baseline, proto.baseline, Verdict("baseline", ""), base),
        rows=[],
        keys=keys,
        window=window,
        notes=list(proto.notes),
    )
    samples = keys.get("data.eval_samples")
    if accuracy and samples and 100 / samples > margin / 2:
        group.notes.append(
            f"one evaluated sample is {100 / samples:.2g} points, too coarse for a margin of "
            f"{margin:g}: matches by rounding are likely; evaluate on more samples"
        )
    for arm in proto.arms:
        verdict, own = judge(
            arm,
            proto.baseline,
            metric=metric,
            higher_is_better=accuracy,
            relative=group.relative,
            margin_setting=margin,
            window=window,
            looks=looks,
            gan=gan,
        )
        row = _row(arm, proto.baseline, verdict, own)
        if not gan:
            _check_first_steps(row, proto.baseline)
        group.rows.append(row)
    return group


def _margin_setting(keys: dict[str, Any], metric: str) -> float:
    """What the configuration says of its own metric, else the metric's default."""
    configured = keys.get("compare.margin") if keys.get("compare.metric") == metric else None
    return default_margin(metric, keys.get("data.name")) if configured is None else configured


def _row(arm: Arm, baseline: Arm, verdict: Verdict, own: list[Outcome]) -> Row:
    ended, base = ended_runs(arm), ended_runs(baseline)
    scales = [scale for run in ended for scale in run.scale_range or ()]
    # The seeds that were compared, so that means and difference agree.
    used = set(verdict.seeds) or {outcome.seed for outcome in own}
    finite = [o.value for o in own if math.isfinite(o.value) and o.seed in used]
    alike = len({_device(run) for run in (*ended, *base)}) == 1

    def ratio(measure: Callable[[list[RunData]], float | None]) -> float | None:
        """Over the baseline's where both ran on the same device and were probed alike."""
        mine, theirs = measure(ended), measure(base)
        return mine / theirs if alike and mine is not None and theirs else None

    return Row(
        arm=arm,
        verdict=verdict,
        outcomes=own,
        mean=statistics.fmean(finite) if finite else None,
        skipped=sum(run.skipped for run in ended),
        scale_range=(min(scales), max(scales)) if scales else None,
        samples_per_s=_median_speed(ended),
        speedup=ratio(_median_speed),
        peak_bytes=_largest("peak_bytes", ended),
        memory_ratio=ratio(partial(_largest, "peak_bytes")),
        saved_ratio=ratio(partial(_largest, "saved_bytes")),
        notes=post_mortems(arm.runs),
    )


def _device(run: RunData) -> tuple:
    found = run.environment
    probed = [run.keys.get(f"numerics.{key}") for key in ("enabled", "every", "shadow_every")]
    machine = (found.get("device"), found.get("gpu") or found.get("cpu"), found.get("threads"))
    return (*machine, tuple(probed) if probed[0] else None)


def _median_speed(runs: list[RunData]) -> float | None:
    speeds = [run.samples_per_s for run in runs if run.samples_per_s]
    return statistics.median(speeds) if speeds else None


def _largest(name: str, runs: list[RunData]) -> int | None:
    return max((getattr(run, name) for run in runs if getattr(run, name)), default=None)


def _first_distance(own: RunData, other: RunData) -> float | None:
    """Median |loss / FP32 loss - 1| over the first 20 steps of two runs; None: cannot be told."""
    count = min(len(own.first_losses), len(other.first_losses))
    # After a skipped update equal steps are not equal numbers of updates.
    skips = [*own.skip_steps[:1], *other.skip_steps[:1]]
    if count < 2 or own.foreign or any(step <= count for step in skips):
        return None
    with np.errstate(all="ignore"):
        distance = np.abs(own.first_losses[:count] / other.first_losses[:count] - 1)
    distance = distance[np.isfinite(distance)]
    return float(np.median(distance)) if len(distance) else None


def _check_first_steps(row: Row, baseline: Arm) -> None:
    """The distance of the first steps at the same seed, its median over the seeds."""
    others = {run.seed: run for run in baseline.runs}
    pairs = [(run, others[run.seed]) for run in row.arm.runs if run.seed in others]
    medians = [found for pair in pairs if (found := _first_distance(*pair)) is not None]
    if not medians:
        return
    row.first_steps = statistics.median(medians)
    if row.first_steps > FIRST_STEPS_WARNING:
        row.notes.append(
            f"already {100 * row.first_steps:.0f} % from the baseline's loss within the first 20 "
            "steps at equal seeds: look for a wrong cast, scale or setting"
        )

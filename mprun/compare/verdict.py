"""From the runs of a group to its verdicts, costs and warnings.

Of each mode: divergence first, then the outcome of each run, the pairing by seed, the margin, and
the equivalence test, at fixed seeds or at planned looks.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from mprun.compare import equivalence
from mprun.compare.divergence import baseline_progress, ended_runs, outcomes, refuse_other_lengths
from mprun.compare.equivalence import FEWEST_SEEDS, Unit
from mprun.compare.findings import Arm, Group, Outcome, Question, Row, RunData, Verdict, is_gan
from mprun.compare.grouping import ProtoGroup
from mprun.compare.load import post_mortems
from mprun.config.check import ACCURACIES, default_margin
from mprun.errors import BadInput

GAN_LOSSES = ("loss", "d_loss", "g_loss")
CONCLUSIVE = ("matches", "worse", "better")
# Same-seed losses of a correct mode stay within about 1 % for 20 steps (measured on one small
# model); an error in a cast or in unscaling shows here first. A warning, never a verdict.
FIRST_STEPS_WARNING = 0.05


class _Values(NamedTuple):
    """Judged values of the arms after pairing: seeds ascending, lower is better."""

    method: str  # "paired" or "Welch"
    own_seeds: list[int]
    base_seeds: list[int]
    own: list[float]
    base: list[float]
    reference: str  # what the baseline is called

    def first(self, count: int) -> "_Values":
        """The first `count` seeds of both arms."""
        seeds = self.own_seeds[:count], self.base_seeds[:count]
        return _Values(self.method, *seeds, self.own[:count], self.base[:count], self.reference)

    @property
    def fewest(self) -> int:
        """Seeds of the arm that has fewer."""
        return min(len(self.own), len(self.base))


def judge(arm: Arm, baseline: Arm, question: Question) -> tuple[Verdict, list[Outcome]]:
    """The verdict on `arm` against `baseline`, and the outcomes of the arm's runs.

    Runs that did not end are no outcome and their seeds missing.

    Raises BadInput for a metric that a run did not record, for runs of different length, and for a
    relative margin around 0; ValueError for looks that are none.
    """
    own, base = (outcomes(one, baseline, question) for one in (arm, baseline))
    beforehand = _beforehand(own, base, baseline, question)
    if beforehand is not None:
        seeds, base_seeds = ([outcome.seed for outcome in every] for every in (own, base))
        return Verdict(*beforehand, seeds=seeds, baseline_seeds=base_seeds), own
    refuse_other_lengths(arm, baseline, question.window)
    values = _values(own, base, question, baseline.reference)
    verdict = (_at_looks if question.looks else _at_all_seeds)(values, question)
    verdict.sentence += _without_partner(own, base, values)
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


def _beforehand(
    own: list[Outcome], base: list[Outcome], baseline: Arm, question: Question
) -> tuple[str, str] | None:
    """Name and sentence of a verdict for which nothing needs to be tested."""
    reference = baseline.reference
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
    if question.gan and question.metric in GAN_LOSSES:
        return "not assessed", (
            f"not assessed: the {question.metric} of a GAN does not measure the quality of its "
            "samples; runs with compare.metric=sliced_wasserstein are judged "
            "(docs/sample_metric.md)."
        )
    unlearned = baseline_progress(ended_runs(baseline), question.metric, gan=question.gan)
    if unlearned is None:
        return None
    return "invalid baseline", (
        f"{reference} itself learned next to nothing ({unlearned}): agreement would say "
        "nothing; train longer or fix the recipe."
    )


def _first(diverged: list[Outcome]) -> str:
    first = min(diverged, key=lambda o: math.inf if o.step is None else o.step)
    return f"first at step {'unknown' if first.step is None else first.step}: {first.diverged}"


def _values(own: list[Outcome], base: list[Outcome], question: Question, reference: str) -> _Values:
    def judged(value: float) -> float:
        """In the unit that is tested, lower is better."""
        value = math.log(value) if question.metric == "perplexity" else value
        return -value if question.higher_is_better else value

    of_own, of_base = ({one.seed: judged(one.value) for one in arm} for arm in (own, base))
    method, own_seeds, base_seeds = pairing(list(of_own), list(of_base))
    values = [of_own[seed] for seed in own_seeds], [of_base[seed] for seed in base_seeds]
    return _Values(method, own_seeds, base_seeds, *values, reference)


def _margin_and_unit(values: _Values, question: Question) -> tuple[float, Unit]:
    """The margin in the unit of the judged values, and how differences are shown."""
    setting, turned = question.margin_setting, question.higher_is_better
    if not question.relative:
        return setting, Unit(1.0, " points" if question.metric in ACCURACIES else "", turned)
    mean = abs(math.fsum(values.base) / len(values.base))
    if mean == 0:
        judged = "log perplexity" if question.metric == "perplexity" else question.metric
        raise BadInput(
            f"compare.margin={setting:g}: is relative to the mean {judged} of "
            f"{values.reference}, which must not be 0; choose another --metric"
        )
    return setting * mean, Unit(100 / mean, " %", turned)


def _at_all_seeds(values: _Values, question: Question) -> Verdict:
    if values.fewest < FEWEST_SEEDS:
        return _too_few(values, question, FEWEST_SEEDS)
    verdict = _tested(values, question, equivalence.ALPHA)
    if verdict.needed:
        verdict.sentence += (
            f" Then test with --looks {len(values.own)},{values.fewest + verdict.needed}: a second "
            "test without it raises the error rate above 5 %."
        )
    return verdict


def _at_looks(values: _Values, question: Question) -> Verdict:
    """The first conclusive look stands; else the last one that the seeds suffice for."""
    plan = equivalence.checked_looks(question.looks)
    available = values.fewest
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
    if later and verdict.name not in CONCLUSIVE:
        verdict.needed = later[0] - available
    verdict.sentence += f" Look at {look} seeds of the plan {', '.join(map(str, plan))}"
    verdict.sentence += _what_follows(verdict, available - look) + "."
    return verdict


def _what_follows(verdict: Verdict, unused: int) -> str:
    """What comes of the seeds beyond the look at which the verdict was found."""
    next_look = f"; the next needs {_seeds_text(verdict.needed)} more" if verdict.needed else ""
    if unused == 0:
        return next_look
    seeds = _seeds_text(unused)
    if verdict.name in CONCLUSIVE:
        return f"; it stands, {seeds} not used"
    return f"{next_look}, {seeds} waiting for it" if next_look else f"; {seeds} beyond it not used"


def _seeds_text(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}"


def _tested(
    values: _Values, question: Question, alpha: float, remedy: str | None = None
) -> Verdict:
    margin, unit = _margin_and_unit(values, question)
    paired = values.method == "paired"
    estimate = equivalence.paired_interval if paired else equivalence.welch_interval
    interval = estimate(values.own, values.base, alpha)
    name = equivalence.decide(interval, margin)
    return Verdict(
        name,
        equivalence.sentence(name, interval, margin, unit, values.reference, remedy),
        *values[:3],
        difference=interval.difference,
        low=interval.low,
        high=interval.high,
        margin=margin,
        level=interval.level,
        needed=equivalence.seeds_needed(interval, margin) if name == "inconclusive" else None,
    )


def _too_few(values: _Values, question: Question, wanted: int) -> Verdict:
    """No verdict below `wanted` seeds; the difference so far is told where there is one."""
    has, difference, margin, unit = values.fewest, None, None, None
    if values.base:
        margin, unit = _margin_and_unit(values, question)
    if has:
        own, base = (math.fsum(arm) / len(arm) for arm in (values.own, values.base))
        difference = own - base
    sentence = equivalence.too_few_sentence(has, wanted, difference, margin, unit)
    verdict = Verdict("inconclusive", sentence, *values[:3], difference=difference)
    verdict.margin, verdict.needed = margin, wanted - has
    return verdict


def _without_partner(own: list[Outcome], base: list[Outcome], values: _Values) -> str:
    """Names the seeds that pairing left out."""
    parts = []
    modes = (own, values.own_seeds, "this mode"), (base, values.base_seeds, values.reference)
    for arm, used, name in modes:
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
    keys, base = proto.keys, proto.baseline
    question = _question(proto, metric, margin, higher_is_better)
    question.looks = looks
    verdict = Verdict("baseline", "")
    group = Group(
        **asdict(question),
        title=proto.title,
        slug=proto.slug,
        baseline=_row(base, base, verdict, outcomes(base, base, question)),
        rows=[_row(arm, base, *judge(arm, base, question)) for arm in proto.arms],
        keys=keys,
        notes=list(proto.notes),
    )
    samples, margin = keys.get("data.eval_samples"), question.margin_setting
    if question.higher_is_better and samples and 100 / samples > margin / 2:
        group.notes.append(
            f"one evaluated sample is {100 / samples:.2g} points, too coarse for a margin of "
            f"{margin:g}: matches by rounding are likely; evaluate on more samples"
        )
    for row in [] if question.gan else group.rows:
        _check_first_steps(row, base)
    return group


def _question(
    proto: ProtoGroup, metric: str | None, margin: float | None, higher_is_better: bool
) -> Question:
    """What is asked of the runs; margin None: what they say of their own metric."""
    keys, foreign = proto.keys, proto.baseline.runs[0].foreign
    metric = metric or keys.get("compare.metric")
    if metric is None or (not foreign and "compare.window" not in keys):
        raise BadInput("compare.metric, compare.window: the runs differ in it; give --metric")
    accuracy = higher_is_better if foreign else metric in ACCURACIES
    if margin is None and keys.get("compare.metric") == metric:
        margin = keys.get("compare.margin")
    if margin is None:
        margin = default_margin(metric, keys.get("data.name"))
    if not accuracy and margin >= 0.5:
        raise BadInput(f"margin {margin:g}: is relative, 0.01 means 1 %; must be below 0.5")
    return Question(
        metric=metric,
        higher_is_better=accuracy,
        relative=not accuracy,
        margin_setting=margin,
        window=keys.get("compare.window", 1),
        gan=is_gan(keys),
    )


def _row(arm: Arm, baseline: Arm, verdict: Verdict, own: list[Outcome]) -> Row:
    ended, base = ended_runs(arm), ended_runs(baseline)
    # The seeds that were compared, so that means and difference agree.
    used = set(verdict.seeds) or {outcome.seed for outcome in own}
    finite = [o.value for o in own if math.isfinite(o.value) and o.seed in used]
    costs = _costs(ended)
    # Over the baseline's where both ran on the same device and were probed alike.
    alike = len({_device(run) for run in (*ended, *base)}) == 1
    ratios = map(_ratio, costs, _costs(base)) if alike else (None, None, None)
    speedup, memory_ratio, saved_ratio = ratios
    return Row(
        arm=arm,
        verdict=verdict,
        outcomes=own,
        mean=statistics.fmean(finite) if finite else None,
        skipped=sum(run.skipped for run in ended),
        scale_range=_reached([run.scale_range for run in ended if run.scale_range]),
        samples_per_s=costs[0],
        speedup=speedup,
        peak_bytes=costs[1],
        memory_ratio=memory_ratio,
        saved_ratio=saved_ratio,
        notes=post_mortems(arm.runs),
    )


def _reached(ranges: list[tuple[float, float]]) -> tuple[float, float] | None:
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def _ratio(own: float | None, base: float | None) -> float | None:
    return None if own is None or not base else own / base


def _costs(runs: list[RunData]) -> tuple[float | None, int | None, int | None]:
    """Median speed, largest peak memory and memory kept for backward, of those that are known."""
    speeds, peaks, saved = (
        [value for run in runs if (value := getattr(run, name))]
        for name in ("samples_per_s", "peak_bytes", "saved_bytes")
    )
    speed = statistics.median(speeds) if speeds else None
    return speed, max(peaks, default=None), max(saved, default=None)


def _device(run: RunData) -> tuple:
    found = run.environment
    probed = [run.keys.get(f"numerics.{key}") for key in ("enabled", "every", "shadow_every")]
    machine = (found.get("device"), found.get("gpu") or found.get("cpu"), found.get("threads"))
    return (*machine, tuple(probed) if probed[0] else None)


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

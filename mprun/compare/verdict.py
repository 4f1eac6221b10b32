"""Turn the runs of a group into its verdicts, costs and warnings.

The steps for each mode: divergence, the outcome of each run, the pairing by seed, the margin, and
the equivalence test, at fixed seeds or at planned looks.
"""

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from mprun.compare import equivalence
from mprun.compare.divergence import (
    baseline_progress,
    curve_facts,
    facts_text,
    outcomes,
    refuse_other_lengths,
)
from mprun.compare.equivalence import FEWEST_SEEDS, Unit
from mprun.compare.findings import Arm, Group, Outcome, Question, Row, RunData, Verdict, is_gan
from mprun.compare.grouping import ProtoGroup, group_runs
from mprun.compare.load import audit_notes, audit_of, load_runs, post_mortems, skip_notes
from mprun.config.fields import must_be
from mprun.config.metrics import Metric, stated
from mprun.errors import BadInput, MprunError
from mprun.record.metrics_columns import NO_METRIC

GAN_LOSSES = ("loss", "d_loss", "g_loss")
CONCLUSIVE = ("matches", "worse", "better")
# Same-seed losses of a correct mode stay within about 1 % for 20 steps (measured on one small
# model); an error in a cast or in unscaling shows here first. This is a warning, never a verdict.
FIRST_STEPS_WARNING = 0.05


@dataclass(frozen=True, slots=True)
class _Values:
    """The judged values of both arms after pairing: seeds ascending, lower is better."""

    question: Question
    arms: tuple[Arm, Arm]  # the mode, the baseline
    method: str  # "paired" or "Welch"
    own_seeds: list[int]
    base_seeds: list[int]
    own: list[float]
    base: list[float]

    @property
    def fewest(self) -> int:
        """Return the number of seeds of the smaller arm."""
        return min(len(self.own), len(self.base))

    @property
    def unit(self) -> str:
        """Return what is counted: "seed", or "run" if no seeds are known."""
        return "seed" if self.question.by_seed else "run"


def judge(arm: Arm, baseline: Arm, question: Question) -> tuple[Verdict, list[Outcome]]:
    """Judge `arm` against `baseline`; return the verdict and the outcomes of the arm's runs.

    Raises BadInput for a metric that a run did not record, for runs of different length, and for a
    relative margin around 0.
    """
    arms = arm, baseline
    own, base = ends = outcomes(arm, baseline, question), outcomes(baseline, baseline, question)
    beforehand = _beforehand(own, base, baseline, question)
    more = list(dict.fromkeys(arm.left_out + baseline.left_out))
    if beforehand is not None:
        seeds, base_seeds = ([outcome.seed for outcome in every] for every in ends)
        return Verdict(*beforehand, None, seeds, base_seeds, left_out=more), own
    refuse_other_lengths(arm, baseline, question.window)
    values = _values(question, arms, ends, question.by_seed)
    verdict = (_at_looks if question.looks else _at_all_seeds)(values)
    if len(own) == len(base) == 1:
        verdict.facts = curve_facts(arm.runs[0], baseline.runs[0], question)
        verdict.sentence += " " + facts_text(verdict.facts)
    without = _without_partner(own, base, values)
    if without:
        verdict.sentence += f" Left out, {without}."
        everything = _values(question, arms, ends, by_seed=False)
        with suppress(BadInput):  # the runs that were compared do have a margin
            if everything.fewest >= FEWEST_SEEDS:
                margin, unit, _ = _margin_and_unit(everything)
                interval = _interval(everything, equivalence.ALPHA)
                found = equivalence.difference_text(interval, unit, margin)
                name = equivalence.decide(interval, margin)
                verdict.sentence += f" Over all, unpaired: {name}, {found}."
    verdict.sentence += f" Left out: {'; '.join(more)}." if more else ""
    verdict.left_out = [without] * bool(without) + more
    return verdict, own


def pairing(
    own: Sequence[int], base: Sequence[int], by_seed: bool = True
) -> tuple[str, list[int], list[int]]:
    """Return ("paired" or "Welch", the mode's seeds used, the baseline's), seeds ascending.

    The test is paired if at least 3 seeds are shared or one list contains the other; else, and
    without `by_seed`, it is Welch's, over all seeds. Only the seed lists decide, never which
    interval comes out shorter.
    """
    shared = set(own) & set(base)
    enough = len(shared) >= FEWEST_SEEDS or len(shared) == min(len(set(own)), len(set(base)))
    if by_seed and enough:
        return "paired", sorted(shared), sorted(shared)
    return "Welch", sorted(own), sorted(base)


def _beforehand(
    own: list[Outcome], base: list[Outcome], baseline: Arm, question: Question
) -> tuple[str, str] | None:
    """Return name and sentence of a verdict that needs no test, else None."""
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
    of_gan = {"gan": question.gan, "higher_is_better": question.higher_is_better}
    unlearned = baseline_progress(baseline.runs, question.metric, **of_gan)
    if unlearned is None:
        return None
    return "invalid baseline", (
        f"{reference} itself learned next to nothing ({unlearned}): agreement would say "
        "nothing; train longer or fix the recipe."
    )


def _first(diverged: list[Outcome]) -> str:
    first = min(diverged, key=lambda o: math.inf if o.step is None else o.step)
    return f"first at step {'unknown' if first.step is None else first.step}: {first.diverged}"


def _values(
    question: Question, arms: tuple[Arm, Arm], ends: tuple[list[Outcome], ...], by_seed: bool
) -> _Values:
    """Return the values to test; `by_seed`: paired if equal seeds allow it, else Welch over all."""

    def judged(value: float) -> float:
        """Convert to the tested unit; lower is better."""
        value = math.log(value) if question.as_logarithm else value
        return -value if question.higher_is_better else value

    of_own, of_base = ({one.seed: judged(one.value) for one in arm} for arm in ends)
    method, own_seeds, base_seeds = pairing(list(of_own), list(of_base), by_seed)
    values = [of_own[seed] for seed in own_seeds], [of_base[seed] for seed in base_seeds]
    return _Values(question, arms, method, own_seeds, base_seeds, *values)


def _margin_and_unit(values: _Values) -> tuple[float, Unit, float]:
    """Return the margin, the unit of `_interval`, and what both are multiples of (or 1).

    Raises BadInput for a relative margin if the mean cannot be told from 0, without one run that
    stands out, and for an absolute margin of half a mean that can, or more.
    """
    question, baseline = values.question, values.arms[1]
    setting, turned = question.margin_setting, question.higher_is_better
    mean = abs(math.fsum(values.base) / len(values.base))
    place = equivalence.outlier(values.base)
    usual = [value for i, value in enumerate(values.base) if i != place]
    zero = mean == 0
    if len(usual) >= FEWEST_SEEDS:
        found = equivalence.paired_interval(usual, [0.0] * len(usual))
        zero = found.low <= 0 <= found.high
    asked = f"{'--margin ' if baseline.foreign else 'compare.margin='}{setting:g}"
    log = "log " if question.as_logarithm else ""
    of_mean = f"the mean {log}{question.metric} of {baseline.reference}"
    if question.relative:
        if zero:
            raise BadInput(
                f"{asked}: is relative to {of_mean}, which must not be 0: it is {mean:.3g}, which "
                f"{_seeds_text(len(values.base), values.unit)} cannot tell from it; give "
                "--margin X --absolute, in the unit of the metric"
            )
        return setting, Unit(100.0, " %", turned), mean
    if setting >= mean / 2 and not zero:
        raise BadInput(
            f"{asked}: is absolute, and {of_mean} is {mean:.3g}: must be below half of it, "
            f"{mean / 2:.3g} (of a fraction half a point is 0.005)"
        )
    return setting, Unit(1.0, " points" if question.unit == "points" else "", turned), 1.0


def _interval(values: _Values, alpha: float) -> equivalence.Interval:
    arms = values.own, values.base
    return equivalence.estimate(*arms, values.method, values.question.relative, alpha)


def _at_all_seeds(values: _Values) -> Verdict:
    if values.fewest < FEWEST_SEEDS:
        return _too_few(values, FEWEST_SEEDS)
    verdict = _tested(values, equivalence.ALPHA)
    if verdict.needed:
        looks = values.fewest, values.fewest + verdict.needed
        verdict.sentence += (
            f" A test of all {looks[1]} after this one (--looks {looks[0]},{looks[1]}) holds "
            f"about {100 * equivalence.level_after_a_test(looks):.2g} % instead of 5 %; for 5 % "
            f"plan the looks before the first test, or test new {values.unit}s alone."
        )
    return verdict


def _at_looks(values: _Values) -> Verdict:
    """Return the first conclusive look's verdict, else that of the last look with enough seeds."""
    plan, available = tuple(values.question.looks), values.fewest
    taken = [look for look in plan if look <= available]
    if not taken:
        return _too_few(values, plan[0])
    if not values.question.by_seed:
        if len(values.own) != len(values.base) or taken[-1] != available:
            raise BadInput(
                f"--looks {','.join(map(str, plan))}: {len(values.own)} and {len(values.base)} "
                "runs that name no seeds, so nothing says which of them a look would take: give "
                f"as many in both labels, {' or '.join(map(str, plan))}, or name the seeds"
            )
        taken = taken[-1:]  # the earlier looks were taken when there were no more runs
    alpha = equivalence.nominal_alpha(plan)
    for look in taken:
        later = [other for other in plan if other > look]
        remedy = f"wait for the look at {later[0]} seeds" if later else "this was the last look"
        names = ("own_seeds", "base_seeds", "own", "base")
        seeds = replace(values, **{name: getattr(values, name)[:look] for name in names})
        verdict = _tested(seeds, alpha, remedy)
        if verdict.name in CONCLUSIVE:
            break
    verdict.look, verdict.needed = look, None
    verdict.sentence += f" Look at {look} seeds of the plan {', '.join(map(str, plan))}"
    rest = _seeds_text(available - look)
    if verdict.name in CONCLUSIVE:
        spare = f"; it stands, {rest} not used"
    elif later:
        verdict.needed = later[0] - available
        verdict.sentence += f"; the next needs {_seeds_text(verdict.needed)} more"
        spare = f", {rest} waiting for it"
    else:
        spare = f"; {rest} beyond it not used"
    verdict.sentence += (spare if available > look else "") + "."
    return verdict


def _seeds_text(count: int, counted: str = "seed") -> str:
    return f"{count} {counted}{'' if count == 1 else 's'}"


def _tested(values: _Values, alpha: float, remedy: str | None = None) -> Verdict:
    margin, unit, whole = _margin_and_unit(values)
    interval = _interval(values, alpha)
    name = equivalence.decide(interval, margin)
    words = values.arms[1].reference, remedy, values.unit
    sentence = equivalence.sentence(name, interval, margin, unit, *words)
    half = (interval.high - interval.low) / 2
    least = half if margin < half < math.inf and name not in CONCLUSIVE else None
    if least is not None:
        sentence += (
            f" {_seeds_text(values.fewest, values.unit)} with this scatter can show no margin "
            f"below ±{unit.size(least, margin)}."
        )
    if name in CONCLUSIVE:
        sentence += _unconfirmed(name, values, margin, alpha)
    return Verdict(
        name,
        sentence + _strange(values),
        *(values.method, values.own_seeds, values.base_seeds),
        difference=whole * interval.difference,
        low=whole * interval.low,
        high=whole * interval.high,
        margin=whole * margin,
        level=interval.level,
        least_margin=None if least is None else whole * least,
        needed=equivalence.seeds_needed(interval, margin) if name == "inconclusive" else None,
    )


def _unconfirmed(name: str, values: _Values, margin: float, alpha: float) -> str:
    """Return a warning if a test without assumptions on the noise does not confirm a claim."""
    paired, margins = values.method == "paired", [margin] * len(values.base)
    if values.question.relative:  # each value's own share, so that those of both arms scatter alike
        sign = math.copysign(1.0, math.fsum(values.base))
        margins = [sign * margin * value for value in values.base]
    p, least = equivalence.permutation_p(name, values.own, values.base, paired, margins)
    # Six pairs, or 3 and 3 runs, have too few rearrangements: a single one would decide.
    if least > alpha / 5 or p <= alpha:
        return ""
    return (
        " Not confirmed by a permutation test, which does not assume that noise is normal: "
        f"p = {100 * p:.2g} % for what is claimed at {100 * alpha:.2g} %; run more {values.unit}s."
    )


def _strange(values: _Values) -> str:
    """Return what speaks against the test in the values: no scatter, or one far from all."""
    text, question, (mode, baseline) = "", values.question, values.arms
    arms = [
        (values.own, values.own_seeds, "this mode", mode),
        (values.base, values.base_seeds, baseline.reference, baseline),
    ]
    for shown, _, whose, _ in arms:
        if baseline.foreign and len(set(shown)) == 1:
            text += (
                f" All {len(shown)} runs of {whose} ended with the same value: such a test says "
                "nothing of other runs."
            )
    verb, of, sign = "ended", "at ", -1 if question.higher_is_better else 1
    if values.method == "paired":  # the differences are tested; positive stays worse
        both = [a - b for a, b in zip(values.own, values.base, strict=True)]
        verb, of, sign, arms = "differs", "by ", 1, [(both, *arms[0][1:])]
    for judged, seeds, whose, arm in arms:
        place = equivalence.outlier(judged)
        if place is None:
            continue
        shown = [sign * value for value in judged]
        if verb == "ended" and question.as_logarithm:
            shown = [math.exp(value) for value in shown]
        others = [*shown[:place], *shown[place + 1 :]]
        run = next(run for run in arm.runs if run.seed == seeds[place])
        text += (
            f" One stands out: {run.path if run.foreign else f'seed {run.seed}'} of {whose} {verb} "
            f"{of}{shown[place]:.4g}, the others {of}{min(others):.4g} to {max(others):.4g}; look "
            "at that run before more are made."
        )
    return text


def _too_few(values: _Values, wanted: int) -> Verdict:
    """Return no verdict for fewer than `wanted` seeds, with the difference so far if known."""
    has, counted = values.fewest, f"{values.unit}s"
    seeds = values.method, values.own_seeds, values.base_seeds
    sentence = f"inconclusive: needs at least {wanted} {counted} (has {has})."
    verdict = Verdict("inconclusive", sentence, *seeds, needed=wanted - has)
    if has:
        own, base = (math.fsum(arm) / len(arm) for arm in (values.own, values.base))
        verdict.difference = own - base
    # A relative margin needs a mean; an arm may have no run.
    if values.base and (any(values.base) or not values.question.relative):
        margin, unit, whole = _margin_and_unit(values)
        verdict.margin = whole * margin
        if verdict.difference is not None:
            difference = verdict.difference / whole
            so_far = unit.text(difference, margin, difference)
            turned = " (positive is worse)" if unit.turned else ""
            verdict.sentence += f" Difference so far: {so_far}{unit.suffix}{turned}."
    return verdict


def _without_partner(own: list[Outcome], base: list[Outcome], values: _Values) -> str:
    """Name the seeds that pairing left out: "having no partner: seed 6 of this mode"."""
    parts, reference = [], values.arms[1].reference
    used = (own, values.own_seeds, "this mode"), (base, values.base_seeds, reference)
    for arm, seeds, name in used:
        extra = [str(outcome.seed) for outcome in arm if outcome.seed not in seeds]
        if extra:
            parts.append(f"seed{'s' * (len(extra) > 1)} {', '.join(extra)} of {name}")
    return f"having no partner: {'; '.join(parts)}" if parts else ""


def assess(
    proto: ProtoGroup,
    *,
    metric: str | None = None,
    margin: float | None = None,
    looks: Sequence[int] = (),
    higher_is_better: bool | None = None,
    absolute: bool = False,
) -> Group:
    """Judge every arm of `proto` against its baseline.

    metric, margin: used instead of those in the runs' configuration. higher_is_better: for a
    metric whose direction the runs do not tell, or a foreign tag. absolute: the margin is in the
    metric's unit, as it always is for points and fractions. BadInput: see `judge`.
    """
    keys, base = proto.keys, proto.baseline
    name = metric or keys.get("compare.metric")
    if name is None or (not base.foreign and "compare.window" not in keys):
        raise BadInput("compare.metric, compare.window: the runs differ in it; give --metric")
    known = _metric(proto, name, higher_is_better)
    question = _question(proto, known, margin, absolute)
    question.looks = looks
    rows = [_row(arm, base, *judge(arm, base, question)) for arm in proto.arms]
    # Use the mean of the runs behind the differences, if they are the same for all modes.
    compared = {tuple(row.verdict.baseline_seeds) for row in rows if row.verdict.method}
    verdict = Verdict("baseline", "", seeds=[*compared.pop()] if len(compared) == 1 else [])
    group = Group(
        **asdict(question),
        title=proto.title,
        slug=proto.slug,
        baseline=_row(base, base, verdict, outcomes(base, base, question)),
        rows=rows,
        keys=keys,
        notes=list(proto.notes),
    )
    samples, margin = keys.get("data.eval_samples"), question.margin_setting
    whole = 100 if known.unit == "points" else 1
    if known.counts_samples and samples and whole / samples > margin / 2:
        group.notes.append(
            f"one evaluated sample is {whole / samples:.2g}{' points' * (whole == 100)}, too "
            f"coarse for a margin of {margin:g}: matches by rounding are likely; evaluate on more "
            "samples"
        )
    for row in [] if question.gan else group.rows:
        _check_first_steps(row, base)
    return group


def comparable(*folders: Path) -> bool:
    """Return whether a comparison of the runs in the folders judges a group of them."""
    try:
        return any(map(_is_assessed, group_runs(load_runs(folders)[0])[0]))
    except (MprunError, OSError):
        return False


def _is_assessed(proto: ProtoGroup) -> bool:
    with suppress(BadInput):
        assess(proto)
        return True
    return False


def _metric(proto: ProtoGroup, name: str, higher: bool | None) -> Metric:
    """Return the metric as the runs have it; higher: the direction on the command line.

    Raises BadInput if neither tells the direction, or two contradict each other.
    """
    if proto.baseline.foreign:
        return stated(name, bool(higher))
    evals = (one for run in proto.every_run for one in run.evals)
    known = dict.fromkeys(one for one in evals if one not in NO_METRIC)
    if known and name not in known:
        raise BadInput(
            f"compare.metric={name}: not in the runs' evaluations; {must_be(name, known)}"
        )
    found: dict[tuple[bool, str], tuple[Metric, str]] = {}  # direction, unit -> one, of which run
    for run in proto.every_run:
        if (own := run.metric_called(name)) is not None:
            found.setdefault((own.higher_is_better, own.unit), (own, run.path))
    if not found and higher is None:
        raise BadInput(
            f"compare.metric={name}: is more of it better, or less? The runs do not say; give "
            "--higher-is-better (with --margin X in its unit) or --lower-is-better"
        )
    if len(found) > 1:
        (one, path), (other, another) = [*found.values()][:2]
        raise BadInput(
            f"compare.metric={name}: runs contradict each other: {one.direction} is better "
            f"({one.unit}) or {other.direction} ({other.unit}), in {path} and {another}"
        )
    metric, path = next(iter(found.values()), (stated(name, bool(higher)), ""))
    if higher not in (None, metric.higher_is_better):
        flag = "--higher-is-better" if higher else "--lower-is-better"
        raise BadInput(f"{flag}: {metric.direction} {name} is better in {path}")
    return metric


def _question(proto: ProtoGroup, metric: Metric, margin: float | None, absolute: bool) -> Question:
    """Return the question asked of the runs; margin None: the runs' own for their metric."""
    keys = proto.keys
    if margin is None and keys.get("compare.metric") == metric.name:
        if "compare.margin" not in keys:
            raise BadInput("compare.margin: the runs differ in it; give --margin")
        margin = keys["compare.margin"]
    if margin is None:
        declared = [own for run in proto.every_run if (own := run.metric_called(metric.name))]
        found = {own.margin_on(keys.get("data.name")) for own in declared or [metric]}
        if len(found) > 1:
            several = ", ".join(sorted("none" if one is None else f"{one:g}" for one in found))
            raise BadInput(
                f"the runs differ in the margin of {metric.name} ({several}): give --margin"
            )
        margin = found.pop()
    if margin is None:
        raise BadInput(f"compare.margin=null: {metric.name} needs --margin X, in its own unit")
    relative = metric.relative and not absolute
    if relative and margin >= 0.5:
        raise BadInput(
            f"margin {margin:g}: is relative, 0.01 means 1 %; must be below 0.5 (--absolute: in "
            "the unit of the metric)"
        )
    return Question(
        metric=metric.name,
        higher_is_better=metric.higher_is_better,
        unit=metric.unit,
        relative=relative,
        margin_setting=margin,
        window=keys.get("compare.window", 1),
        gan=is_gan(keys),
        by_seed=proto.by_seed,
    )


def _row(arm: Arm, baseline: Arm, verdict: Verdict, own: list[Outcome]) -> Row:
    # Only the compared seeds, so that means and difference agree.
    used = set(verdict.seeds) or {outcome.seed for outcome in own}
    finite = [o.value for o in own if math.isfinite(o.value) and o.seed in used]
    costs = _costs(arm.runs)
    # Ratios need the same device and the same probing on both sides.
    alike = len({_device(run) for run in (*arm.runs, *baseline.runs)}) == 1
    speedup, memory_ratio, saved_ratio = (
        one / other if alike and one is not None and other else None
        for one, other in zip(costs, _costs(baseline.runs), strict=True)
    )
    ends = [end for run in arm.runs for end in run.scale_range or ()]
    return Row(
        arm,
        verdict,
        own,
        mean=statistics.fmean(finite) if finite else None,
        skipped=None if arm.foreign else sum(run.skipped for run in arm.runs),
        scale_range=(min(ends), max(ends)) if ends else None,
        samples_per_s=costs[0],
        speedup=speedup,
        peak_bytes=costs[1],
        memory_ratio=memory_ratio,
        saved_ratio=saved_ratio,
        audit=audit_of(arm.runs),
        notes=post_mortems(arm.runs) + skip_notes(arm.runs) + audit_notes(arm.runs),
    )


def _costs(runs: list[RunData]) -> tuple[float | None, int | None, int | None]:
    """Return median speed, largest peak memory and memory kept for backward, if known."""
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
    """Return the median |loss / FP32 loss - 1| over the first 20 steps; None: not known."""
    count = min(len(own.first_losses), len(other.first_losses))
    # After a skipped update, equal steps mean different numbers of updates.
    skips = [*own.skip_steps[:1], *other.skip_steps[:1]]
    if count < 2 or own.foreign or any(step <= count for step in skips):
        return None
    with np.errstate(all="ignore"):
        distance = np.abs(own.first_losses[:count] / other.first_losses[:count] - 1)
    distance = distance[np.isfinite(distance)]
    return float(np.median(distance)) if len(distance) else None


def _check_first_steps(row: Row, baseline: Arm) -> None:
    """Set the row's distance over the first steps at equal seeds, the median over the seeds."""
    by_seed = {run.seed: run for run in baseline.runs}
    pairs = [(run, by_seed[run.seed]) for run in row.arm.runs if run.seed in by_seed]
    medians = [found for pair in pairs if (found := _first_distance(*pair)) is not None]
    if not medians:
        return
    row.first_steps = statistics.median(medians)
    if row.first_steps > FIRST_STEPS_WARNING:
        row.notes.append(
            f"already {100 * row.first_steps:.0f} % from the baseline's loss within the first 20 "
            "steps at equal seeds: look for a wrong cast, scale or setting"
        )

"""Turn the runs of a group into its verdicts, costs and warnings."""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from mprun.comparison.decision import Decision, Tested, TooFew, decide
from mprun.comparison.divergence import outcomes
from mprun.comparison.findings import Arm, Group, Outcome, Question, Row, RunData, Verdict, is_gan
from mprun.comparison.grouping import ProtoGroup, group_runs
from mprun.comparison.load import audit_notes, audit_of, load_runs, post_mortems, skip_notes
from mprun.comparison.planned import of_plan
from mprun.comparison.sentence import sentence_of, without_partner
from mprun.errors import BadInput, MprunError
from mprun.record.metric_facts import Metric, stated
from mprun.record.metrics_columns import NO_METRIC
from mprun.spelling import must_be

# Same-seed losses of a correct mode stay within about 1 % for 20 steps (measured on one small
# model); an error in a cast or in unscaling shows here first. This is a warning, never a verdict.
FIRST_STEPS_WARNING = 0.05


def judge(arm: Arm, baseline: Arm, question: Question) -> tuple[Verdict, list[Outcome]]:
    """Return the verdict on `arm`, and the outcomes of its runs; BadInput: see `decide`.

    Runs of a sweep until decided are judged by the plan in their records.
    """
    plan, arm, baseline = of_plan(arm, baseline)
    if plan is not None and question.looks:
        raise BadInput(
            f"--looks {','.join(map(str, question.looks))}: the records of {arm.label} "
            f"contain a plan for verdicts at {plan.first} to {plan.most} seeds (until=decided); "
            "omit --looks"
        )
    if plan is not None:
        question = replace(question, looks=plan.looks, spending=True)
    decision = decide(arm, baseline, question)
    return _verdict(decision), decision.ends[0]


def _verdict(decision: Decision) -> Verdict:
    result, name, sentence = decision.result, decision.name, sentence_of(decision)
    most = decision.question.looks[-1] if decision.question.spending else None
    if result is None:
        seeds, base_seeds = ([outcome.seed for outcome in every] for every in decision.ends)
        left_out = decision.left_out
        return Verdict(name, sentence, None, seeds, base_seeds, most=most, left_out=left_out)
    values, without = result.values, without_partner(decision)
    verdict = Verdict(
        *(name, sentence, values.method, values.own_seeds, values.base_seeds),
        needed=decision.needed,
        look=None if decision.look is None else decision.look.at,
        most=most,
        hopeless=None if decision.look is None else decision.look.hopeless,
        left_out=[without] * bool(without) + decision.left_out,
        facts=decision.facts,
    )
    if isinstance(result, Tested):
        whole, interval = result.margin.whole, result.interval
        verdict.difference, verdict.level = whole * interval.difference, interval.level
        verdict.low, verdict.high = whole * interval.low, whole * interval.high
        verdict.margin = whole * result.margin.size
        verdict.least_margin = None if result.least is None else whole * result.least
    elif isinstance(result, TooFew):
        verdict.difference = result.difference
        if (margin := result.margin) is not None:
            verdict.margin = margin.whole * margin.size
    return verdict


def assess(
    proto: ProtoGroup,
    *,
    metric: str | None = None,
    margin: float | None = None,
    looks: Sequence[int] = (),
    higher_is_better: bool | None = None,
    absolute: bool = False,
    pair_sd: float | None = None,
) -> Group:
    """Judge every arm of `proto` against its baseline.

    metric, margin: used instead of those in the runs' configuration. higher_is_better: for a
    metric whose direction the runs do not tell, or a foreign tag. absolute: the margin is in the
    metric's unit, as it always is for points and fractions. pair_sd: used instead of the runs' own,
    where there is one pair of runs. BadInput: see `judge`.
    """
    keys, base = proto.keys, proto.baseline
    name = metric or keys.get("compare.metric")
    if name is None or (not base.foreign and "compare.window" not in keys):
        raise BadInput(
            "compare.metric, compare.window: the runs have different values; pass --metric"
        )
    known = _metric(proto, name, higher_is_better)
    question = _question(proto, known, margin, absolute)
    question.looks, question.pair_sd = looks, pair_sd
    as_set = (None, keys.get("compare.metric")), (None, keys.get("compare.margin"))
    question.as_recorded = metric in as_set[0] and margin in as_set[1] and not absolute
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


def scatters(proto: ProtoGroup) -> Iterator[tuple[Arm, Tested]]:
    """Yield each mode that has a test, and the test of all its seeds, whatever looks are planned.

    BadInput: see `judge`.
    """
    keys = proto.keys
    if (name := keys.get("compare.metric")) is not None and "compare.window" in keys:
        question = _question(proto, _metric(proto, name, None), None, False)
        for arm in proto.arms:
            result = decide(arm, proto.baseline, question).result
            if isinstance(result, Tested):
                yield arm, result


def comparable(*folders: Path) -> bool:
    """Return whether a comparison of the runs in the folders judges a group of them."""
    with suppress(MprunError, OSError):
        for proto in group_runs(load_runs(folders)[0])[0]:
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
            f"compare.metric={name}: is not in the runs' evaluations; {must_be(name, known)}"
        )
    found: dict[tuple[bool, str], tuple[Metric, str]] = {}  # direction, unit -> one, of which run
    for run in proto.every_run:
        if (own := run.metric_called(name)) is not None:
            found.setdefault((own.higher_is_better, own.unit), (own, run.path))
    if not found and higher is None:
        raise BadInput(
            f"compare.metric={name}: the runs record no direction of this metric; pass "
            "--higher-is-better (with --margin X in its unit) or --lower-is-better"
        )
    if len(found) > 1:
        (one, path), (other, another) = [*found.values()][:2]
        raise BadInput(
            f"compare.metric={name}: runs contradict each other: {one.direction} is better (unit: "
            f"{one.unit}) in the first run, {other.direction} is better (unit: "
            f"{other.unit}) in the second: {path}, {another}"
        )
    metric, path = next(iter(found.values()), (stated(name, bool(higher)), ""))
    if higher not in (None, metric.higher_is_better):
        flag = "--higher-is-better" if higher else "--lower-is-better"
        raise BadInput(f"{flag}: contradicts {path}, where {metric.direction} {name} is better")
    return metric


def _question(proto: ProtoGroup, metric: Metric, margin: float | None, absolute: bool) -> Question:
    """Return the question asked of the runs; margin None: the runs' own for their metric."""
    keys = proto.keys
    if margin is None and keys.get("compare.metric") == metric.name:
        if "compare.margin" not in keys:
            raise BadInput("compare.margin: the runs have different values; pass --margin")
        margin = keys["compare.margin"]
    if margin is None:
        declared = [own for run in proto.every_run if (own := run.metric_called(metric.name))]
        found = {own.margin_on(keys.get("data.name")) for own in declared or [metric]}
        if len(found) > 1:
            several = ", ".join(sorted("none" if one is None else f"{one:g}" for one in found))
            raise BadInput(
                f"the runs differ in the margin of {metric.name} ({several}): pass --margin"
            )
        margin = found.pop()
    if margin is None:
        raise BadInput(
            f"compare.margin=null: {metric.name} needs --margin X, in the unit of the metric"
        )
    relative = metric.relative and not absolute
    if relative and margin >= 0.5:
        raise BadInput(
            f"margin {margin:g}: is relative (0.01 means 1 %), and must be below 0.5; pass "
            "--absolute for a margin in the unit of the metric"
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
    speedup, memory_ratio, activation_ratio = (
        one / other if alike and one and other else None
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
        activation_ratio=activation_ratio,
        audit=audit_of(arm.runs),
        notes=post_mortems(arm.runs) + skip_notes(arm.runs) + audit_notes(arm.runs),
    )


def _costs(runs: list[RunData]) -> tuple[float | None, int | None, int | None]:
    """Return median speed, largest peak memory and activation memory, if known."""
    speeds, peaks, activations = (
        [value for run in runs if (value := getattr(run, name))]
        for name in ("samples_per_s", "peak_bytes", "activation_bytes")
    )
    speed = statistics.median(speeds) if speeds else None
    return speed, max(peaks, default=None), max(activations, default=None)


def _device(run: RunData) -> tuple:
    found = run.environment
    probed = [run.keys.get(f"numerics.{key}") for key in ("probes", "every", "shadow_every")]
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

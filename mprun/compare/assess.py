"""From runs that belong together to a group with verdicts, costs and warnings."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from mprun.compare.arms import is_gan
from mprun.compare.divergence import ENDED, outcomes
from mprun.compare.findings import Arm, Group, Outcome, Row, RunData, Verdict
from mprun.compare.grouping import ProtoGroup, post_mortems
from mprun.compare.verdict import judge
from mprun.config.check import ACCURACIES, default_margin
from mprun.errors import BadInput

# Same-seed losses of a correct mode stay within about 1 % for 20 steps (measured on one small
# model); an error in a cast or in unscaling shows here first. A warning, never a verdict.
FIRST_STEPS_WARNING = 0.05


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
    accuracy = higher_is_better if foreign else metric in ACCURACIES
    if margin is None:
        configured = keys.get("compare.metric") == metric
        data = keys.get("data.name")
        margin = keys.get("compare.margin") if configured else None
        margin = default_margin(metric, data) if margin is None else margin
    if metric is None or (not foreign and "compare.window" not in keys):
        raise BadInput("compare.metric, compare.window: the runs differ in it; give --metric")
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


def _row(arm: Arm, baseline: Arm, verdict: Verdict, own: list[Outcome]) -> Row:
    ended = [run for run in arm.runs if run.status in ENDED]
    ranges = [run.scale_range for run in ended if run.scale_range is not None]
    # The seeds that were compared, so that means and difference agree.
    used = set(verdict.seeds) or {outcome.seed for outcome in own}
    finite = [o.value for o in own if math.isfinite(o.value) and o.seed in used]
    return Row(
        arm=arm,
        verdict=verdict,
        outcomes=own,
        mean=statistics.fmean(finite) if finite else None,
        skipped=sum(run.skipped for run in ended),
        scale_range=(min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else None,
        samples_per_s=_median_speed(ended),
        speedup=_ratio(_median_speed, ended, baseline.runs),
        peak_bytes=_largest_peak(ended),
        memory_ratio=_ratio(_largest_peak, ended, baseline.runs),
        saved_ratio=_ratio(_largest_saved, ended, baseline.runs),
        notes=post_mortems(arm.runs),
    )


def _ratio(measure, own: list[RunData], base: list[RunData]) -> float | None:
    """measure(own) / measure(base) where both ran on the same device and were probed alike."""
    base = [run for run in base if run.status in ENDED]
    if len({_device(run) for run in (*own, *base)}) != 1:
        return None
    mine, theirs = measure(own), measure(base)
    return None if mine is None or not theirs else mine / theirs


def _device(run: RunData) -> tuple:
    found = run.environment
    probed = [run.keys.get(f"numerics.{key}") for key in ("enabled", "every", "shadow_every")]
    machine = (found.get("device"), found.get("gpu") or found.get("cpu"), found.get("threads"))
    return (*machine, tuple(probed) if probed[0] else None)


def _median_speed(runs: list[RunData]) -> float | None:
    speeds = [run.samples_per_s for run in runs if run.samples_per_s]
    return statistics.median(speeds) if speeds else None


def _largest_peak(runs: list[RunData]) -> int | None:
    return max((run.peak_bytes for run in runs if run.peak_bytes), default=None)


def _largest_saved(runs: list[RunData]) -> int | None:
    return max((run.saved_bytes for run in runs if run.saved_bytes), default=None)


def _check_first_steps(row: Row, baseline: Arm) -> None:
    """Median |loss / FP32 loss - 1| over steps 1 to 20, same seed, then over seeds."""
    others = {run.seed: run.first_losses for run in baseline.runs}
    skipped = {run.seed: run.skip_steps[:1] for run in baseline.runs}
    medians = []
    for run in row.arm.runs:
        own, other = run.first_losses, others.get(run.seed, np.empty(0))
        count = min(len(own), len(other))
        skips = [*run.skip_steps[:1], *skipped.get(run.seed, ())]
        # After a skipped update equal steps are not equal numbers of updates.
        if count < 2 or run.foreign or any(step <= count for step in skips):
            continue
        with np.errstate(all="ignore"):
            distance = np.abs(own[:count] / other[:count] - 1)
        distance = distance[np.isfinite(distance)]
        if len(distance):
            medians.append(float(np.median(distance)))
    if not medians:
        return
    row.first_steps = statistics.median(medians)
    if row.first_steps > FIRST_STEPS_WARNING:
        row.notes.append(
            f"already {100 * row.first_steps:.0f} % from the baseline's loss within the first 20 "
            "steps at equal seeds: look for a wrong cast, scale or setting"
        )

"""What each run ended with: its final metric, or that it diverged."""

import math

import numpy as np

from mprun.compare.divergence import divergences
from mprun.compare.findings import Arm, Outcome, RunData
from mprun.errors import BadInput

_LARGEST = 1e100  # beyond, sums of squares overflow: as good as infinite
ENDED = ("done", "diverged")  # a run that failed, was preempted or still runs is no outcome


def outcomes(arm: Arm, baseline: Arm, *, metric: str, window: int, gan: bool) -> list[Outcome]:
    """What each ended run of `arm` ended with, seeds ascending; `arm` may be the baseline itself.

    The value is the mean of the metric over the last `window` evaluations; of perplexity the
    geometric mean, the exponential of the mean loss; of a foreign log the mean over the last
    max(3, 10 %) values. A value that is not finite counts as diverged. BadInput: see `judge`.
    """
    runs = ended_runs(arm)
    reasons = divergences(runs, ended_runs(baseline), gan=gan)
    found = []
    for run, reason in zip(runs, reasons, strict=True):
        if reason is None:
            found.append(_outcome(run, metric, window))
        else:
            found.append(Outcome(run.seed, math.nan, *reason))
    return found


def refuse_other_lengths(arm: Arm, baseline: Arm, window: int) -> None:
    """BadInput unless all ended runs were evaluated last at the same steps.

    Runs of another length are another experiment, even where the configurations agree. Foreign
    logs must end at the same step and average over the same stretch, but for one interval. For
    runs none of which diverged.
    """
    expected = None
    for run in ended_runs(baseline) + ended_runs(arm):
        # Foreign logs may be spaced otherwise; where they end must agree all the same.
        steps = run.evals["step"][-(1 if run.foreign else window) :].tolist()
        if expected is None:
            expected, first = steps, run
        elif steps != expected:
            raise BadInput(
                f"{run.path}: evaluated last at step {_steps_text(steps)}, {first.path} at step "
                f"{_steps_text(expected)}: must be the same, runs of different length are not "
                "compared"
            )
        if run.foreign:
            _refuse_other_stretch(run, first)


def _refuse_other_stretch(run: RunData, first: RunData) -> None:
    stretches = [one.evals["step"][-_width(one, 1) :] for one in (run, first)]
    interval = max(float(np.diff(steps).max(initial=0.0)) for steps in stretches)
    starts = [float(steps[0]) for steps in stretches]
    if abs(starts[0] - starts[1]) > interval:
        raise BadInput(
            f"{run.path}: its last tenth begins at step {starts[0]:.0f}, that of {first.path} at "
            f"{starts[1]:.0f}: must be the same; log at equal intervals"
        )


def ended_runs(arm: Arm) -> list[RunData]:
    """The runs of `arm` that have an outcome, seeds ascending."""
    return sorted((run for run in arm.runs if run.status in ENDED), key=lambda run: run.seed)


def _outcome(run: RunData, metric: str, window: int) -> Outcome:
    asked = f"{run.path}: {'--tag' if run.foreign else 'compare.metric'}={metric}"
    column = run.evals.get(metric)
    if column is None:
        known = ", ".join(name for name in run.evals if name not in ("step", "updates"))
        raise BadInput(f"{asked}: not in its evaluations; must be one of {known or '(none)'}")
    if column.size == 0:
        raise BadInput(f"{asked}: the run has no evaluation")
    width = _width(run, window)
    if column.size < width:
        raise BadInput(
            f"{asked}: compare.window={window}: must be at most the "
            f"{column.size} evaluations of the run"
        )
    last = column[-width:].tolist()
    for value, step in zip(last, run.evals["step"][-width:].tolist(), strict=True):
        if not abs(value) < _LARGEST:  # NaN too
            return Outcome(run.seed, math.nan, f"non-finite {metric} in an evaluation", int(step))
    if metric == "perplexity" and min(last) <= 0:
        raise BadInput(f"{asked}: is {min(last):g}; a perplexity must be above 0")
    if width == 1:
        return Outcome(run.seed, last[0])
    if metric == "perplexity":
        return Outcome(run.seed, math.exp(math.fsum(map(math.log, last)) / width))
    return Outcome(run.seed, math.fsum(last) / width)


def _width(run: RunData, window: int) -> int:
    """Evaluations that are averaged; a foreign log has no configuration that could say."""
    if not run.foreign:
        return window
    size = run.evals["step"].size
    return min(size, max(3, math.ceil(size / 10)))


def _steps_text(steps: list[float]) -> str:
    return ", ".join(f"{step:.0f}" for step in steps) or "none"

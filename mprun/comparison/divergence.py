"""Decide whether a run diverged, by a deterministic rule per run, before any statistics.

A run diverged if one of these holds:
(a) It is recorded as diverged, or its loss was not finite at an applied step.
(b) More than 50 updates in a row were skipped.
(c) It made less than 10 % of the baseline's progress: its final smoothed training loss is above L0
- 0.1 (L0 - B). L0 is the mean of its first 10 recorded losses, B the mean final smoothed loss of
the baseline. It is skipped where it can say nothing: for GANs, whose losses measure no progress,
without losses of the first 20 steps, or if the baseline's own progress does not exceed the scatter
of its single losses (with random labels, say).

A foreign log can only show (a): non-finite values among those that give its outcome.
"""

import math
from collections.abc import Sequence

import numpy as np

from mprun.comparison.findings import Arm, Outcome, Question, RunData
from mprun.errors import BadInput

MOST_SKIPS_IN_A_ROW = 50
LEAST_PROGRESS = 0.1  # relative to the baseline's


def divergences(
    runs: Sequence[RunData], baseline: Sequence[RunData], *, gan: bool
) -> list[tuple[str, int | None] | None]:
    """Return per run the reason and the step (None: not known), or None if it did not diverge.

    For (c), a baseline run is compared with the others; if there is none, (c) is skipped.
    """
    if gan:
        return [_failed_itself(run) for run in runs]
    ends = [
        (run, final, _scatter(run))
        for run in baseline
        if not (run.foreign or _failed_itself(run))
        and (final := _finite_mean(run.last_losses)) is not None
    ]
    return [_failed_itself(run) or _learned_nothing(run, ends) for run in runs]


def baseline_progress(
    baseline: Sequence[RunData], metric: str, *, gan: bool, higher_is_better: bool = False
) -> str | None:
    """Return the numbers that show that the baseline learned next to nothing itself.

    The mean loss over the first 10 steps must exceed that over the last tenth of the records by
    twice the standard error of both, estimated from the scatter of single losses. The metric of a
    GAN must improve by a tenth from the first to the last evaluation. Returns None if the baseline
    learned, or if the records cannot tell.
    """
    runs = [run for run in baseline if not run.foreign]
    ends = [_start_and_end(run, metric if gan else None) for run in runs]
    if not ends or None in sum(ends, ()):
        return None
    start, end = (sum(values) / len(runs) for values in zip(*ends, strict=True))
    if gan:
        low, high = (start, end) if higher_is_better else (end, start)
        return None if low < 0.9 * high else f"{metric} {start:.4g} to {end:.4g}"
    count = min(min(10, run.first_losses.size, run.last_losses.size) for run in runs)
    scatter = sum(map(_scatter, runs)) / len(runs)
    if start - end > 2 * scatter * (2 / count) ** 0.5:
        return None
    return f"training loss {start:.4g} to {end:.4g}"


def _start_and_end(run: RunData, metric: str | None) -> tuple[float | None, float | None]:
    """Return the metric's first and last value (None: of the training loss); None: not known."""
    if metric is None:
        return _finite_mean(run.first_losses[:10]), _finite_mean(run.last_losses)
    values = run.evals.get(metric, np.empty(0)).tolist()
    return (values[0], values[-1]) if len(values) > 1 else (None, None)


def _failed_itself(run: RunData) -> tuple[str, int | None] | None:
    """Apply rules (a) and (b)."""
    if run.status == "diverged":
        step = run.last_step if run.nonfinite_step is None else run.nonfinite_step
        return run.cause or "recorded as diverged", step
    if run.nonfinite_step is not None:
        return "non-finite loss", run.nonfinite_step
    if run.longest_skip_streak > MOST_SKIPS_IN_A_ROW:
        return f"{run.longest_skip_streak} skipped updates in a row", _streak_step(run)
    return None


def _learned_nothing(
    run: RunData, ends: list[tuple[RunData, float, float]]
) -> tuple[str, int] | None:
    """Apply rule (c).

    ends: baseline runs that pass (a) and (b), with the mean and the scatter of the last losses.
    """
    if run.foreign or run.last_losses.size == 0:
        return None
    start, final = _start_and_end(run, None)
    if final is None:
        return "no finite training loss at the end", run.last_step
    others = [end for end in ends if end[0] is not run]
    if not others or start is None:
        return None
    _, theirs, scatters = zip(*others, strict=True)
    reached = sum(theirs) / len(others)
    progress = start - reached
    told = progress > max(0, sum(scatters) / len(others))
    if not told or final <= start - LEAST_PROGRESS * progress:
        return None
    losses = f"training loss {start:.4g} to {final:.4g}, baseline to {reached:.4g}"
    return f"learned next to nothing: {losses}", run.last_step


def _finite_mean(losses: np.ndarray) -> float | None:
    """Return the mean of the finite values (a skipped step may have inf); None if there is none."""
    finite = losses[np.isfinite(losses)]
    return float(finite.sum()) / finite.size if finite.size else None


def _scatter(run: RunData) -> float:
    """Return the standard deviation of single losses in the run's last tenth."""
    return float(np.std(run.last_losses[np.isfinite(run.last_losses)]))


def _streak_step(run: RunData) -> int | None:
    """Return the step of the 51st skip in a row, if the steps of all skips are known."""
    if len(run.skip_steps) != run.skipped:
        return None
    last = run.skip_steps[MOST_SKIPS_IN_A_ROW:]  # compared with the 50th skip before each
    ends = last[last - run.skip_steps[: len(last)] == MOST_SKIPS_IN_A_ROW]
    return int(ends[0]) if len(ends) else None


_LARGEST = 1e300  # sums overflow beyond it: treated as infinite


def outcomes(arm: Arm, baseline: Arm, question: Question) -> list[Outcome]:
    """Return the outcome of each run of `arm`, seeds ascending; `arm` may be the baseline.

    The value is the mean of the metric over the last evaluations (for a foreign log over the judged
    steps), for a perplexity the geometric mean: the exponential of the mean loss. A value that is
    not finite counts as diverged. BadInput: see `judge`.
    """
    reasons = divergences(arm.runs, baseline.runs, gan=question.gan)
    return [
        Outcome(run.seed, math.nan, *reason) if reason is not None else _outcome(run, question)
        for run, reason in zip(arm.runs, reasons, strict=True)
    ]


def refuse_other_lengths(arm: Arm, baseline: Arm, window: int) -> None:
    """Raise BadInput unless the last evaluations of all runs were at the same steps.

    Foreign logs are judged at common steps. Call it only if no run diverged.
    """
    runs = [run for run in baseline.runs + arm.runs if not run.foreign]
    texts = [", ".join(f"{step:.0f}" for step in run.evals["step"][-window:]) for run in runs]
    for run, text in zip(runs, texts, strict=True):
        if text != texts[0]:
            raise BadInput(
                f"{run.path}: was last evaluated at step {text or 'none'}, but {runs[0].path} at "
                f"step {texts[0] or 'none'}. Runs of different length are not compared"
            )


def _outcome(run: RunData, question: Question) -> Outcome:
    metric, window = question.metric, question.window
    asked = f"{run.path}: {'--scalar' if run.foreign else 'compare.metric'}={metric}"
    if metric not in run.evals:
        known = ", ".join(name for name in run.evals if name not in ("step", "updates"))
        raise BadInput(
            f"{asked}: is not in the run's evaluations; must be one of {known or '(none)'}"
        )
    column, steps = run.evals[metric], run.evals["step"]
    if column.size == 0:
        raise BadInput(f"{asked}: the run has no evaluation")
    if run.foreign:
        judged = steps[-foreign_width(len(steps)) :] if run.judged is None else run.judged
        last = column[np.isin(steps, judged)].tolist()
    else:
        last = column[-window:].tolist()
    if len(last) < window:
        raise BadInput(
            f"{asked}: compare.window={window}: must be at most {column.size}, the number of "
            "evaluations of the run"
        )
    step = nonfinite_from(run, metric, window)
    if step is None and not all(abs(value) < _LARGEST for value in last):
        step = float(steps[np.isin(steps, judged) & ~(np.abs(column) < _LARGEST)][0])
    if step is not None:
        where = "" if run.foreign else " in an evaluation"
        return Outcome(run.seed, math.nan, f"non-finite {metric}{where}", int(step))
    if question.as_logarithm and min(last) <= 0:
        raise BadInput(f"{asked}: is {min(last):g}; a perplexity must be above 0")
    if len(last) == 1:  # as recorded, to the bit
        return Outcome(run.seed, last[0])
    logs = map(math.log, last) if question.as_logarithm else last
    mean = math.fsum(logs) / len(last)
    return Outcome(run.seed, math.exp(mean) if question.as_logarithm else mean)


def nonfinite_from(run: RunData, metric: str, window: int = 1) -> float | None:
    """Return the step from which on `metric` is not finite; None if its last values are finite.

    It is the start of the non-finite stretch with the first bad value among the last: `window`
    evaluations, or max(3, 10 %) of the values of a foreign log.
    """
    column, steps = run.evals[metric], run.evals["step"]
    width = foreign_width(len(column)) if run.foreign else window
    bad = ~(np.abs(column) < _LARGEST)  # NaN too
    last = np.flatnonzero(bad[-width:])
    if not len(last):
        return None
    first = len(column) - len(bad[-width:]) + last[0]
    before = np.flatnonzero(~bad[:first])
    return float(steps[before[-1] + 1 if len(before) else 0])


def foreign_width(count: int) -> int:
    """Return how many of `count` values to average; a foreign log has no configured window."""
    return min(count, max(3, math.ceil(count / 10)))

"""Follow the gap between a mode and the baseline over steps, and test whether it grows.

Failures of low precision come late. A verdict on the last evaluation sees those that have happened;
the gap at equal steps and seeds shows the trend.

The test is a one-sided t test of the least-squares slopes of the seeds' gaps over the last half of
the steps. Neighbouring gaps of one seed may be correlated; the slopes of different seeds are not.
"""

import math
from dataclasses import dataclass

import numpy as np

from mprun.comparison.decision import GAN_LOSSES, pairing
from mprun.comparison.equivalence import ALPHA, FEWEST_SEEDS, Interval, estimate, paired_interval
from mprun.comparison.findings import (
    Band,
    Curve,
    Gap,
    Group,
    Row,
    RunData,
    at_shared_steps,
    curve,
    grid,
    on_grid,
)
from mprun.comparison.sentence import ROUNDING
from mprun.comparison.wording import baseline_name, seeds_text, signed, unit

_Values = dict[int, np.ndarray]  # seed -> float64 [points]
POINTS = 60  # points of a gap that is tested and recorded; more records are averaged into them
FEWEST_POINTS = 3  # points needed in the last half


@dataclass(frozen=True, slots=True)
class Plot:
    """The columns of the runs that a figure of curves shows, with their names."""

    name: str
    title: str
    xlabel: str
    ylabel: str
    x: str
    y: str
    of_evals: bool = False

    def curve_of(self, run: RunData) -> Curve:
        """Return the curve that a run recorded."""
        return curve(run.evals if self.of_evals else run.train, self.x, self.y)


TRAINING = tuple(
    Plot(name, f"Training loss over {title}", xlabel, "training loss", x, "loss")
    for name, title, xlabel, x in (
        ("loss-steps", "steps", "step", "step"),
        ("loss-updates", "applied updates", "applied updates", "updates"),
    )
)


def evaluation(metric: str) -> Plot:
    """Return the plot of an evaluation metric over steps."""
    name = "".join(c if c.isalnum() or c in "_-" else "_" for c in metric)
    return Plot(f"eval-{name}", f"Evaluation: {metric}", "step", metric, "step", metric, True)


def shared_curves(group: Group, plot: Plot) -> list[Curve]:
    """Return the curve of each of `group.every_run` at the steps that they share.

    Nothing lies beyond the last step at which foreign logs are judged.
    """
    judged = [run.judged[-1] for run in group.every_run if run.judged is not None]
    read = [plot.curve_of(run) for run in group.every_run]
    return at_shared_steps(read, max(judged, default=np.inf))


def differences(group: Group, plot: Plot, points: int) -> list[tuple[Row, Band, str]]:
    """Return (row, mode minus baseline over x, "paired" or "Welch") per mode; positive is worse.

    Each point alone is treated as in the verdict: the same pairing, unit and interval (90 %), which
    needs three seeds that still run. Two seeds in all give their range, one gives none. Differences
    are in percent of the baseline's mean there, if the verdict is relative or on another quantity.
    """
    x, base, others = _by_seed(group, plot, points)
    found, relative = [], group.relative or not plot.of_evals
    for row, own in zip(group.rows, others, strict=True):
        method, seeds, base_seeds = pairing(list(own), list(base), group.by_seed)
        if seeds and base_seeds:
            arms = np.stack([own[s] for s in seeds]), np.stack([base[s] for s in base_seeds])
            pairs = zip(arms[0].T, arms[1].T, strict=True)
            at_points = [_difference(*pair, method, relative) for pair in pairs]
            found.append((row, Band(x, *np.array(at_points).reshape(-1, 3).T), method))
    return found


def _by_seed(group: Group, plot: Plot, points: int) -> tuple[np.ndarray, _Values, list[_Values]]:
    """Return x [points], and the judged values of the baseline and of every other row."""
    curves = shared_curves(group, plot)
    x, remaining = grid(curves, points), iter(curves)

    def judged(of_run: Curve) -> np.ndarray:
        """Return the values of a run at x; lower is better."""
        values = on_grid(*of_run, x)
        with np.errstate(all="ignore"):
            values = np.log(values) if plot.of_evals and group.as_logarithm else values
        return -values if plot.of_evals and group.higher_is_better else values

    base, *others = (
        {run.seed: judged(next(remaining)) for run in row.arm.runs} for row in group.every_row
    )
    return x, base, others


def _difference(
    own: np.ndarray, base: np.ndarray, method: str, relative: bool
) -> tuple[float, float, float]:
    """Return (difference, low, high) at one point, NaN where unknown; one value per seed."""
    known = np.isfinite(own), np.isfinite(base)
    if method == "paired":
        known = (known[0] & known[1],) * 2
    seeds, (own, base) = len(own), (own[known[0]], base[known[1]])
    if not len(own) or not len(base):
        return (np.nan,) * 3
    mean = float(base.mean())
    if min(len(own), len(base)) >= FEWEST_SEEDS:
        found = estimate(own.tolist(), base.tolist(), method, relative)
        unit = 100.0 if relative else 1.0
        if not math.isfinite(found.high - found.low):
            return unit * found.difference, np.nan, np.nan
        return unit * found.difference, unit * found.low, unit * found.high
    unit = (100 / abs(mean) if mean else np.nan) if relative else 1.0
    low = high = np.nan
    if method == "paired" and len(own) == seeds == 2:
        low, high = sorted(own - base)
    return unit * (float(own.mean()) - mean), unit * low, unit * high


def follow_gaps(group: Group) -> None:
    """Give each row of a judged group its gap over steps, if there are curves.

    The gap is in the judged metric, or in the training loss if the last half of the steps has fewer
    than three evaluations.
    """
    plots = [] if group.gan and group.metric in GAN_LOSSES else [evaluation(group.metric)]
    plots += [] if group.gan or group.baseline.arm.foreign else TRAINING[:1]
    if len(plots) > 1:
        runs = group.baseline.arm.runs
        own = zip(runs, shared_curves(group, plots[0]), strict=False)
        late = [2 * x >= run.last_step for run, (x, _) in own]
        plots = plots if all(at.sum() >= FEWEST_POINTS for at in late) else plots[1:]
    for plot in plots[:1]:
        _, base, others = _by_seed(group, plot, POINTS)
        values = {row.arm.label: own for row, own in zip(group.rows, others, strict=True)}
        for row, band, _ in differences(group, plot, POINTS):
            if np.isfinite(band.mean).any():
                row.gap = _gap(group, row, plot, band, values[row.arm.label], base)


def _gap(group: Group, row: Row, plot: Plot, band: Band, own: _Values, base: _Values) -> Gap:
    evaluated = plot.of_evals and not group.baseline.arm.foreign
    of = f"{plot.ylabel} of the evaluations" if evaluated else plot.ylabel
    in_unit = unit(group) if plot.of_evals else "%"
    why = _why_not(row)
    gap = Gap(of, plot.of_evals, in_unit, band, "not assessed", f"not assessed: {why}.")
    if why is None:
        seeds = row.verdict.seeds
        values, reference = (np.stack([arm[seed] for seed in seeds]) for arm in (own, base))
        gaps = paired_gaps(values, reference, group.relative or not plot.of_evals)
        x, gaps = last_half(band.x, gaps)
        if len(x) >= FEWEST_POINTS:
            gap.seeds, gap.level = seeds, row.verdict.level
            _test(gap, group, x, gaps)
        else:
            few = f"fewer than {FEWEST_POINTS} steps of the last half are in all curves"
            gap.sentence = f"not assessed: {few}."
    return gap


def _why_not(row: Row) -> str | None:
    """Return why the slopes of a row are not tested; None if they are."""
    verdict = row.verdict
    if verdict.method is None or verdict.name == "diverged":
        return f"the verdict is '{verdict.name}'"
    if verdict.method != "paired":
        return "the runs are not paired by seed"
    if verdict.low is None:
        count = len(verdict.seeds)
        has = "one seed" if count == 1 else f"{count} seeds"
        return f"{has} ({count + (verdict.needed or 0)} are needed)"
    return None


def paired_gaps(own: np.ndarray, base: np.ndarray, relative: bool) -> np.ndarray:
    """Return float64 [seeds, points]: own - base per seed; own and base are [seeds, points].

    If `relative`, it is in percent of the mean of `base` at that point. That mean errs with the
    seeds, too: each seed's gap has its share of the error, so that their scatter contains it.
    """
    if not relative:
        return own - base
    gaps, mean = own - base, base.mean(0)
    with np.errstate(all="ignore"):
        return (gaps - gaps.mean(0) * (base / mean - 1)) * (100 / np.abs(mean))


def last_half(x: np.ndarray, gaps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the points from half of the last step on at which all seeds have a gap."""
    known = np.isfinite(gaps).all(0)
    x, gaps = x[known], gaps[:, known]
    late = x >= x.max() / 2 if len(x) else known[:0]
    return x[late], gaps[:, late]


def slope_interval(x: np.ndarray, gaps: np.ndarray, alpha: float = ALPHA) -> Interval:
    """Return the interval for the mean over seeds of each gap's least-squares slope against x.

    The gap grows, with error rate `alpha`, if the interval lies above 0: a t test with seeds - 1
    degrees of freedom. gaps: float64 [seeds >= 2, points >= 2].
    """
    away = x - x.mean()
    slopes = gaps @ (away / (away @ away))
    return paired_interval(slopes.tolist(), [0.0] * len(slopes), alpha)


def _test(gap: Gap, group: Group, x: np.ndarray, gaps: np.ndarray) -> None:
    """Run the test and fill in the gap's sentence."""
    interval = slope_interval(x, gaps, (1 - gap.level) / 2)
    gap.steps = (float(x[0]), float(x[-1]))
    gap.per = 10 ** max(0, math.floor(math.log10(x[-1] - x[0])))
    numbers = [gap.per * part for part in (interval.difference, interval.low, interval.high)]
    gap.slope, gap.low, gap.high = numbers
    gap.end = float(gaps.mean() + interval.difference * (x[-1] - x.mean()))
    # Growth over the tested steps, in the gap's unit, that differs from rounding.
    margin = group.margin_setting if gap.of_evals or group.relative else 0.01
    margin *= 100 if gap.unit == "%" else 1
    least = ROUNDING * margin / float(x[-1] - x[0])
    gap.name = "grows" if interval.low > least else "no growth seen"
    digits_of = max(map(abs, numbers)) / 2 or 1.0  # shows two to three digits of the largest
    slope, low, high = (signed(number, digits_of, numbers) for number in numbers)
    per = "step" if gap.per == 1 else f"{gap.per:,} steps"
    in_unit = f"{gap.unit} per {per}".strip()
    around = f"({100 * gap.level:.3g} % interval {low} to {high})"
    base = baseline_name(group)
    if gap.name == "grows" and gap.end < 0:
        text = f"the lead over {base} shrinks: {slope} {in_unit} {around}"
    elif gap.name == "grows":
        text = f"the gap to {base} grows by {slope} {in_unit} {around}"
    elif max(map(abs, (interval.low, interval.high))) <= least and not interval.identical:
        text = "no growth seen (no more than rounding)"
    elif interval.identical:
        text = "no growth seen (no gap changes)"
    elif interval.high < 0:
        text = f"no growth seen: {slope} {in_unit} {around}"
    else:
        text = f"no growth seen (at most {high} {in_unit})"
    over = f"{gap.of}, steps {x[0]:,.0f} to {x[-1]:,.0f}"
    gap.sentence = f"{text}; {over}, seeds {seeds_text(gap.seeds)}."

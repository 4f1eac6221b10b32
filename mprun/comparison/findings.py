"""Plain data for what a comparison reads and finds; every output is made from it.

The curves of several seeds are put on one grid, as their mean and the range of the seeds.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mprun.record.keys import recorded_keys
from mprun.record.metric_facts import Metric, stated, told_by_name
from mprun.record.metrics_columns import MetricsColumns

# All verdicts, in the order in which a table explains them.
VERDICTS = (
    *("matches", "worse", "likely worse", "better", "likely better", "diverged"),
    *("invalid baseline", "inconclusive", "one pair", "not assessed"),
)
Curve = tuple[np.ndarray, np.ndarray]  # x ascending, y; float64 [records]


@dataclass(slots=True, kw_only=True)
class RunData(MetricsColumns):
    """One run, as far as a comparison needs it; scale_range is None without loss scaling."""

    path: str
    mode: str  # precision mode as recorded, e.g. "fp16_master"
    scaler: str
    seed: int
    status: str  # done, diverged, failed, preempted, running
    cause: str | None = None
    keys: dict[str, Any] = field(default_factory=dict)  # flat configuration: "optim.lr" -> 0.1
    choices: dict[str, Any] = field(default_factory=dict)  # Hydra group -> option
    usual_scaler: str | None = None  # the mode's default one; None: not recorded
    config_hash: str = ""
    created: str = ""
    sample: str = "sample"  # "image", "token"
    samples_per_s: float | None = None
    peak_bytes: int | None = None
    memory_measure: str = ""
    activation_bytes: int | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    sample_grid: str | None = None  # path of the newest PNG of generated images
    foreign: bool = False  # read from another tool's log
    judged: np.ndarray | None = None  # foreign log: steps whose values give its outcome
    repeats: list[str] = field(default_factory=list)  # paths of its repeats that also ended
    execution: dict[str, Any] = field(default_factory=dict)  # as recorded
    half_products: str = ""  # as recorded: "none", "emulated-fp16", "native-bf16"
    audit: dict[str, Any] = field(default_factory=dict)  # as recorded; empty: not watched
    bad_batches: dict[str, str] = field(default_factory=dict)  # as recorded
    metrics: dict[str, Metric] = field(default_factory=dict)  # as recorded; empty: not recorded

    @property
    def is_compiled(self) -> bool:
        """Return whether its steps were compiled, but for the first ones."""
        return not str(self.execution.get("compile", "off")).startswith("off")

    def metric_called(self, name: str) -> Metric | None:
        """Return a metric of its evaluations; None if nothing says which way it goes."""
        if name in self.metrics:
            return self.metrics[name]
        if not self.metrics:  # recorded by an earlier mprun
            # A script said higher_is_better, or less of its judged metric was better.
            if "script.file" in self.keys and self.keys.get("compare.metric") == name:
                return stated(name, bool(self.keys.get("compare.higher_is_better")))
            if (declared := recorded_keys().metric_of(self.keys, name)) is not None:
                return declared
        return stated(name, False) if told_by_name(name) is False else None


def is_gan(keys: dict[str, Any]) -> bool:
    """Return whether runs with these keys train a generator against a discriminator."""
    return recorded_keys().networks_in_turn(keys) > 1


@dataclass(slots=True)
class Arm:
    """The runs of one precision mode (and scaler) that have an outcome, by ascending seed."""

    label: str  # "amp", "amp (static)", "fp32 optim.lr=0.05"
    mode: str
    runs: list[RunData]
    differs: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # key -> (baseline's, own)
    notes: list[str] = field(default_factory=list)  # "seed 3: failed (out of memory)"
    missing: list[int] = field(default_factory=list)  # seeds whose run has no outcome
    left_out: list[str] = field(default_factory=list)  # parts of the runs that are not compared

    @property
    def reference(self) -> str:
        """Return its name as the baseline: "FP32" for the usual one."""
        return "FP32" if self.label == "fp32" else self.label

    @property
    def foreign(self) -> bool:
        """Return whether its runs are logs of another tool."""
        return any(run.foreign for run in self.runs)


@dataclass(slots=True)
class Outcome:
    """The final value of one run; `value` is NaN if `diverged` says why."""

    seed: int
    value: float  # the metric, in its own unit
    diverged: str | None = None  # the reason, in words
    step: int | None = None  # of the divergence


@dataclass(slots=True)
class Verdict:
    """The judgement on one mode. Differences are mode minus baseline; positive is worse.

    difference, low, high and margin are in the unit of the judged value: nats for a loss and for
    perplexity, which is judged as its logarithm; percentage points for an accuracy.
    """

    name: str  # one of VERDICTS
    sentence: str
    method: str | None = None  # "paired" or "Welch"
    seeds: list[int] = field(default_factory=list)  # of the mode, as used
    baseline_seeds: list[int] = field(default_factory=list)
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    level: float = 0.90  # confidence of the interval
    needed: int | None = None  # about this many more seeds
    look: int | None = None  # seeds at the look that decided, of several planned ones
    most: int | None = None  # seeds at the last look of a sweep until decided
    hopeless: int | None = None  # about so many seeds would decide; such a sweep stops there
    least_margin: float | None = None  # the smallest that these seeds can show
    left_out: list[str] = field(default_factory=list)  # runs, and parts of them, not judged
    facts: dict[str, Any] = field(default_factory=dict)  # of one run each, see `pair_facts`


@dataclass(slots=True)
class Band:
    """Mean, lowest and highest seed at each x, float64 [points]; NaN if no seed has a value."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(slots=True)
class Gap:
    """A mode minus the baseline over steps, paired by seed, and whether it grows.

    unit: "%" of the baseline's mean at that step, "points", or "" for the metric's own. slope, low,
    high: per `per` steps, with the verdict's confidence; None: not assessed.
    """

    of: str  # "loss of the evaluations", "training loss"
    of_evals: bool  # of the judged metric, not of the training loss
    unit: str
    band: Band  # mean over seeds and 90 % interval at each point alone
    name: str  # "grows", "no growth seen", "not assessed"
    sentence: str
    seeds: list[int] = field(default_factory=list)
    slope: float | None = None
    low: float | None = None
    high: float | None = None
    per: int | None = None
    steps: tuple[float, float] | None = None  # first and last tested step
    end: float | None = None  # the mean line at the last of them, in `unit`
    level: float = 0.90


@dataclass(slots=True)
class Row:
    """One mode against the baseline of its group."""

    arm: Arm
    verdict: Verdict
    outcomes: list[Outcome]
    mean: float | None = None  # of the finite outcomes, in the metric's own unit
    skipped: int | None = 0  # summed over seeds; None: not known
    scale_range: tuple[float, float] | None = None
    samples_per_s: float | None = None  # median over seeds
    speedup: float | None = None  # over the baseline on the same device, else None
    peak_bytes: int | None = None  # largest over seeds
    memory_ratio: float | None = None
    activation_ratio: float | None = None
    first_steps: float | None = None  # median |relative loss difference| over steps 1 to 20
    gap: Gap | None = None  # over steps
    audit: dict[str, Any] | None = None  # what was computed, see `computed.audit_of`
    notes: list[str] = field(default_factory=list)

    @property
    def emulated(self) -> bool:
        """Return whether 16-bit products were emulated: time and memory are then not the mode's."""
        return any("emulated" in run.half_products for run in self.arm.runs)

    @property
    def grows(self) -> bool:
        """Return whether its gap grows, with the verdict's error rate."""
        return self.gap is not None and self.gap.name == "grows"

    @property
    def every_note(self) -> list[str]:
        """Return the notes of the arm and of the row, each once."""
        return list(dict.fromkeys([*self.arm.notes, *self.notes]))


@dataclass(slots=True, kw_only=True)
class Question:
    """The question that the comparison asks about the runs of a group.

    margin_setting: above 0; a fraction of the |mean| of the baseline's judged values if `relative`
    (differences are then shown in percent of that mean), else in the metric's unit.
    """

    metric: str  # "loss", "top1", "sliced_wasserstein"; the tag of a foreign log
    higher_is_better: bool = False
    unit: str = "relative"  # of `Metric`
    relative: bool = True
    margin_setting: float = 0.01
    window: int = 1  # evaluations averaged into an outcome
    looks: Sequence[int] = ()  # numbers of seeds, ascending from 3; empty: one test of all seeds
    spending: bool = False  # looks of a sweep until decided, at the alphas of `spent_alphas`
    gan: bool = False  # its losses measure no progress
    by_seed: bool = True  # pair equal seeds; False: foreign logs without seeds
    pair_sd: float | None = None  # scatter of a pair's gap, as margin_setting, said after the runs
    as_recorded: bool = True  # metric and margin are those of the runs' configuration

    @property
    def as_logarithm(self) -> bool:
        """Return whether the metric's logarithm is judged: the loss behind a perplexity."""
        return self.relative and self.unit == "perplexity"

    @property
    def factor(self) -> int:
        """Return by what differences are multiplied where they are shown: 100 for per cent."""
        return 100 if self.relative else 1

    @property
    def counted(self) -> str:
        """Return what an arm has several of: "seed", or "run" if no seeds are known."""
        return "seed" if self.by_seed else "run"


@dataclass(slots=True, kw_only=True)
class Group(Question):
    """Runs that differ only in precision, scaler and seed, and in allowed keys."""

    title: str  # "quickstart_lost_updates", "resnet50-digits_32"
    slug: str  # unique in a comparison, for file names and anchors
    baseline: Row
    rows: list[Row]
    keys: dict[str, Any] = field(default_factory=dict)  # the configuration that all runs share
    notes: list[str] = field(default_factory=list)

    @property
    def every_row(self) -> list[Row]:
        """Return the baseline, then the modes."""
        return [self.baseline, *self.rows]

    @property
    def judged_steps(self) -> list[float]:
        """Return the steps whose mean is a foreign log's outcome; empty for runs of mprun."""
        for run in self.every_run:
            if run.judged is not None:
                return run.judged.tolist()
        return []

    @property
    def every_run(self) -> list[RunData]:
        """Return the runs of the baseline, then those of the modes."""
        return [run for row in self.every_row for run in row.arm.runs]


@dataclass(slots=True)
class Comparison:
    """Everything that the table, the report and results.json show."""

    groups: list[Group]
    not_compared: list[str] = field(default_factory=list)  # one line each, with the reason
    notes: list[str] = field(default_factory=list)  # runs not read, one line each
    stamps: list[str] = field(default_factory=list)  # what was allowed or changed afterwards
    looks: list[int] = field(default_factory=list)
    alpha: float = 0.05  # one-sided, per look
    created: str = ""
    version: str = ""


def bands(group: Group, curves: list[Curve], points: int) -> list[tuple[Row, Band]]:
    """Return the band of each row with a value, on one grid; curves: of `group.every_run`."""
    x, remaining = grid(curves, points), iter(curves)
    every = [(row, band([next(remaining) for _ in row.arm.runs], x)) for row in group.every_row]
    return [(row, found) for row, found in every if np.isfinite(found.mean).any()]


def grid(curves: list[Curve], points: int) -> np.ndarray:
    """Return the x values of the curves; if there are more, `points` evenly spaced ones.

    Of these only those are left that have a record nearest to them.
    """
    known = [finite for x, _ in curves if len(finite := x[np.isfinite(x)])]
    if not known:
        return np.empty(0)
    if max(len(x) for x in known) <= points:
        every = np.unique(np.concatenate(known))
        if len(every) <= points:
            return every
    x = np.linspace(min(x.min() for x in known), max(x.max() for x in known), points)
    nearest = np.searchsorted((x[1:] + x[:-1]) / 2, np.concatenate(known))
    return x[np.unique(nearest)]


def at_shared_steps(curves: list[Curve], end: float = np.inf) -> list[Curve]:
    """Return of each curve the records at the steps that every curve has, up to step `end`.

    Other steps would compare a record with what lies between two records. A curve has no say
    on steps from its next record on, which did not come.
    """
    steps = np.unique(np.concatenate([x for x, _ in curves])) if curves else np.empty(0)
    shared = steps <= end
    for x, _ in curves:
        if len(x):
            following = x.max() + (np.median(np.diff(x)) if len(x) > 1 else 0.0)
            shared &= np.isin(steps, x) | (steps >= following)
    keep = [np.isin(x, steps[shared]) for x, _ in curves]
    return [(x[kept], y[kept]) for (x, y), kept in zip(curves, keep, strict=True)]


def band(curves: list[Curve], x: np.ndarray) -> Band:
    """Put the curves on the grid `x`; return mean and range of those with a value at each point.

    A seed that ended early counts up to its end; the mean continues with the others.
    """
    if not len(x) or not curves:
        return Band(x, *np.full((3, len(x)), np.nan))
    values = np.stack([on_grid(own_x, y, x) for own_x, y in curves])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a point without any seed stays NaN
        return Band(x, np.nanmean(values, 0), np.nanmin(values, 0), np.nanmax(values, 0))


def on_grid(x: np.ndarray, y: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return the curve at `points`, float64 [points]: the mean of the records nearest to each.

    A point without a record is interpolated between its neighbours. It is NaN before the first and
    after the last record. Non-finite records are left out.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if not len(x) or not len(points):
        return np.full(len(points), np.nan)
    nearest = np.searchsorted((points[1:] + points[:-1]) / 2, x)
    count = np.bincount(nearest, minlength=len(points))
    total = np.bincount(nearest, weights=y, minlength=len(points))
    filled = np.flatnonzero(count)
    return np.interp(
        points, points[filled], total[filled] / count[filled], left=np.nan, right=np.nan
    )


def curve(columns: dict[str, np.ndarray], x: str, y: str) -> Curve:
    """Return two columns as float64, empty if one is missing; y is clipped and without infinities.

    A loss can reach 1e300 before it becomes infinite; an axis cannot span twice that.
    """
    if x not in columns or y not in columns:
        return np.empty(0), np.empty(0)
    values = np.asarray(columns[y], float)
    values = np.where(np.isfinite(values), np.clip(values, -1e30, 1e30), np.nan)
    return np.asarray(columns[x], float), values

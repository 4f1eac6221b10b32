"""Summarize the probes of a group's runs: one run of each mode, in numbers and in figures.

The figures show gradients over binary exponents, as in Micikevicius et al. (figures 2b and 3), and
the loss scales at which FP16 holds them.
"""

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from matplotlib.axes import Axes

from mprun.comparison.findings import Group
from mprun.errors import Damaged
from mprun.numerics.exponent_shares import AppliedUpdates, LostUpdates, merged, ratio
from mprun.numerics.loss_scale_range import Gradients, ScaleRange, scale_range
from mprun.numerics.probe_record import (
    FOLDER,
    GRADIENT_KINDS,
    KINDS,
    Agreement,
    LearnerProbe,
    ProbeRecord,
    TensorStats,
    halves_before,
    read_probe,
)
from mprun.plots.panel import GREY, INK, Drawing, Style, line_entry, mark_entry, panel, power_of_two
from mprun.record.seal import BrokenSeal, files_of

_DASHES = dict(zip(GRADIENT_KINDS, ((), (4.0, 1.8)), strict=True))
_MOST = 100  # files read per run; each costs about 0.1 ms per KB
PREFIX = "numerics-"  # start of the names of these figures
ACCEPTED = 0.001  # underflow share, as in `mprun advise`
_HEIGHT, _LEFT = 2.3, 0.82  # inches; the percents on the axis are long
_LOWEST_SHOWN = -64  # smaller values are counted in this bin
_FLOOR = 1e-4  # percent; a smaller share is not drawn
_ZERO_WIDTH = 4  # exponents that the column of zeros takes, with a gap of two beside it
# (from, to, name, shade) as powers of two: 2^-25 is rounded to 0, larger values are not;
# 65520 = 2^16 - 16 and more become infinite.
_RANGES = (
    *((-math.inf, -25, "to 0", 0.26), (-25, -14, "subnormal", 0.13)),
    *((-14, 16, "normal", 0), (16, math.inf, "inf", 0.26)),
)


@dataclass(slots=True)
class ProbedMode:
    """The probes of one run, over all its models and modules."""

    label: str
    seed: int
    recorded: int  # probe files of the run; at most 100 of them are read, drawn at random
    steps: list[int] = field(default_factory=list)  # summed up, not skipped unless `only_skipped`
    skipped: int = 0
    only_skipped: bool = False
    scales: tuple[float, float] | None = None  # log2 of the smallest and the largest loss scale
    tensors: dict[str, TensorStats] = field(default_factory=dict)  # by kind, at the run's scale
    gradients: dict[str, Gradients] = field(default_factory=dict)  # with the scale of each probe
    lost: LostUpdates = LostUpdates()
    applied: AppliedUpdates = AppliedUpdates()
    cosine: float | None = None  # median over the shadow steps, as is the error
    relative_error: float | None = None
    damage: str | None = None  # why the probes could not be read

    def probes_text(self) -> str:
        """Return how many probes were summed up, their steps, and what was left out."""
        text = f"{len(self.steps)}, steps {self.steps[0]:,} to {self.steps[-1]:,}"
        if len(self.steps) + self.skipped * (not self.only_skipped) < self.recorded:
            text += f", drawn from {self.recorded:,}"
        if self.only_skipped:
            return text + ", all of skipped updates"
        return text + (f", without {self.skipped} of skipped updates" if self.skipped else "")

    def numbers(self) -> tuple[str, ...]:
        """Return seed, scale, updates lost in FP16, in BF16, applied; cosine and error, as text."""
        lost = [share_text(self.lost.share(name)) for name in ("fp16", "bf16")]
        low, high = (f"2^{scale:.4g}" for scale in self.scales) if self.scales else ("", "")
        return (
            str(self.seed),
            low if low == high else f"{low} to {high}",
            *lost,
            f"{self.applied.ratio:.4g}" if self.applied.wanted else "",
            # Five digits: a cosine may be 0.99999 and an error 0.0001.
            *("" if part is None else f"{part:.5g}" for part in (self.cosine, self.relative_error)),
        )

    def known_gradients(self) -> dict[str, Gradients]:
        """Return kind -> gradients, for the kinds with any non-zero gradient."""
        found = {kind: self.gradients[kind] for kind in GRADIENT_KINDS if kind in self.gradients}
        return {kind: gradients for kind, gradients in found.items() if gradients.nonzero}

    def measured(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return (kind, its numbers as text) of each probed kind of tensor."""
        kinds = [kind for kind in KINDS if kind in self.tensors]
        dtypes = {kind: self.tensors[kind].dtype for kind in kinds}
        return [
            (kind.replace("_", " "), _stats_texts(self.tensors[kind], halves_before(kind, dtypes)))
            for kind in kinds
        ]


def probed_modes(group: Group) -> list[ProbedMode]:
    """Return one entry per mode with probes, the baseline first: its run of the lowest seed.

    A mode whose probes are damaged has an entry that says so: the verdicts do not depend on them.
    """
    found = []
    for row in group.every_row:
        runs = (run for run in row.arm.runs if not run.foreign)
        probed = (probed_run(Path(run.path), row.arm.label, run.seed) for run in runs)
        if (mode := next(filter(None, probed), None)) is not None:
            found.append(mode)
    return found


def probed_run(directory: Path, label: str, seed: int) -> ProbedMode | None:
    """Read the probes of the run in `directory`, under this label; None if there are none."""
    paths = files_of(directory, f"{FOLDER}/step-*.json")
    if not paths:
        return None
    mode = ProbedMode(label, seed, len(paths))
    if len(paths) > _MOST:
        # Random, not every n-th: shadow steps come at an interval too and could all be missed.
        chosen = np.random.default_rng(0).choice(len(paths), _MOST, replace=False)
        paths = [paths[i] for i in sorted(chosen)]
    try:
        _sum_up(mode, [read_probe(path) for path in paths])
    except BrokenSeal:
        raise
    except (Damaged, OSError) as error:
        mode.damage = str(error)
    return mode


def _sum_up(mode: ProbedMode, records: list[ProbeRecord]) -> None:
    kept = [record for record in records if not record.skipped]
    mode.skipped, mode.only_skipped = len(records) - len(kept), not kept
    found: list[Agreement] = []
    for record in kept or records:
        mode.steps.append(record.step)
        learners = record.learners.values()
        for learner in learners:
            _add_tensors(mode, learner, record.log2_loss_scale)
        # Over all models of the step together.
        agreement = merged(filter(None, (learner.total_agreement() for learner in learners)))
        found += [agreement] if agreement else []
    if found:
        mode.cosine = statistics.median(shadow.cosine for shadow in found)
        mode.relative_error = statistics.median(shadow.relative_error for shadow in found)


def _add_tensors(mode: ProbedMode, learner: LearnerProbe, log2_scales: dict[str, float]) -> None:
    scales = [log2_scales.get(name, 0.0) for name in learner.loss_scales]
    scales = [scale for scale in scales if math.isfinite(scale)] or [0.0]
    reached = [*scales, *(mode.scales or ())]
    mode.scales = min(reached), max(reached)
    mode.lost = mode.lost.merge(learner.total_lost())
    mode.applied = mode.applied.merge(learner.total_applied())
    for kind in learner.tensors:
        total = learner.total(kind)
        if total is None:
            continue
        mode.tensors[kind] = mode.tensors[kind].merge(total) if kind in mode.tensors else total
        if kind in GRADIENT_KINDS:
            mode.gradients.setdefault(kind, Gradients()).add(total, scales)


def _stats_texts(stats: TensorStats, halves: Collection[str]) -> tuple[str, ...]:
    """Return format, zeros, rounded to 0, subnormal, to infinity, not finite, largest, headroom."""
    counts, shares = stats.counts, stats.shares(halves)
    wrong = counts.inf + counts.nan
    return (
        stats.dtype,
        stats.zeros_after(halves).removeprefix("zeros ") or share_text(stats.zeros),
        share_text(shares.underflow),
        share_text(shares.subnormal),
        share_text(shares.overflow),
        f"{wrong:,}" if wrong else "none",
        f"{stats.amax:.3g}",
        "" if stats.headroom is None else f"2^{stats.headroom}",
    )


def numerics_figures(modes: list[ProbedMode], styles: dict[str, Style]) -> list[Drawing]:
    """Draw two histograms and the usable loss scales; call it inside `panel.settings()`."""
    histograms = [_histogram(modes, styles, kind) for kind in GRADIENT_KINDS]
    return [drawing for drawing in [*histograms, _scales(modes, styles)] if drawing is not None]


def exponent_shares(gradients: Gradients) -> tuple[dict[int, float], float]:
    """Return (exponent -> percent, percent of zeros) of all finite values, without loss scale.

    A scale that is not a power of two counts as the next larger one.
    """
    counts: dict[int, int] = {}
    zeros = 0
    for (shift, _), stats in gradients.parts.items():
        zeros += stats.counts.zeros
        for exponent, count in stats.counts.by_exponent().items():
            place = max(exponent + math.floor(shift), _LOWEST_SHOWN)
            counts[place] = counts.get(place, 0) + count
    total = sum(counts.values()) + zeros
    shares = {exponent: 100 * count / total for exponent, count in sorted(counts.items())}
    return shares, 100 * ratio(zeros, total)


def overflow(gradients: Gradients, k: int) -> float:
    """Return the part (0 to 1) of the non-zero finite values that overflow FP16 at scale 2^k.

    NaN without any.
    """
    lost = sum(
        stats.counts.shares(math.floor(k + high)).overflow * stats.counts.nonzero
        for (_, high), stats in gradients.parts.items()
        if stats.counts.nonzero
    )
    return ratio(lost, gradients.nonzero)


def _histogram(modes: list[ProbedMode], styles: dict[str, Style], kind: str) -> Drawing | None:
    probed = [mode for mode in modes if kind in mode.gradients]
    found = {mode.label: exponent_shares(mode.gradients[kind]) for mode in probed}
    words, of = kind.replace("_", " "), ", divided by the loss scale"
    title, axis = f"{words.capitalize()} by size", "absolute value, without loss scale"
    return histogram(PREFIX + kind.replace("_", "-"), title, found, styles, axis, of)


def histogram(
    name: str,
    title: str,
    found: Mapping[str, tuple[dict[int, float], float]],
    styles: Mapping[str, Style],
    axis: str,
    of: str = "",
) -> Drawing | None:
    """Draw how values lie over the powers of two, and what FP16 makes of each; None without any.

    found: label -> (exponent -> percent, percent of zeros). axis: below the figure. of: how the
    values were changed, for the caption.
    """
    found = {label: shown for label, shown in found.items() if not math.isnan(shown[1])}
    exponents = [exponent for shares, _ in found.values() for exponent in shares]
    if not exponents:
        return None
    # Wide enough for the word above infinite values.
    left, right = min(*exponents, -27), max(*exponents, 19) + 1
    start, width = left - 2 - _ZERO_WIDTH, _ZERO_WIDTH / len(found)
    entries = [line_entry(label, styles[label]) for label in found]
    figure, axes = panel(title, _HEIGHT, entries, left=_LEFT)
    _set_percents(axes, (start, right), axis, "% of the values")
    for low, high, word, shade in _RANGES:
        low, high = max(low, left - 1), min(high, right)
        axes.axvspan(low, high, color=GREY, alpha=shade, linewidth=0)
        axes.text((low + high) / 2, 150, word, ha="center", va="center", fontsize=7.5)
    for power in (-25, -14, 16):
        axes.axvline(power, color=GREY, linewidth=0.8)
    # The baseline comes first and is drawn last.
    for number, (label, (shares, zeros)) in reversed(list(enumerate(found.items()))):
        x = range(left, right + 1)
        y = [max(shares.get(exponent, 0.0), _FLOOR / 10) for exponent in x]
        axes.plot(x, y, **styles[label].line, linewidth=1.3, drawstyle="steps-post")
        if zeros:
            place = start + number * width
            axes.bar(place, zeros, width, align="edge", color=styles[label].colour)
    ticks = [*range(-(-left // 8) * 8, min(right, 64) + 1, 8)]
    axes.set_xticks([start + _ZERO_WIDTH / 2, *ticks], ["0", *map(power_of_two, ticks)])
    summary = "; ".join(f"{label}: {_course(*shown)}" for label, shown in found.items())
    caption = (
        f"Share of all values per power of two, exact zeros on the left{of}. "
        "Shaded: what FP16 makes of such a value without a loss scale; from 65520 on it is "
        "infinite, its largest number is 65504."
    )
    if min(exponents) == _LOWEST_SHOWN:
        caption += f" The bin at {power_of_two(_LOWEST_SHOWN)} holds all smaller values, too."
    return Drawing(name, caption, f"{title}, a histogram. {summary}.", figure)


def _course(shares: dict[int, float], zeros: float) -> str:
    below = share_text(sum(share for exponent, share in shares.items() if exponent < -25) / 100)
    ends = "nothing else"
    if shares:
        ends = f"from {power_of_two(min(shares))} to {power_of_two(max(shares) + 1)}"
    return f"{share_text(zeros / 100)} zeros, {below} below {power_of_two(-25)}, {ends}"


def _scales(modes: list[ProbedMode], styles: dict[str, Style]) -> Drawing | None:
    """Draw underflow and overflow over the loss scale, for the first mode with gradients."""
    mode = next((mode for mode in modes if mode.known_gradients()), None)
    if mode is None:
        return None
    kinds = mode.known_gradients()
    usable = cast(ScaleRange, scale_range(kinds.values(), ACCEPTED, headroom=0))
    marks = {m.label: round(sum(m.scales) / 2) for m in modes if m is not mode and m.scales}
    lines = {k: Style(styles[mode.label].colour, _DASHES[k]) for k in kinds}
    entries = [line_entry(k.replace("_", " "), style) for k, style in lines.items()]
    if marks:
        entries.append(mark_entry("scale of a mode", "^"))
    title = f"What FP16 loses of {mode.label}'s gradients"
    figure, axes = panel(title, _HEIGHT, entries, "Shaded: usable scales.", _LEFT)
    ends = [usable.lowest, usable.highest, 0, *marks.values()]
    low, high = min(ends) - 8, max(ends) + 8
    _set_percents(axes, (low, high), "loss scale", "% of the non-zero values")
    for kind, style in lines.items():
        for share in (kinds[kind].underflow, partial(overflow, kinds[kind])):
            y = [100 * share(k) or _FLOOR / 10 for k in range(low, high + 1)]
            axes.plot(range(low, high + 1), y, **style.line, linewidth=1.6)
    for label, place in marks.items():
        axes.plot([place], [2 * _FLOOR], "^", color=styles[label].colour, markersize=8)
    # What happens beyond the usable scales.
    axes.text(low + 0.4, 150, "← rounded to 0", va="center", fontsize=8, color=INK)
    axes.text(high - 0.4, 150, "infinite →", ha="right", va="center", fontsize=8, color=INK)
    every = 4 if high - low < 50 else 8
    ticks = range(-(-low // every) * every, high + 1, every)
    axes.set_xticks(ticks, list(map(power_of_two, ticks)))
    limit = f"at most {share_text(ACCEPTED)} of the non-zero values become 0"
    lowest, highest = power_of_two(usable.lowest), power_of_two(usable.highest)
    told = f"No scale holds them: {limit} only from {lowest} on, and above {highest} something "
    told += "overflows."
    if usable.fits:
        axes.axvspan(usable.lowest, usable.highest, color=GREY, alpha=0.22, linewidth=0)
        told = f"From a scale of {lowest} on, {limit}; up to {highest} nothing that was probed "
        told += "overflows."
    caption = f"{told} A scale above leaves infinite gradients and skipped updates."
    if any("fp16" in stats.dtype.split("+") for stats in mode.tensors.values()):
        caption += f" What {mode.label} itself lost in FP16 at its own scale is not counted."
    label = f"Underflow and overflow share of the gradients of {mode.label} over the loss scale."
    return Drawing(f"{PREFIX}scales", caption, f"{label} {told}", figure)


def _set_percents(axes: Axes, frame: tuple[float, float], xlabel: str, ylabel: str) -> None:
    """Set a logarithmic axis of percents, and the limits of x to `frame`."""
    axes.set(xlim=frame, ylim=(_FLOOR, 300), yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}" if v <= 100 else "")
    axes.yaxis.minorticks_off()


def share_text(share: float) -> str:
    """Return a part (0 to 1) as percent: "0 %", "12.3 %", "0.0021 %", "<0.0001 %"; "" for NaN."""
    percent = 100 * share
    if math.isnan(share):  # of nothing
        return ""
    if 0 < percent < 1e-4:
        return "<0.0001 %"
    if 0 < percent < 0.1:
        return f"{percent:.4f}".rstrip("0") + " %"
    return f"{percent:.3g} %"

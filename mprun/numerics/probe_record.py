"""The files of a run's probes: written whole, read without torch; and the loss scales they allow.

`RUN/numerics/step-NNNNNNNN.json` holds what was measured at one step (counted from 1), on one line.
docs/reference/run_directory.md lists its fields. A probe has tensors and no shadow, a shadow step
the reverse, a step that is both has both. Kinds of tensors:

    weights                 what the optimizer updates (master weights where there are some), before
                            the update
    inputs                  inputs of linear layers (nn.Linear), of all their calls in this step
    activations             outputs of the modules, of all their calls in this step
    activation_gradients    gradients of the loss in these outputs, times the loss scale
    weight_gradients        gradients of the parameters as they leave the backward pass: times the
                            loss scale, in the dtype of the parameter
    updates                 weights after the step minus weights before it, in FP32

Several dtypes are joined by "+"; amax is infinite or NaN if a value is; `exponent_shares` explains
the four classes of a histogram. Sums over modules are not stored.

Of tensors with more than 2^18 values every stride-th one is counted, as often as the stride, so
that sums over modules weigh each with its size. amax is over all values whatever the stride, but
for updates, which are formed for the counted weights alone.
lost_updates and applied_updates have the stride of the weights. lost_updates has no weights of a
run that stores them with stochastic rounding or a compensation, applied_updates only weights that
are updated in 16 bits.

Everything about loss scales is asked in powers of two k: what would become of the gradients of the
unscaled loss, times 2^k, when they are rounded to FP16?
"""

import json
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mprun.errors import Damaged
from mprun.numerics.exponent_shares import (
    FP16_LOST,
    HIGHEST,
    LOWEST,
    AppliedUpdates,
    ExponentCounts,
    LostUpdates,
    Shares,
    Sums,
    fp16_headroom,
    merged,
    ratio,
)
from mprun.record.run_directory import json_number, write_json
from mprun.record.seal import content_of, files_of

AFTER_ROUNDING = "measured after rounding: probe in fp32 or use numerics.shadow_every"
VERSION = 1
KINDS = ("weights", "inputs", "activations", "activation_gradients", "weight_gradients", "updates")
GRADIENT_KINDS = ("activation_gradients", "weight_gradients")  # multiplied by the loss scale
FOLDER = "numerics"
_NAME = re.compile(r"step-(\d{8,})\.json$")


@dataclass(frozen=True, slots=True)
class TensorStats:
    """All elements of one kind in one module, or in several; the fields are those of the file."""

    counts: ExponentCounts
    amax: float
    dtype: str
    stride: int = 1

    @property
    def headroom(self) -> int | None:
        """Return the largest k for which nothing here, times 2^k, overflows FP16.

        None if all are zero. amax covers values that were not counted; if one is not finite, the
        counted finite ones decide.
        """
        if not self.amax or not math.isfinite(self.amax):
            return self.counts.headroom
        return fp16_headroom(self.amax)

    @property
    def zeros(self) -> float:
        """Return the part (0 to 1) of all values that are exactly 0."""
        return ratio(self.counts.zeros, self.counts.total)

    def shares(self, halves: Collection[str]) -> Shares:
        """Return what rounding to FP16 does to the values; NaN where it was done before.

        halves: of `halves_before`.
        """
        found, done = self.counts.shares(), "fp16" in halves
        return found._replace(underflow=math.nan, overflow=math.nan) if done else found

    def zeros_after(self, halves: Collection[str]) -> str:
        """Say where all values are 0 and these formats may have made them so; "" elsewhere."""
        return f"zeros 100 %, {AFTER_ROUNDING}" if halves and self.zeros == 1 else ""

    def merge(self, other: "TensorStats") -> "TensorStats":
        """Merge the elements of both; a NaN stays."""
        amax = max(self.amax, other.amax) if self.amax + other.amax >= 0 else math.nan
        dtypes = sorted({*self.dtype.split("+"), *other.dtype.split("+")})
        stride = max(self.stride, other.stride)
        return TensorStats(self.counts.merge(other.counts), amax, "+".join(dtypes), stride)


def halves_before(kind: str, dtypes: Mapping[str, str]) -> set[str]:
    """Return the 16-bit formats that rounded values of a kind before they were counted.

    A gradient of an FP32 weight comes from gradients of activations, which autocast has rounded.

    dtypes: of each kind that was measured.
    """
    kinds = GRADIENT_KINDS if kind in GRADIENT_KINDS else (kind,)
    found = {name for one in kinds for name in dtypes.get(one, "").split("+")}
    return found & {"fp16", "bf16"}


@dataclass(frozen=True, slots=True)
class Agreement(Sums):
    """The gradients of a step against those of its FP32 shadow, as sums over the elements.

    dot: own times fp32; own, fp32: squares of each; difference: squares of own minus fp32. Own
    gradients are unscaled; both are taken before clipping. Sums of several modules add up.
    """

    dot: float = 0.0
    own: float = 0.0
    fp32: float = 0.0
    difference: float = 0.0

    @property
    def cosine(self) -> float:
        """Return the cosine: 1 if both point the same way; NaN if one of them is zero."""
        return ratio(self.dot, math.sqrt(self.own) * math.sqrt(self.fp32))

    @property
    def norm_ratio(self) -> float:
        return ratio(math.sqrt(self.own), math.sqrt(self.fp32))

    @property
    def relative_error(self) -> float:
        """Return norm of the difference / FP32 norm."""
        return ratio(math.sqrt(self.difference), math.sqrt(self.fp32))


@dataclass(frozen=True, slots=True)
class LearnerProbe:
    """The measurements in one model. tensors: kind -> module -> stats, kinds as in KINDS."""

    loss_scales: tuple[str, ...] = ()
    tensors: dict[str, dict[str, TensorStats]] = field(default_factory=dict)
    lost_updates: dict[str, LostUpdates] = field(default_factory=dict)
    shadow: dict[str, Agreement] | None = None
    applied_updates: dict[str, AppliedUpdates] = field(default_factory=dict)

    def total(self, kind: str) -> TensorStats | None:
        """Return the merge over all modules; None if nothing of this kind was measured."""
        return merged(self.tensors.get(kind, {}).values())

    def halves_before(self, kind: str) -> set[str]:
        """Return the 16-bit formats that rounded values of this kind before they were counted."""
        totals = {one: self.total(one) for one in KINDS}
        return halves_before(kind, {one: own.dtype for one, own in totals.items() if own})

    def in_words(self, kind: str) -> str:
        """Return the zeros of a kind, and what FP16 makes of the others; "" if not measured."""
        if (total := self.total(kind)) is None:
            return ""
        halves, start = self.halves_before(kind), f"{kind.replace('_', ' ')} ({total.dtype}): "
        if total.zeros == 1:
            return start + (total.zeros_after(halves) or "zeros 100 %")
        shares = zip(("underflow", "subnormal", "overflow"), total.shares(halves), strict=True)
        known = [f"{what} {100 * part:.3g} %" for what, part in shares if not math.isnan(part)]
        of = f"; of the others in FP16: {', '.join(known)}" if known else ""
        after = "; underflow and overflow: measured after rounding" * ("fp16" in halves)
        return f"{start}zeros {100 * total.zeros:.3g} %{of}{after}"

    def total_lost(self) -> LostUpdates:
        """Return the merge over all modules."""
        return merged(self.lost_updates.values()) or LostUpdates()

    def total_applied(self) -> AppliedUpdates:
        """Return the merge over all modules."""
        return merged(self.applied_updates.values()) or AppliedUpdates()

    def total_agreement(self) -> Agreement | None:
        """Return the merge over all modules; None without a shadow step."""
        return merged(self.shadow.values()) if self.shadow else None


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """The measurements at one step; the fields are those of the file."""

    step: int
    skipped: bool
    log2_loss_scale: dict[str, float]
    learners: dict[str, LearnerProbe]
    loss: float | None = None
    loss_fp32: float | None = None

    def __str__(self) -> str:
        lines = [f"step {self.step}{', skipped' * self.skipped}"]
        for name, own in self.learners.items():
            of = f"{name}: " if len(self.learners) > 1 else ""
            lines += [f"  {of}{text}" for kind in KINDS if (text := own.in_words(kind))]
        return "\n".join(lines)


def write_probe(run_dir: Path, record: ProbeRecord) -> Path:
    """Write the file of one step, replacing an existing one atomically; return its path."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{record.step:08}.json"
    # In one line and one call: only then the encoder is the one in C, ten times as fast.
    layout: dict[str, Any] = {"indent": None, "separators": (",", ":"), "allow_nan": False}
    write_json(path, _to_json(record), durable=False, **layout)
    return path


def read_probes(run_dir: Path) -> list[ProbeRecord]:
    """Read all probes of a run by ascending step; raise Damaged for a file that is not one."""
    paths = files_of(run_dir, f"{FOLDER}/step-*.json")
    found = (read_probe(path) for path in paths if _NAME.match(path.name))
    return sorted(found, key=lambda record: record.step)


def read_probe(path: Path) -> ProbeRecord:
    """Read the probe record in one file; raise Damaged if it is not one."""
    try:
        content = json.loads(content_of(path.parent.parent, f"{FOLDER}/{path.name}"))
        if content["version"] != VERSION:
            raise Damaged(f"{path}: version {content['version']}, this mprun reads {VERSION}")
        loss = content["loss"] or {}
        return ProbeRecord(
            step=int(content["step"]),
            skipped=bool(content["skipped"]),
            log2_loss_scale=_each(float, content["log2_loss_scale"]),
            learners=_each(_learner, content["learners"]),
            loss=float(loss["own"]) if loss else None,
            loss_fp32=float(loss["fp32"]) if loss else None,
        )
    except (
        *(IsADirectoryError, ValueError, KeyError, TypeError, AttributeError),
        OverflowError,  # a count that no int64 holds
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Damaged(f"{path}: not a probe record ({reason})") from None


def tensors_of(
    records: Iterable[ProbeRecord], kind: str
) -> Iterator[tuple[tuple[str, str], TensorStats, list[float]]]:
    """Yield (learner, module), measurement, log2 of the scales its values were multiplied by."""
    for record in records:
        for name, learner in record.learners.items():
            scaled = learner.loss_scales if kind in GRADIENT_KINDS else ()
            scales = [record.log2_loss_scale[scale] for scale in scaled] or [0.0]
            for module, stats in learner.tensors.get(kind, {}).items():
                yield (name, module), stats, scales


def _learner(content: Mapping) -> LearnerProbe:
    def stats(found: Mapping) -> TensorStats:
        counts, amax = ExponentCounts.from_json(found), float(found["amax"])
        return TensorStats(counts, amax, found["dtype"], int(found["stride"]))

    shadow = content["shadow"]
    return LearnerProbe(
        tuple(content["loss_scales"]),
        {kind: _each(stats, modules) for kind, modules in content["tensors"].items()},
        _each(LostUpdates.from_json, content["lost_updates"]),
        None if shadow is None else _each(Agreement.from_json, shadow["modules"]),
        _each(AppliedUpdates.from_json, content["applied_updates"]),
    )


def _to_json(record: ProbeRecord) -> dict:
    loss = None
    if record.loss is not None and record.loss_fp32 is not None:
        loss = _each(json_number, {"own": record.loss, "fp32": record.loss_fp32})
    return {
        "version": VERSION,
        "step": record.step,
        "skipped": record.skipped,
        "log2_loss_scale": _each(json_number, record.log2_loss_scale),
        "learners": _each(_learner_to_json, record.learners),
        "loss": loss,
    }


def _learner_to_json(learner: LearnerProbe) -> dict:
    def plain(stats: TensorStats) -> dict:
        start = {"dtype": stats.dtype, "stride": stats.stride, "amax": json_number(stats.amax)}
        return start | stats.counts.to_json()

    shadow = learner.shadow
    return {
        "loss_scales": list(learner.loss_scales),
        "tensors": {kind: _each(plain, modules) for kind, modules in learner.tensors.items()},
        "lost_updates": _each(Sums.to_json, learner.lost_updates),
        "applied_updates": _each(Sums.to_json, learner.applied_updates),
        "shadow": None if shadow is None else {"modules": _each(Sums.to_json, shadow)},
    }


def _each(change: Callable[[Any], Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in values.items()}


# Any FP32 value (exponents -149 to 127) measured at a scale of 2^-126 to 2^126 fits.
_SMALLEST, _LARGEST = -300, 300


class Gradients:
    """Histograms of related gradients, each with the scale of its measurement.

    If a histogram mixes gradients of losses with different scales, underflow uses the largest scale
    and overflow the smallest: the worse case of both.
    """

    def __init__(self):
        # (lowest, highest shift): log2 of the factor from a measured value to its value at scale 1.
        self.parts: dict[tuple[float, float], TensorStats] = {}

    def add(self, stats: TensorStats, log2_scales: Iterable[float]) -> None:
        """Add a histogram measured with loss scales 2^s for each s of `log2_scales`."""
        scales = list(log2_scales)
        self.merge({(-max(scales), -min(scales)): stats})

    def merge(self, parts: Mapping[tuple[float, float], TensorStats]) -> None:
        """Add all histograms of another object's `parts`."""
        for shifts, stats in parts.items():
            known = self.parts.get(shifts)
            self.parts[shifts] = stats if known is None else known.merge(stats)

    @property
    def nonzero(self) -> int:
        """Return the number of finite non-zero elements, the base of the shares."""
        return sum(stats.counts.nonzero for stats in self.parts.values())

    @property
    def zero_share(self) -> float:
        """Return the part (0 to 1) of all elements that are exactly 0; no scale changes these."""
        total = sum(stats.counts.total for stats in self.parts.values())
        return ratio(sum(stats.counts.zeros for stats in self.parts.values()), total)

    @property
    def finite(self) -> bool:
        """Return whether every value was finite, including uncounted ones."""
        return all(math.isfinite(stats.amax) for stats in self.parts.values())

    @property
    def largest(self) -> float:
        """Return the largest absolute value at scale 1."""
        return max((s.amax * 2.0 ** shifts[1] for shifts, s in self.parts.items()), default=0.0)

    def underflow(self, k: int) -> float:
        """Return the part (0 to 1) of the non-zero elements that are zero in FP16 at scale 2^k.

        NaN without any; of elements that are FP16 already it is at least this part.
        """
        lost = sum(
            stats.counts.shares(math.floor(k + low)).underflow * stats.counts.nonzero
            for (low, _), stats in self.parts.items()
            if stats.counts.nonzero
        )
        return ratio(lost, self.nonzero)

    def underflow_of_sum(self, k: int) -> float:
        """Return the lost part of the sum of absolute values, to about 10 %."""
        lost, total, exponents = 0.0, 0.0, np.arange(LOWEST, HIGHEST + 1)
        for (low, _), stats in self.parts.items():
            # All mantissas count as 1.5, and 2^-25 itself, the one tie, like the values above it.
            sums = stats.counts.by_class().sum(axis=1) * np.exp2(exponents.astype(np.float64))
            total += float(sums.sum()) * 2.0**low
            lost += float(sums[exponents + math.floor(k + low) < FP16_LOST].sum()) * 2.0**low
        return ratio(lost, total)

    def lowest(self, share: float) -> int | None:
        """Return the smallest k with at most `share` underflow; None without a gradient."""
        if not self.nonzero:
            return None
        scales = range(_SMALLEST, _LARGEST)  # the share falls with k
        return _SMALLEST + bisect_left(scales, True, key=lambda k: self.underflow(k) <= share)

    def highest(self) -> int | None:
        """Return the largest k at which nothing overflows; None without a gradient."""
        known = [(stats.headroom, high) for (_, high), stats in self.parts.items()]
        return min((math.floor(k - high) for k, high in known if k is not None), default=None)


@dataclass(frozen=True, slots=True)
class ScaleRange:
    """The static loss scales 2^k for one set of gradients.

    lowest: smallest k that keeps the underflow share of every kind at or below `share`. highest:
    largest k at which nothing overflowed in any probe. headroom: powers of two to leave below that.
    recommended: the middle of [lowest, top] (the upper one of two), or, if that is empty, top.
    """

    share: float
    headroom: int
    lowest: int
    highest: int
    recommended: int

    @property
    def top(self) -> int:
        """Return the largest k that leaves the headroom."""
        return self.highest - self.headroom

    @property
    def fits(self) -> bool:
        """Return whether a scale keeps underflow below the share and leaves the headroom."""
        return self.lowest <= self.top


def scale_range(kinds: Iterable[Gradients], share: float, headroom: int) -> ScaleRange | None:
    """Return the scales that suit all kinds at once; None if all gradients were zero."""
    kinds = [kind for kind in kinds if kind.nonzero]
    if not kinds:
        return None
    lowest = max(kind.lowest(share) or 0 for kind in kinds)  # known: the gradients are not 0
    highest = min(kind.highest() or 0 for kind in kinds)
    top = highest - headroom
    # Below is silent underflow, above are skipped updates. The middle is farthest from both,
    # because gradients shrink and peak over a whole run.
    recommended = math.ceil((lowest + top) / 2) if lowest <= top else top
    return ScaleRange(share, headroom, lowest, highest, recommended)

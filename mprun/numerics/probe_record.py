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

Operations between modules are those that a module calls itself, between its calls of others: scores
of attention, a scaling. Layers of torch have their outputs above. Of each learner a probe keeps
MOST rows a phase by each of four measures: the largest results, the least that FP16 would keep of
their sum, the smallest divisors, the overflows.

Several dtypes are joined by "+"; amax is infinite or NaN if a value is; `exponent_shares` explains
the four classes of a histogram. Sums over modules are not stored.

Of tensors with more than 2^18 values every stride-th one is counted, as often as the stride, so
that sums over modules weigh each with its size. amax is over all values whatever the stride, but
for updates, which are formed for the counted weights alone.
lost_updates and applied_updates have the stride of the weights. lost_updates has no weights of a
run that stores them with stochastic rounding or a compensation, applied_updates only weights that
are updated in 16 bits.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mprun.errors import Damaged
from mprun.numerics.exponent_shares import (
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
# Inputs and outputs of modules are kept from here on, 32 times below FP16's largest.
NOTABLE = 2048.0
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


PHASES = ("forward", "loss", "backward")
MOST = 12  # rows of a phase by each measure


class Place(NamedTuple):
    """The place of an operation between modules: a phase, the module that calls it, its ATen name.

    module: "" is the model itself; operations of the loss have "loss". In a backward pass it is the
    module of the forward pass.
    """

    phase: str
    module: str
    operation: str

    def __str__(self) -> str:
        where = {"": "the model itself", "loss": "the loss"}.get(self.module, self.module)
        return f"{self.operation} in {where}"


@dataclass(frozen=True, slots=True)
class OperationStats:
    """The results of an operation in a module; amax of `stats`: of the finite ones.

    Infinities that the code itself sets, as a mask does, are none of its results, and neither is
    the largest number of their dtype. divisor: smallest magnitude, not 0, by which it divides or of
    which it takes the logarithm; None: it does neither. overflows: its calls that made of finite
    numbers others.
    """

    stats: TensorStats
    divisor: float | None = None
    overflows: int = 0

    def lost(self, log2_scale: int = 0) -> float:
        """Return the part (0 to 1) of the sum of magnitudes that FP16 makes zero; NaN without."""
        return ratio(*self.stats.counts.sums(log2_scale))

    def merge(self, other: "OperationStats") -> "OperationStats":
        divisors = [own for own in (self.divisor, other.divisor) if own is not None]
        overflows = self.overflows + other.overflows
        return OperationStats(self.stats.merge(other.stats), min(divisors, default=None), overflows)


Operations = dict[Place, OperationStats]


def most_notable(found: Operations) -> Operations:
    """Return the rows that a probe keeps, by phase, the largest results first."""
    measures: tuple[Callable[[OperationStats], float], ...] = (
        lambda own: own.stats.amax,
        lambda own: 0.0 if math.isnan(lost := own.lost()) else lost,
        lambda own: 1 / own.divisor if own.divisor else 0.0,
        lambda own: float(own.overflows),
    )
    kept: Operations = {}
    for phase in PHASES:
        rows = {place: own for place, own in found.items() if place.phase == phase}
        names: set[Place] = set()
        for measure in measures:
            order = sorted(rows, key=lambda place: (-measure(rows[place]), place))[:MOST]
            names.update(place for place in order if measure(rows[place]) > 0)
        kept |= {p: rows[p] for p in sorted(names, key=lambda p: (-rows[p].stats.amax, p))}
    return kept


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
    """The measurements in one model.

    tensors: kind -> module -> stats, kinds as in KINDS. operations: those between modules. reach:
    module -> largest finite input and output, where one is NOTABLE.
    """

    loss_scales: tuple[str, ...] = ()
    tensors: dict[str, dict[str, TensorStats]] = field(default_factory=dict)
    lost_updates: dict[str, LostUpdates] = field(default_factory=dict)
    shadow: dict[str, Agreement] | None = None
    applied_updates: dict[str, AppliedUpdates] = field(default_factory=dict)
    operations: Operations = field(default_factory=dict)
    reach: dict[str, tuple[float, float]] = field(default_factory=dict)

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

    def operations_in_words(self, phase: str) -> str:
        """Return the largest results of operations between modules; "" if none was measured."""
        rows = [one for one in self.operations.items() if one[0].phase == phase][:3]
        found = ", ".join(f"{own.stats.amax:.3g} by {place}" for place, own in rows)
        return f"operations between modules, {phase}: {found}" if found else ""

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
            texts = [own.in_words(kind) for kind in KINDS]
            texts += [own.operations_in_words(phase) for phase in PHASES]
            lines += [f"  {of}{text}" for text in texts if text]
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
            raise Damaged(
                f"{path}: has version {content['version']}, but this mprun reads {VERSION}"
            )
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
        OverflowError,  # a count exceeds int64
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Damaged(f"{path}: is not a probe record ({reason})") from None


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

    def row(found: Mapping) -> tuple[Place, OperationStats]:
        place = Place(*(str(found[name]) for name in Place._fields))
        divisor = None if found["divisor"] is None else float(found["divisor"])
        return place, OperationStats(stats(found), divisor, int(found["overflows"]))

    shadow = content["shadow"]
    return LearnerProbe(
        tuple(content["loss_scales"]),
        {kind: _each(stats, modules) for kind, modules in content["tensors"].items()},
        _each(LostUpdates.from_json, content["lost_updates"]),
        None if shadow is None else _each(Agreement.from_json, shadow["modules"]),
        _each(AppliedUpdates.from_json, content["applied_updates"]),
        dict(map(row, content.get("operations", []))),  # of 2026-11-29 and later
        _each(lambda ends: (float(ends[0]), float(ends[1])), content.get("reach", {})),
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

    def row(place: Place, own: OperationStats) -> dict:
        divisor = None if own.divisor is None else json_number(own.divisor)
        more = {"divisor": divisor, "overflows": own.overflows}
        return place._asdict() | more | plain(own.stats)

    shadow = learner.shadow
    return {
        "loss_scales": list(learner.loss_scales),
        "tensors": {kind: _each(plain, modules) for kind, modules in learner.tensors.items()},
        "lost_updates": _each(Sums.to_json, learner.lost_updates),
        "applied_updates": _each(Sums.to_json, learner.applied_updates),
        "shadow": None if shadow is None else {"modules": _each(Sums.to_json, shadow)},
        "operations": [row(place, own) for place, own in learner.operations.items()],
        "reach": _each(lambda ends: [json_number(end) for end in ends], learner.reach),
    }


def _each(change: Callable[[Any], Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in values.items()}

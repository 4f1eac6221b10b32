"""The files of a run's probes: written whole, read without torch.

`RUN/numerics/step-NNNNNNNN.json` holds what was measured at one step (counted from 1), on one line:

    version             1
    step                the step
    skipped             whether an update of this step was skipped
    log2_loss_scale     loss-scale name ("loss_scale", ...) -> log2 of the scale of this step
    learners            learner ("model"; a GAN has "generator" and "discriminator") ->
        loss_scales     names of the scales its losses were multiplied by, each once
        tensors         kind -> module name -> histogram
        lost_updates    module name -> {total, zero, nonfinite, fp16, bf16}, see LostUpdates
        shadow          null, or what the FP32 shadow step found:
            modules     module name -> {dot, own, fp32, difference}, see Agreement
    loss                {own, fp32}, the loss of the step in both arithmetics; null without a shadow

A probe has tensors and no shadow, a shadow step the reverse, a step that is both has both. Kinds:

    weights                 what the optimizer updates (master weights where there are some), before
                            the update
    activations             outputs of the modules, of all their calls in this step
    activation_gradients    gradients of the loss in these outputs, times the loss scale
    weight_gradients        gradients of the parameters as they leave the backward pass: times the
                            loss scale, in the dtype of the parameter
    updates                 weights after the step minus weights before it, in FP32

A histogram is {dtype, stride, amax, zeros, inf, nan, classes}: dtype the names of the tensors'
dtypes, joined by "+"; amax the largest absolute value, infinite or NaN if a value is; classes four
mappings from binary exponent to count, one per mantissa class (`exponent_shares`). Sums over
modules are not stored. Numbers that are not finite are the strings "NaN", "Infinity", "-Infinity".

Of tensors with more than 2^18 values every stride-th one is counted, as often as the stride, so
that sums over modules weigh each with its size; stride is the largest of the tensors, 1 if all
values were counted. amax is over all values whatever the stride, but for updates, which are formed
for the counted weights alone. lost_updates have the stride of the weights.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from operator import add
from pathlib import Path

from mprun.errors import Damaged
from mprun.numerics.exponent_shares import ExponentCounts, LostUpdates, fp16_headroom, merged

VERSION = 1
KINDS = ("weights", "activations", "activation_gradients", "weight_gradients", "updates")
GRADIENT_KINDS = ("activation_gradients", "weight_gradients")  # times the loss scale
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
        """The largest k for which nothing here overflows FP16 when multiplied by 2^k.

        From amax, so that it holds for values that were not counted, too. Where a value is not
        finite, of the counted finite ones; None if there is none but zero.
        """
        if not self.amax or not math.isfinite(self.amax):
            return self.counts.headroom
        return fp16_headroom(self.amax)

    def merge(self, other: "TensorStats") -> "TensorStats":
        """The elements of both; a NaN stays."""
        larger = max(self.amax, other.amax)
        amax = math.nan if math.isnan(self.amax + other.amax) else larger
        dtypes = sorted({*self.dtype.split("+"), *other.dtype.split("+")})
        stride = max(self.stride, other.stride)
        return TensorStats(self.counts.merge(other.counts), amax, "+".join(dtypes), stride)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Gradients of a step beside those of its FP32 shadow, as sums over the elements.

    dot: own times fp32; own, fp32: squares of each; difference: squares of own minus fp32. Own
    gradients are unscaled; both are as they are before clipping. Sums of several modules add up.
    """

    dot: float = 0.0
    own: float = 0.0
    fp32: float = 0.0
    difference: float = 0.0

    @property
    def cosine(self) -> float:
        """1 if both point the same way; NaN where one of them is zero."""
        return _ratio(self.dot, math.sqrt(self.own) * math.sqrt(self.fp32))

    @property
    def norm_ratio(self) -> float:
        """Own norm / FP32 norm."""
        return _ratio(math.sqrt(self.own), math.sqrt(self.fp32))

    @property
    def relative_error(self) -> float:
        """Norm of the difference / FP32 norm."""
        return _ratio(math.sqrt(self.difference), math.sqrt(self.fp32))

    def merge(self, other: "Agreement") -> "Agreement":
        """Of the gradients of both."""
        return Agreement(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class LearnerProbe:
    """What was measured in one model. tensors: kind -> module -> stats, kinds as in KINDS."""

    loss_scales: tuple[str, ...] = ()
    tensors: dict[str, dict[str, TensorStats]] = field(default_factory=dict)
    lost_updates: dict[str, LostUpdates] = field(default_factory=dict)
    shadow: dict[str, Agreement] | None = None

    def total(self, kind: str) -> TensorStats | None:
        """Over all modules; None if nothing of this kind was measured."""
        return merged(self.tensors.get(kind, {}).values())

    def total_lost(self) -> LostUpdates:
        """Over all modules."""
        return merged(self.lost_updates.values()) or LostUpdates()

    def total_agreement(self) -> Agreement | None:
        """Over all modules; None without a shadow step."""
        return merged(self.shadow.values()) if self.shadow else None


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """What was measured at one step; the fields are those of the file."""

    step: int
    skipped: bool
    log2_loss_scale: dict[str, float]
    learners: dict[str, LearnerProbe]
    loss: float | None = None
    loss_fp32: float | None = None


def write_probe(run_dir: Path, record: ProbeRecord) -> Path:
    """Write the file of one step, replacing it at once if it exists; returns its path."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{record.step:08}.json"
    temporary = folder / f".{path.name}.{os.getpid()}"
    # In one line and at once: only so the encoder is the one written in C, ten times as fast.
    text = json.dumps(_to_json(record), allow_nan=False, separators=(",", ":"))
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def read_probes(run_dir: Path) -> list[ProbeRecord]:
    """All probes of a run by ascending step; an empty list if it has none.

    Raises Damaged for a file that is no probe record.
    """
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.iterdir() if _NAME.match(path.name))
    return sorted((read_probe(path) for path in paths), key=lambda record: record.step)


def read_probe(path: Path) -> ProbeRecord:
    """The probe record in one file; Damaged if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise Damaged(f"{path}: version {content['version']}, this mprun reads {VERSION}")
        loss = content["loss"] or {}
        return ProbeRecord(
            step=int(content["step"]),
            skipped=bool(content["skipped"]),
            log2_loss_scale={k: float(v) for k, v in content["log2_loss_scale"].items()},
            learners={k: _learner(v) for k, v in content["learners"].items()},
            loss=float(loss["own"]) if loss else None,
            loss_fp32=float(loss["fp32"]) if loss else None,
        )
    except (IsADirectoryError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Damaged(f"{path}: not a probe record ({reason})") from None


def drop_later_probes(run_dir: Path, last_step: int) -> None:
    """Remove the files of steps after `last_step`, which a resumed run will write again."""
    for path in (run_dir / FOLDER).glob("step-*.json"):
        match = _NAME.match(path.name)
        if match and int(match[1]) > last_step:
            path.unlink()


def _learner(content: Mapping) -> LearnerProbe:
    def stats(found: Mapping) -> TensorStats:
        counts, amax = ExponentCounts.from_json(found), float(found["amax"])
        return TensorStats(counts, amax, found["dtype"], int(found["stride"]))

    shadow = None
    if content["shadow"] is not None:
        shadow = {
            module: Agreement(**{name: float(value) for name, value in sums.items()})
            for module, sums in content["shadow"]["modules"].items()
        }
    return LearnerProbe(
        loss_scales=tuple(content["loss_scales"]),
        tensors={
            kind: {module: stats(found) for module, found in modules.items()}
            for kind, modules in content["tensors"].items()
        },
        lost_updates={k: LostUpdates.from_json(v) for k, v in content["lost_updates"].items()},
        shadow=shadow,
    )


def _to_json(record: ProbeRecord) -> dict:
    loss = None
    if record.loss is not None and record.loss_fp32 is not None:
        loss = {"own": _number(record.loss), "fp32": _number(record.loss_fp32)}
    return {
        "version": VERSION,
        "step": record.step,
        "skipped": record.skipped,
        "log2_loss_scale": {k: _number(v) for k, v in record.log2_loss_scale.items()},
        "learners": {k: _learner_to_json(v) for k, v in record.learners.items()},
        "loss": loss,
    }


def _learner_to_json(learner: LearnerProbe) -> dict:
    def plain(stats: TensorStats) -> dict:
        start = {"dtype": stats.dtype, "stride": stats.stride, "amax": _number(stats.amax)}
        return start | stats.counts.to_json()

    shadow = None
    if learner.shadow is not None:
        sums = {module: asdict(found) for module, found in learner.shadow.items()}
        shadow = {"modules": {m: {k: _number(v) for k, v in s.items()} for m, s in sums.items()}}
    return {
        "loss_scales": list(learner.loss_scales),
        "tensors": {
            kind: {module: plain(stats) for module, stats in modules.items()}
            for kind, modules in learner.tensors.items()
        },
        "lost_updates": {k: v.to_json() for k, v in learner.lost_updates.items()},
        "shadow": shadow,
    }


def _number(value: float) -> float | str:
    """JSON has no NaN; float() reads these words back."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan

"""Predict the effect of FP8 products on probed tensors, without running any.

FP8 products take input, weight and output gradient of a linear layer in 8 bits
(`mprun.precision.scaled_products`). A cast rounds to zero what is at most half of the smallest
number of its format (a tie goes to the even neighbour, zero). It saturates above the largest:

    format  half of the smallest  largest  flushed by a scale of the tensor: at most amax times
    E4M3    2^-10                 448      2^-10 / 448 = 2^-18.8
    E5M2    2^-17                 57344    2^-17 / 57344 = 2^-32.8

(Micikevicius et al., arXiv 2209.05433, table 1.) A histogram gives the count to within the one bin,
one power of two wide, that such a bound falls into. The smaller number excludes that bin; the
larger one, by which layers are judged, includes it. Without a scale the bounds of zero are powers
of two, which have their own bins: the count is exact. A histogram does not distinguish rows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mprun.extensions.diagnosis.shapes import Key, Layout
from mprun.numerics.probe_record import ProbeRecord, TensorStats, tensors_of

# The effect of outliers: normally distributed values reach 4 deviations. If the largest value is
# 2^12 times that, E4M3 flushes 3 % of the others (below 4 * 2^(12 - 18.8) = 0.036 deviations); at
# 2^15 it flushes 23 %, at 2^19 all. A layer is named from a tenth on.
FLUSHED_THRESHOLD = 0.1
_LARGEST_SCALE = float(np.finfo(np.float32).max)
_MOST_POWERS = 64  # tried for a loss scale
# A tensor of one probe, log2 of the smallest and of the largest scale of its losses.
Part = tuple[TensorStats, float, float]


class Format(NamedTuple):
    """A number format: its name, half of its smallest number, its largest number."""

    name: str
    half: float
    largest: float


E4M3, E5M2 = Format("e4m3", 2.0**-10, 448.0), Format("e5m2", 2.0**-17, 57344.0)
# Operand -> kind of tensor in a probe, format in fp8_tensorwise and fp8_unscaled.
OPERANDS = {
    "input": ("inputs", E4M3),
    "weight": ("weights", E4M3),
    "output gradient": ("activation_gradients", E5M2),
}


@dataclass(frozen=True, slots=True)
class Flushed:
    """Parts (0 to 1) of the non-zero values, for one operand of one or several layers.

    least, most: rounded to zero with a scale of the tensor; everything if a value is not finite.
    unscaled: rounded to zero without a scale, for the gradient of the unscaled loss. saturated:
    above the largest number without a scale, at most.
    """

    least: float
    most: float
    unscaled: float
    saturated: float


@dataclass(frozen=True, slots=True)
class Fp8Advice:
    """The linear layers that could have their products in FP8.

    layers: name -> operand -> what is flushed, for all measured layers. excluded: those where a
    tensor-wise scale flushes more than `threshold` of an operand. unmeasured: those where the
    probes lack an operand, or all of it is zero. loss_scale: log2 of the smallest loss scale that
    keeps each output gradient at `threshold` without scales of tensors, and saturates none.
    overrides: the mode as typed after `mprun`, empty if no layer is left.
    """

    threshold: float
    layers: dict[str, dict[str, Flushed]]
    excluded: list[str]
    unmeasured: list[str]
    loss_scale: int | None
    overrides: list[str]
    command: str = ""

    def worst(self, operand: str, part: str) -> tuple[str, float]:
        """Return the layer with the largest part, a field of `Flushed`, and that part."""
        shares = {name: getattr(found[operand], part) for name, found in self.layers.items()}
        name = max(shares, key=lambda name: shares[name])
        return name, shares[name]


def fp8_advice(used: Sequence[ProbeRecord], layout: Layout) -> Fp8Advice:
    """Judge the candidate layers of `layout` from the probes of a run."""
    parts: dict[str, dict[Key, list[Part]]] = {operand: {} for operand in OPERANDS}
    for operand, (kind, _) in OPERANDS.items():
        for key, stats, scales in tensors_of(used, kind):
            parts[operand].setdefault(key, []).append((stats, min(scales), max(scales)))
    measured = [key for key in layout.scaled if all(_nonzero(own, key) for own in parts.values())]
    layers = {
        key: {own: _flushed(parts[own][key], format) for own, (_, format) in OPERANDS.items()}
        for key in measured
    }
    most = {key: max(one.most for one in found.values()) for key, found in layers.items()}
    kept = [key for key in measured if most[key] <= FLUSHED_THRESHOLD]
    excluded = [key for key in measured if most[key] > FLUSHED_THRESHOLD]
    unmeasured = [key for key in layout.scaled if key not in layers]

    def holds(k: int) -> bool:
        shares = [_flushed(parts["output gradient"][key], E5M2, k) for key in measured]
        return all(one.unscaled <= FLUSHED_THRESHOLD and not one.saturated for one in shares)

    return Fp8Advice(
        FLUSHED_THRESHOLD,
        {layout.named(key): found for key, found in layers.items()},
        list(map(layout.named, excluded)),
        list(map(layout.named, unmeasured)),
        next(filter(holds, range(_MOST_POWERS)), None),
        _overrides([name for _, name in kept], [name for _, name in (*excluded, *unmeasured)]),
    )


def _overrides(kept: list[str], left_out: list[str]) -> list[str]:
    """Return the shorter of two forms: overrides compute the other layers in FP32, else in BF16."""
    if not kept:
        return []
    mode = ["precision=fp8_tensorwise"]
    if len(left_out) < len(kept):
        return [*mode, *(f"precision.overrides.{name}=fp32" for name in dict.fromkeys(left_out))]
    return [*mode, f"precision.products.modules=[{','.join(dict.fromkeys(kept))}]"]


def _flushed(parts: Iterable[Part], format: Format, log2_scale: int = 0) -> Flushed:
    """Return parts over all probes; the unscaled ones are at 2^log2_scale times the loss."""
    found, total = np.zeros(4), 0
    for stats, low, high in parts:
        counts, own, amax = stats.counts, stats.counts.nonzero, stats.amax
        limit = max(amax / format.largest, 1 / _LARGEST_SCALE) * format.half
        by_tensor = counts.up_to(limit) if math.isfinite(amax) else (own, own)
        # If losses have several scales, the worse one counts.
        unscaled = counts.up_to(format.half * 2.0 ** (high - log2_scale))[1]
        largest = format.largest * 2.0 ** (low - log2_scale)
        saturated = own - counts.up_to(largest)[0] if not amax <= largest else 0
        found += (*by_tensor, unscaled, saturated)
        total += own
    return Flushed(*(found / total).tolist())


def _nonzero(parts: Mapping[Key, list[Part]], key: Key) -> int:
    """Return how many non-zero numbers of an operand of a layer were probed, which shares need."""
    return sum(stats.counts.nonzero for stats, *_ in parts.get(key, ()))

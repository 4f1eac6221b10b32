"""Which numbers of a network FP16 cannot hold, and the smallest part to keep in FP32 for it.

Layers are known by their outputs, what modules compute between them by its operations.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from mprun.assembly import Built
from mprun.numerics.exponent_counter import Tally
from mprun.numerics.exponent_shares import FP16_LOST, fp16_headroom
from mprun.numerics.operation_ranges import OperationRanges
from mprun.numerics.probe_record import (
    OperationStats,
    Place,
    ProbeRecord,
    TensorStats,
    tensors_of,
)
from mprun.precision.module_dtypes import NORM_LAYERS, computes, own_forward

# Activations and weights closer than this to 65504, in powers of two, are kept in FP32 as a
# precaution.
VALUE_HEADROOM = 2
# An operation of whose results FP16 would lose more than this part of the sum is kept in FP32.
LOST_OF_SUM = 0.5
Key = tuple[str, str]  # learner, module
Row = tuple[str, Place]  # learner, operation of a module
# From the words of a mode to whether each result is in 16 bits there, of those that were seen.
Narrow = Callable[[tuple[str, ...]], Mapping[Row, bool]]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PRODUCTS = (nn.Linear, nn.RNNBase, *_CONVOLUTIONS, *_TRANSPOSED)


@dataclass(frozen=True, slots=True)
class Layout:
    """The modules without modules inside, by learner, in the order of the model's definition.

    products: linear, recurrent and convolution layers. around: of each module that is called, the
    nearest one around it that is; "" is the model. fixed: modules that are FP32 in every mode.
    """

    leaves: dict[str, tuple[str, ...]]
    norms: frozenset[Key]
    products: frozenset[Key]
    around: Mapping[Key, str] = field(default_factory=dict)
    fixed: frozenset[Key] = frozenset()

    def named(self, key: Key) -> str:
        """Return the module's name, with the learner if there are several."""
        return ": ".join(key if len(self.leaves) > 1 else key[1:])


def layout(task) -> Layout:
    modules = {
        (label, name): module
        for label, learner in task.learners.items()
        for name, module in learner.model.named_modules()
    }
    leaves = {k: own for k, own in modules.items() if k[1] and not any(own.children())}
    around, fixed = {}, set()
    for (label, name), module in modules.items():
        outer = name
        while outer:
            outer = outer.rpartition(".")[0]
            if not outer or computes(modules[label, outer]):
                break
        if name and computes(module):
            around[label, name] = outer
        is_inside = bool(name) and (label, outer) in fixed
        if is_inside or getattr(module, "computes_in_fp32", False):
            fixed.add((label, name))
    return Layout(
        {label: tuple(name for own, name in leaves if own == label) for label in task.learners},
        frozenset(key for key, module in leaves.items() if isinstance(module, NORM_LAYERS)),
        frozenset(key for key, module in leaves.items() if isinstance(module, _PRODUCTS)),
        around,
        frozenset(fixed),
    )


@dataclass(frozen=True, slots=True)
class KeepFp32:
    """A module that FP16 cannot hold.

    patterns: for precision.overrides. They include the reader of the values, because an FP32 module
    returns its result in FP16. needs_amp: the patterns need autocast, where FP32 results stay FP32.
    wider: larger parts that hold this one, the smallest first.
    """

    module: str
    reason: str
    patterns: tuple[str, ...]
    needs_amp: bool = False
    wider: tuple[tuple[str, ...], ...] = ()


def values_of(used: Sequence[ProbeRecord], kind: str) -> dict[Key, TensorStats]:
    """Merge the tensors of one kind over all probes."""
    found: dict[Key, TensorStats] = {}
    for key, stats, _ in tensors_of(used, kind):
        found[key] = found[key].merge(stats) if key in found else stats
    return found


def modules_in_fp32(
    used: Sequence[ProbeRecord], layout: Layout, parts: Iterable["Part"] = ()
) -> tuple[list[KeepFp32], tuple[str, float] | None]:
    """Return modules whose weights or outputs exceed or near FP16's range; largest activation.

    parts: kept in FP32 already, with the readers of what they compute.
    """
    activations = values_of(used, "activations")
    kept = {(part.learner, name) for part in parts for name in part.whole}
    near = {
        key: reason
        for key, stats in activations.items()
        if key not in kept and (reason := _reason(stats))
    }
    keep = [
        KeepFp32(layout.named(key), f"weights {reason}", (key[1],))
        for key, stats in values_of(used, "weights").items()
        if (reason := _reason(stats))
    ]
    for key in sorted(near, key=lambda key: -size_of(activations[key])):
        region = _region(*key, near, layout)
        keep.append(KeepFp32(layout.named(key), f"activations {near[key]}", *region))
    largest = max(activations, key=lambda key: size_of(activations[key]), default=None)
    if largest is None:
        return keep, None
    return keep, (layout.named(largest), activations[largest].amax)


def size_of(stats: TensorStats) -> float:
    return stats.amax if math.isfinite(stats.amax) else math.inf


def _reason(stats: TensorStats) -> str | None:
    """Return why such values are kept in FP32; None if FP16 holds them."""
    if not math.isfinite(stats.amax):
        return "are not finite"
    if stats.headroom is None or stats.headroom >= VALUE_HEADROOM:
        return None
    where = "beyond" if stats.headroom < 0 else f"within {2**VALUE_HEADROOM} times of"
    return f"reach {stats.amax:.4g}, {where} FP16's 65504"


def _region(
    learner: str, module: str, near: Mapping[Key, str], layout: Layout
) -> tuple[tuple[str, ...], bool]:
    """Return patterns that keep `module` and its output's reader in FP32, and whether only in amp.

    If modules are cast, an FP32 module returns FP16: the smallest enclosing module that does not
    end with a module near the limit is taken. Under autocast a result stays FP32 until the next
    product reads it.
    """
    leaves, around = layout.leaves[learner], module
    while around := around.rpartition(".")[0]:
        last = [name for name in leaves if name.startswith(f"{around}.")][-1]
        if (learner, last) not in near:
            return (around,), False
    behind = leaves[leaves.index(module) + 1 :] if module in leaves else ()
    readers = [name for name in behind if (learner, name) in layout.products]
    return (module, *readers[:1]), True


class Part(NamedTuple):
    """A part of a network: what some modules compute themselves, and whole modules."""

    learner: str
    module: str  # whose operation needs it
    own: tuple[str, ...]
    whole: tuple[str, ...]

    def patterns(self, layout: Layout) -> tuple[str, ...]:
        """Return patterns for precision.overrides."""
        alone = (
            name if name in layout.leaves[self.learner] else own_forward(name) for name in self.own
        )
        return (*alone, *self.whole)

    def holds(self, learner: str, module: str) -> bool:
        """Return whether a module's own operations are in it."""
        inside = any(f"{module}.".startswith(f"{name}.") for name in self.whole)
        return learner == self.learner and (module in self.own or inside)


def rows_of(used: Iterable[ProbeRecord]) -> dict[Row, OperationStats]:
    """Merge the operations between modules over all probes."""
    found: dict[Row, OperationStats] = {}
    for record in used:
        for label, learner in record.learners.items():
            for place, own in learner.operations.items():
                key = label, place
                found[key] = found[key].merge(own) if key in found else own
    return found


def operations_in_fp32(
    used: Sequence[ProbeRecord], layout: Layout, narrow: Mapping[Row, bool] | None
) -> list[tuple[Part, KeepFp32]]:
    """Return the parts around operations whose results FP16 cannot hold, or by whose arguments it
    divides by zero. narrow: what is in 16 bits in the mode; None: everything may be."""
    reasons: dict[Key, list[str]] = {}
    rows = rows_of(used)
    for (learner, place), own in sorted(rows.items(), key=lambda row: -row[1].stats.amax):
        key = learner, place.module
        wide = narrow is not None and not narrow.get((learner, place), True)
        if place.phase != "forward" or key in layout.fixed or wide:
            continue
        if reason := _reason_of(place.operation, own):
            reasons.setdefault(key, []).append(reason)
    found = []
    for (learner, module), own_reasons in reasons.items():
        part = _smallest(learner, module, layout, used)
        patterns, wider = part.patterns(layout), _wider(part, layout)
        name = layout.named((learner, module or "the model itself"))
        more = f" and {len(own_reasons) - 2} more" if len(own_reasons) > 2 else ""
        reason = f"{'; '.join(own_reasons[:2])}{more}"
        found.append((part, KeepFp32(name, reason, patterns, wider=wider)))
    return found


def _reason_of(operation: str, own: OperationStats) -> str | None:
    """Return why an operation is kept in FP32; None if FP16 holds it."""
    if reason := _reason(own.stats):
        return f"results of {operation} {reason}"
    if own.divisor is not None and own.divisor <= 2.0**FP16_LOST:
        what = "takes the logarithm of" if operation.startswith("log") else "divides by"
        return f"{operation} {what} {own.divisor:.4g}, which rounds to 0 in FP16"
    if own.overflows:
        return f"{operation} made infinities of finite numbers"
    if (lost := own.lost()) > LOST_OF_SUM:
        return f"FP16 loses {100 * lost:.3g} % of the sum of {operation}'s results"
    return None


def _smallest(learner: str, module: str, layout: Layout, used: Sequence[ProbeRecord]) -> Part:
    """Return the smallest part that reads all that `module` computes and FP16 does not hold.

    A module that returns such a number hands it to the one around it, and one that is given one has
    to read it in FP32.
    """
    ends: dict[str, tuple[float, float]] = {}
    for record in used:
        for name, (given, made) in record.learners[learner].reach.items():
            known = ends.get(name, (0.0, 0.0))
            ends[name] = max(known[0], given), max(known[1], made)
    near = {name: tuple(map(_is_near, both)) for name, both in ends.items()}
    own, whole, todo = [module], [], [module]
    while todo:
        name = todo.pop()
        inside = (key[1] for key, outer in layout.around.items() if outer == name)
        whole += [child for child in inside if near.get(child, (False,))[0] and child not in own]
        outer = layout.around.get((learner, name))
        if outer is not None and near.get(name, (False, False))[1] and outer not in own:
            own.append(outer)
            todo.append(outer)
    return Part(learner, module, tuple(own), tuple(dict.fromkeys(whole)))


def _is_near(value: float) -> bool:
    return value > 0 and fp16_headroom(value) < VALUE_HEADROOM


def _wider(part: Part, layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Return larger parts: its modules with all inside, then the module around."""
    found = [tuple(dict.fromkeys(name or own_forward("") for name in (*part.own, *part.whole)))]
    if outer := layout.around.get((part.learner, part.module)):
        found.append((outer, *(name for name in found[0] if not name.startswith(f"{outer}."))))
    return tuple(own for own in dict.fromkeys(found) if own != part.patterns(layout))


def seen_in_16_bits(built: Built) -> dict[Row, bool]:
    """Take a step of a built run; return which results between modules are in FP16."""
    ranges = OperationRanges(built.task, Tally())
    try:
        with ranges:
            built.stepper.eager_step(0)
    except RuntimeError:  # as of a mask with -1e9, which no FP16 tensor takes: it says nothing
        return {}
    return {row: torch.float16 in own for row, own in ranges.dtypes().items()}

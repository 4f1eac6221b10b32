"""Modules whose values FP16 cannot hold, and what has to stay in FP32 with them."""

import math
from collections.abc import Callable, Sequence

from mprun.numerics.advice_findings import KeepFp32
from mprun.numerics.probe_record import ProbeRecord, TensorStats
from mprun.numerics.shapes import Layout

# Activations and weights closer than this to 65504, in powers of two, are kept in FP32 before they
# get there.
VALUE_HEADROOM = 2
_NORM_INPUT = 2.0**8  # its square is the first power of two beyond FP16
_EPS = {"adam": 1e-8, "adamw": 1e-8, "adagrad": 1e-10}
Named = Callable[[str, str], str]  # learner, module -> what it is called


def modules_in_fp32(
    used: Sequence[ProbeRecord], layout: Layout, named: Named
) -> tuple[list[KeepFp32], tuple[str, float] | None]:
    """Modules whose weights or outputs are beyond FP16 or close to it; the largest activation."""
    weights, activations = _values(used, "weights"), _values(used, "activations")
    near = {key for key, stats in activations.items() if _near(stats)}
    keep = []
    for key, stats in weights.items():
        if _near(stats):
            keep.append(KeepFp32(named(*key), f"weights {_reason(stats)}", (key[1],)))
    for learner, module in sorted(near, key=lambda key: -_size(activations[key])):
        patterns, needs_amp = _region(learner, module, near, layout)
        reason = f"activations {_reason(activations[learner, module])}"
        keep.append(KeepFp32(named(learner, module), reason, patterns, needs_amp))
    largest = max(activations, key=lambda key: _size(activations[key]), default=None)
    if largest is None:
        return keep, None
    return keep, (named(*largest), activations[largest].amax)


def _values(used: Sequence[ProbeRecord], kind: str) -> dict[tuple[str, str], TensorStats]:
    found: dict[tuple[str, str], TensorStats] = {}
    for record in used:
        for learner, own in record.learners.items():
            for module, stats in own.tensors.get(kind, {}).items():
                before = found.get((learner, module))
                found[learner, module] = stats if before is None else before.merge(stats)
    return found


def _near(stats: TensorStats) -> bool:
    headroom = stats.headroom
    return not math.isfinite(stats.amax) or (headroom is not None and headroom < VALUE_HEADROOM)


def _size(stats: TensorStats) -> float:
    return stats.amax if math.isfinite(stats.amax) else math.inf


def _reason(stats: TensorStats) -> str:
    if not math.isfinite(stats.amax):
        return "are not finite"
    if stats.headroom < 0:
        return f"reach {stats.amax:.4g}, beyond FP16's 65504"
    return f"reach {stats.amax:.4g}, within {2**VALUE_HEADROOM} times of FP16's 65504"


def _region(learner: str, module: str, near: set, layout: Layout) -> tuple[tuple[str, ...], bool]:
    """Patterns that keep `module` and the reader of its output in FP32, and whether only in amp.

    Where modules are cast, an FP32 module returns FP16: the smallest module around it that ends
    with another one is taken. Under autocast a result stays FP32 until the next product reads it.
    """
    leaves, around = layout.leaves[learner], module
    while around := around.rpartition(".")[0]:
        last = [name for name in leaves if name.startswith(f"{around}.")][-1]
        if (learner, last) not in near:
            return (around,), False
    behind = leaves[leaves.index(module) + 1 :] if module in leaves else ()
    reader = next((name for name in behind if (learner, name) in layout.products), None)
    return ((module,) if reader is None else (module, reader)), True


def notes_on_naive(used: Sequence[ProbeRecord], layout: Layout, optim, named: Named) -> list[str]:
    """What breaks in fp16_naive alone, where norm layers, optimizer state and update are FP16."""
    notes = []
    eps = optim.eps if optim.eps is not None else _EPS.get(optim.name)
    if optim.name in _EPS and eps is not None and 0 < eps <= 2.0**-25:
        notes.append(
            f"fp16_naive: eps={eps:g} of {optim.name} is 0 in FP16 (2^-25 and below): 0/0 is NaN"
        )
    activations = _values(used, "activations")
    large = []
    for learner, leaves in layout.leaves.items():
        for before, name in zip(leaves, leaves[1:], strict=False):
            size = _size(activations[learner, before]) if (learner, before) in activations else 0.0
            if (learner, name) in layout.norms and size >= _NORM_INPUT:
                large.append((size, named(learner, name)))
    if large:
        size, name = max(large)
        others = f" and {len(large) - 1} more norm layers" if len(large) > 1 else ""
        notes.append(
            f"fp16_naive: {name}{others} may overflow in the variance: its input reaches "
            f"{size:.4g}, and 256 squared is beyond 65504"
        )
    return notes

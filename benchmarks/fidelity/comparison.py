"""One operation on both sides: emulated on the CPU and by the reference, each against float64."""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fidelity.operations import Operation, Tensors, normal
from fidelity.ulp import Distance, correctly_rounded, distance, relative_error
from mprun.precision.emulation import HalfEmulation

# Factors of the inputs and of the incoming gradient. With the small ones values keep about four
# bits above the smallest subnormal number. With the large ones sums of a few FP16 values overflow;
# BF16 has the range of FP32, whose overflow is not tested here.
_SMALL = {torch.float16: 2.0**-20, torch.bfloat16: 2.0**-129}
_LARGE = {torch.float16: 2.0**14, torch.bfloat16: 2.0**120}
MAGNITUDES = ("normal", "small inputs", "small gradients", "large inputs", "large gradients")


@dataclass(frozen=True, slots=True)
class Row:
    """One result of one operation: its output or the gradient of one input.

    between: distance of emulation and reference. emulation, reference: distance of each to the
    correctly rounded float64 result; `reference` is None if that is the reference. *_error:
    relative L2 error against float64 before rounding (nan if nothing is finite).
    """

    operation: str
    size: str
    dtype: str
    magnitude: str
    result: str
    between: Distance
    emulation: Distance
    emulation_error: float
    reference: Distance | None
    reference_error: float | None


def compare(operation: Operation, dtype: torch.dtype, magnitude: str, reference: str) -> list[Row]:
    """Return rows of one operation in one 16-bit dtype; `reference` is cuda, native or float64.

    All sides get the same inputs, drawn in float64 from a seed of the operation's name and size,
    and rounded to `dtype`. Raises RuntimeError if the reference has no such kernel.
    """
    seed = zlib.crc32(f"{operation.name} {operation.size}".encode())
    inputs = _inputs(operation, dtype, magnitude, torch.Generator().manual_seed(seed))
    upstream = _Upstream(dtype, magnitude, torch.Generator().manual_seed(seed + 1))
    emulated = evaluate(operation, inputs, upstream, HalfEmulation(dtype))
    exact = evaluate(operation, {n: _wide(t) for n, t in inputs.items()}, upstream, nullcontext())
    expected = {name: correctly_rounded(exact[name], t.dtype) for name, t in emulated.items()}
    found = None
    if reference != "float64":
        moved = {n: t.cuda() if reference == "cuda" else t for n, t in inputs.items()}
        found = evaluate(operation, moved, upstream, nullcontext())
    rows = []
    for name, value in emulated.items():
        other = expected[name] if found is None else found[name].to(value.dtype)
        rows.append(
            Row(
                operation.name,
                operation.size,
                str(dtype).removeprefix("torch."),
                magnitude,
                name,
                distance(value, other),
                distance(value, expected[name]),
                relative_error(value, exact[name]),
                None if found is None else distance(other, expected[name]),
                None if found is None else relative_error(other, exact[name]),
            )
        )
    return rows


def evaluate(
    operation: Operation,
    inputs: Tensors,
    upstream: Callable[[str, Tensor], Tensor],
    forward_context: AbstractContextManager,
) -> Tensors:
    """Return outputs and "grad NAME" of every floating-point input, on the CPU, by name."""
    leaves = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point())
        for name, tensor in inputs.items()
    }
    with forward_context:
        outputs = operation.run(leaves)
        gradients = [upstream(name, output) for name, output in outputs.items()]
        torch.autograd.backward(list(outputs.values()), gradients)
    results = {name: output.detach().cpu() for name, output in outputs.items()}
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            results[f"grad {name}"] = leaf.grad.cpu()
    return results


def _inputs(
    operation: Operation, dtype: torch.dtype, magnitude: str, generator: torch.Generator
) -> Tensors:
    tensors = operation.draw(generator)
    tensors[operation.scaled] = tensors[operation.scaled] * _factor(dtype, magnitude, "inputs")
    return {
        name: tensor
        if not tensor.is_floating_point()
        else correctly_rounded(tensor, torch.float32 if name in operation.float32 else dtype)
        for name, tensor in tensors.items()
    }


def _factor(dtype: torch.dtype, magnitude: str, what: str) -> float:
    if magnitude == f"small {what}":
        return _SMALL[dtype]
    return _LARGE[dtype] if magnitude == f"large {what}" else 1.0


class _Upstream:
    """Gradients of outputs, drawn once per output and used on every side.

    They are rounded to the dtype of the first output that uses them (the emulated one), so that the
    float64 side gets the same values.
    """

    def __init__(self, dtype: torch.dtype, magnitude: str, generator: torch.Generator):
        self._factor = _factor(dtype, magnitude, "gradients")
        self._generator = generator
        self._drawn: Tensors = {}

    def __call__(self, name: str, output: Tensor) -> Tensor:
        if name not in self._drawn:
            values = normal(self._generator, *output.shape) * self._factor
            self._drawn[name] = correctly_rounded(values, output.dtype)
        return self._drawn[name].to(output.device, output.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor

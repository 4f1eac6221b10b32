"""Products of linear layers with operands in FP8, their scales and what is computed around them.

Of a chosen `nn.Linear` the three products (output, gradient of the input, of the weight) take
operands that were scaled, cast to 8 bits and multiplied by `torch._scaled_mm`, which adds up in
FP32. All else, bias and the sums of gradients too, is as in the mode without it. Formats:
Micikevicius et al., arXiv 2209.05433; recipes as torchao's Float8Linear ("tensorwise", "rowwise"),
bit for bit.

    granularity   scale
    tensor        largest of the format / amax of the tensor
    row           the same of each row along the sum, down to a power of two; each of the three
                  products casts anew, from what was not cast
    none          1

A cast saturates, which would hide an infinity: where a tensor is not finite its scale makes the
product NaN or infinite. On a CPU the same numbers are decoded and multiplied in FP32, as torch's
own kernel there does, several times as fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMAT_NAMES = {dtype: name for name, dtype in FORMATS.items()}
GRANULARITIES = ("none", "tensor", "row")
PRODUCTS = ("output", "grad_input", "grad_weight")
_SMALLEST_AMAX = 1e-12  # of torchao: a tensor of zeros has a finite scale
_MULTIPLE = 16  # of every size, on CUDA
# How often each kind of product ran in this process: "forward e4m3 x e4m3".
calls: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class ScaledProducts:
    """Which products of which layers, in which formats.

    input, weight, grad_output: formats of the operands.
    granularity: what has a scale of its own.
    power_of_two: scales are rounded down to powers of two.
    high_precision: of `PRODUCTS`, those that stay in the dtype of the mode.
    modules: glob patterns over names of `nn.Linear`. One with a wildcard leaves out an output
        layer: where the last module of the network is linear.
    """

    input: torch.dtype = torch.float8_e4m3fn
    weight: torch.dtype = torch.float8_e4m3fn
    grad_output: torch.dtype = torch.float8_e5m2
    granularity: str = "tensor"
    power_of_two: bool = False
    high_precision: tuple[str, ...] = ()
    modules: tuple[str, ...] = ("*",)

    @property
    def formats(self) -> tuple[torch.dtype, ...]:
        """Each once."""
        return tuple(dict.fromkeys((self.input, self.weight, self.grad_output)))


class Cast(NamedTuple):
    """A matrix in 8 bits: `values` times `factor` (float32, 0-dim, or by row [n, 1], by column)."""

    values: Tensor
    factor: Tensor

    @property
    def T(self) -> Cast:
        return Cast(self.values.t(), self.factor.t())


# Takes each cast, given the matrix and what casts it; None: nobody observes them.
observer: Callable[[Tensor, Callable[[], Cast]], Cast] | None = None


def cast(matrix: Tensor, dtype: torch.dtype, products: ScaledProducts, dim: int = -1) -> Cast:
    """Return `matrix` in `dtype`, by way of the `observer`.

    Args:
        matrix: [n, k] in 16 or 32 bits.
        dim: along which a product adds up; of scales by row.
    """
    take = partial(_cast, matrix, dtype, products, dim)
    return take() if observer is None else observer(matrix, take)


def _cast(matrix: Tensor, dtype: torch.dtype, products: ScaledProducts, dim: int) -> Cast:
    largest = torch.finfo(dtype).max
    if products.granularity == "row":
        # torch.aminmax along a dimension takes ten times as long on a CPU.
        low, high = matrix.amin(dim, keepdim=True), matrix.amax(dim, keepdim=True)
    else:
        low, high = torch.aminmax(matrix)
    amax = torch.maximum(-low, high).double()
    if products.granularity == "none":
        scale = (1 + 0 * amax).float()  # NaN of what is not finite
    else:
        scale = (largest / amax.clamp(min=_SMALLEST_AMAX)).float()
        if products.power_of_two:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
    scaled = matrix.float() * scale
    return Cast(scaled.clamp_(-largest, largest).to(dtype), scale.reciprocal())


def product(a: Cast, b: Cast, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a @ b, added up in FP32, rounded once to `dtype`: [n, k] and [k, m] to [n, m].

    Args:
        fast: sums may be those of the Tensor Core alone (about 14 bits; forward passes).
    """
    return torch.ops.mprun.scaled_mm(a.values, b.values, a.factor, b.factor, dtype, fast)


_library = torch.library.Library("mprun", "DEF")
_library.define(
    "scaled_mm(Tensor a, Tensor b, Tensor factor_a, Tensor factor_b, ScalarType dtype, bool fast)"
    " -> Tensor"
)


def _on_cuda(
    a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """cuBLAS takes multiples of 16 as sizes, the left matrix by rows and the right by columns."""
    (n, k), m = a.shape, b.size(1)
    more_n, more_k, more_m = (-size % _MULTIPLE for size in (n, k, m))
    left, right = _padded(a, more_n, more_k), _padded(b.t(), more_m, more_k)
    if factor_a.dim() == 2:  # by row: of what is added too
        factor_a = nn.functional.pad(factor_a, (0, 0, 0, more_n), value=1.0)
        factor_b = nn.functional.pad(factor_b, (0, more_m), value=1.0)
    found = torch._scaled_mm(
        left, right.t(), factor_a.contiguous(), factor_b.contiguous(), out_dtype=dtype,
        use_fast_accum=fast,
    )  # fmt: skip
    return found[:n, :m]


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    matrix = matrix.contiguous()
    if not rows and not columns:
        return matrix
    bits = nn.functional.pad(matrix.view(torch.uint8), (0, columns, 0, rows))
    return bits.view(matrix.dtype)


def _on_cpu(a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor, *form: Any) -> Tensor:
    return torch.mm(decoded(a, factor_a), decoded(b, factor_b)).to(form[0])


def _shape_of(a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor, *form: Any) -> Tensor:
    return a.new_empty((a.size(0), b.size(1)), dtype=form[0])


_library.impl("scaled_mm", _on_cpu, "CPU")
_library.impl("scaled_mm", _on_cuda, "CUDA")
_library.impl("scaled_mm", _shape_of, "Meta")


def decoded(values: Tensor, factor: Tensor) -> Tensor:
    """FP8 times `factor` in FP32, rounded once.

    By bits, in an eighth of the time of torch's own conversion: exponent and mantissa go to their
    places in FP32, whose exponent counts from another number. A NaN of E4M3 comes back as 480, and
    of E5M2 as a number too; the factor of what holds one is not finite.
    """
    # Sign-extended, so that the sign fills all bits above the other seven.
    bits = values.view(torch.int8).to(torch.int32)
    if values.dtype is torch.float8_e4m3fn:
        bits.bitwise_left_shift_(20).bitwise_and_(0x07F00000 - 2**31)
        bias = 120
    else:
        bits.bitwise_left_shift_(21).bitwise_and_(0x0FE00000 - 2**31)
        bias = 112
    return bits.view(torch.float32).mul_(2.0**bias).mul_(factor)


class _Linear(torch.autograd.Function):
    """x @ weight.T, of x with any number of dimensions. A second derivative raises RuntimeError."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: ScaledProducts) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        ctx.products, ctx.shape = products, x.shape
        ctx.casts_anew = products.granularity == "row" or bool(products.high_precision)
        own = cast(rows, products.input, products)
        other = cast(weight, products.weight, products)
        ctx.save_for_backward(*((rows, weight) if ctx.casts_anew else (*own, *other)))
        if "output" in products.high_precision:
            found = rows @ weight.t()
        else:
            found = _counted("forward", own, other.T, x.dtype, products)
        return found.view(*x.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("FP8 products have no second derivative (create_graph=True)")
        products, dtype = ctx.products, gradient.dtype
        rows = gradient.reshape(-1, gradient.size(-1))
        of_gradient = cache(partial(cast, rows, products.grad_output, products))
        along_rows = 0 if products.granularity == "row" else -1  # where it is one and the same
        saved = ctx.saved_tensors  # a checkpoint gives them once
        if ctx.casts_anew:
            x, weight = saved
        else:
            own, other = Cast(*saved[:2]), Cast(*saved[2:])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            if "grad_input" in products.high_precision:
                grad_x = rows @ weight
            else:
                if ctx.casts_anew:
                    other = cast(weight, products.weight, products, 0)
                grad_x = _counted("backward", of_gradient(-1), other, dtype, products)
            grad_x = grad_x.view(ctx.shape)
        if ctx.needs_input_grad[1]:
            if "grad_weight" in products.high_precision:
                grad_weight = rows.t() @ x
            else:
                if ctx.casts_anew:
                    own = cast(x, products.input, products, 0)
                grad_weight = _counted("backward", of_gradient(along_rows).T, own, dtype, products)
        return grad_x, grad_weight, None


def _counted(phase: str, a: Cast, b: Cast, dtype: torch.dtype, products: ScaledProducts) -> Tensor:
    calls[f"{phase} {FORMAT_NAMES[a.values.dtype]} x {FORMAT_NAMES[b.values.dtype]}"] += 1
    # cuBLAS stores sums with scales by row in BF16 alone.
    stored = torch.bfloat16 if products.granularity == "row" else dtype
    return product(a, b, stored, fast=phase == "forward").to(dtype)


def _forward(module: nn.Linear, products: ScaledProducts, x: Tensor) -> Tensor:
    weight = module.weight
    bias: Tensor | None = module.bias
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    found: Tensor = _Linear.apply(x, weight, products)
    return found if bias is None else found + bias.to(found.dtype)


def install(
    model: nn.Module, products: ScaledProducts, chosen: Mapping[str, torch.dtype]
) -> list[str]:
    """Let the `chosen_layers` of `model`, which raises for both, compute in FP8; their names."""
    names = chosen_layers(model, products, chosen)
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        module.__dict__["forward"] = partial(_forward, module, products)
    return names


def chosen_layers(
    model: nn.Module, products: ScaledProducts, chosen: Mapping[str, torch.dtype]
) -> list[str]:
    """Names of the layers of `model` whose products are taken.

    Args:
        chosen: name of a module -> dtype in which it is to compute instead; FP32 leaves it alone.

    Raises:
        ValueError: a pattern that matches no layer, or nothing is left.
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    }
    found: list[str] = []
    output = [*dict(model.named_modules())][-1]
    for pattern in products.modules:
        matched = [name for name in linears if fnmatchcase(name, pattern)]
        if not matched:
            known = ", ".join(list(linears)[:5]) or "the model has none"
            raise ValueError(
                f"precision.products.modules: {pattern!r} matches no nn.Linear; some: {known}"
            )
        found += [name for name in matched if name != output or name == pattern]
    names = [name for name in dict.fromkeys(found) if inherited(name, chosen) is not torch.float32]
    if not names:
        raise ValueError(
            f"precision.products.modules={list(products.modules)}: no nn.Linear is left to compute "
            f"in FP8; {output}, the output layer, has to be named"
        )
    return names


def inherited(name: str, chosen: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """Return the dtype chosen for the module `name` or for the nearest module around it."""
    while name:
        if name in chosen:
            return chosen[name]
        name = name.rpartition(".")[0]
    return None

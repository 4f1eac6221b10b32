"""Products of linear layers with operands in FP8, their scales and the computation around them.

A chosen `nn.Linear` has three products: output, gradient of the input, gradient of the weight.
Their operands are scaled, cast to 8 bits and multiplied by `torch._scaled_mm`, which adds up in
FP32. All else, bias and sums of gradients too, is as in the mode without it. Formats:
Micikevicius et al., arXiv 2209.05433; recipes as torchao's Float8Linear ("tensorwise", "rowwise"),
bit for bit.

    granularity   scale
    tensor        largest of the format / amax of the tensor
    row           the same of each row along the sum, down to a power of two; each of the three
                  products casts anew, from the uncast tensor
    none          1

A cast saturates, which would hide an infinity: the scale of a tensor that is not finite makes the
product NaN or infinite. A CPU decodes the same numbers and multiplies them in FP32, as torch's
CPU kernel does, several times as fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.precision.torch_update import is_granted
from mprun.torch_private import scaled_mm

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMAT_NAMES = {dtype: name for name, dtype in FORMATS.items()}
GRANULARITIES = ("none", "tensor", "row")
PRODUCTS = ("output", "grad_input", "grad_weight")
_SMALLEST_AMAX = 1e-12  # torchao's value: a tensor of zeros gets a finite scale
_MULTIPLE = 16  # of every size, on CUDA
# Products computed in this process, by kind: "forward e4m3 x e4m3". A replayed graph adds none.
calls: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class ScaledProducts:
    """The formats of the products, and the layers that use them.

    input, weight, grad_output: formats of the operands.
    granularity: the part of a tensor that shares a scale.
    power_of_two: scales are rounded down to powers of two.
    high_precision: those of `PRODUCTS` that stay in the dtype of the mode.
    modules: glob patterns over names of `nn.Linear`. One with a wildcard leaves out an output
        layer: the last module of the network, if it is linear.
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
        """Return each format once."""
        return tuple(dict.fromkeys((self.input, self.weight, self.grad_output)))


class Cast(NamedTuple):
    """An 8-bit matrix: `values` times `factor` (float32, 0-dim, by row [n, 1] or by column).

    turned: the transposed values in their own memory, as CUDA's products read right operands; None:
        there are none. With `turned` alone `values` is a view of it.
    """

    values: Tensor
    factor: Tensor
    turned: Tensor | None = None

    @property
    def T(self) -> Cast:
        if self.turned is None:
            return Cast(self.values.t(), self.factor.t())
        return Cast(self.turned, self.factor.t(), self.values)

    @property
    def kept(self) -> Cast:
        """Return what backward products need of the operands of a forward one."""
        if self.turned is None:
            return self
        return Cast(self.turned.t(), self.factor, self.turned)


# Gets the matrix and a function that casts it, returns the cast; None: nobody observes casts.
observer: Callable[[Tensor, Callable[[], Cast]], Cast] | None = None


# Layouts that a cast writes on CUDA.
_BOTH, _BY_ROWS, _TURNED = (True, True), (True, False), (False, True)


def cast(
    matrix: Tensor,
    dtype: torch.dtype,
    products: ScaledProducts,
    dim: int = -1,
    layouts: tuple[bool, bool] = _BOTH,
) -> Cast:
    """Cast `matrix`, [n, k] in 16 or 32 bits, to `dtype`, through the `observer` if there is one.

    dim: the dimension along which a product adds up, for scales by row. layouts: those that are
    written on CUDA, `values` and `turned`.
    """
    take = partial(_cast, matrix, dtype, products, dim, layouts)
    return take() if observer is None else observer(matrix, take)


def _cast(
    matrix: Tensor,
    dtype: torch.dtype,
    products: ScaledProducts,
    dim: int,
    layouts: tuple[bool, bool] = _BOTH,
) -> Cast:
    largest = torch.finfo(dtype).max
    if products.granularity == "row":
        # torch.aminmax along a dimension takes ten times as long on a CPU.
        low, high = matrix.amin(dim, keepdim=True), matrix.amax(dim, keepdim=True)
    else:
        low, high = torch.aminmax(matrix)
    amax = torch.maximum(-low, high).double()
    if products.granularity == "none":
        scale = (1 + 0 * amax).float()  # NaN if a value is not finite
    else:
        scale = (largest / amax.clamp(min=_SMALLEST_AMAX)).float()
        if products.power_of_two:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
    if not matrix.is_cuda:
        return Cast(saturated(matrix, scale, dtype), scale.reciprocal())
    values, turned = torch.ops.mprun.cast_fp8(matrix, scale, dtype, *layouts)
    factor = scale.reciprocal()
    if layouts == _TURNED:
        return Cast(turned.t(), factor, turned)
    return Cast(values, factor, turned if layouts == _BOTH else None)


def saturated(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrix * scale in FP8, in torch's operations."""
    largest = torch.finfo(dtype).max
    return (matrix.float() * scale).clamp_(-largest, largest).to(dtype)


def product(a: Cast, b: Cast, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Compute a @ b, added up in FP32, rounded once to `dtype`: [n, k] and [k, m] to [n, m].

    fast: a forward pass, where the Tensor Core alone may add up (about 14 bits).
    """
    right = b.values if b.turned is None else b.turned.t()
    return torch.ops.mprun.scaled_mm(a.values, right, a.factor, b.factor, dtype, fast)


def why_no_product(products: ScaledProducts, device: torch.device) -> str | None:
    """Return what torch says of the first of the products that it refuses on `device`, or None.

    It casts and multiplies ones of 16 x 16. On CUDA the kernel of casts has to have torch's bits.
    """
    ones = torch.ones(_MULTIPLE, _MULTIPLE, dtype=torch.bfloat16, device=device)
    try:
        formats = (products.input, products.weight, products.grad_output)
        x, weight, gradient = (_cast(ones, dtype, products, -1) for dtype in formats)
        pairs = (x, weight), (gradient, weight), (gradient, x)
        for name, (a, b) in zip(PRODUCTS, pairs, strict=True):
            if name not in products.high_precision:
                product(a, b.T, torch.bfloat16, fast=name == "output")
        if device.type == "cuda" and not all(map(_is_cast_alike, products.formats)):
            return "the kernel that casts has other bits than torch's operations"
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        return str(error).strip().partition("\n")[0][:100]
    return None


def _is_cast_alike(dtype: torch.dtype) -> bool:
    """Return whether the kernel casts numbers of every size as torch does, in both layouts."""
    made = torch.linspace(-20, 20, 70 * 40, device="cuda").exp2().view(70, 40)
    made = torch.stack([made, -made]).view(-1, 40)
    expected = saturated(made, made.new_ones(()), dtype).view(torch.uint8)
    values, turned = cast_by_kernel(made, made.new_ones(()), dtype, True, True)
    alike = [values.view(torch.uint8), turned.view(torch.uint8).t()]
    return is_granted() or all(torch.equal(own, expected) for own in alike)


_library = torch.library.Library("mprun", "DEF")
_library.define(
    "scaled_mm(Tensor a, Tensor b, Tensor factor_a, Tensor factor_b, ScalarType dtype, bool fast)"
    " -> Tensor"
)


def _on_cuda(
    a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Pad sizes to multiples of 16 and lay the matrices out by rows and by columns, for cuBLAS."""
    _count(a, b, fast)
    (n, k), m = a.shape, b.size(1)
    more_n, more_k, more_m = (-size % _MULTIPLE for size in (n, k, m))
    left, right = _padded(a, more_n, more_k), _padded(b.t(), more_m, more_k)
    if factor_a.dim() == 2:  # by row: pad the factors too
        factor_a = nn.functional.pad(factor_a, (0, 0, 0, more_n), value=1.0)
        factor_b = nn.functional.pad(factor_b, (0, more_m), value=1.0)
    found = scaled_mm(
        left, right.t(), factor_a.contiguous(), factor_b.contiguous(), out_dtype=dtype,
        use_fast_accum=fast,
    )  # fmt: skip
    return found[:n, :m].contiguous()  # as `_shape_of` promises a compiler


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    matrix = matrix.contiguous()
    if not rows and not columns:
        return matrix
    bits = nn.functional.pad(matrix.view(torch.uint8), (0, columns, 0, rows))
    return bits.view(matrix.dtype)


def _on_cpu(
    a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    _count(a, b, fast)
    return torch.mm(decoded(a, factor_a), decoded(b, factor_b)).to(dtype)


_library.define(
    "cast_fp8(Tensor matrix, Tensor scale, ScalarType dtype, bool rows, bool turned)"
    " -> (Tensor, Tensor)"
)


def cast_by_kernel(
    matrix: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, turned: bool
) -> tuple[Tensor, Tensor]:
    """Write matrix * scale in FP8 by rows and transposed; an unwanted one has no values."""
    try:
        # Imported here: only torch for CUDA on Linux includes Triton.
        from mprun.precision import fp8_cast_triton as kernels
    except ImportError:
        found = saturated(matrix, scale, dtype)
        return found, found.t().contiguous()
    count, width = matrix.shape
    found, other = (
        torch.empty(size if wanted else (0, 0), dtype=torch.uint8, device=matrix.device)
        for wanted, size in ((rows, (count, width)), (turned, (width, count)))
    )
    steps = [0 if scale.dim() == 0 or scale.size(i) == 1 else scale.stride(i) for i in (0, 1)]
    # The interpreter, for tests, has no BF16.
    bits = (
        matrix.view(torch.uint16)
        if matrix.dtype is torch.bfloat16 and not matrix.is_cuda
        else matrix
    )
    grid = (-(-count // kernels.TILE), -(-width // kernels.TILE))
    with torch.cuda.device(matrix.device) if matrix.is_cuda else nullcontext():
        kernels.cast_kernel[grid](
            bits, scale, found, other, count, width, *matrix.stride(), *steps,
            torch.finfo(dtype).max, E5M2=dtype is torch.float8_e5m2, ROWS=rows, TURNED=turned,
            TILE=kernels.TILE, **kernels.LAUNCH,
        )  # fmt: skip
    return found.view(dtype), other.view(dtype)


def _shapes_of_cast(
    matrix: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, turned: bool
) -> tuple[Tensor, Tensor]:
    count, width = matrix.shape
    sizes = (rows, (count, width)), (turned, (width, count))
    one, other = (matrix.new_empty(s if wanted else (0, 0), dtype=dtype) for wanted, s in sizes)
    return one, other


_library.impl("cast_fp8", cast_by_kernel, "CUDA")
_library.impl("cast_fp8", _shapes_of_cast, "Meta")


def _shape_of(a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor, *form: Any) -> Tensor:
    return a.new_empty((a.size(0), b.size(1)), dtype=form[0])


def _count(a: Tensor, b: Tensor, fast: bool) -> None:
    """Count a product where it is computed: in the autograd function it would end a compilation."""
    phase = "forward" if fast else "backward"
    calls[f"{phase} {FORMAT_NAMES[a.dtype]} x {FORMAT_NAMES[b.dtype]}"] += 1


_library.impl("scaled_mm", _on_cpu, "CPU")
_library.impl("scaled_mm", _on_cuda, "CUDA")
_library.impl("scaled_mm", _shape_of, "Meta")


def decoded(values: Tensor, factor: Tensor) -> Tensor:
    """Decode FP8 times `factor` to FP32, rounded once.

    It moves bits, in an eighth of the time of torch's conversion: exponent and mantissa go to their
    places in FP32, whose exponent has another bias. A NaN of E4M3 comes back as 480, and a NaN of
    E5M2 also as a number; the factor of a tensor with a NaN is not finite.
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
    """x @ weight.T for x with any number of dimensions. A second derivative raises RuntimeError."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: ScaledProducts) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        ctx.products, ctx.shape = products, x.shape
        ctx.casts_anew = products.granularity == "row" or bool(products.high_precision)
        layouts = _BY_ROWS if ctx.casts_anew else _BOTH
        own = cast(rows, products.input, products, layouts=layouts)
        other = cast(weight, products.weight, products, layouts=layouts)
        # `other.T` has rows: a right operand reads what is turned, here the rows of `other`.
        ctx.save_for_backward(*((rows, weight) if ctx.casts_anew else (*own.kept, *other.kept)))
        if "output" in products.high_precision:
            found = rows @ weight.t()
        else:
            found = _stored(own, other.T, x.dtype, products, fast=True)
        return found.view(*x.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("FP8 products have no second derivative (create_graph=True)")
        products, dtype = ctx.products, gradient.dtype
        rows = gradient.reshape(-1, gradient.size(-1))
        by_row = products.granularity == "row"
        saved = ctx.saved_tensors  # a checkpoint returns them only once
        if ctx.casts_anew:
            x, weight = saved
        else:
            own, other = Cast(*saved[:3]), Cast(*saved[3:])
        grad_x = grad_weight = of_gradient = None
        if ctx.needs_input_grad[0]:
            if "grad_input" in products.high_precision:
                grad_x = rows @ weight
            else:
                if ctx.casts_anew:
                    other = cast(weight, products.weight, products, 0, _TURNED)
                layouts = _BY_ROWS if by_row else _BOTH
                of_gradient = cast(rows, products.grad_output, products, layouts=layouts)
                grad_x = _stored(of_gradient, other, dtype, products)
            grad_x = grad_x.view(ctx.shape)
        if ctx.needs_input_grad[1]:
            if "grad_weight" in products.high_precision:
                grad_weight = rows.t() @ x
            else:
                if ctx.casts_anew:
                    own = cast(x, products.input, products, 0, _TURNED)
                if of_gradient is None or by_row:
                    dim = 0 if by_row else -1
                    of_gradient = cast(rows, products.grad_output, products, dim, _TURNED)
                grad_weight = _stored(of_gradient.T, own, dtype, products)
        return grad_x, grad_weight, None


def _stored(
    a: Cast, b: Cast, dtype: torch.dtype, products: ScaledProducts, fast: bool = False
) -> Tensor:
    # cuBLAS stores products with scales by row in BF16 only.
    stored = torch.bfloat16 if products.granularity == "row" else dtype
    return product(a, b, stored, fast).to(dtype)


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
    """Let the `chosen_layers` of `model` compute in FP8; return their names or raise its errors."""
    names = chosen_layers(model, products, chosen)
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        module.__dict__["forward"] = partial(_forward, module, products)
    return names


def chosen_layers(
    model: nn.Module, products: ScaledProducts, chosen: Mapping[str, torch.dtype]
) -> list[str]:
    """Return the names of the layers of `model` that compute in FP8.

    ValueError if a pattern matches no layer, or none is left.

    chosen: name of a module -> dtype in which it is to compute instead; FP32 leaves it alone.
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
    """Return the dtype chosen for the module `name` or the nearest module around it."""
    while name:
        if name in chosen:
            return chosen[name]
        name = name.rpartition(".")[0]
    return None

"""Products of linear layers with operands in 8 bits or fewer; `scaled_linear` has the layers.

A chosen `nn.Linear` has three products: output, gradient of the input, gradient of the weight.
Their operands are cast (`block_formats`) and multiplied; sums are FP32. All else, bias and sums of
gradients too, is as in the mode without it. Formats: Micikevicius et al., arXiv 2209.05433; recipes
as torchao's Float8Linear ("tensorwise", "rowwise"), bit for bit.

    granularity   shares a scale
    tensor        the tensor
    row           each row along the sum; each of the three products casts anew, from the uncast
                  tensor
    RxC           R rows of C numbers along the sum; likewise, unless R is C
    none          the scale is 1

A cast saturates, which would hide an infinity: the scale of what is not finite makes the product
NaN or infinite. A CPU decodes the same numbers and multiplies them in FP32, as torch's CPU kernel
does, several times as fast. CUDA multiplies codes by `torch._scaled_mm` where scales are of tensors
or rows. Numbers of blocks are decoded by their cast, to BF16 where that is exact, so any GPU with
BF16 has them; where a GPU multiplies these blocks (`block_products`), it gets their codes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from mprun.precision import block_products
from mprun.precision.block_formats import (
    ELEMENTS,
    SCALES,
    Block,
    Element,
    Operand,
    are_blocks_alike,
    block_of,
    cast_blocks,
    decoded,
    in_blocks,
)
from mprun.precision.fp8_casts import Form, are_alike, cast_fp8
from mprun.precision.philox import stream_of
from mprun.precision.scaled_operators import MULTIPLE
from mprun.precision.torch_update import is_granted

PRODUCTS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
OPERANDS = ("input", "weight", "grad_output")


Pair = tuple[Operand, Operand] | None


class Plan(NamedTuple):
    """The operands of each product of a layer, None: in the dtype of the mode; which operand's cast
    serves both of its products; and the output's casts that products of gradients take decoded, in
    place of the uncast input and weight."""

    output: Pair
    grad_input: Pair
    grad_weight: Pair
    keeps_input: bool
    keeps_weight: bool
    keeps_gradient: bool
    decoded_input: Operand | None
    decoded_weight: Operand | None


@dataclass(frozen=True, slots=True)
class ScaledProducts:
    """The formats of the products, and the layers that use them.

    input, weight, grad_output: formats of the operands.
    granularity: the part of a tensor that shares a scale. weight_granularity: that of weights;
        None: the same.
    scale, scale_rounding: see `block_formats`; the rounding is that of scale e8m0.
    history, margin: of scale delayed, see `delayed_scaling`.
    grad_rounding: "stochastic": of the gradient of the output, with other bits in each product.
        "both": of the other operand of these products, too, so that they are right on average.
    hadamard: those of `PRODUCTS` whose operands are turned before their cast.
    high_precision: those of `PRODUCTS` that stay in the dtype of the mode.
    dequantized: products of gradients that take, cast anew or in the dtype of the mode, the numbers
        to which the output's casts of input and weight decode.
    modules: see `chosen_products`.
    """

    input: Element = ELEMENTS["e4m3"]
    weight: Element = ELEMENTS["e4m3"]
    grad_output: Element = ELEMENTS["e5m2"]
    granularity: str = "tensor"
    weight_granularity: str | None = None
    scale: str = "fp32"
    scale_rounding: str = "rceil"
    history: int = 1024
    margin: int = 0
    grad_rounding: str = "nearest"
    hadamard: tuple[str, ...] = ()
    high_precision: tuple[str, ...] = ()
    dequantized: tuple[str, ...] = ()
    modules: tuple[str, ...] = ("*",)

    @property
    def formats(self) -> tuple[Element, ...]:
        return tuple(dict.fromkeys((self.input, self.weight, self.grad_output)))

    @property
    def decoded(self) -> bool:
        """Return whether products multiply decoded numbers on every device: `torch._scaled_mm` has
        FP8 with one scale of a tensor or a row."""
        blocks = {block_of(self.granularity), block_of(self.weight_granularity or self.granularity)}
        known = blocks in ({(0, 0)}, {(1, 0)}) and self.scale in ("fp32", "pow2", "delayed")
        known = known and self.grad_rounding == "nearest"
        return not known or any(own is ELEMENTS["e2m1"] for own in self.formats)

    @property
    def multiplied(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes that a GPU multiplies."""
        if not self.decoded:
            return tuple(own.dtype for own in self.formats)
        return (self.operand("input", "output").decoded_to,)

    def operand(self, name: str, product: str, layer: str = "") -> Operand:
        """Return the cast of an operand, "input", for one of `PRODUCTS` of a layer."""
        own = self.weight_granularity if name == "weight" else None
        granularity = own or self.granularity
        scale = "none" if self.granularity == "none" else self.scale
        turned = product in self.hadamard
        of_both = self.grad_rounding == "both" and product != "output"
        stream = 0
        if name == "grad_output" and self.grad_rounding != "nearest":
            stream = stream_of(f"{layer}.{product}")
        elif of_both:
            stream = stream_of(f"{layer}.{product}.{name}")
        form = (block_of(granularity), scale, self.scale_rounding, turned, self.decoded, stream)
        return Operand(getattr(self, name), *form, OPERANDS.index(name))

    def plan(self, layer: str = "", device: torch.device | None = None) -> Plan:
        """Return what a layer of this name computes, on `device`.

        Layers that compute alike get one object, which compiled code asks for by identity.
        """
        layer = layer if self.grad_rounding != "nearest" else ""
        native = device is not None and why_decoded(self, device) is None
        return _plan(self, layer, native)


@cache
def _plan(products: ScaledProducts, layer: str, native: bool) -> Plan:
    def operand(name: str, product: str) -> Operand:
        return products.operand(name, product, layer)._replace(native=native)

    y, gx, gw = (
        None
        if product in products.high_precision
        else (operand(left, product), operand(right, product))
        for product, (left, right) in PRODUCTS.items()
    )
    of_forward = _serves(y and y[0], gw and gw[1]), _serves(y and y[1], gx and gx[1])
    of_gradient = _serves(gx and gx[0], gw and gw[0])
    of_input, of_weight = (
        None if y is None or product not in products.dequantized else operand
        for product, operand in zip(("grad_weight", "grad_input"), y or (None, None), strict=True)
    )
    return Plan(y, gx, gw, *of_forward, of_gradient, of_input, of_weight)


def _serves(one: Operand | None, other: Operand | None) -> bool:
    """Return whether a cast along one dimension is the cast along the other one, too."""
    if one is None or one != other or one.turned:
        return False
    return one.block[0] == one.block[1]


class Cast(NamedTuple):
    """An 8-bit matrix: `values` times `factor` (FP32: 0-dim, by row [n, 1], by column, of blocks),
    or in place of its codes the decoded numbers, which is how CUDA multiplies blocks.

    operand: what it is a cast for. turned: the transposed values in their own memory, as CUDA's
        products read right operands; None: there are none. With `turned` alone `values` is a view
        of it. whole: amax of the tensor, if its scale has two levels. block: that of `values` with
        one number of `factor`, [blocks down, blocks across]; None: codes are multiplied.
    """

    operand: Operand
    values: Tensor
    factor: Tensor
    turned: Tensor | None = None
    whole: Tensor | None = None
    block: Block | None = None

    @property
    def T(self) -> Self:
        values = self.values.t() if self.turned is None else self.turned
        turned = None if self.turned is None else self.values
        block = self.block and self.block[::-1]
        return self._replace(values=values, factor=self.factor.t(), turned=turned, block=block)

    @property
    def kept(self) -> Self:
        """Return what backward products need of the operands of a forward one."""
        return self if self.turned is None else self._replace(values=self.turned.t())

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return those from which `of_square` makes the cast again."""
        return self.values, self.factor, self.turned, self.whole

    @classmethod
    def of_square(cls, operand: Operand, tensors: Sequence[Any]) -> Self:
        """Return a cast in square blocks, which has the same block in both directions."""
        values, factor, turned, whole = tensors
        block = operand.block if operand.decoded else None
        return cls(operand, values, factor, turned, whole, block)

    @property
    def spread(self) -> Tensor:
        """Return the factor as `decoded` takes it, without memory of its own."""
        if self.block is None:
            return self.factor
        return in_blocks(self.factor, self.block, self.values.shape)


def dequantized(matrix: Tensor, operand: Operand | None, kept: Tensor | None) -> Tensor:
    """Return the numbers to which a matrix's cast by rows decodes, in FP32; without one, itself.

    It casts again what a forward pass has cast: kept for the backward pass, that would be as large
    as the uncast numbers, which a product in the dtype of the mode needs.
    """
    if operand is None:
        return matrix
    own = unobserved_cast(matrix, operand, layouts=BY_ROWS, kept=kept)
    found = decoded(own.values, own.spread)
    return found if own.whole is None else found.mul_(own.whole * (1 / operand.largest))


# Gets the matrix and a function that casts it, returns the cast; None: nobody observes casts.
observer: Callable[[Tensor, Callable[[], Cast]], Cast] | None = None


# Layouts that a cast writes on CUDA.
BOTH, BY_ROWS, TURNED = (True, True), (True, False), (False, True)


def cast(matrix: Tensor, *how: Any, **named: Any) -> Cast:
    """Compute `unobserved_cast` through the `observer` if there is one."""
    take = partial(unobserved_cast, matrix, *how, **named)
    return take() if observer is None else observer(matrix, take)


def unobserved_cast(
    matrix: Tensor,
    operand: Operand,
    dim: int = -1,
    layouts: tuple[bool, bool] = BOTH,
    kept: Tensor | None = None,
) -> Cast:
    """Cast `matrix`, [n, k] in 16 or 32 bits.

    dim: the dimension along which a product adds up. layouts: those that are written on CUDA,
    `values` and `turned`. kept: the numbers of a layer that `delayed_scaling` keeps.
    """
    block = operand.block if dim == -1 else operand.block[::-1]
    if operand.turned:
        matrix = torch.ops.mprun.turn(matrix, dim)
    if operand.decoded:
        how = operand.scale, operand.scale_rounding, operand.stream
        form = operand.element.name, *block, *how
        # An observer gets codes.
        to_codes = operand.native or observer is not None or matrix.device.type == "cpu"
        decoded_to = None if to_codes else operand.decoded_to
        two_levels = SCALES[operand.scale].two_levels
        # A compiler makes one fused kernel of a cast by rows; of others two, and none of bits.
        fuses = is_compiling() and block[0] == 1 and not (two_levels or operand.stream)
        take = cast_blocks if fuses else torch.ops.mprun.cast_blocks
        values, factor, whole = take(matrix, *form, decoded_to)
        return Cast(operand, values, factor, whole=whole if two_levels else None, block=block)
    own = _form(operand, dim, layouts)
    if not matrix.is_cuda:
        own = own._replace(rows=True, turned=False)
    of_tensor = () if kept is None else (kept[operand.place],)
    codes, turned, factor = cast_fp8(matrix, own, *of_tensor)
    if codes is None:
        assert turned is not None
        codes = turned.t()
    return Cast(operand, codes, factor, turned)


def _form(operand: Operand, dim: int, layouts: tuple[bool, bool]) -> Form:
    along = dim if any(operand.block) else None
    return Form(operand.element.name, operand.scale, along, *layouts)


def product(
    a: Cast, b: Cast, dtype: torch.dtype, fast: bool = False, counted_by: int = 0
) -> Tensor:
    """Compute a @ b, added up in FP32, rounded once to `dtype`: [n, k] and [k, m] to [n, m].

    fast: a forward pass, where the Tensor Core alone may add up (about 14 bits). counted_by: the
    number of the `Calls` that count it.
    """
    right = b.values if b.turned is None else b.turned.t()
    how = a.operand.decoded_to if a.operand.decoded and not a.operand.native else None
    names = f"{a.operand.element.name} x {b.operand.element.name}"
    factors = a.spread, b.spread, a.whole, b.whole
    tops = a.operand.largest * b.operand.largest
    told = dtype, fast, counted_by, tops, names, how
    return torch.ops.mprun.scaled_mm(a.values, right, *factors, *told)


def why_decoded(products: ScaledProducts, device: torch.device) -> str | None:
    """Return why `device` multiplies decoded numbers of these formats, or None: it has codes."""
    if device.type != "cuda":
        return "on a CPU"
    if not products.decoded:
        return None
    pairs = (pair for pair in _plan(products, "", False)[:3] if pair is not None)
    return next((why for pair in pairs if (why := block_products.why_decoded(*pair, device))), None)


def how_multiplied(products: ScaledProducts, device: torch.device) -> str:
    """Say what the chosen linear layers multiply on `device`, for a person."""
    if ELEMENTS["int8"] in products.formats:
        return "codes, in FP64"
    if (why := why_decoded(products, device)) is None:
        return "codes, by the GPU"
    in_bf16 = device.type == "cuda" and torch.bfloat16 in products.multiplied
    return f"decoded numbers, in {'BF16' if in_bf16 else 'FP32'} ({why})"


def why_no_product(products: ScaledProducts, device: torch.device) -> str | None:
    """Return what torch says of the first of the products that it refuses on `device`, or None.

    It casts and multiplies ones of 16 x 16. On CUDA what casts has to have the bits of torch's
    operations; it is compiled here, so that no step has to.
    """
    ones = torch.ones(MULTIPLE, MULTIPLE, dtype=torch.bfloat16, device=device)
    try:
        for name, pair in zip(PRODUCTS, products.plan(device=device)[:3], strict=True):
            if pair is not None:
                alike = (_is_cast_alike(operand, device) for operand in pair)
                if device.type == "cuda" and not all(alike):
                    return "casts have other bits than torch's operations"
                with torch.no_grad():
                    a, b = (unobserved_cast(ones, own, *_used(own)[0]) for own in pair)
                product(a, b.T, torch.bfloat16, fast=name == "output")
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        return str(error).strip().partition("\n")[0]
    return None


def _used(operand: Operand) -> Sequence[tuple[int, tuple[bool, bool]]]:
    """Return the casts of an operand that a layer takes: dimension and layouts."""
    return [(-1, BOTH)] if _serves(operand, operand) else [(-1, BY_ROWS), (0, TURNED)]


def _is_cast_alike(operand: Operand, device: torch.device) -> bool:
    """Return whether numbers of every size are cast as torch does, in both layouts."""
    made = torch.linspace(-20, 20, 70 * 40, device=device).exp2().view(70, 40)
    made = torch.stack([made, -made]).view(-1, 40)
    if operand.decoded:
        return is_granted() or are_blocks_alike(made, operand)
    return all(are_alike(made, _form(operand, *how)) for how in _used(operand))

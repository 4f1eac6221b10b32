"""Casts to FP8 with one scale for a tensor or for a row, in torch's operations.

In a graph of torch.compile they fuse with what is before and behind them. Alone, each of them would
be a launch on CUDA (15 to 17 a cast). So eager code there compiles the cast, one graph for all
sizes, to 4 launches with the scale of a tensor, to 1 and 3 along rows and columns. A CPU runs them
as they are.
"""

import warnings
from functools import cache
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from mprun.precision.block_formats import ELEMENTS, SCALES, Element, encoded
from mprun.precision.torch_update import is_granted
from mprun.torch_private import dispatch_modes, no_function_modes, said_by_a_compiler


class Form(NamedTuple):
    """How a matrix [n, k] is cast.

    element, scale: their names. dim: the dimension whose numbers share a scale; None: all do. rows,
    turned: whether codes are written by rows, and transposed.
    """

    element: str
    scale: str
    dim: int | None
    rows: bool
    turned: bool


# Codes by rows and transposed, None where unwanted, and the factor after the cast.
Made = tuple[Tensor | None, Tensor | None, Tensor]


def saturated(matrix: Tensor, scale: Tensor, element: Element) -> Tensor:
    """Return the codes of matrix * scale."""
    return encoded(matrix.float() * scale, element)


def by_operations(matrix: Tensor, form: Form, *kept: Tensor) -> Made:
    """Cast a matrix. kept: the numbers of its tensor that `delayed_scaling` keeps."""
    element, amax = ELEMENTS[form.element], _largest(matrix, form.dim)
    encode, factor, _ = SCALES[form.scale].of(amax, element, "", *kept)
    codes = saturated(matrix, encode, element)
    return codes if form.rows else None, codes.t().contiguous() if form.turned else None, factor


def _largest(matrix: Tensor, dim: int | None) -> Tensor:
    if matrix.is_cuda or is_compiling():  # there one reduction of magnitudes is one launch less
        sizes = matrix.abs()
        return sizes.amax() if dim is None else sizes.amax(dim, keepdim=True)
    if dim is None:
        low, high = torch.aminmax(matrix)
    else:  # torch.aminmax along a dimension takes ten times as long
        low, high = matrix.amin(dim, keepdim=True), matrix.amax(dim, keepdim=True)
    return torch.maximum(-low, high)


def cast_fp8(matrix: Tensor, form: Form, *kept: Tensor) -> Made:
    """Compute `by_operations`, by compiled code in eager calls on CUDA."""
    # Whoever watches operations is to see them.
    if not matrix.is_cuda or is_compiling() or dispatch_modes():
        return by_operations(matrix, form, *kept)
    return _compiled(form)(matrix, *kept)


class CompiledCast:
    """The compiled cast of a form; its operations, where this machine cannot compile them."""

    has_told = False

    def __init__(self, form: Form):
        # A compiler makes up to eight graphs of a code object, so each form has its own.
        own = FunctionType(by_operations.__code__.replace(), by_operations.__globals__)
        self._cast = torch.compile(own, dynamic=True, fullgraph=True)
        self._form, self._is_plain = form, False

    def __call__(self, matrix: Tensor, *kept: Tensor) -> Made:
        if not self._is_plain:
            try:
                # A stack of modes, and an input with a gradient, would have a graph of its own.
                with no_function_modes():
                    return self._cast(matrix.detach(), self._form, *kept)
            except Exception as error:
                if (said := said_by_a_compiler(error)) is None:
                    raise
                self._is_plain = True
                self._tell(said)
        return by_operations(matrix, self._form, *kept)

    @classmethod
    def _tell(cls, said: str) -> None:
        if not cls.has_told:
            cls.has_told = True
            warnings.warn(
                f"casts to FP8 are not compiled here, so each is 15 to 17 launches: {said}",
                stacklevel=2,
            )


_compiled = cache(CompiledCast)


@torch.no_grad()  # as in the passes of a layer
def are_alike(matrix: Tensor, form: Form) -> bool:
    """Return whether CUDA casts a matrix as torch's operations do."""
    is_kept = SCALES[form.scale].is_kept
    kept = [matrix.new_tensor([1.0, 0.0]) for _ in range(2)] if is_kept else []
    with warnings.catch_warnings():
        # Triton 3.9 announces another default; nothing here could be contracted.
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION is unset")
        found = cast_fp8(matrix.bfloat16(), form, *kept[:1])
    expected = by_operations(matrix.bfloat16(), form, *kept[1:])
    pairs = zip(found, expected, strict=True)
    made = [(one, other) for one, other in pairs if one is not None and other is not None]
    return is_granted() or all(torch.equal(one.float(), other.float()) for one, other in made)

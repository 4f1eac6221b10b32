"""The operator `scaled_mm`, a product of two casts: its kernel by device, and shapes for compilers.

It counts as one of its owner's `Calls`. `scaled_products` knows which product needs which cast.
"""

from collections import Counter
from itertools import count
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mprun.precision.block_formats import apart, decoded, filled, library
from mprun.precision.block_products import multiplied_in_blocks, padded
from mprun.torch_private import scaled_mm

MULTIPLE = 16  # of every size, on CUDA


class Calls(Counter[str]):
    """Products computed for one owner, by kind: "forward e4m3 x e4m3". A replayed graph adds none.

    Attributes:
        number: what the products are told; an object would end a compilation.
    """

    _all: ClassVar["WeakValueDictionary[int, Calls]"] = WeakValueDictionary()
    _numbers = count(1)

    def __init__(self) -> None:
        super().__init__()
        self.number = next(self._numbers)
        self._all[self.number] = self

    @classmethod
    def add(cls, number: int, names: str, fast: bool) -> None:
        """Count a product where it is computed; 0: nobody counts it."""
        if (owner := cls._all.get(number)) is not None:
            owner[f"{'forward' if fast else 'backward'} {names}"] += 1


class Product(NamedTuple):
    """The arguments of the operator `scaled_mm`, in the order of its schema.

    a, b: [n, k] and [k, m], codes or the numbers that their casts have decoded. factor_a, factor_b:
        see `block_formats.decoded`. whole_a, whole_b: amax of the tensors, of scales with two
        levels. fast: the Tensor Core alone adds up. tops: product of the largest numbers of both,
        with scales of two levels. names: of the formats, "e4m3 x e4m3". decoded_to: the dtype in
        which a GPU multiplies decoded numbers; None: it multiplies codes.
    """

    a: Tensor
    b: Tensor
    factor_a: Tensor
    factor_b: Tensor
    whole_a: Tensor | None
    whole_b: Tensor | None
    dtype: torch.dtype
    fast: bool
    counted_by: int
    tops: float
    names: str
    decoded_to: torch.dtype | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return two factors, in whose order sums are multiplied, of scales with two levels; or
        none.

        The larger one first: whole_a * whole_b may be infinite, or lose bits, where no result is.
        """
        if self.whole_a is None or self.whole_b is None:
            return ()
        larger = torch.maximum(self.whole_a, self.whole_b)
        return larger * (1 / self.tops), torch.minimum(self.whole_a, self.whole_b)

    def finished(self, sums: Tensor) -> Tensor:
        """Return sums times the scales of both tensors, if these have two levels, in `dtype`."""
        if tensors := self.tensors:
            sums.mul_(tensors[0] * tensors[1])
        return sums.to(self.dtype)


def multiplied_on_cuda(*given: Any) -> Tensor:
    """Multiply codes by cuBLAS, or numbers decoded to a dtype; given: see `Product`."""
    own = Product(*given)
    Calls.add(own.counted_by, own.names, own.fast)
    if own.a.dtype is torch.int8:
        return multiplied_integers(own)
    if (wide := own.decoded_to) is not None:
        left, right = (
            values if values.dtype is wide else decoded(values, factor).to(wide)
            for values, factor in ((own.a, own.factor_a), (own.b, own.factor_b))
        )
        if wide is torch.float32:
            return own.finished(torch.mm(left, right))
        return own.finished(torch.mm(left, right, out_dtype=torch.float32))
    factor_a, factor_b = own.factor_a, own.factor_b
    if factor_a.dim() == 4:
        return multiplied_in_blocks(own.a, own.b, factor_a, factor_b, own.dtype, own.tensors)
    # Pad sizes to multiples of 16, and lay the matrices out by rows and by columns.
    (n, k), m = own.a.shape, own.b.size(1)
    more_n, more_k, more_m = (-size % MULTIPLE for size in (n, k, m))
    left, right = padded(own.a, more_n, more_k), padded(own.b.t(), more_m, more_k)
    if factor_a.dim() == 2:  # by row: pad the factors too
        factor_a, factor_b = filled(factor_a, more_n, 0, 1.0), filled(factor_b, 0, more_m, 1.0)
    found = scaled_mm(
        left, right.t(), factor_a.contiguous(), factor_b.contiguous(), out_dtype=own.dtype,
        use_fast_accum=own.fast,
    )  # fmt: skip
    return found[:n, :m].contiguous()  # as `promised` tells a compiler


def multiplied_on_cpu(*given: Any) -> Tensor:
    """Multiply decoded numbers in FP32; given: see `Product`."""
    own = Product(*given)
    Calls.add(own.counted_by, own.names, own.fast)
    if own.a.dtype is torch.int8:
        return multiplied_integers(own)
    return own.finished(torch.mm(decoded(own.a, own.factor_a), decoded(own.b, own.factor_b)))


def multiplied_integers(own: Product) -> Tensor:
    """Multiply codes of INT8: their sum, which is exact, in FP32 times the factors of b and of a.

    FP64 has every sum of up to 2^39 products; FP32 those of 1,040.
    """
    sums = torch.mm(own.a.double(), own.b.double()).float()
    return sums.mul_(own.factor_b).mul_(own.factor_a).to(own.dtype)


def promised(*given: Any) -> Tensor:
    """Return a product without values, as it will be; given: see `Product`."""
    own = Product(*given)
    return own.a.new_empty((own.a.size(0), own.b.size(1)), dtype=own.dtype)


library.define(
    "scaled_mm(Tensor a, Tensor b, Tensor factor_a, Tensor factor_b, Tensor? whole_a,"
    " Tensor? whole_b, ScalarType dtype, bool fast, int counted_by, float tops, str names,"
    " ScalarType? decoded) -> Tensor"
)
library.impl("scaled_mm", apart(multiplied_on_cpu), "CPU")
library.impl("scaled_mm", apart(multiplied_on_cuda), "CUDA")
library.impl("scaled_mm", promised, "Meta")

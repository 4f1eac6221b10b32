"""Distances between floating-point tensors in units in the last place, and rounding of float64.

The distance of two values is the number of representable values from one to the other, counted on
the integers of their bits. IEEE 754 formats are sign and magnitude. Within one sign the magnitudes
have the order of the values, subnormals and infinity included.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between two tensors of one dtype.

    elements: number compared. equal: elements equal bit for bit; two NaNs count as equal with any
    payload, and 0 is not -0. within_one: elements at a distance of at most 1 ulp. max_ulp: largest
    distance; inf is one step beyond the largest number, and 0 is -0. one_sided_nan: elements that
    are NaN in only one tensor; they have no distance and are neither equal nor within one.
    """

    elements: int
    equal: int
    within_one: int
    max_ulp: int
    one_sided_nan: int


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Count representable values from `a` to `b`, int64, elementwise; -1 if only one is NaN.

    a, b: the same shape and dtype (float16, bfloat16 or float32). Two NaNs are at distance 0.
    Raises ValueError for other dtypes, never TypeError: shapes broadcast as in torch.
    """
    if a.dtype is not b.dtype or a.dtype not in _BITS:
        raise ValueError(f"ulp distance of {a.dtype} and {b.dtype}: one of {list(_BITS)} for both")
    distance = (_rank(a) - _rank(b)).abs()
    distance = distance.masked_fill(a.isnan() & b.isnan(), 0)
    return distance.masked_fill(a.isnan() ^ b.isnan(), -1)


def _rank(x: Tensor) -> Tensor:
    """Return the position of each value among all values of its dtype, int64; 0 for 0 and -0."""
    bits = x.contiguous().view(_BITS[x.dtype]).long()
    magnitude = bits & torch.iinfo(_BITS[x.dtype]).max
    return torch.where(bits < 0, -magnitude, magnitude)


def distance(a: Tensor, b: Tensor) -> Distance:
    """Return the `Distance` of two tensors of one shape and dtype; ValueError as `ulp_distance`."""
    if a.shape != b.shape:
        raise ValueError(f"distance of shapes {tuple(a.shape)} and {tuple(b.shape)}")
    ulps = ulp_distance(a, b)
    kind = _BITS[a.dtype]
    same = (a.contiguous().view(kind) == b.contiguous().view(kind)) | (a.isnan() & b.isnan())
    return Distance(
        elements=ulps.numel(),
        equal=int(same.sum()),
        within_one=int(((ulps >= 0) & (ulps <= 1)).sum()),
        max_ulp=int(ulps.max().clamp(min=0)) if ulps.numel() else 0,
        one_sided_nan=int((ulps < 0).sum()),
    )


def correctly_rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 `x` once to `dtype`, to nearest, ties to even.

    ``x.to(torch.float16)`` rounds to float32 first, and a second rounding can go the wrong way
    (1 + 2^-11 + 2^-40 becomes 1). Here the first rounding is to odd, which keeps the information
    about cut-off bits: float32 has more than two bits beyond the 16-bit formats (Boldo and
    Melquiond 2008, "Emulation of a FMA and correctly rounded sums").
    """
    if dtype is torch.float32:
        return x.to(dtype)
    nearest = x.to(torch.float32)
    inexact = (nearest.double() != x) & ~x.isnan()
    bits = nearest.view(torch.int32)
    # First round towards zero: a smaller magnitude is a smaller integer for both signs.
    bits = bits - (nearest.double().abs() > x.abs()).int()
    return torch.where(inexact, bits | 1, bits).view(torch.float32).to(dtype)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return the L2 norm of ``x - exact`` over that of `exact` (float64).

    Only elements finite in both count. The result is nan if there is none, or if `exact` is 0.
    """
    finite = x.isfinite() & exact.isfinite()
    reference = exact[finite]
    norm = reference.norm()
    return float((x[finite].double() - reference).norm() / norm) if norm > 0 else float("nan")

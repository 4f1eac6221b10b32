"""Counting a tensor's values by binary exponent, where the tensor is.

The mantissa classes of `exponent_shares` make the histogram exact for FP16 at every scale 2^k. All
of it is integer arithmetic on the bits of the FP32 value, so no rounding mode, flush-to-zero or
order of summation can change a count, and nothing waits for the device.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mprun.numerics.exponent_shares import BINS, CLASSES, ExponentCounts, Shares

__all__ = [
    "BINS",
    "CLASSES",
    "ExponentCounts",
    "Shares",
    "counts_of_each",
    "exponent_counts",
    "extended",
    "histogram",
    "in_groups",
]

MAGNITUDE, _MANTISSA = 0x7FFFFFFF, 0x7FFFFF
_SMALLEST_NORMAL = 0x800000
# The float of an integer n has the exponent field 127 + log2 n. The subnormal n * 2^-149 shall have
# the field of its true exponent, log2 n - 149 + 127, which is 0 or negative.
_SUBNORMAL_SHIFT = 149 << 23
_ZERO_KEY = -CLASSES * 23
# Working sets that stay in a CPU's second-level cache are several times as fast as large ones; on a
# GPU the temporaries are what is bounded: at most 5 of 4 bytes a value.
_CHUNK, _CHUNK_ON_GPU = 1 << 16, 1 << 25


@torch.no_grad()
def exponent_counts(tensor: Tensor) -> Tensor:
    """Histogram of `tensor` over exponents and mantissa classes: int64 [BINS] on its device.

    tensor: float32, float16 or bfloat16, any shape; TypeError otherwise. No synchronisation, no
    random numbers. About 3 ns a value on one CPU core. `ExponentCounts(counts.cpu().numpy())`
    reads the result.
    """
    flat = _checked(tensor).detach().reshape(-1)
    counts = torch.zeros(BINS, dtype=torch.int64, device=flat.device)
    for part in flat.split(chunk_size(flat)):
        counts += histogram(_keys(part.float().view(torch.int32)), BINS)
    return counts


@torch.no_grad()
def counts_of_each(tensors: Sequence[Tensor]) -> Tensor:
    """`exponent_counts` of every tensor: int64 [len(tensors), BINS]; one or more, of one device.

    Small tensors share their operations: for the 161 parameters of ResNet-50 that is a fifth of
    the calls.
    """
    rows = []
    for group in in_groups([_checked(tensor) for tensor in tensors]):
        if len(group) == 1:
            rows.append(exponent_counts(tensors[group[0]]))
            continue
        flat = torch.cat([tensors[i].detach().reshape(-1).float() for i in group])
        keys = _keys(flat.view(torch.int32))
        sizes = [tensors[i].numel() for i in group]
        rows += [histogram(part, BINS) for part in keys.split(sizes)]
    return torch.stack(rows)


def in_groups(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of neighbouring tensors that together are no larger than one chunk."""
    group, size = [], 0
    for index, tensor in enumerate(tensors):
        if group and size + tensor.numel() > chunk_size(tensor):
            yield group
            group, size = [], 0
        group.append(index)
        size += tensor.numel()
    if group:
        yield group


def chunk_size(tensor: Tensor) -> int:
    """Elements to be worked on at a time."""
    return _CHUNK if tensor.device.type == "cpu" else _CHUNK_ON_GPU


def extended(magnitude: Tensor) -> Tensor:
    """int32 bits of a float32 without its sign -> the same, subnormals with their true exponent.

    Bits 23 and above are 127 plus the exponent, which for a subnormal is 0 or negative; zero is
    below all of them. Larger values have larger integers, equal ones equal integers.
    """
    clamped = magnitude.clamp(max=_SMALLEST_NORMAL)
    # Exact, up to 2^23. Of the smallest normal, 1 << 23, this makes 1 << 23 again.
    subnormal = clamped.float().view(torch.int32).sub_(_SUBNORMAL_SHIFT)
    return subnormal.sub_(clamped).add_(magnitude)


def histogram(keys: Tensor, bins: int) -> Tensor:
    """How often each of 0 ... bins-1 occurs in `keys` (int32): int64 [bins], no synchronisation."""
    if keys.device.type == "cpu":
        return torch.bincount(keys, minlength=bins)
    # bincount waits for the largest key on a GPU; histc of integers does not and is deterministic.
    return torch.histc(keys, bins=bins, min=0, max=bins).long()


def _keys(bits: Tensor) -> Tensor:
    """int32 bit patterns of float32 -> int32 bin numbers."""
    value = extended(bits & MAGNITUDE)
    mantissa = value & _MANTISSA
    keys = value.bitwise_right_shift_(23).mul_(CLASSES)
    # Sums that carry into bit 23 from 2 - 2^-11 and from 2 - 2^-10 on.
    keys += (mantissa + (1 << 12)).bitwise_right_shift_(23)
    keys += (mantissa + (1 << 13)).bitwise_right_shift_(23)
    keys += mantissa.clamp_(max=1)
    return keys.clamp_(min=_ZERO_KEY).sub_(_ZERO_KEY)


def _checked(tensor: Tensor) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"{tensor.dtype}: must be float32, float16 or bfloat16")
    return tensor

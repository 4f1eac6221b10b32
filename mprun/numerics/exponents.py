"""Counting a tensor's values by binary exponent, where the tensor is.

The mantissa classes of `exponent_shares` make the histogram exact for FP16 at every scale 2^k. All
of it is integer arithmetic on the bits of the FP32 value, so no rounding mode, flush-to-zero or
order of summation can change a count, and nothing waits for the device.
"""

import torch
from torch import Tensor

from mprun.numerics.exponent_shares import BINS, CLASSES, ExponentCounts, Shares

__all__ = ["BINS", "CLASSES", "ExponentCounts", "Shares", "exponent_counts"]

_MAGNITUDE, _MANTISSA = 0x7FFFFFFF, 0x7FFFFF
_SMALLEST_NORMAL = 0x800000
# A float made from the integer n has the exponent field 127 + log2 n; the subnormal n * 2^-149 gets
# the field that belongs to its true exponent, which is negative or 0.
_SUBNORMAL_SHIFT = (127 + 149 - 127) << 23
_ZERO_KEY = -CLASSES * 23
# Working sets that stay in a CPU's second-level cache are 5 times as fast as large ones; on a GPU
# the temporaries are what is bounded: 5 of 4 bytes a value.
_CHUNK = {"cpu": 1 << 16}
_CHUNK_ELSEWHERE = 1 << 25


@torch.no_grad()
def exponent_counts(tensor: Tensor) -> Tensor:
    """Histogram of `tensor` over exponents and mantissa classes: int64 [BINS] on its device.

    tensor: float32, float16 or bfloat16, any shape; TypeError otherwise. No synchronisation, no
    random numbers. About 3 ns a value on one CPU core. `ExponentCounts(counts.cpu().numpy())`
    reads the result.
    """
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"{tensor.dtype}: must be float32, float16 or bfloat16")
    flat = tensor.detach().reshape(-1)
    counts = torch.zeros(BINS, dtype=torch.int64, device=flat.device)
    for part in flat.split(_CHUNK.get(flat.device.type, _CHUNK_ELSEWHERE)):
        counts += _histogram(_keys(part.float().view(torch.int32)))
    return counts


def _keys(bits: Tensor) -> Tensor:
    """int32 bit patterns of float32 -> int32 bin numbers."""
    magnitude = bits & _MAGNITUDE
    # As an integer a subnormal is n in n * 2^-149: exact as a float, below 2^24.
    subnormal = magnitude.float().view(torch.int32).sub_(_SUBNORMAL_SHIFT)
    magnitude = torch.where(magnitude < _SMALLEST_NORMAL, subnormal, magnitude)
    mantissa = magnitude & _MANTISSA
    keys = magnitude.bitwise_right_shift_(23).mul_(CLASSES)
    # Sums that carry into bit 23 from 2 - 2^-11 and from 2 - 2^-10 on.
    keys += (mantissa + (1 << 12)).bitwise_right_shift_(23)
    keys += (mantissa + (1 << 13)).bitwise_right_shift_(23)
    keys += mantissa.clamp_(max=1)
    return keys.clamp_(min=_ZERO_KEY).sub_(_ZERO_KEY)


def _histogram(keys: Tensor) -> Tensor:
    if keys.device.type == "cpu":
        return torch.bincount(keys, minlength=BINS)
    # bincount waits for the largest key on a GPU; histc of integers does not and is deterministic.
    return torch.histc(keys, bins=BINS, min=0, max=BINS)

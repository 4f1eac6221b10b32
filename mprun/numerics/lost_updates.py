"""Updates that round away: w + u is w again in a 16-bit format (paper sections 2 and 3.1).

Counted is what FP16 and BF16 would do if they held the weights: with r = round(w), the update u is
lost if round(r + u) == r, r + u taken exactly and rounded to nearest, ties to even. That is the
case if |u| is below half of the gap between r and its neighbour in the direction of u, or equal to
it while the mantissa of r is even. Half a gap is a power of two, so integers decide: no sum is
formed, and nothing can round.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mprun.numerics.exponents import MAGNITUDE, chunk_size, extended, histogram, in_groups
from mprun.numerics.lost_update_shares import LostUpdates

__all__ = ["LostUpdates", "lost_updates", "lost_updates_of_each", "read_counts"]

_INFINITE = 0x7F800000
_CODES = 16  # bit 0: lost in FP16, 1: lost in BF16, 2: update is zero, 3: not finite
# Keeps differences to half a gap, whose exponent field is -8 to 247, inside an int32.
_LOWEST, _HIGHEST = -8 << 23, (247 << 23) + 1


def lost_updates(weights: Tensor, updates: Tensor) -> Tensor:
    """How often which of the 16 outcomes occurs: int64 [16] on the device, for `read_counts`.

    weights: before the update; float32, or 16-bit values, which are their own rounding. updates:
    float32, same shape. No synchronisation.

    An infinite r (|w| from 65520 on in FP16) loses every finite update. In a run whose weights are
    16 bits wide an update that was lost is not to be seen in them: it is one of the zeros.
    """
    return lost_updates_of_each([weights], [updates])[0]


@torch.no_grad()
def lost_updates_of_each(weights: Sequence[Tensor], updates: Sequence[Tensor]) -> Tensor:
    """`lost_updates` of every pair: int64 [pairs, 16]; one or more, of one device."""
    rows = []
    for group in in_groups(weights):
        w, u = (
            torch.cat([tensors[i].detach().reshape(-1).float() for i in group])
            if len(group) > 1
            else tensors[group[0]].detach().reshape(-1).float()
            for tensors in (weights, updates)
        )
        if len(group) == 1:
            size = chunk_size(w)
            parts = zip(w.split(size), u.split(size), strict=True)
            rows.append(torch.stack([histogram(_codes(*part), _CODES) for part in parts]).sum(0))
        else:
            sizes = [weights[i].numel() for i in group]
            rows += [histogram(part, _CODES) for part in _codes(w, u).split(sizes)]
    return torch.stack(rows)


def read_counts(counts: Sequence[int]) -> LostUpdates:
    """The 16 numbers of `lost_updates`, on the host, as counts with names."""
    clean = range(4)
    return LostUpdates(
        total=int(sum(counts)),
        zero=int(sum(counts[4:8])),
        nonfinite=int(sum(counts[8:])),
        fp16=int(sum(counts[code] for code in clean if code & 1)),
        bf16=int(sum(counts[code] for code in clean if code & 2)),
    )


def _codes(w: Tensor, u: Tensor) -> Tensor:
    """float32 -> int32 outcome of each weight."""
    bits = u.contiguous().view(torch.int32)
    magnitude = bits & MAGNITUDE
    size = extended(magnitude).clamp_(_LOWEST, _HIGHEST)
    codes = _lost(w.to(torch.float16), 10, bits, size)
    codes += _lost(w.to(torch.bfloat16), 7, bits, size) * 2
    codes += (magnitude == 0).int() * 4
    magnitude = torch.maximum(magnitude, w.contiguous().view(torch.int32) & MAGNITUDE)
    codes += (magnitude >= _INFINITE).int() * 8
    return codes


def _lost(rounded: Tensor, mantissa_bits: int, update_bits: Tensor, update_size: Tensor) -> Tensor:
    """int32, 1 where `rounded` (float16 or bfloat16) plus the update rounds to `rounded`.

    Comparisons are differences whose sign bit is shifted down to 0 or -1: several times as fast on
    a CPU as comparisons and selections.
    """
    exponent_bits = 15 - mantissa_bits
    infinite = (1 << exponent_bits) - 1
    bits = rounded.view(torch.int16).int()  # sign-extended
    field = (bits >> mantissa_bits).bitwise_and_(infinite)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    # A gap is 2^-mantissa_bits of the power of two below; towards zero from that power itself it is
    # half of that, but not at the smallest normal, below which the gaps stay.
    narrow = (bits ^ update_bits).bitwise_right_shift_(31)
    narrow &= (mantissa - 1).bitwise_right_shift_(31)
    narrow &= (1 - field).bitwise_right_shift_(31)
    bias_to_fp32 = 127 - (infinite >> 1)
    half_gap = field.clamp(min=1).add_(bias_to_fp32 - mantissa_bits - 1).add_(narrow)
    half_gap = half_gap.bitwise_left_shift_(23)
    excess = half_gap.neg_().add_(update_size).add_(bits & 1)
    lost = excess.sub_(1).bitwise_right_shift_(31)
    lost |= (infinite - 1 - field).bitwise_right_shift_(31)
    return lost.neg_()

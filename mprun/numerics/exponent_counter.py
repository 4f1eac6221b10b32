"""Count values by binary exponent, and updates that round away, on the tensors' device.

The mantissa classes of `exponent_shares` make the histogram exact for FP16 at every scale 2^k. Only
integer operations on the bits of the FP32 value are used. So no rounding mode, flush-to-zero or
order of summation can change a count, and nothing waits for the device.

Updates round away if w + u is w again in a 16-bit format (paper sections 2 and 3.1). The counts
tell what FP16 and BF16 would do if they held the weights. With r = round(w), the update u is lost
if round(r + u) == r, where r + u is exact and rounded to nearest, ties to even. That is the case if
|u| is below half the gap between r and its neighbour in the direction of u, or equal to it while
the mantissa of r is even. Half a gap is a power of two, so integers decide: no sum is formed, and
nothing can round.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from math import gcd

import torch
from torch import Tensor

from mprun.numerics.exponent_shares import BINS, CLASSES, LostUpdates

COUNTED = (torch.float32, torch.float16, torch.bfloat16)
MAGNITUDE, _MANTISSA = 0x7FFFFFFF, 0x7FFFFF
_SMALLEST_NORMAL = 0x800000
# The float of an integer n has the exponent field 127 + log2 n; that of the subnormal n * 2^-149
# must be 127 + log2 n - 149, which is 0 or negative.
_SUBNORMAL_SHIFT = 149 << 23
_ZERO_KEY = -CLASSES * 23
# On a CPU, working sets that fit into the second-level cache are several times as fast as large
# ones. On a GPU the chunk bounds the temporaries: at most 5 of 4 bytes a value.
_CHUNK, _CHUNK_ON_GPU = 1 << 16, 1 << 25


def exponent_counts(tensors: Sequence[Tensor]) -> Tensor:
    """Count each tensor by exponent and mantissa class: int64 [len(tensors), BINS].

    This takes about 3 ns a value on one CPU core, without synchronisation or random numbers.
    `ExponentCounts(row.cpu().numpy())` reads a row of the result. tensors: one or more on one
    device, of any shape; TypeError for a dtype that is not in COUNTED.
    """
    for tensor in tensors:
        if tensor.dtype not in COUNTED:
            raise TypeError(f"{tensor.dtype}: must be float32, float16 or bfloat16")
    return _histograms(BINS, lambda values: _keys(values.view(torch.int32)), tensors)


@torch.no_grad()
def _histograms(bins: int, code: Callable[..., Tensor], *columns: Sequence[Tensor]) -> Tensor:
    """Count how often each of 0 ... bins-1 occurs in the codes of each row: int64 [rows, bins].

    Neighbouring rows that together fit into one chunk share their operations: for the 161
    parameters of ResNet-50 that is a fifth of the calls. Larger rows are processed in chunks.
    code: flat float32 tensors, one of each column -> int32 of the same size. columns: lists of
    tensors of the same sizes, row by row.
    """
    found: list[Tensor] = []
    for group in _groups(columns[0]):
        flat = [[column[row].detach().reshape(-1) for row in group] for column in columns]
        if len(group) == 1:
            chunks = zip(*(one.split(chunk_size(one)) for [one] in flat), strict=True)
            parts = [histogram(code(*(part.float() for part in chunk)), bins) for chunk in chunks]
            found.append(torch.stack(parts).sum(0))
        else:
            codes = code(*(torch.cat([one.float() for one in column]) for column in flat))
            found += [histogram(part, bins) for part in codes.split([len(one) for one in flat[0]])]
    return torch.stack(found)


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of neighbouring tensors that together fit into one chunk."""
    group: list[int] = []
    size = 0
    for index, tensor in enumerate(tensors):
        if group and size + tensor.numel() > chunk_size(tensor):
            yield group
            group, size = [], 0
        group.append(index)
        size += tensor.numel()
    yield group


def chunk_size(tensor: Tensor) -> int:
    return _CHUNK if tensor.device.type == "cpu" else _CHUNK_ON_GPU


def extended(magnitude: Tensor) -> Tensor:
    """Convert int32 bits of an unsigned float32: subnormals get their true exponent.

    Bits 23 and above are 127 plus the exponent, which for a subnormal is 0 or negative; zero is
    below all of them. Larger values have larger integers.
    """
    clamped = magnitude.clamp(max=_SMALLEST_NORMAL)
    # Exact, up to 2^23. For the smallest normal, 1 << 23, this gives 1 << 23 again.
    subnormal = clamped.float().view(torch.int32).sub_(_SUBNORMAL_SHIFT)
    return subnormal.sub_(clamped).add_(magnitude)


def histogram(keys: Tensor, bins: int) -> Tensor:
    """Count how often each of 0 ... bins-1 occurs in `keys` (int32): int64 [bins], no wait."""
    if keys.device.type == "cpu":
        return torch.bincount(keys, minlength=bins)
    # bincount waits for the largest key on a GPU; histc of integers does not, and is deterministic.
    return torch.histc(keys, bins=bins, min=0, max=bins).long()


def _keys(bits: Tensor) -> Tensor:
    """Convert int32 bit patterns of float32 to int32 bin numbers."""
    value = extended(bits & MAGNITUDE)
    mantissa = value & _MANTISSA
    keys = value.bitwise_right_shift_(23).mul_(CLASSES)
    # The sums carry into bit 23 from 2 - 2^-11 and from 2 - 2^-10 on.
    keys += (mantissa + (1 << 12)).bitwise_right_shift_(23)
    keys += (mantissa + (1 << 13)).bitwise_right_shift_(23)
    keys += mantissa.clamp_(max=1)
    return keys.clamp_(min=_ZERO_KEY).sub_(_ZERO_KEY)


# Larger tensors are sampled at every stride-th value, which keeps a probe at about two training
# steps or less. A share is then known to 0.001 (one standard deviation of an even share).
SAMPLED_FROM = 1 << 18


def sampling_stride(tensor: Tensor, most: int = SAMPLED_FROM) -> int:
    """Return 1 up to `most` values, else the smallest stride that keeps at most so many.

    It has no common factor with a dimension: otherwise it would hit the same few channels again and
    again.
    """
    stride = -(-tensor.numel() // most) or 1
    while stride > 1 and any(gcd(stride, size) > 1 for size in tensor.shape):
        stride += 1
    return stride


def sampled(tensor: Tensor, stride: int) -> Tensor:
    """Return every stride-th value, flat; a view if the memory layout allows it."""
    return tensor.detach().reshape(-1)[::stride]


class Tally:
    """Merge the tensors added under the same key; nothing waits for the device.

    counts: key -> int64 [BINS], for a sampled tensor times its stride; complete after `finish`.
    amax: key -> 0-dim float32 over all values, NaN if one is. dtypes: key -> those of its tensors.
    strides: key -> the largest.
    """

    def __init__(self):
        self.counts: dict[Hashable, Tensor] = {}
        self.amax: dict[Hashable, Tensor] = {}
        self.dtypes: dict[Hashable, set[torch.dtype]] = {}
        self.strides: dict[Hashable, int] = {}
        self._waiting: list[tuple[Hashable, Tensor, int]] = []
        self._waiting_size = 0

    @torch.no_grad()
    def add(self, key: Hashable, tensor: Tensor) -> None:
        """Add the current values of `tensor`, if not empty and of a dtype in COUNTED.

        Of a sparse tensor the values of its rows are counted.
        """
        if tensor.is_sparse:  # rows are summed in FP32, as in the update
            tensor = tensor.float().coalesce().values().to(tensor.dtype)
        if tensor.dtype in COUNTED and tensor.numel():
            stride = sampling_stride(tensor)
            self.add_sample(key, sampled(tensor, stride), stride, largest(tensor))

    @torch.no_grad()
    def add_sample(self, key: Hashable, values: Tensor, stride: int, amax: Tensor) -> None:
        """Add every stride-th value of a tensor, and its `largest` (0-dim float32)."""
        self.amax[key] = torch.maximum(self.amax[key], amax) if key in self.amax else amax
        self.dtypes.setdefault(key, set()).add(values.dtype)
        self.strides[key] = max(stride, self.strides.get(key, 1))
        if values.numel() > chunk_size(values) // 4:
            self._count([(key, values, stride)])
            return
        # Small tensors are batched: most of their cost is that of calls. They are copied, because
        # the next operation may overwrite them.
        self._waiting.append((key, values.clone(), stride))
        self._waiting_size += values.numel()
        if self._waiting_size > chunk_size(values):
            self.finish()

    def finish(self) -> None:
        if self._waiting:
            self._count(self._waiting)
        self._waiting, self._waiting_size = [], 0

    @torch.no_grad()
    def _count(self, added: list[tuple[Hashable, Tensor, int]]) -> None:
        rows = exponent_counts([values for _, values, _ in added])
        for (key, _, stride), counts in zip(added, rows, strict=True):
            counts = counts * stride if stride > 1 else counts
            self.counts[key] = self.counts[key] + counts if key in self.counts else counts


def largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value, 0-dim float32, NaN if a value is; one pass, no copy."""
    low, high = torch.aminmax(tensor.detach())
    return torch.maximum(low.abs(), high.abs()).float()


_INFINITE = 0x7F800000
OUTCOMES = 16  # bit 0: lost in FP16, 1: lost in BF16, 2: update is zero, 3: not finite
# Keeps differences from half a gap, whose exponent field is -8 to 247, inside an int32.
_LOWEST, _HIGHEST = -8 << 23, (247 << 23) + 1


def lost_updates(weights: Sequence[Tensor], updates: Sequence[Tensor]) -> Tensor:
    """Count how often each of the 16 outcomes occurs: int64 [pairs, 16] on the device.

    `read_counts` reads a row. An infinite r (|w| from 65520 on in FP16) loses every finite update.
    If a run's weights are 16 bits wide, a lost update does not show in them: it is one of the
    zeros. weights: one or more, before the update; float32, or 16-bit values, which need no
    rounding. updates: float32, of the same shapes and on one device.
    """
    return _histograms(OUTCOMES, _codes, weights, updates)


def read_counts(counts: Sequence[int]) -> LostUpdates:
    """Convert a row of `lost_updates`, 16 numbers on the host, to named counts."""
    fp16, bf16 = counts[1] + counts[3], counts[2] + counts[3]
    return LostUpdates(sum(counts), sum(counts[4:8]), sum(counts[8:]), fp16, bf16)


def _codes(w: Tensor, u: Tensor) -> Tensor:
    """Return the int32 outcome of each float32 weight."""
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
    """Return int32, 1 where `rounded` (float16 or bfloat16) plus the update rounds to `rounded`.

    Comparisons are differences whose sign bit is shifted down to 0 or -1. On a CPU this is several
    times as fast as comparisons and selections.
    """
    exponent_bits = 15 - mantissa_bits
    infinite = (1 << exponent_bits) - 1
    bits = rounded.view(torch.int16).int()  # sign-extended
    field = (bits >> mantissa_bits).bitwise_and_(infinite)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    # A gap is 2^-mantissa_bits of the power of two below. From that power itself, the gap towards
    # zero is half of that, except at the smallest normal, below which the gaps stay.
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

"""Histograms and largest values of many tensors under keys, gathered on the device."""

from collections.abc import Hashable
from math import gcd

import torch
from torch import Tensor

from mprun.numerics.exponents import chunk_size, counts_of_each

COUNTED = (torch.float32, torch.float16, torch.bfloat16)
# Of a larger tensor every stride-th value is counted, which keeps a probe at about two training
# steps or less. A share of it is then known to 0.001 (one standard deviation of an even share).
SAMPLED_FROM = 1 << 18


def sampling_stride(tensor: Tensor) -> int:
    """1 up to 2^18 values, else the smallest that leaves no more and has no factor of a dimension.

    With a common factor the same few channels would be met again and again.
    """
    stride = -(-tensor.numel() // SAMPLED_FROM) or 1
    while stride > 1 and any(gcd(stride, size) > 1 for size in tensor.shape):
        stride += 1
    return stride


def sampled(tensor: Tensor, stride: int) -> Tensor:
    """Every stride-th value, flat; a view where the memory allows it."""
    return tensor.detach().reshape(-1)[::stride]


class Tally:
    """Merges the tensors added under the same key; nothing waits for the device.

    counts: key -> int64 [BINS], of a sampled tensor times its stride; amax: key -> 0-dim float32
    over all values, NaN if one is; dtypes and strides: key -> those of its tensors. Complete after
    `finish`.
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
        """Add the values that `tensor` has now; empty tensors and other dtypes count for nothing.

        Only float32, float16 and bfloat16 are counted.
        """
        if tensor.dtype in COUNTED and tensor.numel():
            stride = sampling_stride(tensor)
            self.add_sample(key, sampled(tensor, stride), stride, largest(tensor))

    @torch.no_grad()
    def add_sample(self, key: Hashable, values: Tensor, stride: int, amax: Tensor) -> None:
        """Add every stride-th value of a tensor, and the `largest` of it (0-dim float32)."""
        self.amax[key] = torch.maximum(self.amax[key], amax) if key in self.amax else amax
        self.dtypes.setdefault(key, set()).add(values.dtype)
        self.strides[key] = max(stride, self.strides.get(key, 1))
        if values.numel() > chunk_size(values) // 4:
            self._count([(key, values, stride)])
            return
        # Small tensors wait for each other: most of their cost is that of calls. Copies, because
        # the next operation may overwrite them.
        self._waiting.append((key, values.clone(), stride))
        self._waiting_size += values.numel()
        if self._waiting_size > chunk_size(values):
            self.finish()

    def finish(self) -> None:
        """Count what waits."""
        waiting, self._waiting, self._waiting_size = self._waiting, [], 0
        if waiting:
            self._count(waiting)

    @torch.no_grad()
    def _count(self, added: list[tuple[Hashable, Tensor, int]]) -> None:
        rows = counts_of_each([values for _, values, _ in added])
        for (key, _, stride), counts in zip(added, rows, strict=True):
            counts = counts * stride if stride > 1 else counts
            self.counts[key] = self.counts[key] + counts if key in self.counts else counts


def largest(tensor: Tensor) -> Tensor:
    """The largest absolute value, 0-dim float32, NaN if a value is; one pass, no copy."""
    low, high = torch.aminmax(tensor.detach())
    return torch.maximum(low.abs(), high.abs()).float()

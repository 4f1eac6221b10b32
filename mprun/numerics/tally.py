"""Histograms and largest values of many tensors under keys, gathered on the device."""

from collections.abc import Hashable

import torch
from torch import Tensor

from mprun.numerics.exponents import chunk_size, counts_of_each

COUNTED = (torch.float32, torch.float16, torch.bfloat16)


class Tally:
    """Merges the tensors added under the same key; nothing waits for the device.

    counts: key -> int64 [BINS]; amax: key -> 0-dim float32, NaN if a value is; dtypes: key -> the
    dtypes of its tensors. Complete after `finish`.
    """

    def __init__(self):
        self.counts: dict[Hashable, Tensor] = {}
        self.amax: dict[Hashable, Tensor] = {}
        self.dtypes: dict[Hashable, set[torch.dtype]] = {}
        self._waiting: list[tuple[Hashable, Tensor]] = []
        self._waiting_size = 0

    @torch.no_grad()
    def add(self, key: Hashable, tensor: Tensor, keep: bool = False) -> None:
        """Add the values that `tensor` has now; empty tensors and other dtypes count for nothing.

        keep: the tensor will not change until `finish`, so that no copy is needed.
        """
        if tensor.dtype not in COUNTED or not tensor.numel():
            return
        tensor = tensor.detach()
        if tensor.numel() > chunk_size(tensor) // 4:
            self._count([(key, tensor)])
            return
        # Small tensors wait for each other: most of their cost is that of calls.
        self._waiting.append((key, tensor if keep else tensor.clone()))
        self._waiting_size += tensor.numel()
        if self._waiting_size > chunk_size(tensor):
            self._count_waiting()

    def finish(self) -> None:
        """Count what waits."""
        self._count_waiting()

    def _count_waiting(self) -> None:
        waiting, self._waiting, self._waiting_size = self._waiting, [], 0
        if waiting:
            self._count(waiting)

    @torch.no_grad()
    def _count(self, added: list[tuple[Hashable, Tensor]]) -> None:
        tensors = [tensor for _, tensor in added]
        rows = counts_of_each(tensors)
        for (key, tensor), counts in zip(added, rows, strict=True):
            amax = _amax(tensor)
            if key in self.counts:
                self.counts[key] = self.counts[key] + counts
                self.amax[key] = torch.maximum(self.amax[key], amax)
            else:
                self.counts[key], self.amax[key] = counts, amax
            self.dtypes.setdefault(key, set()).add(tensor.dtype)


def _amax(tensor: Tensor) -> Tensor:
    # One pass without a copy; NaN goes through both.
    low, high = torch.aminmax(tensor)
    return torch.maximum(low.abs(), high.abs()).float()

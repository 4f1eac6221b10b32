"""Addresses of tensors on the device, brought there without waiting for it."""

import torch
from torch import Tensor

# Of pinned memory, which must not be allocated while a graph is captured: enough for the graphs
# that are captured one after the other without a plain step between them.
_SPARES = 4


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def to_device(values: list, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(source, tensor on `device`). Does not wait: the source is pinned, see torch's
    CachingHostAllocator, which reuses it only after the copy. Under capture keep both."""
    source = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return source, source
    source = source.pin_memory()
    return source, source.to(device, non_blocking=True)


class AddressTable:
    """int64 [numel] on `device`, written anew only where the addresses are others than before.

    Gradients of an eager step mostly lie where those of the step before lay. What a graph captures
    is a copy from pinned memory of its own into a table of its own, both kept here for as long as
    the graph may be replayed: a table shared with eager steps would be changed behind their back.
    """

    def __init__(self, numel: int, device: torch.device):
        self.device = device
        self._known: list[int] | None = None
        self._table = torch.empty(numel, dtype=torch.int64, device=device)
        pinned = device.type == "cuda" and not is_capturing(device)
        spares = _SPARES if pinned else 0
        self._spares = [
            torch.empty(numel, dtype=torch.int64, pin_memory=True) for _ in range(spares)
        ]
        self._captured: list[tuple[Tensor, Tensor]] = []

    def put(self, addresses: list[int]) -> Tensor:
        """The table with these addresses, in the order of the current stream."""
        if is_capturing(self.device):
            return self._put_captured(addresses)
        if addresses != self._known:
            source = torch.tensor(addresses, dtype=torch.int64)
            source = source.pin_memory() if self.device.type == "cuda" else source
            self._table.copy_(source, non_blocking=True)
            self._known = addresses
        return self._table

    def _put_captured(self, addresses: list[int]) -> Tensor:
        if not self._spares:
            self._spares.append(torch.empty(len(addresses), dtype=torch.int64, pin_memory=True))
        pinned = self._spares.pop()
        pinned.copy_(torch.tensor(addresses, dtype=torch.int64))
        table = torch.empty_like(self._table)
        table.copy_(pinned, non_blocking=True)
        self._captured.append((pinned, table))
        return table

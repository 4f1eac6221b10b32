"""Numbers that travel from the device to the host while the device goes on."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor


class Moment:
    """This point in the device's work: a CUDA event on the current stream, on a CPU the clock.

    Recording one waits for nothing. `wait` waits until the device has come this far, and for
    nothing that was asked of it afterwards.
    """

    def __init__(self, device: torch.device):
        self.event: torch.cuda.Event | None = None
        self.time = 0.0
        if device.type == "cuda":
            # blocking: a host that waits leaves its core to the loader processes.
            self.event = torch.cuda.Event(enable_timing=True, blocking=True)
            self.event.record(torch.cuda.current_stream(device))
        else:
            self.time = time.perf_counter()

    def wait(self) -> None:
        """Return once the device has come this far."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        """Time of the device between two moments that it has passed."""
        if self.event is not None and earlier.event is not None:
            return earlier.event.elapsed_time(self.event) / 1000
        return self.time - earlier.time


@dataclass(frozen=True, slots=True)
class Sent:
    """A copy on its way. `arrived`: the moment at which it, and all work before it, is done.
    `values`: float32 [n], or numbers that are on the host."""

    values: Tensor | list[float]
    arrived: Moment

    def read(self) -> list[float]:
        """The numbers; waits for this copy alone. Only before its slot is used again."""
        self.arrived.wait()
        return self.values if isinstance(self.values, list) else self.values.tolist()


class PinnedRing:
    """`slots` buffers on the host that copies from `device` go to in turn.

    Page-locked on CUDA: only from there does a copy make the host wait for nothing (CUDA C++
    Programming Guide, "Asynchronous Concurrent Execution"). A buffer grows when more is sent than
    it holds, and is reused when its turn comes again: what it held has to be read by then.
    """

    def __init__(self, device: torch.device, slots: int):
        self.device = device
        self.buffers = [self._buffer(0) for _ in range(slots)]
        self._turn = 0

    @torch.no_grad()
    def send(self, values: Tensor) -> Sent:
        """Start the copy of a float32 vector [n] on the device; no synchronisation."""
        size, slot = len(values), self._turn % len(self.buffers)
        if len(self.buffers[slot]) < size:
            self.buffers[slot] = self._buffer(size)
        self._turn += 1
        target = self.buffers[slot][:size]
        target.copy_(values, non_blocking=True)
        return Sent(target, Moment(self.device))

    def _buffer(self, size: int) -> Tensor:
        pinned = self.device.type == "cuda"
        return torch.empty(size, dtype=torch.float32, pin_memory=pinned)

"""Copies of numbers from the device to the host that do not stop the device."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor


class Moment:
    """A point in the device's work: a CUDA event on the current stream, or the clock on a CPU.

    Recording one does not wait. `wait` waits until the device has reached the point, but not for
    any later work.
    """

    def __init__(self, device: torch.device):
        self.event, self.time = None, time.perf_counter()
        if device.type == "cuda":
            # blocking: a waiting host leaves its core to the loader processes.
            self.event = torch.cuda.Event(enable_timing=True, blocking=True)
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has reached this point."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        """Return the device's time between two moments that it has passed."""
        if self.event is not None and earlier.event is not None:
            return earlier.event.elapsed_time(self.event) / 1000
        return self.time - earlier.time


@dataclass(frozen=True, slots=True)
class Sent:
    """A copy under way."""

    values: Tensor  # [n], on the host
    arrived: Moment  # the copy and all work before it are done

    def read(self) -> list[float]:
        """Return the numbers; waits for this copy alone. Call it before its slot is reused."""
        self.arrived.wait()
        return self.values.tolist()


class PinnedRing:
    """A ring of `slots` host buffers that take the copies from `device` in turn.

    On CUDA the buffers are page-locked: only then does a copy not stop the host (CUDA C++
    Programming Guide, "Asynchronous Concurrent Execution"). A buffer grows when more is sent than
    it holds. Its values must be read before its turn comes again.
    """

    def __init__(self, device: torch.device, slots: int):
        self.device, self._turn = device, 0
        self.buffers = [torch.empty(0)] * slots

    @torch.no_grad()
    def send(self, values: Tensor) -> Sent:
        """Start the copy of a float32 vector [n] on the device; no synchronisation."""
        size, slot = len(values), self._turn % len(self.buffers)
        if len(self.buffers[slot]) < size:
            pinned = self.device.type == "cuda"
            self.buffers[slot] = torch.empty(size, dtype=torch.float32, pin_memory=pinned)
        self._turn += 1
        target = self.buffers[slot][:size]
        target.copy_(values, non_blocking=True)
        return Sent(target, Moment(self.device))

"""Does the device wait for the host? Only then does a replayed graph save time."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

STEPS = 5
# Replaying a graph saves what the host needs to launch kernels one by one. Where the device is
# still busy for a fifth of the step when the host has launched the last one, the host is ahead in
# every later step, and a graph would cost a second pool of memory for nothing (whole-step capture
# of ResNet-50 on a V100: -44 % time at batch 1, 0 % from batch 8 on, pytorch/benchmark#796).
LEAST_SHARE = 0.8
DEVICE_LIMITS = "the device is the limit"  # begins the reason why steps stay eager then


class HostBound:
    """Times steps one by one on an idle device: the host's part, and the device's.

    Host: from the first launch to the last. Device: from the first launch until it is idle again.
    The device is waited for between these few steps and never inside of one. (A host that launches
    more than about a thousand kernels ahead is held up by CUDA; a single step seldom does.)
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.host: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def enough(self) -> bool:
        return len(self.host) >= STEPS

    def time(self, step: Callable[[], Any]) -> Any:
        """What `step` returns; its times are kept."""
        idle, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        stream = torch.cuda.current_stream(self.device)
        idle.record(stream)
        idle.synchronize()
        begin.record(stream)
        started = time.perf_counter()
        result = step()
        self.host.append(1000 * (time.perf_counter() - started))
        end.record(stream)
        self._events.append((begin, end))
        return result

    def milliseconds(self) -> tuple[float, float]:
        """Medians of (host, device) over the steps; waits for the last one."""
        self._events[-1][1].synchronize()
        device = [begin.elapsed_time(end) for begin, end in self._events]
        return statistics.median(self.host), statistics.median(device)


def pays(host_ms: float, device_ms: float) -> bool:
    """Whether a graph is worth its memory."""
    return host_ms >= LEAST_SHARE * device_ms

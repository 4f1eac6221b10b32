"""Time single steps on an idle device, and judge from the times what the later steps should be."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Real training steps before the first that is timed. They choose and load kernels (cudnn.benchmark)
# and create the tensors that outlive a step, on the stream and in the memory that later steps use.
WARM_UP = 3
STEPS = 5
# Replaying a graph saves the host's time for launching kernels one by one. If the device stays busy
# for a fifth of the step after the last launch, the host is ahead in every later step. A graph
# would then cost a second pool of memory for nothing (whole-step capture of ResNet-50 on a V100:
# -44 % time at batch 1, 0 % from batch 8 on, pytorch/benchmark#796).
LEAST_SHARE = 0.8
# Compiled steps round otherwise than eager ones, so a difference within the noise of a few steps
# must not decide.
LEAST_GAIN = 0.05
# A compilation is taken to cost about a minute (a large network in FP8: several). Then it pays if a
# tenth of this is saved.
LEAST_LEFT_S = 600.0


class HostBound:
    """Time steps one by one on an idle device: the host's part, and the device's.

    Host: from the first launch to the last. Device: from the first launch until it is idle again.
    A step waits for the device before it begins and never inside. (CUDA holds up a host that
    launches more than about a thousand kernels ahead; a single step seldom does.)
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.host: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def enough(self) -> bool:
        return len(self.host) >= STEPS

    def time(self, step: Callable[[], Any]) -> Any:
        """Take `step` and keep its times; return its result."""
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
        """Return the medians of (host, device) over the steps; waits for the last one."""
        self._events[-1][1].synchronize()
        device = [begin.elapsed_time(end) for begin, end in self._events]
        return statistics.median(self.host), statistics.median(device)


def pays(host_ms: float, device_ms: float) -> bool:
    """Return whether the host limits such a step, so that a graph saves time."""
    return host_ms >= LEAST_SHARE * device_ms


def released(batches: list[Any]) -> Iterator[Any]:
    """Yield batches out of their list, so that a step can release each one."""
    return (batches.pop(0) for _ in range(len(batches)))

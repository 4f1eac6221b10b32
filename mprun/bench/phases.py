"""Where the time of one of mprun's eager steps goes: data, forward, backward, update.

For a few steps `data.train_batch`, and `backward` and `step` of each optimizer, are replaced on
their objects by the same methods with two marks around them. On CUDA the marks are events of the
stream, so where the host is slower than the device its idle time lies in the phase it waits in.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PHASES = ("data", "forward", "backward", "update")
STEPS = 5


class _Marks:
    """Pairs of moments by phase; on CUDA events, so that marking waits for nothing."""

    def __init__(self, device: torch.device):
        self.on_device = device.type == "cuda"
        self.pairs: list[tuple[str, object, object]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.pairs.append((name, start, self._now()))

    def seconds(self) -> dict[str, float]:
        """Sum of each phase; waits for the device."""
        if self.on_device:
            torch.cuda.synchronize()
        sums: dict[str, float] = {}
        for name, start, end in self.pairs:
            length = start.elapsed_time(end) / 1000 if self.on_device else end - start
            sums[name] = sums.get(name, 0.0) + length
        return sums

    def _now(self):
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def time_split(
    step: Callable[[], object], data, optimizers, device: torch.device, steps: int = STEPS
) -> dict[str, float]:
    """Seconds per step of data, forward, backward and update, and of the whole step.

    step: takes one eager training step. data, optimizers: the objects whose methods it calls; left
    as they were. forward is the rest: zeroing, casting inputs, the forward pass and the loss.
    """
    marks = _Marks(device)
    watched = [(data, "train_batch", "data")]
    for optimizer in optimizers:
        watched += [(optimizer, "backward", "backward"), (optimizer, "step", "update")]
    try:
        for holder, method, phase in watched:
            setattr(holder, method, _marked(getattr(holder, method), marks, phase))
        for _ in range(steps):
            with marks.phase("step"):
                step()
    finally:
        for holder, method, _ in watched:
            vars(holder).pop(method, None)
    sums = marks.seconds()
    inside = sum(sums.get(name, 0.0) for name in ("data", "backward", "update"))
    sums["forward"] = max(0.0, sums["step"] - inside)
    return {name: sums.get(name, 0.0) / steps for name in (*PHASES, "step")}


def _marked(method: Callable, marks: _Marks, phase: str) -> Callable:
    def call(*arguments, **keywords):
        with marks.phase(phase):
            return method(*arguments, **keywords)

    return call

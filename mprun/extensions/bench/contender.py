"""A contender of a benchmark: something that trains a task step by step.

Every contender of a case gets the same `Case` (plan.py), the configuration that mprun would
run. From it the contender takes initial weights, batches (`rotating_batches`), loss and optimizer
settings. Each contender runs in a separate process (child.py).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from mprun.data.source import Batch, Source

BATCHES = 4  # a single batch and its results would stay in a cache
FIRST_STEPS = 20  # their losses, skipped updates and times are kept


class Contender(Protocol):
    """The base class of a training loop that is advanced from outside.

    The child takes the first 20 steps on the fresh contender and then calls `prepare`. The time of
    the first steps counts as first use, too.

    Attributes:
        samples_per_step, sample: as in mprun's tasks.
    """

    samples_per_step: int
    sample: str

    def settings(self) -> dict:
        """Return the settings for the report: {"channels_last": True, "optimizer": "fused"}."""
        ...

    def step(self) -> Tensor:
        """Train on the next batch; return its loss, 0-dim on the device, detached.

        It never waits for the device.
        """
        ...

    def run(self, steps: int) -> Tensor:
        """Take `steps` training steps, at least 1; return the last loss. A window calls this.

        A contender that owns its loop (a trainer) overrides it: control is handed over once.
        """
        for _ in range(steps):
            loss = self.step()
        return loss

    def prepare(self) -> None:
        """Compile, capture, autotune: do all one-time work. It may take real steps."""
        return

    def skipped(self) -> int:
        """Return the updates skipped since the beginning; may wait for the device."""
        return 0

    def replays(self) -> bool:
        """Return whether steps are now replayed from a CUDA graph."""
        return False

    def eager_step(self) -> Tensor:
        """Take a step without replay, for measurements that look inside."""
        return self.step()

    def running(self) -> AbstractContextManager[Any]:
        """Return a context around many steps (a stream)."""
        return nullcontext()

    def defer_wait(self) -> Callable[[], float] | None:
        """Return a function that gives the seconds waited for data since the last call.

        None: no data are read ahead.
        """
        return None

    def look_inside(self, device: torch.device) -> dict:
        """Return what only the contender can measure; called last, because it may disturb it."""
        return {}


def rotating_batches(source: Source, count: int = BATCHES) -> list[Batch]:
    """Return the first `count` training batches, held on the device."""
    batches = (source.train_batch(index) for index in range(count))
    return [(first.clone(), second.clone()) for first, second in batches]


def in_channels_last(batch: Batch) -> Batch:
    """Return (images, labels) with the images in NHWC order in memory."""
    images, labels = batch
    return images.contiguous(memory_format=torch.channels_last), labels


class RotatingSource:
    """A source that cycles through `batches` in training; everything else is the source's."""

    def __init__(self, source: Source, batches: list[Batch]):
        self._source, self._batches = source, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def train_batch(self, index: int) -> Batch:
        """Return batch ``index % len(batches)``."""
        return self._batches[index % len(self._batches)]

"""What a contender of a benchmark is: something that trains a given task, step by step.

Every contender of a case gets the same `Case` (plan.py): the configuration that mprun itself
would run, from which it takes the initial weights, the batches (`rotating_batches`), loss and
optimizer settings. A contender runs alone in a process of its own (`child`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from mprun.data.source import Batch, Source

BATCHES = 4  # one and the same batch would stay in a cache, and so would its results
FIRST_STEPS = 20  # of which losses, skipped updates and times are kept


class Contender(Protocol):
    """A training loop that is advanced from outside; to be derived from, with what it adds.

    The child takes the first 20 steps on the fresh contender and calls `prepare` after them; the
    time of the first steps counts as first use as well.

    Attributes:
        samples_per_step, sample: as of mprun's tasks.
    """

    samples_per_step: int
    sample: str

    def settings(self) -> dict:
        """What it is set to, for the report: {"channels_last": True, "optimizer": "fused"}."""
        ...

    def step(self) -> Tensor:
        """One training step on the next batch; its loss, 0-dim on the device, detached.

        Never waits for the device.
        """
        ...

    def run(self, steps: int) -> Tensor:
        """`steps` training steps, at least 1; the loss of the last one. What a window calls.

        For a contender whose loop is not advanced one step at a time (a trainer that owns its
        loop): control is handed over once.
        """
        for _ in range(steps):
            loss = self.step()
        return loss

    def prepare(self) -> None:
        """Compile, capture, autotune: whatever the first steps cost. May take real steps."""
        return

    def skipped(self) -> int:
        """Updates skipped since the beginning; may wait for the device."""
        return 0

    def replays(self) -> bool:
        """Whether steps are replayed from a CUDA graph by now."""
        return False

    def eager_step(self) -> Tensor:
        """A step that is not replayed, for measurements that look inside."""
        return self.step()

    def running(self) -> AbstractContextManager[Any]:
        """A context around many steps (a stream)."""
        return nullcontext()

    def defer_wait(self) -> Callable[[], float] | None:
        """A function that tells the seconds waited for data since the last call; None: no data are
        read ahead."""
        return None

    def look_inside(self, device: torch.device) -> dict:
        """What only the contender itself can measure; called last, because it may disturb it."""
        return {}


def rotating_batches(source: Source, count: int = BATCHES) -> list[Batch]:
    """The first `count` training batches, held on the device."""
    batches = (source.train_batch(index) for index in range(count))
    return [(first.clone(), second.clone()) for first, second in batches]


def in_channels_last(batch: Batch) -> Batch:
    """(images, labels) with the images in NHWC order in memory."""
    images, labels = batch
    return images.contiguous(memory_format=torch.channels_last), labels


class RotatingSource:
    """A source whose training batches are those of `batches`, in turn; the rest is the source's."""

    def __init__(self, source: Source, batches: list[Batch]):
        self._source, self._batches = source, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def train_batch(self, index: int) -> Batch:
        """Batch ``index % len(batches)``."""
        return self._batches[index % len(self._batches)]

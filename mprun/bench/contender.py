"""What a contender of a benchmark is: something that trains a given task, step by step.

Every contender of a case gets the same `Case`: the configuration that mprun itself would run, from
which it takes the initial weights, the batches (`rotating_batches`), loss and optimizer settings.
A contender runs alone in a process of its own (`mprun.bench.child`).
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from mprun.data.source import Batch, Source

BATCHES = 4  # one and the same batch would stay in a cache, and so would its results
EQUALITY_STEPS = 20


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure: a contender on a model in a precision mode.

    overrides: as on mprun's command line, without precision and scaler. mode: a precision mode of
    the README's table. contender: a name from `mprun.bench.registry`. real_data: train on the
    source as it is, loading included, instead of on batches that lie on the device.
    """

    label: str  # of the model and its size: "resnet50 b256"
    overrides: tuple[str, ...]
    mode: str
    contender: str
    real_data: bool = False
    extra: dict = field(default_factory=dict)


class Contender(Protocol):
    """A training loop that is advanced from outside. `step` never waits for the device.

    settings: what it is set to, for the report ({"channels_last": True, "optimizer": "fused"}).
    samples_per_step, sample: as of mprun's tasks. first_use_s: seconds that compilation, capture
    and autotuning took, None before `prepare`.

    The child takes the 20 steps of the equality check first, on the fresh contender, and calls
    `prepare` after them; the time of the first steps counts as first use as well.

    A contender may also have: `weights()`, the tensors that its optimizers update (master weights
    where there are some) by name, for the equality check; `run(steps)`, see `run_steps`;
    `running()`, a context around many steps (a stream); `defer_wait()()`, seconds waited for data
    since the last call; `replays`, True once steps are replayed from a CUDA graph.
    """

    settings: dict
    samples_per_step: int
    sample: str

    def prepare(self) -> None:
        """Compile, capture, autotune: whatever the first steps cost. Takes real steps."""
        ...

    def step(self) -> torch.Tensor:
        """One training step on the next batch; its loss, 0-dim on the device, detached."""
        ...

    def skipped(self) -> int:
        """Updates skipped since the beginning; may wait for the device."""
        ...


def run_steps(contender: Contender, steps: int) -> torch.Tensor:
    """Take `steps` training steps, at least 1; the loss of the last one, as of `step`.

    What a timed window calls. A contender whose loop is not advanced one step at a time (a trainer
    that owns its loop) has a method `run(steps)`, so that control is handed over once per window.
    """
    if hasattr(contender, "run"):
        return contender.run(steps)
    for _ in range(steps):
        loss = contender.step()
    return loss


def rotating_batches(source: Source, count: int = BATCHES) -> list[Batch]:
    """The first `count` training batches, held on the device."""
    return [tuple(part.clone() for part in source.train_batch(i)) for i in range(count)]


def in_channels_last(batch: Batch) -> Batch:
    """(images, labels) with the images in NHWC order in memory."""
    images, labels = batch
    return images.contiguous(memory_format=torch.channels_last), labels


class RotatingSource:
    """A source whose training batches are those of `batches`, in turn; the rest is the source's."""

    def __init__(self, source: Source, batches: list[Batch]):
        self._source, self._batches = source, batches

    def __getattr__(self, name: str):
        return getattr(self._source, name)

    def train_batch(self, index: int) -> Batch:
        """Batch ``index % len(batches)``."""
        return self._batches[index % len(self._batches)]

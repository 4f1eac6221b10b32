"""A peer that the bench advances one step at a time, with a count of skipped updates."""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.suite.peers.task import PeerTask
from mprun.data.source import Batch
from mprun.extensions.bench.measure import Contender


class SkipCount:
    """A counter of steps in which torch.amp.GradScaler skipped an optimizer, free on the device.

    The scaler does not call an optimizer that it skips. A fused one is always called with a flag,
    which is kept here (512 bytes a step) until the count is read.
    """

    def __init__(self, optimizers: Iterable[Optimizer]):
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            optimizer.register_step_post_hook(self._taken)
        self._flags_of_step: list[Tensor | None] = []
        self._flags: list[list[Tensor]] = []
        self._known = 0

    def end_step(self) -> None:
        """Count a step; call this after each training step."""
        flags, self._flags_of_step = self._flags_of_step, []
        if len(flags) < len(self._optimizers):
            self._known += 1
        elif any(flag is not None for flag in flags):
            self._flags.append([flag for flag in flags if flag is not None])

    def total(self) -> int:
        """Return the steps in which an optimizer skipped; waits for the device if one is fused."""
        flags, self._flags = self._flags, []
        if flags:
            found = torch.stack([torch.stack(of_step).amax() for of_step in flags])
            self._known += int((found != 0).sum())
        return self._known

    def _taken(self, optimizer: Optimizer, arguments: tuple, keywords: dict) -> None:
        self._flags_of_step.append(getattr(optimizer, "found_inf", None))


class Peer(Contender):
    """A contender from a function that takes one training step on a batch.

    train: returns the loss to report. settings: for the report. skips: counter of its scaler, None
    if nothing is ever skipped. `prepare` compiles and tunes nothing: the first step does, and its
    time is in first_use_s.
    """

    def __init__(
        self,
        task: PeerTask,
        settings: dict,
        train: Callable[[Batch], Tensor],
        skips: SkipCount | None = None,
    ):
        self.task, self._settings = task, settings
        self.samples_per_step, self.sample = task.samples_per_step, task.sample
        self.first_use_s: float | None = None
        self._train, self._skips = train, skips
        self._next = 0

    def settings(self) -> dict:
        return self._settings

    def step(self) -> Tensor:
        """Train on the next batch; return its loss, 0-dim on the device, detached."""
        if self.first_use_s is None:
            return self._first()
        return self._advance()

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors that the optimizers update, by name."""
        return self.task.weights()

    def skipped(self) -> int:
        """Return the steps with a skipped update so far; may wait for the device."""
        return 0 if self._skips is None else self._skips.total()

    def _advance(self) -> Tensor:
        loss = self._train(self.task.batch(self._next))
        self._next += 1
        if self._skips is not None:
            self._skips.end_step()
        return loss

    def _first(self) -> Tensor:
        started = time.perf_counter()
        loss = self._advance()
        if loss.device.type == "cuda":
            torch.cuda.synchronize(loss.device)
        self.first_use_s = time.perf_counter() - started
        return loss

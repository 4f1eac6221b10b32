"""A peer as the bench advances it: one step at a time, its skipped updates counted."""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.suite.peers.task import PeerTask
from mprun.data.source import Batch
from mprun.extensions.bench.contender import Contender


class SkipCount:
    """Counts steps in which torch.amp.GradScaler skipped an optimizer, at no cost on the device.

    The scaler does not call an optimizer that it skips; a fused one is always called and finds a
    flag, which is kept here (512 bytes a step) until somebody asks.
    """

    def __init__(self, optimizers: Iterable[Optimizer]):
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            optimizer.register_step_post_hook(self._taken)
        self._flags_of_step: list[Tensor | None] = []
        self._flags: list[list[Tensor]] = []
        self._known = 0

    def end_step(self) -> None:
        """To be called after each training step."""
        flags, self._flags_of_step = self._flags_of_step, []
        if len(flags) < len(self._optimizers):
            self._known += 1
        elif any(flag is not None for flag in flags):
            self._flags.append([flag for flag in flags if flag is not None])

    def total(self) -> int:
        """Steps in which an optimizer skipped; waits for the device where one is fused."""
        flags, self._flags = self._flags, []
        if flags:
            found = torch.stack([torch.stack(of_step).amax() for of_step in flags])
            self._known += int((found != 0).sum())
        return self._known

    def _taken(self, optimizer: Optimizer, arguments: tuple, keywords: dict) -> None:
        self._flags_of_step.append(getattr(optimizer, "found_inf", None))


class Peer(Contender):
    """A contender made of a function that takes one training step on a batch.

    train: returns the loss to report. settings: for the report. skips: of its scaler, None where
    nothing is ever skipped. Nothing is compiled or tuned in `prepare`: the first step does that,
    and what it took is in first_use_s.
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
        """One training step on the next batch; its loss, 0-dim on the device, detached."""
        if self.first_use_s is None:
            return self._first()
        return self._advance()

    def weights(self) -> dict[str, Tensor]:
        """What the optimizers update, by name."""
        return self.task.weights()

    def skipped(self) -> int:
        """Steps since the beginning in which an update was skipped; may wait for the device."""
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

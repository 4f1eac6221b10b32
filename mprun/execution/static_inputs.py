"""What a recorded step reads, at fixed addresses: the batches of a step, and the carried state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mprun.tasks import LanguageModel
from mprun.tasks.language_model import Tokens


class StaticBatches:
    """Copies of a step's micro-batches that the batches of later steps are written into.

    Costs the memory of one step's inputs. `fresh` of `Tokens` is False in the copies: a recorded
    step reads the carried state, whatever it is (see `CarriedState`).
    """

    def __init__(self, batches: Sequence[tuple]):
        self.batches = [_copied(batch) for batch in batches]

    def fit(self, batches: Sequence[tuple]) -> bool:
        """Whether shapes and dtypes are those of the copies."""
        own, new = _tensors(self.batches), _tensors(batches)
        return len(own) == len(new) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(own, new, strict=True)
        )

    def fill(self, batches: Sequence[tuple]) -> None:
        """Write `batches` into the copies, on the current stream."""
        for own, new in zip(_tensors(self.batches), _tensors(batches), strict=True):
            own.copy_(new, non_blocking=True)


class CarriedState:
    """A language model's state in tensors that stay where they are.

    `task.hidden` refers to them between recorded steps, so that a checkpoint holds what the next
    step starts from. Steps outside, and a restored checkpoint, may put other tensors there.
    """

    def __init__(self, task: LanguageModel):
        self.task = task
        self.static = tuple(part.clone() for part in task.hidden)

    @torch.no_grad()
    def bring(self, fresh: bool) -> None:
        """Before a recorded step: the state as the task has it, or zeros where `fresh`."""
        hidden = self.task.hidden
        if hidden is not self.static and hidden is not None:
            for own, part in zip(self.static, hidden, strict=True):
                own.copy_(part)
        if fresh or hidden is None:
            for own in self.static:
                own.zero_()
        self.task.hidden = self.static

    @torch.no_grad()
    def keep(self) -> None:
        """At the end of a recorded step: the new state goes where the next step reads it."""
        for own, part in zip(self.static, self.task.hidden, strict=True):
            own.copy_(part)
        self.task.hidden = self.static


def is_fresh(batches: Sequence[tuple]) -> bool:
    """Whether the carried state starts anew with these micro-batches."""
    return any(isinstance(batch, Tokens) and batch.fresh for batch in batches)


def _copied(batch: tuple) -> tuple:
    if isinstance(batch, Tokens):
        return Tokens(batch.tokens.clone(), batch.targets.clone(), fresh=False)
    return tuple(part.clone() for part in batch)


def _tensors(batches: Sequence[tuple]) -> list[Tensor]:
    return [part for batch in batches for part in batch if isinstance(part, Tensor)]

"""The loss scales of a script's models, each shared by the optimizers that update them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.extensions.script.shards import agree, local_of
from mprun.precision.loss_scale import LossScale
from mprun.precision.update import by_dtype, check_and_unscale, largest

if TYPE_CHECKING:
    from mprun.extensions.script.prepared_model import PreparedModel


class Scaling:
    """The iteration of a loss scale that several optimizers share.

    The scale moves once each of them has stepped, or at the latest when one begins again, as
    torch.amp.GradScaler.update does once in an iteration.
    """

    _all: weakref.WeakKeyDictionary[LossScale, Scaling] = weakref.WeakKeyDictionary()

    def __init__(self, scale: LossScale):
        self._scale = weakref.ref(scale)
        self.name = ""  # of the loss scale in records; empty: its kind
        self.owners: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @classmethod
    def of(cls, scale: LossScale) -> Scaling:
        """Return the object of a loss scale."""
        if scale not in cls._all:
            cls._all[scale] = cls(scale)
        return cls._all[scale]

    @property
    def scale(self) -> LossScale:
        """The loss scale, which its models hold."""
        scale = self._scale()
        assert scale is not None
        return scale

    def begin(self, optimizer: Optimizer) -> None:
        self.owners.add(optimizer)
        if optimizer in self._stepped:
            self.move()

    def end(self, optimizer: Optimizer, found_inf: Tensor, models: Iterable[PreparedModel]) -> None:
        """End the step of `models`; `found_inf`, 0-dim: it was skipped if that is not 0."""
        self._record(found_inf, models)
        self._stepped.add(optimizer)
        if len(self._stepped) >= len(self.owners):
            self.move()

    def end_without_step(self, found_inf: Tensor, models: Iterable[PreparedModel] = ()) -> None:
        """End an iteration in which gradients have come, but no optimizer has stepped for them."""
        self._record(found_inf, models)
        self.move()

    def move(self) -> None:
        """End the iteration of the scale."""
        self.scale.update()
        self._stepped.clear()

    def _record(self, found_inf: Tensor, models: Iterable[PreparedModel]) -> None:
        largest_found = None
        if self.scale.needs_grad_max:
            mine = [model for model in models if model.loss_scale is self.scale]
            own = [parameter for model in mine for parameter in model.parameters()]
            largest_found = largest(_gradients(own), self.scale.scale.device)
            agree(largest_found, own)
        self.scale.record(found_inf, largest_found)


def scalings(models: Iterable[PreparedModel]) -> list[Scaling]:
    """Return the objects of loss scales that scale, each once."""
    found = [Scaling.of(model.loss_scale) for model in models if model.scale is not None]
    return [*dict.fromkeys(found)]


def check_finite(parameters: Sequence[Tensor], found_inf: Tensor) -> None:
    """Set `found_inf` (float32, 0-dim) to 1 if a gradient is not finite; read each value once."""
    one = torch.ones_like(found_inf)
    for group in by_dtype(_gradients(parameters)):
        check_and_unscale(group, found_inf, one)
    agree(found_inf, parameters)


def _gradients(parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    return (local_of(own.grad) for own in parameters if own.grad is not None)

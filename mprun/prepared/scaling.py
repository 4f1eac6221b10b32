"""The loss scale of prepared models from pass to pass: when it moves, and what it hears of steps.

Models are those of `passes.Backward`, which know their gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.loss_scale import LossScale
from mprun.precision.torch_update import held_by
from mprun.precision.update import by_dtype, check_and_unscale
from mprun.prepared.shards import agree, local_of

_MOST_REPEATS = 60  # of a closure: a scale of 2^24 has then become 2^-36


class Scaling:
    """The iteration of a loss scale that several optimizers share.

    The scale moves once each of them has stepped, or at the latest when one begins again, as
    torch.amp.GradScaler.update does once in an iteration. If hooks take all steps within a backward
    pass, it moves when the pass ends.
    """

    _all: weakref.WeakKeyDictionary[LossScale, Scaling] = weakref.WeakKeyDictionary()

    def __init__(self, scale: LossScale):
        self._scale = weakref.ref(scale)
        self.name = ""  # of the loss scale in records; empty: its kind
        self.owners: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._is_within = False  # hooks of the newest pass have taken some of these steps

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

    def end(self, optimizer: Optimizer, found_inf: Tensor, models: Iterable[Any]) -> None:
        """End the step of `models`; `found_inf`, 0-dim: it was skipped if that is not 0."""
        self._record(found_inf, models)
        self._stepped.add(optimizer)
        if len(self._stepped) >= len(self.owners) or (self._is_within and not self._waits()):
            self.move()

    def end_within(self, optimizer: Optimizer, found_inf: Tensor, models: Iterable[Any]) -> None:
        """End a step within a pass, whose nodes still need the scale as it is."""
        self.owners.add(optimizer)
        self._record(found_inf, models)
        self._stepped.add(optimizer)
        self._is_within = True

    def end_pass(self) -> None:
        """End a pass in which optimizers have stepped; others may still step for it."""
        if not self._waits():
            self.move()

    def _waits(self) -> bool:
        """Return whether an optimizer has gradients of the newest pass and has not stepped."""
        others = (one for one in self.owners if one not in self._stepped)
        return any(own.grad is not None for one in others for own in held_by(one))

    def end_without_step(self, found_inf: Tensor, models: Iterable[Any] = ()) -> None:
        """End an iteration in which gradients have come, but no optimizer has stepped for them."""
        self._record(found_inf, models)
        self.move()

    def share(self, found_inf: Tensor, models: Iterable[Any]) -> None:
        """Hear that a step of another scale was skipped after a pass that has trained `models`.

        It may have overflowed in one with this scale. Nobody steps for these gradients if a script
        zeroes them (a discriminator's, from the generator's loss).
        """
        for model in models:
            is_trained = any(own.requires_grad for own in model.parameters())
            if model.loss_scale is self.scale and is_trained:
                self.scale.found_inf.logical_or_(torch.minimum(found_inf, model.found_inf))

    def move(self) -> None:
        """End the iteration of the scale."""
        self.scale.update()
        self.forget()

    def forget(self) -> None:
        """Begin the iteration again: some optimizers have stepped in one that was given up."""
        self._stepped.clear()
        self._is_within = False

    def _record(self, found_inf: Tensor, models: Iterable[Any]) -> None:
        largest_found = None
        if self.scale.needs_grad_max:
            mine = [model for model in models if model.loss_scale is self.scale]
            known = [m.largest_of_all(m.grad_max) for m in mine if m.grad_max is not None]
            # Without a number, after an overflow or in a model at rest, 0 says nothing.
            largest_found = torch.stack(known).amax() if known else torch.zeros_like(found_inf)
        self.scale.record(found_inf, largest_found)


def scalings(models: Iterable[Any]) -> list[Scaling]:
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


def repeated(closure: Callable[[], Any], models: Sequence[Any]) -> Callable[[], Any]:
    """Return a closure that runs again, at a smaller scale, until gradients are finite.

    It waits for the device after each call, as LBFGS does.
    """

    def finite() -> Any:
        for _ in range(_MOST_REPEATS):
            before = [model.looked for model in models]
            loss = closure()
            pairs = zip(models, before, strict=True)
            flags = [model.found_inf for model, looked in pairs if model.looked != looked]
            found = torch.stack(flags or [torch.zeros_like(models[0].found_inf)]).amax()
            if not found.item():
                return loss
            for scaling in scalings(models):
                scaling.end_without_step(found)
        raise RuntimeError(
            f"closure: gradients are not finite at a loss scale of "
            f"{float(models[0].loss_scale.scale):g}; a closure needs a loss scale "
            "that decreases after an overflow"
        )

    return finite

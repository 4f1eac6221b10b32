"""The memory that a step needs, by kind, from tensors that have a size and no values."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by kind.

    parameters, masters, optimizer: as they are held between steps (buffers and averages count as
    parameters). gradients: as backward makes them, all at once. activations: the most that is kept
    for a backward pass at one time, inputs included, parameters not. Workspaces of libraries,
    results on their way and fragments of the allocator come on top.
    """

    parameters: int
    masters: int
    optimizer: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.masters + self.optimizer + self.gradients + self.activations


class SavedTensors:
    """Counts what autograd keeps for backward while `watching`, except the tensors given.

    peak: bytes, the most at one time. Views of one storage count once.
    """

    def __init__(self, known: Iterable[Tensor]):
        self.peak = self._now = 0
        self._known = {_storage(tensor): tensor for tensor in known}
        self._uses: Counter[int] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it whatever is saved is counted for as long as it is held."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            yield

    def _keep(self, tensor: Tensor) -> "_Kept":
        return _Kept(tensor, self)

    def hold(self, tensor: Tensor) -> None:
        """One more place of the graph holds `tensor`."""
        key = _storage(tensor)
        if key in self._known:
            return
        self._uses[key] += 1
        if self._uses[key] == 1:
            self._now += tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self._now)

    def release(self, tensor: Tensor) -> None:
        """One place less."""
        key = _storage(tensor)
        if key in self._known:
            return
        self._uses[key] -= 1
        if not self._uses[key]:
            self._now -= tensor.untyped_storage().nbytes()


class _Kept:
    """A saved tensor; gives its bytes back when the graph lets go of it."""

    def __init__(self, tensor: Tensor, saved: SavedTensors):
        self.tensor, self._saved = tensor, saved
        saved.hold(tensor)

    def __del__(self):
        self._saved.release(self.tensor)


def held_bytes(learners) -> dict[str, int]:
    """parameters, masters, optimizer and gradients of a task's learners, in bytes."""
    held: Counter[str] = Counter()
    for learner in learners:
        model, optimizer = learner.model, learner.optimizer
        parameters = list(model.parameters())
        tensors = [*parameters, *model.buffers(), *optimizer.averages.values()]
        held["parameters"] += _distinct(tensors)
        held["masters"] += _distinct(learner.cast.masters.values())
        state = [
            value
            for own in optimizer.state_by_name().values()
            for value in own.values()
            if isinstance(value, Tensor)
        ]
        held["optimizer"] += _distinct(state)
        held["gradients"] += _distinct(p for p in parameters if p.requires_grad)
    return {key: held[key] for key in ("parameters", "masters", "optimizer", "gradients")}


def _distinct(tensors: Iterable[Tensor]) -> int:
    return sum({id(tensor): tensor.numel() * tensor.itemsize for tensor in tensors}.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

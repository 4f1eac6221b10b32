"""The tensors that a model holds during a call: nodes for its parameters, copies of its buffers.

    with tensors.inside(audits):       # parameters and buffers as the mode computes with them
        outputs = forward(...)         # its writes are written back to the FP32 ones

There is no table of weights: the tensors that modules hold when a call begins are cast. So layers
that were added, tied or parametrized later are included.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import is_available, is_initialized
from torch.utils.hooks import RemovableHandle

from mprun.precision.recurrent import flat_weights
from mprun.precision.update import packed
from mprun.prepared.nodes import Owner, make_nodes
from mprun.prepared.writes import Writes, wide_of
from mprun.torch_private import (
    IS_PARAMETER,
    disable_dispatch_modes,
    flat_weights_of,
    holds_codes,
    hooks_of_leaf,
    parameters_of,
    places_of,
    storage_key,
    version_of,
)

_BUCKET = 2**22  # elements that one node casts
_QUESTIONS = 64  # that are remembered
Key = tuple[int, torch.dtype]  # id of a tensor, and the dtype in which its module computes
Part = tuple[nn.Module, torch.dtype, tuple[nn.Module | None, ...]]


class _Held(NamedTuple):
    """The tensor that a place of a module holds for a while."""

    place: dict[str, Any]
    key: str
    own: Tensor
    inside: Tensor
    version: int
    is_parameter: bool


class Tensors:
    """Parameters and buffers of a model, outside a call and within it.

    Args:
        owner: owner of the nodes.
        model: it has the modules, whose names records show.

    Attributes:
        rounds: the mode computes in 16 bits with copies of FP32 parameters.
        changes: any tensor gets a stand-in.
    """

    def __init__(self, owner: Owner, model: nn.Module):
        self.owner, self.model = owner, model
        self.rounds = self.changes = False
        self.parts: list[Part] = []  # modules, dtypes in which they compute, their children
        # Of a sharded model: module -> the parts that are there in its call.
        self.shards: dict[nn.Module, list[Part]] = {}
        self.written: set[str] = set()  # names of the parameters that calls have written to
        # Version and address, the stand-in, the tensor itself; valid while nothing has moved.
        self._cache: dict[Key, tuple[tuple[int, int], Tensor, Tensor]] = {}
        self._moving: set[tuple[int, str]] = set()  # places that calls write to
        # Ids of parameters whose gradients scripts ask for alone; the questions so far.
        self._alone: set[int] = set()
        self._asked: set[frozenset[int]] = set()
        self._watchers: dict[int, OrderedDict[int, Callable[[Tensor], None]]] = {}

    def set_mode(self, rounds: bool) -> None:
        """Take the mode that the owner has now."""
        self.rounds = rounds
        self.changes = rounds or self.owner.scale is not None or self.owner.grad_dtype is not None

    def dtypes(self) -> dict[int, torch.dtype]:
        """Return id of each parameter -> dtype in which the mode computes with it."""
        return {
            id(own): dtype if self.rounds and own.is_floating_point() else own.dtype
            for module, dtype, _ in self.parts
            for own in parameters_of(module).values()
            if own is not None
        }

    @property
    def stand_ins(self) -> list[Tensor]:
        """Return the stand-ins of the newest call, until the tensors move."""
        return [tensor for _, tensor, _ in self._cache.values()]

    @property
    def writes(self) -> bool:
        """Return whether a call has written to one of them."""
        return bool(self._moving)

    def forget(self) -> None:
        """Let the next call cast anew: `.data` counts no versions."""
        self._cache.clear()

    def ask(self, asked: frozenset[int]) -> None:
        """Hear that a pass computes only the gradients of the parameters with these ids.

        Those that are a part of the model get nodes for themselves from the next call on. A pass to
        a common node takes the whole way to each of its weights.
        """
        if not self.changes or asked in self._asked:
            return
        if len(self._asked) < _QUESTIONS:
            self._asked.add(asked)
        own = {id(one) for one in self.model.parameters() if one.requires_grad}
        if not own <= asked:
            self._alone |= own & asked

    def watch_gradient(self, own: Tensor, hook: Callable[[Tensor], None]) -> Any:
        """Call `hook` with each gradient of a parameter as the mode computes it; return a handle
        with a method `remove`."""
        if not self.changes:
            return own.register_hook(hook)
        self.forget()
        watchers = self._watchers.setdefault(id(own), OrderedDict())  # a dict takes no weakref
        handle = RemovableHandle(watchers)
        watchers[handle.id] = hook
        return handle

    def inside(self, module: nn.Module, audits: bool, serves: bool) -> AbstractContextManager[None]:
        """Let the modules hold the tensors that the mode computes with.

        Args:
            module: it is called; the tensors are those that are there in its call.
            audits: detect writes by value, which waits for the device.
            serves: compute what the call writes in FP32, see `Writes`.
        """
        parts = self.shards.get(module, self.parts)
        return self._holding(parts, audits, serves) if self.changes else nullcontext()

    @contextmanager
    def _holding(self, parts: Sequence[Part], audits: bool, serves: bool) -> Iterator[None]:
        held: list[_Held] = []
        memories: set[int] | None = None  # that a mode of writes has written to
        flat: list[tuple[dict[str, Any], dict[str, Any]]] = []
        found = self._made(parts, audits)
        try:
            self._put(parts, found, held, flat)
            # The places that a module holds twice have one stand-in.
            pairs = {id(one.inside): (one.inside, one.own) for one in held}
            if not (serves and (audits or self._moving)):
                yield
            else:
                with (writes := Writes(pairs.values())):
                    memories = writes.written
                    yield
        except BaseException:
            self.forget()  # no pass will
            raise
        finally:
            with torch.no_grad():
                for one in held:
                    self._take_back(one, audits, memories)
            for attributes, weights in flat:
                attributes.update(weights)

    def _put(
        self,
        parts: Sequence[Part],
        found: Mapping[Key, Tensor],
        held: list[_Held],
        flat: list[tuple[dict[str, Any], dict[str, Any]]],
    ) -> None:
        for module, dtype, _ in parts:
            for place in places_of(module):
                is_parameter = place is parameters_of(module)
                for key, own in place.items():
                    if own is not None and (now := found.get((id(own), dtype))) is not None:
                        held.append(_Held(place, key, own, now, version_of(now), is_parameter))
                        place[key] = now
            if isinstance(module, nn.RNNBase):
                before = [*flat_weights_of(module)]
                flat.append((module.__dict__, flat_weights(before)))
                inside = [found.get((id(own), dtype), own) for own in before]
                module.__dict__.update(flat_weights(inside))
                on_cuda = (own for own in inside if own is not None and own.is_cuda)
                if len({own.untyped_storage().data_ptr() for own in on_cuda}) > 1:
                    module.flatten_parameters()  # for cuDNN, which otherwise does it at each call

    def _made(self, parts: Sequence[Part], audits: bool) -> dict[Key, Tensor]:
        """Return the stand-in of each tensor; one node for all calls until it moves.

        audits: by value, too: by `.data` a script can move it unseen, and what differs after the
            call counts as written by the call.
        """
        found: dict[Key, Tensor] = {}
        missing: dict[torch.dtype | None, list[tuple[Key, Tensor]]] = {}
        has_graph, scales = torch.is_grad_enabled(), self.owner.scale is not None
        for module, dtype, _ in parts:
            for own in chain.from_iterable(place.values() for place in places_of(module)):
                if own is None or (key := (id(own), dtype)) in found:
                    continue
                casts = self.rounds and own.dtype is not dtype and own.is_floating_point()
                if not (has_graph and own.requires_grad):
                    if casts:
                        found[key] = own.detach().to(dtype)
                elif casts or scales or self._is_special(own):
                    known = self._cache.get(key)
                    found[key] = own  # or, see below, the missing stand-in
                    if (
                        known is not None
                        and known[0] == _state_of(own)
                        and not (audits and _was_written(known[1], own))
                    ):
                        found[key] = known[1]
                    else:
                        missing.setdefault(dtype if casts else None, []).append((key, own))
        for wanted, pairs in missing.items():
            # If processes sum gradients during the pass each parameter gets a node: the sums would
            # wait for the last of a group.
            most = 1 if is_available() and is_initialized() else _BUCKET
            sizes = (most if self._is_alone(own) else own.numel() for _, own in pairs)
            for places in packed(sizes, most):
                made = make_nodes(self.owner, "weight", wanted, [pairs[n][1] for n in places])
                for (key, own), tensor in zip([pairs[n] for n in places], made, strict=True):
                    setattr(tensor, IS_PARAMETER, True)
                    for watcher in self._watchers.get(id(own), {}).values():
                        tensor.register_hook(watcher)
                    found[key], self._cache[key] = tensor, (_state_of(own), tensor, own)
        return found

    def _is_alone(self, own: Tensor) -> bool:
        """Return whether a parameter needs a node for itself: a shared one hands an undefined
        gradient to what a pass has not reached, and torch calls its hooks with it."""
        is_dense = own.layout is torch.strided
        return not is_dense or id(own) in self._alone or any(hooks_of_leaf(own))

    def _is_special(self, own: Tensor) -> bool:
        """Return whether a parameter needs a node although nothing casts or scales its gradient:
        its gradients are rounded to another dtype, or somebody watches them."""
        is_rounded = self.owner.grad_dtype is not None or own.grad_dtype is not own.dtype
        return is_rounded or id(own) in self._watchers

    def _take_back(self, one: _Held, audits: bool, memories: set[int] | None) -> None:
        """Put the tensor back, with the values that the call wrote into its stand-in.

        memories: those to which torch's functions have written in FP32, as writes that count; None:
            nobody has looked.
        """
        now, one.place[one.key] = one.place[one.key], one.own
        own, place = one.own, (id(one.place), one.key)
        # As far as torch tells.
        written = now is not one.inside or version_of(now) != one.version or place in self._moving
        written = written or (memories is not None and storage_key(own) in memories)
        if not (written or audits):
            return
        if now is None or now.shape != own.shape:
            one.place[one.key] = now if now is None else now.detach().to(own.dtype)
        elif own.layout is torch.strided and (written or _was_written(now, own)):
            if one.is_parameter and place not in self._moving:
                self.written.add(self._path(one))
            self._moving.add(place)  # from now on compare values: `.data` counts no versions
            if _is_same_memory(now, own):
                return  # a copy onto itself would count as another write
            # A stand-in of its dtype has its version counter, which the script has moved already.
            target = own.data if memories is not None or one.inside.dtype is own.dtype else own
            # Unwritten values keep their digits beyond 16 bits.
            found = torch.where(_differs(now, own), now.to(own.dtype), own)
            target.copy_(found if now is one.inside else wide_of(now, found))

    def _path(self, one: _Held) -> str:
        for name, module in self.model.named_modules():
            if one.place is parameters_of(module):
                return f"{name}.{one.key}" if name else one.key
        return one.key


def _is_same_memory(now: Tensor, own: Tensor) -> bool:
    if now.layout is not torch.strided or now.dtype is not own.dtype:
        return False
    return now.data_ptr() == own.data_ptr() and now.stride() == own.stride()


def _state_of(own: Tensor) -> tuple[int, int]:
    return version_of(own), own.data_ptr() if own.layout is torch.strided else 0


def _was_written(now: Tensor, own: Tensor) -> bool:
    """Return whether a stand-in has other values than its tensor; it waits for the device.

    What watches the call does not see it.
    """
    if holds_codes(own):
        return False
    with disable_dispatch_modes():
        return not _is_same_memory(now, own) and bool(_differs(now, own).any())


def _differs(now: Tensor, own: Tensor) -> Tensor:
    rounded = own.to(now.dtype)
    return (now != rounded) & ~(now.isnan() & rounded.isnan())

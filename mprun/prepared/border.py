"""The border of a prepared model: its modules are called, and tensors go in and out.

Each module gets a `forward` in its instance, which knows whether the model is called or itself
calls. Inside, tensors have the mode's dtype and scaled gradients. Inputs and outputs cross the
border once a call. Whatever of the user's sees tensors in between, a hook of an inner module or an
attribute that a loss reads, finds them as without a mode: FP32, unscaled.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.distributed import is_initialized
from torch.jit import is_tracing
from torch.nn.utils.parametrize import ParametrizationList

from mprun.precision.audit import is_due
from mprun.precision.scaled_linear import KEPT
from mprun.precision.weight_products import KEPT_OF_WEIGHTS
from mprun.prepared.containers import each_tensor
from mprun.prepared.nodes import Owner, make_nodes, mark
from mprun.prepared.shards import is_of_shards, is_sharded
from mprun.torch_private import (
    CALL_WITH_HOOKS,
    FLAT_WEIGHT_REFS,
    FLAT_WEIGHTS,
    HOOKS,
    REPLICATE,
    compiler,
    disable_dynamo,
    uncompiled,
)

# Attributes that modules get.
OWN = ("forward", "__getstate__", "__deepcopy__", REPLICATE, KEPT, KEPT_OF_WEIGHTS)
# Attributes of modules that are no places of the user's.
_NO_PLACES = frozenset([*nn.Module().__dict__, *OWN, FLAT_WEIGHTS, FLAT_WEIGHT_REFS])


class Forward:
    """The `forward` of a module of a prepared model, which is `shared`."""

    # Where the model is: between calls, in one that computes in the mode, in an evaluation.
    OUTSIDE, IN_MODE, EVALUATING = range(3)

    def __init__(self, shared: Any, module: nn.Module, plain: Any, inside: Any):
        # plain: the instance's previous `forward`; None: the method of its class.
        self.shared, self.module, self.plain = shared, module, plain
        # The function that computes in the mode; None: the one that computes outside.
        self.inside = None if inside is plain else inside
        self.calls = 0  # by code outside the model
        # Its "calls" from outside read a weight, which is one in FP32 like any other.
        self.makes_weights = isinstance(module, ParametrizationList)
        # Computes in its place while hooks are called.
        self.around: Callable[..., Any] | None = None
        functools.update_wrapper(self, type(module).forward)

    @property
    def __code__(self) -> CodeType:
        """Return the code of the module's own forward, whose arguments torch.export asks for."""
        code: CodeType = getattr(self.plain, "__code__", type(self.module).forward.__code__)
        return code

    def __getattr__(self, name: str) -> Any:
        """Refuse torch.jit.script, which asks for the globals of a function."""
        why = f"'Forward' object has no attribute {name!r}"
        if name == "__globals__":
            why = (
                "torch.jit.script compiles the source of a plain model; save this one by "
                "torch.save, and script the one that loads; torch.jit.trace takes it as it is"
            )
        raise AttributeError(why)

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of a call, as torch.export and trainers ask for it."""
        kind = type(self.module)
        return inspect.signature(self.plain or kind.forward.__get__(self.module, kind))

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shared = self.shared
        if shared.state != self.OUTSIDE:
            in_mode = shared.state == self.IN_MODE
            if in_mode and shared.tensors.shards and is_sharded(self.module):
                return shared.call_gathered(self, args, kwargs)
            if compiler() is not None:
                return shared.compute_part(self, args, kwargs)
            return self.compute_within(args, kwargs) if in_mode else self.plainly(*args, **kwargs)
        if is_exporting() or is_tracing():  # the learned model, in FP32
            if shared.stores_half:
                raise RuntimeError(
                    f"precision={shared.policy.name} keeps weights in 16 bits; save the model "
                    "by torch.save, load that file, and export the plain model"
                )
            return self.plainly(*args, **kwargs)
        return shared.call(self, args, kwargs)

    def compute_within(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute inside the model."""
        return (self.around or self.compute)(args, kwargs)

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute in the mode."""
        return (self.plainly if self.inside is None else self.inside)(*args, **kwargs)

    def own_function(self, in_mode: bool) -> Any:
        """Return what computes in the mode or without it; None: the method of its class."""
        return self.inside if in_mode and self.inside is not None else self.plain

    def plainly(self, *args: Any, **kwargs: Any) -> Any:
        """Compute without the mode."""
        if self.plain is not None:
            return self.plain(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


class Watched(Forward):
    """The `forward` of a model in FP32, which is only watched and changes nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Each line costs about a microsecond when a step's kernels evict it from the caches.
        if not is_dynamo_compiling() and not is_exporting():
            shared = self.shared
            if is_autocast_enabled(shared.device_type):
                shared.refuse_autocast()
            if self.module.training or is_grad_enabled():
                if (is_due(shared.calls) or is_initialized()) and not is_tracing():
                    return shared.call(self, args, kwargs)
                shared.calls += 1
        if self.plain is not None:
            return self.plain(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


@dataclass(eq=False, slots=True)
class _Place:
    """A place for a tensor, or a tuple of some: an attribute, or an entry of a list or dictionary
    in one."""

    name: str
    holder: Any
    key: Any
    # What the model left there, as seen from outside and from inside; None: nothing so far.
    outer: Any = None
    inner: Any = None
    came: bool = False  # the call leaves there what was there before


class Border:
    """The border of one model.

    Args:
        owner: of its nodes.
        model: it has the attributes.
        dtype: that of inputs inside; None: their own.
    """

    def __init__(self, owner: Owner, model: nn.Module, dtype: torch.dtype | None):
        self.owner, self.model, self.dtype = owner, model, dtype
        self.left: set[str] = set()  # names of attributes in which tensors have left
        self._places: dict[tuple[int, Any], _Place] = {}  # that have held such tensors

    @disable_dynamo
    def inwards(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Cast an input, to the mode's dtype unless another is given; its gradient leaves unscaled,
        in the input's dtype."""
        if not tensor.is_floating_point():
            return tensor
        dtype = dtype or self.dtype
        if self.owner.scale is not None and tensor.requires_grad and is_grad_enabled():
            return make_nodes(self.owner, "in", dtype, [tensor])[0]
        # No node of ours: torch.func would refuse it.
        inside = tensor if dtype is None else tensor.to(dtype)
        if inside is not tensor:
            mark([inside], "in", self.owner)
        return inside

    @disable_dynamo
    def outwards(self, tensor: Tensor) -> Tensor:
        """Widen an output to FP32; its gradient is scaled in FP32, then rounded."""
        is_half = tensor.is_floating_point() and tensor.dtype.itemsize == 2
        dtype = torch.float32 if is_half else None
        if tensor.grad_fn is not None:
            if self.owner.scale is not None:
                return make_nodes(self.owner, "out", dtype, [tensor])[0]
            mark([tensor], "out", self.owner)
        return tensor if dtype is None else tensor.to(dtype)

    # Hooks of inner modules

    @contextmanager
    def hooks_outside(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Let the hooks of these modules see tensors as they are outside."""
        hooked = []
        for module in modules:
            forward = module.__dict__.get("forward")
            if isinstance(forward, Forward):
                module.__dict__[CALL_WITH_HOOKS] = functools.partial(self._call_hooked, forward)
                hooked.append(module)
        try:
            yield
        finally:
            for module in hooked:
                del module.__dict__[CALL_WITH_HOOKS]

    def _call_hooked(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Call an inner module: its tensors go out to the hooks before, in to `forward`, out to the
        hooks after, and in again, each time in their previous dtypes."""
        dtypes: list[torch.dtype] = []

        def outwards(tensor: Tensor) -> Tensor:
            dtypes.append(tensor.dtype)
            return self.outwards(tensor)

        def inwards(tree: Any) -> Any:
            wanted = iter([*dtypes])
            dtypes.clear()
            return each_tensor(tree, lambda t: self.inwards(t, next(wanted, t.dtype)))

        def within(*given: Any) -> Any:
            return each_tensor(forward.compute(*inwards(given)), outwards)

        args, kwargs = each_tensor((args, kwargs), outwards)
        forward.around = within
        try:
            call = getattr(type(forward.module), CALL_WITH_HOOKS)
            outputs = call(forward.module, *args, **kwargs)
        finally:
            forward.around = None
        return inwards(outputs)

    # Attributes: tensors in them from outside enter like inputs, those that a call leaves there go
    # out like outputs

    @contextmanager
    def attributes_inside(self, searches: bool) -> Iterator[None]:
        """Let attributes hold the mode's tensors, and afterwards those seen from outside.

        searches: look for them in all modules, not only where some have been.
        """
        for place in self._places.values():
            place.came = False
        entered: list[tuple[_Place, Any, Any]] = []
        for place in self._found(searches):
            outer, before = place.holder[place.key], place.inner
            if before is not None and place.outer is outer:
                place.holder[place.key] = before
            elif isinstance(outer, Tensor) and (outer.requires_grad or before is not None):
                # Only cast if the model itself has left a tensor there: a state carried on.
                kept = outer.dtype if before is None else before.dtype
                place.holder[place.key] = inner = self.inwards(outer, kept)
                entered.append((place, outer, inner))
            elif isinstance(outer, tuple):  # what the script has put there stays as it is
                entered.append((place, outer, outer))
        try:
            yield
        finally:
            for place, outer, inner in entered:
                if place.holder[place.key] is inner:
                    place.holder[place.key], place.came = outer, True

    @disable_dynamo
    def let_out(self, searches: bool) -> None:
        """Convert the tensors that a call has left in attributes for the outside."""
        for place in self._found(searches):
            inner = place.holder[place.key]
            if place.came or not has_graph(inner):
                continue
            outer = each_tensor(inner, lambda t: t if t.grad_fn is None else self.outwards(t))
            if isinstance(inner, tuple) or outer is not inner:
                place.holder[place.key] = place.outer = outer
                place.inner = inner
                self._places[id(place.holder), place.key] = place
                self.left.add(place.name)

    def _found(self, searches: bool) -> list[_Place]:
        """Return places whose tensors may differ outside."""
        if (self.dtype is None and self.owner.scale is None) or not is_grad_enabled():
            return []
        if not searches:
            known = [*self._places.values()]
            return [
                p
                for p in known
                if (p.key in p.holder if type(p.holder) is dict else p.key < len(p.holder))
            ]
        found = []
        for name, module in self.model.named_modules():
            for key in [key for key in module.__dict__ if key not in _NO_PLACES]:
                for place in _places_in(f"{name}.{key}" if name else key, module.__dict__, key):
                    place = self._places.get((id(place.holder), place.key), place)
                    value = place.holder[place.key]
                    if getattr(value, "requires_grad", False) or has_graph(value):
                        self._places[id(place.holder), place.key] = place
                    found.append(place)
        return found


def _places_in(name: str, holder: Any, key: Any) -> Iterator[_Place]:
    """Yield the places with tensors: this one, or those of the list or dictionary in it."""
    value = holder[key]
    if type(value) is list or type(value) is dict:
        for part in range(len(value)) if type(value) is list else [*value]:
            yield from _places_in(name, value, part)
    elif isinstance(value, Tensor) or type(value) is tuple:
        yield _Place(name, holder, key)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of the user, not of measurements inside of the mode or of
    `fully_shard`, which hands values on as they are."""
    own = module.__dict__
    if not any(own[name] for name in HOOKS):
        return False
    hooks = (hook for name in HOOKS for hook in getattr(module, name).values())
    return not all(getattr(hook, "sees_inside", False) or is_of_shards(hook) for hook in hooks)


def has_graph(value: Any) -> bool:
    """Return whether a tensor, or one of a tuple, is a result of the autograd graph."""
    parts = value if type(value) is tuple else (value,)
    return any(isinstance(part, Tensor) and part.grad_fn is not None for part in parts)

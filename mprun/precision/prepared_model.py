"""A model of one's own in a precision mode that looks as it did, FP32 and itself, from outside.

Between two calls a prepared model holds its master weights: `parameters()`, `state_dict()`, what an
optimizer updates and what a checkpoint, an average or a regulariser reads are FP32 tensors with
unscaled gradients, the very objects that they were before. Within a call in training mode the
copies that the mode computes with take their places, inputs are cast on the way in and outputs to
FP32 on the way out. In eval mode the master weights compute in FP32, so that what is measured is
what was learned.

A mode without master weights (fp16_naive) has none to show: its parameters are 16-bit tensors.

Every module of the model is given a class of its own that differs from the old one in `forward`
and in how it is copied. Pickled, a prepared model is the plain model, which loads where mprun is
not installed; `copy.deepcopy` of the whole model prepares the copy again.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mprun.precision.casting import CastModel, cast_model, flat_weights
from mprun.precision.emulation import ForwardContext, Losses
from mprun.precision.optimizer import BatchNormGuard
from mprun.precision.policy import ieee_fp32

_ATTRIBUTE = "_mprun"
_NONE: Mapping[Any, Any] = MappingProxyType({})


class PreparedModel:
    """What the modules of a prepared model share: the mode, and both forms of each tensor.

    Args:
        model: in FP32; its modules are given other classes, its tensors stay the same objects.
        arithmetic: in which its training calls run.
        overrides: as of `cast_model`.

    Attributes:
        trained: ids of the parameters that an optimizer updates; only their copies have gradients.
        optimizers: those of `prepare` that update them.
        stale: the master weights have moved since they were copied.
        ran: there was a training call since the last update.
        bare: `is_bare`, as of its last training call: around a call nothing changes places.
        direct: bare, and its modules compute as their classes say.
        guard: of its BatchNorm statistics, where updates can be skipped.
        plain: `forward` of each module as the model has it.

    """

    # Those whose outputs the backward pass that runs now has reached; None: none runs that an
    # optimizer of `prepare` began.
    reached: set[PreparedModel] | None = None
    # Ids of those that were called since their last update.
    waiting: set[int] = set()

    def __init__(
        self,
        model: nn.Module,
        arithmetic: ForwardContext,
        overrides: Mapping[str, torch.dtype] | None = None,
    ):
        self.model, self.arithmetic, self.policy = model, arithmetic, arithmetic.policy
        self.overrides = dict(overrides or {})
        self.trained: set[int] = set()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        weakref.finalize(self, PreparedModel.waiting.discard, id(self)).atexit = False
        self.active = self.ran = self.stale = self.bare = self.direct = False
        self.guard: BatchNormGuard | None = None
        self._guards_step = False
        self._cast: CastModel | None = None
        # `forward` of modules that compute otherwise in the mode: all of them, those of now.
        self._inside: dict[nn.Module, Callable[..., Any]] = {}
        self.inside: Mapping[nn.Module, Callable[..., Any]] = _NONE
        self._swaps = False  # whether there is anything to put in its place around a call
        self._wide: dict[int, Tensor] = {}
        self._first, self._device = next(model.parameters()), arithmetic.device.type
        self._is_there = attrgetter(f"is_{self._device}")
        self._dtype = self._first.dtype  # as seen from outside
        # Nothing to enter for it: no autocast, no emulation.
        self._is_plain = self.policy.half_dtype is None and not arithmetic.emulations
        half_weights = self.policy.autocast_dtype is None and self.policy.half_dtype is not None
        self._losses: AbstractContextManager[Any] = nullcontext()
        if half_weights and arithmetic.emulations:
            for emulation in arithmetic.emulations:  # which sees every function anyway
                emulation.functions.loss_dtype = self.policy.loss_dtype
        elif half_weights:
            self._losses = Losses(self.policy.loss_dtype)
        self._casts = self.policy.param_dtype.itemsize == 2
        # A gradient that is scaled, emulated or meant for a copy is lost on torch's own way.
        self.strict = self.policy.half_dtype is not None
        # Called past the classes that modules are given here.
        # A loss that is a part of the model is none of it: between calls it is FP32.
        own = [m for m in model.modules() if not isinstance(m, nn.modules.loss._Loss)]
        self._own = {m: m.__dict__.pop("forward", None) for m in own}
        self.unpatched = not any(self._own.values())
        self.plain = {m: own or MethodType(type(m).forward, m) for m, own in self._own.items()}
        for module in self._own:
            kind: Any = type(module)
            module.__class__ = _face_of(kind)
            module.__dict__[_ATTRIBUTE] = self

    def build(self) -> CastModel:
        """The copies that the mode computes with, made once; masters are the model's parameters."""
        if self._cast is None:
            for module, forward in self.plain.items():
                module.__dict__["forward"] = forward  # around which casts are put
            try:
                self._cast = cast_model(self.model, self.policy, self.overrides)
            finally:
                for module in self.plain:
                    module.__dict__.pop("forward", None)
            # Looked up, not put in place and taken away around every call.
            module_of = {id(module.__dict__): module for module in self.plain}
            forwards, self._cast.forwards = self._cast.forwards, []
            for place, before, own in forwards:
                if id(place) in module_of:
                    self._inside[module_of[id(place)]] = own
                else:
                    self._cast.forwards.append((place, before, own))
            self._cast.leave_mode()
            self._swaps = self._cast.has_two_forms
            self._dtype = self._first.dtype
        return self._cast

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> (what the mode computes with, what an optimizer updates), of each parameter."""
        inside = {id(swap.outside): swap.inside for swap in self.build().weights}
        return {n: (inside.get(id(p), p), p) for n, p in self.model.named_parameters()}

    def end_step(self, found_inf: Tensor | None) -> None:
        """An update is over; where it was skipped, statistics go back to before its calls."""
        if self.guard is not None and self._guards_step and found_inf is not None:
            self.guard.restore_where(found_inf)
        self._guards_step = False

    def call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`module(*args, **kwargs)`, of the model itself or of a part of it."""
        if torch.is_autocast_enabled(self._device):
            self._refuse_autocast()
        if not self.model.training:
            return self._evaluate(module, args, kwargs)
        if self._cast is None:
            self.build()
        if self.is_bare:
            self.bare, self.inside = True, self._inside
            self.direct = self.unpatched and not self._inside
            return module.forward(*args, **kwargs)
        if self.guard is not None and not self._guards_step and torch.is_grad_enabled():
            self.guard.save()
            self._guards_step = True
        if self._casts:
            args, kwargs = _each_tensor((args, kwargs), self.policy.cast_inputs)
        self.begin()
        try:
            if self._is_plain:
                outputs = module.forward(*args, **kwargs)
            else:
                with self.arithmetic, self._losses, self.arithmetic.autocast():
                    outputs = module.forward(*args, **kwargs)
            self._refuse_written()
        finally:
            self.end()
        self.note_call()
        if self.strict or self._casts:
            return _each_tensor(outputs, self._outwards)
        return outputs

    @property
    def is_bare(self) -> bool:
        """Whether its training calls are those of the plain model, wherever they come from."""
        return self._is_plain and not self.strict and not self._swaps and self._cast is not None

    def note_bare_call(self) -> None:
        """There is the first training call of a step, by way of `bare`."""
        if torch.is_autocast_enabled(self._device):
            self._refuse_autocast()
        if not self._is_there(self._first) or self._first.dtype is not self._dtype:
            self._refuse_moved()
        self.note_call()

    def note_call(self) -> None:
        """There was a training call."""
        self.ran = True
        PreparedModel.waiting.add(id(self))

    def note_update(self) -> None:
        """There was an update, for which the calls before it were."""
        self.stale, self.ran = True, False
        PreparedModel.waiting.discard(id(self))

    def begin(self) -> None:
        """From now to `end` the modules hold what the mode computes with."""
        if not self._is_there(self._first) or self._first.dtype is not self._dtype:
            self._refuse_moved()
        cast = self._cast
        if cast is None:
            return
        if self._swaps:
            if cast.weights:
                self._copy(cast)
                for swap in cast.weights:
                    wanted = swap.outside.requires_grad and id(swap.outside) in self.trained
                    if swap.inside.requires_grad is not wanted:
                        swap.inside.requires_grad_(wanted)
            cast.enter_mode()
            for swap in cast.weights:
                swap.written = swap.inside._version
        self.inside, self.active = self._inside, True

    def end(self) -> None:
        """After `begin`: the modules hold what is seen from outside."""
        self.inside, self.active = self._inside if self.bare else _NONE, False
        if self._swaps and self._cast is not None:
            self._cast.leave_mode()

    @torch.no_grad()
    def _copy(self, cast: CastModel) -> None:
        """Bring the copies of the weights up to date."""
        if cast.weights and not self.trained:
            # No optimizer tells when these move, and `.data` tells nobody.
            made = {id(s.outside): s.outside.to(s.inside.dtype) for s in cast.weights}
            for swap in cast.weights:
                swap.inside = made[id(swap.outside)]
            for _, outside, inside in cast.flat:
                own = [made.get(id(master), master) for master in outside["_flat_weights"]]
                inside.update(flat_weights(own))
            return
        moved = [s for s in cast.weights if self.stale or s.seen != s.outside._version]
        if moved:
            torch._foreach_copy_([s.inside for s in moved], [s.outside for s in moved])
            for swap in moved:
                swap.seen = swap.outside._version
        self.stale = False

    def _evaluate(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """In FP32: with the master weights, or with 16-bit ones that have none, widened."""
        exact = ieee_fp32() if self.policy.fp32_math != "ieee" else nullcontext()
        if self.policy.master_dtype is not None or not self._casts:
            with exact:
                return self.plain[module](*args, **kwargs)
        # A state made like the parameters, of an LSTM for instance, is in 16 bits as they are.
        args, kwargs = _each_tensor((args, kwargs), self._widen_input)
        with exact, self.build().in_fp32():
            self.active = True
            try:
                return self.plain[module](*args, **kwargs)
            finally:
                self.active = False

    def _refuse_written(self) -> None:
        """A copy that the model changed itself: the master weights would undo it."""
        for swap in self._cast.weights if self._cast is not None else ():
            now = swap.place[swap.key]
            if now is not swap.inside or now._version != swap.written:
                raise RuntimeError(
                    f"precision={self.policy.name}: parameter {swap.key!r} of shape "
                    f"{tuple(swap.outside.shape)} was changed in a call of the model, which its "
                    "master weights would undo; change model.parameters() after optimizer.step()"
                )

    def _widen_input(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype is self.policy.param_dtype else tensor

    def widened(self, own: Any) -> Any:
        """A 16-bit tensor in FP32, one and the same for all places that hold it."""
        if not isinstance(own, Tensor) or own.dtype is not self.policy.param_dtype:
            return own
        known = self._wide.get(id(own))
        # By value: what is written through `.data` counts nowhere.
        if known is None or not torch.equal(known.to(own.dtype), own):
            known = own.detach().float()
            if isinstance(own, nn.Parameter):
                known = nn.Parameter(known, own.requires_grad)
            self._wide[id(own)] = known
        return known

    def _outwards(self, tensor: Tensor) -> Tensor:
        """An output as the script sees it."""
        if tensor.is_floating_point() and tensor.dtype.itemsize == 2:
            tensor = tensor.float()
        if tensor.grad_fn is not None:
            tensor.register_hook(self._on_gradient)
        return tensor

    def _on_gradient(self, gradient: Tensor) -> None:
        if PreparedModel.reached is not None:
            PreparedModel.reached.add(self)
        elif self.strict:
            raise RuntimeError(
                f"precision={self.policy.name}: this backward pass was not begun by "
                "optimizer.backward(loss), the optimizer that mprun.prepare returned; put it in "
                "place of loss.backward() (torch.autograd.grad works in fp32 alone)"
            )

    def _refuse_autocast(self) -> None:
        raise RuntimeError(
            f"torch.autocast is active around a model prepared as precision="
            f"{self.policy.name}; remove it: the precision mode says what runs in which dtype"
        )

    def _refuse_moved(self) -> None:
        own, first = f"{self._device} in {self._dtype}", self._first
        raise RuntimeError(
            f"the model was prepared on {own} and is on {first.device.type} in {first.dtype} now; "
            "move and cast it before mprun.prepare, whose mode says what is computed in which dtype"
        )


class _Face(nn.Module):
    """What the classes of prepared modules have beside their own; behind it comes the old one."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._refuse_inside()
        return copyreg.__newobj__, (self.__class__,), self._plain_state()  # type: ignore

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Of a whole prepared model a prepared one, of a part of it a plain module."""
        self._refuse_inside()
        plain = self.__class__
        made = plain.__new__(plain)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self._plain_state(), memo))
        shared: PreparedModel = self.__dict__[_ATTRIBUTE]
        if shared.model is self:
            PreparedModel(made, shared.arithmetic, shared.overrides)
        return made

    def _refuse_inside(self) -> None:
        if self.__dict__[_ATTRIBUTE].active:
            raise RuntimeError(
                "a prepared model is copied within its own call, where it holds 16-bit copies of "
                "its weights; copy it between two calls"
            )

    def _plain_state(self) -> dict[str, Any]:
        shared: PreparedModel = self.__dict__[_ATTRIBUTE]
        state = super().__getstate__()
        state = {key: value for key, value in state.items() if key != _ATTRIBUTE}
        if shared.policy.master_dtype is None:  # FP32 weights with the values of the 16-bit ones
            for key in ("_parameters", "_buffers"):
                state[key] = {name: shared.widened(own) for name, own in state[key].items()}
            if "_flat_weights" in state:
                state["_flat_weights"] = [shared.widened(own) for own in state["_flat_weights"]]
        own = shared._own.get(self)
        return state if own is None else state | {"forward": own}


def _refuse_class(self: Any, kind: type) -> None:
    raise RuntimeError(
        f"a {type(self).__name__} is made a {kind.__name__} after its model was prepared; "
        "parametrize (weight_norm, ...) before mprun.prepare"
    )


@functools.cache
def _face_of(kind: Any) -> type[nn.Module]:
    """A class of the same name whose calls go through the prepared model."""

    plain = kind.forward

    @functools.wraps(plain)
    def forward(self, *args, **kwargs):
        shared = self.__dict__[_ATTRIBUTE]
        if shared.bare and shared.model.training:
            if not shared.ran:
                shared.note_bare_call()
            if shared.direct:
                return plain(self, *args, **kwargs)
        elif not shared.active:
            return shared.call(self, args, kwargs)
        if self in shared.inside:
            return shared.inside[self](*args, **kwargs)
        if shared.unpatched:
            return plain(self, *args, **kwargs)
        return shared.plain[self](*args, **kwargs)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    # Pickle takes an object for what its `__class__` says.
    names |= {"forward": forward, "__class__": property(lambda self: kind, _refuse_class)}
    return type(kind)(kind.__name__, (_Face, kind), names)


def prepared_of(model: nn.Module) -> PreparedModel | None:
    """What was made of a model; None of one that is not prepared."""
    return model.__dict__.get(_ATTRIBUTE)


def refuse_unpreparable(model: nn.Module) -> None:
    """ValueError for what is no plain FP32 module, with what to do instead."""
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "the model is a ScriptModule, whose arithmetic is fixed; give the nn.Module"
        )
    if kind == "OptimizedModule":
        raise ValueError("the model is compiled; prepare it first, then compile its layers")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"the model is a {kind}; prepare the module inside of it")
    for name, module in model.named_modules():
        if _ATTRIBUTE in module.__dict__:
            raise ValueError(
                f"{name or 'the model'} is prepared already; each can be once: build it "
                "anew, or change the groups of its optimizer"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(f"{name} is lazy; run a batch through the model before mprun.prepare")
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise ValueError(
                f"{name} is {parameter.dtype}; build the model in float32, precision= casts it"
            )


def _each_tensor(tree: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """`tree` with every tensor in it converted: in tuples, lists, dictionaries, data classes, and
    whatever torch's pytrees know."""
    if isinstance(tree, Tensor):
        return convert(tree)
    if type(tree) is tuple or type(tree) is list:
        return type(tree)([_each_tensor(part, convert) for part in tree])
    if type(tree) is dict:
        return {key: _each_tensor(part, convert) for key, part in tree.items()}
    if tree is None or isinstance(tree, str | int | float):
        return tree
    if is_dataclass(tree) and not isinstance(tree, dict | type):
        parts = {f.name: getattr(tree, f.name) for f in fields(tree) if f.init}
        changed = {key: _each_tensor(part, convert) for key, part in parts.items()}
        return replace(tree, **changed) if any(changed[k] is not parts[k] for k in parts) else tree
    return tree_map(lambda leaf: _converted(leaf, convert), tree)


def _converted(leaf: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return convert(leaf)
    parts = leaf.values() if isinstance(leaf, dict) else getattr(leaf, "__dict__", {}).values()
    for part in parts:
        if isinstance(part, Tensor) and (part.grad_fn is not None or convert(part) is not part):
            raise RuntimeError(
                f"a prepared model takes and returns tensors; in a {type(leaf).__name__} they "
                "would pass without a cast; give and return tensors, and make it of them elsewhere"
            )
    return leaf

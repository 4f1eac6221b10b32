"""`mprun.prepare`: the model and the optimizer of one's own script, in a precision mode.

    model, optimizer = mprun.prepare(model, optimizer, precision="fp16_master_scaled")
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        optimizer.backward(loss)      # in place of loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

The engine is that of `mprun` itself: `cast_model`, `ForwardContext`, `MixedPrecisionOptimizer` and
the loss scales. Here it is given the form of torch's own objects.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision.casting import CastModel, matching_modules, those_that_match
from mprun.precision.emulation import ForwardContext, why_no_lstm, why_unsupported
from mprun.precision.loss_scale import LossScale, get_loss_scale
from mprun.precision.optimizer import BatchNormGuard, MixedPrecisionOptimizer, Update
from mprun.precision.policy import (
    DTYPE_NAMES,
    DTYPES,
    PrecisionPolicy,
    get_policy,
    pin_products,
    usual_scaler,
)
from mprun.precision.prepared_model import PreparedModel, refuse_unpreparable


def prepare(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    precision: str | PrecisionPolicy = "fp16_master_scaled",
    *,
    scaler: str | LossScale | None = None,
    overrides: Mapping[str, str | torch.dtype] | None = None,
    native: bool = False,
) -> Any:
    """Put a model and its optimizer into a precision mode, in place.

    What comes back looks as it did: the model is the same object, whose parameters are FP32 master
    weights with unscaled gradients (`PreparedModel` says how), and the optimizer is a torch
    optimizer around the given one (`PreparedOptimizer`). Give several of either as lists: a model
    that two optimizers share, an optimizer over two models, a generator and a discriminator.

    On a CPU 16-bit arithmetic is emulated as a GPU computes it (docs: precision modes).

    Args:
        model: in FP32, on its device, its parameters those that the optimizers hold.
        optimizer: of torch or derived from it, before its first step or with a state loaded; None:
            the model is called, but never updated (a teacher, a loss network).
        precision: name of a mode ("fp32", "fp16_naive", "fp16_master", "amp", ...) or a policy.
        scaler: name of a loss scaler ("none", "static", "dynamic", "apex", ...), or a loss scale
            of one's own, which several calls may share; None: the one that the mode comes with.
        overrides: glob pattern over module names -> dtype ("fp32") in which these modules compute.
        native: on a CPU, torch's own 16-bit kernels in place of the emulation.

    Returns:
        (model, optimizer) in the form that they were given in; without an optimizer the model
        alone.

    Raises:
        ValueError: names the argument, what is wrong with it and what is allowed.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    given = [] if optimizer is None else optimizer
    optimizers = [given] if isinstance(given, Optimizer) else list(given)
    policy = precision if isinstance(precision, PrecisionPolicy) else get_policy(precision)
    device = _device_of(models)
    dtypes = _dtypes(models, overrides or {})
    _check(models, optimizers, policy, device, dtypes, native)
    if scaler is None:
        scaler = usual_scaler(policy.name) if isinstance(precision, str) else "none"
    scale = scaler if isinstance(scaler, LossScale) else get_loss_scale(scaler, device)
    name = scale.kind if isinstance(scaler, LossScale) else scaler
    if scale.scale.device.type != device.type:
        raise ValueError(f"scaler: is on {scale.scale.device}, the model on {device}")
    pin_products(policy.fp32_math)
    arithmetic = ForwardContext(policy, device, native=native, overrides=dtypes.values())
    prepared = []
    for one in models:
        own = {pattern: dtypes[pattern] for pattern in those_that_match(one, dtypes)}
        prepared.append(PreparedModel(one, arithmetic, own))
    if optimizer is None:
        return model
    held = {id(p) for inner in optimizers for g in inner.param_groups for p in g["params"]}
    wrapped = [
        PreparedOptimizer(inner, prepared, scale, name, held if number == 0 else None)
        for number, inner in enumerate(optimizers)
    ]
    return model, wrapped[0] if isinstance(optimizer, Optimizer) else wrapped


def _device_of(models: Sequence[nn.Module]) -> torch.device:
    """The one device of all parameters."""
    for model in models:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model: is a {type(model).__name__}, must be a torch.nn.Module")
    devices = {parameter.device for model in models for parameter in model.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none, it has no parameters"
        raise ValueError(f"model: its parameters are on {found}; must be on one device")
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"model: is on {device}, must be on a CPU or a CUDA device")
    return device


def _dtypes(
    models: Sequence[nn.Module], overrides: Mapping[str, str | torch.dtype]
) -> dict[str, torch.dtype]:
    """Pattern -> dtype; each pattern matches in one of the models at least."""
    found = {}
    for pattern, name in overrides.items():
        dtype = DTYPES.get(name) if isinstance(name, str) else name
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"overrides[{pattern!r}]={name!r}: must be one of {', '.join(DTYPES)}")
        if not any(those_that_match(model, [pattern]) for model in models):
            matching_modules(models[0], pattern, "overrides")
        found[pattern] = dtype
    return found


def _check(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    policy: PrecisionPolicy,
    device: torch.device,
    overrides: Mapping[str, torch.dtype],
    native: bool,
) -> None:
    """ValueError for what cannot be, before anything is changed."""
    for model in models:
        refuse_unpreparable(model)
    reason = why_unsupported(policy, device, overrides.values())
    recurrent = [m for model in models for m in model.modules() if isinstance(m, nn.RNNBase)]
    if reason is None and recurrent and (device.type == "cuda" or native):
        projected = any(layer.proj_size for layer in recurrent)
        reason = why_no_lstm(policy, device, projected)
    if reason is not None:
        raise ValueError(f"precision={policy.name!r}: {reason}")
    modules = [module for model in models for module in model.modules()]
    if len(set(modules)) < len(modules):
        raise ValueError("model: two of them share a module; make one module that holds both")
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for inner in optimizers:
        if isinstance(inner, PreparedOptimizer):
            raise ValueError("optimizer: is prepared already; each can be once")
        if not isinstance(inner, Optimizer):
            kind = type(inner).__name__
            raise ValueError(f"optimizer: is a {kind}, must be a torch.optim.Optimizer")
        if isinstance(inner, torch.optim.LBFGS):
            raise ValueError(
                "optimizer: LBFGS calls its closure again and again, a skipped step "
                "could not take that back; allowed: optimizers without a closure"
            )
        held = [p for group in inner.param_groups for p in group["params"]]
        if not held:
            raise ValueError("optimizer: holds no parameter")
        _refuse_foreign(held, known)


def _refuse_foreign(held: Iterable[Tensor], known: Collection[int]) -> None:
    for parameter in held:
        if id(parameter) not in known:
            raise ValueError(
                f"optimizer: holds a parameter of shape {tuple(parameter.shape)} that is none of "
                "the model's; make it of model.parameters(), and give every model that it updates"
            )


class PreparedOptimizer(Optimizer):
    """A torch optimizer that updates prepared models; `inner` is the one that was given.

    Gradients are where torch has them, in `.grad` of the master weights, FP32 and unscaled, from
    `backward(loss)` on: what clips, measures or changes them between two calls is heeded. A step
    whose gradients are not finite is skipped and moves the loss scale. Groups, rates and state are
    those of `inner`, so that schedulers made for either work.

    Args:
        models: those whose parameters it may hold.
        scale: of every loss that is propagated; several optimizers may share it.
        scaler_name: what it is called in records.
        held: ids of the parameters that any optimizer of these models holds: the gradients of all
            others are unscaled here. None: another optimizer does that.

    Attributes:
        models: those whose parameters it holds.
        module: the model; of several a list.
        engine: takes the steps.
        last: what the last step did; None before it.
        steps: taken so far, skipped ones too.

    Raises:
        ValueError: it holds what is no parameter of the models, or cannot skip a step.
    """

    _alive: weakref.WeakSet[PreparedOptimizer] = weakref.WeakSet()

    def __init__(
        self,
        inner: Optimizer,
        models: Sequence[PreparedModel],
        scale: LossScale,
        scaler_name: str,
        held: Collection[int] | None = None,
    ):
        self._held = held
        self.inner, self.scale, self._given = inner, scale, list(models)
        self.scaler_name = scaler_name
        self.last: Update | None = None
        self.steps = 0
        self._inner_may_step = False
        self._told = self._warned = self._begun = False
        self._is_bare = False  # the gradients of this step, see `step`
        self._shares = False  # one of its models with another optimizer
        inner.register_step_pre_hook(self._refuse_step_of_inner)
        self._build()
        PreparedOptimizer._alive.add(self)
        self._turns = _turns_of(scale)
        self._turns.add(self)

    # What torch's schedulers and tools read of an optimizer.
    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)

    @property
    def policy(self) -> PrecisionPolicy:
        """Of its models."""
        return self.models[0].policy

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)  # while it is being made or copied
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"prepared ({self.policy.name}, loss scaling {self.scale.kind}) {self.inner!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled and copied, it is the plain optimizer."""
        return self.inner.__reduce_ex__(protocol)

    def _build(self) -> None:
        """Take the parameters of the groups as they are now."""
        held = {id(p): p for group in self.inner.param_groups for p in group["params"]}
        of_models = {model: model.pairs() for model in self._given}
        known = {id(master) for pairs in of_models.values() for _, master in pairs.values()}
        _refuse_foreign(held.values(), known)
        self.models = [
            model
            for model, pairs in of_models.items()
            if any(self._takes(id(master), held) for _, master in pairs.values())
        ]
        own: dict[str, tuple[Tensor, Tensor]] = {}
        for number, model in enumerate(self.models):
            prefix = f"{number}." if len(self.models) > 1 else ""
            pairs = {
                name: pair
                for name, pair in of_models[model].items()
                if self._takes(id(pair[1]), held)
            }
            own |= {prefix + name: pair for name, pair in pairs.items()}
            model.trained |= {id(master) for _, master in pairs.values()}
            model.optimizers.add(self)
            if self.scale.skips_nonfinite:
                model.guard = model.guard or BatchNormGuard(model.model)
                model.strict, model.bare = True, False
            for optimizer in model.optimizers:
                optimizer._shares |= len(model.optimizers) > 1
        self.module = self.models[0].model
        if len(self.models) > 1:
            self.module = nn.ModuleList(model.model for model in self.models)
        cast = CastModel(
            self.module, self.policy, {n: m for n, (c, m) in own.items() if c is not m}
        )
        self.engine = MixedPrecisionOptimizer(
            cast, lambda named: self.inner, self.scale, parameters=own
        )
        self.gradients = self.engine.gradients
        self._copied = [master for copy, master in own.values() if copy is not master]
        narrow = self.engine.narrow
        for _, updated in own.values():
            if narrow is not None and updated in narrow:
                continue
            for key, value in self.inner.state.get(updated, {}).items():
                # Made before the weights were cast; torch has it in their dtype.
                if isinstance(value, Tensor) and value.shape == updated.shape:
                    self.inner.state[updated][key] = value.to(updated.dtype)
        self._used: dict[LossScale, Tensor | None] = {}
        self._reached: set[PreparedModel] = set()

    def _takes(self, parameter: int, held: Collection[int]) -> bool:
        """Whether its gradient, by id of the parameter, is unscaled here."""
        return parameter in held or (self._held is not None and parameter not in self._held)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; its parameters have to be of the prepared models.

        Raises:
            RuntimeError: between backward and step, whose gradients it would lose.
        """
        if self._used:
            raise RuntimeError(
                "add_param_group between backward and step; call it after optimizer.step() or "
                "optimizer.zero_grad()"
            )
        self.inner.add_param_group(param_group)
        self._build()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also what is known of these gradients is forgotten."""
        if not set_to_none:
            self.inner.zero_grad(set_to_none)
        else:  # what torch does, without its record of it, which takes longer than the rest
            for group in self.inner.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        self._drop()

    def backward(self, loss: Tensor, *, retain_graph: bool | None = None) -> None:
        """Propagate `loss` (0-dim) times the scale; gradients are unscaled, checked and added up.

        In place of `loss.backward()`, also for each of several losses or micro-batches. Gradients
        that reach the parameters of other prepared optimizers are unscaled there.

        Raises:
            RuntimeError: the loss was not computed by a training call of a prepared model.
        """
        given: Any = loss
        if not isinstance(given, Tensor) or given.numel() != 1:
            what = f"of shape {tuple(given.shape)}" if hasattr(given, "shape") else "no tensor"
            raise ValueError(f"loss: is {what}, must be one number; take its mean or its sum")
        if loss.dim():
            loss = loss.reshape(())
        for updated in self._copied:
            if updated._backward_hooks or updated._post_accumulate_grad_hooks:
                raise RuntimeError(
                    f"a hook on a parameter of shape {tuple(updated.shape)} would not be called, "
                    "gradients are those of its copy; change `.grad` between "
                    "optimizer.backward(loss) and optimizer.step()"
                )
        ran = [model for model in self.models if model.ran]
        if not ran:
            state = "" if any(m.model.training for m in self.models) else " (it is in eval mode)"
            raise RuntimeError(
                f"no training call of the prepared model since the last step{state}: call "
                "model.train() and model(...) for the loss; eval mode computes in FP32"
            )
        scale = self.scale
        self._turns.begin(self)
        alone = len(ran) == len(self.models) == len(PreparedModel.waiting) and not self._shares
        others = [] if alone else [o for o in PreparedOptimizer._alive if o._concerned(self)]
        if not others and not self._collects(scale) and all(m.is_bare for m in self.models):
            scale.backward(loss, retain_graph)
            self._is_bare = not self._begun
            self._used.setdefault(scale)
            return
        for one in (self, *others):
            one._is_bare = False
        everyone = [one for one in (self, *others) if one._collects(scale)]
        for one in everyone:
            one._put_aside()
        models = {model for one in (self, *others) for model in one.models if model.ran}
        reached, before = set[PreparedModel](), PreparedModel.reached
        # A checkpointed part is computed again in between.
        begun = [model for model in models if not model.active]
        for model in begun:
            model.begin()
        PreparedModel.reached = reached
        whole = False
        try:
            with ExitStack() as stack:
                for arithmetic in self._arithmetics(models):
                    stack.enter_context(arithmetic)
                scale.backward(loss, retain_graph)
                with torch._C.DisableTorchFunction():  # it would look at each access to `.grad`
                    for one in everyone:
                        one._collect(scale)
            whole = True
        finally:
            PreparedModel.reached = before
            for model in begun:
                model.end()
            if not whole:  # gradients of before, none of a pass that broke off
                for one in everyone:
                    one._take_back()
        for model in reached.difference(models):
            if model.trained:
                raise RuntimeError(
                    f"a model ({type(model.model).__name__}) was updated between its call and this "
                    "backward pass; call it again for this loss, or step after both"
                )
        self._begun = True
        self._reached |= reached
        for one in (self, *others):
            if one is self or one._has_gradients():
                one._used.setdefault(scale)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the master weights from their `.grad`, or skip; then move the loss scale.

        Raises:
            ValueError: a closure, which cannot be called again after a skip.
            RuntimeError: no loss was propagated by `backward` since the last step.
        """
        if closure is not None:
            raise ValueError("closure: not possible here, a skipped step could not take it back")
        if not self._used:
            raise RuntimeError(
                "no gradients: call optimizer.backward(loss), of the optimizer that mprun.prepare "
                "returned, in place of loss.backward() (or of a GradScaler)"
            )
        if self._is_bare:
            # No gradient was scaled, checked or cast, and no other model was reached.
            self._inner_may_step = True
            try:
                self.last = self.engine.step()
            finally:
                self._inner_may_step = False
            self.steps += 1
            for model in self.models:
                model.note_update()
            if self._turns.shared:
                self._turns.end(self)
            else:
                self.scale.update()
            self._used.clear()
            self._is_bare = False
            if self.engine.tables:
                self._forget_rows()
            return
        gradients = self.gradients
        if gradients.collects:
            gradients.values[: len(gradients.updated)] = [
                None if updated.grad is None else updated.grad.to(dtype)
                for updated, dtype in zip(gradients.updated, gradients.dtypes, strict=False)
            ]
        self._inner_may_step = True
        try:
            self.last = self.engine.step()
        finally:
            self._inner_may_step = False
        self.steps += 1
        found_inf = gradients.found_inf if gradients.skips else None
        for scale, grad_max in self._used.items():
            if scale.skips_nonfinite:
                scale.record(gradients.found_inf, grad_max)
        for model in self.models:
            model.end_step(found_inf)
            model.note_update()
        if self._reached:
            for model in self._reached.difference(self.models):
                model.end_step(found_inf)
        for scale in self._used:
            (self._turns if scale is self.scale else _turns_of(scale)).end(self)
        self._forget()
        self._forget_rows()
        if not self._told:
            self._told = True
            self._check_honoured()

    def _forget_rows(self) -> None:
        for table in self.engine.tables.values():
            table.gathered = None

    def state_dict(self) -> dict[str, Any]:
        """That of `inner`, which any torch optimizer of its kind loads, with the loss scale."""
        saved = self.inner.state_dict() | {"loss_scale": self.scale.state_dict()}
        narrow = self.engine.narrow
        return saved if narrow is None else saved | {"narrow": narrow.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Of `state_dict`, or of a plain torch optimizer: then the loss scale stays as it is."""
        state = dict(state_dict)
        scale, counter = state.pop("loss_scale", None), state.pop("narrow", None)
        narrow = self.engine.narrow
        if narrow is None:
            self.inner.load_state_dict(state)
        else:  # torch casts a state to the dtype of its weight
            with narrow.in_fp32(None, None, stores=False):
                self.inner.load_state_dict(state)
            if counter is not None:
                narrow.load_state_dict(counter)
        if scale is not None and scale["kind"] == self.scale.kind:
            self.scale.load_state_dict(scale)

    def _concerned(self, by: PreparedOptimizer) -> bool:
        """Whether a backward pass of another one may reach its parameters."""
        return self is not by and any(model.ran for model in self.models)

    def _arithmetics(self, models: Iterable[PreparedModel]) -> list[ForwardContext]:
        """That of its own models, and those of others for dtypes that it does not have."""
        own = self.models[0].arithmetic
        known, found = set(own.half_dtypes), [own]
        for model in models:
            if not known.issuperset(model.arithmetic.half_dtypes):
                known.update(model.arithmetic.half_dtypes)
                found.append(model.arithmetic)
        return found[::-1]

    def _take_back(self) -> None:
        gradients = self.gradients
        for own, updated, value in zip(
            gradients.parameters, gradients.updated, gradients.values, strict=False
        ):
            own.grad = None
            updated.grad = value

    def _collects(self, scale: LossScale) -> bool:
        return self.engine.collects or scale.skips_nonfinite

    def _put_aside(self) -> None:
        """What `.grad` holds is unscaled; autograd would add scaled gradients to it."""
        gradients = self.gradients
        gradients.values[: len(gradients.updated)] = [own.grad for own in gradients.updated]
        if all(value is None for value in gradients.values):
            self._drop()
        for tensor in (*gradients.parameters, *gradients.updated):
            tensor.grad = None

    @torch.no_grad()
    def _collect(self, scale: LossScale) -> None:
        """Unscale and check what was propagated, add it to what was put aside."""
        gradients = self.gradients
        direct: list[Tensor | None] = []
        for own, updated in zip(gradients.parameters, gradients.updated, strict=True):
            direct.append(None if own is updated else updated.grad)
            if direct[-1] is not None and not self._warned:
                self._warned = True
                warnings.warn(_direct(updated), stacklevel=4)
        _, grad_max = gradients.collect(scale, direct)
        for updated, value in zip(gradients.updated, gradients.values, strict=False):
            updated.grad = None if value is None else value.to(updated.dtype)
        if not self._has_gradients():
            return
        before = self._used.get(scale)
        if before is not None and grad_max is not None:
            grad_max = torch.maximum(before, grad_max)
        self._used[scale] = grad_max

    def _has_gradients(self) -> bool:
        groups = self.inner.param_groups
        return any(own.grad is not None for group in groups for own in group["params"])

    def _drop(self) -> None:
        """Gradients are gone without a step. A script that steps only where they are finite would
        never let the scale move: where they overflowed it does now."""
        if self._begun:
            for scale, grad_max in self._used.items():
                if scale.skips_nonfinite:
                    scale.record(self.gradients.found_inf, grad_max)
                    (self._turns if scale is self.scale else _turns_of(scale)).end(self)
        self._forget()

    def _forget(self) -> None:
        self._begun = self._is_bare = False
        # In place: what wraps an optimizer may run its methods as those of another object.
        self._used.clear()
        self._reached.clear()
        if self.gradients.skips:
            self.gradients.found_inf.zero_()

    def _refuse_step_of_inner(self, *_: Any) -> None:
        if not self._inner_may_step:
            raise RuntimeError(
                "step() of the optimizer that was given to mprun.prepare; call that of the one "
                "that it returned"
            )

    def _check_honoured(self) -> None:
        arithmetic = self.models[0].arithmetic
        if missing := arithmetic.missing():
            raise RuntimeError(
                f"precision={arithmetic.policy.name}: no operation of the model ran in {missing}; "
                "there is nothing to compare"
            )


def _direct(weight: Tensor) -> str:
    return (
        f"a gradient reached the master weights of shape {tuple(weight.shape)} directly: what is "
        "computed with them outside of the model's calls runs in FP32, as a weight penalty should"
    )


class _Turns:
    """When a loss scale moves that several optimizers share: once each of them has stepped, and at
    the latest when one begins anew, as torch.amp.GradScaler.update does once in an iteration."""

    def __init__(self, scale: LossScale):
        self.scale = weakref.ref(scale)
        self.owners: weakref.WeakSet[PreparedOptimizer] = weakref.WeakSet()
        self.stepped: weakref.WeakSet[PreparedOptimizer] = weakref.WeakSet()
        self.shared = False

    def add(self, optimizer: PreparedOptimizer) -> None:
        self.owners.add(optimizer)
        self.shared = len(self.owners) > 1

    def begin(self, optimizer: PreparedOptimizer) -> None:
        if self.shared and optimizer in self.stepped:
            self._update()

    def end(self, optimizer: PreparedOptimizer) -> None:
        if self.shared:
            self.stepped.add(optimizer)
        if not self.shared or len(self.stepped) == len(self.owners):
            self._update()

    def _update(self) -> None:
        if self.shared:
            self.stepped.clear()
        if (scale := self.scale()) is not None:
            scale.update()


_turns: weakref.WeakKeyDictionary[LossScale, _Turns] = weakref.WeakKeyDictionary()


def _turns_of(scale: LossScale) -> _Turns:
    if scale not in _turns:
        _turns[scale] = _Turns(scale)
    return _turns[scale]

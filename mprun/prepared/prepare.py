"""`mprun.prepare`: the model and the optimizer of a user's script, in a precision mode.

    model, optimizer = mprun.prepare(model, optimizer, precision="fp16_master_scaled")
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

Both return as the same objects, and the loop stays plain torch. prepared_model.py has the
computation of a call, steps.py that of a step.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mprun.precision.forward_context import ForwardContext, why_no_lstm, why_unsupported
from mprun.precision.loss_scale import LossScale, get_loss_scale
from mprun.precision.module_dtypes import (
    chosen_dtypes,
    matching_modules,
    those_that_match,
    uncastable,
)
from mprun.precision.policy import (
    DTYPE_NAMES,
    DTYPES,
    PrecisionPolicy,
    get_policy,
    pin_products,
    usual_scaler,
    why_no_switch,
)
from mprun.precision.scaled_attention import refuse_hidden
from mprun.precision.scaled_linear import chosen_layers
from mprun.precision.torch_update import held_by
from mprun.prepared import passes
from mprun.prepared.kept_state import refuse_cast_codes
from mprun.prepared.optimizers import base_of, install_hooks, take_over
from mprun.prepared.prepared_model import PreparedModel
from mprun.prepared.scaling import Scaling
from mprun.prepared.shards import (
    FSDP1,
    is_fsdp1,
    is_sharded,
    keeps_half,
    say,
    why_not_sharded,
)
from mprun.torch_private import UNCOMPILED, look_again

_TOGETHER = "give both to one call, mprun.prepare([one, other], ...)"

Model = TypeVar("Model", bound=nn.Module | Sequence[nn.Module])
Opt = TypeVar("Opt", bound=Optimizer | Sequence[Optimizer])


class Options(TypedDict, total=False):
    """The options of `prepare`."""

    scaler: str | LossScale | None
    overrides: Mapping[str, str | torch.dtype] | None
    native: bool


@overload
def prepare(
    model: Model,
    optimizer: None = None,
    precision: str | PrecisionPolicy = ...,
    **options: Unpack[Options],
) -> Model: ...
@overload
def prepare(
    model: Model,
    optimizer: Opt,
    precision: str | PrecisionPolicy = ...,
    **options: Unpack[Options],
) -> tuple[Model, Opt]: ...


def prepare(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    precision: str | PrecisionPolicy = "fp16_master_scaled",
    *,
    scaler: str | LossScale | None = None,
    overrides: Mapping[str, str | torch.dtype] | None = None,
    native: bool = False,
) -> Any:
    """Put a model and its optimizers into a precision mode, in place.

    The function returns the objects that you pass. From outside, the model looks unchanged: its
    parameters are FP32 leaf tensors, its gradients are unscaled FP32 tensors, and its inputs and
    outputs are FP32. With a loss scale, a non-finite gradient makes every optimizer of the model
    skip the step, and the scale changes by its rule.

    If gradients are enabled, the model computes in the precision mode, even after `model.eval()`
    (as for frozen BatchNorm). If gradients are disabled, the model computes in FP32 after
    `model.eval()`.

    On a CPU, mprun emulates 16-bit arithmetic so that results are rounded as on a GPU (see
    "Precision modes" in the documentation).

    Args:
        model: a model in FP32, on its device, or a list of several. The model may be compiled. On
            several processes, wrap the model in DistributedDataParallel or shard it by
            `fully_shard`, before or after this call.
        optimizer: an optimizer of torch or a subclass, before its first step or with a loaded
            state; or a list of several. Optimizers that are created later for the model's
            parameters are included. Pass None if there is no optimizer yet.
        precision: name of a mode ("fp32", "fp16_naive", "fp16_master", "amp", ...) or a policy.
        scaler: name of a loss scaler ("none", "static", "dynamic", "apex", ...), or a `LossScale`,
            which several calls may share. With `scaler=None`, a mode that is given by name
            uses its default scaler, and a policy uses none.
        overrides: maps a glob pattern over module names to the dtype ("fp32") in which these
            modules compute.
        native: whether a CPU uses torch's 16-bit kernels instead of the emulation.

    Returns: The passed (model, optimizer); without an optimizer, only the model.

    Raises:
        ValueError: An argument is wrong; the message names it, the error and the allowed values.
    """
    given = _listed("model", model, nn.Module)
    models = [_inside(one) for one in given]
    optimizers = [] if optimizer is None else _listed("optimizer", optimizer, Optimizer)
    policy = get_policy(precision) if isinstance(precision, str) else precision
    if not isinstance(policy, PrecisionPolicy):
        raise ValueError(
            f"precision={precision!r}: must be the name of a mode, or a policy; "
            "mprun.precision.get_policy(NAME, FOLDER) loads your own file"
        )
    device = _device_of(models)
    dtypes = _dtypes(models, overrides or {})
    for one in models:
        _refuse_unpreparable(one)
    together = (_together(those, dtypes) for those in _sharing(models))
    own = [(one, uncastable(one, policy) | chosen) for one, chosen in together]
    _check(own, policy, device, native)
    outer = [getattr(one, UNCOMPILED, one) for one in given]
    if keeps_half(policy) and any(isinstance(one, DistributedDataParallel) for one in outer):
        raise ValueError(
            f"model: is a DistributedDataParallel, but precision={policy.name} changes the dtype "
            "of its parameters; prepare the module inside it first, then put "
            "DistributedDataParallel around that"
        )
    known = {id(parameter) for model in models for parameter in model.parameters()}
    if any(known.isdisjoint(map(id, held_by(each))) for each in optimizers):
        raise ValueError(
            "optimizer: contains no parameter of the model; build it from model.parameters() of "
            "the model that you prepare"
        )
    for each in optimizers:
        refuse_cast_codes(each)
    if scaler is None:
        scaler = usual_scaler(policy.name) if isinstance(precision, str) else "none"
    scale = _scale_of(scaler, device)
    pin_products(policy.fp32_math)
    forward_context = ForwardContext(policy, device, native=native, overrides=dtypes.values())
    for one, overrides in own:
        say(PreparedModel(one, forward_context, scale, overrides).stays)
    for part in {part for one in given for part in one.modules()}:
        look_again(part)
    install_hooks()
    for each in map(base_of, optimizers):
        take_over(each, scale)
    return model if optimizer is None else (model, optimizer)


def switch(
    model: nn.Module | Sequence[nn.Module], precision: str | PrecisionPolicy = "bf16_master"
) -> None:
    """Put a prepared model into another mode between two steps, so that its next call computes in
    this mode.

    The weights (FP32 in both modes), BatchNorm's statistics, the optimizer's state, the loss scale
    and the counters of random bits keep their values. The overrides of modules stay in force. On
    several processes, every process must call this function after the same step.

    Args:
        model: the model that was passed to `prepare`, or a list of several. A wrapper of the model,
            such as DistributedDataParallel, is accepted, too.
        precision: name of a mode, or a policy.

    Raises: ValueError: The model is not prepared, or its training cannot continue in the new mode.
    """
    policy = get_policy(precision) if isinstance(precision, str) else precision
    if not isinstance(policy, PrecisionPolicy):
        raise ValueError(f"precision={precision!r}: must be the name of a mode, or a policy")
    given = _listed("model", model, nn.Module)
    inner = {_inside(one) for one in given}
    found = sorted((own for own in passes.alive if own.roots & inner), key=lambda own: own.number)
    if not inner <= {root for own in found for root in own.roots} or not all(
        own.model in inner or own.roots - {own.model} <= inner for own in found
    ):
        raise ValueError(
            "model: was not passed to mprun.prepare; if models share a part, pass all of them "
            "together"
        )
    usual = usual_scaler(policy.name) if isinstance(precision, str) else "none"
    for own in found:
        context, reason = own.forward_context, why_no_switch(own.policy, policy)
        if usual != "none" and own.scale is None:
            reason = f"needs a loss scale, which goes on; mprun.prepare(..., scaler={usual!r})"
        if reason is not None:
            raise ValueError(f"precision={policy.name!r}: {reason}")
        _check([(own.model, own.overrides)], policy, context.device, context.native)
    pin_products(policy.fp32_math)
    dtypes = [dtype for own in found for dtype in own.overrides.values()]
    before = found[0].forward_context
    context = ForwardContext(policy, before.device, native=before.native, overrides=dtypes)
    for own in found:
        own.switch(context)
        say(own.stays)
    for part in {part for one in given for part in one.modules()}:
        look_again(part)


def _scale_of(scaler: str | LossScale, device: torch.device) -> LossScale:
    """Return a loss scale by name, or a given one if it is on the model's device."""
    scale = scaler if isinstance(scaler, LossScale) else get_loss_scale(scaler, device)
    if scale.scale.device.type != device.type:
        raise ValueError(f"scaler: is on {scale.scale.device}, must be on {device} like the model")
    if isinstance(scaler, str):
        Scaling.of(scale).name = scaler
    return scale


def _inside(model: nn.Module) -> nn.Module:
    """Return the module inside objects of torch.compile and DistributedDataParallel."""
    inside = getattr(model, UNCOMPILED, model)
    if isinstance(inside, DistributedDataParallel):
        inside = inside.module
    return model if inside is model else _inside(inside)


def _listed(name: str, given: Any, kind: type) -> list[Any]:
    """Return one or several models or optimizers as a list."""
    several = isinstance(given, Sequence) and not isinstance(given, kind)
    found = [*given] if several else [given]
    wanted = f"torch.{'optim' if kind is Optimizer else 'nn'}.{kind.__name__}"
    for one in found:
        if not isinstance(one, kind):
            swapped = isinstance(one, (nn.Module, Optimizer))
            order = "; the order is prepare(model, optimizer)" if swapped else ""
            raise ValueError(f"{name}: is a {type(one).__name__}, must be a {wanted}{order}")
    if not found:
        raise ValueError(f"{name}: is an empty list, must contain a {wanted}")
    return found


def _device_of(models: Sequence[nn.Module]) -> torch.device:
    """Return the one device of all parameters."""
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
    """Return pattern -> dtype; each pattern matches in at least one of the models."""
    found = {}
    for pattern, name in overrides.items():
        dtype = DTYPES.get(name) if isinstance(name, str) else name
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"overrides[{pattern!r}]={name!r}: must be one of {', '.join(DTYPES)}")
        if not any(those_that_match(model, [pattern]) for model in models):
            matching_modules(models[0], pattern, "overrides")
        found[pattern] = dtype
    return found


def _sharing(models: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the models in groups, each of those that share a module or a parameter."""
    groups: list[tuple[set[int], list[nn.Module]]] = []
    for model in models:
        parts = {*map(id, model.modules()), *map(id, model.parameters())}
        joined = [group for group in groups if group[0] & parts]
        groups = [group for group in groups if not group[0] & parts]
        of_all = parts.union(*(known for known, _ in joined))
        groups.append((of_all, [*(one for _, those in joined for one in those), model]))
    return [those for _, those in groups]


def _together(
    models: Sequence[nn.Module], dtypes: Mapping[str, torch.dtype]
) -> tuple[nn.Module, dict[str, torch.dtype]]:
    """Return one model that holds those that share something, and the overrides of its modules.

    What they share then has one cast, one gradient and one step.
    """
    if len(models) == 1:
        return models[0], {own: dtypes[own] for own in those_that_match(models[0], dtypes)}
    pairs = (
        (own, n) for own in dtypes for n, one in enumerate(models) if those_that_match(one, [own])
    )
    return nn.ModuleList(models), {f"{n}.{own}": dtypes[own] for own, n in pairs}


def _check(
    prepared: Sequence[tuple[nn.Module, Mapping[str, torch.dtype]]],
    policy: PrecisionPolicy,
    device: torch.device,
    native: bool,
) -> None:
    """Raise ValueError for models that cannot be in this mode, before anything is changed."""
    for model, _ in prepared:
        if any(map(is_sharded, model.modules())) and (reason := why_not_sharded(policy)):
            raise ValueError(reason)
    if policy.reduce_dtype is not None:
        raise ValueError(
            f"precision={policy.name!r}: sums gradients in {policy.reduce_dtype} (reduce_dtype), "
            "which only the `mprun` command does; in a script, DistributedDataParallel sums them"
        )
    reason = why_unsupported(
        policy, device, [dtype for _, own in prepared for dtype in own.values()]
    )
    modules = [module for model, _ in prepared for module in model.modules()]
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    if reason is None and recurrent and (device.type == "cuda" or native):
        projected = any(layer.proj_size for layer in recurrent)
        reason = why_no_lstm(policy, device, projected)
    if reason is not None:
        raise ValueError(f"precision={policy.name!r}: {reason}")
    for model, own in prepared:
        try:
            if policy.attention is not None:
                refuse_hidden(model, policy.attention)
            if policy.matmul is not None:
                chosen_layers(model, policy.matmul, chosen_dtypes(model, own, "overrides"))
        except ValueError as error:
            raise ValueError(
                f"precision={policy.name!r}: {type(model).__name__}: {error}"
            ) from error


def _refuse_unpreparable(model: nn.Module) -> None:
    """Raise ValueError unless it is a plain FP32 module; say what to do instead."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "the model is a ScriptModule, whose arithmetic is fixed; pass the nn.Module"
        )
    for name, module in model.named_modules():
        if is_fsdp1(module):
            raise ValueError(f"{name or 'the model'}: {FSDP1}")
        several = len(module.device_ids) > 1 if isinstance(module, nn.DataParallel) else False
        if several or isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}; prepare the module inside "
                "it first, then put DistributedDataParallel around that"
            )
    _refuse_prepared(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(f"{name} is lazy; run a batch through the model before mprun.prepare")
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            others = {id(own) for known in passes.alive for own in known.model.parameters()}
            cure = "build the model in float32, precision= casts it"
            if id(parameter) in others:
                cure = f"a prepared model has it, too; {_TOGETHER}"
            raise ValueError(f"{name} is {parameter.dtype}; {cure}")


def _refuse_prepared(model: nn.Module) -> None:
    """Raise ValueError if a prepared model has a module of this one."""
    if not _prepared_with(model):
        return
    gc.collect()  # a model is in circles: those that the script has dropped go here
    for name, module, whole in _prepared_with(model):
        if module is model:
            raise ValueError("the model is already prepared; build a new model to prepare it again")
        kind = type(whole).__name__
        raise ValueError(
            f"{name} is a part of a {kind} that is already prepared; {_TOGETHER}, or build a new "
            "one"
        )


def _prepared_with(model: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    """Return name and module of each that it shares with a prepared model, and that model."""
    of = {module: known.model for known in passes.alive for module in known.model.modules()}
    return [(name, own, of[own]) for name, own in model.named_modules() if own in of]

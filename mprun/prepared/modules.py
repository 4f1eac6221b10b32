"""The modules of a model in a mode: the dtype in which each computes, and the function that does.

Metrics stay as they are: they count results of other modules. A loss that is a part of the model is
none of it: between calls it is FP32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from mprun.precision.delayed_scaling import DelayedScaling
from mprun.precision.forward_context import ForwardContext
from mprun.precision.module_dtypes import cast_around_modules, cast_tree, chosen_dtypes, dtype_of
from mprun.precision.recurrent import own_recurrent
from mprun.precision.scaled_attention import refuse_hidden
from mprun.precision.scaled_linear import install
from mprun.precision.uncast import what_stays
from mprun.prepared.border import Forward
from mprun.prepared.shards import keeps_half, refuse_cast, refuse_spread
from mprun.prepared.tensors import Part
from mprun.torch_private import Loss, apply_to_tensors, children_of, parameters_of


class InMode(NamedTuple):
    """A model's modules, put into the mode: those that compute in it have a `forward` of their own.

    plain: the instance's `forward` before; None: the method of its class. delayed: the scales of
        products, of delayed scaling alone. stays: a line on weights of which no product is cast.
    """

    parts: list[Part]
    plain: dict[nn.Module, Any]
    delayed: DelayedScaling | None
    stays: str | None


def put_in_mode(
    model: nn.Module,
    forward_context: ForwardContext,
    overrides: Mapping[str, torch.dtype],
    key: str,
    changes: bool,
) -> InMode:
    """Set the dtype in which each module computes, and its `forward`.

    key: what names the overrides in messages. changes: the mode computes otherwise than torch.
    """
    policy, delayed = forward_context.policy, None
    stays: str | None = None
    metrics = {m for one in model.modules() if _is_metric(one) for m in one.modules()}
    losses = {m for m in model.modules() if isinstance(m, Loss)}
    named = {name: m for name, m in model.named_modules() if m not in metrics}
    plain: dict[nn.Module, Any] = {}
    for module in named.values():
        known = module.__dict__.pop("forward", None)
        plain[module] = known.plain if isinstance(known, Forward) else known
        if plain[module] is not None:
            module.__dict__["forward"] = plain[module]
    chosen = chosen_dtypes(model, overrides, key)
    dtypes = {
        m: torch.float32 if m in losses else dtype_of(name, m, policy, chosen)
        for name, m in named.items()
    }
    if keeps_half(policy):
        for module, dtype in dtypes.items():
            apply_to_tensors(module, functools.partial(cast_tree, dtype=dtype), recurse=False)
    if (master_dtype := policy.rounded_masters) is not None:
        round_masters(dtypes, master_dtype)
    if changes:
        own_recurrent(model)
        if policy.attention is not None:
            refuse_hidden(model, policy.attention)
        if policy.matmul is not None:
            stays = what_stays(model, policy, chosen)
            counted = forward_context.calls, forward_context.unmet
            delayed = install(model, policy.matmul, chosen, policy.name, *counted)
        cast_around_modules(model, policy, chosen)
        for module in metrics | losses:
            module.__dict__.pop("forward", None)
            if plain.get(module) is not None:
                module.__dict__["forward"] = plain[module]
    parts = [(m, dtype, tuple(children_of(m).values())) for m, dtype in dtypes.items()]
    return InMode(parts, plain, delayed, stays)


@torch.no_grad()
def round_masters(dtypes: Mapping[nn.Module, torch.dtype], master_dtype: torch.dtype) -> None:
    """Round the FP32 parameters of modules that compute in 16 bits to numbers of `master_dtype`."""
    for module, dtype in dtypes.items():
        for own in parameters_of(module).values():
            if own is not None and dtype.itemsize == 2 and own.dtype is torch.float32:
                own.copy_(own.to(master_dtype))


def entries(model: nn.Module, modules: Iterable[nn.Module], outermost: bool) -> list[nn.Module]:
    """Return the modules whose calls are intercepted: all, or the outermost callable ones."""
    if not outermost:
        return [m for m in modules if not isinstance(m, Loss)]
    found, todo = [model], [model]
    while todo:
        module = todo.pop()
        if module is not model and not _is_metric(module):
            found.append(module)
        # A trainer calls another method; a module list has no forward.
        if type(module).forward is nn.Module.forward or hasattr(module, "training_step"):
            todo += module.children()
    return found


def _is_metric(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__)


def refuse_changed(module: nn.Module, whole: Any) -> None:
    """Raise RuntimeError if a parameter of a module of `whole` is not as it was prepared."""
    for name, own in module.named_parameters(recurse=False):
        refuse_spread(type(module).__name__, name, own)
        is_half = own.is_floating_point() and own.dtype is not torch.float32
        if is_half and not whole.stores_half:
            if whole.is_sharded:
                refuse_cast(type(module).__name__, name, own)
            refuse_moved(own, whole.device_type, whole.dtype)


def refuse_moved(now: Tensor, device_type: str, dtype: torch.dtype) -> NoReturn:
    """Raise RuntimeError: a model has another device or dtype than where it was prepared."""
    raise RuntimeError(
        f"the model was prepared on {device_type} in {dtype} and is now on {now.device.type} in "
        f"{now.dtype}; move and cast it before mprun.prepare. The mode decides on the dtype of "
        "each operation"
    )

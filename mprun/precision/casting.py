"""Put a model into a policy's dtypes, with chosen modules kept in another one.

Models are written in FP32 terms; here each parameter gets its dtype, and a module that computes
in another dtype than its neighbours gets a cast in front of and behind its `forward`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_map

from mprun.precision.policy import PrecisionPolicy

# _NormBase: batch and instance norm of every dimension.
NORM_LAYERS = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm)


@dataclass(frozen=True, slots=True)
class CastModel:
    """A model in its policy's dtypes.

    masters: for each parameter that was rounded and has a master copy, its value before rounding
    in the policy's master_dtype, by parameter name. The optimizer made from it updates them in
    place.
    """

    module: nn.Module
    policy: PrecisionPolicy
    masters: dict[str, Tensor]


def cast_model(
    model: nn.Module, policy: PrecisionPolicy, overrides: Mapping[str, torch.dtype] | None = None
) -> CastModel:
    """Cast `model` in place to the policy's dtypes and return it with its FP32 master weights.

    overrides: glob pattern over module names -> dtype in which the matching modules, and what is
    inside them, keep their parameters and compute; the last matching pattern counts. Norm layers
    inside follow only an FP32 override. Under autocast parameters stay FP32 and the override
    changes the arithmetic alone. Raises ValueError for a pattern that matches no module.
    """
    chosen = _match(model, overrides or {})
    originals = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        dtype = _dtype_of(name, module, policy, chosen)
        if policy.autocast_dtype is None:
            _cast_own_tensors(module, dtype)
    for name, module in model.named_modules():
        around = _inherited(_parent(name), chosen) or policy.autocast_dtype or policy.param_dtype
        if name in chosen and chosen[name] is not _inherited(_parent(name), chosen):
            _compute_in(module, chosen[name], around, policy)
        elif isinstance(module, NORM_LAYERS):
            _wrap_norm(module, _dtype_of(name, module, policy, chosen), around, policy)
    masters = {}
    if policy.master_dtype is not None:
        for name, parameter in model.named_parameters():
            if parameter.dtype.itemsize < policy.master_dtype.itemsize:
                masters[name] = originals[name].to(policy.master_dtype)
    return CastModel(model, policy, masters)


def fp32_copy(
    build_model: Callable[[], nn.Module], cast: CastModel, masters: Mapping[str, Tensor]
) -> nn.Module:
    """A fresh FP32 model with the master weights (where there are some) and buffers of `cast`.

    Used for evaluation, so that the metric measures what was learned. Costs the memory of one
    FP32 model while it is alive.
    """
    source = {**dict(cast.module.state_dict()), **masters}
    device = next(cast.module.parameters()).device
    with torch.device("meta"):
        model = build_model()
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(source[name])
    return model


def _match(model: nn.Module, overrides: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    names = [name for name, _ in model.named_modules() if name]
    chosen = {}
    for pattern, dtype in overrides.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            close = get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(
                f"precision.overrides: {pattern!r} matches no module; some modules: "
                f"{', '.join(close)}"
            )
        chosen.update(dict.fromkeys(matched, dtype))
    return chosen


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _inherited(name: str, chosen: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """The override of the module `name` or of the nearest module around it."""
    while name:
        if name in chosen:
            return chosen[name]
        name = _parent(name)
    return None


def _dtype_of(name, module, policy: PrecisionPolicy, chosen) -> torch.dtype:
    override = _inherited(name, chosen)
    if isinstance(module, NORM_LAYERS) and name not in chosen:
        # A kernel takes 16-bit norm parameters only together with inputs of the same format.
        both_16_bits = override is not None and policy.norm_dtype.itemsize == 2
        return override if override is torch.float32 or both_16_bits else policy.norm_dtype
    return override or policy.param_dtype


def _cast_own_tensors(module: nn.Module, dtype: torch.dtype) -> None:
    # nn.Module._apply keeps the identity of the parameters and lets nn.LSTM rebuild its flat
    # weights; without recursion, because each submodule has a dtype of its own.
    module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)


def _compute_in(
    module: nn.Module, dtype: torch.dtype, around: torch.dtype, policy: PrecisionPolicy
) -> None:
    """Give the module inputs in `dtype`, and its neighbours outputs in theirs, `around`."""
    forward = module.forward
    autocast = policy.autocast_dtype is not None and dtype.itemsize == 2
    # Neighbours under autocast cast their inputs themselves.
    casts_outputs = policy.autocast_dtype is None or around is torch.float32

    def forward_in_dtype(*args, **kwargs):
        device = _device_type(args, kwargs)
        with torch.autocast(device, dtype=dtype if autocast else None, enabled=autocast):
            inputs = (args, kwargs) if autocast else _cast((args, kwargs), dtype)
            outputs = forward(*inputs[0], **inputs[1])
        return _cast(outputs, around) if casts_outputs else outputs

    module.forward = forward_in_dtype


def _wrap_norm(
    module: nn.Module, dtype: torch.dtype, around: torch.dtype, policy: PrecisionPolicy
) -> None:
    # BatchNorm takes half activations with FP32 parameters and statistics as it is: cuDNN's and
    # the CPU's kernels read half, compute in FP32 and store half (paper section 3.3).
    if not isinstance(module, _BatchNorm) and dtype is not around:
        _compute_in(module, dtype, around, policy)


def _cast(tree, dtype: torch.dtype):
    return tree_map(
        lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, tree
    )


def _device_type(args, kwargs) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
    return "cpu"

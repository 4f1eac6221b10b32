"""Put a model into a policy's dtypes, with chosen modules kept in another one.

Models are written in FP32 terms; here each parameter gets its dtype, and a module that computes
in another dtype than its neighbours gets a cast in front of and behind its `forward`. Which modules
are meant is said in glob patterns over their names, for `precision.overrides` as for every other
setting.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_map

from mprun.precision.policy import PrecisionPolicy
from mprun.precision.recurrent import own_recurrent
from mprun.precision.row_updates import row_tables


def _names_like(model: nn.Module, pattern: str) -> list[str]:
    return [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]


def those_that_match(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The patterns that match a module of the model."""
    return [pattern for pattern in patterns if _names_like(model, pattern)]


def matching_modules(model: nn.Module, pattern: str, key: str) -> list[str]:
    """Names of the modules that `pattern` matches; ValueError, naming `key`, if there are none."""
    matched = _names_like(model, pattern)
    if not matched:
        names = _names_like(model, "*")
        close = get_close_matches(pattern, names, n=3, cutoff=0.0)
        raise ValueError(f"{key}: {pattern!r} matches no module; some modules: {', '.join(close)}")
    return matched


def matching_parameters(model: nn.Module, patterns: Iterable[str], key: str) -> set[str]:
    """Names of all parameters in the modules that match, and in what is inside these modules.

    Without any pattern all parameters.

    Raises:
        ValueError: a pattern that matches no module.
    """
    names = [name for name, _ in model.named_parameters()]
    patterns = list(patterns)
    if not patterns:
        return set(names)
    around = {f"{m}." for pattern in patterns for m in matching_modules(model, pattern, key)}
    return {name for name in names if any(name.startswith(prefix) for prefix in around)}


# _NormBase: batch and instance norm of every dimension.
NORM_LAYERS = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm)
# Module name -> dtype of its override.
_Chosen = Mapping[str, torch.dtype]


@dataclass(frozen=True, slots=True)
class CastModel:
    """A model in its policy's dtypes.

    Attributes:
        masters: for each parameter that was rounded and has a master copy, its value before
            rounding in the policy's master_dtype, by parameter name. The optimizer made from it
            updates them in place.
    """

    module: nn.Module
    policy: PrecisionPolicy
    masters: dict[str, Tensor]


def cast_model(
    model: nn.Module, policy: PrecisionPolicy, overrides: Mapping[str, torch.dtype] | None = None
) -> CastModel:
    """Cast `model` in place to the policy's dtypes and return it with its FP32 master weights.

    A row table (mprun.precision.row_updates) has no copy in a policy with master weights: it stays
    in FP32, and the rows gathered from it come in the dtype of the parameters.

    Args:
        overrides: glob pattern over module names -> dtype in which the matching modules, and what
            is inside them, keep their parameters and compute; the last matching pattern counts.
            Norm layers inside follow only an FP32 override. Under autocast parameters stay FP32 and
            the override changes the arithmetic alone.

    Raises:
        ValueError: a pattern that matches no module, and the name of a module that cannot compute
            in that dtype.
    """
    overrides = overrides or {}
    chosen: dict[str, torch.dtype] = {}
    for pattern, dtype in overrides.items():
        chosen |= dict.fromkeys(matching_modules(model, pattern, "precision.overrides"), dtype)
    _refuse_without_effect(model, policy, chosen, overrides)
    # Before they are rounded; in a mode without masters nothing is kept.
    originals: dict[str, Tensor] = {}
    if policy.master_dtype is not None:
        originals = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if policy.autocast_dtype is None:
        _cast_tensors(model, policy, chosen)
    own_recurrent(model)
    _cast_around_modules(model, policy, chosen)
    masters = {}
    for name, parameter in model.named_parameters():
        wanted = policy.master_dtype
        if wanted is not None and parameter.dtype.itemsize < wanted.itemsize:
            masters[name] = originals[name].to(wanted)
    return CastModel(model, policy, masters)


def _cast_tensors(model: nn.Module, policy: PrecisionPolicy, chosen: _Chosen) -> None:
    """Parameters and buffers of each module, and the rows that its table will give."""
    tables = row_tables(model)
    for name, module in model.named_modules():
        dtype = _dtype_of(name, module, policy, chosen)
        if name in tables:
            tables[name].row_dtype = dtype
        if name not in tables or policy.master_dtype is None:
            # nn.Module._apply keeps the identity of the parameters and lets nn.LSTM rebuild its
            # flat weights; without recursion, because each submodule has a dtype of its own.
            module._apply(partial(_cast, dtype=dtype), recurse=False)


def _cast_around_modules(model: nn.Module, policy: PrecisionPolicy, chosen: _Chosen) -> None:
    """Casts in front of and behind the modules that compute in another dtype than around them."""
    for name, module in model.named_modules():
        if getattr(module, "computes_in_fp32", False):
            continue  # whatever is around it, and its results are losses
        outer = _inherited(_parent(name), chosen)
        around = outer or policy.autocast_dtype or policy.param_dtype
        if name in chosen and chosen[name] is not outer:
            _compute_in(module, chosen[name], around, policy)
        elif isinstance(module, NORM_LAYERS) and not isinstance(module, _BatchNorm):
            # BatchNorm takes half activations with FP32 parameters and statistics as it is: cuDNN's
            # and the CPU's kernels read half, compute in FP32 and store half (section 3.3).
            dtype = _dtype_of(name, module, policy, chosen)
            if dtype is not around:
                _compute_in(module, dtype, around, policy)


def _refuse_without_effect(
    model: nn.Module, policy: PrecisionPolicy, chosen: _Chosen, overrides: _Chosen
) -> None:
    """A module asked for by its name that stays in FP32 would make an arm that differs in nothing.

    A pattern with a wildcard means the other modules that it matches.
    """
    for name, dtype in chosen.items():
        module = model.get_submodule(name)
        fixed = getattr(module, "computes_in_fp32", False)
        if policy.autocast_dtype is not None:
            fixed = fixed or getattr(module, "is_row_table", False)
        if fixed and dtype is not torch.float32 and name in overrides:
            asked = str(dtype).removeprefix("torch.")
            raise ValueError(
                f"precision.overrides.{name}={asked}: computes in FP32 in "
                f"{policy.name} (allowed: fp32)"
            )


def fp32_copy(
    build_model: Callable[[], nn.Module], cast: CastModel, masters: Mapping[str, Tensor]
) -> nn.Module:
    """A fresh FP32 model with the master weights (where there are some) and buffers of `cast`.

    Used for evaluation, so that the metric measures what was learned. Costs the memory of one
    FP32 model while it is alive, without row tables: these are shared with `cast` and must not be
    written to (rows of a 16-bit table are cast as they are read).
    """
    source = {**dict(cast.module.state_dict()), **masters}
    # A weight that is used in several places has as many names, and one master copy.
    names = {id(parameter): name for name, parameter in cast.module.named_parameters()}
    for name, parameter in cast.module.named_parameters(remove_duplicate=False):
        source[name] = masters.get(names[id(parameter)], parameter)
    device = next(cast.module.parameters()).device
    with torch.device("meta"):
        model = build_model()
    shared = row_tables(cast.module)
    for name, module in model.named_modules():
        if name in shared:
            module.share(shared[name])
        elif any(t.is_meta for t in (*module.parameters(False), *module.buffers(False))):
            module.to_empty(device=device, recurse=False)
        else:  # built with values: buffers outside the state keep theirs
            module._apply(lambda tensor: tensor.to(device), recurse=False)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if _parent(name) not in shared:
                tensor.copy_(source[name])
    return own_recurrent(model)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _inherited(name: str, chosen: _Chosen) -> torch.dtype | None:
    """The override of the module `name` or of the nearest module around it."""
    while name:
        if name in chosen:
            return chosen[name]
        name = _parent(name)
    return None


def _dtype_of(
    name: str, module: nn.Module, policy: PrecisionPolicy, chosen: _Chosen
) -> torch.dtype:
    override = _inherited(name, chosen)
    if isinstance(module, NORM_LAYERS) and name not in chosen:
        # A kernel takes 16-bit norm parameters only together with inputs of the same format.
        both_16_bits = policy.norm_dtype.itemsize == 2
        follows = override is torch.float32 or both_16_bits
        return override if override is not None and follows else policy.norm_dtype
    return override or policy.param_dtype


def _compute_in(
    module: nn.Module, dtype: torch.dtype, around: torch.dtype, policy: PrecisionPolicy
) -> None:
    """Give the module inputs in `dtype`, and its neighbours outputs in theirs, `around`."""
    forward = module.forward
    autocast = policy.autocast_dtype is not None and dtype.itemsize == 2
    # Neighbours under autocast cast their inputs themselves.
    casts_outputs = policy.autocast_dtype is None or around is torch.float32

    def forward_in_dtype(*args, **kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        with torch.autocast(device, dtype=dtype if autocast else None, enabled=autocast):
            inputs = (args, kwargs) if autocast else _cast((args, kwargs), dtype)
            outputs = forward(*inputs[0], **inputs[1])
        return _cast(outputs, around) if casts_outputs else outputs

    module.forward = forward_in_dtype


def _cast(tree, dtype: torch.dtype):
    return tree_map(
        lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, tree
    )

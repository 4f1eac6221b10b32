"""Which modules a pattern means, the dtype in which each computes, and the casts around it.

Glob patterns over module names select modules, for `precision.overrides` as for other settings. A
pattern means what it matches and all that is inside. A module that is never called, such as a
`ModuleList`, has no border: the modules in it have. Its parameters follow the module around it,
which computes with them.

A name that ends with `forward` means what this function of a module computes itself, without the
modules inside: "blocks.0.attention.forward", and "forward" of the model. No module can have it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from mprun.precision.policy import PrecisionPolicy, dtype_name
from mprun.torch_private import (
    BatchNorm,
    BatchOrInstanceNorm,
    graph_task,
    holds_codes,
    tree_map,
)

NORM_LAYERS = (BatchOrInstanceNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm)
FORWARD = "forward"


class Choice(NamedTuple):
    """The override of a module.

    is_named: of a pattern that matches it, not a module around it. is_own: not of those inside.
    """

    dtype: torch.dtype
    is_named: bool
    is_own: bool = False


# Module name -> its override, of those that have one. A module with several names has the first.
Chosen = Mapping[str, Choice]


def computes(module: nn.Module) -> bool:
    """Return whether a module can be called. `ModuleList` and `ParameterDict` cannot, and torch's
    attention reads the weights of its output layer without a call."""
    is_read = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    has_none = type(module).forward is nn.Module.forward and "forward" not in vars(module)
    return not (is_read or has_none)


def called_in(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by which `module` computes: itself, or of a container the next inside."""
    if computes(module):
        return {name: module}
    children = ((f"{name}.{key}" if name else key, own) for key, own in module.named_children())
    return {key: own for child in children for key, own in called_in(*child).items()}


def _named(model: nn.Module) -> list[tuple[str, str]]:
    """Return each name of each module but the model, with the first name of the same module."""
    first = {id(module): name for name, module in model.named_modules()}
    every = model.named_modules(remove_duplicate=False)
    return [(name, first[id(module)]) for name, module in every if name]


def own_forward(module: str) -> str:
    """Return the name of what a module's `forward` computes itself."""
    return f"{module}.{FORWARD}".lstrip(".")


def _module_pattern(pattern: str) -> str | None:
    """Return the pattern of the modules whose own `forward` is meant; None: whole modules are."""
    return None if pattern.rpartition(".")[2] != FORWARD else pattern[: -len(FORWARD)].rstrip(".")


def _names_like(model: nn.Module, pattern: str) -> list[str]:
    """Return the first names of the modules that a pattern matches; "" is the model."""
    inside = _module_pattern(pattern)
    if inside == "":
        return [""]
    wanted = pattern if inside is None else inside
    return list(dict.fromkeys(own for name, own in _named(model) if fnmatchcase(name, wanted)))


def those_that_match(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the patterns that match a module of the model."""
    return [pattern for pattern in patterns if _names_like(model, pattern)]


def matching_modules(model: nn.Module, pattern: str, key: str) -> list[str]:
    """Return the modules that `pattern` matches; if none, raise a ValueError that names `key`."""
    matched = _names_like(model, pattern)
    if not matched:
        names = _names_like(model, "*")
        close = get_close_matches(pattern, names, n=3, cutoff=0.0)
        raise ValueError(f"{key}: {pattern!r} matches no module; some modules: {', '.join(close)}")
    return matched


def chosen_dtypes(
    model: nn.Module, overrides: Mapping[str, torch.dtype], key: str
) -> dict[str, Choice]:
    """Return the overrides of modules: by the last pattern that matches the module, or else the
    nearest module around it. Of a module with several names the last of these patterns counts.

    What is never called follows the module around it, see `computes`. A pattern of the own
    `forward` of modules goes before one of whole modules.

    Raises:
        ValueError: A pattern matches no module, or none that is called.
    """
    modules = dict(model.named_modules())
    order = {pattern: place for place, pattern in enumerate(overrides)}
    owns: dict[str, Choice] = {}
    for pattern in overrides:
        matched = matching_modules(model, pattern, key)
        is_own = _module_pattern(pattern) is not None
        called = [name for name in matched if computes(modules[name])]
        if not (called if is_own else any(called_in(name, modules[name]) for name in matched)):
            _refuse_uncalled(modules, matched[0], f"{key}: {pattern!r}")
        if is_own:
            owns |= {name: Choice(overrides[pattern], True, True) for name in called}
            del order[pattern]
    # Name -> (whether a pattern matches it, the place of the last pattern), the larger counts.
    found: dict[str, tuple[bool, int]] = {}
    of_names: dict[str, tuple[bool, int]] = {"": (False, -1)}
    for name, first in _named(model):
        own = [place for pattern, place in order.items() if fnmatchcase(name, pattern)]
        outer = of_names[name.rpartition(".")[0]][1]
        of_names[name] = (True, max(own)) if own else (False, outer)
        found[first] = max(found.get(first, (False, -1)), of_names[name])
    dtypes = [*overrides.values()]
    chosen = {
        name: Choice(dtypes[place], is_named)
        for name, (is_named, place) in found.items()
        if place >= 0
    } | owns
    for name, module in modules.items():
        if not computes(module):
            chosen.pop(name, None)
            if (caller := caller_of(modules, name)) in chosen:
                chosen[name] = chosen[caller]
    return chosen


def caller_of(modules: Mapping[str, nn.Module], name: str) -> str:
    """Return the name of the nearest module around `name` that is called; "" is the model."""
    while name:
        name = name.rpartition(".")[0]
        if computes(modules[name]):
            break
    return name


def _refuse_uncalled(modules: Mapping[str, nn.Module], name: str, what: str) -> None:
    kind = type(modules[name]).__name__
    if not name:
        raise ValueError(f"{what}: the model is a {kind} whose forward is never called")
    outer = caller_of(modules, name)
    whose = f"{outer} computes with its parameters; override {outer}"
    if not outer:
        whose = f"the model itself computes with its parameters; override {FORWARD}"
    if not any(True for _ in modules[name].parameters()):
        whose = "it is empty"
    raise ValueError(f"{what} matches {name}, a {kind} whose forward is never called: {whose}")


def stays_in_fp32(module: nn.Module, policy: PrecisionPolicy) -> bool:
    """Return whether a table is read row by row, and so rows are cast instead of the whole."""
    has_rows = isinstance(module, nn.Embedding) and module.sparse
    return has_rows and policy.master_dtype is not None


def dtype_of(name: str, module: nn.Module, policy: PrecisionPolicy, chosen: Chosen) -> torch.dtype:
    """Return the dtype of the parameters and buffers of the module `name`."""
    choice = chosen.get(name)
    if getattr(module, "computes_in_fp32", False) or stays_in_fp32(module, policy):
        return torch.float32
    if isinstance(module, NORM_LAYERS) and not (choice and choice.is_named):
        # A kernel takes 16-bit norm parameters only with inputs of the same format.
        both_16_bits = policy.norm_dtype.itemsize == 2
        follows = choice is not None and (choice.dtype is torch.float32 or both_16_bits)
        return choice.dtype if choice is not None and follows else policy.norm_dtype
    return choice.dtype if choice else policy.param_dtype


class _Running:
    """The dtype of the module of one model that runs now, if it has a border; else None."""

    dtype: torch.dtype | None = None


@dataclass(eq=False)
class _Border:
    """The casts of modules that may compute in another dtype than what calls them.

    One for all of a dtype: by an object of its own a compiler would tell equal modules apart.

    dtype: they compute so. base: so does the model. autocast: the mode casts by autocast. outers:
    `running.dtype` at each one's last call in a forward pass.
    """

    dtype: torch.dtype
    base: torch.dtype
    autocast: bool
    running: _Running
    outers: dict[Callable[..., Any], torch.dtype | None] = field(default_factory=dict)


def uncastable(model: nn.Module, policy: PrecisionPolicy) -> dict[str, torch.dtype]:
    """Return the modules whose quantised weights cannot be in the mode's dtype, as overrides.

    A class of such tensors may ignore `to(dtype)`, and none takes what `module.to(dtype)` gives it.
    """
    dtype, kept = policy.param_dtype, {}
    if dtype.itemsize > 2:
        return {}
    for name, module in model.named_modules():
        for own in module.parameters(recurse=False):
            if own.is_floating_point() and holds_codes(own):
                copies = policy.master_dtype is not None
                if not copies or own.detach().to(dtype).dtype is not dtype:
                    kept[name] = own.dtype
    return kept


def cast_around_modules(model: nn.Module, policy: PrecisionPolicy, chosen: Chosen) -> None:
    """Let modules cast where they compute in another dtype than what calls them.

    Which module of an override is called from outside of it, a call itself tells: a `Sequential`
    may be called, or others may call its parts.
    """
    running, base = _Running(), policy.autocast_dtype or policy.param_dtype
    borders: dict[torch.dtype, _Border] = {}
    owns = [f"{name}." if name else "" for name, choice in chosen.items() if choice.is_own]
    for name, module in model.named_modules():
        if getattr(module, "computes_in_fp32", False) or not computes(module):
            continue  # the first: in every mode, and its results are losses
        choice, dtype = chosen.get(name), dtype_of(name, module, policy, chosen)
        if choice is None and name.startswith(tuple(owns)):
            choice = Choice(base, False)  # of the mode, whatever the module around it computes in
        if isinstance(module, BatchNorm):
            # It takes half activations with FP32 parameters and statistics as it is: cuDNN's and
            # the CPU's kernels read half, compute in FP32 and store half (section 3.3).
            casts = choice is not None and dtype is choice.dtype
        else:
            dtype = dtype if isinstance(module, NORM_LAYERS) or choice is None else choice.dtype
            casts = choice is not None or (isinstance(module, NORM_LAYERS) and dtype is not base)
        if stays_in_fp32(module, policy):
            rows = policy.param_dtype if choice is None else choice.dtype
            module.forward = partial(cast_rows, forward_of(module), rows)
        if casts:
            autocast = policy.autocast_dtype is not None
            border = borders.setdefault(dtype, _Border(dtype, base, autocast, running))
            if not name and choice is not None:  # outside of the model is FP32
                border = _Border(dtype, torch.float32, autocast, running)
            # No closure: a deep copy of the model has to compute with its own module.
            module.forward = partial(_forward_in, forward_of(module), border)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward; no bound method, by which a compiler would tell equal modules
    apart."""
    own: Callable[..., Any] | None = module.__dict__.get("forward")
    return own or partial(type(module).forward, module)


def cast_rows(forward: Callable[..., Any], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Read rows of an FP32 table and cast these alone."""
    return cast_tree(forward(*args, **kwargs), dtype)


def _forward_in(forward: Callable[..., Any], border: _Border, *args: Any, **kwargs: Any) -> Any:
    """Compute in the border's dtype; cast inputs and outputs unless the caller computes in it."""
    running = border.running
    before = outer = running.dtype
    if is_dynamo_compiling():
        pass  # which computes nothing anew by this function
    elif graph_task() == -1:
        border.outers[forward] = outer
    elif outer is None:  # a checkpoint computes it anew, without what called it
        outer = border.outers.get(forward)
    running.dtype = border.dtype
    try:
        if before is border.dtype:
            return forward(*args, **kwargs)
        return _cast_around(forward, border, outer or border.base, (args, kwargs))
    finally:
        running.dtype = before


def _cast_around(
    forward: Callable[..., Any], border: _Border, outer: torch.dtype, given: Any
) -> Any:
    args, kwargs = given
    autocast = border.autocast and border.dtype.itemsize == 2
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = tensors[0].device.type if tensors else "cpu"
    with torch.autocast(device, dtype=border.dtype if autocast else None, enabled=autocast):
        args, kwargs = given if autocast else cast_tree(given, border.dtype)
        outputs = forward(*args, **kwargs)
    # Neighbours under autocast cast their inputs themselves.
    casts = not border.autocast or outer is torch.float32
    return cast_tree(outputs, outer) if casts else outputs


def cast_tree(tree: Any, dtype: torch.dtype) -> Any:
    """Return nested values with their floating-point tensors in `dtype`."""
    return tree_map(
        lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, tree
    )


def refuse_without_effect(
    model: nn.Module, policy: PrecisionPolicy, overrides: Mapping[str, torch.dtype], key: str
) -> None:
    """Refuse an override by name of a module that stays in FP32: such an arm would not differ.

    A pattern with a wildcard may match such modules beside others. key: names the overrides.
    """
    for name, choice in chosen_dtypes(model, overrides, key).items():
        fixed = getattr(model.get_submodule(name), "computes_in_fp32", False)
        if fixed and choice.dtype is not torch.float32 and name in overrides:
            raise ValueError(
                f"{key}.{name}={dtype_name(choice.dtype)}: the module computes in FP32 in the mode "
                f"{policy.name} (allowed: fp32)"
            )

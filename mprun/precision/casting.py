"""Put a model into a policy's dtypes, with chosen modules kept in another one.

Models are written in FP32 terms; here each parameter gets its dtype, and a module that computes
in another dtype than its neighbours gets a cast in front of and behind its `forward`. Which modules
are meant is said in glob patterns over their names, for `precision.overrides` as for every other
setting.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_map

from mprun.precision.policy import PrecisionPolicy
from mprun.precision.recurrent import own_recurrent
from mprun.precision.row_updates import row_tables
from mprun.precision.scaled_products import install


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


@dataclass(slots=True)
class Swap:
    """A tensor of a module that has another form in the mode than outside of it.

    Attributes:
        place: the dictionary of the module that holds it, under `key`.
        seen, written: versions of `outside` and of `inside` when they were last the same.
    """

    place: dict[str, Any]
    key: str
    outside: Tensor
    inside: Tensor
    seen: int
    written: int


@dataclass(slots=True)
class CastModel:
    """A model in its policy's dtypes, which can also be what it was.

    Attributes:
        masters: for each parameter that was rounded and has a master copy, its value before
            rounding in the policy's master_dtype, by parameter name: the parameter itself, in whose
            place the module holds a copy. The optimizer made from it updates them in place.
        weights, buffers: all tensors with two forms; a weight used in two places is there twice.
        flat: of recurrent layers their attributes, and `flat_weights` outside and inside.
        forwards: of modules that compute otherwise in the mode their attributes, and `forward`
            outside (None: that of their class) and inside.
        in_mode: which of the two forms the module has now.
    """

    module: nn.Module
    policy: PrecisionPolicy
    masters: dict[str, Tensor]
    weights: list[Swap] = field(default_factory=list)
    buffers: list[Swap] = field(default_factory=list)
    flat: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    forwards: list[tuple[dict[str, Any], Any, Any]] = field(default_factory=list)
    in_mode: bool = True

    @property
    def has_two_forms(self) -> bool:
        """Whether `enter_mode` changes anything."""
        return any((self.weights, self.buffers, self.flat, self.forwards))

    def enter_mode(self) -> None:
        """Let the module hold what the mode computes with; copies of weights stay as they are.

        Raises:
            RuntimeError: a parameter is no longer the one that was cast.
        """
        for swap in self.weights:
            if swap.place.get(swap.key) is not swap.outside and not self.in_mode:
                raise RuntimeError(
                    f"parameter {swap.key!r} of shape {tuple(swap.outside.shape)} was replaced "
                    "after the model was prepared (by an assignment, load_state_dict(assign=True) "
                    "or functional_call); copy the values into it, or replace it before"
                )
        for swap in self.buffers:
            now = swap.outside if self.in_mode else swap.place[swap.key]
            if now is not swap.outside:
                swap.outside, swap.seen = now, -1
            if swap.seen != version(now):
                with torch.no_grad():
                    swap.inside = now.to(swap.inside.dtype, copy=True)
                swap.seen, swap.written = version(now), version(swap.inside)
        for swap in (*self.weights, *self.buffers):
            swap.place[swap.key] = swap.inside
        for attributes, _, inside in self.flat:
            attributes.update(inside)
        for attributes, _, forward in self.forwards:
            attributes["forward"] = forward
        self.in_mode = True

    def leave_mode(self) -> None:
        """Let the module be what it was: master weights, FP32 buffers, no casts."""
        for attributes, forward, _ in self.forwards:
            if forward is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = forward
        for attributes, outside, _ in self.flat:
            attributes.update(outside)
        for swap in self.weights:
            swap.place[swap.key] = swap.outside
        found = [(swap, swap.place[swap.key]) for swap in self.buffers]
        for swap, _ in found:
            swap.place[swap.key] = swap.outside
        self.in_mode = False
        for swap, now in found:  # what the module wrote into it, or put in its place
            if now is swap.inside and version(now) == swap.written:
                continue
            if now is None or now.shape != swap.outside.shape:
                swap.place[swap.key] = None if now is None else now.detach().to(swap.outside.dtype)
                continue
            with torch.no_grad():
                swap.outside.copy_(now)
                swap.seen = -1 if now.is_inference() else version(swap.outside)
            if swap.seen != -1:
                swap.inside = now.detach().to(swap.inside.dtype)
                swap.written = version(swap.inside)

    @contextmanager
    def in_fp32(self, weights: Mapping[str, Tensor] = MappingProxyType({})) -> Iterator[nn.Module]:
        """Within it the module computes in FP32: with its master weights, without any cast.

        16-bit tensors that have no FP32 form are widened, which costs their memory in FP32; row
        tables, which must not be written to, give their rows in FP32.

        Args:
            weights: by parameter name, FP32, in place of some.
        """
        before = self.in_mode
        self.leave_mode()
        tables = row_tables(self.module)
        dtypes = {name: table.row_dtype for name, table in tables.items()}
        names = {id(own): name for name, own in self.module.named_parameters()}
        held: list[tuple[dict[str, Any], str, Tensor]] = []
        flat: list[tuple[dict[str, Any], dict[str, Any]]] = []
        other: dict[int, Tensor] = {}
        for path, module in self.module.named_modules():
            if path in tables:
                tables[path].row_dtype = torch.float32
                continue
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for place, key, own in [(p, k, t) for p in places for k, t in p.items()]:
                if own is None:
                    continue
                if (name := names.get(id(own))) in weights:
                    # cuDNN's weights are moved into one buffer; others may know where these lie.
                    moves = isinstance(module, nn.RNNBase) and own.is_cuda
                    other[id(own)] = weights[str(name)].clone() if moves else weights[str(name)]
                elif id(own) not in other and _has_other_form(own):
                    # Of one layout, whatever that of the training is: kernels differ by a rounding.
                    plain = own.detach().float().contiguous()
                    other[id(own)] = plain.requires_grad_(own.requires_grad)
                if id(own) in other:
                    held.append((place, key, own))
        try:
            for place, key, own in held:
                place[key] = other[id(own)]
            for module in self.module.modules():
                if isinstance(module, nn.RNNBase) and other:
                    masters = list(module._flat_weights)
                    flat.append((module.__dict__, flat_weights(masters)))
                    own_flat = flat_weights([other.get(id(own), own) for own in masters])
                    module.__dict__.update(own_flat)
                    if any(id(own) in other for own in masters):
                        module.flatten_parameters()
            yield self.module
        finally:
            for place, key, own in held:
                place[key] = own
            for attributes, own_flat in flat:
                attributes.update(own_flat)
            for path, dtype in dtypes.items():
                tables[path].row_dtype = dtype
            if before:
                self.enter_mode()


def version(tensor: Tensor) -> int:
    """How often it was written to; inference tensors do not count."""
    return -2 if tensor.is_inference() else tensor._version


def _has_other_form(own: Tensor) -> bool:
    if not own.is_floating_point() or own.layout is not torch.strided:
        return False
    return own.dtype.itemsize < 4 or not own.is_contiguous()


def flat_weights(weights: Iterable[Any]) -> dict[str, Any]:
    """The attributes in which a recurrent layer of torch holds its weights once more.

    References to them too: without these a layer takes other weights for new ones and moves them
    into a buffer, away from where a captured graph and an optimizer know them.
    """
    weights = list(weights)
    return {
        "_flat_weights": weights,
        "_flat_weight_refs": [None if own is None else weakref.ref(own) for own in weights],
    }


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
    forwards = [(m.__dict__, m.__dict__.get("forward")) for m in model.modules()]
    cast = CastModel(model, policy, {})
    if policy.autocast_dtype is None:
        dtypes = _dtypes_of_tensors(model, policy, chosen)
        if policy.master_dtype is None:
            for module, dtype in dtypes.items():
                # Keeps the identity of the parameters and lets nn.LSTM rebuild its flat weights;
                # without recursion, because each submodule has a dtype of its own.
                module._apply(partial(_cast, dtype=dtype), recurse=False)
        else:
            _make_copies(cast, dtypes, policy.master_dtype)
    own_recurrent(model)
    if policy.products is not None:  # before the casts around modules, which go around these too
        install(model, policy.products, chosen)
    _cast_around_modules(model, policy, chosen)
    for attributes, before in forwards:
        if (now := attributes.get("forward")) is not before:
            cast.forwards.append((attributes, before, now))
    return cast


def _dtypes_of_tensors(
    model: nn.Module, policy: PrecisionPolicy, chosen: _Chosen
) -> dict[nn.Module, torch.dtype]:
    """Of parameters and buffers of each module, tables with master weights left out; sets the dtype
    of the rows that each table gives."""
    tables, found = row_tables(model), {}
    for name, module in model.named_modules():
        dtype = _dtype_of(name, module, policy, chosen)
        if name in tables:
            tables[name].row_dtype = dtype
        if name not in tables or policy.master_dtype is None:
            found[module] = dtype
    return found


def _make_copies(
    cast: CastModel, dtypes: Mapping[nn.Module, torch.dtype], master_dtype: torch.dtype
) -> None:
    """Give what is to be rounded its two forms: the parameter is the master, the module has a copy.

    A weight that is used in several places has one copy, in the dtype of the last of them.
    """
    wanted = {
        id(own): dtype
        for module, dtype in dtypes.items()
        for own in module._parameters.values()
        if own is not None and own.is_floating_point()
    }
    copies: dict[int, nn.Parameter] = {}
    for name, own in cast.module.named_parameters():
        dtype = wanted.get(id(own), own.dtype)
        if dtype.itemsize < master_dtype.itemsize and not own.is_complex():
            copies[id(own)] = nn.Parameter(own.detach().to(dtype, copy=True), own.requires_grad)
            if own.dtype is not master_dtype:
                own.data = own.data.to(master_dtype)
            cast.masters[name] = own
    for module in cast.module.modules():
        for key, weight in module._parameters.items():
            if weight is not None and id(weight) in copies:
                copy = copies[id(weight)]
                versions = weight._version, copy._version
                cast.weights.append(Swap(module._parameters, key, weight, copy, *versions))
        dtype = dtypes.get(module, torch.float32)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype is not dtype:
                own_copy = buffer.to(dtype)
                versions = buffer._version, own_copy._version
                cast.buffers.append(Swap(module._buffers, key, buffer, own_copy, *versions))
    recurrent = [m for m in cast.module.modules() if isinstance(m, nn.RNNBase)]
    outside = {module: flat_weights(module._flat_weights) for module in recurrent}
    cast.enter_mode()
    for module in recurrent:
        if any(id(own) in copies for own in outside[module]["_flat_weights"]):
            module._init_flat_weights()  # the copies, on a GPU in one buffer
            inside = flat_weights(module._flat_weights)
            cast.flat.append((module.__dict__, outside[module], inside))


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
    if getattr(module, "computes_in_fp32", False):
        return torch.float32
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
    autocast = policy.autocast_dtype is not None and dtype.itemsize == 2
    # Neighbours under autocast cast their inputs themselves.
    casts_outputs = policy.autocast_dtype is None or around is torch.float32
    outputs_in = around if casts_outputs else None
    # No closure: a deep copy of the model has to compute with its own module.
    module.forward = partial(_forward_in, module.forward, dtype, autocast, outputs_in)


def _forward_in(
    forward: Callable[..., Any],
    dtype: torch.dtype,
    autocast: bool,
    outputs_in: torch.dtype | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = tensors[0].device.type if tensors else "cpu"
    with torch.autocast(device, dtype=dtype if autocast else None, enabled=autocast):
        inputs = (args, kwargs) if autocast else _cast((args, kwargs), dtype)
        outputs = forward(*inputs[0], **inputs[1])
    return outputs if outputs_in is None else _cast(outputs, outputs_in)


def _cast(tree, dtype: torch.dtype):
    return tree_map(
        lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, tree
    )

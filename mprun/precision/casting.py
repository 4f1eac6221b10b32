"""Put a model into a policy's dtypes, with chosen modules kept in another one.

Models are written in FP32 terms; here each parameter gets its dtype, and each module that computes
in another dtype than its neighbours its casts (`module_dtypes`).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.precision.delayed_scaling import DelayedScaling
from mprun.precision.module_dtypes import (
    Chosen,
    cast_around_modules,
    cast_tree,
    chosen_dtypes,
    dtype_of,
)
from mprun.precision.policy import PrecisionPolicy
from mprun.precision.recurrent import own_recurrent
from mprun.precision.row_updates import row_tables
from mprun.precision.scaled_linear import install
from mprun.torch_private import (
    FLAT_WEIGHT_REFS,
    FLAT_WEIGHTS,
    BatchNorm,
    apply_to_tensors,
    buffers_of,
    flat_weights_of,
    init_flat_weights,
    parameters_of,
    places_of,
    version_of,
)


class Shard(NamedTuple):
    """This rank's part of a parameter that ranks share, updated here alone.

    It begins at a multiple of 16 in the memory of the whole parameter, and ends at one or with it:
    a kernel computes the last numbers of a tensor in other instructions, with other bits.
    """

    own: Tensor  # in the dtype of the update
    start: int  # place of the first number in the memory of the whole parameter
    shape: torch.Size  # of the whole parameter
    computed: torch.dtype  # in which the model computes with it, and makes its gradient


@dataclass(slots=True)
class CastModel:
    """A model in its policy's dtypes, which can also be evaluated in FP32."""

    module: nn.Module
    policy: PrecisionPolicy
    # Name of each rounded parameter with a master -> the parameter itself, in the policy's
    # master_dtype, which the optimizer updates in place; the module has a rounded copy.
    masters: dict[str, Tensor]
    # For each rounded buffer: the module's, its version then, and the buffer before.
    buffers: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)
    # For each module that computes differently in the mode: its attributes, and the `forward`
    # before (_NOTHING: that of its class).
    forwards: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    # Parameter name -> this rank's part of it, if ranks share the parameters (`distributed`).
    shards: dict[str, Shard] = field(default_factory=dict)
    units: str = ""  # what they gather at a time, in words
    delayed: DelayedScaling | None = None  # what its products keep from update to update

    def compute_by(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Let a module that computed by its class compute by `forward`, except in FP32."""
        self.forwards.append((vars(module), _NOTHING))
        module.__dict__["forward"] = forward

    def updated(self, name: str, own: Tensor) -> Tensor:
        """Return the tensor that an optimizer updates for the parameter `own` of this name."""
        if name in self.shards:
            return self.shards[name].own
        return self.masters.get(name, own)

    def refresh(self) -> None:
        """Let the module have the updated shards."""

    def saved(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of which `part`, shaped like the updated tensor, is this rank's.

        It may also be scales of its blocks (`mprun.precision.packed_states`).
        """
        return part

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of `whole`."""
        return whole

    def state_dict(self) -> dict[str, Tensor]:
        """Return the module's state in the dtypes that it computes in, whole parameters."""
        return self.module.state_dict()

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restore bit for bit; ValueError names what does not fit. Masters are the optimizer's."""
        own = self.module.state_dict()
        if own.keys() != saved.keys():
            raise ValueError("model state is of another model")
        for name, tensor in own.items():
            copy_exactly(name, tensor, saved[name])

    @contextmanager
    def in_mode(self) -> Iterator[nn.Module]:
        """Let the module compute as in a step of the mode."""
        yield self.module

    @contextmanager
    def in_fp32(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[nn.Module]:
        """Let the module compute in FP32: with its master weights, without any cast.

        16-bit tensors without an FP32 form are widened, which costs their memory in FP32. Row
        tables must not be written to; they return their rows in FP32. `weights`: parameter name ->
        FP32 tensor that replaces the weight.
        """
        tables = row_tables(self.module)
        forms = self._forms(weights or {})
        kept = {id(own) for own in (*self.module.parameters(), *self.masters.values())}
        with ExitStack() as stack:
            for attributes, forward in self.forwards:
                _hold(stack, attributes, {"forward": forward})
            for path, module in self.module.named_modules():
                if path in tables:
                    _hold(stack, vars(tables[path]), {"row_dtype": torch.float32})
                    continue
                hold_forms(stack, module, forms)
                if isinstance(module, nn.RNNBase):
                    flat = [forms.get(id(weight), weight) for weight in flat_weights_of(module)]
                    _hold(stack, vars(module), flat_weights(flat))
                    if not {id(weight) for weight in flat} <= kept:  # else as they were built
                        module.flatten_parameters()
            yield self.module

    def _forms(self, weights: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Return id -> FP32 form, for each tensor whose FP32 form is another tensor."""
        tables = row_tables(self.module)
        known = {id(own): before for own, then, before in self.buffers if _version(own) == then}
        names = {id(own): name for name, own in self.module.named_parameters()}
        found: dict[int, Tensor] = {}
        for path, module in self.module.named_modules():
            if path in tables:
                continue
            for own in (*parameters_of(module).values(), *buffers_of(module).values()):
                if own is None or id(own) in found:
                    continue
                name = names.get(id(own), "")
                form = self.masters.get(name, known.get(id(own), own))
                if name in weights:
                    # cuDNN's weights move into one buffer; other code may know their addresses.
                    moves = isinstance(module, nn.RNNBase) and own.is_cuda
                    form = weights[name].clone() if moves else weights[name]
                elif form.is_floating_point() and form.layout is torch.strided:
                    if form.dtype.itemsize < 4 or not form.is_contiguous():
                        # Always one layout, unlike in training: kernels differ by a rounding.
                        plain = form.detach().float().contiguous()
                        form = plain.requires_grad_(form.requires_grad)
                if form is not own:
                    found[id(own)] = form
        return found


def copy_exactly(what: str, own: Tensor, saved: Tensor) -> None:
    """Copy `saved` into `own`, of the same dtype and shape; ValueError names `what` otherwise."""
    if own.dtype != saved.dtype or own.shape != saved.shape:
        raise ValueError(
            f"{what}: saved as {saved.dtype} {tuple(saved.shape)}, "
            f"needed {own.dtype} {tuple(own.shape)}"
        )
    own.copy_(saved)


_NOTHING = object()


def _hold(stack: ExitStack, place: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Set `place` to hold `other`, or _NOTHING, under these keys until `stack` closes."""
    stack.callback(_put, place, {key: place.get(key, _NOTHING) for key in other})
    _put(place, other)


def hold_forms(stack: ExitStack, module: nn.Module, forms: Mapping[int, Tensor]) -> None:
    """Replace the module's own tensors by `forms`, by their ids, until `stack` closes."""
    for place in places_of(module):
        _hold(stack, place, {key: forms[id(t)] for key, t in place.items() if id(t) in forms})


def _put(place: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if value is _NOTHING:
            place.pop(key, None)
        else:
            place[key] = value


def _version(tensor: Tensor) -> int:
    """How often it was written to; inference tensors do not count."""
    return -2 if tensor.is_inference() else version_of(tensor)


def flat_weights(weights: Iterable[Any]) -> dict[str, Any]:
    """Return the attributes in which a recurrent layer of torch keeps its weights once more.

    They include references: without these a layer takes other weights for new ones. It would move
    them into a buffer, away from the addresses that a captured graph and an optimizer know.
    """
    weights = list(weights)
    return {
        FLAT_WEIGHTS: weights,
        FLAT_WEIGHT_REFS: [None if own is None else weakref.ref(own) for own in weights],
    }


def cast_model(
    model: nn.Module, policy: PrecisionPolicy, overrides: Mapping[str, torch.dtype] | None = None
) -> CastModel:
    """Cast `model` in place to the policy's dtypes and return it with its FP32 master weights.

    A row table (mprun.precision.row_updates) has no copy in a policy with master weights. It stays
    in FP32, and the rows gathered from it have the dtype of the parameters.

    Args:
        overrides: glob pattern over module names -> dtype in which the matching modules, and
            modules inside them, keep their parameters and compute; the last matching pattern
            counts. Norm layers inside only follow an FP32 override. Under autocast parameters stay
            FP32 and the override only changes the arithmetic.

    Raises:
        ValueError: A pattern matches no module, or names a module that cannot compute in that
            dtype.
    """
    overrides = overrides or {}
    chosen = chosen_dtypes(model, overrides, "precision.overrides")
    _refuse_without_effect(model, policy, chosen, overrides)
    forwards = [(m.__dict__, m.__dict__.get("forward", _NOTHING)) for m in model.modules()]
    cast = CastModel(model, policy, {})
    if policy.autocast_dtype is None:
        dtypes = _dtypes_of_tensors(model, policy, chosen)
        if policy.master_dtype is None:
            for module, dtype in dtypes.items():
                # Keeps the identity of the parameters and lets nn.LSTM rebuild its flat weights;
                # without recursion, because each submodule has a dtype of its own.
                apply_to_tensors(module, partial(cast_tree, dtype=dtype), recurse=False)
        else:
            _make_copies(cast, dtypes, policy.master_dtype)
    own_recurrent(model)
    if policy.products is not None:  # before the casts around modules, which include these
        cast.delayed = install(model, policy.products, chosen, policy.name)
    cast_around_modules(model, policy, chosen)
    cast.forwards = [
        (own, before) for own, before in forwards if own.get("forward", _NOTHING) is not before
    ]
    return cast


def _dtypes_of_tensors(
    model: nn.Module, policy: PrecisionPolicy, chosen: Chosen
) -> dict[nn.Module, torch.dtype]:
    """Return the dtype of each module's parameters and buffers, except tables with master weights;
    set the dtype of the rows that each table returns."""
    tables, found = row_tables(model), {}
    for name, module in model.named_modules():
        dtype = dtype_of(name, module, policy, chosen)
        if name in tables:
            tables[name].row_dtype = dtype
        if name not in tables or policy.master_dtype is None:
            found[module] = dtype
    return found


def _make_copies(
    cast: CastModel, dtypes: Mapping[nn.Module, torch.dtype], master_dtype: torch.dtype
) -> None:
    """Give each rounded tensor two forms: the parameter becomes the master, the module gets a copy.

    A weight that is used in several places has one copy, in the dtype of the last of them.
    """
    wanted = {
        id(own): dtype
        for module, dtype in dtypes.items()
        for own in parameters_of(module).values()
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
        for key, weight in parameters_of(module).items():
            parameters_of(module)[key] = copies.get(id(weight), weight)
        dtype = dtypes.get(module, torch.float32)
        for key, buffer in buffers_of(module).items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype is not dtype:
                buffers_of(module)[key] = rounded = buffer.to(dtype)
                if not isinstance(module, BatchNorm):  # torch moves its statistics unseen
                    cast.buffers.append((rounded, _version(rounded), buffer))
        if isinstance(module, nn.RNNBase) and any(
            id(own) in copies for own in flat_weights_of(module)
        ):
            init_flat_weights(module)  # the copies, on a GPU in one buffer


def _refuse_without_effect(
    model: nn.Module, policy: PrecisionPolicy, chosen: Chosen, overrides: Iterable[str]
) -> None:
    """Refuse an override by name of a module that stays in FP32: such an arm would not differ.

    A pattern with a wildcard may match such modules beside others.
    """
    for name, (dtype, _) in chosen.items():
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

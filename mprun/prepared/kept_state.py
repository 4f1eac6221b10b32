"""What an optimizer's next step depends on beside the weights and torch's own state.

    loss_scale  of its models
    narrow      of weights without a master copy (`RoundedWeights`)
    delayed     the scales of products and their history, of each model
    draws       the seed of random bits, and the number of calls so far

It travels in the optimizer's state dictionary. `mprun`'s own checkpoints have it under other names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import broadcast
from torch.optim import Optimizer

from mprun.precision.packed_states import SCALE, StateFormats, refuse_signed
from mprun.precision.rounded_weights import RoundedWeights, choose_narrow
from mprun.precision.torch_update import held_by
from mprun.prepared.draws import Draws
from mprun.prepared.prepared_model import PreparedModel

_KEYS = ("loss_scale", "narrow", "delayed", "draws")


class KeptState:
    """The state of one optimizer that updates prepared models.

    Attributes:
        models: these models, in the order of the optimizer's groups.
        narrow: their weights without a master copy, and state in few bits; None: it has none.
    """

    def __init__(self) -> None:
        self.models: Sequence[PreparedModel] = []
        self.narrow: RoundedWeights | None = None
        self._is_in_state_dict = False
        self._loaded: Mapping[str, Any] = {}  # the state dictionary that torch loads now

    def follow(self, optimizer: Optimizer, named: Mapping[str, Tensor]) -> None:
        """Keep the state of an optimizer that updates the `models`: of these parameters."""
        self._make_narrow(optimizer, named)
        if not self._is_in_state_dict:
            refuse_cast_codes(optimizer)
            self._is_in_state_dict = True
            optimizer.register_state_dict_post_hook(lambda _, own: own.update(self.state_dict()))
            optimizer.register_load_state_dict_pre_hook(self._before_load)
            optimizer.register_load_state_dict_post_hook(self._after_load)

    # 16-bit weights without a master copy

    def _make_narrow(self, optimizer: Optimizer, named: Mapping[str, Tensor]) -> None:
        policy, seed = self.models[0].policy, self.models[0].seed
        if seed is None:  # a script's; a loaded state brings that of its run
            seed = torch.initial_seed()
        inside: dict[int, torch.dtype] = {}
        for model in self.models:
            inside |= model.tensors.dtypes()
        narrow = choose_narrow(optimizer, named, policy, seed, inside)
        if narrow is None:
            return
        if self.narrow is not None:
            narrow.load_state_dict(self.narrow.state_dict())
        self.narrow = narrow
        narrow.initialise_state()
        if any(model.group is not None and not model.of_run for model in self.models):
            return  # DistributedDataParallel adds up gradients in the dtype of their weight
        for own in held_by(optimizer):
            if own in narrow:  # gradients of 16-bit weights add up, and are clipped, in FP32
                set_grad_dtype(own, policy.grad_dtype)
                if not self.models[0].of_run and policy.grad_dtype is torch.float32:
                    own.grad_dtype = None  # a script may also write one by hand, like its weight
        for model in self.models:
            model.tensors.changes = True

    def add_up_in_16_bits(self, optimizer: Optimizer) -> None:
        """Give gradients the dtype of their weight, in which DistributedDataParallel sums them."""
        for own in held_by(optimizer):
            if self.narrow is not None and own in self.narrow:
                set_grad_dtype(own, own.dtype)
        for model in self.models:
            model.tensors.forget()

    def share_seed(self) -> None:
        """Draw the random bits of the first process in all: scripts seed each differently."""
        if (group := self.models[0].group) is None or self.narrow is None:
            return
        state = self.narrow.state_dict()
        if "seed" in state:
            seed = self.narrow.streams[:1].clone()
            broadcast(seed, group=group, group_src=0)
            self.narrow.load_state_dict(state | {"seed": int(seed)})

    # In a state dictionary

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        first = self.models[0]
        state: dict[str, Any] = {"loss_scale": first.loss_scale.state_dict()}
        if self.narrow is not None:
            state["narrow"] = self.narrow.state_dict()
        if any(delayed := [model.delayed for model in self.models]):
            state["delayed"] = [own and own.state_dict() for own in delayed]
        if first.policy.draws:
            state["draws"] = Draws.state_dict()
        return state

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of this object from `saved`, in place."""
        first, scale = self.models[0], saved.get("loss_scale")
        if scale is not None and scale["kind"] == first.loss_scale.kind:
            first.loss_scale.load_state_dict(scale)
        if self.narrow is not None and "narrow" in saved:
            self.narrow.load_state_dict(saved["narrow"])
        for model, own in zip(self.models, saved.get("delayed", ()), strict=False):
            if model.delayed is not None:
                model.delayed.load_state_dict(own)
        if first.policy.draws and (draws := saved.get("draws")) is not None:
            Draws.load_state_dict(first.forward_context.device, draws)

    def _before_load(self, _: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        saved = StateFormats.saved(state.get("narrow", {}))
        kept = StateFormats() if self.narrow is None else self.narrow.states
        if saved[:2] != kept[:2] and (saved.in_blocks or kept.in_blocks):
            raise ValueError(
                f"optimizer state has the format {saved.in_words}, must have {kept.in_words}: load "
                "it into an optimizer with the same precision.update.state_dtype"
            )
        for own in state["state"].values():
            refuse_signed(state.get("narrow", {}), own)
        self._loaded = state
        return {k: v for k, v in state.items() if k not in _KEYS}

    def _after_load(self, optimizer: Optimizer) -> None:
        loaded, self._loaded = self._loaded, {}
        self.load_state_dict(loaded)
        _load_as_saved(optimizer, self.narrow, loaded)


def _load_as_saved(
    optimizer: Optimizer, narrow: RoundedWeights | None, loaded: Mapping[str, Any]
) -> None:
    """Restore the state as it was saved: torch casts it to the dtype of its weight.

    Without `narrow` only numbers beside the weight, such as NAdam's product, keep their dtype.
    """
    numbers = [number for group in loaded["param_groups"] for number in group["params"]]
    for number, own in zip(numbers, held_by(optimizer), strict=True):
        state = optimizer.state.get(own, {})
        for key, value in loaded["state"].get(number, {}).items():
            if not isinstance(value, Tensor):
                continue
            if own.dim() and not value.dim():
                state[key] = value.to(state[key].device, copy=True)
            elif narrow is not None and own in narrow:
                state[key] = value.to(own.device, copy=True)


def set_grad_dtype(own: Tensor, dtype: torch.dtype) -> None:
    """Let gradients of a parameter add up in `dtype`, also the one that it has."""
    gradient, own.grad = own.grad, None
    own.grad_dtype = dtype
    own.grad = gradient if gradient is None else gradient.to(dtype)


def refuse_cast_codes(optimizer: Optimizer) -> None:
    """Raise ValueError if state in blocks was loaded before a prepared model could keep its codes.

    Only the hook of `KeptState` does: torch casts state to the dtype of its weight.
    """
    for state in optimizer.state.values():
        for key, value in state.items():
            if f"{key}{SCALE}" in state and value.dtype is not torch.uint8:
                raise ValueError(
                    "optimizer: its 8-bit state (dynamic8, fp8) was loaded too early, so torch has "
                    "cast it; load it after prepare(model, optimizer, ...)"
                )

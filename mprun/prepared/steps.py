"""Steps of a script's optimizers: skipped if gradients overflowed; the loss scale moves.

    backward pass -> [each model it reached: are the gradients of its parameters finite?]
    optimizer.step() -> [hook: no gradients, or found_inf, if they are not] -> step
                     -> [hook: gradients back; the scale moves; BatchNorm's statistics go back]

Nothing here waits for the device unless torch's step does, except for optimizers that only the host
can stop. optimizers.py has the hooks.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision.audit import FIRST
from mprun.precision.forward_context import ForwardContext
from mprun.precision.loss_scale import LossScale
from mprun.precision.policy import PrecisionPolicy
from mprun.precision.rounded_weights import RoundedWeights
from mprun.precision.torch_update import held_by, skipping, without_gradients
from mprun.precision.update import Update
from mprun.prepared import passes
from mprun.prepared.kept_state import KeptState
from mprun.prepared.passes import Passes, note_step
from mprun.prepared.prepared_model import PreparedModel
from mprun.prepared.scaling import Scaling, check_finite, repeated, scalings
from mprun.prepared.shards import say
from mprun.torch_private import (
    OF_OPTIMIZERS,
    SCALES_ITSELF,
    DisableTorchFunction,
    disable_dispatch_modes,
    dispatch_modes,
    graph_task,
)

_ATTRIBUTE = "_mprun_steps"  # of an optimizer; a weak dictionary would take a microsecond


class OptimizerSteps:
    """The steps of one optimizer that updates prepared models.

    Attributes:
        optimizer: the script's optimizer.
        models: the prepared models whose parameters the optimizer contains, in the order of its
            groups.
        steps: number of steps so far, including skipped ones.
        last: results of the last step; None before the first step.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = weakref.ref(optimizer)
        self.models: list[PreparedModel] = []
        self.steps = 0
        self._is_checked = self._has_warned = False
        self._first = FIRST  # the last step after which the mode has to have shown itself
        self.last: Update | None = None
        self._frame: FrameType | None = None  # frame of the step that runs
        self._is_own_step = False  # taken here, not by the script
        self._key: Any = None
        self._concerned: list[PreparedModel] = []
        self._is_plain = True
        self._seen = max(0, Passes.number - 1)  # the pass before the last step
        self._found: Tensor | None = None
        # Models that passes have reached since its last step -> whether gradients are not finite.
        self._fresh: dict[PreparedModel, Any] = {}
        # Its parameters whose gradients are looked at again if they have changed since a pass, and
        # those that are in no model.
        self._inside: list[tuple[PreparedModel, Tensor]] = []
        self._beside: list[Tensor] = []
        self._undo = ExitStack()  # what keeps the step that runs from moving anything
        self._kept = KeptState()
        self._is_within = False  # a hook of a backward pass takes the step

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerSteps:
        """Return the steps of an optimizer."""
        steps: OptimizerSteps | None = optimizer.__dict__.get(_ATTRIBUTE)
        if steps is None:
            steps = optimizer.__dict__[_ATTRIBUTE] = cls(optimizer)
        return steps

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def held(self) -> list[Tensor]:
        """Return the optimizer's parameters, or none if it is gone."""
        return [] if (optimizer := self._optimizer()) is None else held_by(optimizer)

    @property
    def narrow(self) -> RoundedWeights | None:
        """Return the object that stores low-bit optimizer state and weights without master copies,
        or None if the optimizer has neither."""
        return self._kept.narrow

    @property
    def policy(self) -> PrecisionPolicy:
        """Return the policy of the optimizer's models."""
        return self.models[0].policy

    @property
    def forward_context(self) -> ForwardContext:
        """Return the context in which `models[0]` runs its calls."""
        return self.models[0].forward_context

    @property
    def scale(self) -> LossScale:
        """Return the loss scale of `models[0]`."""
        return self.models[0].loss_scale

    @property
    def scaler_name(self) -> str:
        """Return the name of the loss scale in records."""
        return Scaling.of(self.scale).name or self.scale.kind

    @property
    def module(self) -> nn.Module:
        """Return the model, or a list if there are several."""
        models = [model.model for model in self.models]
        return models[0] if len(models) == 1 else nn.ModuleList(models)

    def named(self) -> dict[str, Tensor]:
        """Return a mapping from name to parameter, for those parameters of the models that are
        also parameters of the optimizer."""
        held = set(map(id, held_by(self.optimizer)))
        found: dict[str, Tensor] = {}
        for number, model in enumerate(self.models):
            prefix = f"{number}." if len(self.models) > 1 else ""
            for name, own in model.model.named_parameters():
                if id(own) in held:
                    held.remove(id(own))  # another model may have it, too
                    found[prefix + name] = own
        return found

    # What probes and records read

    @property
    def loss_scales(self) -> list[LossScale]:
        """Return the loss scales of the models; a shared loss scale appears once."""
        return [*dict.fromkeys(model.loss_scale for model in self.models)]

    @property
    def found_inf(self) -> Tensor:
        """Return 1 if the last step was skipped, otherwise 0, as a 0-dim float32 tensor."""
        if self.last is None or self.last.found_inf is None:
            return torch.zeros_like(self.scale.found_inf)
        return self.last.found_inf

    def computed(self) -> list[tuple[Tensor, torch.dtype]]:
        """Return the parameters of the models, each with the dtype in which its model uses it."""
        found: list[tuple[Tensor, torch.dtype]] = []
        for model in self.models:
            dtypes = model.tensors.dtypes()
            found += [(own, dtypes.get(id(own), own.dtype)) for own in model.model.parameters()]
        return found

    def watch_gradient(self, own: Tensor, hook: Callable[[Tensor], None]) -> Any:
        """Call `hook` with each gradient that a backward pass computes for the parameter `own`;
        return a handle with a method `remove`."""
        # A layer that the script has added is known from the next call on.
        known = (one for one in self.models if id(own) in one.tensors.dtypes())
        new = (one for one in self.models if id(own) in map(id, one.parameters()))
        return next(chain(known, new)).tensors.watch_gradient(own, hook)

    def unscaled_gradients(self) -> dict[str, Tensor]:
        """Return copies of the gradients as the last step used them, by parameter name."""
        held = self.named().items()
        return {name: own.grad.detach().clone() for name, own in held if own.grad is not None}

    def state_by_name(self) -> dict[str, dict[Any, Any]]:
        """Return the optimizer's state by parameter name, without copies."""
        return {name: self.optimizer.state.get(own, {}) for name, own in self.named().items()}

    def refresh(self) -> None:
        """Find the optimizer's models again if its parameter groups have changed."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        key = PreparedModel.built, [(len(group), id(group[0]) if group else 0) for group in groups]
        if key == self._key:
            return
        self._key = key
        owners: dict[int, list[PreparedModel]] = {}
        for model in sorted(passes.alive, key=lambda one: one.number):
            for own in model.parameters():
                owners.setdefault(id(own), []).append(model)
        held = [own for group in groups for own in group]
        found = [(model, own) for own in held for model in owners.get(id(own), ())]
        self._inside = [(model, own) for model, own in found if model.looks_again]
        self._beside = [own for own in held if id(own) not in owners]
        self.models = self._kept.models = [*dict.fromkeys(model for model, _ in found)]
        self._is_plain = all(model.is_plain for model in self.models)
        if self.models:
            self._untouched = Update(self.scale.scale, None, None)
            for model in self.models:
                model.audit.optimizers.add(type(self.optimizer).__name__)
                model.updated_by.setdefault(self, 0)
            for scaling in scalings(self.models):
                scaling.owners.add(self.optimizer)  # before its first step: the scale waits for it
            self._warn_of_decay()
            self._kept.follow(self.optimizer, self.named())
            self._is_plain = self._is_plain and self.narrow is None
            # A GradScaler then calls the step also where it would skip it, and is refused there.
            self.optimizer.__dict__[SCALES_ITSELF] = True

    def _warn_of_decay(self) -> None:
        """Warn once if averages in the state do not decay in its format; a run says it itself."""
        if self.steps == 0 and not self._has_warned and not self.models[0].of_run:
            for group in self.optimizer.param_groups:
                if (why := self.policy.stuck(group)) is not None:
                    self._has_warned = True
                    warnings.warn(f"{type(self.optimizer).__name__} {why}", stacklevel=2)
                    return

    def begin_mode(self) -> None:
        """Record that a model has entered another mode, so that the next steps check this mode."""
        self._is_checked, self._first = False, self.steps + FIRST
        self.refresh()

    def __reduce__(self) -> Any:
        """Pickle or copy as None: the copy begins anew."""
        return type(None), ()

    # A step

    def begin(self, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record that a step begins in stack frame `frame`; ignore a call within another step."""
        if self._is_own_step:
            return None
        if self._frame is not None:
            above = frame.f_back
            while above is not None:
                if above is self._frame:
                    return None
                above = above.f_back
            self._frame = None  # the previous step has raised
            with torch.no_grad():
                self._undo.close()
        self.refresh()
        fed = self._newly_fed()
        self._concerned = self.models or fed
        # Code that sets found_inf for the kernels (a GradScaler, the runner) owns that optimizer.
        if not self._concerned or (not self.models and hasattr(self.optimizer, "found_inf")):
            self._concerned = []
            return None
        if self.models and "grad_scale" in self.optimizer.__dict__:
            raise RuntimeError(
                f"precision={self.policy.name}: a torch.amp.GradScaler calls the optimizer of a "
                f"prepared model, but mprun already scales the loss; call loss.backward() and "
                "optimizer.step() without it"
            )
        for model in self.models:
            model.refuse_alone()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        has_gradients = any(own.grad is not None for own in held_by(self.optimizer))
        if closure is None and self.models and not has_gradients:
            now = {id(own) for model in self.models for own in model.parameters()}
            is_sharded = any(model.is_sharded for model in self.models)
            if is_sharded and now.isdisjoint(map(id, held_by(self.optimizer))):
                raise RuntimeError(
                    "the optimizer contains parameters from before fully_shard, which replaced "
                    "them; build the optimizer afterwards, from model.parameters()"
                )
            raise RuntimeError(
                "no gradients: no backward pass has reached the parameters of this optimizer since "
                "they were cleared; call loss.backward() before optimizer.step()"
            )
        self._found, result = None, None
        if not self._is_plain or fed:
            result = self._before(args, kwargs, closure, fed)
        self._frame = frame
        return result

    def end(self, frame: FrameType) -> None:
        """Record that the step has ended."""
        if self._is_own_step or frame is not self._frame:
            return
        self._frame, self.steps = None, self.steps + 1
        if self._is_plain and self._found is None:
            self.last = self._untouched
            if graph_task() == -1:
                passes.roll(self._concerned)  # a teacher may have scales that move
        else:
            self._after()
        if not self._is_checked and self.steps <= self._first:
            for model in self._concerned:
                if model.calls and (note := model.audit.check_happened()) is not None:
                    warnings.warn(note, stacklevel=2)
                say(model.audit.what_stays())
            # An empty batch says nothing.
            self._is_checked = any(model.audit.products for model in self._concerned)

    def _before(self, args: Any, kwargs: Any, closure: Any, fed: list[PreparedModel]) -> Any:
        """Keep the coming step from moving anything if gradients are not finite."""
        scaled = [model for model in self._concerned if model.scale is not None]
        self._is_within = graph_task() != -1 and closure is None
        if not self._is_within:
            for scaling in scalings(scaled):
                scaling.begin(self.optimizer)
        if closure is not None:
            if self.narrow is not None:
                raise ValueError(
                    f"closure: must be None with precision={self.policy.name}, which updates "
                    f"weights in chunks; call optimizer.step() without it"
                )
            if not scaled:
                return None
            self._found, self._fresh = torch.zeros_like(scaled[0].found_inf), dict.fromkeys(scaled)
            others = {key: value for key, value in kwargs.items() if key != "closure"}
            return (args[0], repeated(closure, scaled)), others
        if scaled and self._is_within:  # before the pass ends nobody has looked
            with torch.no_grad(), DisableTorchFunction():
                self._found = torch.zeros_like(scaled[0].found_inf)
                check_finite(held_by(self.optimizer), self._found)
        elif scaled:
            self._found = self._overflow(scaled)
        if (narrow := self.narrow) is not None:  # in FP32, chunk by chunk
            if self.steps == 0:
                self._kept.share_seed()
            self._step_here(lambda: narrow.step(self._found))
        elif self._found is not None:
            self._undo.enter_context(skipping(self.optimizer, self._found))
        if self._is_within and self.policy.masters == "none":
            self._step_below_emulation()
        return None

    @torch.no_grad()
    def _after(self) -> None:
        """Put gradients back, and let the loss scales move."""
        concerned, found = self._concerned, self._found
        self._undo.close()
        scale = concerned[0].loss_scale.scale
        # Copies: both are about to change in place.
        copies = (scale, None) if found is None else (scale.clone(), found.clone())
        self.last = Update(copies[0], copies[1], None)
        if self._is_within:
            self._end_within(concerned, found)
            return
        together = {one for model in concerned for one in (model, *model.partners)}
        for model in together:
            # Of several optimizers any skip counts, whichever steps first.
            is_old = model in concerned and model not in self._fresh
            if found is not None and len(model.updated_by) > 1 and not is_old:
                model.end_step(torch.maximum(found, model.found_inf))
            else:
                model.end_step(found)
        passes.roll(concerned)
        Passes.last_step = Passes.number
        if found is not None:
            own = scalings(concerned)
            for scaling in own:
                scaling.end(self.optimizer, found, self._fresh)
            for scaling in scalings(together.difference(concerned)):
                if not scaling.owners:  # of a loss network that nobody updates
                    scaling.end_without_step(found, together)
                elif scaling not in own:
                    scaling.share(found, together)
        for model in passes.alive:
            model.tensors.forget()  # `.data` counts no versions

    def _end_within(self, concerned: Sequence[PreparedModel], found: Tensor | None) -> None:
        """Leave to the end of the pass what its other gradients still need as it is."""
        flag = torch.zeros_like(concerned[0].found_inf) if found is None else found
        for model in concerned:
            note_step(model, flag)
        if found is not None:
            for scaling in scalings(concerned):
                scaling.end_within(self.optimizer, found, concerned)

    def _newly_fed(self) -> list[PreparedModel]:
        """Return models whose inputs have received gradients since the last step."""
        seen, self._seen = self._seen, Passes.number
        return [own for own in passes.alive if own.fed > seen] if Passes.fed > seen else []

    def _overflow(self, scaled: list[PreparedModel]) -> Tensor:
        """Return whether a gradient of this optimizer is not finite, float32, 0-dim."""
        flags = {model: model.flag_for(self) for model in scaled}
        self._fresh = {model: flag for model, flag in flags.items() if flag is not None}
        known = [*self._fresh.values()] or [torch.zeros_like(scaled[0].found_inf)]
        found = known[0] if len(known) == 1 else torch.stack(known).amax()
        if self._beside:  # before a model or after it; no check of a pass includes them
            found = found.clone() if self.models else torch.zeros_like(found)
            check_finite(self._beside, found)
        modes = dispatch_modes()  # a probe's: torch's foreach functions count no versions below it
        old = {model for model in scaled if modes or model not in self._fresh}
        changed = [
            own
            for model, own in self._inside
            if model.is_new(own) or (old and model in old and own.grad is not None)
        ]
        if changed:  # an infinity that a script sets by hand is one that no pass has met
            found = found.clone()
            check_finite(changed, found)
        return found

    def _step_below_emulation(self) -> None:
        """Take the step of 16-bit weights here, in torch's arithmetic as between two passes."""
        with torch.no_grad(), disable_dispatch_modes():
            self._step_here(self.optimizer.step)

    def _step_here(self, step: Callable[[], Any]) -> None:
        """Take the step here; the script's own, which follows, has no gradients."""
        self._is_own_step = True
        try:
            step()
        finally:
            self._is_own_step = False
        self._undo.enter_context(without_gradients(self.optimizer))

    # State

    def add_up_in_16_bits(self) -> None:
        """Cast gradients to their weights' dtype, in which DistributedDataParallel sums them."""
        self._kept.add_up_in_16_bits(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next step needs, except the weights and the optimizer's own
        state."""
        return self._kept.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of this object from `saved`, in place."""
        self._kept.load_state_dict(saved)


def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin a step: torch calls it, as a hook of all optimizers."""
    if not hasattr(optimizer, OF_OPTIMIZERS):  # a wrapper: the wrapped one takes the step
        return None
    return OptimizerSteps.of(optimizer).begin(sys._getframe(1), args, kwargs)


def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """End a step, likewise."""
    OptimizerSteps.of(optimizer).end(sys._getframe(1))

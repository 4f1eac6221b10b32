"""Probe the steps of a user's script, in its own process.

    record = mprun.probe(step, optimizer)      # exponents of every tensor of one step

`step` is a function of the script that takes one whole training step with prepared objects
(`mprun.prepare`) and returns its loss. The code that measures a run of mprun measures a script too;
it sees the script as a task, `ScriptTask`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.numerics.post_mortem import StepRow
from mprun.numerics.probe import chosen_modules
from mprun.numerics.probe_record import ProbeRecord
from mprun.numerics.probing import Watched
from mprun.precision import ForwardContext, LossScale, PrecisionPolicy
from mprun.precision.audit import combined
from mprun.precision.torch_update import held_by
from mprun.prepared import OptimizerSteps, state_of
from mprun.prepared.scaling import Scaling
from mprun.prepared.shards import is_shard

NO_METRICS: Mapping[str, Any] = MappingProxyType({})
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


class Learner(NamedTuple):
    """A model and the steps of its optimizer, in the form that probes expect."""

    model: nn.Module
    steps: OptimizerSteps
    clip_norm: None = None  # the script clips


class ScriptTask:
    """The prepared objects of a script in the form of a built run and its task.

    optimizers: one, or several in order or by name; ValueError for one that was not prepared.
    prepared: all by name, "model" if there is one; first: the first of them. metrics: 0-dim tensors
    of the newest step (`take`).
    """

    def __init__(self, optimizers: Optimizers):
        self.prepared = _by_name(optimizers)
        # The steps know them weakly, and a script may drop its own before the end of its run.
        self._optimizers = [steps.optimizer for steps in self.prepared.values()]
        self.first = next(iter(self.prepared.values()))
        self.device = self.forward_context.device
        self.learners = {n: Learner(steps.module, steps) for n, steps in self.prepared.items()}
        scales: dict[str, LossScale] = {}
        for name, optimizer in self.prepared.items():
            if optimizer.scale not in scales.values():
                scales["loss_scale" if not scales else f"{name}_loss_scale"] = optimizer.scale
        self.loss_scales = scales
        names = {scale: name for name, scale in scales.items()}
        self._scale_names = [(o, names[o.scale]) for o in self.prepared.values()]
        self.metrics: dict[str, Tensor] = {}
        self.task, self.data = self, None
        self._steps = sum(optimizer.steps for optimizer in self.prepared.values())

    @property
    def forward_context(self) -> ForwardContext:
        """Return that of the mode in force."""
        return self.first.forward_context

    @property
    def policy(self) -> PrecisionPolicy:
        """Return that of the mode in force."""
        return self.first.policy

    @property
    def is_sharded(self) -> bool:
        """Return whether each process holds a part of the weights."""
        models = [model for steps in self.prepared.values() for model in steps.models]
        return any(is_shard(own) for model in models for own in model.parameters())

    def ended(
        self, loss: Tensor | float, metrics: Mapping[str, Tensor | float] = NO_METRICS
    ) -> dict[str, Tensor]:
        """Return the metrics of the step that the script has just taken, on the device: also loss
        scales by name, and whether an optimizer skipped its update. RuntimeError if none took a
        step."""
        steps, scales, flags = 0, dict[str, Tensor](), []
        for optimizer, name in self._scale_names:
            steps += optimizer.steps
            if (last := optimizer.last) is not None:
                scales[name] = last.loss_scale
                if last.found_inf is not None:
                    flags.append(last.found_inf)
        if (taken := steps - self._steps) == 0:
            raise RuntimeError(
                "no optimizer.step() since the last step; call it before run.step(loss)"
            )
        if taken > 1 and len(self._scale_names) == 1:
            raise RuntimeError(
                f"{taken} calls of optimizer.step() since the last run.step(loss), must be one; "
                f"call run.step(loss) after each"
            )
        self._steps = steps
        for optimizer, name in self._scale_names:
            if name not in scales:  # its optimizers have not begun, as in warm-up of a critic
                scales[name] = optimizer.scale.scale.clone()
        if flags:
            scales["found_inf"] = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        self.metrics = {"loss": self._scalar("loss", loss), **scales}
        if metrics:
            self.metrics |= {name: self._scalar(name, value) for name, value in metrics.items()}
        return self.metrics

    @property
    def step(self) -> int:
        """Return the steps taken."""
        return max(optimizer.steps for optimizer in self.prepared.values())

    def audit(self) -> dict[str, Any]:
        """Return what the models really computed so far, for run.json."""
        models = [model for steps in self.prepared.values() for model in steps.models]
        return combined([model.audit.result() for model in dict.fromkeys(models)])

    def take(self, step: Callable[[], Any]) -> StepRow:
        """Take a step of the script, and wait for its numbers."""
        loss = step()
        if not isinstance(loss, Tensor | float | int):
            raise ValueError(f"step: returned a {type(loss).__name__}, must return the loss")
        metrics = self.ended(loss)
        skipped = "found_inf" in metrics and bool(metrics["found_inf"] != 0)
        numbers = float(metrics["loss"]), float(metrics["loss_scale"])
        return StepRow(self.step, *numbers, skipped, int(skipped))

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on."""
        return {
            # By name and not from the model's `state_dict()`, which a model may filter.
            "tensors": self._tensors(),
            "optimizers": {
                n: {name: o.optimizer.state.get(own, {}) for name, own in _held(o).items()}
                for n, o in self.prepared.items()
            },
            "settings": {
                n: [_settings(g) for g in o.optimizer.param_groups]
                for n, o in self.prepared.items()
            },
            "steps": {n: o.state_dict() for n, o in self.prepared.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything in place."""
        for name, tensor in self._tensors().items():
            tensor.copy_(state["tensors"][name])
        for name, steps in self.prepared.items():
            for model in steps.models:
                model.tensors.forget()
                model.has_gradients = False  # those of a step that ended early move no scale
                Scaling.of(model.loss_scale).forget()
            groups = steps.optimizer.param_groups
            for group, settings in zip(groups, state["settings"][name], strict=True):
                group.update(settings)
            _load_by_name(steps, state["optimizers"][name])
            steps.load_state_dict(state["steps"][name])
            steps.optimizer.zero_grad()

    def _tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers, including those that are in no state, and parameters of
        the optimizers that are in no model."""
        found = self.parameters() | self._named("named_buffers")
        for learner, steps in self.prepared.items():
            found |= {f"{learner}.{name}": own for name, own in _held(steps).items()}
        return {name: tensor.detach() for name, tensor in found.items()}

    def parameters(self) -> dict[str, Tensor]:
        """Return all parameters of the models, by learner and name."""
        return self._named("named_parameters")

    def _named(self, kind: str) -> dict[str, Tensor]:
        return {
            f"{learner}.{name}": tensor
            for learner, optimizer in self.prepared.items()
            for name, tensor in getattr(optimizer.module, kind)()
        }

    def _scalar(self, name: str, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            if value.dim() == 0 and value.device == self.device:
                return value.detach()
            if value.numel() != 1:
                raise ValueError(f"{name}: has {value.numel()} values, must be one number")
            return value.detach().reshape(()).to(self.device, non_blocking=True)
        return torch.full((), float(value), device=self.device)


def probe(
    step: Callable[[], Any], optimizer: Optimizers, modules: Sequence[str] = ()
) -> ProbeRecord:
    """Run one step of a script and count the values of all its tensors by exponent.

    The probe does not change the result of the step, which is a normal training step.

    Args:
        step: function that runs the step (forward, backward, `optimizer.step()`) and returns its
            loss, a 0-dim tensor.
        optimizer: a prepared optimizer, or several in a list or in a dict by name.
        modules: glob patterns over module names; if empty, every module without submodules.

    Returns:
        The counts of activations, gradients, weights and updates by module, and the updates that
        FP16 would lose. Runs store such records in numerics/*.json.
    """
    task = ScriptTask(optimizer)
    if task.is_sharded:
        raise ValueError("mprun.probe: shards (fully_shard) cannot be probed")
    with Watched(task, chosen_modules(task.learners, modules)) as watched:
        row = task.take(step)
        watched.metrics = task.metrics
    return watched.record(row.step)


def _held(steps: OptimizerSteps) -> dict[str, Tensor]:
    """Return all parameters of an optimizer by name: a head beside the model has none, and gets
    its number."""
    named = steps.named()
    inside = set(map(id, named.values()))
    beside = (own for own in held_by(steps.optimizer) if id(own) not in inside)
    return named | {f"beside {number}": own for number, own in enumerate(beside)}


def _load_by_name(steps: OptimizerSteps, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore an optimizer's state from copies; entries that have appeared since are removed."""
    for name, own in _held(steps).items():
        steps.optimizer.state.pop(own, None)
        for key, value in saved[name].items():
            copy = value.clone() if isinstance(value, Tensor) else value
            steps.optimizer.state[own][key] = copy


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a scheduler may change."""
    values = {key: value for key, value in group.items() if key != "params"}
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}


def _by_name(given: Optimizers) -> dict[str, OptimizerSteps]:
    if isinstance(given, Mapping):
        named = dict(given)
    elif isinstance(given, Optimizer) or len(given) == 1:
        named = {"model": given if isinstance(given, Optimizer) else given[0]}
    else:
        named = {f"model{number}": one for number, one in enumerate(given)}
    if not named:
        raise ValueError("optimizer: none given")
    return {name: state_of(one) for name, one in named.items()}

"""Probes and explanations of the steps of one's own script, in its own process.

    record = mprun.probe(step, optimizer)      # exponents of every tensor of one step
    finding = mprun.explain(step, optimizer)   # which operation made the first infinity or NaN

`step` is a function of the script that takes one whole training step with prepared objects
(`mprun.prepare`) and returns its loss. What measures is what measures a run of mprun: to it a
script is a task, `ScriptTask`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from mprun.numerics.first_nonfinite import Finding, find_culprit
from mprun.numerics.post_mortem import StepRow
from mprun.numerics.probe import chosen_modules
from mprun.numerics.probe_record import ProbeRecord
from mprun.numerics.probing import Watched
from mprun.numerics.replay import Snapshot, Steps
from mprun.precision import LossScale, MixedPrecisionOptimizer, PreparedOptimizer

NO_METRICS: Mapping[str, Any] = MappingProxyType({})
Optimizers = PreparedOptimizer | Sequence[PreparedOptimizer] | Mapping[str, PreparedOptimizer]


class Learner(NamedTuple):
    """A model with what updates it, as probes know them."""

    model: nn.Module
    optimizer: MixedPrecisionOptimizer


class ScriptTask:
    """The prepared objects of a script in the form of a built run and its task.

    Args:
        optimizers: one, or several in order or by name.

    Attributes:
        prepared: by name; "model" where there is one.
        metrics: 0-dim tensors of the newest step (`take`).

    Raises:
        ValueError: what is given was not prepared.
    """

    def __init__(self, optimizers: Optimizers):
        self.prepared = _by_name(optimizers)
        first = next(iter(self.prepared.values()))
        self.arithmetic, self.policy = first.models[0].arithmetic, first.policy
        self.device = self.arithmetic.device
        self.learners = {n: Learner(o.module, o.engine) for n, o in self.prepared.items()}
        scales: dict[str, LossScale] = {}
        for name, optimizer in self.prepared.items():
            if optimizer.scale not in scales.values():
                scales["loss_scale" if not scales else f"{name}_loss_scale"] = optimizer.scale
        self.loss_scales = scales
        names = {scale: name for name, scale in scales.items()}
        self._scale_names = [(o, names[o.scale]) for o in self.prepared.values()]
        self.metrics: dict[str, Tensor] = {}
        self.task, self.data = self, None
        self._one = first if len(self.prepared) == 1 else None
        self._steps = self._taken()

    def _taken(self) -> int:
        if self._one is not None:
            return self._one.steps
        return sum(optimizer.steps for optimizer in self.prepared.values())

    def ended(
        self, loss: Tensor | float, metrics: Mapping[str, Tensor | float] = NO_METRICS
    ) -> dict[str, Tensor]:
        """The metrics of the step that the script has just taken, on the device.

        Raises:
            RuntimeError: none of the optimizers took one.
        """
        one, before = self._one, self._steps
        taken = self._taken() if one is None else one.steps
        if taken != before + 1:
            self._refuse(taken - before)
        self._steps = taken
        found = {"loss": self._scalar("loss", loss)}
        if one is not None and (last := one.last) is not None:
            found["loss_scale"] = last.loss_scale
            if last.found_inf is not None:
                found["found_inf"] = last.found_inf
        else:
            found |= self._of_several()
        if metrics:
            found |= {name: self._scalar(name, value) for name, value in metrics.items()}
        self.metrics = found
        return found

    def _refuse(self, steps: int) -> None:
        if steps == 0:
            raise RuntimeError("no optimizer.step() since the last step; it comes before this call")
        if self._one is not None:
            raise RuntimeError(
                f"{steps} calls of optimizer.step() since the last step, one is expected; call "
                "run.step(loss) after each"
            )

    def _of_several(self) -> dict[str, Tensor]:
        """Loss scales by name, and whether one of the optimizers skipped its update."""
        found, flags = dict[str, Tensor](), []
        for optimizer, name in self._scale_names:
            if (last := optimizer.last) is not None:
                found[name] = last.loss_scale
                if last.found_inf is not None:
                    flags.append(last.found_inf)
        if flags:
            found["found_inf"] = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        return found

    def take(self, step: Callable[[], Any]) -> StepRow:
        """Take a step of the script, and wait for its numbers."""
        loss = step()
        if not isinstance(loss, Tensor | float | int):
            raise ValueError(f"step: returned a {type(loss).__name__}, must return the loss")
        metrics = self.ended(loss)
        skipped = "found_inf" in metrics and bool(metrics["found_inf"] != 0)
        numbers = float(metrics["loss"]), float(metrics["loss_scale"])
        return StepRow(
            max(o.steps for o in self.prepared.values()), *numbers, skipped, int(skipped)
        )

    def state_dict(self) -> dict[str, Any]:
        """Models, states of the optimizers, loss scales: what the next step depends on."""
        return {
            # By name and not as `state_dict()` has them, which a model may filter.
            "tensors": self._tensors(),
            "optimizers": {n: o.engine.state_by_name() for n, o in self.prepared.items()},
            "settings": {
                n: [_settings(g) for g in o.param_groups] for n, o in self.prepared.items()
            },
            "loss_scales": {n: scale.state_dict() for n, scale in self.loss_scales.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put everything back, in place."""
        for name, tensor in self._tensors().items():
            tensor.copy_(state["tensors"][name])
        for name, optimizer in self.prepared.items():
            for model in optimizer.models:
                model.stale = True
            for group, settings in zip(
                optimizer.param_groups, state["settings"][name], strict=True
            ):
                group.update(settings)
            own_states = optimizer.engine.state_by_name()
            for parameter, own in own_states.items():
                saved = state["optimizers"][name][parameter]
                for key in [*own]:
                    if key not in saved:
                        del own[key]
                for key, value in saved.items():
                    own[key] = value.clone() if isinstance(value, Tensor) else value
            optimizer.zero_grad()
        for name, scale in self.loss_scales.items():
            scale.load_state_dict(state["loss_scales"][name])

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, those too that are in no state."""
        return {
            f"{learner}.{name}": tensor.detach()
            for learner, optimizer in self.prepared.items()
            for kind in ("named_parameters", "named_buffers")
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


class _Steps:
    """The steps of a script as `find_culprit` takes them."""

    def __init__(self, built: ScriptTask, step: Callable[[], Any]):
        self.built, self._take, self.step = built, step, 0
        self.metrics: dict[str, Tensor] = {}

    def advance(self) -> StepRow:
        row = self.built.take(self._take)
        self.step, self.metrics = row.step, self.built.metrics
        return row


def probe(
    step: Callable[[], Any], optimizer: Optimizers, modules: Sequence[str] = ()
) -> ProbeRecord:
    """Take one step of a script and count every tensor of it by exponent.

    The step is a step of the training like any other, and computes the same.

    Args:
        step: takes it (forward, backward, `optimizer.step()`) and returns its loss, 0-dim.
        optimizer: prepared; several in a list, or by name.
        modules: glob patterns over module names; none: every module without modules inside.

    Returns:
        activations, gradients, weights and updates by module, and the updates that FP16 would
        lose, as numerics/*.json of a run has them.
    """
    task = ScriptTask(optimizer)
    with Watched(task, chosen_modules(task.learners, modules)) as watched:
        row = task.take(step)
        watched.metrics = task.metrics
    return watched.record(row.step)


def explain(step: Callable[[], Any], optimizer: Optimizers, *, steps: int = 1) -> Finding:
    """Find the operation that makes the first value that is not finite; changes nothing.

    Up to `steps` steps of the script are taken, every operation watched (some ten times as slow),
    until one fails: its loss, a gradient, or a weight after it is not finite. Weights, states,
    loss scales and random states are put back afterwards; what else the script keeps is not.

    Args:
        step: takes a whole step and returns its loss, 0-dim.
        optimizer: prepared; several in a list, or by name.
        steps: how many are tried.
    """
    task = ScriptTask(optimizer)
    before = Snapshot(task, task.device)
    before.take(0, 0)
    try:
        for _ in range(steps):
            finding = find_culprit(cast("Steps", _Steps(task, step)), "step")
            if finding.reproduced:
                break
        return finding
    finally:
        before.restore()


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a scheduler may move."""
    values = {key: value for key, value in group.items() if key != "params"}
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}


def _by_name(given: Optimizers) -> dict[str, PreparedOptimizer]:
    if not isinstance(given, Mapping | Sequence):
        given = [given]
    if not isinstance(given, Mapping):
        several = list(given)
        given = {f"model{number}": one for number, one in enumerate(several)}
        if len(several) == 1:
            given = {"model": several[0]}
    for one in given.values():
        if not isinstance(one, PreparedOptimizer):
            raise ValueError(
                f"optimizer: is a {type(one).__name__}; give what mprun.prepare returned"
            )
    if not given:
        raise ValueError("optimizer: none given")
    return dict(given)

"""The optimizers of a script: how their steps are heard of, and who takes those of a wrapper.

No optimizer is wrapped. torch calls two hooks around the step of every one, so one created later is
included: only the parameters that it holds matter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mprun.precision.loss_scale import LossScale
from mprun.precision.torch_update import held_by
from mprun.prepared import passes
from mprun.prepared.passes import run_pass
from mprun.prepared.scaling import Scaling
from mprun.prepared.steps import OptimizerSteps, after_step, before_step
from mprun.torch_private import OF_OPTIMIZERS, replace_engine, replace_recomputed

_WRAPPERS = ("AcceleratedOptimizer", "LightningOptimizer")  # call the step of the wrapped one


def state_of(optimizer: Optimizer) -> OptimizerSteps:
    """Return the `OptimizerSteps` of an optimizer that updates prepared models.

    Raises: ValueError: The optimizer contains no parameter of a prepared model.
    """
    given = base_of(optimizer)
    if isinstance(given, Optimizer):
        steps = OptimizerSteps.of(given)
        steps.refresh()
        if steps.models:
            return steps
    raise ValueError(
        f"optimizer: is a {type(given).__name__} that updates no prepared model; pass the "
        "optimizer that was passed to mprun.prepare"
    )


def base_of(optimizer: Any) -> Any:
    """Return the optimizer that takes the steps: for a wrapper the wrapped one.

    A wrapper is one of a trainer, or has not called `Optimizer.__init__` (timm's Lookahead).
    """
    named = any(kind.__name__ in _WRAPPERS for kind in type(optimizer).__mro__)
    if named or (isinstance(optimizer, Optimizer) and not hasattr(optimizer, OF_OPTIMIZERS)):
        for name in ("optimizer", "base_optimizer", "_base_optimizer"):
            if isinstance(inner := getattr(optimizer, name, None), Optimizer):
                return base_of(inner)
    return optimizer


def take_over(optimizer: Optimizer, scale: LossScale) -> None:
    """Let an optimizer share a loss scale from its first step on, and keep its earlier state."""
    if scale.skips_nonfinite:
        Scaling.of(scale).owners.add(optimizer)
    for own in held_by(optimizer):
        for key, value in optimizer.state.get(own, {}).items():
            # Created before the weights were cast; torch keeps it in their dtype.
            if isinstance(value, Tensor) and value.shape == own.shape:
                optimizer.state[own][key] = value.to(own.dtype)
    state_of(optimizer)


def install_hooks() -> None:
    """Install the hooks around backward passes and steps, for as long as there is a model.

    It is called once that model is alive: the last of earlier ones may go at any time before.
    """
    if not passes.undo:
        passes.undo += [
            register_optimizer_step_pre_hook(before_step).remove,
            register_optimizer_step_post_hook(after_step).remove,
            replace_engine(run_pass),
            replace_recomputed(passes.within_calls),
        ]

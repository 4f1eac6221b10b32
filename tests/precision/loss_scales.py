"""Loss scales of every kind, and what drives them without a network."""

import math

import torch

from mprun.precision.loss_scale import (
    DynamicLossScale,
    DynamicRule,
    LogMaxLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
)

# By kind: what makes one on a device.
KINDS = {
    "none": NoLossScale,
    "static": lambda device="cpu": StaticLossScale(128.0, device=device),
    "dynamic": lambda device="cpu": DynamicLossScale(
        DynamicRule(growth_interval=3, hysteresis=2), device=device
    ),
    "tolerance": lambda device="cpu": DynamicLossScale(
        DynamicRule(growth_interval=3, tolerance=0.3), device=device
    ),
    "logmax": lambda device="cpu": LogMaxLossScale(device=device),
}


def step(scale: LossScale, grad_max: float = 2.0**-8) -> float:
    """The scale after a step with this largest gradient; inf and NaN overflow."""
    value = torch.tensor(grad_max)
    scale.record(~torch.isfinite(value), value)
    scale.update()
    return scale.scale.item()


def trace(scale: LossScale, pattern: str) -> list[float]:
    """The scale after each step; `o` overflows, `.` is clean."""
    return [step(scale, math.inf if letter == "o" else 2.0**-8) for letter in pattern]

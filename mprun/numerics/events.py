"""What the observation of a step notes: values that are not finite, and how large all were."""

from dataclasses import dataclass

import torch

# Where a step is: the batch is cast, modules run, the loss is computed, its gradients propagated,
# gradients are unscaled, weights updated.
INPUT, FORWARD, LOSS, BACKWARD, UNSCALE, UPDATE = (
    "input",
    "forward",
    "loss",
    "backward",
    "unscale",
    "update",
)


@dataclass(slots=True)
class Event:
    """A value that is not finite appeared (`seen`), or was met without its origin.

    order: of appearance. phase: one of this module's. module: path, "" for the model itself.
    operation: name of the ATen operation, or what stands for a kernel that cannot be looked into.
    tensor: what of it, "output", or a weight's name. dtype: of the result. result: "infinity" or
    "NaN". count, of: how many of its values. largest_input: largest finite absolute value read.
    would_be: largest value of the same operation on the same inputs in FP32, where it can be run.
    at_zero: the operation divides by, or takes the logarithm of, a tensor that holds a zero.
    """

    order: int
    phase: str
    module: str
    operation: str
    tensor: str
    dtype: torch.dtype
    result: str
    count: int
    of: int
    seen: bool
    largest_input: float = 0.0
    would_be: float | None = None
    at_zero: bool = False


@dataclass(slots=True)
class Largest:
    """The largest absolute value that a module computed in one phase, and in which dtype."""

    phase: str
    module: str
    value: float
    dtype: torch.dtype

"""List the modules of a task and its tensors by name, and test whether these are finite.

In a task with several learners the learner's name comes first, "generator.layers.conv1".
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from mprun.precision.update import largest
from mprun.prepared import OptimizerSteps


class Learner(Protocol):
    """The parts of a task's learner that are used here (`mprun.tasks.Learner`)."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def steps(self) -> OptimizerSteps: ...
    @property
    def clip_norm(self) -> float | None: ...


def named_learners(task) -> Iterator[tuple[str, Learner]]:
    """Yield (prefix of its modules' names, learner)."""
    for name, learner in task.learners.items():
        yield f"{name}." if len(task.learners) > 1 else "", learner


def named_modules(task) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (name, name inside its model, module) of all modules; the model itself is ""."""
    for prefix, learner in named_learners(task):
        for name, module in learner.model.named_modules():
            yield f"{prefix}{name}".rstrip("."), name, module


def weights(task) -> dict[str, Tensor]:
    """Return the parameters, which are the master weights of a mode that has some."""
    return {
        prefix + name: parameter.detach()
        for prefix, learner in named_learners(task)
        for name, parameter in learner.model.named_parameters()
    }


def buffers(task) -> dict[str, Tensor]:
    """Return the models' buffers, such as running statistics."""
    return {
        prefix + name: buffer
        for prefix, learner in named_learners(task)
        for name, buffer in learner.model.named_buffers()
    }


def optimizer_state(task) -> dict[str, Tensor]:
    """Return the optimizer's state tensors, such as "exp_avg_sq of decoder.weight"."""
    return {
        f"{key} of {prefix}{name}": value
        for prefix, learner in named_learners(task)
        for name, state in learner.steps.state_by_name().items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim()
    }


def carried(task) -> dict[str, Tensor]:
    """Return the state that a language model carries from batch to batch."""
    hidden = task.state_dict().get("hidden") or ()
    names = "hc" if len(hidden) == 2 else range(len(hidden))
    kind = "LSTM" if len(hidden) == 2 else "carried"
    return {f"{kind} state {name}": part for name, part in zip(names, hidden, strict=True)}


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether every value is finite, bool, 0-dim, on the tensors' device; no wait."""
    tensors = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # Torch's maximum norm keeps every infinity and NaN.
    return torch.isfinite(largest(tensors, tensors[0].device))


@torch.no_grad()
def nonfinite(named: Mapping) -> dict:
    """Return name -> "3 of 400 values are NaN" for every tensor with a non-finite value."""
    found = {}
    for name, tensor in named.items():
        if bad := int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0:
            kind = "NaN" if bool(torch.isnan(tensor).any()) else "infinite"
            found[name] = f"{bad} of {tensor.numel()} values are {kind}"
    return found


def bits_of(tensor: Tensor) -> Tensor:
    """Sum a tensor's bit patterns as integers, int64, 0-dim; a changed bit changes the sum."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().contiguous().view(sizes[plain.element_size()]).sum(dtype=torch.int64)

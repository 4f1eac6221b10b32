"""A model in a precision mode and the optimizer that updates it, as a training step uses them.

    learner.zero_grad()
    for each micro-batch:
        loss.backward()            # a prepared model scales and unscales by itself
        learner.end_part()
    learner.step()                 # sum over ranks, mean, clip, optimizer.step(), average

Between `backward` and `step` stands what a script writes there too.

A network may have a function `end_update(skipped)`, which a step calls once before the optimizer's:
it moves what no gradient moves, by what the forward passes of all ranks have counted, and returns
figures of the step. skipped: float32, 0-dim, 1 if the update is; None: it never is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.distributed.reduction import FlatReduction
from mprun.precision import BatchStatistics, Update, WeightAverage, ieee_fp32
from mprun.precision.casting import in_fp32
from mprun.precision.packed_states import refuse_signed
from mprun.precision.torch_update import create_state, creates_late, initialise_state
from mprun.precision.update import (
    by_dtype,
    check_and_unscale,
    copy_exactly,
    each_row_once,
    norms_of,
)
from mprun.prepared import OptimizerSteps, state_of
from mprun.prepared.optimizers import install_hooks
from mprun.prepared.prepared_model import PreparedModel
from mprun.prepared.scaling import check_finite
from mprun.prepared.shards import is_shard, local_of, part_of, whole_of
from mprun.torch_private import foreach_div_, foreach_mul_


@dataclass(frozen=True, slots=True)
class OfParameters:
    """A number for parameters of these names; None: for all of the learner's."""

    value: float
    names: Collection[str] | None = None

    def __contains__(self, name: object) -> bool:
        return self.names is None or name in self.names


class Learner:
    """A prepared model, its optimizer, and what a step does between `backward` and `step`.

    Args:
        prepared: the model; its gradients are unscaled, its weights the master weights.
        optimizer: one of torch's, over its parameters.
        parts: micro-batches of an update, on all ranks; it uses the mean of their gradients.
        clip: maximum global L2 norm of the gradients, in FP32 in every mode, and the parameters
            that count in it and are clipped.
        average: decay of a `WeightAverage`, with its values in `averages` by parameter name, and
            the averaged parameters.
        reduction: sums over ranks; None: `.grad` adds up the micro-batches as they come.
        statistics: BatchNorm's, of a step in several micro-batches.

    Attributes:
        network: what a step calls: the model, or its form by torch.compile or
            DistributedDataParallel, which shares the model's tensors.
        steps: what the optimizer did, and what probes and records read.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        *,
        parts: int = 1,
        clip: OfParameters | None = None,
        average: OfParameters | None = None,
        reduction: FlatReduction | None = None,
        statistics: BatchStatistics | None = None,
    ):
        install_hooks()
        self.prepared, self.model, self.optimizer = prepared, prepared.model, optimizer
        self.network: Callable[..., Any] = self.model
        self.steps: OptimizerSteps = state_of(optimizer)
        self.clip_norm = None if clip is None else clip.value
        self.parts, self.reduction = parts, reduction
        self.statistics = statistics
        if statistics is not None:
            prepared.guard = statistics
        if self.steps.narrow is None:
            initialise_state(optimizer)
        self.named = self.steps.named()
        self.updated = [*self.named.values()]
        if reduction is not None:
            self.network = reduction.network(prepared, self.updated)
        self._clipped = [n for n, name in enumerate(self.named) if clip is None or name in clip]
        self._average: WeightAverage | None = None
        if average is not None:
            chosen = {name: own for name, own in self.named.items() if name in average}
            self._average = WeightAverage(chosen, average.value)

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """Return parameter name -> its average, FP32; empty without any."""
        return {} if self._average is None else self._average.values

    # A step

    def inside(self, *inputs: Any, part_of: Learner | None = None) -> Any:
        """Call the network; outputs stay in the mode's dtype, and their gradients are scaled.

        So a large output exists once, not also in FP32. `outside` takes the loss of them out.

        part_of: the learner whose network made the inputs; this one is then a frozen part of it.
        """
        with self.prepared.staying_inside(None if part_of is None else part_of.prepared):
            return self.network(*inputs)

    def outside(self, loss: Tensor) -> Tensor:
        """Return a loss of what `inside` returned; its gradient is scaled on the way in."""
        return self.prepared.outside(loss)

    def zero_grad(self) -> None:
        """Begin a step: forget gradients; remember BatchNorm's statistics."""
        for own in self.updated:
            own.grad = None
        if self.reduction is not None:
            self.reduction.clear()
        self.prepared.guard_step()

    def sum_at_once(self, last: bool) -> None:
        """Announce whether the next backward pass is the last of a step, which sums over ranks."""
        if self.reduction is not None:
            self.reduction.overlap(last)

    def end_part(self) -> None:
        """End the backward pass of a loss of a micro-batch."""
        if self.reduction is not None:
            self.reduction.end_part()

    @torch.no_grad()
    def step(self, measure: bool = False) -> Update:
        """Update the weights once, unless gradients are not finite and the loss scale skips.

        measure: compute the norm of the gradients even if nothing is clipped.
        """
        self.prepared.tensors.forget()  # 16-bit weights, which the optimizer's memory is not for
        if self.reduction is not None:
            self.reduction.mean()
        elif self.parts > 1:
            for group in by_dtype(own.grad for own in self.updated):
                foreach_div_(group, self.parts)
        for own in self.updated:
            if own.grad is not None and own.grad.is_sparse:
                own.grad = each_row_once(own.grad)
        clip_norm = self.clip_norm
        norm = self._norm() if measure or clip_norm is not None else None
        skipped: Tensor | None = None
        if self.prepared.scale is not None:
            self._look(norm if clip_norm is not None else None)  # a measured one decides nothing
            skipped = self.prepared.found_inf
        end_update = getattr(self.model, "end_update", None)
        figures = {} if end_update is None else end_update(skipped)
        if norm is not None and clip_norm is not None:
            factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
            for group in by_dtype(own if own is None else local_of(own) for own in self._counted):
                foreach_mul_(group, factor)
        self.optimizer.step()
        update = self.steps.last
        assert update is not None
        if self._average is not None:
            self._average.update(update.found_inf)
        return update._replace(grad_norm=norm, figures=figures if measure else {})

    @property
    def _counted(self) -> list[Tensor | None]:
        """Return the gradients that count in the norm, and are clipped."""
        return [self.updated[n].grad for n in self._clipped]

    def _norm(self) -> Tensor:
        """Return the global L2 norm of the gradients that count in it, float32, 0-dim."""
        norms = norms_of if self.reduction is None else self.reduction.norms
        return torch.linalg.vector_norm(norms(self._counted), 2)

    def _look(self, norm: Tensor | None) -> None:
        """Note whether a gradient is not finite.

        The norm of all of them tells it without another read. It is not finite either if the
        square of one overflows FP32, from 1.8e19 on: clipping would make all of them 0.
        """
        found_inf = self.prepared.found_inf.zero_()
        if norm is None or len(self._clipped) < len(self.updated):
            check_finite(self.updated, found_inf)
        else:
            check_and_unscale([norm], found_inf, torch.ones_like(found_inf))

    def set_lr(self, lr: float | Tensor) -> None:
        """Set the rate of every group to `lr` times the group's lr_factor (default 1).

        A tensor is multiplied and copied on the device; each group then needs a separate tensor.
        """
        for group in self.optimizer.param_groups:
            rate = lr * group.get("lr_factor", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate

    # Evaluation

    @contextmanager
    def evaluating(self, in_mode: bool, widens: bool = True) -> Iterator[nn.Module]:
        """Provide the model in eval mode without gradients, with averaged weights if there are any.

        By default it computes in full FP32 arithmetic with the master weights, so that the metric
        measures what was learned; `in_mode` evaluates in the mode's arithmetic.

        widens: outputs are widened to FP32, else they keep the dtype in which the mode made them.
        """
        self.model.eval()
        whole = nullcontext() if self.reduction is None else self.reduction.gathered()
        try:
            with torch.no_grad(), whole:
                if in_mode:
                    with self._averaged(), self.prepared.evaluating_in_mode(widens):
                        yield self.model
                else:
                    with ieee_fp32(), in_fp32(self.model, self.averages):
                        yield self.model
        finally:
            self.model.train()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Replace the parameters by the averages, rounded to their dtypes."""
        kept = {name: self.named[name].detach().clone() for name in self.averages}
        try:
            for name, average in self.averages.items():
                self.named[name].copy_(average)
            yield
        finally:
            for name, value in kept.items():
                self.named[name].copy_(value)

    # State

    @property
    def replicated(self) -> list[Tensor]:
        """Return what has to have the same bits on every rank; shards have no double."""
        delayed = self.prepared.delayed
        whole = [own for own in self.updated if not is_shard(own)]
        return [*whole, *([] if delayed is None else [delayed.history])]

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on beside the loss scale, by names, dtypes kept.

        It is that of one rank: of shards the first has whole tensors, the others none.
        """
        narrow, delayed = self.steps.narrow, self.prepared.delayed
        saved: dict[str, Any] = {
            "model": {name: whole_of(own) for name, own in self.model.state_dict().items()},
            "state": {
                name: {key: _whole(value) for key, value in state.items()}
                for name, state in self.steps.state_by_name().items()
            },
            "averages": dict(self.averages),
        }
        if delayed is not None:
            saved["delayed"] = delayed.state_dict(self.prepared.largest_of_all)
        return saved if narrow is None else saved | {"narrow": narrow.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore bit for bit, in place: a captured graph knows the tensors.

        torch's Optimizer.load_state_dict casts state to the parameter's dtype, and so loses FP32
        momentum of FP16 parameters. This one copies tensor by tensor.

        Raises:
            ValueError: Something does not fit; the message names it.
        """
        for one in saved["state"].values():
            refuse_signed(saved.get("narrow", {}), one)
        own = self.model.state_dict()
        if own.keys() != saved["model"].keys():
            raise ValueError("saved model state must come from the model of this run")
        for name, tensor in own.items():
            copy_exactly(name, tensor, part_of(saved["model"][name], tensor))
        self.prepared.tensors.forget()
        if saved["averages"].keys() != self.averages.keys():
            raise ValueError(
                "saved optimizer state must have moving averages of this run's weights "
                "(optim.average_decay)"
            )
        for name, average in self.averages.items():
            copy_exactly(f"average of {name}", average, saved["averages"][name])
        self._load_optimizer(saved["state"])
        if self.steps.narrow is not None:
            self.steps.narrow.load_state_dict(saved["narrow"])
        if self.prepared.delayed is not None:
            self.prepared.delayed.load_state_dict(saved.get("delayed"))

    def _load_optimizer(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        state = self.steps.state_by_name()
        if saved.keys() != state.keys():
            raise ValueError(
                "saved optimizer state must come from the model and precision mode of this run"
            )
        for name, own in state.items():
            kept = {key: _part(value, self.named[name]) for key, value in saved[name].items()}
            if not own and creates_late(self.optimizer):
                create_state(self.optimizer, self.named[name], kept)
                continue
            if kept.keys() != own.keys():
                raise ValueError(
                    f"saved optimizer state of {name} must come from the optimizer of this run"
                )
            for key, value in kept.items():
                copy_exactly(f"{key} of {name}", own[key], value)


def _whole(value: Any) -> Any:
    return whole_of(value) if isinstance(value, Tensor) else value


def _part(value: Any, like: Tensor) -> Any:
    return part_of(value, like) if isinstance(value, Tensor) else value

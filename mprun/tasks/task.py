"""The interface of a task, and the model and optimizer that a task trains."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mprun.config.metrics import LOSS, Metric
from mprun.data.source import Batch, Source
from mprun.distributed.ranks import ALONE, Ranks, seed_micro_batch
from mprun.precision import (
    BatchNormGuard,
    CastModel,
    ForwardContext,
    LossScale,
    MixedPrecisionOptimizer,
    PrecisionPolicy,
    ieee_fp32,
)
from mprun.precision.philox import micro_batches

T = TypeVar("T", bound=Callable[..., Any])


class Task(ABC):
    """A learning task with model, optimizer, data and a readable training step.

    Args:
        accumulate: micro-batches of an update, over all ranks.
        eval_in_mode: evaluate in the mode's arithmetic instead of FP32.
    """

    sample = "image"  # the unit of throughput, or "token", "utterance"
    metrics: Sequence[Metric] = (LOSS,)  # that `evaluate` returns
    casts_images = True  # images are loaded in the dtype of the parameters
    channels_last = False  # images are in NHWC order; set by the code that builds the networks so
    learners: dict[str, "Learner"]  # the trained models, by name
    loss_scales: dict[str, LossScale]  # by their names in the records
    guards: "Sequence[BatchStatistics]" = ()  # of the trained models
    accumulate = 1
    ranks: Ranks = ALONE
    seed = 0  # of the random numbers if an update has several micro-batches, and of roundings
    _step = 0
    # Called with the number of held-out samples that an evaluation took so far.
    on_evaluated: Callable[[int], None] | None = None

    def __init__(
        self,
        data: Source,
        policy: PrecisionPolicy,
        forward_context: ForwardContext,
        accumulate: int,
        eval_in_mode: bool,
    ):
        self.data, self.policy, self.forward_context = data, policy, forward_context
        self.accumulate, self.eval_in_mode = accumulate, eval_in_mode
        self._draws = policy.draws
        self.samples_per_step = data.samples_per_batch * accumulate
        self.steps_per_epoch = data.batches_per_epoch // accumulate

    def train_step(self, step: int, measure: bool = False) -> dict[str, Tensor]:
        """Update each learner once by `compute(load(step), measure)`, without synchronisation."""
        self.step = step
        return self.compute(self.load(step), measure)

    @property
    def step(self) -> int:
        """Return the current one; the caller of `compute` sets it, before a replay too."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if self._draws:
            device = self.forward_context.device
            micro_batches.begin_step(device, self.seed, step * self.accumulate)

    def load(self, step: int) -> Iterator[Any]:
        """Load this rank's micro-batches of `step` (from 0); the host's part.

        Each is read only after the use of the one before. By default they are images, in the dtype
        of the parameters if `casts_images`, and in NHWC order in memory if `channels_last` is set.
        A batch belongs only to the caller, and the source's FP32 images are released after the
        cast: they would take twice the memory that backward keeps in a mode of 16-bit parameters.
        """
        dtype = self.policy.param_dtype if self.casts_images else None
        for number in self.numbers:
            index = step * self.accumulate + number
            yield _laid_out(self.data.train_batch(index), self.channels_last, dtype)

    @property
    def numbers(self) -> range:
        """The micro-batches of an update that this rank takes."""
        return self.ranks.micro_batches(self.accumulate)

    @property
    def in_parts(self) -> bool:
        """True if an update consists of several micro-batches, on one or more ranks."""
        return self.accumulate > 1 or self.ranks.world > 1

    def each_part(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the micro-batches, each with a separate seed.

        Each starts from the step's BatchNorm statistics, and its own are put aside
        (`mean_statistics`). So the result does not depend on which rank takes it.
        """
        left = iter(batches)
        for number in self.numbers:
            if self._draws:
                micro_batches.begin(self.forward_context.device, number)
            if self.in_parts:
                self._seed_part(number)
                for learner in self.learners.values():
                    learner.sum_at_once(number == self.numbers[-1])
            yield next(left)
            if self.in_parts:
                for guard in self.guards:
                    guard.end_part()

    def mean_statistics(self, guards: "Iterable[BatchStatistics]") -> None:
        """Set BatchNorm's statistics to the mean over the micro-batches of all ranks."""
        if self.in_parts:
            for guard in guards:
                guard.take_mean(self.ranks.gather)

    def draws_in_parts(self) -> bool:
        """Return, after a step, whether its last micro-batch drew on a GPU from a separate seed.

        A captured step has only one seed.
        """
        device = self.forward_context.device
        if not self.in_parts or device.type != "cuda":
            return False
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        return generator.get_offset() > 0

    def mean_over_parts(self, values: list[Tensor]) -> Tensor:
        """Return the mean of a number (0-dim) over the micro-batches of all ranks."""
        if not self.in_parts:
            return values[0]
        return self.ranks.gather(torch.stack(values)).mean()

    def _seed_part(self, *number: int) -> None:
        seed_micro_batch(self.forward_context.device, self.seed, self.step, *number)

    @abstractmethod
    def compute(self, batches: Iterable[Any], measure: bool = False) -> dict[str, Tensor]:
        """Run the step on the device alone, so that it can be captured.

        The result is 0-dim device tensors by metric name: always `loss` and `loss_scale`;
        `found_inf` if updates can be skipped; `grad_norm` if clipped or `measure` is True.
        """

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return `metrics` of the whole held-out split: name -> value; always `loss`."""

    @property
    def evaluating_ranks(self) -> Ranks:
        """The ranks that split the held-out batches: all if `evaluate` is `shared`, or this one."""
        return self.ranks if getattr(type(self).evaluate, "shares_held_out", False) else ALONE

    def held_out(self) -> Iterator[Batch]:
        """Iterate over the held-out batches that this one of the `evaluating_ranks` takes."""
        ranks, done, data = self.evaluating_ranks, 0, self.data
        whole = ranks.world == 1
        for batch in data.eval_batches() if whole else data.eval_share(ranks.rank, ranks.world):
            yield batch
            done += self.samples_of(batch) * ranks.world
            if self.on_evaluated is not None:
                self.on_evaluated(done)

    def samples_of(self, batch: Batch) -> int:
        """Return the number of samples of a held-out batch, in the unit of `sample`."""
        return len(batch[0])

    def samples(self) -> Tensor | None:
        """Return generated images, float [n, channels, h, w] in [0, 1], or None without any."""
        return None

    @abstractmethod
    def state_dict(self) -> dict: ...

    @abstractmethod
    def load_state_dict(self, state: dict) -> None: ...

    def _eval_inputs(self, inputs: Tensor) -> Tensor:
        return self.policy.cast_inputs(inputs) if self.eval_in_mode else inputs


def shared(evaluate: T) -> T:
    """Mark an `evaluate` whose result comes from `Ranks.mean`: the ranks split its batches."""
    evaluate.shares_held_out = True  # type: ignore[attr-defined]
    return evaluate


class BatchStatistics(BatchNormGuard):
    """BatchNorm's statistics of a step that consists of several micro-batches."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.parts: list[list[Tensor]] = []  # of the micro-batches of this step, by dtype

    def save(self) -> None:
        self.parts = []
        super().save()

    @torch.no_grad()
    def end_part(self) -> None:
        """End a micro-batch: keep its statistics and restore those from `save`."""
        self.parts.append([flat.clone() for flat in self.flat])
        for saved, flat in zip(self.saved, self.flat, strict=True):
            flat.copy_(saved)

    @torch.no_grad()
    def take_mean(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Set the statistics to the mean of those that the micro-batches of all ranks left.

        Integers (counts of batches) are those of the first. `gather` makes `[parts, n]` of all
        ranks, in the order of micro-batches, from those of this rank.
        """
        made, self.parts = self.parts, []
        for flat, *own in zip(self.flat, *made, strict=True):
            parts = gather(torch.stack(own)).unbind()
            flat.copy_(parts[0])
            if flat.is_floating_point():
                for part in parts[1:]:  # in a fixed order: the same bits for any number of ranks
                    flat.add_(part)
                flat.div_(len(parts))


@dataclass(slots=True)
class Learner:
    """A model in its policy's dtypes, and the optimizer that updates it."""

    cast: CastModel
    optimizer: MixedPrecisionOptimizer
    # What a step calls: the model, or its form by torch.compile, which shares the model's tensors.
    network: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.network = self.model

    @property
    def model(self) -> nn.Module:
        return self.cast.module

    def sum_at_once(self, last: bool) -> None:
        """Announce whether the next backward pass is the last of a step, which sums over ranks."""
        if self.optimizer.reduction is not None:
            self.optimizer.reduction.overlap(last)

    @contextmanager
    def evaluating(self, forward_context: ForwardContext, in_mode: bool) -> Iterator[nn.Module]:
        """Provide the model in eval mode without gradients, with averaged weights if there are any.

        By default it has the master weights in full FP32 arithmetic, so that the metric measures
        what was learned; `in_mode` evaluates in the mode's arithmetic. Model, flags and random
        state are restored afterwards.
        """
        self.model.eval()
        try:
            if in_mode:
                with torch.no_grad(), self._averaged(), forward_context, forward_context.autocast():
                    with self.cast.in_mode() as model:
                        yield model
            else:
                with torch.no_grad(), ieee_fp32():
                    with self.cast.in_fp32(self.optimizer.averages) as model:
                        yield model
        finally:
            self.model.train()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Replace the model's parameters by the averages, rounded to their dtypes."""
        parameters = dict(self.model.named_parameters())
        averages = self.optimizer.averages
        kept = {name: parameters[name].clone() for name in averages}
        try:
            for name, average in averages.items():
                parameters[name].copy_(average)
            yield
        finally:
            for name, value in kept.items():
                parameters[name].copy_(value)

    def state_dict(self) -> dict:
        return {"model": self.cast.state_dict(), "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, saved: dict) -> None:
        """Restore bit for bit; ValueError names what does not fit."""
        self.cast.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


def as_row(*numbers: Tensor) -> Tensor:
    """Stack numbers of one held-out batch (0-dim) as float64 `[n]`, for `Ranks.mean`."""
    return torch.stack([number.double() for number in numbers])


def _laid_out(batch: Batch, channels_last: bool, dtype: torch.dtype | None) -> Batch:
    images, labels = batch
    # Images of one channel are already in NHWC order: other strides are another convolution.
    moves = channels_last and not images.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if moves else torch.preserve_format
    if dtype is None or not images.is_floating_point():
        dtype = images.dtype
    return images.to(dtype, memory_format=memory_format), labels

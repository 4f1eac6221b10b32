"""The interface of a task: what it trains, on which batches, and how it is evaluated."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from mprun.data.source import Batch, Source
from mprun.distributed.ranks import ALONE, Ranks, seed_micro_batch
from mprun.precision import ForwardContext, LossScale, PrecisionPolicy
from mprun.precision.philox import micro_batches
from mprun.prepared.scaling import Scaling
from mprun.record.metric_facts import LOSS, Metric
from mprun.tasks.learner import Learner

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
    learners: dict[str, Learner]  # the trained models, by name
    loss_scales: dict[str, LossScale]  # by their names in the records
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
        accumulate: int = 1,
        eval_in_mode: bool = False,
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

    def twin(self, learners: Mapping[str, Any], forward_context: ForwardContext) -> Self:
        """Return the same task with other learners, of its names, in another mode without a loss
        scale; it shares the data."""
        twin = copy.copy(self)
        twin.policy, twin.forward_context = forward_context.policy, forward_context
        twin.learners, twin.loss_scales = {**learners}, {}
        return twin

    def switch(self, forward_context: ForwardContext) -> None:
        """Train in another mode from the next step on; everything else goes on."""
        for learner in self.learners.values():
            learner.prepared.switch(forward_context)
        self.policy, self.forward_context = forward_context.policy, forward_context
        self._draws = self.policy.draws

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

    def watched(self) -> AbstractContextManager[Any]:
        """Return the context of a loss and its backward pass.

        A prepared model enters the mode's context by itself. A loss in 16 bits needs the emulation
        too, and what watches a whole step sees the loss.
        """
        needs = self.policy.loss_dtype.itemsize == 2 or self.forward_context.watchers
        return self.forward_context if needs else nullcontext()

    @contextmanager
    def attempted(self) -> Iterator[None]:
        """Enclose a step that may fail, and be taken again: what it has frozen, as a GAN its
        discriminator, is not, and loss scales have heard of no optimizer."""
        parameters = [p for own in self.learners.values() for p in own.model.parameters()]
        trained = [parameter.requires_grad for parameter in parameters]
        try:
            yield
        except BaseException:
            for parameter, value in zip(parameters, trained, strict=True):
                parameter.requires_grad_(value)
            for scale in self.loss_scales.values():
                Scaling.of(scale).forget()
            raise

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
            for learner in self.learners.values():
                if learner.statistics is not None:
                    learner.statistics.end_part()

    def mean_statistics(self, *learners: Learner) -> None:
        """Set BatchNorm's statistics to the mean over the micro-batches of all ranks."""
        for learner in learners:
            if learner.statistics is not None:
                learner.statistics.take_mean(self.ranks.gather)

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


def shared(evaluate: T) -> T:
    """Mark an `evaluate` whose result comes from `Ranks.mean`: the ranks split its batches."""
    evaluate.shares_held_out = True  # type: ignore[attr-defined]
    return evaluate


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

"""What a task is, and the model with its optimizer that a task trains."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mprun.data.source import Batch, Source
from mprun.precision import (
    CastModel,
    ForwardContext,
    LossScale,
    MixedPrecisionOptimizer,
    PrecisionPolicy,
    fp32_copy,
    ieee_fp32,
)
from mprun.precision.optimizer import copy_exactly


class Task(ABC):
    """What is learned and how: owns model, optimizer, data and a step to read through.

    Attributes:
        sample: the unit of throughput, "image" or "token".
        channels_last: images in NHWC order; whoever builds the networks so sets it.
        learners: what is trained, by name.
        loss_scales: by the name that each has in the records.
        on_evaluated: is told of how many held-out samples an evaluation has taken so far.
    """

    sample = "image"
    channels_last = False
    data: Source
    policy: PrecisionPolicy
    eval_in_mode: bool
    learners: dict[str, "TrainState"]
    loss_scales: dict[str, LossScale]
    samples_per_step: int
    steps_per_epoch: int
    on_evaluated: Callable[[int], None] | None = None

    @abstractmethod
    def train_step(self, step: int, measure: bool = False) -> dict[str, Tensor]:
        """`compute(load(step), measure)`: one update of each learner, without synchronisation."""

    @abstractmethod
    def load(self, step: int) -> Iterator[Any]:
        """What is decided on the host: the micro-batches of `step` (from 0), one by one."""

    @abstractmethod
    def compute(self, batches: Iterable[Any], measure: bool = False) -> dict[str, Tensor]:
        """The step on the device alone, so that it can be captured.

        Returns:
            0-dim device tensors by metric name: always `loss` and `loss_scale`; `found_inf` where
            updates can be skipped; `grad_norm` where something is clipped or `measure` asks for it.
        """

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Metrics of the whole held-out split; always `loss`."""

    def held_out(self) -> Iterator[Batch]:
        """The held-out batches in their order, for `evaluate`."""
        done = 0
        for batch in self.data.eval_batches():
            yield batch
            done += batch[1].numel()
            if self.on_evaluated is not None:
                self.on_evaluated(done)

    def samples(self) -> Tensor | None:
        """Generated images, float [n, channels, h, w] in [0, 1]; None: of no such task."""
        return None

    @abstractmethod
    def state_dict(self) -> dict: ...

    @abstractmethod
    def load_state_dict(self, state: dict) -> None: ...

    def _eval_inputs(self, inputs: Tensor) -> Tensor:
        return self.policy.cast_inputs(inputs) if self.eval_in_mode else inputs


@dataclass(slots=True)
class TrainState:
    """A model in its policy's dtypes, the optimizer that updates it, and how to build it anew.

    Attributes:
        network: what a training step calls: the model, or the form that torch.compile made of it,
            which shares the model's tensors.
    """

    cast: CastModel
    optimizer: MixedPrecisionOptimizer
    build_model: Callable[[], nn.Module]
    network: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.network = self.model

    @property
    def model(self) -> nn.Module:
        return self.cast.module

    @contextmanager
    def evaluating(self, arithmetic: ForwardContext, in_mode: bool) -> Iterator[nn.Module]:
        """The model in eval mode without gradients.

        By default the master weights in full FP32 arithmetic, whatever the mode, so that the
        metric measures what was learned; `in_mode` evaluates in the mode's own arithmetic. Where
        weights are averaged their averages take their place. Leaves model, flags and random state
        as they were.
        """
        optimizer = self.optimizer
        with torch.no_grad():
            if in_mode:
                self.model.eval()
                try:
                    with self._averaged(), arithmetic, arithmetic.autocast():
                        yield self.model
                finally:
                    self.model.train()
            else:
                with ieee_fp32():
                    # Frozen parameters have a master that no optimizer holds.
                    weights = {**self.cast.masters, **optimizer.masters, **optimizer.averages}
                    yield fp32_copy(self.build_model, self.cast, weights).eval()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within it the model's own parameters are the averages, rounded to their dtypes."""
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
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, saved: dict) -> None:
        """Restore bit for bit; ValueError names what does not fit."""
        own = self.model.state_dict()
        if own.keys() != saved["model"].keys():
            raise ValueError("model state is of another model")
        for name, tensor in own.items():
            copy_exactly(name, tensor, saved["model"][name])
        self.optimizer.load_state_dict(saved["optimizer"])

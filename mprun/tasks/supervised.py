"""The supervised step: one model, micro-batches, a loss.

`compute` is the paper's training step from top to bottom; classification, language modelling and
reconstruction differ in what they do with a batch, and add a loss and an evaluation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.data.source import Batch, Source
from mprun.precision import Arithmetic, LossScale, PrecisionPolicy
from mprun.tasks.task import Learner


class Supervised(ABC):
    """A task with one model and one loss; see `mprun.tasks.task.Task`.

    Args:
        learner: the model with its optimizer.
        data: where batches come from.
        accumulate: micro-batches of an update.
        eval_in_mode: evaluate in the mode's own arithmetic instead of FP32.
    """

    sample = "image"
    channels_last = False  # images in NHWC order; whoever builds the networks so sets it

    def __init__(
        self,
        learner: Learner,
        data: Source,
        policy: PrecisionPolicy,
        arithmetic: Arithmetic,
        loss_scale: LossScale,
        *,
        accumulate: int = 1,
        eval_in_mode: bool = False,
    ):
        self.learner, self.data = learner, data
        self.policy, self.arithmetic, self.loss_scale = policy, arithmetic, loss_scale
        self.accumulate, self.eval_in_mode = accumulate, eval_in_mode
        self.learners = {"model": learner}
        self.loss_scales = {"loss_scale": loss_scale}
        self.samples_per_step = data.samples_per_batch * accumulate
        self.steps_per_epoch = data.batches_per_epoch // accumulate

    def train_step(self, step: int, measure: bool = False) -> dict[str, Tensor]:
        """One update from `accumulate` micro-batches; 0-dim device tensors, no synchronisation.

        Args:
            measure: also compute the gradient norm.
        """
        return self.compute(self.load(step), measure)

    def load(self, step: int) -> Iterator[Any]:
        """The micro-batches of a step, one after the other: all that depends on its number."""
        cast = self.policy.cast_inputs
        return micro_batches(self.data, step, self.accumulate, self.channels_last, cast)

    def compute(self, batches: Iterable[Any], measure: bool = False) -> dict[str, Tensor]:
        """`train_step` on these micro-batches: device work alone, so it can be captured."""
        optimizer = self.learner.optimizer
        optimizer.zero_grad()
        losses = []
        for batch in batches:
            with self.arithmetic:
                loss, propagated = self.loss(batch)
                del batch  # backward has what it needs: of images, autocast's 16-bit copy
                optimizer.backward(share(propagated, self.accumulate))
            losses.append(loss.detach())
        update = optimizer.step(measure)
        self.loss_scale.update()
        return {"loss": mean(losses), **update.metrics()}

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch as it is reported and as it is propagated, both 0-dim."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Metrics over the whole held-out split."""

    def samples(self) -> Tensor | None:
        """None: such a task generates no images."""
        return None

    def state_dict(self) -> dict:
        return {"learner": self.learner.state_dict(), "loss_scale": self.loss_scale.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_state_dict(state["learner"])
        self.loss_scale.load_state_dict(state["loss_scale"])


def micro_batches(
    data: Source,
    step: int,
    count: int,
    channels_last: bool,
    cast: Callable[..., Tensor],
) -> Iterator[Batch]:
    """The `count` batches of a step (from 0), each read only once the one before it is used.

    Args:
        channels_last: with images in NHWC order in memory, as a network in that layout wants them.
        cast: (images, memory_format=...) -> the images as the step wants them. A batch belongs to
            the caller alone, and the source's FP32 images are released where they were cast: in a
            mode with 16-bit parameters they would be as large as twice what backward keeps of them.
    """
    for number in range(count):
        yield _laid_out(data.train_batch(step * count + number), channels_last, cast)


def _laid_out(batch: Batch, channels_last: bool, cast: Callable[..., Tensor]) -> Batch:
    images, labels = batch
    # Images of one channel are in NHWC order as they are: other strides are another convolution.
    moves = channels_last and not images.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if moves else torch.preserve_format
    return cast(images, memory_format=memory_format), labels


def share(loss: Tensor, count: int) -> Tensor:
    """The part of a micro-batch's mean loss in the mean over `count` micro-batches."""
    return loss if count == 1 else loss / count


def mean(losses: list[Tensor]) -> Tensor:
    """The mean of 0-dim losses."""
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


def cross_entropy(
    logits: Tensor, labels: Tensor, dtype: torch.dtype, label_smoothing: float = 0.0
) -> Tensor:
    """Mean over [n, classes] logits, computed in `dtype`: the bits of casting the logits first.

    CUDA's softmax reads FP16 and computes in FP32, and its backward writes FP16: neither the
    logits nor their gradient exist in FP32, which for a large vocabulary is most of the memory.
    """
    if label_smoothing:
        return F.cross_entropy(logits.to(dtype), labels, label_smoothing=label_smoothing)
    return F.nll_loss(F.log_softmax(logits, 1, dtype=dtype), labels)

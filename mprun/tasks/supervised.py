"""The supervised step, and its three tasks: classification, reconstruction, language modelling.

`Supervised.compute` is the paper's training step from top to bottom; the tasks differ in what they
do with a batch, and add a loss and an evaluation.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.data.source import Batch, Source
from mprun.precision import ForwardContext, LossScale, PrecisionPolicy
from mprun.tasks.task import Task, TrainState


class Supervised(Task):
    """A task with one model and one loss.

    Args:
        learner: the model with its optimizer.
        data: where batches come from.
        accumulate: micro-batches of an update.
        eval_in_mode: evaluate in the mode's own arithmetic instead of FP32.
    """

    def __init__(
        self,
        learner: TrainState,
        data: Source,
        policy: PrecisionPolicy,
        arithmetic: ForwardContext,
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
        return self.compute(self.load(step), measure)

    def load(self, step: int) -> Iterator[Any]:
        dtype = self.policy.param_dtype
        return micro_batches(self.data, step, self.accumulate, self.channels_last, dtype)

    def compute(self, batches: Iterable[Any], measure: bool = False) -> dict[str, Tensor]:
        """One update from the micro-batches."""
        optimizer = self.learner.optimizer
        optimizer.zero_grad()
        losses = []
        for batch in batches:
            with self.arithmetic:
                loss, propagated = self.loss(batch)
                del batch  # backward has what it needs: of images, autocast's 16-bit copy
                share = propagated if self.accumulate == 1 else propagated / self.accumulate
                optimizer.backward(share)
            losses.append(loss.detach())
        update = optimizer.step(measure)
        self.loss_scale.update()
        mean = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        return {"loss": mean, **update.metrics()}

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch as it is reported and as it is propagated, both 0-dim."""

    def state_dict(self) -> dict:
        return {"learner": self.learner.state_dict(), "loss_scale": self.loss_scale.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_state_dict(state["learner"])
        self.loss_scale.load_state_dict(state["loss_scale"])


class Classification(Supervised):
    """Cross-entropy on labelled images; metrics loss (nats), top1 and top5 (percent)."""

    def __init__(self, *arguments: Any, label_smoothing: float = 0.0, **named: Any):
        super().__init__(*arguments, **named)
        self.label_smoothing = label_smoothing

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, labels = batch
        with self.arithmetic.autocast():
            logits = self.learner.network(images)
        loss = cross_entropy(logits, labels, self.policy.loss_dtype, self.label_smoothing)
        return loss, loss

    def evaluate(self) -> dict[str, float]:
        """Mean loss and accuracies over the whole held-out split."""
        totals = torch.zeros(3, dtype=torch.float64, device=self.arithmetic.device)
        count = 0
        with self.learner.evaluating(self.arithmetic, self.eval_in_mode) as model:
            for images, labels in self.held_out():
                logits = model(self._eval_inputs(images)).float()
                best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
                totals[0] += F.cross_entropy(logits, labels, reduction="sum")
                totals[1] += best[:, 0].sum()
                totals[2] += best.any(dim=1).sum()
                count += len(labels)
        loss, top1, top5 = (totals / count).tolist()
        return {"loss": loss, "top1": 100 * top1, "top5": 100 * top5}


class Reconstruction(Supervised):
    """Mean squared error per pixel of a reconstructed image; the one metric is loss."""

    def load(self, step: int) -> Iterator[Batch]:
        """As for every task, but in FP32: the images are the target as well."""
        return micro_batches(self.data, step, self.accumulate, self.channels_last, None)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, dtype = batch[0], self.policy.loss_dtype
        with self.arithmetic.autocast():
            outputs = self.learner.network(self.policy.cast_inputs(images))
        loss = F.mse_loss(outputs.to(dtype), images.to(dtype))
        return loss, loss

    def evaluate(self) -> dict[str, float]:
        """Mean squared error per pixel over the whole held-out split."""
        total = torch.zeros((), dtype=torch.float64, device=self.arithmetic.device)
        count = 0
        with self.learner.evaluating(self.arithmetic, self.eval_in_mode) as model:
            for images, _ in self.held_out():
                outputs = model(self._eval_inputs(images)).float()
                total += F.mse_loss(outputs, images, reduction="sum")
                count += images.numel()
        return {"loss": total.item() / count}


class Tokens(NamedTuple):
    """A micro-batch: int64 [time, batch] twice.

    Attributes:
        fresh: the state starts from zero before it.
    """

    tokens: Tensor
    targets: Tensor
    fresh: bool


class LanguageModel(Supervised):
    """Cross-entropy in nats per token; metrics loss and perplexity.

    Truncated backpropagation: the state goes on from batch to batch within an epoch and starts
    from zero in each epoch and in each evaluation (Zaremba et al., arXiv 1409.2329).

    Args:
        sampled: the model returns the losses of the tokens itself, as `SampledLSTM` does: in
            training from a sample of the words, so that the training loss is lower than the full
            one; in evaluation over all words.
        time_reduction: "mean", the gradient is that of the mean over all tokens; "sum", that of the
            sum over time, averaged over the streams of a batch (sequence_length times as large), as
            in the published recipes (Zaremba et al.; the code behind bigLSTM). The loss that is
            reported is the mean in both.
    """

    sample = "token"

    def __init__(
        self,
        *arguments: Any,
        sampled: bool = False,
        time_reduction: str = "mean",
        **named: Any,
    ):
        super().__init__(*arguments, **named)
        if time_reduction not in ("mean", "sum"):
            raise ValueError(f"time_reduction={time_reduction!r}: must be 'mean' or 'sum'")
        self.sampled, self.time_reduction = sampled, time_reduction
        self.hidden: tuple[Tensor, ...] | None = None
        self._before: tuple[Tensor, ...] | None = None  # the step that is being taken

    def load(self, step: int) -> Iterator[Tokens]:
        """`accumulate` consecutive batches of the same streams."""
        first = step * self.accumulate
        for index in range(first, first + self.accumulate):
            tokens, targets = self.data.train_batch(index)
            yield Tokens(tokens, targets, index % self.data.batches_per_epoch == 0)

    def compute(self, batches: Iterable[Tokens], measure: bool = False) -> dict[str, Tensor]:
        self._before = self.hidden
        metrics = super().compute(batches, measure)
        if "found_inf" in metrics and self.hidden is not None:
            # The forward pass of a skipped step may have overflowed: its state is not carried on.
            skipped = metrics["found_inf"] != 0
            before = self._before or tuple(torch.zeros_like(part) for part in self.hidden)
            pairs = zip(before, self.hidden, strict=True)
            self.hidden = tuple(torch.where(skipped, old, new) for old, new in pairs)
        return metrics

    def loss(self, batch: Tokens) -> tuple[Tensor, Tensor]:
        tokens, targets, fresh = batch
        if fresh:
            self.hidden = self._before = None
        model = self.learner.network
        with self.arithmetic.autocast():
            inputs = (tokens, targets) if self.sampled else (tokens,)
            outputs, hidden = model(*inputs, self.hidden)
        if self.sampled:
            loss = outputs.mean()
        else:
            dtype = self.policy.loss_dtype
            loss = cross_entropy(outputs.flatten(0, 1), targets.flatten(), dtype)
        self.hidden = tuple(part.detach() for part in hidden)
        return loss, loss * len(tokens) if self.time_reduction == "sum" else loss

    def evaluate(self) -> dict[str, float]:
        """Mean loss per held-out token, state carried through, and its exponential."""
        total = torch.zeros((), dtype=torch.float64, device=self.arithmetic.device)
        count, hidden = 0, None
        with self.learner.evaluating(self.arithmetic, self.eval_in_mode) as model:
            for tokens, targets in self.held_out():
                if self.sampled:
                    losses, hidden = model(tokens, targets, hidden)
                    total += losses.sum(dtype=torch.float64)
                else:
                    logits, hidden = model(tokens, hidden)
                    logits = logits.flatten(0, 1).float()
                    total += F.cross_entropy(logits, targets.flatten(), reduction="sum")
                count += targets.numel()
        loss = total.item() / count
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}

    def state_dict(self) -> dict:
        return super().state_dict() | {"hidden": self.hidden}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        hidden, device = state["hidden"], self.arithmetic.device
        self.hidden = None if hidden is None else tuple(part.to(device) for part in hidden)


def micro_batches(
    data: Source, step: int, count: int, channels_last: bool, dtype: torch.dtype | None
) -> Iterator[Batch]:
    """The `count` batches of a step (from 0), each read only once the one before it is used.

    Args:
        channels_last: with images in NHWC order in memory, as a network in that layout wants them.
        dtype: of the images as the step wants them, None: as they are. A batch belongs to the
            caller alone, and the source's FP32 images are released where they were cast: in a mode
            with 16-bit parameters they would be as large as twice what backward keeps of them.
    """
    for number in range(count):
        yield _laid_out(data.train_batch(step * count + number), channels_last, dtype)


def _laid_out(batch: Batch, channels_last: bool, dtype: torch.dtype | None) -> Batch:
    images, labels = batch
    # Images of one channel are in NHWC order as they are: other strides are another convolution.
    moves = channels_last and not images.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if moves else torch.preserve_format
    if dtype is None or not images.is_floating_point():
        dtype = images.dtype
    return images.to(dtype, memory_format=memory_format), labels


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

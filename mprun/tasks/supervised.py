"""The supervised step, and its three tasks: classification, reconstruction, language modelling.

`Supervised.compute` is the paper's training step from top to bottom.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.config.components import TASKS
from mprun.data.source import Batch, Source
from mprun.distributed.ranks import ALONE, Ranks
from mprun.precision import ForwardContext, LossScale, NoLossScale, PrecisionPolicy
from mprun.tasks.learner import Learner
from mprun.tasks.task import Task, as_row, shared


class Supervised(Task):
    """A task with one model and one loss; the learner has `parts` equal to `accumulate`."""

    def __init__(
        self,
        learner: Learner,
        data: Source,
        policy: PrecisionPolicy,
        forward_context: ForwardContext,
        loss_scale: LossScale,
        **common: Any,
    ):
        super().__init__(data, policy, forward_context, **common)
        self.learner, self.loss_scale = learner, loss_scale
        self.learners, self.loss_scales = {"model": learner}, {"loss_scale": loss_scale}

    def compute(self, batches: Iterable[Any], measure: bool = False) -> dict[str, Tensor]:
        learner = self.learner
        learner.zero_grad()
        losses = []
        for batch in self.each_part(batches):
            with self.watched():
                loss, propagated = self.loss(batch)
                del batch  # backward keeps what it needs: the 16-bit copy of images
                propagated.backward()
            learner.end_part()
            losses.append(loss.detach())
        self.mean_statistics(learner)
        update = learner.step(measure)
        return {"loss": self.mean_over_parts(losses), **update.metrics()}

    def twin(self, learners: Mapping[str, Any], forward_context: ForwardContext) -> Self:
        twin = super().twin(learners, forward_context)
        twin.learner, twin.loss_scale = learners["model"], NoLossScale(forward_context.device)
        return twin

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the reported and the propagated loss of a micro-batch, both 0-dim."""

    def state_dict(self) -> dict:
        return {"learner": self.learner.state_dict(), "loss_scale": self.loss_scale.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_state_dict(state["learner"])
        self.loss_scale.load_state_dict(state["loss_scale"])


class Classification(Supervised):
    """Cross-entropy on labelled images; metrics loss (nats), top1 and top5 (percent).

    A network with auxiliary heads returns a tuple in training: its logits, then theirs, whose
    losses are propagated times `aux_weight` and not reported.
    """

    metrics = TASKS["classification"].metrics

    def __init__(
        self, *arguments: Any, label_smoothing: float = 0.0, aux_weight: float = 0.0, **named: Any
    ):
        super().__init__(*arguments, **named)
        self.label_smoothing, self.aux_weight = label_smoothing, aux_weight

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, labels = batch
        outputs = self.learner.inside(images)
        dtype, smoothing = self.policy.loss_dtype, self.label_smoothing

        def loss_of(logits: Tensor) -> Tensor:
            return self.learner.outside(cross_entropy(logits, labels, dtype, smoothing))

        if isinstance(outputs, Tensor):
            loss = loss_of(outputs)
            return loss, loss
        loss, *auxiliary = map(loss_of, outputs)
        return loss, loss + self.aux_weight * sum(auxiliary)

    @shared
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss and the accuracies over the whole held-out split."""
        rows, count = [], 0
        with self.learner.evaluating(self.eval_in_mode) as model:
            for images, labels in self.held_out():
                logits = model(images).float()
                best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
                right = best[:, 0].sum(), best.any(dim=1).sum()
                rows.append(as_row(F.cross_entropy(logits, labels, reduction="sum"), *right))
                count += len(labels)
        loss, top1, top5 = self.ranks.mean(rows, count)
        return {"loss": loss, "top1": 100 * top1, "top5": 100 * top5}


class Reconstruction(Supervised):
    """Mean squared error per pixel of a reconstructed image; the only metric is loss."""

    metrics = TASKS["reconstruction"].metrics
    casts_images = False  # they are also the target

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, dtype = batch[0], self.policy.loss_dtype
        outputs = self.learner.inside(images)
        loss = self.learner.outside(F.mse_loss(outputs.to(dtype), images.to(dtype)))
        return loss, loss

    @shared
    def evaluate(self) -> dict[str, float]:
        """Return the mean squared error per pixel over the whole held-out split."""
        rows, count = [], 0
        with self.learner.evaluating(self.eval_in_mode) as model:
            for images, _ in self.held_out():
                outputs = model(images).float()
                rows.append(as_row(F.mse_loss(outputs, images, reduction="sum")))
                count += images.numel()
        (loss,) = self.ranks.mean(rows, count)
        return {"loss": loss}


class Tokens(NamedTuple):
    """A micro-batch: int64 [time, batch] twice."""

    tokens: Tensor
    targets: Tensor
    fresh: bool  # the state starts from zero before it


class LanguageModel(Supervised):
    """Cross-entropy in nats per token; metrics loss and perplexity.

    A network may return further losses in training, which are propagated and not reported.

    Backpropagation is truncated: the state goes on from batch to batch within an epoch and starts
    from zero in each epoch and in each evaluation (Zaremba et al., arXiv 1409.2329). Ranks then
    share out the streams of each batch, and each evaluates the whole. Without a state they share
    out micro-batches and held-out batches, as in every other task.

    Args:
        carries_state: False: the network's state is always `()`.
        sampled: the model returns the losses of the tokens itself, like `SampledLSTM`: in training
            those of a sample of the words, which are lower than the full ones of an evaluation.
        time_reduction: the propagated loss is the "mean" over all tokens or, as in the published
            recipes (Zaremba et al.; the code behind bigLSTM), the "sum" over time, averaged over
            the streams of a batch. The reported loss is the mean in both cases.
    """

    metrics = TASKS["language_model"].metrics
    sample = "token"

    def __init__(
        self,
        *arguments: Any,
        carries_state: bool = True,
        sampled: bool = False,
        time_reduction: str = "mean",
        **named: Any,
    ):
        super().__init__(*arguments, **named)
        self.carries_state = carries_state
        self.sampled, self.time_reduction = sampled, time_reduction
        self.hidden: tuple[Tensor, ...] | None = None if carries_state else ()
        self._before: tuple[Tensor, ...] | None = None  # the step that is being taken

    def twin(self, learners: Mapping[str, Any], forward_context: ForwardContext) -> Self:
        twin = super().twin(learners, forward_context)
        if self.hidden is not None:
            twin.hidden = tuple(part.detach().float() for part in self.hidden)
        return twin

    def switch(self, forward_context: ForwardContext) -> None:
        super().switch(forward_context)
        if self.hidden is not None:  # a call takes it into the mode, as any input
            self.hidden = tuple(part.float() for part in self.hidden)

    def load(self, step: int) -> Iterator[Tokens]:
        """Load this rank's micro-batches, consecutive pieces of the same streams."""
        for number in self.numbers:
            index = step * self.accumulate + number
            tokens, targets = self.data.train_batch(index)
            if self._splits_streams:
                own = self.ranks.streams(tokens.shape[1])
                tokens, targets = tokens[:, own].contiguous(), targets[:, own].contiguous()
            begins = index % self.data.batches_per_epoch == 0
            yield Tokens(tokens, targets, fresh=begins and self.carries_state)

    def samples_of(self, batch: Batch) -> int:
        return batch[1].numel()

    @property
    def numbers(self) -> range:
        return range(self.accumulate) if self.carries_state else super().numbers

    @property
    def evaluating_ranks(self) -> Ranks:
        return ALONE if self.carries_state else super().evaluating_ranks

    @property
    def _splits_streams(self) -> bool:
        """Return whether each rank takes some of the streams of every micro-batch."""
        return self.carries_state and self.ranks.world > 1

    def _seed_part(self, *number: int) -> None:
        # When ranks split the streams, each rank needs its own random numbers.
        super()._seed_part(*number, *([self.ranks.rank] if self._splits_streams else []))

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
        inputs = (tokens, targets) if self.sampled else (tokens,)
        outputs, hidden, *auxiliary = self.learner.inside(*inputs, self.hidden)
        if self.sampled:
            loss = outputs.mean()
        else:
            dtype = self.policy.loss_dtype
            loss = cross_entropy(outputs.flatten(0, 1), targets.flatten(), dtype)
        loss = self.learner.outside(loss)
        self.hidden = tuple(part.detach() for part in hidden)
        propagated = loss
        for one in auxiliary:
            propagated = propagated + self.learner.outside(one)
        if self.time_reduction == "sum":
            propagated = propagated * len(tokens)
        # The mean over all streams: gradients are as large as on one rank.
        return loss, propagated / self.ranks.world if self._splits_streams else propagated

    @shared
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss per held-out token, with carried state, and its exponential."""
        rows, count, hidden = [], 0, None
        with self.learner.evaluating(self.eval_in_mode) as model:
            for tokens, targets in self.held_out():
                if self.sampled:
                    losses, hidden = model(tokens, targets, hidden)
                    total = losses.sum(dtype=torch.float64)
                else:
                    logits, hidden = model(tokens, hidden)
                    logits = logits.flatten(0, 1).float()
                    total = F.cross_entropy(logits, targets.flatten(), reduction="sum")
                rows.append(as_row(total))
                count += targets.numel()
        (loss,) = self.evaluating_ranks.mean(rows, count)
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}

    def state_dict(self) -> dict:
        hidden = self.hidden
        if hidden is not None and self._splits_streams:  # [layers, streams, ...]
            turned = [self.ranks.gather(part.transpose(0, 1).contiguous()) for part in hidden]
            hidden = tuple(part.transpose(0, 1).contiguous() for part in turned)
        return super().state_dict() | {"hidden": hidden}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        hidden, device = state["hidden"], self.forward_context.device
        if hidden and self._splits_streams:
            own = self.ranks.streams(hidden[0].shape[1])
            hidden = tuple(part[:, own].contiguous() for part in hidden)
        if hidden is not None or self.carries_state:  # of a run without, before its first step
            self.hidden = hidden and tuple(part.to(device) for part in hidden)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    dtype: torch.dtype,
    label_smoothing: float = 0.0,
    ignored: int = -100,
) -> Tensor:
    """Return the mean over [n, classes] logits whose label is not `ignored`, computed in `dtype`.

    The bits are those of casting the logits first. CUDA's softmax reads FP16 and computes in FP32,
    and its backward writes FP16. So neither the logits nor their gradient exist in FP32, which for
    a large vocabulary would be most of the memory.
    """
    if label_smoothing:
        logits = logits.to(dtype)
        return F.cross_entropy(
            logits, labels, ignore_index=ignored, label_smoothing=label_smoothing
        )
    return F.nll_loss(F.log_softmax(logits, 1, dtype=dtype), labels, ignore_index=ignored)

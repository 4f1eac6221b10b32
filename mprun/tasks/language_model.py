"""Language modelling with an LSTM whose state is carried from batch to batch."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.precision import Arithmetic, LossScale, PrecisionPolicy
from mprun.tasks.supervised import cross_entropy, mean, share
from mprun.tasks.train_state import Learner


class Tokens(NamedTuple):
    """A micro-batch: int64 [time, batch] twice; fresh: the state starts from zero before it."""

    tokens: Tensor
    targets: Tensor
    fresh: bool


class LanguageModel:
    """Cross-entropy in nats per token; metrics loss and perplexity.

    sampled: the model returns the losses of the tokens itself, as `SampledLSTM` does: in training
    from a sample of the words, so that the training loss is lower than the full one; in evaluation
    over all words.
    time_reduction: "mean", the gradient is that of the mean over all tokens; "sum", that of the sum
    over time, averaged over the streams of a batch (sequence_length times as large), as in the
    published recipes (Zaremba et al., arXiv 1409.2329; the code behind bigLSTM). The loss that is
    reported is the mean in both.

    Truncated backpropagation: the state goes on from batch to batch within an epoch and starts
    from zero in each epoch and in each evaluation (Zaremba et al., arXiv 1409.2329).
    """

    sample = "token"
    channels_last = False  # tokens have no channels

    def __init__(
        self,
        learner: Learner,
        data,
        policy: PrecisionPolicy,
        arithmetic: Arithmetic,
        loss_scale: LossScale,
        *,
        accumulate: int = 1,
        eval_in_mode: bool = False,
        sampled: bool = False,
        time_reduction: str = "mean",
    ):
        if time_reduction not in ("mean", "sum"):
            raise ValueError(f"time_reduction={time_reduction!r}: must be 'mean' or 'sum'")
        self.learner, self.data = learner, data
        self.policy, self.arithmetic, self.loss_scale = policy, arithmetic, loss_scale
        self.accumulate, self.eval_in_mode = accumulate, eval_in_mode
        self.sampled, self.time_reduction = sampled, time_reduction
        self.learners = {"model": learner}
        self.loss_scales = {"loss_scale": loss_scale}
        self.samples_per_step = data.samples_per_batch * accumulate
        self.steps_per_epoch = data.batches_per_epoch // accumulate
        self.hidden: tuple[Tensor, Tensor] | None = None

    def train_step(self, step: int, measure: bool = False) -> dict[str, Tensor]:
        """One update from `accumulate` consecutive batches; 0-dim device tensors."""
        return self.compute(self.load(step), measure)

    def load(self, step: int) -> Iterator[Tokens]:
        """The micro-batches of a step, one after the other: all that depends on its number."""
        first = step * self.accumulate
        for index in range(first, first + self.accumulate):
            tokens, targets = self.data.train_batch(index)
            yield Tokens(tokens, targets, index % self.data.batches_per_epoch == 0)

    def compute(self, batches: Iterable[Tokens], measure: bool = False) -> dict[str, Tensor]:
        """`train_step` on these micro-batches: device work alone, so it can be captured."""
        optimizer = self.learner.optimizer
        optimizer.zero_grad()
        losses, hidden_before = [], self.hidden
        for tokens, targets, fresh in batches:
            if fresh:
                self.hidden = hidden_before = None
            with self.arithmetic:
                loss, hidden = self._loss(tokens, targets)
                summed = loss * len(tokens) if self.time_reduction == "sum" else loss
                optimizer.backward(share(summed, self.accumulate))
            self.hidden = tuple(part.detach() for part in hidden)
            losses.append(loss.detach())
        update = optimizer.step(measure)
        self.loss_scale.update()
        if update.found_inf is not None:
            # The forward pass of a skipped step may have overflowed: its state is not carried on.
            skipped = update.found_inf != 0
            if hidden_before is None:
                hidden_before = tuple(torch.zeros_like(part) for part in self.hidden)
            self.hidden = tuple(
                torch.where(skipped, old, new)
                for old, new in zip(hidden_before, self.hidden, strict=True)
            )
        return {"loss": mean(losses), **update.metrics()}

    def _loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The mean over the tokens, and the state after the last one."""
        model = self.learner.network
        if self.sampled:
            with self.arithmetic.autocast():
                losses, hidden = model(tokens, targets, self.hidden)
            return losses.mean(), hidden
        with self.arithmetic.autocast():
            logits, hidden = model(tokens, self.hidden)
        logits, targets = logits.flatten(0, 1), targets.flatten()
        return cross_entropy(logits, targets, self.policy.loss_dtype), hidden

    def evaluate(self) -> dict[str, float]:
        """Mean loss per held-out token, state carried through, and its exponential."""
        total = torch.zeros((), dtype=torch.float64, device=self.arithmetic.device)
        count, hidden = 0, None
        with self.learner.evaluating(self.arithmetic, self.eval_in_mode) as model:
            for tokens, targets in self.data.eval_batches():
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
        return {
            "learner": self.learner.state_dict(),
            "loss_scale": self.loss_scale.state_dict(),
            "hidden": self.hidden,
        }

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_state_dict(state["learner"])
        self.loss_scale.load_state_dict(state["loss_scale"])
        hidden, device = state["hidden"], self.arithmetic.device
        self.hidden = None if hidden is None else tuple(part.to(device) for part in hidden)

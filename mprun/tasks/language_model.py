"""Language modelling with an LSTM whose state is carried from batch to batch."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.tasks.supervised import Supervised, cross_entropy


class Tokens(NamedTuple):
    """A micro-batch: int64 [time, batch] twice; fresh: the state starts from zero before it."""

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

    def __init__(self, *arguments, sampled: bool = False, time_reduction: str = "mean", **named):
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
        return super().state_dict() | {"hidden": self.hidden}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        hidden, device = state["hidden"], self.arithmetic.device
        self.hidden = None if hidden is None else tuple(part.to(device) for part in hidden)

"""Language modelling with an LSTM whose state is carried from batch to batch."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.precision import Arithmetic, LossScale, PrecisionPolicy
from mprun.tasks.learner import Learner
from mprun.tasks.micro_batches import mean, share


class LanguageModel:
    """Cross-entropy in nats per token; metrics loss and perplexity.

    Truncated backpropagation: the state goes on from batch to batch within an epoch and starts
    from zero in each epoch and in each evaluation (Zaremba et al., arXiv 1409.2329).
    """

    sample = "token"

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
    ):
        self.learner, self.data = learner, data
        self.policy, self.arithmetic, self.loss_scale = policy, arithmetic, loss_scale
        self.accumulate, self.eval_in_mode = accumulate, eval_in_mode
        self.learners = {"model": learner}
        self.loss_scales = {"loss_scale": loss_scale}
        self.samples_per_step = data.samples_per_batch * accumulate
        self.steps_per_epoch = data.batches_per_epoch // accumulate
        self.hidden: tuple[Tensor, Tensor] | None = None

    def train_step(self, step: int, measure: bool = False) -> dict[str, Tensor]:
        """One update from `accumulate` consecutive batches; 0-dim device tensors."""
        optimizer, model = self.learner.optimizer, self.learner.model
        optimizer.zero_grad()
        losses, hidden_before = [], self.hidden
        for micro_batch in range(self.accumulate):
            index = step * self.accumulate + micro_batch
            if index % self.data.batches_per_epoch == 0:
                self.hidden = hidden_before = None
            tokens, targets = self.data.train_batch(index)
            with self.arithmetic:
                with self.arithmetic.autocast():
                    logits, hidden = model(tokens, self.hidden)
                logits = logits.flatten(0, 1).to(self.policy.loss_dtype)
                loss = F.cross_entropy(logits, targets.flatten())
                optimizer.backward(share(loss, self.accumulate))
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

    def evaluate(self) -> dict[str, float]:
        """Mean loss per held-out token, state carried through, and its exponential."""
        total = torch.zeros((), dtype=torch.float64, device=self.arithmetic.device)
        count, hidden = 0, None
        with self.learner.evaluating(self.arithmetic, self.eval_in_mode) as model:
            for tokens, targets in self.data.eval_batches():
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

"""Image classification: AlexNet, ResNet-50."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.data.source import Batch
from mprun.precision import Arithmetic, LossScale, PrecisionPolicy
from mprun.tasks.supervised import cross_entropy, mean, micro_batches, share
from mprun.tasks.train_state import Learner


class Classification:
    """Cross-entropy on labelled images; metrics loss (nats), top1 and top5 (percent)."""

    sample = "image"
    channels_last = False  # images in NHWC order; whoever builds the networks so sets it

    def __init__(
        self,
        learner: Learner,
        data,
        policy: PrecisionPolicy,
        arithmetic: Arithmetic,
        loss_scale: LossScale,
        *,
        accumulate: int = 1,
        label_smoothing: float = 0.0,
        eval_in_mode: bool = False,
    ):
        self.learner, self.data = learner, data
        self.policy, self.arithmetic, self.loss_scale = policy, arithmetic, loss_scale
        self.accumulate, self.label_smoothing = accumulate, label_smoothing
        self.eval_in_mode = eval_in_mode
        self.learners = {"model": learner}
        self.loss_scales = {"loss_scale": loss_scale}
        self.samples_per_step = data.samples_per_batch * accumulate
        self.steps_per_epoch = data.batches_per_epoch // accumulate

    def train_step(self, step: int, measure: bool = False) -> dict[str, Tensor]:
        """One update from `accumulate` micro-batches; 0-dim device tensors, no synchronisation.

        measure: also compute the gradient norm.
        """
        return self.compute(self.load(step), measure)

    def load(self, step: int) -> Iterator[Batch]:
        """The micro-batches of a step, one after the other: all that depends on its number."""
        cast = self.policy.cast_inputs
        return micro_batches(self.data, step, self.accumulate, self.channels_last, cast)

    def compute(self, batches: Iterable[Batch], measure: bool = False) -> dict[str, Tensor]:
        """`train_step` on these micro-batches: device work alone, so it can be captured."""
        optimizer, model = self.learner.optimizer, self.learner.network
        optimizer.zero_grad()
        losses = []
        for images, labels in batches:
            with self.arithmetic:
                with self.arithmetic.autocast():
                    logits = model(images)
                loss = self._loss(logits, labels)
                del images, logits  # backward has what it needs: of images, autocast's 16-bit copy
                optimizer.backward(share(loss, self.accumulate))
            losses.append(loss.detach())
        update = optimizer.step(measure)
        self.loss_scale.update()
        return {"loss": mean(losses), **update.metrics()}

    def evaluate(self) -> dict[str, float]:
        """Mean loss and accuracies over the whole held-out split."""
        totals = torch.zeros(3, dtype=torch.float64, device=self.arithmetic.device)
        count = 0
        with self.learner.evaluating(self.arithmetic, self.eval_in_mode) as model:
            for images, labels in self.data.eval_batches():
                inputs = self.policy.cast_inputs(images) if self.eval_in_mode else images
                logits = model(inputs).float()
                best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
                totals[0] += F.cross_entropy(logits, labels, reduction="sum")
                totals[1] += best[:, 0].sum()
                totals[2] += best.any(dim=1).sum()
                count += len(labels)
        loss, top1, top5 = (totals / count).tolist()
        return {"loss": loss, "top1": 100 * top1, "top5": 100 * top5}

    def state_dict(self) -> dict:
        return {"learner": self.learner.state_dict(), "loss_scale": self.loss_scale.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_state_dict(state["learner"])
        self.loss_scale.load_state_dict(state["loss_scale"])

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, self.policy.loss_dtype, self.label_smoothing)

"""Autoencoding images: the task whose activation gradients underflow in FP16."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.data.source import Batch
from mprun.precision import Arithmetic, LossScale, PrecisionPolicy
from mprun.tasks.supervised import mean, micro_batches, share
from mprun.tasks.train_state import Learner


class Reconstruction:
    """Mean squared error per pixel of a reconstructed image; the one metric is loss."""

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
        """One update from `accumulate` micro-batches; 0-dim device tensors, no synchronisation."""
        return self.compute(self.load(step), measure)

    def load(self, step: int) -> Iterator[Batch]:
        """The micro-batches of a step, one after the other: all that depends on its number."""
        return micro_batches(self.data, step, self.accumulate, self.channels_last)

    def compute(self, batches: Iterable[Batch], measure: bool = False) -> dict[str, Tensor]:
        """`train_step` on these micro-batches: device work alone, so it can be captured."""
        optimizer, model = self.learner.optimizer, self.learner.network
        optimizer.zero_grad()
        losses = []
        for images, _ in batches:
            with self.arithmetic:
                with self.arithmetic.autocast():
                    outputs = model(self.policy.cast_inputs(images))
                target = images.to(self.policy.loss_dtype)
                loss = F.mse_loss(outputs.to(self.policy.loss_dtype), target)
                optimizer.backward(share(loss, self.accumulate))
            losses.append(loss.detach())
        update = optimizer.step(measure)
        self.loss_scale.update()
        return {"loss": mean(losses), **update.metrics()}

    def evaluate(self) -> dict[str, float]:
        """Mean squared error per pixel over the whole held-out split."""
        total = torch.zeros((), dtype=torch.float64, device=self.arithmetic.device)
        count = 0
        with self.learner.evaluating(self.arithmetic, self.eval_in_mode) as model:
            for images, _ in self.data.eval_batches():
                inputs = self.policy.cast_inputs(images) if self.eval_in_mode else images
                total += F.mse_loss(model(inputs).float(), images, reduction="sum")
                count += images.numel()
        return {"loss": total.item() / count}

    def state_dict(self) -> dict:
        return {"learner": self.learner.state_dict(), "loss_scale": self.loss_scale.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_state_dict(state["learner"])
        self.loss_scale.load_state_dict(state["loss_scale"])

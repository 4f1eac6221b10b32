"""Autoencoding images: the task whose activation gradients underflow in FP16."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.data.source import Batch
from mprun.tasks.supervised import Supervised, micro_batches


class Reconstruction(Supervised):
    """Mean squared error per pixel of a reconstructed image; the one metric is loss."""

    def load(self, step: int) -> Iterator[Batch]:
        """As for every task, but in FP32: the images are the target as well."""
        uncast = Tensor.contiguous
        return micro_batches(self.data, step, self.accumulate, self.channels_last, uncast)

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
            for images, _ in self.data.eval_batches():
                inputs = self.policy.cast_inputs(images) if self.eval_in_mode else images
                total += F.mse_loss(model(inputs).float(), images, reduction="sum")
                count += images.numel()
        return {"loss": total.item() / count}

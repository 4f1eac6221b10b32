"""Image classification: AlexNet, ResNet-50."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.data.source import Batch
from mprun.tasks.supervised import Supervised, cross_entropy


class Classification(Supervised):
    """Cross-entropy on labelled images; metrics loss (nats), top1 and top5 (percent)."""

    def __init__(self, *arguments, label_smoothing: float = 0.0, **named):
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

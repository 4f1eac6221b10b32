"""Detection: the objects in an image and their places."""

import numpy as np
from torch import Tensor

from mprun.data.source import Batch
from mprun.extensions.detection.average_precision import average_precisions
from mprun.tasks.supervised import Supervised
from mprun.tasks.task import as_row, shared


class Detection(Supervised):
    """A detector that computes its loss; metrics loss and map, in percent (VOC 2007, 11 points).

    The network takes images and targets ``[batch, most, 6]`` (canvases.py). It returns
    (loss, detections) as in `Found` (boxes.py): the loss 0-dim in FP32 in every mode,
    detections only in evaluation.
    """

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, targets = batch
        with self.forward_context.autocast():
            loss, _ = self.learner.network(images, targets)
        return loss, loss

    @shared
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of a held-out image and the mean average precision over classes."""
        rows, count = [], 0
        detections, targets = [], []
        with self.learner.evaluating(self.forward_context, self.eval_in_mode) as model:
            for images, objects in self.held_out():
                loss, found = model(self._eval_inputs(images), objects)
                rows.append(as_row(loss * len(images)))
                count += len(images)
                detections.append(found)
                targets.append(objects)
        (loss,) = self.ranks.mean(rows, count)
        found, objects = (self.ranks.in_order(part) for part in (detections, targets))
        classes = int(self.data.description["num_classes"])
        precisions = average_precisions(found.cpu().numpy(), objects.cpu().numpy(), classes)
        known = precisions[~np.isnan(precisions)]
        return {"loss": loss, "map": 100 * float(known.mean()) if len(known) else 0.0}

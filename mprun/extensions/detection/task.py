"""Detection: the objects in an image and their places, measured as PASCAL VOC 2007 does.

Average precision at 11 points of recall: Everingham et al., "The PASCAL Visual Object Classes
Challenge" (IJCV 2010), section 4.2, and the rules of its devkit. A detection is matched to the
object of its class that it overlaps most. It finds the object at an intersection over union of 0.5
or more. If several find one object, the one with the highest score counts and the others are false.
A detection of an object marked as difficult is neither right nor false, and such an object need not
be found.

Recalls are exact tenths. voc_eval.py of py-faster-rcnn has `np.arange(0, 1.1, 0.1)`, whose 0.3, 0.6
and 0.7 are a bit larger. A class that is found to exactly one of these shares of its objects, and
no further, has a point more here: up to 1/11, or 0.45 points of the mean over 20 classes.
"""

import numpy as np
import torch
from torch import Tensor

from mprun.config.components import TASKS
from mprun.data.source import Batch
from mprun.extensions.detection.boxes import CLASS, DIFFICULT, SCORE, overlaps
from mprun.tasks.supervised import Supervised
from mprun.tasks.task import as_row, shared

POINTS, FOUND = 11, 0.5
_CHUNK = 64  # images that are processed together


class Detection(Supervised):
    """A detector that computes its loss; metrics loss and map, in percent.

    The network takes images and targets ``[batch, most, 6]`` (`canvases`); it returns `Detections`.
    """

    metrics = TASKS["detection"].metrics

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, targets = batch
        loss, _ = self.learner.network(images, targets)
        return loss, loss

    @shared
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of an image and the mean average precision over classes."""
        rows, count = [], 0
        detections, targets = [], []
        with self.learner.evaluating(self.eval_in_mode) as model:
            for images, objects in self.held_out():
                loss, found = model(images, objects)
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


def average_precisions(detections: np.ndarray, targets: np.ndarray, classes: int) -> np.ndarray:
    """Return the average precision of each class, 0 ... 1, float64 ``[classes]``.

    It is NaN for a class without an object. Detections ``[images, k, 6]`` of equal scores keep
    their order; targets are ``[images, m, 6]``.
    """
    best, overlap = _best_objects(detections, targets)
    difficult = targets[:, :, DIFFICULT] > 0
    ignored = (overlap >= FOUND) & np.take_along_axis(difficult, best, 1)
    # The number of the found object, or -1.
    objects = best + targets.shape[1] * np.arange(len(targets))[:, None]
    objects = np.where(overlap >= FOUND, objects, -1)
    found = np.full(classes, np.nan)
    for number in range(classes):
        wanted = int(((targets[:, :, CLASS] == number) & ~difficult).sum())
        counted = (detections[:, :, CLASS] == number) & ~ignored
        order = np.argsort(-detections[:, :, SCORE][counted], kind="stable")
        if wanted:
            found[number] = _at_points(objects[counted][order], wanted)
    return found


def _best_objects(detections: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the object of its class that each detection overlaps most, and the overlap."""
    best = np.zeros(detections.shape[:2], np.int64)
    overlap = np.zeros(detections.shape[:2])
    for first in range(0, len(targets), _CHUNK):
        part = slice(first, first + _CHUNK)
        one, other = detections[part], targets[part]
        boxes = (torch.from_numpy(own[..., :CLASS]).double() for own in (one, other))
        classes = other[:, None, :, CLASS]
        same = (one[:, :, None, CLASS] == classes) & (classes >= 0)
        ratio = np.where(same, overlaps(*boxes).numpy(), -1)
        best[part] = ratio.argmax(2)
        overlap[part] = ratio.max(2)
    return best, overlap


def _at_points(objects: np.ndarray, wanted: int) -> float:
    """Return the mean over recalls of 0, 0.1, ..., 1 of the best precision from there on.

    `objects` has those that detections found, by falling score, -1 for none.
    """
    right = np.zeros(len(objects), bool)
    right[np.unique(objects, return_index=True)[1]] = True  # only the first of each object
    hits = (right & (objects >= 0)).cumsum()
    precision = hits / np.arange(1, len(right) + 1)
    # In whole numbers: 3 of 10 is a recall of 0.3.
    reached = (precision[(POINTS - 1) * hits >= point * wanted] for point in range(POINTS))
    return sum(part.max(initial=0.0) for part in reached) / POINTS

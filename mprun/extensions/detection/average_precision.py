"""Average precision of detections as PASCAL VOC 2007 measures it: at 11 points of recall.

Everingham et al., "The PASCAL Visual Object Classes Challenge" (IJCV 2010), section 4.2, and the
rules of its devkit. A detection is matched to the object of its class that it overlaps most. It
finds the object at an intersection over union of 0.5 or more. If several find one object, the one
with the highest score counts and the others are false. A detection of an object marked as difficult
is neither right nor false, and such an object need not be found.
"""

import numpy as np

POINTS = 11
FOUND = 0.5
# Columns of a detection and of a target, behind the four of the box.
_CLASS, _SCORE, _DIFFICULT = 4, 5, 5
_CHUNK = 64  # images that are processed together


def average_precisions(detections: np.ndarray, targets: np.ndarray, classes: int) -> np.ndarray:
    """Return the average precision of each class, 0 ... 1, float64 ``[classes]``.

    It is NaN for a class without an object.

    Args:
        detections: ``[images, k, 6]``: box, class (below 0: none), score. Equal scores keep their
            order.
        targets: ``[images, m, 6]``: box, class (below 0: none), 1 if difficult.
    """
    best, overlap = _best_objects(detections, targets)
    difficult = targets[:, :, _DIFFICULT] > 0
    ignored = (overlap >= FOUND) & np.take_along_axis(difficult, best, 1)
    # The number of the found object, or -1.
    objects = best + targets.shape[1] * np.arange(len(targets))[:, None]
    objects = np.where(overlap >= FOUND, objects, -1)
    found = np.full(classes, np.nan)
    for number in range(classes):
        wanted = int(((targets[:, :, _CLASS] == number) & ~difficult).sum())
        counted = (detections[:, :, _CLASS] == number) & ~ignored
        order = np.argsort(-detections[:, :, _SCORE][counted], kind="stable")
        if wanted:
            found[number] = _at_points(_right(objects[counted][order]), wanted)
    return found


def _best_objects(detections: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the object of its class that each detection overlaps most, and the overlap.

    Both are ``[images, k]``.
    """
    best = np.zeros(detections.shape[:2], np.int64)
    overlap = np.zeros(detections.shape[:2])
    for first in range(0, len(targets), _CHUNK):
        part = slice(first, first + _CHUNK)
        one = detections[part, :, None].astype(np.float64)
        other = targets[part, None].astype(np.float64)
        corner = np.maximum(one[..., :2], other[..., :2])
        sides = np.minimum(one[..., 2:4], other[..., 2:4]) - corner
        common = sides.clip(0).prod(-1)
        area = sum((box[..., 2:4] - box[..., :2]).prod(-1) for box in (one, other)) - common
        same = (one[..., _CLASS] == other[..., _CLASS]) & (other[..., _CLASS] >= 0) & (area > 0)
        ratio = np.where(same, common / np.where(same, area, 1), -1)
        best[part] = ratio.argmax(2)
        overlap[part] = ratio.max(2)
    return best, overlap


def _right(objects: np.ndarray) -> np.ndarray:
    """Return which detections are the first of their object (-1: no object), bool ``[n]``."""
    right = np.zeros(len(objects), bool)
    right[np.unique(objects, return_index=True)[1]] = True
    return right & (objects >= 0)


def _at_points(right: np.ndarray, wanted: int) -> float:
    """Return the mean over recalls of 0, 0.1, ..., 1 of the best precision from there on."""
    hits = right.cumsum()
    precision = hits / np.arange(1, len(right) + 1)
    # In whole numbers: 3 of 10 is a recall of 0.3.
    reached = (precision[(POINTS - 1) * hits >= point * wanted] for point in range(POINTS))
    return sum(part.max(initial=0.0) for part in reached) / POINTS

"""Boxes: overlap, encoding, matching and suppression, in FP32 whatever the mode.

Coordinates of 300 pixels have steps of a quarter of a pixel in FP16, and areas of them overflow
it: whoever calls this has cast before. Boxes are left, top, right, bottom. Nothing here has a shape
that depends on values, so that a step can be recorded.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CLASS, DIFFICULT = 4, 5  # columns of a target, behind its box; class -1: no object
SCORE = 5  # of a detection, behind its box and its class


class Found(NamedTuple):
    """What a detector makes of ``(images, targets)``.

    Attributes:
        loss: 0-dim float32; of the objects that are not difficult.
        detections: in evaluation float32 ``[batch, k, 6]``: box in 0 ... 1 of the image's sides,
            class, score. Class -1: no detection. In training None.
    """

    loss: Tensor
    detections: Tensor | None


def learned_from(targets: Tensor) -> Tensor:
    """Which rows of targets ``[..., 6]`` are objects that a loss asks for, bool ``[...]``."""
    return (targets[..., CLASS] >= 0) & (targets[..., DIFFICULT] == 0)


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of ``[..., n, 4]`` and ``[..., m, 4]``, ``[..., n, m]``; 0 of two
    boxes without an area."""
    one, other = one[..., :, None, :], other[..., None, :, :]
    corner = torch.maximum(one[..., :2], other[..., :2])
    common = _area((torch.minimum(one[..., 2:], other[..., 2:]) - corner).clamp(min=0))
    areas = _area(one[..., 2:] - one[..., :2]) + _area(other[..., 2:] - other[..., :2])
    return common / (areas - common).clamp(min=torch.finfo(one.dtype).tiny)


def _area(sides: Tensor) -> Tensor:
    return sides[..., 0] * sides[..., 1]  # Tensor.prod is compiled at run time on CUDA


def encode(boxes: Tensor, references: Tensor, weights: tuple[float, float]) -> Tensor:
    """Boxes ``[..., 4]`` as offsets from references: of the centre over the reference's sides,
    logarithm of the sides' ratio; times one weight each (Girshick et al., arXiv 1311.2524)."""
    (centre, sides), (middle, extent) = _centred(boxes), _centred(references)
    shift = (centre - middle) / extent * weights[0]
    return torch.cat([shift, (sides / extent).log() * weights[1]], -1)


def decode(offsets: Tensor, references: Tensor, weights: tuple[float, float]) -> Tensor:
    """The boxes ``[..., 4]`` of which `encode` made the offsets."""
    middle, extent = _centred(references)
    centre = middle + offsets[..., :2] / weights[0] * extent
    half = (offsets[..., 2:] / weights[1]).exp() * extent / 2
    return torch.cat([centre - half, centre + half], -1)


def _centred(boxes: Tensor) -> tuple[Tensor, Tensor]:
    sides = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + sides / 2, sides


def suppress(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression: which boxes stay, bool ``[..., k]``.

    A box goes if one before it that stays overlaps it by more than ``threshold``. Waits for the
    device after each round; there are as many as the longest chain of such boxes, k at most.

    Args:
        boxes: ``[..., k, 4]`` by falling score.
        valid: bool ``[..., k]``; the others neither stay nor suppress.
    """
    beats = (overlaps(boxes, boxes) > threshold).triu(1)
    keep = valid
    for _ in range(boxes.shape[-2]):
        before, keep = keep, valid & ~(beats & keep[..., :, None]).any(-2)
        if torch.equal(before, keep):
            break
    return keep


def best_detections(
    boxes: Tensor, scores: Tensor, k: int, least: float, threshold: float, most: int
) -> Tensor:
    """The detections of one image, float32 ``[at most `most`, 6]``; see `Found`.

    Args:
        boxes: ``[n, classes, 4]``, those of each class.
        scores: ``[n, classes]``; only above ``least`` is it a detection.
        k: boxes of a class that suppression looks at, those of highest score.
        threshold: of suppression, in each class.
    """
    values, places = scores.t().topk(min(k, len(scores)))
    candidates = boxes.transpose(0, 1).gather(1, places[..., None].expand(*places.shape, 4))
    keep = suppress(candidates, values > least, threshold)
    score, chosen = torch.where(keep, values, -1.0).flatten().topk(min(most, values.numel()))
    names = (chosen // values.shape[1]).to(boxes.dtype)
    names = torch.where(score > 0, names, -1.0)
    return torch.cat([candidates.flatten(0, 1)[chosen], names[:, None], score[:, None]], 1)

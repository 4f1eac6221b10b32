"""Boxes: overlap, encoding, matching and suppression, in FP32 whatever the mode.

In FP16 coordinates of 300 pixels have steps of a quarter of a pixel, and their areas overflow: the
caller has to cast before. Boxes are left, top, right, bottom. No shape here depends on values, so
that a step can be recorded.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import nms

# Columns behind the box: of a target and a detection, of a target (`canvases`), of a detection.
CLASS, DIFFICULT, SCORE = 4, 5, 5


class Detections(NamedTuple):
    """A detector's outputs for ``(images, targets)``."""

    loss: Tensor  # 0-dim float32, over the objects that are not difficult
    # In evaluation float32 [batch, k, 6]: box in 0 ... 1 of the image's sides, class, score. Class
    # -1: no detection.
    detections: Tensor | None


def learned_from(targets: Tensor) -> Tensor:
    """Return which rows of targets ``[..., 6]`` are objects that a loss counts, bool ``[...]``."""
    return (targets[..., CLASS] >= 0) & (targets[..., DIFFICULT] == 0)


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    """Return the intersection over union ``[..., n, m]`` of ``[..., n, 4]`` and ``[..., m, 4]``.

    It is 0 for two boxes without an area.
    """
    one, other = one[..., :, None, :], other[..., None, :, :]
    corner = torch.maximum(one[..., :2], other[..., :2])
    common = _area((torch.minimum(one[..., 2:], other[..., 2:]) - corner).clamp(min=0))
    areas = _area(one[..., 2:] - one[..., :2]) + _area(other[..., 2:] - other[..., :2])
    return common / (areas - common).clamp(min=torch.finfo(one.dtype).tiny)


def _area(sides: Tensor) -> Tensor:
    return sides[..., 0] * sides[..., 1]  # Tensor.prod is compiled at run time on CUDA


def encode(boxes: Tensor, references: Tensor, weights: tuple[float, float]) -> Tensor:
    """Encode boxes ``[..., 4]`` as offsets from references (Girshick et al., arXiv 1311.2524).

    They are the centre's shift over the reference's sides, and the logarithm of the sides' ratio,
    each times one weight.
    """
    (centre, sides), (middle, extent) = _centred(boxes), _centred(references)
    shift = (centre - middle) / extent * weights[0]
    return torch.cat([shift, (sides / extent).log() * weights[1]], -1)


def decode(offsets: Tensor, references: Tensor, weights: tuple[float, float]) -> Tensor:
    """Return the boxes ``[..., 4]`` that `encode` turned into the offsets."""
    middle, extent = _centred(references)
    centre = middle + offsets[..., :2] / weights[0] * extent
    half = (offsets[..., 2:] / weights[1]).exp() * extent / 2
    return torch.cat([centre - half, centre + half], -1)


def _centred(boxes: Tensor) -> tuple[Tensor, Tensor]:
    sides = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + sides / 2, sides


def by_box(maps: Tensor, width: int) -> Tensor:
    """Turn ``[batch, boxes * width, h, w]`` into ``[batch, h * w * boxes, width]``."""
    return maps.permute(0, 2, 3, 1).reshape(len(maps), -1, width)


def rows(table: Tensor, places: Tensor) -> Tensor:
    """Return the rows of ``[batch, n, width]`` at places ``[batch, k]``."""
    return table.gather(1, places[..., None].expand(*places.shape, table.shape[2]))


@torch.library.custom_op("mprun::unsuppressed", mutates_args=())
def unsuppressed(boxes: Tensor, scores: Tensor, threshold: float, most: int) -> Tensor:
    """Return the places of the boxes ``[batch, n, 4]`` that suppression leaves, by falling score.

    They are int64 ``[batch, most]``, -1 where there are no more. A score of minus infinity means no
    box. Only the device knows how many are left: the host waits for each row. For torch this is one
    operation with a static shape.
    """
    chosen = torch.full((len(boxes), most), -1, device=boxes.device)
    for row, own, score in zip(chosen, boxes, scores, strict=True):
        kept = nms(own, score, threshold)[:most]
        row[: len(kept)] = torch.where(score[kept] > -torch.inf, kept, -1)
    return chosen


@unsuppressed.register_fake
def _(boxes: Tensor, scores: Tensor, threshold: float, most: int) -> Tensor:
    return boxes.new_empty((len(boxes), most), dtype=torch.int64)


def best_detections(
    boxes: Tensor, scores: Tensor, k: int, least: float, threshold: float, most: int
) -> Tensor:
    """Return the detections of each image, float32 ``[batch, at most `most`, 6]``.

    Args:
        boxes: ``[batch, n, classes, 4]``, the boxes of each class.
        scores: ``[batch, n, classes]``; only a score above ``least`` is a detection.
        k: number of boxes of a class that suppression compares, those of highest score.
        threshold: threshold of suppression, in each class.
    """
    found = []
    for own, of_classes in zip(boxes, scores, strict=True):
        values, places = of_classes.t().topk(min(k, len(of_classes)))
        candidates = rows(own.transpose(0, 1), places)
        wanted = torch.where(values > least, values, -torch.inf)
        left = unsuppressed(candidates, wanted, threshold, values.shape[1])
        # Column 0 takes the places -1.
        keep = F.pad(torch.zeros_like(values), (1, 0)).scatter(1, left + 1, 1.0)[:, 1:] > 0
        score, chosen = torch.where(keep, values, -1.0).flatten().topk(min(most, values.numel()))
        names = (chosen // values.shape[1]).to(boxes.dtype)
        names = torch.where(score > 0, names, -1.0)
        found.append(
            torch.cat([candidates.flatten(0, 1)[chosen], names[:, None], score[:, None]], 1)
        )
    return torch.stack(found)

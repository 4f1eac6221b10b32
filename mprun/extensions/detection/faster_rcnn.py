"""Faster R-CNN: a network proposes regions, a second one names the object in each.

Ren et al., arXiv 1506.01497 (the row Faster R-CNN of the paper's table 2), as in the authors' code
(rbgirshick/py-faster-rcnn, end to end on VGG-16).

In every mode everything after the last layers of both networks is computed in FP32: boxes, their
overlaps, suppression, losses. Some of these have no 16-bit kernel, and coordinates and sums do not
fit. Regions are pooled in FP32, too, with the result in the dtype of the maps. A maximum is exact
in any dtype, but the gradients add up where regions overlap. Both also hold in `fp16_naive`, which
could not run otherwise. Autocast leaves FP32 tensors alone here: there is no product among them.

All shapes are static: missing samples are filled up and do not count. Regions, anchors and other
boxes are float32 in 0 ... 1 of the image's sides.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import vgg16

from mprun.extensions.detection.boxes import (
    CLASS,
    Detections,
    best_detections,
    by_box,
    decode,
    encode,
    learned_from,
    overlaps,
    rows,
    unsuppressed,
)
from mprun.extensions.detection.weights import load_weights, start_normal
from mprun.models.classifiers import vgg_layers

SHAPES = ((23, 12), (16, 16), (11, 22))  # width and height of anchors of 16 px, as rounded there
ANCHOR_WEIGHTS, REGION_WEIGHTS = (1.0, 1.0), (10.0, 5.0)  # of offsets
OBJECT, NOTHING, IN_REGION = 0.7, 0.3, 0.5  # overlaps that make an anchor, or a region, an example
# Where the distance of offsets turns from a square into a line.
ANCHOR_BETA, REGION_BETA = 1 / 9, 1.0
SAME_REGION, SAME_OBJECT = 0.7, 0.3  # overlaps above which the one with the lower score goes
LEAST_SCORE, MOST_DETECTIONS = 0.05, 100


class Limits(NamedTuple):
    """Numbers of a network, with the published values; the first six are for each image."""

    anchors: int = 256  # in the first network's loss, at most half of them with an object
    regions: int = 128  # in the second network's loss, at most a quarter of them with an object
    before: int = 12000  # proposals in training before suppression, and after it
    after: int = 2000
    before_in_evaluation: int = 6000
    after_in_evaluation: int = 300
    least_side: float = 16  # shortest side of a proposal, in pixels
    stride: int = 16  # pixels from one position of the backbone's map to the next
    scales: tuple[float, ...] = (8, 16, 32)  # sides of the square anchors, in units of 16 px
    pool: int = 7  # positions along a side of a pooled region


def roi_pool(maps: Tensor, places: Tensor, size: int, scale: float) -> Tensor:
    """Pool like torchvision's ``roi_pool``, with a deterministic backward kernel on CUDA.

    All is float32: ``maps`` ``[batch, channels, side, side]``; ``places`` ``[batch * k, 5]``, the
    same number for each image, in order; the result ``[batch * k, channels, size, size]``.
    """
    batch = len(maps)
    with torch.no_grad():
        _, top = torch.ops.torchvision.roi_pool(maps, places, scale, size, size)
    top = top.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2).long()
    found = maps.flatten(2).gather(2, top.clamp(min=0)).masked_fill(top < 0, 0)  # -1: no position
    return found.unflatten(2, (-1, size, size)).transpose(1, 2).flatten(0, 1)


class RegionPool(nn.Module):
    """The maximum of each of ``size`` x ``size`` parts of each region.

    An image's side is ``side`` positions of the maps. ``forward(maps, regions)`` takes ``[batch,
    channels, side, side]`` of any dtype and ``[batch, k, 4]``. It returns ``[batch * k, channels,
    size, size]`` in the dtype of the maps.
    """

    def __init__(self, size: int, side: float) -> None:
        super().__init__()
        self.size, self.side = size, side

    def forward(self, maps: Tensor, regions: Tensor) -> Tensor:
        batch, k, _ = regions.shape
        image = torch.arange(batch, device=maps.device, dtype=torch.float32)
        places = torch.cat([image[:, None, None].expand(-1, k, 1), regions], 2).flatten(0, 1)
        return roi_pool(maps.float(), places, self.size, self.side).to(maps.dtype)


class Proposals(nn.Module):
    """The loss of the first network, and the regions that it proposes, on anchors ``[n, 4]``.

    An anchor is an example of an object if it overlaps one by 0.7 or more, or overlaps that object
    most. It is an example of nothing below 0.3 with all of them. Anchors across the border are
    neither.

    Scores are float32 ``[batch, n, 2]``, for nothing and for an object; offsets ``[batch, n, 4]``.
    """

    computes_in_fp32 = True

    def __init__(self, anchors: Tensor, count: int, least_side: float) -> None:
        super().__init__()
        self.register_buffer("anchors", anchors, persistent=False)
        self.anchors: Tensor
        self.count, self.least_side = count, least_side

    def forward(self, scores: Tensor, offsets: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, 0-dim, a mean over the drawn anchors of all images."""
        positive, negative, chosen = self.match(targets)
        count = min(self.count, len(self.anchors))
        places, counted = drawn(positive, negative, count, count // 2, self.training)
        right = counted & positive.gather(1, places)
        anchors = self.anchors[places]
        objects = rows(targets, chosen.gather(1, places))[..., :CLASS]
        wanted = encode(objects, anchors, ANCHOR_WEIGHTS)
        wanted = torch.where(right[..., None], wanted, 0.0)
        own = rows(scores, places).transpose(1, 2)
        errors = F.cross_entropy(own, right.long(), reduction="none")
        return _mean(errors, rows(offsets, places), wanted, right, counted, ANCHOR_BETA)

    def match(self, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the anchors for objects, those for nothing, and the target each overlaps most.

        Bool twice and int64, ``[batch, n]`` each.
        """
        inside = (self.anchors >= 0).all(1) & (self.anchors <= 1).all(1)
        asked = learned_from(targets)[..., None] & inside
        overlap = torch.where(asked, overlaps(targets[..., :CLASS], self.anchors), -1.0)
        most, chosen = overlap.max(1)
        of_object = overlap.amax(2, keepdim=True)
        best = ((overlap == of_object) & (of_object > 0)).any(1)
        positive = (most >= OBJECT) | best
        return positive, inside & ~positive & (most < NOTHING), chosen

    @torch.no_grad()
    def propose(
        self, scores: Tensor, offsets: Tensor, before: int, after: int
    ) -> tuple[Tensor, Tensor]:
        """Return regions ``[batch, after, 4]`` by falling score, and which exist, bool."""
        # Of a network that has diverged too there are boxes to pool.
        boxes = decode(offsets, self.anchors, ANCHOR_WEIGHTS).clamp(0, 1).nan_to_num()
        large = (boxes[..., 2:] - boxes[..., :2]).amin(2) >= self.least_side
        score = torch.where(large, scores[..., 1] - scores[..., 0], -torch.inf)
        score, places = score.topk(min(before, boxes.shape[1]))
        boxes = rows(boxes, places)
        chosen = unsuppressed(boxes, score, SAME_REGION, min(after, boxes.shape[1]))
        return rows(boxes, chosen.clamp(min=0)), chosen >= 0


class Regions(nn.Module):
    """The loss of the second network on proposed regions, and its detections in evaluation.

    The objects themselves are proposed, too. A region is an example of the object that it overlaps
    most, by half or more, otherwise of nothing. Class 0 is nothing.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    @torch.no_grad()
    def examples(
        self, regions: Tensor, valid: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw the regions of the loss, ``[batch, k, 4]``.

        Also returned are the class of each, int64 ``[batch, k]``; its offsets to its object, zeros
        without one; which of them count, bool ``[batch, k]``.
        """
        asked = learned_from(targets)
        boxes = torch.cat([regions, targets[..., :CLASS]], 1)
        valid = torch.cat([valid, asked], 1)
        overlap = overlaps(targets[..., :CLASS], boxes)
        most, chosen = torch.where(asked[..., None], overlap, -1.0).max(1)
        positive = valid & (most >= IN_REGION)
        count = min(self.count, boxes.shape[1])
        places, counted = drawn(positive, valid & ~positive, count, count // 4, self.training)
        boxes, right = rows(boxes, places), counted & positive.gather(1, places)
        own = rows(targets, chosen.gather(1, places))
        offsets = encode(own[..., :CLASS], boxes, REGION_WEIGHTS)
        offsets = torch.where(right[..., None], offsets, 0.0)
        return boxes, torch.where(right, own[..., CLASS] + 1, 0.0).long(), offsets, counted

    def forward(
        self, logits: Tensor, offsets: Tensor, classes: Tensor, wanted: Tensor, counted: Tensor
    ) -> Tensor:
        """Return the loss, 0-dim, a mean over the regions of all images.

        logits: ``[batch, k, 1 + classes]``; offsets: ``[batch, k, 1 + classes, 4]``; the others
        come from `examples`.
        """
        errors = F.cross_entropy(logits.transpose(1, 2), classes, reduction="none")
        own = classes[..., None, None].expand(-1, -1, 1, 4)
        offsets = offsets.gather(2, own).squeeze(2)
        return _mean(errors, offsets, wanted, classes > 0, counted, REGION_BETA)

    def detections(self, logits: Tensor, offsets: Tensor, regions: Tensor, valid: Tensor) -> Tensor:
        """Return float32 ``[batch, at most 100, 6]``; see `Detections`."""
        boxes = decode(offsets[:, :, 1:], regions[:, :, None], REGION_WEIGHTS).clamp(0, 1)
        scores = torch.where(valid[..., None], logits.softmax(2)[..., 1:], 0.0)
        limits = LEAST_SCORE, SAME_OBJECT, MOST_DETECTIONS
        return best_detections(boxes, scores, scores.shape[1], *limits)


class FasterRCNN(nn.Module):
    """A backbone and two networks that read its map.

    ``forward(images, targets)``: images ``[batch, 3, size, size]``, targets ``[batch, most, 6]``;
    returns `Detections`. In evaluation the loss's samples are drawn from a fixed seed.

    Args:
        features: the backbone; its map has ``channels``.
        head: turns ``channels * pool * pool`` numbers into ``width``.
        size: pixels along a side of an image.
        frozen: first convolutions, which keep their weights.
    """

    def __init__(
        self,
        features: nn.Sequential,
        channels: int,
        head: nn.Module,
        width: int,
        classes: int,
        size: int,
        frozen: int,
        limits: Limits,
    ) -> None:
        super().__init__()
        self.num_classes, self.limits = classes, limits
        count = len(limits.scales) * len(SHAPES)
        self.features = features
        convolutions = [layer for layer in features if isinstance(layer, nn.Conv2d)]
        for layer in convolutions[:frozen]:
            layer.requires_grad_(False)
        shared = nn.Conv2d(channels, channels, 3, padding=1)
        self.shared = nn.Sequential(shared, nn.ReLU())
        self.objectness = nn.Conv2d(channels, 2 * count, 1)
        self.shifts = nn.Conv2d(channels, 4 * count, 1)
        boxes = anchors(size, limits.stride, limits.scales)
        self.proposals = Proposals(boxes, limits.anchors, limits.least_side / size)
        self.pool, self.head = RegionPool(limits.pool, size / limits.stride), head
        self.classes = nn.Linear(width, 1 + classes)
        self.offsets = nn.Linear(width, 4 * (1 + classes))
        self.classes.is_output = self.offsets.is_output = True  # type: ignore[assignment]
        self.regions = Regions(limits.regions)
        for own in (shared, self.objectness, self.shifts, self.classes, self.offsets):
            start_normal(own, 0.001 if own is self.offsets else 0.01)

    def forward(self, images: Tensor, targets: Tensor) -> Detections:
        maps = self.features(images)
        shared = self.shared(maps)
        scores = by_box(self.objectness(shared), 2).float()
        shifts = by_box(self.shifts(shared), 4).float()
        limits, targets = self.limits, targets.float()
        loss = self.proposals(scores, shifts, targets)
        proposed = self.proposals.propose(scores, shifts, limits.before, limits.after)
        regions, classes, wanted, counted = self.regions.examples(*proposed, targets)
        outputs = self.inside(maps, regions)
        loss = loss + self.regions(*outputs, classes, wanted, counted)
        if self.training:
            return Detections(loss, None)
        regions, valid = self.proposals.propose(
            scores, shifts, limits.before_in_evaluation, limits.after_in_evaluation
        )
        outputs = self.inside(maps, regions)
        return Detections(loss, self.regions.detections(*outputs, regions, valid))

    def inside(self, maps: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the regions' logits and offsets, float32, as `Regions` takes them."""
        found = self.head(self.pool(maps, regions))
        shape = (*regions.shape[:2], 1 + self.num_classes)
        logits, offsets = self.classes(found).float(), self.offsets(found).float()
        return logits.view(shape), offsets.view(*shape, 4)


def drawn(
    positive: Tensor, negative: Tensor, count: int, most: int, by_chance: bool
) -> tuple[Tensor, Tensor]:
    """Draw ``count`` of each row ``[batch, n]``: at most ``most`` positive ones, the rest negative.

    Returns their places int64 ``[batch, count]``, and bool, which of them exist. Not `by_chance`:
    from a fixed seed.
    """
    device = positive.device
    generator = None if by_chance else torch.Generator(device).manual_seed(0)
    chance = torch.rand(positive.shape, device=device, generator=generator)
    # The last positive one that is drawn, below all of them where there are fewer.
    last = torch.where(positive, chance, -1.0).topk(most).values[:, -1:]
    order = torch.where(negative, chance, -1.0)
    order = torch.where(positive & (chance >= last), 2 + chance, order)
    order, places = order.topk(count)
    return places, order >= 0


def _mean(
    errors: Tensor, offsets: Tensor, wanted: Tensor, right: Tensor, counted: Tensor, beta: float
) -> Tensor:
    """Average class errors, plus offset distances of those with an object, over all that count.

    The mean is 0 if none counts.
    """
    distance = F.smooth_l1_loss(offsets, wanted, reduction="none", beta=beta).sum(2)
    total = torch.where(counted, errors, 0.0) + torch.where(right, distance, 0.0)
    return total.sum() / counted.sum().clamp(min=1)


def anchors(size: int, stride: int, scales: Sequence[float]) -> Tensor:
    """Return the anchors of the map of images of ``size`` px, ``[positions * 3 * scales, 4]``.

    Positions are ``stride`` px apart; ``scales`` times 16 px are the sides of the square anchors.
    """
    middles = (torch.arange(size // stride, dtype=torch.float32) + 0.5) * stride
    y, x = torch.meshgrid(middles, middles, indexing="ij")
    half = torch.tensor([(w * s, h * s) for w, h in SHAPES for s in scales]) / 2
    middle = torch.stack([x, y], 2).view(-1, 1, 2)
    return torch.cat([middle - half, middle + half], 2).view(-1, 4) / size


def faster_rcnn_vgg16(
    num_classes: int, image_size: int, dropout: float, frozen: int, weights: str | None
) -> FasterRCNN:
    """Build it on VGG-16 up to conv5_3: 137,078,239 parameters at 20 classes and nothing.

    VGG-16's fc6 and fc7 read the pooled regions. `weights`: a file for `load_weights`, with
    torchvision's names of a VGG-16.
    """
    whole = vgg16(dropout=dropout)
    features = cast(nn.Sequential, whole.features[:-1])
    head = nn.Sequential(nn.Flatten(), *whole.classifier[:-1])
    network = FasterRCNN(features, 512, head, 4096, num_classes, image_size, frozen, Limits())
    if weights is not None:
        # fc6 and fc7 are one place further back here; fc8 has no counterpart.
        theirs = {"head.1.": "classifier.0.", "head.4.": "classifier.3."}
        load_weights(network, weights, "a Faster R-CNN", 2 * (13 + 2), theirs)
    return network


def faster_rcnn_small(num_classes: int, image_size: int, dropout: float, frozen: int) -> FasterRCNN:
    """Build it on four VGG-like convolutions of 8 to 32 channels, for images of 32 px.

    It has 115,581 parameters at 10 classes and nothing. Images of other sizes, a multiple of 4,
    have more positions.
    """
    limits = Limits(64, 32, 128, 32, 64, 16, 4, stride=4, scales=(1 / 2, 3 / 4, 1), pool=4)
    layers, head, channels, units = nn.Sequential(), nn.Sequential(nn.Flatten()), 32, 128
    for layer in vgg_layers([(8, 1), (16, 1), (channels, 2)]):
        if isinstance(layer, nn.Conv2d):
            start_normal(layer, (2 / layer.weight[0].numel()) ** 0.5)  # He et al.
        layers.append(layer)
    for width in (channels * limits.pool**2, units):
        head.extend([nn.Linear(width, units), nn.ReLU(), nn.Dropout(dropout)])
    return FasterRCNN(layers[:-1], channels, head, units, num_classes, image_size, frozen, limits)

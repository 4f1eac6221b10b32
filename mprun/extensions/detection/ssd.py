"""Single-shot detectors: SSD300 on VGG-16, and a small one for canvases of digits.

Liu et al., arXiv 1512.02325 (the row Multibox SSD of the paper's table 2), as in the authors' Caffe
code (weiliu89/caffe, branch ssd, examples/ssd/ssd_pascal.py).

In every mode the L2 norm and everything after the last convolutions are computed in FP32: default
boxes, matching, losses, decoding, suppression. In FP16 the squares of Caffe-scale activations
overflow, and the result is a silent zero; pixel coordinates and the sum of a loss do not fit
either (NVIDIA/caffe pull request 493).
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
)
from mprun.extensions.detection.weights import load_weights, start_normal
from mprun.models.classifiers import VGG_D, vgg_layers

WEIGHTS = (10.0, 5.0)  # of offsets: one over the variances 0.1 and 0.2
MATCHED = 0.5  # overlap from which a default box is an object's
NEGATIVES = 3  # default boxes without an object that are learned from, for each one with
LEAST_SCORE, SUPPRESSED, MOST_DETECTIONS = 0.01, 0.45, 200


class L2Norm(nn.Module):
    """Each position's channels as a unit vector, times a learned scale per channel.

    ``forward`` takes ``[batch, channels, h, w]`` of any dtype and returns the same dtype. In FP16
    the norm of 512 channels of 3,000 would be inf, and the result 0.
    """

    computes_in_fp32 = True

    def __init__(self, channels: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels,), scale))

    def forward(self, maps: Tensor) -> Tensor:
        wide = maps.float()
        norm = (wide.square().sum(1, keepdim=True) + 1e-10).sqrt()  # the addend is Caffe's
        return (wide / norm * self.weight.float()[:, None, None]).to(maps.dtype)


class MultiBox(nn.Module):
    """The loss of default boxes, and in evaluation their detections.

    Matching is Caffe's (MatchBBox in bbox_util.cpp). Each object gets one box of its own: the pair
    that overlaps most comes first, then the next among objects and boxes that are left. Each other
    box is the object's that it overlaps most, from half on. What overlaps no box gets none.

    ``forward(offsets, logits, targets)``: ``[batch, n, 4]`` and ``[batch, n, 1 + classes]`` of any
    floating dtype, class 0 is the background; returns `Detections`.

    Args:
        defaults: float32 ``[n, 4]`` in 0 ... 1.
        mean: the loss is a mean over all default boxes, with a sigmoid for each class. Otherwise it
            is the published one, with a softmax: the sum over all matched boxes and the three times
            as many others whose loss is highest, divided by the number of matched boxes.
        most_of_a_class: boxes of an image that suppression compares, those of highest score.
    """

    computes_in_fp32 = True

    def __init__(self, defaults: Tensor, mean: bool, most_of_a_class: int = 400) -> None:
        super().__init__()
        self.register_buffer("defaults", defaults, persistent=False)
        self.defaults: Tensor
        self.mean, self.most_of_a_class = mean, most_of_a_class

    def forward(self, offsets: Tensor, logits: Tensor, targets: Tensor) -> Detections:
        with torch.autocast(offsets.device.type, enabled=False):
            offsets, logits, targets = offsets.float(), logits.float(), targets.float()
            loss = self._loss(offsets, logits, *self.match(targets))
            return Detections(loss, None if self.training else self.detections(offsets, logits))

    def match(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target of each default box ``[batch, n, 6]``, and whether it has one, bool."""
        asked = learned_from(targets)[..., None]
        overlap = torch.where(asked, overlaps(targets[..., :CLASS], self.defaults), -1.0)
        most, chosen = overlap.max(1)  # of each box
        matched, image = most >= MATCHED, torch.arange(len(targets), device=targets.device)
        left = overlap.transpose(1, 2).contiguous()  # [batch, n, objects], -1: taken
        taken = left.new_full((), -1.0)  # not a number: torch 2.11 copies one and waits
        for _ in range(left.shape[2]):
            # Among equals the first box, and of its objects the first.
            most, pair = left.flatten(1).max(1)
            box, number = pair // left.shape[2], pair % left.shape[2]
            chosen[image, box] = torch.where(most > 0, number, chosen[image, box])
            matched[image, box] |= most > 0
            left[image, box], left[image, :, number] = taken, taken
        return rows(targets, chosen), matched

    def _loss(self, offsets: Tensor, logits: Tensor, own: Tensor, matched: Tensor) -> Tensor:
        # Of a box without an object the offsets are those of the default box itself, so finite.
        boxes = torch.where(matched[..., None], own[..., :CLASS], self.defaults)
        wanted = encode(boxes, self.defaults, WEIGHTS)
        distance = F.smooth_l1_loss(offsets, wanted, reduction="none").sum(2)
        distance = torch.where(matched, distance, 0.0)
        classes = torch.where(matched, own[..., CLASS] + 1, 0.0).to(torch.int64)
        if self.mean:
            named = F.one_hot(classes, logits.shape[2]).to(logits.dtype)
            errors = F.binary_cross_entropy_with_logits(logits, named, reduction="none").sum(2)
            return (errors + distance).mean()
        errors = F.cross_entropy(logits.transpose(1, 2), classes, reduction="none")
        hardness = torch.where(matched, -1.0, errors.detach())
        rank = hardness.argsort(dim=1, descending=True, stable=True).argsort(1)
        counted = matched | (rank < NEGATIVES * matched.sum(1, keepdim=True))
        total = distance.sum() + torch.where(counted, errors, 0.0).sum()
        return total / matched.sum().clamp(min=1)

    def detections(self, offsets: Tensor, logits: Tensor) -> Tensor:
        """Return float32 ``[batch, at most 200, 6]``; see `Detections`."""
        boxes = decode(offsets, self.defaults, WEIGHTS).clamp(0, 1)
        scores = (logits.sigmoid() if self.mean else logits.softmax(2))[..., 1:]
        of_each = boxes[:, :, None].expand(*scores.shape, 4)
        limits = LEAST_SCORE, SUPPRESSED, MOST_DETECTIONS
        return best_detections(of_each, scores, self.most_of_a_class, *limits)


class SSD(nn.Module):
    """A backbone, smaller and smaller maps after it, and two convolutions on each of them.

    ``forward(images, targets)``: images ``[batch, 3, size, size]``, targets ``[batch, most, 6]``;
    returns `Detections`.

    Args:
        tap: the backbone's layer that gives the finest map; its last layer gives the next one.
        extras: layers after the backbone, each of which gives a map.
        norms: norms of the first maps, before their convolutions; the backbone continues without
            them.
        heads: of each map, the number of its channels and of default boxes at a position.
        freeze_backbone: train only the convolutions for boxes and classes.
    """

    def __init__(
        self,
        features: Sequence[nn.Module],
        tap: int,
        extras: Sequence[nn.Module],
        norms: Sequence[nn.Module],
        heads: Sequence[tuple[int, int]],
        classes: int,
        multibox: MultiBox,
        freeze_backbone: bool,
    ) -> None:
        super().__init__()
        self.features, self.tap = nn.ModuleList(features), tap
        self.extras, self.norms = nn.ModuleList(extras), nn.ModuleList(norms)
        self.offsets, self.classes = (
            nn.ModuleList(nn.Conv2d(c, each * n, 3, padding=1) for c, n in heads)
            for each in (4, 1 + classes)
        )
        self.num_classes, self.multibox = classes, multibox
        for part in (self.features, self.extras, self.norms):
            part.requires_grad_(not freeze_backbone)

    def forward(self, images: Tensor, targets: Tensor) -> Detections:
        return self.multibox(*self.outputs(images), targets)

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return offsets ``[batch, n, 4]`` and logits ``[batch, n, 1 + classes]`` of the boxes."""
        maps, x = [], images
        for number, layer in enumerate(self.features):
            x = layer(x)
            if number == self.tap:
                maps.append(x)
        maps.append(x)
        for layer in self.extras:
            maps.append(layer(maps[-1]))
        for number, norm in enumerate(self.norms):
            maps[number] = norm(maps[number])
        offsets, logits = (
            torch.cat([by_box(head(own), width) for head, own in zip(heads, maps, strict=True)], 1)
            for heads, width in ((self.offsets, 4), (self.classes, 1 + self.num_classes))
        )
        return offsets, logits


def default_boxes(
    maps: Sequence[int], steps: Sequence[float], sizes: Sequence[float], ratios: Sequence[Sequence]
) -> Tensor:
    """Return default boxes around each position of each map, float32 ``[n, 4]`` (SSD, section 2.2).

    A position has a square of the map's size and one of the geometric mean of this and the next
    map's size. For each ratio a wide and a high box of the first square's area follow.

    Args:
        maps: positions along a side of each map.
        steps: distances between them, as a share of the image's side.
        sizes: sizes as shares of the image's side, one more than there are maps.
        ratios: ratios of each map's boxes, width over height, above 1.
    """
    found = []
    each = zip(maps, steps, sizes, sizes[1:], ratios, strict=False)
    for count, step, size, following, own in each:
        between = math.sqrt(size * following)
        sides = [(size, size), (between, between)]
        for root in map(math.sqrt, own):
            sides += [(size * root, size / root), (size / root, size * root)]
        for row, column in itertools.product(range(count), repeat=2):
            x, y = (column + 0.5) * step, (row + 0.5) * step
            found += [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for w, h in sides]
    return torch.tensor(found, dtype=torch.float32)


def ssd_mini(num_classes: int, image_size: int, freeze_backbone: bool) -> SSD:
    """Build SSD on six VGG convolutions of 8 to 32 channels and two more: 88,764 parameters.

    That is the number at 10 classes. Images are for 32 px; other sizes, multiples of 8, have other
    maps. Weights start as in He et al., arXiv 1502.01852, biases at 0. FP16's losses happen in the
    backbone: without normalisation inside, and with images of -50 ... 205, its activations are
    thousands, and the L2 norm divides the gradients by them. They grow in training; after a
    thousand steps of Adam they overflow FP16, whatever the loss scale.
    """
    layers = [*vgg_layers([(8, 2), (16, 2), (32, 2), (32, 2)])][:-1]
    maps = image_size // 4, image_size // 8
    sizes = (0.25, 0.375, 0.5)  # digits have 0.25 to 0.5 of the side
    defaults = default_boxes(maps, [1 / side for side in maps], sizes, [(2, 3), (2, 3)])
    norms, heads = [L2Norm(32, 2.0), L2Norm(32, 2.0)], [(32, 6), (32, 6)]
    multibox = MultiBox(defaults, mean=True, most_of_a_class=100)
    network = SSD(layers, 13, (), norms, heads, num_classes, multibox, freeze_backbone)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            start_normal(layer, (2 / layer.weight[0].numel()) ** 0.5)
    # The background has a probability of 0.99 everywhere, a class of 0.01, as by Lin et al., arXiv
    # 1708.02002, section 3.3: else the first hundreds of steps learn that most places are empty.
    prior = math.log(99)
    for name, biases in network.classes.named_parameters():
        if name.endswith("bias"):
            biases.detach().view(6, 1 + num_classes).fill_(-prior)[:, 0] = prior
    return network


def ssd300(num_classes: int, weights: str | None, freeze_backbone: bool) -> SSD:
    """Build SSD300 on VGG-16: 26,285,486 parameters at 20 classes, 8,732 default boxes.

    Layers and default boxes are as in the authors' file for VOC: fully connected layers 6 and 7 as
    convolutions, the first one dilated; L2 norm after conv4_3. Images have 300 px, less their
    means, as for Caffe's VGG. Weights start like Caffe's xavier, uniform in +-sqrt(3 / fan_in),
    biases at 0.

    Args:
        weights: a file for `load_weights`. Names of a VGG-16 are torchvision's
            (``features.0.weight``) or those of the reduced one that detectors start from
            (``0.weight``).
    """
    layers = [*vgg_layers(VGG_D, ceil_mode=True)]  # so that 75 positions become 38
    layers[-1] = nn.MaxPool2d(3, 1, padding=1)
    layers += [nn.Conv2d(512, 1024, 3, padding=6, dilation=6), nn.ReLU()]
    layers += [nn.Conv2d(1024, 1024, 1), nn.ReLU()]
    sizes = [share / 300 for share in (30, 60, 111, 162, 213, 264, 315)]
    steps = [share / 300 for share in (8, 16, 32, 64, 100, 300)]
    ratios = [(2,), (2, 3), (2, 3), (2, 3), (2,), (2,)]
    extras = [_smaller(1024, 256, 512, stride=2), _smaller(512, 128, 256, stride=2)]
    extras += [_smaller(256, 128, 256), _smaller(256, 128, 256)]
    heads = [(512, 4), (1024, 6), (512, 6), (256, 6), (256, 4), (256, 4)]
    multibox = MultiBox(default_boxes((38, 19, 10, 5, 3, 1), steps, sizes, ratios), mean=False)
    norms = [L2Norm(512, 20.0)]
    network = SSD(layers, 22, extras, norms, heads, num_classes, multibox, freeze_backbone)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            bound = (3 / layer.weight[0].numel()) ** 0.5
            nn.init.uniform_(layer.weight, -bound, bound)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    if weights is not None:
        # A weight and a bias of 13 convolutions; a reduced VGG-16 has two more.
        load_weights(network, weights, "an SSD300", 2 * 13, {"features.": ""})
    return network


def _smaller(inputs: int, between: int, outputs: int, stride: int = 1) -> nn.Module:
    narrow = nn.Conv2d(inputs, between, 1)
    wide = nn.Conv2d(between, outputs, 3, stride, padding=stride - 1)
    return nn.Sequential(narrow, nn.ReLU(), wide, nn.ReLU())

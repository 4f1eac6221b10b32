"""Transformations of an image between its file and the network: crops, mirroring, value ranges.

`Augmentation` transforms PIL images in loader processes, `PaddedCrop` small images that lie on the
device as bytes.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from mprun.data.source import sent, stream

# Per channel, in units of pixel values: mean and standard deviation of the ImageNet training images
# from PyTorch's examples (there divided by 255), and the means that BVLC's Caffe subtracts, here in
# the order red, green, blue.
IMAGENET_MEAN = tuple(255 * share for share in (0.485, 0.456, 0.406))
IMAGENET_STD = tuple(255 * share for share in (0.229, 0.224, 0.225))
CAFFE_MEAN = (123.68, 116.779, 103.939)
# ITU-R 601. The mean luma is the luma of the means; for deviations it is only a convention.
LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """How a network takes images: pixels of a side, channels, and the range of their values."""

    image_size: int
    channels: int = 3
    value_range: str = "standardised"


def normalise(images: Tensor, offset: Tensor, divisor: Tensor) -> Tensor:
    """Return (x - offset) / divisor, contiguous float32 ``[batch, channels, height, width]``.

    ``images`` are uint8 ``[batch, height, width, channels]``, offset and divisor float32
    ``[channels, 1, 1]`` in units of pixel values, on the same device. Each operation rounds once,
    so every device gives the same bits.
    """
    channels_first = images.permute(0, 3, 1, 2)
    # One transposing copy: three times as fast on a CPU as `.float()` of the permuted bytes.
    values = torch.empty(channels_first.shape, dtype=torch.float32, device=images.device)
    return values.copy_(channels_first).sub_(offset).div_(divisor)


def offset_and_divisor(value_range: str, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Return what to subtract from 0 ... 255, then divide by, float32 ``[channels, 1, 1]``.

    ``standardised``: (x - mean) / std; ``mean_subtracted``: x - mean; ``tanh``: 0 ... 255 mapped to
    -1 ... 1. ``mean`` and ``std`` are float32 ``[channels]`` in units of pixel values.
    """
    if value_range == "tanh":
        mean = std = torch.full_like(mean, 127.5)
    elif value_range == "mean_subtracted":
        std = torch.ones_like(mean)
    return mean[:, None, None], std[:, None, None]


def imagenet_constants(
    value_range: str, channels: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return `offset_and_divisor` for ImageNet's figures, with Caffe's means if mean_subtracted.

    A single channel gets their luma.
    """
    means = CAFFE_MEAN if value_range == "mean_subtracted" else IMAGENET_MEAN
    figures: list = [means, IMAGENET_STD]
    if channels == 1:
        figures = [[sum(a * b for a, b in zip(LUMA, one, strict=True))] for one in figures]
    mean, std = torch.tensor(figures, dtype=torch.float32, device=device)
    return offset_and_divisor(value_range, mean, std)


# Separates these draws from those of the samples' order, which come from (seed, epoch).
_STREAM = 1


class PaddedCrop:
    """Shift each image by -``padding`` ... ``padding`` pixels in both directions, mirror half.

    This equals torchvision's ``RandomCrop(size, padding)`` and ``RandomHorizontalFlip``: zeros
    (black) around the image, a crop of the old size with an even chance for each offset, then the
    mirror. The draw for an image is entry ``position`` (in the epoch) of the PCG64 stream of (seed,
    epoch). An epoch's draws, 24 bytes a sample, are made at once and lie on ``device``.
    """

    def __init__(
        self, seed: int, n: int, padding: int, flip: bool, device: torch.device | str
    ) -> None:
        self._seed, self._n, self._padding, self._flip = seed, n, padding, flip
        self._device, self._epoch = torch.device(device), -1
        self._draws = torch.empty(3, 0, dtype=torch.int64, device=device)

    def __call__(self, images: Tensor, epoch: int, start: int) -> Tensor:
        """Augment ``images`` (uint8 ``[batch, channels, h, w]``) as positions ``start`` on."""
        if epoch != self._epoch:
            draws = draw(self._seed, epoch, self._n, self._padding, self._flip)
            self._draws, self._epoch = sent(torch.from_numpy(draws), self._device), epoch
        batch, channels, height, width = images.shape
        down, right, mirrored = self._draws[:, start : start + batch, None]
        columns = torch.arange(width, device=self._device)
        columns = right + torch.where(mirrored.bool(), width - 1 - columns, columns)
        rows = down + torch.arange(height, device=self._device)
        pixels = rows[:, :, None] * (width + 2 * self._padding) + columns[:, None, :]
        padded = F.pad(images, (self._padding,) * 4).flatten(2)
        pixels = pixels.flatten(1)[:, None].expand(batch, channels, height * width)
        return padded.gather(2, pixels).view_as(images)


def draw(seed: int, epoch: int, n: int, padding: int, flip: bool) -> np.ndarray:
    """Draw rows and columns to skip in the padded image, and 1 to mirror: int64 ``[3, n]``."""
    bits = stream(seed, epoch, _STREAM).random_raw(n)
    low, high = bits & np.uint64(2**31 - 1), (bits >> np.uint64(31)) & np.uint64(2**31 - 1)
    offsets = np.uint64(2 * padding + 1)
    down, right = (low * offsets) >> np.uint64(31), (high * offsets) >> np.uint64(31)
    mirrored = bits >> np.uint64(63) if flip else np.zeros(n, np.uint64)
    return np.stack([down, right, mirrored]).astype(np.int64)


SCALE, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
# Random numbers of a training sample: mirror, top, left, one spare, then (area, sides) a try.
DRAWS = 4 + 2 * TRIES
_FLIP, _TOP, _LEFT, _FIRST_TRY = 0, 1, 2, 4
BILINEAR = Image.Resampling.BILINEAR
_LOG_RATIO = math.log(RATIO[0]), math.log(RATIO[1])

Box = tuple[int, int, int, int]  # left, top, right, bottom


def draws(seed: int, epoch: int, first: int, count: int) -> np.ndarray:
    """Draw uniform numbers in [0, 1), float64 ``[count, DRAWS]``, for the samples from ``first``.

    Row k belongs to the sample at place ``first + k`` of this epoch, whatever the batch size: a
    stretch of one PCG64 stream keyed by (seed, epoch). NumPy guarantees the stream and its
    ``advance``, but not its distributions (NEP 19), so the 53 highest bits are taken here. Costs 30
    us and 0.3 us a sample.
    """
    bits = stream(seed, epoch, _STREAM)
    bits.advance(first * DRAWS)
    raw = bits.random_raw(count * DRAWS).reshape(count, DRAWS)
    return (raw >> np.uint64(11)) * 2.0**-53


def random_resized_box(width: int, height: int, draw: np.ndarray) -> Box:
    """Return the box of torchvision's ``RandomResizedCrop.get_params`` for ``draw [DRAWS]``."""
    draw = draw.tolist()  # plain floats: five times as fast as numpy's scalars
    area = width * height
    for at in range(_FIRST_TRY, DRAWS, 2):
        target = area * (SCALE[0] + draw[at] * (SCALE[1] - SCALE[0]))
        ratio = math.exp(_LOG_RATIO[0] + draw[at + 1] * (_LOG_RATIO[1] - _LOG_RATIO[0]))
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(draw[_TOP] * (height - h + 1))
            left = int(draw[_LEFT] * (width - w + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def centre_box(width: int, height: int, size: int) -> Box:
    """Return the middle ``size`` x ``size`` pixels, rounded like torchvision's ``center_crop``."""
    left, top = round((width - size) / 2), round((height - size) / 2)
    return left, top, left + size, top + size


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Transform a decoded image to one of ``image_size`` x ``image_size`` pixels.

    ``resized_crop``: torchvision's ``RandomResizedCrop`` (area 8 to 100 %, sides 3:4 to 4:3, ten
    tries, then the middle) and mirror, as in PyTorch's ImageNet example. Evaluation resizes the
    shorter side to ``resize_to`` pixels and takes the middle. ``crop``: the whole image resized to
    a square of ``resize_to``, whatever its aspect ratio, as Caffe prepares ImageNet; a random crop
    and mirror in training, the middle in evaluation. ``centre``: a square of ``centre_crop`` pixels
    from the middle, resized; mirror in training (DCGAN).

    ``resize_to`` is at least ``image_size``; None is 8/7 of it. ``centre_crop`` None, or more than
    the image has, means its shorter side. One channel is PIL's ``convert("L")`` (ITU-R 601 luma).
    For the same box the pixels are, bit for bit, those of torchvision's ``resized_crop``,
    ``resize`` and ``center_crop`` on PIL images: bilinear, with PIL's antialiasing.
    """

    augmentation: str  # resized_crop, crop or centre
    image_size: int
    channels: int = 3
    flip: bool = True
    resize_to: int | None = None
    centre_crop: int | None = None

    @property
    def resized(self) -> int:  # pixels of a side before the crop
        return self.resize_to or round(self.image_size * 8 / 7)

    def train(self, image: Image.Image, draw: np.ndarray) -> Image.Image:
        """Make a training sample from an RGB image; ``draw`` is its row of `draws`."""
        image = self._channels(image)
        size, resized = self.image_size, self.resized
        if self.augmentation == "resized_crop":
            # Crop first: PIL's resize with a box would let the filter see beyond its edges.
            image = image.crop(random_resized_box(*image.size, draw)).resize((size, size), BILINEAR)
        elif self.augmentation == "crop":
            left, top = (int(draw[at] * (resized - size + 1)) for at in (_LEFT, _TOP))
            image = image.resize((resized, resized), BILINEAR)
            image = image.crop((left, top, left + size, top + size))
        else:
            image = self._centre(image)
        if self.flip and draw[_FLIP] < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image

    def evaluation(self, image: Image.Image) -> Image.Image:
        """Make a held-out sample from an RGB image; draws nothing."""
        image = self._channels(image)
        if self.augmentation == "centre":
            return self._centre(image)
        if self.augmentation == "crop":
            image = image.resize((self.resized, self.resized), BILINEAR)
        else:
            shorter = min(image.size)
            width, height = (int(self.resized * side / shorter) for side in image.size)
            image = image.resize((width, height), BILINEAR)
        return image.crop(centre_box(*image.size, self.image_size))

    def _channels(self, image: Image.Image) -> Image.Image:
        return image.convert("L") if self.channels == 1 else image

    def _centre(self, image: Image.Image) -> Image.Image:
        size = min(self.centre_crop or min(image.size), *image.size)
        image = image.crop(centre_box(*image.size, size))
        return image.resize((self.image_size, self.image_size), BILINEAR)

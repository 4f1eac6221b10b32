"""From bytes to the numbers that a network sees, on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Per channel in units of pixel values. Mean and standard deviation of the ImageNet training images
# as PyTorch's examples have them (there over 255), and the means that BVLC's Caffe subtracts, here
# in the order red, green, blue.
IMAGENET_MEAN = tuple(255 * share for share in (0.485, 0.456, 0.406))
IMAGENET_STD = tuple(255 * share for share in (0.229, 0.224, 0.225))
CAFFE_MEAN = (123.68, 116.779, 103.939)
# ITU-R 601: the luma of a colour is the luma of the means; of deviations it is a convention.
LUMA = (0.299, 0.587, 0.114)
VALUE_RANGES = ("standardised", "mean_subtracted", "tanh")


def normalise(images: Tensor, value_range: str, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 ``[batch, height, width, channels]`` to contiguous float32 ``[batch, channels, h, w]``.

    ``standardised``: (x - mean) / std; ``mean_subtracted``: x - mean; ``tanh``: 0 ... 255 mapped to
    -1 ... 1. ``mean`` and ``std`` are float32 ``[channels]`` in units of pixel values, on the
    device of the images. Each operation rounds once, so every device gives the same bits.
    """
    batch, height, width, channels = images.shape
    values = torch.empty(
        (batch, channels, height, width), dtype=torch.float32, device=images.device
    )
    # One transposing copy: three times as fast on a CPU as `.float()` of the permuted bytes.
    values.copy_(images.permute(0, 3, 1, 2))
    if value_range == "tanh":
        return values.sub_(127.5).div_(127.5)
    values.sub_(mean[:, None, None])
    if value_range == "standardised":
        values.div_(std[:, None, None])
    return values


def imagenet_constants(
    value_range: str, channels: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """``(mean, std)`` for `normalise`: ImageNet's or, for ``mean_subtracted``, Caffe's means.

    One channel has their luma. Raises ``ValueError`` for another value range.
    """
    if value_range not in VALUE_RANGES:
        allowed = ", ".join(VALUE_RANGES)
        raise ValueError(f"value_range={value_range!r} is not allowed: one of {allowed}")
    mean = CAFFE_MEAN if value_range == "mean_subtracted" else IMAGENET_MEAN
    return _on(mean, channels, device), _on(IMAGENET_STD, channels, device)


def _on(values: Sequence[float], channels: int, device: torch.device) -> Tensor:
    if channels == 1:
        values = [sum(share * value for share, value in zip(LUMA, values, strict=True))]
    return torch.tensor(values, dtype=torch.float32, device=device)

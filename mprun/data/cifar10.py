"""CIFAR-10, decoded once and held on the device as bytes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mprun.data.cifar10_files import CLASSES, Part, read_cifar10
from mprun.data.image_store import ImageBatch, ImageStore
from mprun.data.order import permutation
from mprun.data.padded_crop import PaddedCrop

# Channel means and deviations of the 50,000 training images, over the range 0 ... 1.
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PADDING = 4
# One fixed shuffle for every seed: all runs must be judged on the same images.
SPLIT_SEED = 20171010


class Cifar10:
    """50,000 training and 10,000 held-out RGB images of 32x32 px in 10 classes, below ``root``.

    Krizhevsky (2009), in any of the layouts of ``mprun.data.cifar10_files``; class folders may
    hold other numbers of images. A batch is ``(images float32 [batch, 3, image_size, image_size],
    labels int64 [batch])``; the last evaluation batch may be smaller.

    ``augmentation`` "padded_crop" (training only): 4 black pixels around the image, before
    normalisation, then a random crop of 32x32, as torchvision's ``RandomCrop(32, padding=4)``;
    or "none". ``flip`` mirrors half of the training images. Sizes other than 32 are resized
    bilinearly on the device, after both.

    ``value_range``: "standardised", (v / 255 - mean) / deviation per channel with the published
    figures; "mean_subtracted", v - 255 * mean, v in 0 ... 255; "tanh", v mapped to [-1, 1].

    ``train_size`` and ``eval_size`` take the first images of a shuffle that is the same for all
    seeds; None takes all. Class folders have an order of their own (by class and name), so they
    give other images and another ``sha256`` than the original files. 3,072 bytes an image on
    ``device``.
    ``sha256`` is over the pixels and labels that are used, in that order.

    Raises ``ValueError`` for an argument out of range, ``DamagedData`` naming a file.
    """

    num_classes = CLASSES

    def __init__(
        self,
        root: str,
        *,
        image_size: int,
        augmentation: str,
        flip: bool,
        value_range: str,
        train_size: int | None,
        eval_size: int | None,
        batch_size: int,
        seed: int,
        device: torch.device | str,
    ) -> None:
        if augmentation not in ("padded_crop", "none"):
            raise ValueError(
                f"augmentation={augmentation!r} is not allowed: 'padded_crop' or 'none'"
            )
        normalisation = _normalisation(value_range)
        files = read_cifar10(root)
        train = _first(files.train, train_size, "train_size", 0)
        held_out = _first(files.held_out, eval_size, "eval_size", 1)
        padding = PADDING if augmentation == "padded_crop" else 0
        augment = PaddedCrop(seed, len(train[0]), padding, flip, device)
        self._store = ImageStore(
            train,
            held_out,
            255,
            image_size,
            3,
            batch_size,
            seed,
            device,
            None,
            normalisation=normalisation,
            augment=augment if padding or flip else None,
        )
        self.batches_per_epoch = self._store.batches_per_epoch
        self.samples_per_batch = batch_size
        self.sha256 = self._store.sha256
        self.description: dict[str, str | int | float] = {
            "name": "cifar10",
            "origin": files.origin,
            "train_samples": len(train[0]),
            "eval_samples": len(held_out[0]),
            "num_classes": self.num_classes,
            "image_size": image_size,
            "channels": 3,
            "value_range": value_range,
            "augmentation": augmentation,
            "flip": "half" if flip else "none",
            "ignored_files": files.ignored,
        }

    def train_batch(self, index: int) -> ImageBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        return self._store.train_batch(index)

    def eval_batches(self) -> Iterator[ImageBatch]:
        """The held-out images in a fixed order, as they are."""
        return self._store.eval_batches()


def _normalisation(value_range: str) -> tuple[Tensor, Tensor]:
    """What to subtract from 0 ... 255, and then to divide by."""
    mean, deviation = (255 * torch.tensor(part).view(3, 1, 1) for part in (MEAN, DEVIATION))
    ranges = {
        "standardised": (mean, deviation),
        "mean_subtracted": (mean, torch.ones(3, 1, 1)),
        "tanh": (torch.full((3, 1, 1), 127.5), torch.full((3, 1, 1), 127.5)),
    }
    if value_range not in ranges:
        allowed = ", ".join(repr(name) for name in ranges)
        raise ValueError(f"value_range={value_range!r} is not allowed: {allowed}")
    return ranges[value_range]


def _first(part: Part, size: int | None, name: str, stream: int) -> ImageBatch:
    n = len(part.labels)
    if size is not None and not 1 <= size <= n:
        raise ValueError(f"{name}={size} is not allowed: 1 to {n}, the size of the split, or None")
    chosen = permutation(SPLIT_SEED, stream, n)[:size].numpy()
    return torch.from_numpy(part.images[chosen]), torch.from_numpy(part.labels[chosen])

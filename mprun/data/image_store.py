"""Labelled images held as bytes on the device and turned into float batches there.

scikit-learn's handwritten digits, enlarged: real images without a download.
"""

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.data.source import DataError, EpochOrder, permutation

ImageBatch = tuple[Tensor, Tensor]
# (uint8 images [batch, channels, h, w], epoch, position of the first one in the epoch) -> the like.
Augment = Callable[[Tensor, int, int], Tensor]


class ImageStore:
    """A training and an evaluation split of uint8 images, served at ``image_size``.

    ``train_images`` and ``eval_images`` are uint8 ``[n, channels or 1, h, w]`` with values up to
    ``maximum``, labels int64 ``[n]``. Batches are ``(images float32
    [batch, channels, image_size, image_size], labels int64 [batch])``: bilinear resize if the
    stored size differs, one channel repeated if more are asked for, and values either
    ``standardised`` (mean 0, standard deviation 1 over the stored training split) or ``tanh``
    (0 ... maximum mapped to -1 ... 1). ``normalisation`` replaces both: (offset, divisor), float32
    ``[channels, 1, 1]``, to subtract and then to divide by. ``augment`` changes training batches
    on the device while they are bytes.
    """

    def __init__(
        self,
        train: ImageBatch,
        held_out: ImageBatch,
        maximum: int,
        image_size: int,
        channels: int,
        batch_size: int,
        seed: int,
        device: torch.device | str,
        value_range: str | None,
        *,
        normalisation: tuple[Tensor, Tensor] | None = None,
        augment: Augment | None = None,
    ) -> None:
        stored = train[0].shape[1]
        if image_size < 8:
            raise ValueError(f"image_size={image_size} is not allowed: 8 or more")
        if channels < 1 or channels % stored:
            raise ValueError(f"channels={channels} is not allowed: a multiple of {stored}")
        if normalisation is not None:
            self.offset, self.divisor = (part.to(device) for part in normalisation)
        elif value_range == "standardised":
            std, mean = torch.std_mean(train[0].double(), correction=0)
            self.offset, self.divisor = float(mean), float(std)
        elif value_range == "tanh":
            self.offset = self.divisor = maximum / 2
        else:
            raise ValueError(
                f"value_range={value_range!r} is not allowed: 'standardised' or 'tanh'"
            )
        device = torch.device(device)
        self._order = EpochOrder(seed, len(train[0]), batch_size, device)
        self.batches_per_epoch = self._order.batches_per_epoch
        self.sha256 = _sha256(*train, *held_out)
        self._train = tuple(part.to(device) for part in train)
        self._held_out = tuple(part.to(device) for part in held_out)
        self._image_size, self._channels, self._batch_size = image_size, channels, batch_size
        self._augment = augment

    def train_batch(self, index: int) -> ImageBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        picked = self._order.indices(index)
        images, labels = self._train
        batch = images.index_select(0, picked)
        if self._augment is not None:
            epoch, number = divmod(index, self.batches_per_epoch)
            batch = self._augment(batch, epoch, number * self._batch_size)
        return self._float(batch), labels.index_select(0, picked)

    def eval_batches(self) -> Iterator[ImageBatch]:
        """The whole held-out split in its stored order; the last batch may be smaller."""
        images, labels = self._held_out
        for start in range(0, len(images), self._batch_size):
            part = slice(start, start + self._batch_size)
            yield self._float(images[part]), labels[part]

    def _float(self, images: Tensor) -> Tensor:
        values = images.float().sub_(self.offset).div_(self.divisor)
        size = (self._image_size, self._image_size)
        if values.shape[-2:] != size:
            values = F.interpolate(values, size, mode="bilinear", align_corners=False)
        if values.shape[1] != self._channels:
            values = values.repeat(1, self._channels // values.shape[1], 1, 1)
        return values


def _sha256(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy())
    return digest.hexdigest()


EVAL_SAMPLES = 360
MAXIMUM = 16
# One fixed shuffle for every seed: all runs must be judged on the same images.
SPLIT_SEED = 20171010


class DigitsImages:
    """1,797 digits of 8x8 px in 10 classes, split 1,437 for training and 360 held out.

    Enlarged bilinearly to ``image_size`` px, batch by batch on ``device``; the one gray channel is
    repeated if ``channels`` is more than 1. ``value_range`` is ``standardised`` (mean 0, standard
    deviation 1 over the 8x8 training pixels) or ``tanh`` ([-1, 1]). The images are those of
    ``sklearn.datasets.load_digits`` (UCI optical recognition of handwritten digits, test part).

    A batch is ``(images float32 [batch, channels, image_size, image_size], labels int64
    [batch])``; the last evaluation batch may be smaller.

    Raises ``ValueError`` for an argument out of range, ``DataError`` without scikit-learn.
    """

    num_classes = 10

    def __init__(
        self,
        image_size: int,
        batch_size: int,
        seed: int,
        device: torch.device | str,
        channels: int = 3,
        value_range: str = "standardised",
    ) -> None:
        images, labels = _load()
        order = permutation(SPLIT_SEED, 0, len(images))
        train, held_out = order[:-EVAL_SAMPLES], order[-EVAL_SAMPLES:]
        self._store = ImageStore(
            (images[train], labels[train]),
            (images[held_out], labels[held_out]),
            MAXIMUM,
            image_size,
            channels,
            batch_size,
            seed,
            device,
            value_range,
        )
        self.batches_per_epoch = self._store.batches_per_epoch
        self.samples_per_batch = batch_size
        self.sha256 = self._store.sha256
        self.description: dict[str, str | int | float] = {
            "name": "digits",
            "origin": "sklearn.datasets.load_digits",
            "train_samples": len(train),
            "eval_samples": len(held_out),
            "num_classes": self.num_classes,
            "image_size": image_size,
            "channels": channels,
            "value_range": value_range,
            "offset": self._store.offset,
            "divisor": self._store.divisor,
        }

    def train_batch(self, index: int) -> ImageBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        return self._store.train_batch(index)

    def eval_batches(self) -> Iterator[ImageBatch]:
        """The 360 held-out digits in a fixed order."""
        return self._store.eval_batches()


def _load() -> ImageBatch:
    """All digits: uint8 ``[1797, 1, 8, 8]`` with values 0 ... 16, labels int64 ``[1797]``."""
    try:
        # Imported here because it brings scipy, which no other source needs.
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the digits data need scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.uint8)[:, None]
    return images, torch.from_numpy(digits.target).to(torch.int64)

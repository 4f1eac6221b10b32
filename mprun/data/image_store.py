"""Small images held as bytes on the device and turned into float batches there.

Two sources need no files: handwritten digits, which are real images, and random ones.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.data.augmentation import ImageForm
from mprun.data.source import Batch, DataError, EpochOrder, Serving, Source, permutation

# (uint8 images [batch, channels, h, w], epoch, position of the first in the epoch) -> such images.
Augment = Callable[[Tensor, int, int], Tensor]


class ImageStore(Source):
    """A training and an evaluation split of uint8 images, served in one form.

    Batches are ``(images float32 [batch, channels, image_size, image_size], labels int64
    [batch])``: bilinear resize if the stored size differs, one channel repeated if more are asked
    for; the last evaluation batch may be smaller. ``sha256`` is over the stored images and labels.

    Args:
        splits: Training and held out: images uint8 ``[n, channels or 1, h, w]``, labels int64
            ``[n]``.
        form: ``value_range`` is ``standardised`` (mean 0, standard deviation 1 over the stored
            training split), ``mean_subtracted`` (0 ... maximum mapped to 0 ... 255, minus the mean
            of that split) or ``tanh`` (0 ... maximum mapped to -1 ... 1).
        maximum: The largest value that an image may have.
        normalisation: Replaces value range and maximum: (offset, divisor), float32
            ``[channels, 1, 1]``, to subtract and then to divide by.
        augment: Changes training batches on the device while they are bytes.
    """

    def __init__(
        self,
        splits: tuple[Batch, Batch],
        name: str,
        num_classes: int,
        form: ImageForm,
        serving: Serving,
        *,
        maximum: int = 255,
        normalisation: tuple[Tensor, Tensor] | None = None,
        augment: Augment | None = None,
    ) -> None:
        (train, held_out), device = splits, serving.device
        samples, self.samples_per_batch = len(train[0]), serving.batch_size
        self._order = EpochOrder(serving.seed, samples, serving.batch_size, device)
        self.batches_per_epoch = self._order.batches_per_epoch
        self.description = {
            "name": name,
            "train_samples": samples,
            "eval_samples": len(held_out[0]),
            "num_classes": num_classes,
            **asdict(form),
        }
        self._constants: tuple[Tensor | float, ...]
        if normalisation is not None:
            self._constants = tuple(part.to(device) for part in normalisation)
        else:
            offset, divisor = self._constants = _constants(form.value_range, train[0], maximum)
            self.description |= {"offset": offset, "divisor": divisor}
        self.num_classes = num_classes
        digest = hashlib.sha256()
        for tensor in (*train, *held_out):
            digest.update(tensor.contiguous().numpy().data)
        self.sha256 = digest.hexdigest()
        self._train, self._held_out = ([p.to(device) for p in split] for split in splits)
        self._form, self._augment = form, augment

    def train_batch(self, index: int) -> Batch:
        picked = self._order.indices(index)
        images, labels = self._train
        batch = images.index_select(0, picked)
        if self._augment is not None:
            epoch, number = divmod(index, self.batches_per_epoch)
            batch = self._augment(batch, epoch, number * self.samples_per_batch)
        return self._float(batch), labels.index_select(0, picked)

    def eval_batches(self) -> Iterator[Batch]:
        """Yield the whole held-out split in its stored order, without augmentation."""
        parts = (whole.split(self.samples_per_batch) for whole in self._held_out)
        for images, labels in zip(*parts, strict=True):
            yield self._float(images), labels

    def _float(self, images: Tensor) -> Tensor:
        offset, divisor = self._constants
        values = images.float().sub_(offset).div_(divisor)
        size = (self._form.image_size, self._form.image_size)
        if values.shape[-2:] != size:
            values = F.interpolate(values, size, mode="bilinear", align_corners=False)
        if values.shape[1] != self._form.channels:
            values = values.repeat(1, self._form.channels // values.shape[1], 1, 1)
        return values


def _constants(value_range: str, images: Tensor, maximum: int) -> tuple[float, float]:
    if value_range == "tanh":
        return maximum / 2, maximum / 2
    std, mean = torch.std_mean(images.double(), correction=0)
    return float(mean), maximum / 255 if value_range == "mean_subtracted" else float(std)


EVAL_SAMPLES = 360
MAXIMUM = 16
# One fixed shuffle for every seed: all runs must be judged on the same images.
SPLIT_SEED = 20171010


class DigitsImages(ImageStore):
    """1,797 digits of 8x8 px in 10 classes, split 1,437 for training and 360 held out.

    The images are those of ``sklearn.datasets.load_digits`` (UCI optical recognition of handwritten
    digits, test part); digits.LICENSE beside this file names their origin.
    """

    def __init__(self, form: ImageForm, serving: Serving) -> None:
        super().__init__(split_digits(), "digits", 10, form, serving, maximum=MAXIMUM)
        self.description["origin"] = "sklearn.datasets.load_digits"


_DIGITS = Path(__file__).with_name("digits.npz")


def load_digits() -> Batch:
    """Read all digits: uint8 ``[1797, 1, 8, 8]``, values 0 ... 16, labels int64 ``[1797]``.

    It raises ``DataError`` if the installed file is damaged.
    """
    try:
        with open(_DIGITS, "rb") as file, np.load(file, allow_pickle=False) as digits:
            images, labels = (torch.from_numpy(digits[name]) for name in ("images", "labels"))
    except Exception as error:  # a damaged archive makes NumPy raise many types
        reason = f"the digits cannot be read ({error}): install mprun again"
        raise DataError(f"{_DIGITS}: {reason}") from error
    return images[:, None], labels.to(torch.int64)


def split_digits() -> tuple[Batch, Batch]:
    """Return the digits of `load_digits` that train, and those held out."""
    images, labels = load_digits()
    order = permutation(SPLIT_SEED, 0, len(images))
    train, held_out = order[:-EVAL_SAMPLES], order[-EVAL_SAMPLES:]
    return (images[train], labels[train]), (images[held_out], labels[held_out])


CONTENT_SEED = 20171010


class SyntheticImages(ImageStore):
    """Uniform random bytes as images with uniform random labels, nothing to learn.

    They are stored at full size: ``channels * image_size**2`` bytes a sample on the device. The
    content comes from a fixed CPU generator; the seed sets only the order.
    """

    def __init__(
        self,
        num_classes: int,
        train_size: int,
        eval_size: int,
        form: ImageForm,
        serving: Serving,
    ) -> None:
        generator = torch.Generator().manual_seed(CONTENT_SEED)

        def split(n: int) -> Batch:
            shape = (n, form.channels, form.image_size, form.image_size)
            images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            return images, torch.randint(num_classes, (n,), generator=generator)

        splits = split(train_size), split(eval_size)
        super().__init__(splits, "synthetic_images", num_classes, form, serving)

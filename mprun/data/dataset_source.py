"""The user's own data sets as a source: order, random augmentation and batches are mprun's."""

import hashlib
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mprun.data.errors import DamagedData, DataError
from mprun.data.order import EpochOrder, checked_index
from mprun.data.sample_random import kept_random_state, seed_sample
from mprun.errors import MprunError, raised

ImageBatch = tuple[Tensor, Tensor]
# Keys of what is no training sample: the same for every seed, so that all runs are judged on the
# same images and equal data have equal hashes.
_HELD_OUT, _HASHED = 20171012, 20171013
_TRAINING = 20171014
HASHED_ITEMS = 64  # of each split


class DatasetSource:
    """Two map-style data sets (``__len__``, ``__getitem__``) of ``(image, label)``.

    An image is a tensor ``[channels, height, width]``, uint8 or floating, all of one shape; a label
    an integer from 0 to below ``num_classes``. Batches are ``(images float32
    [batch, channels, height, width], labels int64 [batch])`` on ``device``. uint8 images are copied
    there as bytes and become ``(image - offset) / divisor``, by default 0 to 1; floating ones are
    taken as they are.

    The order of the training items is a fresh permutation for each (seed, epoch), the tail that
    fills no batch is dropped; the held-out items are walked in their order. Around each
    ``__getitem__`` the global generators of Python, NumPy and torch (CPU) are seeded from (seed,
    epoch, index), for held-out items from the index alone, and put back afterwards: random
    augmentation that draws from them is the same for any worker count and resume point. A generator
    that the data set seeds itself from elsewhere is its own affair.

    ``sha256`` covers up to 64 items of each split, evenly spaced, as they are delivered, and both
    lengths; or give it: what you state is recorded, nothing is read for it.

    Raises ``ValueError`` for an argument out of range, ``DamagedData`` for an item that cannot be
    used or that raises an exception; the message names it.
    """

    def __init__(
        self,
        train,
        held_out,
        *,
        batch_size: int,
        seed: int,
        device: torch.device | str,
        num_classes: int,
        workers: int = 0,
        offset: float | Sequence[float] = 0.0,
        divisor: float | Sequence[float] = 255.0,
        sha256: str | None = None,
    ) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes={num_classes} is not allowed: 1 or more")
        for name, split in {"train": train, "held_out": held_out}.items():
            if not (hasattr(split, "__len__") and hasattr(split, "__getitem__")):
                raise ValueError(
                    f"{name}={type(split).__name__} is not allowed: a data set with __len__ and "
                    "__getitem__"
                )
        if not len(held_out):
            raise DataError("held_out: no item")
        self._device = torch.device(device)
        self._reader = _Reader(train, held_out, batch_size, seed, num_classes)
        self._batch_size = batch_size
        self.num_classes = num_classes
        self.batches_per_epoch = self._reader.batches_per_epoch
        self.samples_per_batch = batch_size
        image = self._reader.first
        channels = image.shape[0]
        self._offset, self._divisor = (
            torch.tensor(values, dtype=torch.float32, device=self._device).reshape(-1, 1, 1)
            for values in (offset, divisor)
        )
        for name, values in {"offset": self._offset, "divisor": self._divisor}.items():
            if len(values) not in (1, channels):
                raise ValueError(
                    f"{name}={values.flatten().tolist()} is not allowed: one number or {channels}, "
                    "one for each channel"
                )
        counts = [min(HASHED_ITEMS, len(split)) for split in (train, held_out)]
        covers = (
            f"{counts[0]} of {len(train)} training and {counts[1]} of {len(held_out)} held-out "
            "items"
        )
        self.sha256 = sha256 or self._reader.sha256(counts)
        self.description: dict[str, str | int | float] = {
            "name": type(train).__name__,
            "train_samples": len(train),
            "eval_samples": len(held_out),
            "num_classes": num_classes,
            "channels": channels,
            "image_height": image.shape[1],
            "image_width": image.shape[2],
            "sha256_covers": "as stated by the factory" if sha256 else covers,
        }
        if image.shape[1] == image.shape[2]:
            self.description["image_size"] = image.shape[1]

    def train_batch(self, index: int) -> ImageBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        return self._on_device(*self._reader(checked_index(index)))

    def eval_batches(self) -> Iterator[ImageBatch]:
        """The whole held-out split in its order; the last batch may be smaller."""
        for number in range(-(-self.description["eval_samples"] // self._batch_size)):
            yield self._on_device(*self._reader.held_out_batch(number))

    def _on_device(self, images: Tensor, labels: Tensor) -> ImageBatch:
        if self._device.type == "cuda":
            # From pinned memory the copy makes the host wait for nothing.
            images, labels = images.pin_memory(), labels.pin_memory()
        images = images.to(self._device, non_blocking=True)
        labels = labels.to(self._device, non_blocking=True)
        if images.dtype is torch.uint8:
            images = images.float().sub_(self._offset).div_(self._divisor)
        return images, labels


class _Reader:
    """Batches on the CPU by number, uint8 or float32; holds no device memory, can be pickled."""

    def __init__(self, train, held_out, batch_size: int, seed: int, num_classes: int):
        self._splits = {"train": train, "held_out": held_out}
        self._batch_size, self._seed, self._num_classes = batch_size, seed, num_classes
        self._order = EpochOrder(seed, len(train), batch_size, torch.device("cpu"))
        self.batches_per_epoch = self._order.batches_per_epoch
        self._shape: tuple | None = None
        with kept_random_state():
            self.first = self._item("train", 0, (_HASHED, 0))[0]
        self._shape = self.first.shape, self.first.dtype

    def __call__(self, index: int) -> ImageBatch:
        """Training batch ``index`` of the run."""
        epoch = index // self.batches_per_epoch
        key = (_TRAINING, self._seed, epoch)
        return self._batch("train", self._order.indices(index).tolist(), key)

    def held_out_batch(self, number: int) -> ImageBatch:
        """Held-out batch ``number``; the last one may be smaller."""
        start = number * self._batch_size
        stop = min(start + self._batch_size, len(self._splits["held_out"]))
        return self._batch("held_out", range(start, stop), (_HELD_OUT,))

    def sha256(self, counts: Sequence[int]) -> str:
        digest = hashlib.sha256()
        for (name, split), count in zip(self._splits.items(), counts, strict=True):
            digest.update(f"{name} {len(split)}\n".encode())
            for number in range(count):
                picked = [number * len(split) // count]
                images, labels = self._batch(name, picked, (_HASHED,))
                digest.update(f"{images.dtype} {list(images.shape)} {labels.item()}\n".encode())
                digest.update(images.contiguous().numpy())
        return digest.hexdigest()

    def _batch(self, name: str, indices: Sequence[int], key: tuple[int, ...]) -> ImageBatch:
        with kept_random_state():
            items = [self._item(name, index, (*key, index)) for index in indices]
        images, labels = zip(*items, strict=True)
        return torch.stack(images), torch.tensor(labels, dtype=torch.int64)

    def _item(self, name: str, index: int, key: tuple[int, ...]) -> tuple[Tensor, int]:
        seed_sample(*key)
        try:
            item = self._splits[name][index]
        except (MprunError, MemoryError):
            raise
        except Exception as error:
            raise DamagedData(f"{name}[{index}]: {raised(error)}") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DamagedData(f"{name}[{index}]: {type(item).__name__}, must be (image, label)")
        return self._image(item[0], f"{name}[{index}]"), self._label(item[1], f"{name}[{index}]")

    def _image(self, image, what: str) -> Tensor:
        if not isinstance(image, Tensor) or image.dim() != 3:
            got = list(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise DamagedData(
                f"{what}: image is {got}, must be a tensor [channels, height, width] (PILToTensor "
                "of torchvision makes one of a picture)"
            )
        if image.dtype is not torch.uint8 and not image.is_floating_point():
            raise DamagedData(f"{what}: image of {image.dtype}, must be uint8 or floating")
        image = image.detach() if image.dtype is torch.uint8 else image.detach().float()
        if self._shape is not None and (image.shape, image.dtype) != self._shape:
            raise DamagedData(
                f"{what}: image {image.dtype} {list(image.shape)}, must be {self._shape[1]} "
                f"{list(self._shape[0])} as train[0]"
            )
        return image

    def _label(self, label, what: str) -> int:
        try:
            label = operator.index(label)
        except TypeError:
            raise DamagedData(f"{what}: label {label!r:.60}, must be an integer") from None
        if not 0 <= label < self._num_classes:
            raise DamagedData(
                f"{what}: label {label}, must be from 0 to {self._num_classes - 1} "
                f"(num_classes={self._num_classes})"
            )
        return label

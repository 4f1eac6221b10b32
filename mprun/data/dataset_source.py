"""From a batch number to a batch of items of the user's own data set, in any process.

The user's own data sets as a source: order, random augmentation and batches are mprun's.
"""

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mprun.data.image_reader import ReadBatch
from mprun.data.image_store import ImageBatch
from mprun.data.loader import BatchLoader, DeviceFeed
from mprun.data.source import (
    DamagedData,
    DataError,
    EpochOrder,
    checked_index,
    kept_random_state,
    seed_sample,
)
from mprun.errors import MprunError, raised

CPU = torch.device("cpu")
# Keys of random states. What is no training sample has the same for every seed, so that all runs
# are judged on the same images and equal data have equal hashes.
_TRAINING, _HELD_OUT, _HASHED = 20171014, 20171015, 20171016


@dataclass(frozen=True, slots=True)
class Items:
    """A map-style data set; `source` is what messages call it."""

    dataset: Any
    source: str
    num_classes: int

    def __len__(self) -> int:
        return len(self.dataset)

    def item(self, index: int, *key: int) -> tuple[Tensor, int]:
        """Image and label of item ``index``, read with the random state of (key, index).

        The image uint8 or float32; DamagedData names the item where it cannot be used.
        """
        what = f"{self.source}[{index}]"
        seed_sample(*key, index)
        try:
            item = self.dataset[index]
        except (MprunError, MemoryError):
            raise
        except Exception as error:
            raise DamagedData(f"{what}: {raised(error)}") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DamagedData(f"{what}: {type(item).__name__}, must be (image, label)")
        return _image(item[0], what), _label(item[1], self.num_classes, what)

    def sha256_of(self, count: int) -> str:
        """Of the length and ``count`` items, evenly spaced, as they are delivered."""
        digest = hashlib.sha256(f"{len(self)}\n".encode())
        with kept_random_state():
            for number in range(count):
                image, label = self.item(number * len(self) // count, _HASHED)
                digest.update(f"{image.dtype} {list(image.shape)} {label}\n".encode())
                digest.update(image.contiguous().numpy())
        return digest.hexdigest()

    def sample(self) -> Tensor:
        """Image 0; DataError if it differs when it is read again with the same random state."""
        with kept_random_state():
            image, again = (self.item(0, _HASHED)[0] for _ in range(2))
        if image.shape != again.shape or not torch.equal(image, again):
            raise DataError(
                f"{self.source}[0]: differs when it is read again; random augmentation must draw "
                "from the global generators of torch, NumPy or random"
            )
        return image


class DatasetReader:
    """Batches of one split by number, a pure function of the data set, ``seed`` and the number.

    With a ``seed``: training batches in the order of ``EpochOrder``, number counting over all
    epochs. Without: the data set in its own order, ``len(reader)`` batches, the last one may be
    smaller. Images are uint8 or float32 ``[batch, channels, height, width]``, all like ``like``.
    Can be pickled where the data set can.
    """

    most_replaced = 0  # an item that cannot be used ends the run

    def __init__(self, split: Items, like: Tensor, batch_size: int, seed: int | None) -> None:
        self.split, self.batch_size, self.seed = split, batch_size, seed
        self._like = like.shape, like.dtype
        self._order = None if seed is None else EpochOrder(seed, len(split), batch_size, CPU)

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self._order is not None:
            return self._order.batches_per_epoch
        return -(-len(self.split) // self.batch_size)

    def read(self, number: int, *, shared: bool = False) -> ReadBatch:
        """Batch ``number``; ValueError if it is negative, DamagedData naming an item."""
        if self._order is None:
            start = number * self.batch_size
            chosen = range(start, min(start + self.batch_size, len(self.split)))
            key = (_HELD_OUT,)
        else:
            chosen = self._order.indices(checked_index(number)).tolist()
            key = (_TRAINING, self.seed, number // len(self))
        with kept_random_state():
            pairs = [self._alike(index, *self.split.item(index, *key)) for index in chosen]
        images, labels = zip(*pairs, strict=True)
        images = torch.stack(images)
        if shared:
            images.share_memory_()
        return ReadBatch(images, torch.tensor(labels, dtype=torch.int64), (), ())

    def _alike(self, index: int, image: Tensor, label: int) -> tuple[Tensor, int]:
        if (image.shape, image.dtype) != self._like:
            shape, dtype = self._like
            raise DamagedData(
                f"{self.split.source}[{index}]: image {image.dtype} {list(image.shape)}, train[0] "
                f"is {dtype} {list(shape)}; all must be alike"
            )
        return image, label


def _image(image: object, what: str) -> Tensor:
    if not isinstance(image, Tensor) or image.dim() != 3:
        got = list(image.shape) if isinstance(image, Tensor) else type(image).__name__
        raise DamagedData(
            f"{what}: image is {got}, must be a tensor [channels, height, width] (PILToTensor of "
            "torchvision makes one of a picture)"
        )
    if image.dtype is not torch.uint8 and not image.is_floating_point():
        raise DamagedData(f"{what}: image of {image.dtype}, must be uint8 or floating")
    image = image.detach().cpu()
    return image if image.dtype is torch.uint8 else image.float()


def _label(label: object, num_classes: int, what: str) -> int:
    try:
        number = operator.index(label)
    except TypeError:
        raise DamagedData(f"{what}: label {label!r:.60}, must be an integer") from None
    if not 0 <= number < num_classes:
        raise DamagedData(
            f"{what}: label {number}, must be from 0 to {num_classes - 1} "
            f"(num_classes={num_classes})"
        )
    return number


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
    augmentation that draws from them is the same for any worker count and resume point. One that
    draws from elsewhere is refused.

    ``workers`` processes read ahead, as many for the held-out items; 0: the calling thread reads.
    The data sets must be picklable for them. They end with ``close()``.

    ``sha256`` covers up to 64 items of each split, evenly spaced, as they are delivered, and both
    lengths; or give it: what you state is recorded, nothing is read for it.

    Raises ``ValueError`` for an argument out of range, ``DamagedData`` for an item that cannot be
    used or that raises an exception (the message names it), ``Resource`` for a lost process.
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
        splits = {"train": train, "held_out": held_out}
        items = {name: _items(name, split, num_classes) for name, split in splits.items()}
        image = items["train"].sample()
        channels, height, width = image.shape
        device = torch.device(device)
        self._offset = _per_channel("offset", offset, channels, device)
        self._divisor = _per_channel("divisor", divisor, channels, device)
        reader = DatasetReader(items["train"], image, batch_size, seed)
        eval_reader = DatasetReader(items["held_out"], image, batch_size, None)
        pinned = device.type == "cuda"
        self._feed = DeviceFeed(BatchLoader(reader, workers, pin_memory=pinned), device)
        self._eval_feed = DeviceFeed(
            BatchLoader(eval_reader, workers, last=len(eval_reader), pin_memory=pinned), device
        )
        self._eval_batches = len(eval_reader)
        self.num_classes = num_classes
        self.batches_per_epoch, self.samples_per_batch = len(reader), batch_size
        counts = {name: min(HASHED_ITEMS, len(split)) for name, split in items.items()}
        self.sha256 = sha256 or _sha256(items, counts)
        covers = " and ".join(f"{counts[name]} of {len(items[name])} {name}" for name in items)
        self.description: dict[str, str | int | float] = {
            "name": type(train).__name__,
            "train_samples": len(train),
            "eval_samples": len(held_out),
            "num_classes": num_classes,
            "channels": channels,
            "image_height": height,
            "image_width": width,
            "sha256_covers": "as stated by the factory" if sha256 else f"{covers} items",
        }
        if height == width:
            self.description["image_size"] = height

    def train_batch(self, index: int) -> ImageBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        images, labels = self._feed.batch(checked_index(index))
        return self._float(images), labels

    def eval_batches(self) -> Iterator[ImageBatch]:
        """The whole held-out split in its order; the last batch may be smaller."""
        for number in range(self._eval_batches):
            images, labels = self._eval_feed.batch(number)
            yield self._float(images), labels
        self._eval_feed.defer_wait()  # only training's is asked for

    def defer_wait(self) -> Callable[[], float]:
        """What tells how long the device waited for training batches, see ``DeviceFeed``."""
        return self._feed.defer_wait()

    def close(self) -> None:
        """End the loader processes; the source can be asked again."""
        self._feed.close()
        self._eval_feed.close()

    def _float(self, images: Tensor) -> Tensor:
        if images.dtype is torch.uint8:
            return images.float().sub_(self._offset).div_(self._divisor)
        # On a CPU they are the loader's own, which may hand them out again.
        return images.clone() if images.device.type == "cpu" else images


def _items(name: str, split, num_classes: int) -> Items:
    if not (hasattr(split, "__len__") and hasattr(split, "__getitem__")):
        raise ValueError(
            f"{name}={type(split).__name__} is not allowed: a data set with __len__ and __getitem__"
        )
    if not len(split):
        raise DataError(f"{name}: no item")
    return Items(split, name, num_classes)


def _per_channel(name: str, values, channels: int, device: torch.device) -> Tensor:
    """float32 ``[1 or channels, 1, 1]`` on the device."""
    tensor = torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, 1, 1)
    if len(tensor) not in (1, channels):
        raise ValueError(
            f"{name}={values} is not allowed: one number or {channels}, one for each channel"
        )
    return tensor


def _sha256(items: dict[str, Items], counts: dict[str, int]) -> str:
    parts = [items[name].sha256_of(count) for name, count in counts.items()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()

"""From a batch number to a batch of items of the user's own data set, in any process."""

import hashlib
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mprun.data.errors import DamagedData, DataError
from mprun.data.image_reader import ReadBatch
from mprun.data.order import EpochOrder, checked_index
from mprun.data.sample_random import kept_random_state, seed_sample
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

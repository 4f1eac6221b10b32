"""A source for the user's data sets: mprun sets order, random augmentation and batches."""

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from mprun.data.loader import LoadedSource
from mprun.data.source import (
    DamagedData,
    DataError,
    ReadBatch,
    Reader,
    kept_random_state,
    seed_sample,
)
from mprun.errors import MprunError, raised

# Keys of random states. Other samples than training ones have the same state for every seed, so
# that all runs are judged on the same images and equal data have equal hashes.
_TRAINING, _HELD_OUT, _HASHED = 20171014, 20171015, 20171016


@dataclass(frozen=True, slots=True)
class Items:
    """A map-style data set; `source` is its name in messages."""

    dataset: Any
    source: str
    num_classes: int

    def __len__(self) -> int:
        return len(self.dataset)

    def item(self, index: int, *key: int) -> tuple[Tensor, int]:
        """Read image and label of item ``index`` with the random state of (key, index).

        The image is uint8 or float32.

        Raises:
            DamagedData: The item cannot be used; the message names it.
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
        """Hash the length and ``count`` evenly spaced items, as they are delivered."""
        digest = hashlib.sha256(f"{len(self)}\n".encode())
        with kept_random_state():
            for number in range(count):
                image, label = self.item(number * len(self) // count, _HASHED)
                digest.update(f"{image.dtype} {list(image.shape)} {label}\n".encode())
                digest.update(image.contiguous().numpy().data)
        return digest.hexdigest()

    def sample(self) -> Tensor:
        """Return image 0; raise DataError if a second reading with the same state differs."""
        with kept_random_state():
            image, again = (self.item(0, _HASHED)[0] for _ in range(2))
        if image.shape != again.shape or not torch.equal(image, again):
            raise DataError(
                f"{self.source}[0]: differs when it is read again; random augmentation must draw "
                "from the global generators of torch, NumPy or random"
            )
        return image


class DatasetReader(Reader):
    """Batches of items, uint8 or float32 ``[batch, channels, height, width]``, all like ``like``.

    It can be pickled if the data set can. An item that cannot be used ends the run.
    """

    def __init__(self, split: Items, like: Tensor, batch_size: int, seed: int | None) -> None:
        super().__init__(len(split), split.source, batch_size, seed)
        self.split, self.seed = split, seed
        self._like = like.shape, like.dtype

    def read(self, number: int, *, shared: bool = False) -> ReadBatch:
        """Read batch ``number``; raise ``DamagedData`` naming an item."""
        chosen = self.places(number)
        key = (_HELD_OUT,) if self.seed is None else (_TRAINING, self.seed, number // len(self))
        with kept_random_state():
            pairs = [self._alike(index, *self.split.item(index, *key)) for index in chosen]
        images = torch.stack([image for image, _ in pairs])
        if shared:
            images.share_memory_()
        return ReadBatch(images, torch.tensor([label for _, label in pairs]), {})

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


def _label(label: SupportsIndex, num_classes: int, what: str) -> int:
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


class DatasetSource(LoadedSource):
    """Two map-style data sets (``__len__``, ``__getitem__``) of ``(image, label)``.

    An image is a tensor ``[channels, height, width]``, uint8 or floating, all of one shape; a label
    an integer from 0 to below ``num_classes``. Batches are ``(images float32
    [batch, channels, height, width], labels int64 [batch])`` on ``device``. uint8 images are copied
    there as bytes and become ``(image - offset) / divisor``, by default 0 to 1; floating ones stay
    unchanged.

    The training items have a fresh permutation for each (seed, epoch), and the tail that fills no
    batch is dropped. The held-out items come in their own order. Around each ``__getitem__`` the
    global generators of Python, NumPy and torch (CPU) are seeded from (seed, epoch, index), for
    held-out items from the index alone, and restored afterwards. Random augmentation that draws
    from them is therefore the same for any worker count and resume point. Augmentation that draws
    from elsewhere is refused.

    ``workers`` processes read ahead, and as many for the held-out items; 0: the calling thread
    reads. They need picklable data sets, and end with ``close()``.

    ``sha256`` covers up to 64 items of each split, evenly spaced, as they are delivered, and both
    lengths. A value that you give is recorded unchecked.

    Raises:
        ValueError: An argument is out of range.
        DamagedData: An item cannot be used or raises an exception; the message names it.
        Resource: A process is lost.
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
        super().__init__(reader, eval_reader, workers, device)
        self.num_classes = num_classes
        counts = {name: min(HASHED_ITEMS, len(split)) for name, split in items.items()}
        self.sha256 = sha256 or _sha256(items, counts)
        covers = " and ".join(f"{counts[name]} of {len(items[name])} {name}" for name in items)
        self.description = {
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

    def _float(self, images: Tensor) -> Tensor:
        if images.dtype is torch.uint8:
            return images.float().sub_(self._offset).div_(self._divisor)
        # On a CPU they belong to the loader, which may hand them out again.
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
    """Return the values as float32 ``[1 or channels, 1, 1]`` on the device."""
    tensor = torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, 1, 1)
    if len(tensor) not in (1, channels):
        raise ValueError(
            f"{name}={values} is not allowed: one number or {channels}, one for each channel"
        )
    return tensor


def _sha256(items: dict[str, Items], counts: dict[str, int]) -> str:
    parts = [items[name].sha256_of(count) for name, count in counts.items()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()

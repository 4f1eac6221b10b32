"""The user's own data sets as a source: order, random augmentation and batches are mprun's."""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mprun.data.dataset_reader import DatasetReader, Items
from mprun.data.device_feed import DeviceFeed
from mprun.data.errors import DataError
from mprun.data.image_store import ImageBatch
from mprun.data.loader import BatchLoader
from mprun.data.order import checked_index

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

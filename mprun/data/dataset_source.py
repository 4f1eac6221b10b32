"""A source for the user's data sets, indexed or streams: random augmentation, batches, processes.

The order is mprun's, or that of a stream, such as a `torch.utils.data.IterableDataset`.
"""

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NotRequired, SupportsIndex, TypedDict, Unpack

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from mprun.data.loader import LoadedSource
from mprun.data.source import (
    DamagedData,
    DataError,
    ReadBatch,
    Reader,
    Serving,
    at_least,
    kept_random_state,
    seed_sample,
)
from mprun.errors import MprunError, raised
from mprun.torch_private import forget_worker_info

# Keys of random states. Other samples than training ones have the same state for every seed, so
# that all runs are judged on the same images and equal data have equal hashes.
_TRAINING, _HELD_OUT, _HASHED = 20171014, 20171015, 20171016


class DatasetReader(Reader):
    """Batches of a map-style data set, uint8 or float32 ``[batch, channels, height, width]``.

    It can be pickled if the data set can.
    """

    like: tuple[torch.Size, torch.dtype]  # of every image

    def __init__(
        self,
        where: str,
        dataset: Any,
        samples: int,
        num_classes: int,
        batch_size: int,
        seed: int | None,
    ) -> None:
        if samples < 1:
            raise DataError(f"{where}: no item")
        super().__init__(samples, where, batch_size, seed)
        self.dataset, self.num_classes, self.seed = dataset, num_classes, seed

    def read(self, number: int) -> ReadBatch:
        chosen = self.places(number)
        key = (_HELD_OUT,) if self.seed is None else (_TRAINING, self.seed, number // len(self))
        with kept_random_state():
            pairs = [self._item(index, *key) for index in chosen]
        for index, (image, _) in zip(chosen, pairs, strict=True):
            if (image.shape, image.dtype) != self.like:
                shape, dtype = self.like
                raise DamagedData(
                    f"{self.where}[{index}]: image {image.dtype} {list(image.shape)}, train[0] is "
                    f"{dtype} {list(shape)}; all images must have the same dtype and shape"
                )
        images = torch.stack([image for image, _ in pairs])
        return ReadBatch(images, torch.tensor([label for _, label in pairs]), {})

    def sha256_of(self, count: int) -> str:
        """Hash the length and ``count`` items, as they are delivered."""
        digest = hashlib.sha256(f"{self.samples}\n".encode())
        with kept_random_state():
            for number in range(count):
                image, label = self._item(self.hashed_place(number, count), _HASHED)
                digest.update(f"{image.dtype} {list(image.shape)} {label}\n".encode())
                digest.update(image.contiguous().numpy().data)
        return digest.hexdigest()

    def hashed_place(self, number: int, count: int) -> int:
        """Return the place of a hashed item: they are evenly spaced."""
        return number * self.samples // count

    def sample(self) -> Tensor:
        """Return image 0; raise DataError if a second reading with the same state differs."""
        with kept_random_state():
            image, again = (self._item(0, _HASHED)[0] for _ in range(2))
        if not torch.equal(image, again):
            raise DataError(
                f"{self.where}[0]: a second reading gives another image. Random augmentation must "
                f"use the global generators of torch, NumPy or random, and each iterator of a "
                f"stream must start at its first item"
            )
        return image

    def _item(self, index: int, *key: int) -> tuple[Tensor, int]:
        """Read an image, uint8 or float32, and its label with the random state of (key, index)."""
        what = f"{self.where}[{index}]"
        try:
            item = self._fetched(index, *key)
        except (MprunError, MemoryError):
            raise
        except Exception as error:
            raise DamagedData(f"{what}: {raised(error)}") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DamagedData(f"{what}: is a {type(item).__name__}, must be (image, label)")
        return _image(item[0], what), _label(item[1], self.num_classes, what)

    def _fetched(self, index: int, *key: int) -> Any:
        """Return the data set's own item, made with the random state of (key, index)."""
        seed_sample(*key, index)
        return self.dataset[index]


def _image(image: object, what: str) -> Tensor:
    if not isinstance(image, Tensor) or image.dim() != 3:
        got = list(image.shape) if isinstance(image, Tensor) else type(image).__name__
        raise DamagedData(
            f"{what}: image is {got}, must be a tensor [channels, height, width] (torchvision's "
            f"PILToTensor converts a picture)"
        )
    if image.dtype is not torch.uint8 and not image.is_floating_point():
        raise DamagedData(f"{what}: image has dtype {image.dtype}, must be uint8 or floating point")
    image = image.detach().cpu()
    return image if image.dtype is torch.uint8 else image.float()


def _label(label: SupportsIndex, num_classes: int, what: str) -> int:
    try:
        number = operator.index(label)
    except TypeError:
        raise DamagedData(f"{what}: label {label!r:.60}, must be an integer") from None
    if not 0 <= number < num_classes:
        most = f"{num_classes - 1} (num_classes={num_classes})"
        raise DamagedData(f"{what}: label {number}, must be from 0 to {most}")
    return number


_ENDED = object()


class StreamReader(DatasetReader):
    """Batches of a stream, in its own order.

    A stream has no index. Every rank and every loader process therefore iterates over all of it and
    passes over the items of the others, and so does a resume. No item is taken twice or left out,
    whatever their number; the cost is that each process reads everything.
    """

    _iterator: Iterator[Any] | None = None
    _key: tuple[int, ...] = ()  # of the random states of the iteration that is under way
    _position = 0  # of its next item

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_iterator": None}  # each process begins for itself

    def places(self, number: int) -> list[int]:
        if self.seed is None:
            return super().places(number)
        at_least(0, index=number)
        first = number % len(self) * self.batch_size
        return list(range(first, first + self.batch_size))

    def read(self, number: int) -> ReadBatch:
        batch = super().read(number)
        if (number + 1) % len(self) == 0:
            with kept_random_state():
                self._check_end()
        return batch

    def hashed_place(self, number: int, count: int) -> int:
        return number

    def _fetched(self, index: int, *key: int) -> Any:
        if self._iterator is None or key != self._key or index < self._position:
            self._begin(*key)
        item = self._next()
        while item is not _ENDED and self._position <= index:  # those of other processes
            item = self._next()
        if item is _ENDED:
            raise self._wrong(f"the stream ended after {self._position} items")
        return item

    def _begin(self, *key: int) -> None:
        # A stream that divides itself among loader processes would yield a part.
        forget_worker_info()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch_of(*key))
        seed_sample(*key, self.samples)  # no place of an item
        self._iterator, self._key, self._position = iter(self.dataset), key, 0

    def _next(self) -> Any:
        seed_sample(*self._key, self._position)
        iterator, self._iterator = self._iterator, None  # after an error it has to begin anew
        assert iterator is not None
        item = next(iterator, _ENDED)
        self._iterator = iterator
        if item is not _ENDED:
            self._position += 1
        return item

    def _check_end(self) -> None:
        """Read the tail that fills no batch; raise DamagedData if the epoch has another length."""
        while self._next() is not _ENDED:
            if self._position > self.samples:
                raise self._wrong(f"the stream has more than {self.samples} items")
        if self._position < self.samples:
            raise self._wrong(f"the stream ended after {self._position} items")

    def _wrong(self, what: str) -> DamagedData:
        epoch = self._epoch_of(*self._key)
        must = f"each epoch must have {self.samples} items (its length, or the one stated)"
        return DamagedData(f"{self.where}: {what} in epoch {epoch}; {must}")

    def _epoch_of(self, *key: int) -> int:
        return key[2] if len(key) > 2 else 0


HASHED_ITEMS = 64  # of each split


class Served(TypedDict):
    """The fields of `Serving` as the arguments of a user's source."""

    batch_size: int
    seed: int
    device: torch.device | str
    workers: NotRequired[int]


class DatasetSource(LoadedSource):
    """A source for two data sets of ``(image, label)``, map-style (``__len__``, ``__getitem__``) or
    streams.

    An image is a tensor ``[channels, height, width]``, uint8 or floating point. All images have the
    same shape. A label is an integer from 0 to below ``num_classes``. Batches are ``(images float32
    [batch, channels, height, width], labels int64 [batch])`` on ``device``. Images in uint8 are
    copied to the device as bytes and become ``(image - offset) / divisor``. With the default
    ``offset`` and ``divisor`` the results lie between 0 and 1. Floating-point images stay
    unchanged.

    The training items have a new order for each (seed, epoch); items at the end that do not fill a
    batch are left out. The held-out items keep their order. During each call of ``__getitem__`` the
    global random generators of Python, NumPy and torch (CPU) are seeded for this item. The seed of
    a training item depends on (seed, epoch, index), that of a held-out item on its index. After
    each call of ``__getitem__`` the global generators get back their former state. Random
    augmentation that uses the global generators repeats exactly for any number of workers, also in
    a resumed run. Augmentation with other generators is refused.

    A stream, such as a `torch.utils.data.IterableDataset`, is iterated from its start in each
    epoch, after ``set_epoch(epoch)`` if it has this method. A stream determines the order of its
    items; the index of an item is its position. ``train_samples`` and ``eval_samples`` state the
    number of items in each epoch of the training stream and of the held-out stream. If you omit
    one, ``__len__`` of its stream must return this number. Each process and each rank reads the
    whole stream, so the stream must not divide its items among ranks.

    ``workers`` processes read training items in advance, and the same number of processes read
    held-out items. With ``workers=0`` the calling thread reads all items. Worker processes need
    data sets that can be pickled, and ``close()`` ends the processes. If you pass no ``sha256``,
    the source hashes the lengths of both splits and up to 64 evenly spaced items of each split. If
    you pass a ``sha256``, it is recorded without a check. The keyword arguments in ``served`` are
    the fields of `Serving`.

    Raises:
        ValueError: An argument is out of range.
        DamagedData: An item cannot be used or raises an exception; the message names it.
        Resource: A worker process has ended unexpectedly.
    """

    def __init__(
        self,
        train,
        held_out,
        *,
        num_classes: int,
        offset: float | Sequence[float] = 0.0,
        divisor: float | Sequence[float] = 255.0,
        sha256: str | None = None,
        train_samples: int | None = None,
        eval_samples: int | None = None,
        **served: Unpack[Served],
    ) -> None:
        at_least(1, num_classes=num_classes)
        given: dict[str, Any] = {"workers": 0, **served}
        serving = Serving(**given)
        sizes, device = (num_classes, serving.batch_size), serving.device
        reader = _reader("train", train, "train_samples", train_samples)(*sizes, serving.seed)
        eval_reader = _reader("held_out", held_out, "eval_samples", eval_samples)(*sizes, None)
        image = reader.sample()
        reader.like = eval_reader.like = image.shape, image.dtype
        channels, height, width = image.shape
        self._offset = _per_channel("offset", offset, channels, device)
        self._divisor = _per_channel("divisor", divisor, channels, device)
        super().__init__(reader, eval_reader, serving)
        self.workers = None  # for the advice on data.workers, which does not set it
        self.num_classes = num_classes
        covers = "as stated by the factory"
        if not sha256:
            counts = {split: min(HASHED_ITEMS, split.samples) for split in (reader, eval_reader)}
            hashes = " ".join(split.sha256_of(count) for split, count in counts.items())
            sha256 = hashlib.sha256(hashes.encode()).hexdigest()
            said = [f"{count} of {split.samples} {split.where}" for split, count in counts.items()]
            covers = f"{' and '.join(said)} items"
        self.sha256 = sha256
        self.description = {
            "name": type(train).__name__,
            "train_samples": reader.samples,
            "eval_samples": eval_reader.samples,
            "num_classes": num_classes,
            "channels": channels,
            "image_height": height,
            "image_width": width,
            "sha256_covers": covers,
        }
        if height == width:
            self.description["image_size"] = height

    def _float(self, images: Tensor) -> Tensor:
        if images.dtype is torch.uint8:
            return images.float().sub_(self._offset).div_(self._divisor)
        # On a CPU they belong to the loader, which may hand them out again.
        return images.clone() if images.device.type == "cpu" else images


def _reader(
    where: str, dataset: Any, key: str, samples: int | None
) -> Callable[..., DatasetReader]:
    """Return what makes the reader of a data set; `key` names its stated number of items."""
    has_length = hasattr(dataset, "__len__")
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    again = isinstance(dataset, IterableDataset) or not isinstance(dataset, Iterator)
    if not (has_length if indexed else isinstance(dataset, Iterable) and again):
        must = "a data set with __len__ and __getitem__, or one that can be iterated over again"
        raise ValueError(f"{where}={type(dataset).__name__} is not allowed: {must}")
    if indexed and samples is not None:
        raise ValueError(f"{key}={samples} is not allowed: the length of {where} is known")
    if samples is None and not has_length:
        stream = f"{where} is a stream without __len__, whose items of an epoch are to be stated"
        raise ValueError(f"{key}=None is not allowed: {stream}")
    length = len(dataset) if samples is None else samples
    return partial(StreamReader if not indexed else DatasetReader, where, dataset, length)


def _per_channel(name: str, values, channels: int, device: torch.device) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, 1, 1)
    if len(tensor) not in (1, channels):
        allowed = f"one number or {channels}, one for each channel"
        raise ValueError(f"{name}={values} is not allowed: {allowed}")
    return tensor

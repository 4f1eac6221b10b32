"""From a batch number to a batch of decoded images, in any process."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mprun.data.augmentation import Augmentation, draws
from mprun.data.errors import DamagedData
from mprun.data.image_decode import decode_rgb
from mprun.data.image_files import ImageSplit
from mprun.data.order import EpochOrder, checked_index

CPU = torch.device("cpu")
# A thousandth of a split may be replaced; three files of a small one.
_SHARE_REPLACED, _FEW_REPLACED = 1000, 3


class ReadBatch(NamedTuple):
    """``images`` uint8 ``[batch, image_size, image_size, channels]``, ``labels`` int64 ``[batch]``.

    ``replaced``: numbers in the split of the files that could not be used, in whose place others
    are here; ``replaced_names``: what messages call them.
    """

    images: Tensor
    labels: Tensor
    replaced: tuple[int, ...]
    replaced_names: tuple[str, ...]


class ImageReader:
    """Batches of one split by number, a pure function of the split, ``seed`` and the number.

    With a ``seed``: training batches, in the order of ``EpochOrder``, number counting over all
    epochs, with the random part of the augmentation; of the sample at place p of an epoch it
    depends on (seed, epoch, p) alone. Without: the split in its own order, ``len(reader)`` batches,
    the last one may be smaller.

    ``on_corrupt="skip"``: in place of a file that cannot be used comes the next one of the split
    that can (after the last the first), with its own label and the crop of the one it stands for.
    ``most_replaced`` is how many different files may be replaced: a thousandth of the split, three
    in a small one. With "stop" a file that cannot be used raises ``DamagedData``.

    An instance can be pickled and holds no open file. Costs per image: decoding, one crop, one
    resize and one copy of the bytes; nothing is computed in floating point.
    """

    def __init__(
        self,
        split: ImageSplit,
        augmentation: Augmentation,
        batch_size: int,
        *,
        seed: int | None,
        on_corrupt: str = "stop",
    ) -> None:
        if on_corrupt not in ("stop", "skip"):
            raise ValueError(f"on_corrupt={on_corrupt!r} is not allowed: 'stop' or 'skip'")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not allowed: 1 or more")
        self.split, self.augmentation, self.batch_size = split, augmentation, batch_size
        self.seed, self.skips = seed, on_corrupt == "skip"
        self.most_replaced = max(_FEW_REPLACED, len(split) // _SHARE_REPLACED)
        self._order = None if seed is None else EpochOrder(seed, len(split), batch_size, CPU)

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self._order is not None:
            return self._order.batches_per_epoch
        return -(-len(self.split) // self.batch_size)

    def read(self, number: int, *, shared: bool = False) -> ReadBatch:
        """Batch ``number``; ``shared``: in shared memory, from where it can be sent for free.

        Raises ``ValueError`` for a number out of range, ``DamagedData`` naming a file.
        """
        chosen, chances = self._samples(checked_index(number))
        size, channels = self.augmentation.image_size, self.augmentation.channels
        images = torch.empty((len(chosen), size, size, channels), dtype=torch.uint8)
        if shared:
            images.share_memory_()
        rows = images.numpy().reshape(len(chosen), -1)
        used, replaced = [], []
        for row, sample, chance in zip(rows, chosen, chances, strict=True):
            place, image = self._readable(sample, replaced)
            if chance is None:
                image = self.augmentation.evaluation(image)
            else:
                image = self.augmentation.train(image, chance)
            row[:] = np.frombuffer(image.tobytes(), np.uint8)
            used.append(place)
        labels = torch.from_numpy(self.split.labels[used])
        names = tuple(self.split.name(place) for place in replaced)
        return ReadBatch(images, labels, tuple(replaced), names)

    def _samples(self, number: int) -> tuple[list[int], Iterator | np.ndarray]:
        """Places in the split, and the random numbers of each sample (None in evaluation)."""
        if self._order is None:
            start = number * self.batch_size
            chosen = list(range(start, min(start + self.batch_size, len(self.split))))
            if not chosen:
                raise ValueError(f"index={number} is not allowed: below {len(self)}")
            return chosen, [None] * len(chosen)
        epoch, batch = divmod(number, len(self))
        chances = draws(self.seed, epoch, batch * self.batch_size, self.batch_size)
        return self._order.indices(number).tolist(), chances

    def _readable(self, sample: int, replaced: list[int]):
        """Place and image of ``sample`` or of the first after it that can be used."""
        place, tried = sample, []
        while True:
            try:
                image = decode_rgb(self.split.read(place), self.split.name(place))
            except DamagedData as error:
                tried.append(place)
                if not self.skips:
                    raise
                if len(tried) > min(self.most_replaced, len(self.split) - 1):
                    raise DamagedData(
                        f"{error}; nor can {len(tried) - 1} before it be used; data.on_corrupt="
                        f"skip replaces no more than {self.most_replaced} files"
                    ) from None
                place = (place + 1) % len(self.split)
            else:
                replaced += tried
                return place, image

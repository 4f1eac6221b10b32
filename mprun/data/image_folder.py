"""Image files of any size, decoded and augmented on the way by loader processes."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mprun.data.augmentation import Augmentation, imagenet_constants, normalise
from mprun.data.image_files import find_images
from mprun.data.image_reader import ImageReader
from mprun.data.image_store import ImageBatch
from mprun.data.loader import BatchLoader, DeviceFeed, default_workers


class ImageFolder:
    """The images below ``root`` (``find_images`` says in which layouts) as a source of batches.

    A batch is ``(images float32 [batch, channels, image_size, image_size], labels int64 [batch])``
    on ``device``; the last evaluation batch may be smaller. Images travel as bytes, channels last,
    and are normalised on the device (``normalise``). ``mprun.data.augmentation`` says what
    ``augmentation``, ``flip``, ``resize_to`` and ``centre_crop`` do. Order and augmentation depend
    on (seed, epoch, place in the epoch) alone.

    ``workers`` processes read ahead, ``prefetch`` batches each; 0: the calling thread reads when it
    is asked; None: ``default_workers``. Evaluation has as many of its own. They start with the
    first batch and end with ``close()``; neither their number nor ``prefetch`` changes a sample.

    ``on_corrupt="skip"`` puts the next usable image of the split in the place of a file that cannot
    be used (``ImageReader``); ``replaced_files()`` tells which. With "stop" such a file raises
    ``DamagedData``, as do more than a thousandth of a split (three files of a small one).

    Raises ``ValueError`` for an argument, ``DamagedData`` naming a file or folder, ``Resource`` for
    a lost or stalled process.
    """

    def __init__(
        self,
        root: str,
        *,
        imagenet: bool = False,
        layout: str = "classes",
        eval_share: float = 0.1,
        image_size: int = 224,
        channels: int = 3,
        augmentation: str = "resized_crop",
        flip: bool = True,
        resize_to: int | None = None,
        centre_crop: int | None = None,
        value_range: str = "standardised",
        on_corrupt: str = "stop",
        workers: int | None = None,
        prefetch: int = 2,
        batch_size: int,
        seed: int,
        device: torch.device | str,
    ) -> None:
        device = torch.device(device)
        geometry = Augmentation(augmentation, image_size, channels, flip, resize_to, centre_crop)
        self._mean, self._std = imagenet_constants(value_range, channels, device)
        self._value_range = value_range
        found = find_images(
            root, layout=layout, eval_share=eval_share, imagenet=imagenet, on_corrupt=on_corrupt
        )
        train = ImageReader(found.train, geometry, batch_size, seed=seed, on_corrupt=on_corrupt)
        held_out = ImageReader(
            found.held_out, geometry, batch_size, seed=None, on_corrupt=on_corrupt
        )
        self.workers = default_workers(device) if workers is None else workers
        pinned = device.type == "cuda"
        self._train = BatchLoader(train, self.workers, prefetch, pin_memory=pinned)
        self._held_out = BatchLoader(
            held_out, self.workers, prefetch, last=len(held_out), pin_memory=pinned
        )
        self._train_feed = DeviceFeed(self._train, device)
        self._eval_feed = DeviceFeed(self._held_out, device)
        self.num_classes = max(1, len(found.classes))
        self.batches_per_epoch, self.samples_per_batch = len(train), batch_size
        self.sha256 = found.sha256
        self.description: dict[str, str | int | float] = {
            "name": "imagenet" if imagenet else "image_folder",
            "train_samples": len(found.train),
            "eval_samples": len(found.held_out),
            "num_classes": self.num_classes,
            "image_size": image_size,
            "channels": channels,
            "value_range": value_range,
            "augmentation": augmentation,
            "split_rule": found.split_rule,
            "sha256_of": found.sha256_of,
            "ignored_files": found.ignored,
        }

    def train_batch(self, index: int) -> ImageBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        images, labels = self._train_feed.batch(index)
        return self._float(images), labels

    def eval_batches(self) -> Iterator[ImageBatch]:
        """The held-out split in the order of its names; the last batch may be smaller."""
        for number in range(self._held_out.last):
            images, labels = self._eval_feed.batch(number)
            yield self._float(images), labels
        self._eval_feed.defer_wait()  # only training's is asked for

    def defer_wait(self) -> Callable[[], float]:
        """What tells how long the device waited for training batches, see ``DeviceFeed``."""
        return self._train_feed.defer_wait()

    def replaced_files(self) -> dict[str, str]:
        """Files that ``on_corrupt="skip"`` replaced so far, each once: place -> name.

        A place ("train/17": split and number in it) is the same wherever the data lie.
        ``ImageReader.most_replaced`` bounds how many there are.
        """
        splits = {"train": self._train, "held_out": self._held_out}
        return {
            f"{split}/{number}": name
            for split, loader in splits.items()
            for number, name in loader.replaced.items()
        }

    def close(self) -> None:
        """End the loader processes; the source can be asked again."""
        self._train_feed.close()
        self._eval_feed.close()

    def _float(self, images: Tensor) -> Tensor:
        return normalise(images, self._value_range, self._mean, self._std)

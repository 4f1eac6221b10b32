"""scikit-learn's handwritten digits, enlarged: real images without a download."""

from collections.abc import Iterator

import torch

from mprun.data.errors import DataError
from mprun.data.image_store import ImageBatch, ImageStore
from mprun.data.order import permutation

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

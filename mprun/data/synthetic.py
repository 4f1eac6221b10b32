"""Random twins of the real sources: same interface and shapes, nothing to learn.

The content comes from a fixed CPU generator, whatever the run's seed and device; the seed sets the
order alone.
"""

import hashlib
from collections.abc import Iterator

import torch

from mprun.data.image_store import ImageBatch, ImageStore
from mprun.data.token_streams import TokenBatch, TokenStreams

CONTENT_SEED = 20171010


class SyntheticImages:
    """Uniform random bytes as images with uniform random labels.

    Values and batches as for ``DigitsImages``, ``(images float32 [batch, channels, image_size,
    image_size], labels int64 [batch])``, but stored at full size: ``channels * image_size**2``
    bytes a sample on the device. Raises ``ValueError`` for an argument out of range.
    """

    def __init__(
        self,
        num_classes: int,
        image_size: int,
        batch_size: int,
        seed: int,
        device: torch.device | str,
        channels: int = 3,
        train_size: int = 256,
        eval_size: int = 64,
        value_range: str = "standardised",
    ) -> None:
        _at_least(
            1,
            num_classes=num_classes,
            channels=channels,
            train_size=train_size,
            eval_size=eval_size,
        )
        _at_least(8, image_size=image_size)
        generator = torch.Generator().manual_seed(CONTENT_SEED)

        def split(n: int) -> ImageBatch:
            shape = (n, channels, image_size, image_size)
            images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            return images, torch.randint(num_classes, (n,), generator=generator)

        self.num_classes = num_classes
        self._store = ImageStore(
            split(train_size),
            split(eval_size),
            255,
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
            "name": "synthetic_images",
            "train_samples": train_size,
            "eval_samples": eval_size,
            "num_classes": num_classes,
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
        """The held-out images in a fixed order; the last batch may be smaller."""
        return self._store.eval_batches()


class SyntheticTokens:
    """Uniform random tokens: the best possible loss is ``log(vocab_size)``.

    Batches ``(tokens, targets)``, int64 ``[time, batch]``, as for ``DocsText``. Raises
    ``ValueError`` for an argument out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        batch_size: int,
        sequence_length: int,
        seed: int,
        device: torch.device | str,
        train_tokens: int = 100_000,
        eval_tokens: int = 10_000,
    ) -> None:
        _at_least(1, vocab_size=vocab_size, train_tokens=train_tokens, eval_tokens=eval_tokens)
        generator = torch.Generator().manual_seed(CONTENT_SEED)
        tokens = torch.randint(vocab_size, (train_tokens + eval_tokens,), generator=generator)
        self.vocab_size = vocab_size
        self._streams = TokenStreams(
            tokens[:train_tokens], tokens[train_tokens:], batch_size, sequence_length, seed, device
        )
        self.batches_per_epoch = self._streams.batches_per_epoch
        self.samples_per_batch = batch_size * sequence_length
        self.sha256 = hashlib.sha256(tokens.numpy()).hexdigest()
        self.description: dict[str, str | int | float] = {
            "name": "synthetic_tokens",
            "train_samples": train_tokens,
            "eval_samples": eval_tokens,
            "sequence_length": sequence_length,
            "vocab_size": vocab_size,
        }

    def train_batch(self, index: int) -> TokenBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        return self._streams.train_batch(index)

    def eval_batches(self) -> Iterator[TokenBatch]:
        """The held-out tokens in order; the last batch may be shorter in time."""
        return self._streams.eval_batches()


def _at_least(minimum: int, **values: int) -> None:
    for name, value in values.items():
        if value < minimum:
            raise ValueError(f"{name}={value} is not allowed: {minimum} or more")

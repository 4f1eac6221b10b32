"""Encoded images to pixels: those of torchvision's ``pil_loader``, with these policies.

====================================  ==========================================================
file                                  what comes out
====================================  ==========================================================
JPEG, PNG, BMP, WebP, PPM, PGM,       RGB, as ``PIL.Image.convert("RGB")`` gives it; recognised by
TIFF, GIF                             content, whatever the extension; other formats are refused
gray, 1 bit                           repeated on three channels; 1 bit becomes 0 and 255
palette, with or without              the palette's colours; transparency is dropped
transparency
RGBA, LA                              alpha is dropped, the colours beneath it stay
CMYK and YCCK JPEG                    Pillow's conversion, inverted Adobe files included
16-bit gray (PNG, PGM, TIFF)          v / 257 rounded; ``convert`` alone would clip at 255
16-bit colour                         the high byte of each value (Pillow's reader)
32-bit gray                           as 16-bit if all values fit, otherwise refused
floating-point pixels                 refused
EXIF orientation, colour profile      ignored, as torchvision does
several frames                        the first
truncated, empty, no image            refused
more than 89,478,485 pixels           refused: Pillow's limit against decompression bombs
warnings of Pillow                    silent (damaged EXIF data, palette transparency)
====================================  ==========================================================

What no error shows, here as in torchvision: flipped bytes that still decode (JPEG has no checksum,
and Pillow does not read the one of PNG's pixels), and a file cut off behind its last pixel.

From a batch number to a batch of decoded images, in any process.
"""

import io
import logging
import re
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFile
from torch import Tensor

from mprun.data.augmentation import Augmentation, draws
from mprun.data.image_files import ImageSplit
from mprun.data.source import DamagedData, EpochOrder, checked_index
from mprun.errors import BadInput

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")
# A quarter of a GiB of RGB bytes would be 89,478,485.3 pixels.
MAX_PIXELS = 2**28 // 3
_TOO_MANY_PIXELS = f"more than {MAX_PIXELS:,} pixels"
_SILENT = ("ignore", None, Warning, re.compile(r"PIL\."), 0)  # an entry of warnings.filters
_WIDE_GRAY = ("I;16", "I;16B", "I;16L", "I;16N", "I")
# Pillow tells of every chunk of every file where a program around this one logs at debug level.
logging.getLogger("PIL").setLevel(logging.INFO)


def decode_rgb(content: bytes, name: str) -> Image.Image:
    """The image in ``content`` as a loaded PIL image of mode RGB.

    Raises ``DamagedData`` naming ``name`` for what cannot be decoded in full, ``BadInput`` where
    something has told Pillow to accept truncated files.
    """
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise BadInput(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES=True: the missing part of a truncated image "
            "would be trained on as gray (allowed: False)"
        )
    if not content:
        raise DamagedData(f"{name}: an empty file (0 bytes)")
    _silence_pillow()
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        _check_size(image, name)
        image.load()
        return _rgb(image, name)
    except Image.UnidentifiedImageError:
        raise DamagedData(f"{name}: not an image of a known format") from None
    except Image.DecompressionBombError:
        raise DamagedData(f"{name}: {_TOO_MANY_PIXELS}") from None
    except (DamagedData, MemoryError):
        raise
    except Exception as error:
        # Damaged files make Pillow raise OSError, SyntaxError, ValueError, struct.error, ...
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DamagedData(f"{name}: cannot be decoded: {reason}") from error


def _check_size(image: Image.Image, name: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DamagedData(f"{name}: {_TOO_MANY_PIXELS} ({width} x {height})")


def _rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode == "F":
        raise DamagedData(f"{name}: floating-point pixels, whose range is not known")
    if image.mode in _WIDE_GRAY:
        return _from_wide_gray(image, name)
    # A copy of what is RGB already would cost 0.1 ms for a photograph of 500 x 400.
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_wide_gray(image: Image.Image, name: str) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise DamagedData(f"{name}: gray values outside 0 ... 65535")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")


def _silence_pillow() -> None:
    """No warnings from Pillow's modules in this process, from now on.

    Not ``warnings.catch_warnings``, which is not safe in threads.
    """
    if _SILENT not in warnings.filters:
        warnings.filterwarnings("ignore", module=_SILENT[3].pattern)


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

"""Image files of any size, which loader processes decode and augment during training.

Encoded images become the pixels of torchvision's ``pil_loader``, with these policies.

====================================  ==========================================================
file                                  result
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

Some damage gives no error, here as in torchvision: flipped bytes that still decode (JPEG has no
checksum, and Pillow does not check the one of PNG's pixels), and a file cut off after its last
pixel.
"""

import io
import itertools
import logging
import math
import re
import warnings
from collections.abc import Iterable

import numpy as np
import torch
from PIL import Image, ImageFile
from torch import Tensor

from mprun.data.augmentation import Augmentation, draws, imagenet_constants, normalise
from mprun.data.image_files import ImageSplit, find_imagenet, find_images
from mprun.data.loader import LoadedSource
from mprun.data.source import DamagedData, ReadBatch, Reader, Serving
from mprun.errors import BadInput

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")
# 256 MiB of RGB bytes would be 89,478,485.3 pixels.
MAX_PIXELS = 2**28 // 3
_TOO_MANY_PIXELS = f"more than {MAX_PIXELS:,} pixels"
_SILENT = ("ignore", None, Warning, re.compile(r"PIL\."), 0)  # an entry of warnings.filters
_WIDE_GRAY = ("I;16", "I;16B", "I;16L", "I;16N", "I")
# If the surrounding program logs at debug level, Pillow reports every chunk of every file.
logging.getLogger("PIL").setLevel(logging.INFO)


def decode_rgb(content: bytes, name: str) -> Image.Image:
    """Decode ``content`` to a loaded PIL image of mode RGB.

    ``DamagedData``, which begins with ``name``, if it cannot be decoded in full; ``BadInput`` if
    Pillow is set to accept truncated files.
    """
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise BadInput(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES=True: the missing part of a truncated image "
            "would be trained on as gray (allowed: False)"
        )
    # Silent from now on in this process: `warnings.catch_warnings` would not be thread-safe.
    if _SILENT not in warnings.filters:
        warnings.filterwarnings("ignore", module=_SILENT[3].pattern)
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        if math.prod(image.size) > MAX_PIXELS:
            raise DamagedData(f"{name}: {_TOO_MANY_PIXELS} ({image.width} x {image.height})")
        image.load()
        return _rgb(image, name)
    except Image.UnidentifiedImageError:
        raise DamagedData(f"{name}: is not an image of a known format") from None
    except Image.DecompressionBombError:
        raise DamagedData(f"{name}: {_TOO_MANY_PIXELS}") from None
    except (DamagedData, MemoryError):
        raise
    except Exception as error:
        # Damaged files make Pillow raise OSError, SyntaxError, ValueError, struct.error, ...
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DamagedData(f"{name}: cannot be decoded: {reason}") from error


def _rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode == "F":
        raise DamagedData(f"{name}: has floating-point pixels of unknown range; must have integers")
    if image.mode in _WIDE_GRAY:
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise DamagedData(f"{name}: gray values must be from 0 to 65535")
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    # Copying an RGB image would cost 0.1 ms for a photograph of 500 x 400.
    return image if image.mode == "RGB" else image.convert("RGB")


class ImageReader(Reader):
    """Batches of images, uint8 ``[batch, image_size, image_size, channels]``.

    With a ``seed`` they get random augmentation, which depends on (seed, epoch, place in the epoch)
    alone. ``on_corrupt="skip"``: the next usable file of the split (after the last the first)
    replaces an unusable one, with its own label and the replaced file's crop. At most
    ``most_replaced`` different files may be replaced: a thousandth of the split, three in a small
    one. With "stop" an unusable file raises ``DamagedData``.

    An instance can be pickled and holds no open file. Nothing is computed in floating point.
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
        super().__init__(len(split), split.source, batch_size, seed)
        self.split, self.augmentation, self.seed = split, augmentation, seed
        self.skips = on_corrupt == "skip"
        self.most_replaced = max(3, len(split) // 1000)

    def read(self, number: int) -> ReadBatch:
        chosen = self.places(number)
        chances: Iterable[np.ndarray | None] = itertools.repeat(None, len(chosen))
        if self.seed is not None:
            epoch, batch = divmod(number, len(self))
            chances = draws(self.seed, epoch, batch * self.batch_size, self.batch_size)
        size, channels = self.augmentation.image_size, self.augmentation.channels
        images = torch.empty((len(chosen), size, size, channels), dtype=torch.uint8)
        rows, augment = images.numpy().reshape(len(chosen), -1), self.augmentation
        used: list[int] = []
        replaced: dict[int, str] = {}
        for row, sample, chance in zip(rows, chosen, chances, strict=True):
            place, image = self._readable(sample, replaced)
            image = augment.evaluation(image) if chance is None else augment.train(image, chance)
            row[:] = np.frombuffer(image.tobytes(), np.uint8)
            used.append(place)
        return ReadBatch(images, torch.from_numpy(self.split.labels[used]), replaced)

    def _readable(self, sample: int, replaced: dict[int, str]) -> tuple[int, Image.Image]:
        """Return place and image of ``sample``, or of the first usable file after it."""
        tried: dict[int, str] = {}
        for place in itertools.chain(range(sample, len(self.split)), range(sample)):
            name = self.split.name(place)
            try:
                image = decode_rgb(self.split.read(place), name)
                replaced |= tried
                return place, image
            except DamagedData as error:
                tried[place] = name
                if not self.skips:
                    raise
                if len(tried) > min(self.most_replaced, len(self.split) - 1):
                    raise DamagedData(
                        f"{error}; the {len(tried) - 1} files tried before cannot be used either; "
                        f"data.on_corrupt=skip replaces at most {self.most_replaced} files"
                    ) from None
        raise AssertionError("the search for a readable image ended without image or DamagedData")


class ImageFolder(LoadedSource):
    """The images below ``root`` (layouts: ``find_images``) as a source of batches.

    A batch is ``(images float32 [batch, channels, image_size, image_size], labels int64 [batch])``
    on ``device``; the last evaluation batch may be smaller. Images travel as bytes, channels last,
    and are normalised on the device (``normalise``). ``ImageReader`` documents ``on_corrupt``.
    """

    def __init__(
        self,
        root: str,
        *,
        imagenet: bool = False,
        layout: str,
        eval_share: float,
        on_corrupt: str,
        geometry: Augmentation,
        value_range: str,
        serving: Serving,
    ) -> None:
        size, channels = geometry.image_size, geometry.channels
        self._offset, self._divisor = imagenet_constants(value_range, channels, serving.device)
        find = find_imagenet if imagenet else find_images
        found = find(root, layout=layout, eval_share=eval_share, on_corrupt=on_corrupt)
        train, held_out = (
            ImageReader(split, geometry, serving.batch_size, seed=own, on_corrupt=on_corrupt)
            for split, own in ((found.train, serving.seed), (found.held_out, None))
        )
        super().__init__(train, held_out, serving)
        self.num_classes = max(1, len(found.train.classes))
        self.sha256 = found.sha256
        self.description = {
            "name": "imagenet" if imagenet else "image_folder",
            "train_samples": len(found.train),
            "eval_samples": len(found.held_out),
            "num_classes": self.num_classes,
            "image_size": size,
            "channels": channels,
            "value_range": value_range,
            "augmentation": geometry.augmentation,
            "split_rule": found.split_rule,
            "sha256_of": found.sha256_of,
            "ignored_files": found.ignored,
        }

    def replaced_files(self) -> dict[str, str]:
        """Return the files that ``on_corrupt="skip"`` replaced so far, each once: place -> name.

        A place ("train/17": split and number in it) is the same wherever the data lie.
        """
        feeds = [("train", self._train)]
        feeds += [("held_out", feed) for feed in self._eval_feeds.values()]
        return {
            f"{split}/{number}": name
            for split, feed in feeds
            for number, name in feed.loader.replaced.items()
        }

    def _float(self, images: Tensor) -> Tensor:
        return normalise(images, self._offset, self._divisor)

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
"""

import io
import logging
import re
import warnings

import numpy as np
from PIL import Image, ImageFile

from mprun.data.errors import DamagedData
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

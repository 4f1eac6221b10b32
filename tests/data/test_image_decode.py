"""Pixels equal torchvision's for every ordinary file; everything else is converted or refused."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile
from torchvision.datasets.folder import pil_loader

from mprun.data.image_folder import MAX_PIXELS, decode_rgb
from mprun.data.source import DamagedData
from mprun.errors import BadInput

from ..helpers import raises_line
from .made_images import encoded, image, pixels, saved, write


def decoded(content):
    result = decode_rgb(content, "x.jpg")
    assert result.mode == "RGB"
    return np.asarray(result)


def refused(content, message):
    with raises_line(DamagedData, f"dir/x.jpg: {message}"):
        decode_rgb(content, "dir/x.jpg")


ORDINARY = {
    "jpeg": encoded(1),
    "jpeg, progressive": encoded(2, progressive=True),
    "jpeg, 4:4:4": encoded(3, subsampling=0, size=(37, 23)),
    "jpeg, gray": encoded(4, mode="L"),
    "jpeg, cmyk": encoded(5, mode="CMYK"),
    "png": encoded(6, "PNG"),
    "png, gray": encoded(7, "PNG", "L"),
    "png, gray and alpha": encoded(8, "PNG", "LA"),
    "png, alpha": encoded(9, "PNG", "RGBA"),
    "png, palette": encoded(10, "PNG", "P"),
    "png, one bit": encoded(11, "PNG", "1"),
    "png, one colour transparent": encoded(12, "PNG", transparency=(1, 2, 3)),
    "png, palette index transparent": encoded(13, "PNG", "P", transparency=3),
    "bmp": encoded(14, "BMP"),
    "webp": encoded(15, "WEBP"),
    "webp, lossless": encoded(16, "WEBP", lossless=True),
    "webp, alpha": encoded(17, "WEBP", "RGBA", lossless=True),
    "ppm": encoded(18, "PPM"),
    "pgm": encoded(19, "PPM", "L"),
    "tiff": encoded(20, "TIFF"),
    "gif": encoded(21, "GIF"),
    "jpeg, two pictures": saved(image(22), "MPO", save_all=True, append_images=[image(23)]),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_pixels_are_those_of_torchvision(tmp_path, kind):
    # Under a name that says nothing or the wrong thing: the content decides.
    expected = pil_loader(write(tmp_path / "x.jpg", ORDINARY[kind]))
    assert (decoded(ORDINARY[kind]) == np.asarray(expected)).all()


def test_inverted_cmyk_is_inverted_once():
    black = saved(Image.new("CMYK", (8, 8), (0, 0, 0, 255)), "JPEG")
    white = saved(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG")
    assert b"Adobe" in black  # the segment that says "inverted"
    assert decoded(black).max() == 0 and decoded(white).min() == 255


def test_palette_with_transparency_bytes_keeps_the_colours(tmp_path):
    content = encoded(10, "PNG", "P", transparency=bytes(range(256)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loader's warning, which decode_rgb does not give
        expected = np.asarray(pil_loader(write(tmp_path / "x.png", content)))
    assert (decoded(content) == expected).all()
    assert (expected == decoded(encoded(10, "PNG", "P"))).all()


def test_alpha_is_dropped_not_blended():
    picture = np.dstack([pixels(1), np.zeros((10, 12), np.uint8)])
    assert (decoded(saved(Image.fromarray(picture), "PNG")) == pixels(1)).all()


def test_exif_orientation_is_ignored(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    content = encoded(1, exif=exif)
    assert b"Exif" in content
    assert (decoded(content) == decoded(encoded(1))).all()
    assert (np.asarray(pil_loader(write(tmp_path / "x.jpg", content))) == decoded(content)).all()


WIDE = np.array([[0, 1, 128, 129], [257, 385, 386, 400], [32767, 32768, 65407, 65535]])
# round(v / 257): half of 257 is 128.5, so that no value lies between two results.
NARROW = np.array([[0, 0, 0, 1], [1, 1, 2, 2], [127, 128, 255, 255]])


def big_endian_tiff(values):
    """Width, height, 16 bits, no compression, black is zero, one strip after the directory."""
    data = values.astype(">u2").tobytes()
    tags = [(256, 4), (257, 3), (258, 16), (259, 1), (262, 1), (273, 122), (277, 1), (278, 3)]
    tags.append((279, len(data)))
    entries = b"".join(struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    head = b"MM\0*" + struct.pack(">IH", 8, len(tags)) + entries + bytes(4)
    assert len(head) == 122
    return head + data


WIDE_GRAY = {
    "png": saved(Image.fromarray(WIDE.astype(np.uint16)), "PNG"),
    "tiff": saved(Image.fromarray(WIDE.astype(np.uint16)), "TIFF"),
    "tiff, big endian": big_endian_tiff(WIDE),
    "tiff, 32 bit": saved(Image.fromarray(WIDE.astype(np.int32)), "TIFF"),
    "pgm": b"P5 4 3 65535\n" + WIDE.astype(">u2").tobytes(),
}


@pytest.mark.parametrize("kind", WIDE_GRAY)
def test_16_bit_gray_is_scaled_not_clipped(kind):
    assert (decoded(WIDE_GRAY[kind]) == NARROW[..., None]).all()


def test_16_bit_gray_modes_are_all_met():
    modes = {Image.open(io.BytesIO(content)).mode for content in WIDE_GRAY.values()}
    assert {"I;16", "I;16B", "I"} <= modes


def test_numbers_without_a_known_range():
    for value, dtype, says in (
        (1, np.float32, "has floating-point pixels"),
        (-1, np.int32, "gray values must be from 0 to 65535"),
        (65536, np.int32, "gray values must be from 0 to 65535"),
    ):
        refused(saved(Image.fromarray(np.full((4, 4), value, dtype)), "TIFF"), says)


@pytest.mark.parametrize("kind", ORDINARY)
@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.few(12)
def test_truncated_files(kind, share):
    content = ORDINARY[kind]
    with pytest.raises(DamagedData, match="^x.jpg: "):
        decode_rgb(content[: int(share * len(content))], "x.jpg")


def test_a_truncated_photograph_is_named():
    content = encoded(1, size=(500, 400))
    refused(content[: len(content) // 2], "cannot be decoded: image file is truncated")


def test_no_image_at_all():
    # The last is of a format that would start another program.
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    for content in (b"Not an image, but text.\n" * 9, bytes(10_000), postscript):
        refused(content, "is not an image of a known format")
    refused(b"\xff\xd8\xff\xe0", "")


def test_every_damaged_byte_decodes_or_is_refused():
    """Whatever a flipped byte does to Pillow, it comes out as one kind of error."""
    content, refusals = encoded(30, "PNG"), 0
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        try:
            decode_rgb(bytes(damaged), "x.png")
        except DamagedData:
            refusals += 1
    # Header and compression notice most damage; Pillow leaves the pixels' checksum unread.
    assert refusals > len(content) / 2


def png_that_claims(width, height):
    def chunk(name, content):
        checksum = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", b""), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def test_decompression_bombs():
    assert MAX_PIXELS == Image.MAX_IMAGE_PIXELS
    # Pillow warns of the first, and refuses the second.
    for side in (10_000, 40_000):
        refused(png_that_claims(side, side), "more than 89,478,485 pixels")


def test_warnings_of_pillow_stay_silent():
    exif = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x1a\x01\x05\0\x01\0\0\0\xff\xff\xff\xff"
    content = encoded(1, exif=exif)
    with pytest.warns(UserWarning), warnings.catch_warnings():
        warnings.simplefilter("default")
        Image.open(io.BytesIO(content)).load()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert (decoded(content) == decoded(encoded(1))).all()
        decode_rgb(encoded(10, "PNG", "P", transparency=bytes(256)), "x")
        assert given == []
        warnings.warn("of others", stacklevel=1)
        assert len(given) == 1


def test_truncated_files_may_not_be_accepted_behind_our_back(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(BadInput, match="LOAD_TRUNCATED_IMAGES=True: .*allowed: False"):
        decode_rgb(encoded(1), "x.jpg")


def test_a_decoded_image_can_be_cropped_and_resized_after_the_bytes_are_gone():
    picture = decode_rgb(encoded(1, size=(40, 30)), "x")
    expected = np.asarray(picture)[5:20, 3:30]
    assert (np.asarray(picture.crop((3, 5, 30, 20))) == expected).all()
    assert picture.resize((8, 8)).size == (8, 8)

"""Small folders of real image files for tests: noise and gradients, as JPEG and PNG."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int, width: int, height: int) -> Image.Image:
    """An RGB image that no other number has: a gradient with noise on it."""
    noise = np.random.default_rng(number).integers(0, 60, (height, width, 3))
    slope = np.linspace(0, 180, width)[None, :, None] + np.zeros((height, 1, 3))
    return Image.fromarray((noise + slope).astype(np.uint8))


def jpeg(number: int, width: int = 40, height: int = 32) -> bytes:
    """The picture as a JPEG file."""
    content = io.BytesIO()
    picture(number, width, height).save(content, "JPEG", quality=90)
    return content.getvalue()


def make_folder(root: Path, train: int = 24, held_out: int = 10, classes: int = 2) -> Path:
    """root/train and root/val with ``classes`` folders and the given numbers of files in all."""
    for split, count, first in (("train", train, 0), ("val", held_out, 1000)):
        for number in range(count):
            folder = root / split / f"class{number % classes}"
            folder.mkdir(parents=True, exist_ok=True)
            sides = (40, 32) if number % 3 else (30, 48)
            (folder / f"{number:04}.jpg").write_bytes(jpeg(first + number, *sides))
    return root

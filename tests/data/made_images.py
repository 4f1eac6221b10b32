"""Small image folders, the same whenever they are made."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()


def pixels(seed: int, width: int = 12, height: int = 10, channels: int = 3) -> np.ndarray:
    """A smooth random picture, uint8 [height, width, channels]: JPEG keeps most of it."""
    random = np.random.Generator(np.random.PCG64(seed))
    coarse = random.integers(0, 256, (3, 3, channels), dtype=np.uint8)
    planes = [
        np.asarray(Image.fromarray(coarse[..., c]).resize((width, height), Image.BILINEAR))
        for c in range(channels)
    ]
    return np.stack(planes, axis=-1)


def image(seed: int, mode: str = "RGB", size: tuple[int, int] = (12, 10)) -> Image.Image:
    return Image.fromarray(pixels(seed, *size)).convert(mode)


def saved(picture: Image.Image, format: str = "JPEG", **options) -> bytes:
    """An image as the bytes of a file."""
    stream = io.BytesIO()
    picture.save(stream, format, **options)
    return stream.getvalue()


def encoded(seed: int, format: str = "JPEG", mode: str = "RGB", size=(12, 10), **options) -> bytes:
    return saved(image(seed, mode, size), format, **options)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def class_folders(top: Path, counts: dict[str, int], first_seed: int = 0, **options) -> Path:
    """`top`/<class>/<n>.jpg, `counts[class]` images in each, all of different content."""
    seed = first_seed
    for name, count in counts.items():
        for n in range(count):
            write(top / name / f"{n:04d}.jpg", encoded(seed, **options))
            seed += 1
    return top


def split_folders(root: Path, counts: dict[str, int], held_out: str = "val") -> Path:
    """`root`/train and `root`/<held_out> with the same class folders."""
    class_folders(root / "train", counts)
    class_folders(root / held_out, counts, first_seed=1000)
    return root


def cifar10_folders(root: Path) -> Path:
    """60 training and 20 held-out images of 32x32 px in class folders, as JPEG."""
    class_folders(root / "train", dict.fromkeys(CIFAR10_CLASSES, 6), size=(32, 32))
    class_folders(root / "test", dict.fromkeys(CIFAR10_CLASSES, 2), 500, size=(32, 32))
    return root


def picture(number: int, width: int, height: int) -> Image.Image:
    """An RGB image that no other number has: a gradient with noise on it."""
    noise = np.random.default_rng(number).integers(0, 60, (height, width, 3))
    slope = np.linspace(0, 180, width)[None, :, None] + np.zeros((height, 1, 3))
    return Image.fromarray((noise + slope).astype(np.uint8))


def make_folder(root: Path, train: int = 24, held_out: int = 10, classes: int = 2) -> Path:
    """root/train and root/val with ``classes`` folders and the given numbers of files in all."""
    for split, count, first in (("train", train, 0), ("val", held_out, 1000)):
        for number in range(count):
            sides = (40, 32) if number % 3 else (30, 48)
            path = root / split / f"class{number % classes}" / f"{number:04}.jpg"
            write(path, saved(picture(first + number, *sides), quality=90))
    return root

"""CIFAR-10 below a folder, in two layouts, decoded once and held on the device as bytes."""

import hashlib
import math
import os
import pickle
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import PIL
import torch

from mprun.data.augmentation import ImageForm, PaddedCrop, offset_and_divisor
from mprun.data.cache import Cache, Key
from mprun.data.image_files import Images, find_images, printable, read_file
from mprun.data.image_folder import decode_rgb
from mprun.data.image_store import ImageStore
from mprun.data.source import Batch, DamagedData, DataError, Serving, permutation
from mprun.errors import Resource

CLASSES, SIZE = 10, 32
PYTHON_FOLDER = "cifar-10-batches-py"
# The files of torchvision.datasets.CIFAR10; the last one is the held-out split.
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
_ARCHIVES = (".tar.gz", ".tgz", ".tar.xz", ".tar", ".zip")


class Part(NamedTuple):
    """``images`` uint8 ``[n, 3, 32, 32]``, ``labels`` int64 ``[n]`` in 0 ... 9."""

    images: np.ndarray
    labels: np.ndarray


class Cifar10Files(NamedTuple):
    """Both splits, their layout on disk, and the number of ignored files."""

    train: Part
    held_out: Part
    origin: str
    ignored: int


def read_cifar10(root: str) -> Cifar10Files:
    """Read CIFAR-10 below ``root``, in the first layout found there.

    Layouts: cifar-10-batches-py/ as torchvision leaves it, in ``root`` or ``root`` itself, or class
    folders of 32x32 images in train/ and test/ (val, valid, validation). ``DamagedData`` names a
    file or folder that cannot be used.
    """
    if os.path.isdir(inside := os.path.join(root, PYTHON_FOLDER)):
        return read_python_batches(inside)
    if os.path.isfile(os.path.join(root, "data_batch_1")):
        return read_python_batches(root)
    if os.path.isdir(os.path.join(root, "train")):
        return read_class_folders(root)
    raise DataError(f"data.root: {_nothing_found(root)}")


def read_python_batches(folder: str, md5: dict[str, str] = MD5) -> Cifar10Files:
    """Read torchvision's files; one that has another MD5 is not unpickled."""
    parts = []
    for name, expected in md5.items():
        path = os.path.join(folder, name)
        content = read_file(path)
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != expected:
            raise DamagedData(
                f"{printable(path)}: MD5 is {found}, must be {expected} (as in CIFAR-10)"
            )
        batch = pickle.loads(content, encoding="latin1")
        pixels = batch["data"].reshape(-1, 3, SIZE, SIZE)
        parts.append(Part(pixels, np.array(batch["labels"], np.int64)))
    train = Part(*(np.concatenate(column) for column in zip(*parts[:-1], strict=True)))
    return Cifar10Files(train, parts[-1], f"{PYTHON_FOLDER}, MD5 checked", 0)


def read_class_folders(root: str) -> Cifar10Files:
    """Decode images in class folders, 6 to 10 s for 60,000 files, and keep them in the cache."""
    images = find_images(root, layout="classes", eval_share=0.1)
    if (count := len(images.train.classes)) != CLASSES:
        where = printable(images.train.source)
        raise DamagedData(f"{where}: has {count} classes, must have {CLASSES} as in CIFAR-10")
    pixels = _cached_pixels(images)
    train, held_out = np.split(pixels, [len(images.train)])
    parts = Part(train, images.train.labels), Part(held_out, images.held_out.labels)
    return Cifar10Files(*parts, "class folders", images.ignored)


def _cached_pixels(images: Images) -> np.ndarray:
    shape = len(images.train) + len(images.held_out), 3, SIZE, SIZE
    # Decoders of other Pillow versions may round differently.
    of: Key = {"of": "cifar10", "content": images.sha256, "pillow": PIL.__version__}
    key, cache = {**of, "kind": "pixels"}, None
    if images.sha256_of == "content":
        with suppress(DataError):  # this user has no home directory
            cache = Cache(None, "images")
    kept = cache and cache.find(key)
    if kept and kept.stat().st_size == math.prod(shape):
        return np.fromfile(kept, np.uint8).reshape(shape)
    pixels = np.empty(shape, np.uint8)
    # One thread: two were slower, because most of the work is in Python.
    places = [(split, i) for split in (images.train, images.held_out) for i in range(len(split))]
    for row, (split, i) in zip(pixels, places, strict=True):
        image = decode_rgb(split.read(i), split.name(i))
        if image.size != (SIZE, SIZE):
            width, height = image.size
            raise DamagedData(
                f"{split.name(i)}: has {width} x {height} pixels, must have 32 x 32 as in CIFAR-10"
            )
        row[:] = np.asarray(image).transpose(2, 0, 1)
    if cache:
        with suppress(DataError, Resource):
            cache.store(key, [pixels])
    return pixels


def _nothing_found(root: str) -> str:
    wanted = f"needs {PYTHON_FOLDER}/, or train/ and test/ with 10 class folders each"
    for name in sorted(os.listdir(root)):
        if name.startswith("cifar") and name.endswith(_ARCHIVES):
            return f"{printable(os.path.join(root, name))}: an archive; extract it: {wanted}"
        if name in ("cifar-10-batches-bin", "data_batch_1.bin"):
            instead = "torchvision.datasets.CIFAR10(root, download=True) gets the others"
            return f"{printable(root)}: the binary files are not read; {wanted}; {instead}"
    return f"{printable(root)}: no CIFAR-10 here; {wanted}"


# Channel means and deviations of the 50,000 training images, over the range 0 ... 1.
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PADDING = 4
# One fixed shuffle for every seed: all runs must be judged on the same images.
SPLIT_SEED = 20171010


class Cifar10(ImageStore):
    """50,000 training and 10,000 held-out RGB images of 32x32 px in 10 classes, below ``root``.

    Krizhevsky (2009), in any layout of ``read_cifar10``; class folders may hold other numbers of
    images. An image takes 3,072 bytes on ``device``. ``augmentation`` "padded_crop" is `PaddedCrop`
    by 4 pixels, or "none"; ``flip`` mirrors half of the training images. Sizes other than 32 are
    resized bilinearly on the device, after both. ``value_range`` is that of `offset_and_divisor`
    with the published figures.

    ``train_size`` and ``eval_size`` take the first images of a shuffle that is the same for all
    seeds; None takes all. Class folders have another order (by class and name), so they give other
    images and another ``sha256`` than the original files: it is over the pixels and labels that are
    used, in that order. ``ValueError`` if there are fewer, ``DamagedData`` names an unusable file.
    """

    def __init__(
        self,
        root: str,
        *,
        augmentation: str,
        flip: bool,
        train_size: int | None,
        eval_size: int | None,
        form: ImageForm,
        serving: Serving,
    ) -> None:
        figures = (255 * torch.tensor(MEAN), 255 * torch.tensor(DEVIATION))
        normalisation = offset_and_divisor(form.value_range, *figures)
        files = read_cifar10(root)
        train = _first(files.train, train_size, "train_size", 0)
        held_out = _first(files.held_out, eval_size, "eval_size", 1)
        padding = PADDING if augmentation == "padded_crop" else 0
        augment = PaddedCrop(serving.seed, len(train[0]), padding, flip, serving.device)
        super().__init__(
            (train, held_out),
            "cifar10",
            CLASSES,
            form,
            serving,
            normalisation=normalisation,
            augment=augment if padding or flip else None,
        )
        self.description |= {
            "origin": files.origin,
            "augmentation": augmentation,
            "flip": "half" if flip else "none",
            "ignored_files": files.ignored,
        }


def _first(part: Part, size: int | None, name: str, stream: int) -> Batch:
    n = len(part.labels)
    if size is not None and not 1 <= size <= n:
        raise ValueError(
            f"{name}={size} is not allowed: must be 1 to {n}, the size of the split, or None"
        )
    chosen = permutation(SPLIT_SEED, stream, n)[:size].numpy()
    return torch.from_numpy(part.images[chosen]), torch.from_numpy(part.labels[chosen])

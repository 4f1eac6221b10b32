"""PASCAL VOC 2007 and 2012 below a folder: images with boxes, read during training.

The folders are ``VOCdevkit/VOC2007/{Annotations/*.xml, JPEGImages/*.jpg,
ImageSets/Main/{trainval,test}.txt}`` and the same for VOC2012, as the original archives unpack;
`canvases` describes a batch.

All annotations are read at the start (about 5 s for both years), so that a faulty one ends the run
before its first step. An annotation is XML. If it declares a document type, and with it entities
that might expand to anything, it is refused. Coordinates are pixels from 1, right and bottom
inclusive: a box of the whole image becomes 0, 0, 1, 1. A box that leaves its image by up to a pixel
(the annotations of 2012 have fractions) is clipped, any other is refused.
"""

import hashlib
import math
import os
import re
from functools import partial
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor

from mprun.data.augmentation import CAFFE_MEAN, imagenet_constants, normalise
from mprun.data.image_files import (
    MAX_FILE_BYTES,
    ImageSplit,
    image_table,
    printable,
    read_file,
    too_large,
)
from mprun.data.image_folder import decode_rgb
from mprun.data.loader import LoadedSource
from mprun.data.source import (
    DamagedData,
    DataError,
    ReadBatch,
    Reader,
    kept_random_state,
    seed_sample,
)
from mprun.extensions.detection.boxes import CLASS, DIFFICULT
from mprun.extensions.detection.canvases import FIELDS, NOTHING

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
YEARS = {"2007": ("2007",), "2007+2012": ("2007", "2012")}
MAX_ANNOTATION_BYTES = 2**20  # the largest of VOC has 20 KiB
_NAME = re.compile(r"[0-9A-Za-z_]{1,64}")
_STREAM = 2  # separates the draws of augmentation from others of (seed, epoch)


class Objects(NamedTuple):
    """The objects of an image, float32 ``[n, 6]`` as a target, and its width and height, pixels."""

    size: tuple[int, int]
    rows: np.ndarray


class _NoDoctype(ElementTree.TreeBuilder):
    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("declares a document type, which may hold entities that expand")


def read_annotation(path: str) -> Objects:
    """Read the objects of an annotation file; DamagedData names the file and the fault."""
    content = read_file(path, MAX_ANNOTATION_BYTES)
    parser = ElementTree.XMLParser(target=_NoDoctype())
    try:
        parser.feed(content)
        return _objects(parser.close())
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise DamagedData(f"{printable(path)}: not an annotation of VOC: {reason}") from None


def _objects(root: ElementTree.Element) -> Objects:
    width, height = (int(_number(root, f"size/{side}")) for side in ("width", "height"))
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width} x {height} pixels")
    rows = []
    for count, found in enumerate(root.findall("object"), start=1):
        name = _text(found, "name")
        if name not in CLASSES:
            raise ValueError(f"object {count} is a {printable(name)!r}, which VOC does not have")
        sides = [_number(found, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
        box = np.array(sides) - (1, 1, 0, 0)
        most = np.array((width, height, width, height))
        if (box < -1).any() or (box > most + 1).any() or (box[:2] >= box[2:]).any():
            said = " ".join(f"{side:g}" for side in sides)
            raise ValueError(
                f"object {count}, a {name}, has the box {said}, which is none inside of "
                f"{width} x {height} pixels"
            )
        difficult = found.findtext("difficult", "0").strip() == "1"
        rows.append([*(box.clip(0, most) / most), CLASSES.index(name), difficult])
    return Objects((width, height), np.array(rows, np.float32).reshape(-1, FIELDS))


def _text(node: ElementTree.Element, path: str) -> str:
    text = node.findtext(path)
    if text is None:
        raise ValueError(f"no {path} in {node.tag}")
    return text.strip()


def _number(node: ElementTree.Element, path: str) -> float:
    text = _text(node, path)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{path} is {printable(text[:40])!r}, must be a number")
    return value


class VocSplit:
    """Images of some years and their objects; can be pickled and holds no open file.

    `parts` has pairs of a year and its list of images. `difficult`: keep objects that are marked.
    """

    def __init__(self, root: str, parts: list[tuple[str, str]], difficult: bool) -> None:
        names: list[tuple[bytes, int, int, int]] = []
        found: list[Objects] = []
        for year, listed in parts:
            folder = os.path.join(root, f"VOC{year}")
            for name in _listed(f"{folder}/ImageSets/Main/{listed}.txt"):
                found.append(read_annotation(f"{folder}/Annotations/{name}.xml"))
                image = f"VOC{year}/JPEGImages/{name}.jpg"
                names.append((os.fsencode(image), _size(os.path.join(root, image)), 0, 0))
        self.images = ImageSplit(root, image_table(names), ())
        self.sizes = np.array([own.size for own in found], np.int64)
        rows = [own.rows if difficult else own.rows[own.rows[:, DIFFICULT] == 0] for own in found]
        self.most = max(map(len, rows))
        self.targets = np.zeros((len(rows), self.most, FIELDS), np.float32)
        self.targets[:, :, CLASS] = NOTHING
        for place, own in zip(self.targets, rows, strict=True):
            place[: len(own)] = own

    def image(self, place: int) -> Any:
        """Decode the image at a place; its size must be that of its annotation."""
        image = decode_rgb(self.images.read(place), self.images.name(place))
        said = tuple(self.sizes[place].tolist())
        if image.size != said:
            raise DamagedData(
                f"{self.images.name(place)}: {image.size[0]} x {image.size[1]} pixels, its "
                f"annotation has {said[0]} x {said[1]}"
            )
        return image


def _listed(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="backslashreplace") as file:
            names = [line.split(None, 1)[0] for line in file if line.strip()]
    except OSError as error:
        raise DataError(
            f"{printable(path)}: {error.strerror}; data.root needs VOCdevkit/VOC2007 (and VOC2012)"
        ) from error
    for name in names:
        if not _NAME.fullmatch(name):
            raise DamagedData(f"{printable(path)}: {printable(name[:70])!r} is no name of an image")
    if not names:
        raise DamagedData(f"{printable(path)}: lists no image")
    return names


def _size(path: str) -> int:
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise DamagedData(f"{printable(path)}: cannot be read: {error.strerror}") from error
    if size > MAX_FILE_BYTES:
        raise DamagedData(too_large(printable(path)))
    return size


class VocReader(Reader):
    """Batches of images uint8 ``[batch, size, size, 3]`` and targets float32 ``[batch, most, 6]``.

    With a ``seed`` half of them are mirrored. Before that ``augmentation`` "ssd" applies SSD's
    changes (section 3.6 of arXiv 1512.02325, by torchvision's transforms of that name): colours, an
    image of up to four times the side around it, a crop with a least overlap. For the sample at
    place p of an epoch all this depends on (seed, epoch, p) alone. Objects that the crop removes
    are left out.
    """

    def __init__(
        self, image_size: int, augmentation: str, batch_size: int, split: VocSplit, seed: int | None
    ):
        super().__init__(len(split.images), split.images.source, batch_size, seed)
        self.split, self.image_size, self.seed = split, image_size, seed
        self.augmentation = augmentation

    def read(self, number: int) -> ReadBatch:
        places = self.places(number)
        size = self.image_size
        images = torch.empty((len(places), size, size, 3), dtype=torch.uint8)
        targets = torch.from_numpy(self.split.targets[places])
        with kept_random_state():
            for row, place in enumerate(places):
                image = self.split.image(place)
                if self.seed is not None:
                    epoch, batch = divmod(number, len(self))
                    seed_sample(self.seed, epoch, batch * self.batch_size + row, _STREAM)
                    images[row], targets[row] = self._augmented(image, targets[row])
                else:
                    resized = image.resize((size, size), 2)  # bilinear
                    images[row] = torch.from_numpy(np.array(resized))
        return ReadBatch(images, targets, {})

    def _augmented(self, image: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        from torchvision import tv_tensors
        from torchvision.transforms import v2

        width, height = image.size
        sides = torch.tensor([width, height, width, height])
        own = target[target[:, CLASS] >= 0]
        boxes: Any = tv_tensors.BoundingBoxes(
            own[:, :CLASS] * sides, format="XYXY", canvas_size=(height, width)
        )
        changes = [v2.RandomHorizontalFlip(), v2.Resize((self.image_size,) * 2, antialias=True)]
        if self.augmentation == "ssd":
            fill = {tv_tensors.Image: tuple(round(mean) for mean in CAFFE_MEAN), "others": 0}
            labels_kept = v2.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[2])
            zoom = v2.RandomZoomOut(fill=fill)
            changes[:0] = [v2.RandomPhotometricDistort(), zoom, v2.RandomIoUCrop(), labels_kept]
        pixels = tv_tensors.Image(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        pixels, boxes, named = v2.Compose(changes)(pixels, boxes, own[:, CLASS:])
        left = torch.zeros_like(target)
        left[:, CLASS] = NOTHING
        left[: len(boxes), :CLASS] = (boxes.as_subclass(Tensor) / self.image_size).clamp(0, 1)
        left[: len(boxes), CLASS:] = named
        return pixels.as_subclass(Tensor).permute(1, 2, 0), left


class Voc(LoadedSource):
    """trainval of ``years`` for training, VOC 2007's test images held out; 20 classes.

    ``workers`` and ``prefetch`` are as in ``ImageFolder``. ``difficult``: train on objects marked
    as difficult like on others; held-out ones stay marked. ``sha256`` is over names, sizes of files
    and objects.

    Raises:
        ValueError: There are fewer training images than a batch takes.
        DataError: A list of images is missing.
        DamagedData: A file cannot be used; the message names it.
    """

    def __init__(
        self,
        root: str,
        *,
        years: str,
        difficult: bool,
        augmentation: str,
        image_size: int,
        channels: int,
        value_range: str,
        workers: int | None,
        prefetch: int,
        batch_size: int,
        seed: int,
        device: torch.device | str,
    ) -> None:
        device = torch.device(device)
        self._offset, self._divisor = imagenet_constants(value_range, channels, device)
        inside = os.path.join(root, "VOCdevkit")
        folder = inside if os.path.isdir(inside) else root
        train = VocSplit(folder, [(year, "trainval") for year in YEARS[years]], difficult)
        train.targets[:, :, DIFFICULT] = 0
        held_out = VocSplit(folder, [("2007", "test")], difficult=True)
        reader = partial(VocReader, image_size, augmentation, batch_size)
        super().__init__(reader(train, seed), reader(held_out, None), workers, device, prefetch)
        self.num_classes = len(CLASSES)
        content = [(split.images.table, split.sizes, split.targets) for split in (train, held_out)]
        every = (part.tobytes() for parts in content for part in parts)
        self.sha256 = hashlib.sha256(b"".join(every)).hexdigest()
        self.description = {
            "name": "voc",
            "train_samples": len(train.images),
            "eval_samples": len(held_out.images),
            "num_classes": self.num_classes,
            "image_size": image_size,
            "channels": channels,
            "value_range": value_range,
            "years": years,
            "difficult": "kept" if difficult else "left out",
            "augmentation": augmentation,
            "most_boxes": max(train.most, held_out.most),
            "sha256_of": "names, sizes and objects",
        }

    def _float(self, images: Tensor) -> Tensor:
        return normalise(images, self._offset, self._divisor)

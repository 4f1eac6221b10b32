"""Annotated images below a folder, as PASCAL VOC and COCO describe them: who is where on each.

All annotations are read at the start (about 5 s for both years of VOC), so that a faulty one ends
the run before its first step. A box that leaves its image by up to a pixel is clipped (VOC 2012 has
fractions), any other is refused.
"""

import math
import os
import re
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np

from mprun.data.augmentation import ImageForm
from mprun.data.image_files import printable, read_file
from mprun.data.source import DamagedData, DataError, Serving
from mprun.errors import shortened
from mprun.extensions.detection.boxed_images import BoxedImages, BoxSplit, Objects, first_repeated
from mprun.extensions.detection.boxes import DIFFICULT
from mprun.extensions.detection.canvases import FIELDS

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
YEARS = {"2007": ("2007",), "2007+2012": ("2007", "2012")}
MAX_ANNOTATION_BYTES = 2**20  # the largest of VOC has 20 KiB
_NAME = re.compile(r"[0-9A-Za-z_]{1,64}")


class _NoDoctype(ElementTree.TreeBuilder):
    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError(
            "the file declares a document type, which is not allowed because its entities may "
            "expand"
        )


def read_annotation(path: str) -> Objects:
    """Read the objects of VOC's XML for an image; DamagedData names the file and the fault.

    Coordinates are pixels from 1, right and bottom inclusive: a box of the whole image becomes
    0, 0, 1, 1. A declared document type is refused, because its entities might expand to anything.
    """
    content = read_file(path, MAX_ANNOTATION_BYTES)
    parser = ElementTree.XMLParser(target=_NoDoctype())
    try:
        parser.feed(content)
        return _objects(parser.close())
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise DamagedData(f"{printable(path)}: is not an annotation of VOC: {reason}") from None


def _objects(root: ElementTree.Element) -> Objects:
    width, height = (int(_number(root, f"size/{side}")) for side in ("width", "height"))
    if width < 1 or height < 1:
        raise ValueError(f"the image has {width} x {height} pixels, must have at least 1 x 1")
    rows = []
    for count, found in enumerate(root.findall("object"), start=1):
        name = _text(found, "name")
        if name not in CLASSES:
            raise ValueError(
                f"object {count} is a {printable(name)!r}, which does not exist in VOC"
            )
        sides = [_number(found, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
        box = np.array(sides) - (1, 1, 0, 0)
        most = np.array((width, height, width, height))
        if (box < -1).any() or (box > most + 1).any() or (box[:2] >= box[2:]).any():
            said = " ".join(f"{side:g}" for side in sides)
            raise ValueError(
                f"object {count}, a {name}, has the box {said}, which must lie inside the {width} "
                f"x {height} pixels"
            )
        difficult = found.findtext("difficult", "0").strip() == "1"
        rows.append([*(box.clip(0, most) / most), CLASSES.index(name), difficult])
    return Objects((width, height), np.array(rows, np.float32).reshape(-1, FIELDS))


def _text(node: ElementTree.Element, path: str) -> str:
    text = node.findtext(path)
    if text is None:
        raise ValueError(f"{node.tag} contains no {path}")
    return text.strip()


def _number(node: ElementTree.Element, path: str) -> float:
    text = _text(node, path)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{path} is {shortened(printable(text), 40)!r}, must be a number")
    return value


def voc_split(root: str, parts: list[tuple[str, str]], difficult: bool) -> BoxSplit:
    """Read the annotations of pairs of a year and its list of images."""
    names: list[str] = []
    found: list[Objects] = []
    for year, listed in parts:
        folder = os.path.join(root, f"VOC{year}")
        for name in _listed(f"{folder}/ImageSets/Main/{listed}.txt"):
            found.append(read_annotation(f"{folder}/Annotations/{name}.xml"))
            names.append(f"VOC{year}/JPEGImages/{name}.jpg")
    return BoxSplit(root, names, found, difficult)


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
            named = shortened(printable(name), 70)
            raise DamagedData(f"{printable(path)}: {named!r} is not the name of an image")
    if not names:
        raise DamagedData(f"{printable(path)}: lists no images")
    if twice := first_repeated(names):
        raise DamagedData(f"{printable(path)}: lists {twice[0]} twice")
    return names


def voc(
    root: str, years: str, difficult: bool, augmentation: str, form: ImageForm, serving: Serving
) -> BoxedImages:
    """Return trainval of ``years`` for training, VOC 2007's test images held out; 20 classes.

    The folders are ``VOCdevkit/VOC2007/{Annotations/*.xml, JPEGImages/*.jpg,
    ImageSets/Main/{trainval,test}.txt}`` and the same for VOC2012, as the original archives unpack.
    ``difficult``: train on objects marked as difficult like on others; held-out ones stay marked.
    """
    inside = os.path.join(root, "VOCdevkit")
    folder = inside if os.path.isdir(inside) else root
    train = voc_split(folder, [(year, "trainval") for year in YEARS[years]], difficult)
    train.rows[:, DIFFICULT] = 0
    held_out = voc_split(folder, [("2007", "test")], difficult=True)
    kept = "kept" if difficult else "left out"
    about = {"name": "voc", "years": years, "difficult": kept}
    return BoxedImages(train, held_out, len(CLASSES), about, augmentation, form, serving)


MAX_SIDE = 2**20  # pixels
MAX_BYTES = 2**32  # instances_train2017.json has 449 MB


class _Category(msgspec.Struct):
    id: int
    name: str


class _Image(msgspec.Struct):
    id: int
    file_name: str
    width: int
    height: int


class _Annotation(msgspec.Struct):
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    iscrowd: int = 0


class Instances(msgspec.Struct):
    """The fields that are read of COCO's file of a split; others are passed over."""

    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def read_instances(path: str) -> Instances:
    """Read a file of instances, categories in the order of their ids; DamagedData names a fault."""
    shown = printable(path)
    if not os.path.isfile(path):
        raise DataError(f"{shown}: no such file; data.root needs annotations/instances_NAME.json")
    try:
        found = msgspec.json.decode(read_file(path, MAX_BYTES), type=Instances)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedData(f"{shown}: is not an instances file of COCO: {error}") from None
    unique: dict[str, list[Any]] = {
        "id of a category": [own.id for own in found.categories],
        "id of an image": [own.id for own in found.images],
        "file_name of an image": [own.file_name for own in found.images],
    }
    for what, values in unique.items():
        if twice := first_repeated(values):
            value = printable(str(twice[0]))
            raise DamagedData(f"{shown}: each {what} must be unique, but {value} occurs twice")
    for image in found.images:
        if not (0 < image.width <= MAX_SIDE and 0 < image.height <= MAX_SIDE):
            raise DamagedData(
                f"{shown}: gives image {image.id} {image.width} x {image.height} pixels; width and "
                f"height must be from 1 to {MAX_SIDE}"
            )
        name = image.file_name
        if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
            raise DamagedData(
                f"{shown}: the file_name {printable(name)!r} must be a path inside the image folder"
            )
    found.categories.sort(key=lambda own: own.id)
    return found


def objects_of(found: Instances, shown: str) -> list[Objects]:
    """Return the objects of each image; DamagedData names a fault.

    Boxes are x, y, width, height in pixels from 0. Classes are the file's categories. Crowds count
    as difficult: they are not learned from, and ignored by the metric.
    """
    classes = {own.id: number for number, own in enumerate(found.categories)}
    rows: dict[int, list[list[float]]] = {own.id: [] for own in found.images}
    sizes = {own.id: (own.width, own.height) for own in found.images}
    for number, own in enumerate(found.annotations):
        where = f"{shown}: annotation {number}"
        if own.image_id not in rows or own.category_id not in classes:
            key = "image_id" if own.image_id not in rows else "category_id"
            raise DamagedData(
                f"{where}: has {key} {getattr(own, key)}, but the file has no such entry"
            )
        x, y, width, height = own.bbox
        if width <= 0 or height <= 0:  # COCO has some
            continue
        # In plain Python: a million small arrays would take half a minute.
        box, most = (x, y, x + width, y + height), sizes[own.image_id] * 2
        if min(box) < -1 or box[2] > most[2] + 1 or box[3] > most[3] + 1:
            size = " x ".join(map(str, sizes[own.image_id]))
            raise DamagedData(
                f"{where}: has the box {own.bbox}, which must lie inside its {size} pixels"
            )
        sides = [min(max(side, 0), end) / end for side, end in zip(box, most, strict=True)]
        rows[own.image_id].append([*sides, classes[own.category_id], own.iscrowd == 1])
    made = [np.array(own, np.float32).reshape(-1, FIELDS) for own in rows.values()]
    return [Objects(*own) for own in zip(sizes.values(), made, strict=True)]


def coco(
    root: str,
    train_folder: str,
    eval_folder: str,
    augmentation: str,
    form: ImageForm,
    serving: Serving,
) -> BoxedImages:
    """Return the images of two splits; those of training that have no object are left out.

    The layout is COCO's own, ``annotations/instances_NAME.json`` and ``NAME/*.jpg`` (Lin et al.,
    arXiv 1405.0312; cocodataset.org, "Format Data"), NAME being train2017 and val2017.
    """
    splits, named, left_out = [], [], 0
    for split in (train_folder, eval_folder):
        path = os.path.join(root, "annotations", f"instances_{split}.json")
        found, shown = read_instances(path), printable(path)
        names = [f"{split}/{image.file_name}" for image in found.images]
        pairs = list(zip(names, objects_of(found, shown), strict=True))
        if split == train_folder:
            pairs = [own for own in pairs if (own[1].rows[:, DIFFICULT] == 0).any()]
            left_out = len(names) - len(pairs)
        if not pairs:
            raise DamagedData(f"{shown}: has no image with an object")
        below, objects = zip(*pairs, strict=True)
        splits.append(BoxSplit(root, below, objects, split == eval_folder))
        named.append([own.name for own in found.categories])
    if named[0] != named[1]:
        raise DamagedData(f"{shown}: its categories must be those of {train_folder}")
    about = {"name": "coco", "splits": f"{train_folder}, {eval_folder}", "left_out": left_out}
    train, held_out = splits
    return BoxedImages(train, held_out, len(named[0]), about, augmentation, form, serving)

"""PASCAL VOC 2007 and 2012 below a folder: images with boxes, read during training.

The folders are ``VOCdevkit/VOC2007/{Annotations/*.xml, JPEGImages/*.jpg,
ImageSets/Main/{trainval,test}.txt}`` and the same for VOC2012, as the original archives unpack.

All annotations are read at the start (about 5 s for both years), so that a faulty one ends the run
before its first step. An annotation is XML. If it declares a document type, and with it entities
that might expand to anything, it is refused. Coordinates are pixels from 1, right and bottom
inclusive: a box of the whole image becomes 0, 0, 1, 1. A box that leaves its image by up to a pixel
(the annotations of 2012 have fractions) is clipped, any other is refused.
"""

import math
import os
import re
from xml.etree import ElementTree

import numpy as np

from mprun.data.augmentation import ImageForm
from mprun.data.image_files import printable, read_file
from mprun.data.source import DamagedData, DataError, Description, Serving
from mprun.errors import shortened
from mprun.extensions.detection.boxed_images import (
    BoxedImages,
    BoxSplit,
    Objects,
    first_repeated,
)
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
            raise DamagedData(f"{printable(path)}: {named!r} is no name of an image")
    if not names:
        raise DamagedData(f"{printable(path)}: lists no image")
    if twice := first_repeated(names):
        raise DamagedData(f"{printable(path)}: lists {twice[0]} twice")
    return names


def voc(
    root: str, years: str, difficult: bool, augmentation: str, form: ImageForm, serving: Serving
) -> BoxedImages:
    """Return trainval of ``years`` for training, VOC 2007's test images held out; 20 classes.

    ``difficult``: train on objects marked as difficult like on others; held-out ones stay marked.

    Raises DataError if a list of images is missing, and what `BoxedImages` raises.
    """
    inside = os.path.join(root, "VOCdevkit")
    folder = inside if os.path.isdir(inside) else root
    train = voc_split(folder, [(year, "trainval") for year in YEARS[years]], difficult)
    train.rows[:, DIFFICULT] = 0
    held_out = voc_split(folder, [("2007", "test")], difficult=True)
    about: Description = {
        "name": "voc",
        "years": years,
        "difficult": "kept" if difficult else "left out",
    }
    return BoxedImages(train, held_out, len(CLASSES), about, augmentation, form, serving)

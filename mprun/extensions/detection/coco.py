"""Images with boxes as COCO describes them: one JSON file a split, images in a folder beside it.

The layout is COCO's own, ``annotations/instances_NAME.json`` and ``NAME/*.jpg`` (Lin et al., arXiv
1405.0312; cocodataset.org, "Format Data"), NAME being train2017 and val2017. The file is read
whole at the start. Boxes are x, y, width, height in pixels from 0; one that leaves its image by up
to a pixel is clipped, any other is refused. Classes are the file's categories in the order of
their ids. Crowds count as difficult: they are not learned from, and ignored by the metric.
"""

import os
from typing import Any

import msgspec
import numpy as np

from mprun.data.augmentation import ImageForm
from mprun.data.image_files import printable, read_file
from mprun.data.source import DamagedData, DataError, Description, Serving
from mprun.extensions.detection.boxed_images import (
    BoxedImages,
    BoxSplit,
    Objects,
    first_repeated,
)
from mprun.extensions.detection.canvases import FIELDS

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
    """The fields that are read of a file of instances; others are passed over."""

    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def read_instances(path: str) -> Instances:
    """Read a file of instances; DamagedData names the file and the first fault."""
    shown = printable(path)
    if not os.path.isfile(path):
        raise DataError(f"{shown}: no such file; data.root needs annotations/instances_NAME.json")
    try:
        return msgspec.json.decode(read_file(path, MAX_BYTES), type=Instances)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedData(f"{shown}: no instances of COCO: {error}") from None


def objects_of(found: Instances, shown: str) -> tuple[list[str], list[Objects]]:
    """Return the names of the images and their objects; DamagedData names a fault."""
    unique: tuple[tuple[str, list[Any]], ...] = (
        ("categories have the id", [own.id for own in found.categories]),
        ("images have the id", [own.id for own in found.images]),
        ("images have the file_name", [own.file_name for own in found.images]),
    )
    for what, values in unique:
        if twice := first_repeated(values):
            raise DamagedData(f"{shown}: two {what} {printable(str(twice[0]))}")
    classes = {own.id: number for number, own in enumerate(categories_of(found))}
    rows: dict[int, list[list[float]]] = {own.id: [] for own in found.images}
    sizes = {own.id: (own.width, own.height) for own in found.images}
    for image in found.images:
        if not (0 < image.width <= MAX_SIDE and 0 < image.height <= MAX_SIDE):
            size = f"{image.width} x {image.height}"
            raise DamagedData(f"{shown}: image {image.id} is said to have {size} pixels")
    for number, own in enumerate(found.annotations):
        where = f"{shown}: annotation {number}"
        if own.image_id not in rows or own.category_id not in classes:
            key = "image_id" if own.image_id not in rows else "category_id"
            raise DamagedData(f"{where}: has {key} {getattr(own, key)}, which the file does not")
        x, y, width, height = own.bbox
        if width <= 0 or height <= 0:  # COCO has some
            continue
        # In plain Python: a million small arrays would take half a minute.
        box, most = (x, y, x + width, y + height), sizes[own.image_id] * 2
        if min(box) < -1 or box[2] > most[2] + 1 or box[3] > most[3] + 1:
            size = " x ".join(map(str, sizes[own.image_id]))
            raise DamagedData(f"{where}: has the box {own.bbox}, which leaves its {size} pixels")
        sides = [min(max(side, 0), end) / end for side, end in zip(box, most, strict=True)]
        rows[own.image_id].append([*sides, classes[own.category_id], own.iscrowd == 1])
    names = []
    for image in found.images:
        name = image.file_name
        if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
            raise DamagedData(f"{shown}: {printable(name)!r} is no name below its folder")
        names.append(name)
    made = [np.array(own, np.float32).reshape(-1, FIELDS) for own in rows.values()]
    return names, [Objects(*own) for own in zip(sizes.values(), made, strict=True)]


def categories_of(found: Instances) -> list[_Category]:
    """Return the categories in the order of their ids."""
    return sorted(found.categories, key=lambda own: own.id)


def coco(
    root: str,
    train_folder: str,
    eval_folder: str,
    augmentation: str,
    form: ImageForm,
    serving: Serving,
) -> BoxedImages:
    """Return the images of two splits; those of training that have no object are left out.

    Raises DataError if a file of instances is missing, and what `BoxedImages` raises.
    """
    splits: list[BoxSplit] = []
    named: list[list[str]] = []
    left_out = 0
    for split in (train_folder, eval_folder):
        path = os.path.join(root, "annotations", f"instances_{split}.json")
        found, shown = read_instances(path), printable(path)
        names, objects = objects_of(found, shown)
        pairs: list[tuple[str, Objects]] = list(zip(names, objects, strict=True))
        if split == train_folder:
            pairs = [own for own in pairs if (own[1].rows[:, -1] == 0).any()]
            left_out = len(names) - len(pairs)
        if not pairs:
            raise DamagedData(f"{shown}: has no image with an object")
        below = [f"{split}/{name}" for name, _ in pairs]
        splits.append(BoxSplit(root, below, [own for _, own in pairs], split == eval_folder))
        named.append([own.name for own in categories_of(found)])
    if named[0] != named[1]:
        raise DamagedData(f"{shown}: its categories are not those of {train_folder}")
    about: Description = {
        "name": "coco",
        "splits": f"{train_folder}, {eval_folder}",
        "left_out": left_out,
    }
    train, held_out = splits
    return BoxedImages(train, held_out, len(named[0]), about, augmentation, form, serving)

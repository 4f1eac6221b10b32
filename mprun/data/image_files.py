"""The images that a folder offers for training and those that it holds out."""

import hashlib
import os
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from mprun.data.image_listing import ImageSplit, list_images, printable
from mprun.data.imagenet_archives import CLASSES, find_archived_images
from mprun.data.source import DamagedData

__all__ = ["HELD_OUT_FOLDERS", "ImageSplit", "Images", "find_images"]

# The first of these that exists is the held-out split.
HELD_OUT_FOLDERS = ("val", "valid", "validation", "test")
# Up to this size the content is hashed; reading more would delay every start of a run.
CONTENT_HASH_BYTES = 256 * 2**20

_WHOLE = ""  # the folder of images that are not split yet


@dataclass(slots=True)
class Images:
    """Both splits of a data set, and a hash of its content.

    ``sha256`` (hex) is over the class names and, file by file in the order of the listing, the
    path below root with the content (``sha256_of`` "content"). Above 256 MiB in all, the size in
    bytes replaces the content ("names and sizes"). The hash depends neither on where root lies nor
    on ``eval_share``. ``split_rule`` describes how files were split; ``ignored`` counts the files
    in the folders that are no images (``mprun.data.image_listing``).
    """

    train: ImageSplit
    held_out: ImageSplit
    classes: tuple[str, ...]
    sha256: str
    sha256_of: str
    split_rule: str
    ignored: int


def find_images(
    root: str, *, layout: str, eval_share: float, imagenet: bool, on_corrupt: str = "stop"
) -> Images:
    """Find the images below ``root``; order and labels depend on their names alone.

    ``layout="classes"``: one folder per class, class names sorted and numbered from 0, within a
    class sorted by folder, then by file name (all as in torchvision's ``ImageFolder``). The class
    folders lie in root/train and in the first of root/val, valid, validation, test; or in root
    itself. There a rule of hashes splits them, by the SHA-256 of a file's path below root (parts
    joined by "/"). A file is held out if the first 64 bits lie in the lowest ``eval_share`` of
    their range. So no file changes sides when others come or go, with one exception: if this would
    hold out a whole class, the file of the highest hash stays in training.

    ``layout="flat"``: every image at any depth, without labels. root/train and a held-out folder
    are the splits if both exist, otherwise the rule of hashes splits all files.

    ``imagenet``: split folders of 1,000 class folders each, or the original archives.

    With ``on_corrupt="skip"`` files that are empty or unreadable stay in the splits, for the reader
    to skip; otherwise they are refused here.

    Raises:
        ValueError: An argument is wrong.
        DamagedData: A file or folder cannot be used; the message names it.
    """
    flat, skip = layout == "flat", on_corrupt == "skip"
    if imagenet and flat:
        raise ValueError("layout='flat' is not allowed: ImageNet has classes")
    parts, rule, ignored = _listed(os.path.abspath(root), flat, imagenet, skip)
    if _WHOLE in parts:
        rule = f"SHA-256 of the path below {eval_share:g}"
        if not flat:
            rule += ", one file of each class stays in training"
        train, held_out = _split_by_hash(parts[_WHOLE], eval_share)
    else:
        train, held_out = parts.values()
    sha256, sha256_of = _sha256(parts, skip)
    return Images(train, held_out, train.classes, sha256, sha256_of, rule, ignored)


def _listed(
    root: str, flat: bool, imagenet: bool, skip: bool
) -> tuple[dict[str, ImageSplit], str, int]:
    """Return folder -> images (both splits, or all of them unsplit), the rule, and ignored."""
    names = ("train", *HELD_OUT_FOLDERS)
    folders = [name for name in names if os.path.isdir(os.path.join(root, name))]
    has_train = "train" in folders
    held_out_folder = next(iter(folders[has_train:]), None)
    if imagenet and not folders:
        train, held_out = find_archived_images(root)
        return {"train": train, "val": held_out}, "the training and the validation archive", 0
    if not folders or (flat and not (has_train and held_out_folder)):
        whole, ignored = list_images(root, _WHOLE, flat, skip)
        return {_WHOLE: whole}, "", ignored
    if not has_train:
        raise DamagedData(
            f"{printable(os.path.join(root, 'train'))}: no such folder, but {held_out_folder}/ is "
            "beside it"
        )
    if held_out_folder is None:
        raise DamagedData(
            f"{printable(root)}: has train/ but no held-out split; looked for "
            f"{', '.join(name + '/' for name in HELD_OUT_FOLDERS)}"
        )
    train, ignored = list_images(root, "train", flat, skip)
    held_out, ignored_too = list_images(root, held_out_folder, flat, skip)
    parts = {"train": train, held_out_folder: held_out}
    _check_classes(root, parts, imagenet)
    return parts, f"folders train and {held_out_folder}", ignored + ignored_too


def _check_classes(root: str, parts: dict[str, ImageSplit], imagenet: bool) -> None:
    # First the classes of the held-out split that training lacks.
    for other, folder in permutations(parts):
        unknown = sorted(set(parts[folder].classes) - set(parts[other].classes))
        if unknown:
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            raise DamagedData(
                f"{printable(os.path.join(root, folder, unknown[0]))}: a class{more} that is not "
                f"in {printable(os.path.join(root, other))}"
            )
    if imagenet and len(parts["train"].classes) != CLASSES:
        raise DamagedData(
            f"{printable(os.path.join(root, 'train'))}: {len(parts['train'].classes)} classes, "
            f"ImageNet has {CLASSES}"
        )


def _split_by_hash(whole: ImageSplit, eval_share: float) -> tuple[ImageSplit, ImageSplit]:
    digests = (hashlib.sha256(name).digest()[:8] for name in whole.table["name"])
    hashes = np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
    held_out = hashes < np.uint64(eval_share * 2.0**64)
    in_training = np.bincount(whole.labels[~held_out], minlength=len(whole.classes) or 1)
    for label in np.flatnonzero(in_training == 0):
        members = np.flatnonzero(whole.labels == label)
        held_out[members[hashes[members].argmax()]] = False
    if not held_out.any():
        raise DamagedData(
            f"{printable(whole.source)}: {len(whole)} images are too few, eval_share="
            f"{eval_share:g} holds none of them out"
        )
    return whole.taken(~held_out), whole.taken(held_out)


def _sha256(parts: dict[str, ImageSplit], skip: bool) -> tuple[str, str]:
    sizes = sum(int(split.table["size"].sum()) for split in parts.values())
    whole_content = sizes <= CONTENT_HASH_BYTES
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(b"%d:" % len(part) + part)

    for name in next(iter(parts.values())).classes:
        add(os.fsencode(name))
    for folder, split in parts.items():
        for i in range(len(split)):
            add(_path(folder, split, i))
            if whole_content:
                add(_content(split, i, skip))
            else:
                digest.update(b"%d\n" % split.table["size"][i])
    return digest.hexdigest(), "content" if whole_content else "names and sizes"


def _path(folder: str, split: ImageSplit, i: int) -> bytes:
    """Return the path below root; for archives, the path after extraction into class folders."""
    name = split.relative_name(i)
    if not split.archived:
        return name
    parent = os.path.join(folder, split.classes[split.labels[i]])
    return os.path.join(os.fsencode(parent), os.path.basename(name))


def _content(split: ImageSplit, i: int, skip: bool) -> bytes:
    try:
        return split.read(i)
    except DamagedData:
        if not skip:
            raise
        return b""

"""Which images a folder offers for training and which it holds out."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mprun.data.image_listing import (
    ImageSplit,
    Listing,
    list_classes,
    list_flat,
    pack_names,
    printable,
)
from mprun.data.imagenet_archives import CLASSES, WHERE_FILES_GO, find_archived_images, has_archive
from mprun.data.source import DamagedData

__all__ = ["HELD_OUT_FOLDERS", "ImageSplit", "Images", "find_images"]

# The first that exists is the held-out split.
HELD_OUT_FOLDERS = ("val", "valid", "validation", "test")
# Up to here the content is hashed; reading more would delay every start of a run.
CONTENT_HASH_BYTES = 256 * 2**20

ListImages = Callable[[str, str, bool], Listing]


@dataclass(slots=True)
class Images:
    """Both splits of a data set, and what stands for its content.

    ``sha256`` (hex) is over the class names and, file by file in the order of the listing, the
    path below root with the content (``sha256_of`` "content") or, above 256 MiB in all, with the
    size in bytes ("names and sizes"). It depends neither on where root lies nor on
    ``eval_share``. ``split_rule`` says in words what decided between the splits; ``ignored``
    counts the files in the folders that are no images (``mprun.data.image_listing``).
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
    """The images below ``root``, in an order and with labels that depend on their names alone.

    ``layout="classes"``: one folder per class, class names sorted and numbered from 0, within a
    class sorted by folder, then by file name (all as torchvision's ``ImageFolder``). The class
    folders lie in root/train and in the first of root/val, valid, validation, test; or in root
    itself, and then a file is held out where the first 64 bits of the SHA-256 of its path below
    root (parts joined by "/") fall into the lowest ``eval_share`` of their range. So no file
    changes sides when others come or go, with one exception: where this would hold out a whole
    class, the file of the highest hash stays in training.

    ``layout="flat"``: every image at any depth, without labels; root/train and a held-out folder
    are the splits where both exist, otherwise the rule of hashes splits all files.

    ``imagenet``: split folders of 1,000 class folders each, or the original archives.

    With ``on_corrupt="skip"`` files that are empty or cannot be read stay in the splits, for the
    reader to skip; otherwise they are refused here.

    Raises ``ValueError`` for an argument, ``DamagedData`` naming a file or folder.
    """
    if layout not in ("classes", "flat"):
        raise ValueError(f"layout={layout!r} is not allowed: 'classes' or 'flat'")
    if imagenet and layout == "flat":
        raise ValueError("layout='flat' is not allowed: ImageNet has classes")
    if not 0 < eval_share < 1:
        raise ValueError(f"eval_share={eval_share} is not allowed: between 0 and 1")
    root, skip = os.path.abspath(root), on_corrupt == "skip"
    has_train = os.path.isdir(os.path.join(root, "train"))
    held_out_folder = next(
        (name for name in HELD_OUT_FOLDERS if os.path.isdir(os.path.join(root, name))), None
    )
    whole, ignored = None, 0
    if imagenet and not has_train and held_out_folder is None:
        if not has_archive(root):
            raise DamagedData(f"{printable(root)}: no ImageNet here; {WHERE_FILES_GO}")
        train, held_out = find_archived_images(root)
        rule = "the training and the validation archive"
    elif layout == "flat" and not (has_train and held_out_folder):
        whole, ignored = _list(root, "", list_flat, skip)
        rule = f"SHA-256 of the path below {eval_share:g}"
    elif layout == "classes" and not (has_train or held_out_folder or imagenet):
        whole, ignored = _list(root, "", list_classes, skip)
        rule = f"SHA-256 of the path below {eval_share:g}, one file of each class stays in training"
    else:
        held_out_folder = _both(root, has_train, held_out_folder)
        list_images = list_flat if layout == "flat" else list_classes
        train, ignored = _list(root, "train", list_images, skip)
        held_out, ignored_too = _list(root, held_out_folder, list_images, skip)
        ignored += ignored_too
        _check_same_classes(root, "train", train, held_out_folder, held_out)
        rule = f"folders train and {held_out_folder}"
        if imagenet and len(train.classes) != CLASSES:
            raise DamagedData(
                f"{printable(os.path.join(root, 'train'))}: {len(train.classes)} classes, "
                f"ImageNet has {CLASSES}"
            )
    if whole is None:
        parts = {"train": train, held_out_folder or "val": held_out}
    else:
        parts = {"": whole}
        train, held_out = _split_by_hash(whole, eval_share)
    sha256, sha256_of = _sha256(parts, skip)
    return Images(train, held_out, train.classes, sha256, sha256_of, rule, ignored)


def _list(root: str, top: str, list_images: ListImages, skip: bool) -> tuple[ImageSplit, int]:
    listing = list_images(root, top, skip)
    names, ends = pack_names(listing.names)
    sizes, labels = np.array(listing.sizes, np.int64), np.array(listing.labels, np.int64)
    return ImageSplit(root, names, ends, sizes, labels, listing.classes), listing.ignored


def _both(root: str, has_train: bool, held_out_folder: str | None) -> str:
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
    return held_out_folder


def _check_same_classes(
    root: str, train_name: str, train: ImageSplit, held_out_name: str, held_out: ImageSplit
) -> None:
    for here, there, folder, other in (
        (held_out, train, held_out_name, train_name),
        (train, held_out, train_name, held_out_name),
    ):
        unknown = sorted(set(here.classes) - set(there.classes))
        if unknown:
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            raise DamagedData(
                f"{printable(os.path.join(root, folder, unknown[0]))}: a class{more} that is not "
                f"in {printable(os.path.join(root, other))}"
            )


def _split_by_hash(whole: ImageSplit, eval_share: float) -> tuple[ImageSplit, ImageSplit]:
    hashes = np.fromiter(
        (_hash64(whole.relative_name(i)) for i in range(len(whole))), np.uint64, len(whole)
    )
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


def _hash64(name: bytes) -> int:
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big")


def _sha256(parts: dict[str, ImageSplit], skip: bool) -> tuple[str, str]:
    whole_content = sum(int(split.sizes.sum()) for split in parts.values()) <= CONTENT_HASH_BYTES
    digest = hashlib.sha256()
    classes = next(iter(parts.values())).classes
    for name in classes:
        digest.update(_prefixed(os.fsencode(name)))
    for folder, split in parts.items():
        for i, path in enumerate(_paths(folder, split)):
            digest.update(_prefixed(path))
            if whole_content:
                digest.update(_prefixed(_content(split, i, skip)))
            else:
                digest.update(b"%d\n" % split.sizes[i])
    return digest.hexdigest(), "content" if whole_content else "names and sizes"


def _paths(folder: str, split: ImageSplit) -> Iterator[bytes]:
    """Paths below root; for archives those that extracting them into class folders would give."""
    for i in range(len(split)):
        name = split.relative_name(i)
        if split.starts is not None:
            parent = os.path.join(folder, split.classes[split.labels[i]])
            name = os.path.join(os.fsencode(parent), os.path.basename(name))
        yield name


def _content(split: ImageSplit, i: int, skip: bool) -> bytes:
    try:
        return split.read(i)
    except DamagedData:
        if not skip:
            raise
        return b""


def _prefixed(part: bytes) -> bytes:
    return b"%d:" % len(part) + part

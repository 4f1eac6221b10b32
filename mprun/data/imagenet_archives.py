"""ILSVRC12, in class folders or read in place from its original tar archives.

Nothing is ever extracted: the members' offsets are listed and checked once, and `ImageSplit` reads
each image at its offset.
"""

import gzip
import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from mprun.data.cache import load_arrays, store_arrays
from mprun.data.image_files import (
    IMAGE_EXTENSIONS,
    MAX_FILE_BYTES,
    Images,
    ImageSplit,
    Row,
    find_images,
    hashed,
    image_table,
    printable,
    read_file,
    split_folders,
    too_large,
)
from mprun.data.source import DamagedData, DataError

# Seven times the training images of ImageNet; stops an archive made to never end.
MAX_MEMBERS = 10_000_000
# Limit for all headers of one member, which tarfile reads whole: a path takes 4 KiB, attributes
# 64 KiB.
MAX_HEADER_BYTES = 2**20


class Member(NamedTuple):
    """A regular file within an archive: bytes ``start : start + size`` of the archive file."""

    name: str
    start: int
    size: int


def list_members(path: str, inside: Member | None = None) -> list[Member]:
    """List the regular files of an uncompressed tar by name, with their offsets in ``path``.

    ``inside``: a member of ``path`` that is a tar itself and is listed instead. Folders are
    ignored. A member costs 25 us, nearly all of it ``tarfile``'s parsing, and one random read.

    ``DamagedData`` names an archive that is no tar, ends early or has more than 10 million members,
    or a member that is a link, device or sparse file, has an absolute path or "..", a repeated name
    or headers of more than a MiB.
    """
    shown = _member_name(path, inside) if inside else printable(path)
    try:
        with open(path, "rb", buffering=0) as file:
            start, size = inside[1:] if inside else (0, os.fstat(file.fileno()).st_size)
            return _members(file, start, size, shown)
    except OSError as error:
        raise DamagedData(f"{shown}: cannot be read: {error.strerror}") from error


def _members(file: BinaryIO, start: int, size: int, shown: str) -> list[Member]:
    members: dict[str, Member] = {}
    try:
        for entry in _entries(file, start, size):
            if entry.isdir():
                continue
            name = entry.name.removeprefix("./")
            fault = "a name that comes twice" if name in members else _fault(entry, name, size)
            if fault:
                raise DamagedData(f"{shown}:{printable(name)}: {fault} in an archive")
            members[name] = Member(name, start + entry.offset_data, entry.size)
            if len(members) > MAX_MEMBERS:
                raise DamagedData(f"{shown}: more than {MAX_MEMBERS:,} members")
    except tarfile.TarError as error:
        raise DamagedData(f"{shown}: a damaged tar archive: {error}") from error
    return sorted(members.values())


def _entries(file: BinaryIO, start: int, size: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar, bytes ``start : start + size`` of ``file``, in bounded memory.

    tarfile takes a damaged header for the end of the archive, so that members would be missing;
    here it raises ``tarfile.TarError``, as do headers of more than ``MAX_HEADER_BYTES``.
    """
    headers = _Headers(file, start, size)
    try:
        # tarfile uses no other methods of its file than these three.
        tar = tarfile.open(fileobj=cast(BinaryIO, headers), mode="r:")
        while (entry := tar.next()) is not None:
            if entry.size < 0:
                raise tarfile.ReadError(f"a member of {entry.size} bytes")
            # tarfile would keep them all, at a kilobyte each.
            tar.members = []  # type: ignore[attr-defined]  # not in its types
            headers.left = MAX_HEADER_BYTES
            yield entry
        headers.seek(tar.offset)
        end = headers.read(tarfile.BLOCKSIZE)
    except (ValueError, OverflowError, RecursionError) as error:
        # tarfile raises these for invalid numbers and for headers of headers.
        raise tarfile.ReadError(f"no valid header ({error})") from None
    if end != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"no valid header at byte {tar.offset}")


def _member_name(path: str, member: Member) -> str:
    return f"{printable(path)}:{printable(member.name)}"


class _Headers:
    """Bytes ``start : start + size`` of a file, for tarfile to read headers, at most ``left``."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size = file, start, size
        self._at, self.left = 0, MAX_HEADER_BYTES

    def read(self, n: int) -> bytes:
        self.left -= n
        if self.left < 0:
            raise tarfile.ReadError(f"headers of more than {MAX_HEADER_BYTES:,} bytes for a member")
        self._file.seek(self._start + self._at)
        content = self._file.read(max(0, min(n, self._size - self._at)))
        self._at += len(content)
        return content

    def seek(self, position: int) -> None:
        self._at = position

    def tell(self) -> int:
        return self._at


def _fault(entry: tarfile.TarInfo, name: str, size: int) -> str | None:
    if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or entry.issparse():
        return "not a regular file"
    if not name or name.startswith("/") or ".." in name.split("/"):
        return "a path that is absolute or has '..'"
    if entry.offset_data + entry.size > size:
        return "cut off"
    return None


TRAIN, VALIDATION = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT_FOLDER = "ILSVRC2012_devkit_t12"
DEVKIT = f"{DEVKIT_FOLDER}.tar.gz"
WHERE_FILES_GO = f"needs train/ and val/ (1,000 folders each) or {TRAIN}, {VALIDATION} and {DEVKIT}"
GROUND_TRUTH, META = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"
MAX_DEVKIT_BYTES = 16 * 2**20  # size limit of each of its files
MAX_UNPACKED_BYTES = 64 * 2**20
CLASSES = 1000
_EDGE_BYTES = 64 * 2**10
_CLASS_TAR = re.compile(r"n\d{8}\.tar")


def find_imagenet(root: str, *, layout: str, eval_share: float, on_corrupt: str = "stop") -> Images:
    """Find ImageNet below ``root``: `find_images` with 1,000 classes or, without it, the archives.

    The archives' classes are the WordNet ids that name the members of the training archive, sorted.
    So the labels are those of the extracted archives. Validation labels come from the development
    kit, an archive or an unpacked folder in ``root``. Listing the members' offsets takes half a
    minute for ImageNet's 1.3 million, and as many random reads; they are kept in the cache.

    ``layout`` "flat" raises ``ValueError``, and ``DamagedData`` names what cannot be used.
    """
    if layout == "flat":
        raise ValueError("layout='flat' is not allowed: ImageNet has classes")
    root = os.path.abspath(root)
    if split_folders(root):
        found = find_images(root, layout=layout, eval_share=eval_share, on_corrupt=on_corrupt)
        _check_classes(os.path.join(root, "train"), found.train.classes)
        return found
    train_path, validation_path = (os.path.join(root, name) for name in (TRAIN, VALIDATION))
    if not (os.path.isfile(train_path) or os.path.isfile(validation_path)):
        raise DataError(f"data.root={printable(root)}: no ImageNet here; {WHERE_FILES_GO}")
    prints = [_fingerprint(path) for path in (train_path, validation_path)]
    key = {"of": "imagenet tables", "train": prints[0], "validation": prints[1]}
    tables = load_arrays(key)
    if tables is None:
        images = [_row(validation_path, image, 0) for image in list_members(validation_path)]
        tables = [_list_train(train_path), image_table(images)]
        store_arrays(key, tables)
    _, firsts = np.unique(tables[0]["label"], return_index=True)
    names = tables[0]["name"][firsts].tolist()
    classes = tuple(name.partition(b".tar/")[0].decode() for name in names)
    _check_classes(train_path, classes)
    train = ImageSplit(train_path, tables[0], classes, archived=True)
    held_out = ImageSplit(validation_path, tables[1], classes, archived=True)
    held_out.labels[:] = _validation_labels(root, validation_path, len(held_out), classes)
    held_out = held_out.taken(np.argsort(held_out.labels, kind="stable"))
    content = hashed({"train": train, "val": held_out}, on_corrupt == "skip")
    rule = "the training and the validation archive"
    return Images(train, held_out, *content, rule, 0)


def _check_classes(path: str, classes: tuple[str, ...]) -> None:
    if len(classes) != CLASSES:
        raise DamagedData(f"{printable(path)}: {len(classes)} classes, ImageNet has {CLASSES}")


def _fingerprint(path: str) -> str:
    """Identify a large file quickly: size, time stamp, hash of the first and last 64 KiB."""
    try:
        with open(path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            edges = hashlib.sha256(os.pread(file.fileno(), _EDGE_BYTES, 0))
            edges.update(os.pread(file.fileno(), _EDGE_BYTES, max(0, found.st_size - _EDGE_BYTES)))
    except FileNotFoundError:
        raise DamagedData(f"{printable(path)}: no such file; {WHERE_FILES_GO}") from None
    except OSError as error:
        raise DamagedData(f"{printable(path)}: cannot be read: {error.strerror}") from error
    return f"{found.st_size} {found.st_mtime_ns} {edges.hexdigest()}"


def _list_train(path: str) -> np.ndarray:
    """Make an `image_table`; names are like "n01440764.tar/n01440764_18.JPEG"."""
    rows = []
    for label, archive in enumerate(list_members(path)):
        if not _CLASS_TAR.fullmatch(archive.name):
            raise DamagedData(f"{_member_name(path, archive)}: not the archive of a class")
        members = list_members(path, archive)
        if not members:
            raise DamagedData(f"{_member_name(path, archive)}: an empty class (no images in it)")
        inside = [one._replace(name=f"{archive.name}/{one.name}") for one in members]
        rows += [_row(path, member, label) for member in inside]
    return image_table(rows)


def _row(path: str, image: Member, label: int) -> Row:
    """Make a row of a table; raise DamagedData for a member that can be no image."""
    if os.path.splitext(image.name)[1].lower() not in IMAGE_EXTENSIONS:
        raise DamagedData(f"{_member_name(path, image)}: not an image by its name")
    if image.size > MAX_FILE_BYTES:
        raise DamagedData(too_large(_member_name(path, image)))
    if image.size == 0:
        raise DamagedData(f"{_member_name(path, image)}: an empty file (0 bytes)")
    return os.fsencode(image.name), image.size, label, image.start


def _validation_labels(root: str, archive: str, images: int, classes: tuple[str, ...]) -> list[int]:
    """Return the class of each validation image in the order of file names."""
    # Imported here because only archives need it.
    from scipy.io import loadmat

    ground_truth, meta = _read_devkit(root)
    where = f"{printable(root)}/{DEVKIT_FOLDER}"
    try:
        synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        # ILSVRC2012_ID, WNID, words, gloss, num_children: the classes are the leaves.
        wnid_of = {int(row[0]): str(row[1]) for row in synsets if int(row[4]) == 0}
    except Exception as error:
        # scipy reports a damaged file by a dozen kinds of exceptions.
        raise DamagedData(f"{where}/{META}: cannot be read as the table of classes") from error
    try:
        wnids = [wnid_of[int(line)] for line in ground_truth.split()]
    except (ValueError, KeyError) as error:
        raise DamagedData(f"{where}/{GROUND_TRUTH}: {error} is not the number of a class") from None
    shown = printable(archive)
    if len(wnids) != images:
        lines = f"{DEVKIT_FOLDER}/{GROUND_TRUTH} has {len(wnids)} lines"
        raise DamagedData(f"{shown}: {images} images, but {lines}")
    unknown = sorted(set(wnids) ^ set(classes))
    if unknown:
        only = "has images in one of training and validation only"
        raise DamagedData(f"{shown}: class {unknown[0]} {only}")
    label_of = {wnid: label for label, wnid in enumerate(classes)}
    return [label_of[wnid] for wnid in wnids]


def _read_devkit(root: str) -> list[bytes]:
    wanted = (GROUND_TRUTH, META)
    folder, archive = os.path.join(root, DEVKIT_FOLDER), os.path.join(root, DEVKIT)
    if os.path.isdir(folder):
        return [read_file(os.path.join(folder, name), MAX_DEVKIT_BYTES) for name in wanted]
    shown = printable(archive)
    if not os.path.isfile(archive):
        raise DamagedData(f"{shown}: no such file; {WHERE_FILES_GO}")
    try:
        with gzip.open(archive) as file:
            tar = file.read(MAX_UNPACKED_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedData(f"{shown}: cannot be read: {error}") from error
    if len(tar) > MAX_UNPACKED_BYTES:
        raise DamagedData(f"{shown}: unpacks to more than {MAX_UNPACKED_BYTES // 2**20} MiB")
    members = _members(io.BytesIO(tar), 0, len(tar), shown)
    places = {one.name.removeprefix(f"{DEVKIT_FOLDER}/"): one for one in members}
    for name in wanted:
        if name not in places:
            raise DamagedData(f"{shown}:{DEVKIT_FOLDER}/{name}: missing")
        if places[name].size > MAX_DEVKIT_BYTES:
            most = MAX_DEVKIT_BYTES // 2**20
            raise DamagedData(f"{shown}:{DEVKIT_FOLDER}/{name}: larger than {most} MiB")
    return [tar[places[name].start :][: places[name].size] for name in wanted]

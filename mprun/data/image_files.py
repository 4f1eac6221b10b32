"""The image files below a folder: which there are, how they are split, and one split's content.

Images are files with one of torchvision's extensions in any case. Decoding decides on their format,
so a PNG file named .jpg is read as a PNG. Names that begin with a dot are ignored (among them the
._ files of macOS). Files without an extension or with one of ``SIDE_EXTENSIONS`` are ignored and
counted. Any other file is refused by name: it is more likely an image in an unknown format or an
unfinished download than meant to be left out. Links are followed; a link to a folder that encloses
it is ignored.
"""

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from mprun.data.source import DamagedData, DataError, reading

# No photograph is nearly as large; the limit keeps a misnamed film or disk image out of memory.
MAX_FILE_BYTES = 256 * 2**20
# Up to this size the content is hashed; reading more would delay every start of a run.
CONTENT_HASH_BYTES = 256 * 2**20
# The first of these that exists is the held-out split.
HELD_OUT_FOLDERS = ("val", "valid", "validation", "test")
# torchvision.datasets.folder.IMG_EXTENSIONS
IMAGE_EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
)
SIDE_EXTENSIONS = frozenset(
    (
        *("", ".txt", ".md", ".rst", ".log", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml"),
        *(".yml", ".toml", ".ini", ".cfg", ".html", ".htm", ".pdf", ".py", ".sh", ".ipynb"),
        *(".mat", ".db", ".md5", ".sha1", ".sha256", ".zip", ".tar", ".gz", ".tgz", ".bz2"),
        *(".xz", ".zst", ".7z", ".rar"),
    )
)

Row = tuple[bytes, int, int]  # name, size in bytes, label


@dataclass(slots=True, eq=False)
class ImageSplit:
    """The names, sizes and labels of images, without their content.

    ``source`` is the folder that the names are relative to. ``table`` has a row for each image
    (`image_table`): "name" as the file system spells it, "size" in bytes and "label". "label"
    indexes ``classes``; without labels it is 0 and ``classes`` is empty. So forking or pickling a
    split costs one array, not a million objects.
    """

    source: str
    table: np.ndarray
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def labels(self) -> np.ndarray:
        """Return the labels, int64 ``[n]``."""
        return self.table["label"]

    def name(self, i: int) -> str:
        """Name image ``i`` for messages: ``root/train/n01440764/x.JPEG``, in one printable line."""
        return printable(self._path(i))

    def _path(self, i: int) -> bytes:
        return os.path.join(os.fsencode(self.source), self.table["name"][i])

    def taken(self, order: np.ndarray) -> "ImageSplit":
        """Return the images ``order`` (int64, or bool ``[n]``), in that order."""
        return replace(self, table=self.table[order])

    def read(self, i: int) -> bytes:
        """Read the encoded content of image ``i``, never empty; fork and spawn are safe.

        ``DamagedData`` names a file that is gone, with its folder or alone, unreadable or empty.
        """
        try:
            # Opening it each time costs about 5 us, and leaves no descriptor to share or close.
            with open(self._path(i), "rb", buffering=0) as file:
                content = file.readall()
        except FileNotFoundError:
            gone = self.name(i) if os.path.exists(self.source) else printable(self.source)
            raise DamagedData(f"{gone}: is gone") from None
        except OSError as error:
            raise DamagedData(f"{self.name(i)}: cannot be read: {error.strerror}") from error
        if not content:
            raise DamagedData(f"{self.name(i)}: is an empty file (0 bytes)")
        return content


def image_table(rows: Sequence[Row]) -> np.ndarray:
    """Make the ``table`` of an ``ImageSplit``."""
    width = max((len(row[0]) for row in rows), default=1)
    numbers = [(column, np.int64) for column in ("size", "label")]
    return np.array(rows, [("name", f"S{width}"), *numbers])


def printable(path: str | bytes) -> str:
    """Return ``path`` on one line, undecodable bytes and control characters as escapes."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def read_file(path: str, most: int = MAX_FILE_BYTES) -> bytes:
    """Read a file of up to ``most`` bytes; ``DamagedData`` says why it cannot be used."""
    with reading(f"{printable(path)}: cannot be read"), open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DamagedData(f"{printable(path)}: is larger than {most // 2**20} MiB")
    return content


@dataclass(slots=True)
class Images:
    """Both splits of a data set, and a hash of its content.

    ``sha256`` (hex) is over the class names and, file by file in the order of the listing, the
    path below root with the content (``sha256_of`` "content"). Above 256 MiB in all, the size in
    bytes replaces the content ("names and sizes"). The hash depends neither on where root lies nor
    on ``eval_share``. ``ignored`` counts the files that are no images.
    """

    train: ImageSplit
    held_out: ImageSplit
    sha256: str
    sha256_of: str
    split_rule: str
    ignored: int


def find_images(root: str, *, layout: str, eval_share: float, on_corrupt: str = "stop") -> Images:
    """Find the images below ``root``; order and labels depend on their names alone.

    ``layout="classes"``: one folder per class, class names sorted and numbered from 0, within a
    class sorted by folder, then by file name (all as in torchvision's ``ImageFolder``). The class
    folders lie in root/train and in the first of root/val, valid, validation, test; or in root
    itself. There a rule of hashes splits them, by the SHA-256 of a file's path below root (parts
    joined by "/"). A file is held out if the first 64 bits lie in the lowest ``eval_share`` of
    their range. So no file changes sides when others come or go, with one exception: if this would
    hold out a whole class, the file of the highest hash stays in training.

    ``layout="flat"``: every image at any depth, without labels, by folder and file name. root/train
    and a held-out folder are the splits if both exist, otherwise the rule of hashes splits them.

    ``DamagedData`` names a file or folder that cannot be used. With ``on_corrupt="skip"`` files
    that are empty or unreadable stay in the splits, for the reader to skip.
    """
    root, flat, skip = os.path.abspath(root), layout == "flat", on_corrupt == "skip"
    folders = split_folders(root)
    has_train = "train" in folders
    others = folders[has_train:]
    if not folders or (flat and not (has_train and others)):
        whole, ignored = _list_images(root, "", flat, skip)
        rule = f"SHA-256 of the path below {eval_share:g}"
        if not flat:
            rule += ", one file of each class stays in training"
        train, held_out = _split_by_hash(whole, eval_share)
        return Images(train, held_out, *hashed({"": whole}, skip), rule, ignored)
    if not has_train:
        missing = printable(os.path.join(root, "train"))
        raise DamagedData(f"{missing}: no such folder, but {others[0]}/ exists")
    if not others:
        wanted = ", ".join(f"{name}/" for name in HELD_OUT_FOLDERS)
        raise DamagedData(
            f"{printable(root)}: contains train/ but no held-out split; looked for {wanted}"
        )
    listed = {folder: _list_images(root, folder, flat, skip) for folder in folders[:2]}
    parts = {folder: split for folder, (split, _) in listed.items()}
    _check_classes(root, parts)
    train, held_out = parts.values()
    ignored = sum(count for _, count in listed.values())
    rule = f"folders train and {others[0]}"
    return Images(train, held_out, *hashed(parts, skip), rule, ignored)


_CLASSES_OF_IMAGENET = 1000


def find_imagenet(root: str, *, layout: str, eval_share: float, on_corrupt: str = "stop") -> Images:
    """Find ImageNet below ``root``: `find_images` with split folders and 1,000 classes.

    ``layout`` "flat" raises ``ValueError``, and ``DamagedData`` names what cannot be used.
    """
    if layout == "flat":
        raise ValueError("layout='flat' is not allowed: ImageNet has classes")
    root = os.path.abspath(root)
    if not split_folders(root):
        extract = "torchvision.datasets.ImageNet(root, split) extracts the archives into them"
        wanted = "needs train/ and val/ with 1,000 folders each"
        raise DataError(f"data.root={printable(root)}: contains no ImageNet; {wanted}; {extract}")
    found = find_images(root, layout=layout, eval_share=eval_share, on_corrupt=on_corrupt)
    if (count := len(found.train.classes)) != _CLASSES_OF_IMAGENET:
        where = printable(os.path.join(root, "train"))
        raise DamagedData(
            f"{where}: has {count} classes, must have {_CLASSES_OF_IMAGENET} as in ImageNet"
        )
    return found


def split_folders(root: str) -> list[str]:
    """Return which of train and the held-out folders exist in ``root``, in this order."""
    names = ("train", *HELD_OUT_FOLDERS)
    return [name for name in names if os.path.isdir(os.path.join(root, name))]


def _list_images(root: str, top: str, flat: bool, skip: bool) -> tuple[ImageSplit, int]:
    """List the images below root/``top`` (`find_images`), and count the ignored files."""
    tables = []  # one a class: rows of a million images would take 300 MB
    empty = "no images in it, at any depth" if flat else "an empty class folder (no images in it)"
    try:
        classes, ignored = ((), 0) if flat else _classes(os.path.normpath(os.path.join(root, top)))
        for label, name in enumerate(classes or [""]):
            folder = os.path.join(top, name) if name else top
            images, passed_over = _tree(root, folder, skip)
            if not images:
                path = os.path.normpath(os.path.join(root, folder))
                raise DamagedData(f"{printable(path)}: {empty}")
            tables.append(image_table([(image, size, label) for image, size in images]))
            ignored += passed_over
    except OSError as error:
        where = printable(error.filename)
        raise DamagedData(f"{where}: cannot be listed: {error.strerror}") from error
    return ImageSplit(root, np.concatenate(tables), classes), ignored


def _classes(path: str) -> tuple[tuple[str, ...], int]:
    """Return the class folders in ``path``, sorted, and the number of ignored files."""
    folders, beside, ignored = _entries(path)
    if not folders:
        if beside:
            hint = "for images without labels set data.layout=flat"
            raise DataError(
                f"data.root: {printable(path)}: contains images but no class folders; {hint}"
            )
        raise DataError(f"data.root: {printable(path)}: contains no class folders and no images")
    if beside:
        first = printable(min(image.path for image in beside))
        raise DamagedData(
            f"{first}: is an image outside of the class folders; must be in one of them"
        )
    return tuple(sorted(entry.name for entry in folders)), ignored


def _tree(root: str, top: str, skip: bool) -> tuple[list[tuple[bytes, int]], int]:
    """Return path and size of the images below root/``top``, and the number of other files."""
    above, folder = set(), top
    while folder:
        folder = os.path.dirname(folder)
        above.add(_identity(os.path.join(root, folder)))
    found, ignored = [], 0
    pending = [(top, frozenset(above))]
    while pending:
        folder, enclosing = pending.pop()
        path = os.path.join(root, folder)
        identity = _identity(path)
        if identity in enclosing:
            continue
        folders, images, passed_over = _entries(path)
        found += [(folder, image.name, size_of(image.path, skip)) for image in images]
        pending += [(os.path.join(folder, one.name), enclosing | {identity}) for one in folders]
        ignored += passed_over
    paths = [
        (os.fsencode(os.path.join(folder, name)), size) for folder, name, size in sorted(found)
    ]
    return paths, ignored


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _entries(path: str) -> tuple[list[os.DirEntry], list[os.DirEntry], int]:
    """Return the folders and the images in ``path``, and the number of side files."""
    folders, images, ignored = [], [], 0
    with os.scandir(path) as entries:
        for entry in entries:
            extension = os.path.splitext(entry.name)[1].lower()
            if entry.name.startswith("."):
                pass
            elif entry.is_dir():
                folders.append(entry)
            elif extension in IMAGE_EXTENSIONS:
                images.append(entry)
            elif extension in SIDE_EXTENSIONS:
                ignored += 1
            else:
                raise DamagedData(
                    f"{printable(entry.path)}: is neither an image of a known format nor a side "
                    "file such as .txt; move it to another folder"
                )
    return folders, images, ignored


def size_of(path: str, skip: bool = False) -> int:
    """Return the size of an image's file; ``DamagedData`` if it cannot be one.

    ``skip``: an empty file is left to whoever reads it.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        dangling = os.path.islink(path)
        what = "a link to nothing" if dangling else f"cannot be read: {error.strerror}"
        raise DamagedData(f"{printable(path)}: {what}") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedData(f"{printable(path)}: is not a regular file")
    if found.st_size > MAX_FILE_BYTES:
        largest = f"larger than {MAX_FILE_BYTES // 2**20} MiB, which no image should be"
        raise DamagedData(f"{printable(path)}: {largest}")
    if found.st_size == 0 and not skip:
        raise DamagedData(f"{printable(path)}: is an empty file (0 bytes)")
    return found.st_size


def _check_classes(root: str, parts: dict[str, ImageSplit]) -> None:
    # First the classes of the held-out split that training lacks.
    for other, folder in permutations(parts):
        unknown = sorted(set(parts[folder].classes) - set(parts[other].classes))
        if unknown:
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            first, there = (os.path.join(root, folder, unknown[0]), os.path.join(root, other))
            raise DamagedData(
                f"{printable(first)}: is a class{more} that does not exist in {printable(there)}"
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
        few = f"{len(whole)} images are too few, eval_share={eval_share:g} holds none of them out"
        raise DamagedData(f"{printable(whole.source)}: {few}")
    return whole.taken(~held_out), whole.taken(held_out)


def hashed(parts: dict[str, ImageSplit], skip: bool) -> tuple[str, str]:
    """Return ``sha256`` and ``sha256_of`` (`Images`) of a data set's folders."""
    sizes = sum(int(split.table["size"].sum()) for split in parts.values())
    whole_content = sizes <= CONTENT_HASH_BYTES
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(b"%d:" % len(part) + part)

    for wanted in next(iter(parts.values())).classes:
        add(os.fsencode(wanted))
    for split in parts.values():
        for i, row in enumerate(split.table):
            name, size, _ = row.item()
            add(name)
            if not whole_content:
                digest.update(b"%d\n" % size)
                continue
            try:
                content = split.read(i)
            except DamagedData:
                if not skip:
                    raise
                content = b""
            add(content)
    return digest.hexdigest(), "content" if whole_content else "names and sizes"

"""The image files below a folder, by name and size, and one split of them with its content.

Images are files with one of torchvision's extensions in any case. Decoding decides on their format,
so a PNG file named .jpg is read as a PNG. Names that begin with a dot are ignored (among them the
._ files of macOS). Files without an extension or with one of ``SIDE_EXTENSIONS`` are ignored and
counted. Any other file is refused by name: it is more likely an image in an unknown format or an
unfinished download than meant to be left out. Links are followed; a link to a folder that encloses
it is ignored.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mprun.data.source import DamagedData

# No photograph is nearly as large; the limit keeps a misnamed film or disk image out of memory.
MAX_FILE_BYTES = 256 * 2**20


@dataclass(slots=True, eq=False)
class ImageSplit:
    """The names, sizes and labels of images, without their content.

    ``source`` is the folder that the names are relative to or, if ``archived``, an archive.
    ``table`` has a row for each image (`image_table`): "name", "size" in bytes, "label" and
    "start", the image's first byte in the archive. "label" indexes ``classes``; without labels it
    is 0 and ``classes`` is empty. So forking or pickling a split costs one array, not a million
    objects.
    """

    source: str
    table: np.ndarray
    classes: tuple[str, ...]
    archived: bool = False

    def __len__(self) -> int:
        return len(self.table)

    @property
    def labels(self) -> np.ndarray:
        """Return the labels, int64 ``[n]``."""
        return self.table["label"]

    def relative_name(self, i: int) -> bytes:
        """Return the path below ``source`` or the name within it, as the file system spells it."""
        return self.table["name"][i]

    def name(self, i: int) -> str:
        """Name image ``i`` for messages: ``root/train/n01440764/x.JPEG``, ``archive.tar:member``.

        The name is one printable line, whatever characters the file system allows.
        """
        separator = b":" if self.archived else os.fsencode(os.sep)
        return printable(os.fsencode(self.source) + separator + self.relative_name(i))

    def taken(self, order: np.ndarray) -> "ImageSplit":
        """Return the images ``order`` (int64, or bool ``[n]``), in that order."""
        return replace(self, table=self.table[order])

    def read(self, i: int) -> bytes:
        """Read the encoded content of image ``i``, never empty; fork and spawn are safe.

        Raises:
            DamagedData: The file or its folder is gone, it is unreadable or empty, or the archive
                ends before it; the message names the file.
        """
        try:
            content = self._content(i)
        except FileNotFoundError:
            if not os.path.exists(self.source):
                raise DamagedData(f"{printable(self.source)}: is gone") from None
            raise DamagedData(f"{self.name(i)}: is gone") from None
        except OSError as error:
            raise DamagedData(f"{self.name(i)}: cannot be read: {error.strerror}") from error
        if self.archived and len(content) != self.table["size"][i]:
            raise DamagedData(f"{self.name(i)}: the archive ends within it")
        if not content:
            raise DamagedData(f"{self.name(i)}: an empty file (0 bytes)")
        return content

    def _content(self, i: int) -> bytes:
        if not self.archived:
            path = os.path.join(os.fsencode(self.source), self.relative_name(i))
            with open(path, "rb", buffering=0) as file:
                return file.readall()
        # Opening it for each image costs about 5 us, and leaves no descriptor to share or close.
        with open(self.source, "rb", buffering=0) as file:
            row = self.table[i]
            return os.pread(file.fileno(), int(row["size"]), int(row["start"]))


def image_table(rows: Sequence[tuple[bytes, int, int, int]]) -> np.ndarray:
    """Make the ``table`` of an ``ImageSplit`` from rows of (name, size, label, start)."""
    width = max((len(row[0]) for row in rows), default=1)
    numbers = [(column, np.int64) for column in ("size", "label", "start")]
    return np.array(rows, [("name", f"S{width}"), *numbers])


def printable(path: str | bytes) -> str:
    """Return ``path`` on one line, undecodable bytes and control characters as escapes."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def too_large(name: str) -> str:
    """Return the message for a file over ``MAX_FILE_BYTES``."""
    return f"{name}: larger than {MAX_FILE_BYTES // 2**20} MiB, which no image should be"


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


def list_images(root: str, top: str, flat: bool, keep_damaged: bool) -> tuple[ImageSplit, int]:
    """List the images below root/``top``, and count the ignored files.

    The images are those in its class folders, by class name, folder and file name; with ``flat``
    those at any depth, by folder and file name, without classes. With ``keep_damaged`` empty files
    are listed like others.

    Raises:
        DamagedData: There are no images, no or empty class folders, images beside the class
            folders, or unusable files; the message names the file or folder.
    """
    classes, ignored = ((), 0) if flat else _classes(os.path.normpath(os.path.join(root, top)))
    empty = "no images in it, at any depth" if flat else "an empty class folder (no images in it)"
    rows: list[tuple[bytes, int, int, int]] = []
    for label, name in enumerate(classes or [""]):
        folder = os.path.join(top, name) if name else top
        images, passed_over = _tree(root, folder, keep_damaged)
        if not images:
            raise DamagedData(f"{printable(os.path.normpath(os.path.join(root, folder)))}: {empty}")
        rows += [(image, size, label, 0) for image, size in images]
        ignored += passed_over
    return ImageSplit(root, image_table(rows), classes), ignored


def _classes(path: str) -> tuple[tuple[str, ...], int]:
    """Return the class folders in ``path``, sorted, and the number of ignored files."""
    classes, beside, ignored = [], [], 0
    for entry in _entries(path):
        if entry.is_dir():
            classes.append(entry.name)
        elif _extension(entry.name) in IMAGE_EXTENSIONS:
            beside.append(entry.name)
        else:
            _check_side_file(entry)
            ignored += 1
    if not classes:
        hint = "; without labels: data.layout=flat" if beside else ""
        found = "images but no class folders" if beside else "no class folders and no images"
        raise DamagedData(f"{printable(path)}: {found} in it{hint}")
    if beside:
        raise DamagedData(
            f"{printable(os.path.join(path, min(beside)))}: an image beside the class folders, "
            "not in one of them"
        )
    return tuple(sorted(classes)), ignored


def _tree(root: str, top: str, keep_damaged: bool) -> tuple[list[tuple[bytes, int]], int]:
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
        for entry in _entries(path):
            if _extension(entry.name) in IMAGE_EXTENSIONS and not entry.is_dir():
                found.append((folder, entry.name, _size(entry, keep_damaged)))
            elif entry.is_dir():
                pending.append((os.path.join(folder, entry.name), enclosing | {identity}))
            else:
                _check_side_file(entry)
                ignored += 1
    images = [
        (os.fsencode(os.path.join(folder, name)), size) for folder, name, size in sorted(found)
    ]
    return images, ignored


def _entries(path: str) -> list[os.DirEntry]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DamagedData(f"{printable(path)}: cannot be listed: {error.strerror}") from error


def _identity(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise DamagedData(f"{printable(path)}: cannot be listed: {error.strerror}") from error
    return found.st_dev, found.st_ino


def _size(entry: os.DirEntry, keep_damaged: bool) -> int:
    try:
        found = entry.stat()
    except OSError as error:
        dangling = entry.is_symlink()
        what = "a link to nothing" if dangling else f"cannot be read: {error.strerror}"
        raise DamagedData(f"{printable(entry.path)}: {what}") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedData(f"{printable(entry.path)}: not a regular file")
    if found.st_size > MAX_FILE_BYTES:
        raise DamagedData(too_large(printable(entry.path)))
    if found.st_size == 0 and not keep_damaged:
        raise DamagedData(f"{printable(entry.path)}: an empty file (0 bytes)")
    return found.st_size


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _check_side_file(entry: os.DirEntry) -> None:
    if _extension(entry.name) not in SIDE_EXTENSIONS:
        raise DamagedData(
            f"{printable(entry.path)}: neither an image of a known format nor a side file such as "
            ".txt; move it elsewhere"
        )

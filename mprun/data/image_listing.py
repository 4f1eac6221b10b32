"""The image files below a folder, by name and size, and one split of them with its content.

Images are files with one of torchvision's extensions in any case; what they hold is decided when
they are decoded, so a PNG file named .jpg is read as the PNG that it is. Names that begin with a
dot are passed over (among them the ._ files of macOS). Files without an extension and those with
one of ``SIDE_EXTENSIONS`` are passed over and counted. Anything else is refused by name: it is
more likely an image in a format that is not read, or an unfinished download, than meant to be
left out. Links are followed; a link to a folder that encloses it is passed over.
"""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mprun.data.source import DamagedData

# No photograph comes near this; it keeps a misnamed film or disk image out of memory.
MAX_FILE_BYTES = 256 * 2**20


@dataclass(slots=True, eq=False)
class ImageSplit:
    """``n`` images, named and labelled, of which nothing is held but names and numbers.

    ``source`` is the folder that the names are relative to or, where ``starts`` is given, an
    archive whose bytes ``starts[i] : starts[i] + sizes[i]`` are image ``i``. Names lie in one
    ``bytes`` object (that of image ``i`` is ``names[ends[i - 1] : ends[i]]``), so that forking or
    pickling a split costs three arrays and a blob, not a million objects.

    ``labels`` int64 ``[n]`` index ``classes``; zeros, with ``classes`` empty, where images have no
    labels. ``ends``, ``sizes`` (bytes) and ``starts`` are int64 ``[n]``.
    """

    source: str
    names: bytes
    ends: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    starts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def relative_name(self, i: int) -> bytes:
        """The path below ``source`` or the name within it, as the file system spells it."""
        return self.names[self.ends[i - 1] if i else 0 : self.ends[i]]

    def name(self, i: int) -> str:
        """What messages call image ``i``: ``root/train/n01440764/x.JPEG``, ``archive.tar:member``.

        One printable line, whatever characters the file system allows.
        """
        separator = os.sep if self.starts is None else ":"
        return printable(os.fsencode(self.source) + separator.encode() + self.relative_name(i))

    def taken(self, order: np.ndarray) -> "ImageSplit":
        """The images ``order`` (int64, or bool ``[n]``), in that order."""
        chosen = np.arange(len(self))[order].tolist()
        names, ends = pack_names(self.relative_name(i) for i in chosen)
        starts = None if self.starts is None else self.starts[order]
        sizes, labels = self.sizes[order], self.labels[order]
        return ImageSplit(self.source, names, ends, sizes, labels, self.classes, starts)

    def read(self, i: int) -> bytes:
        """The encoded content of image ``i``, never empty. Safe in forked and spawned processes.

        Raises ``DamagedData`` naming the file where it or its folder is gone, is unreadable or
        empty, or where the archive ends before it.
        """
        try:
            content = self._content(i)
        except FileNotFoundError:
            if not os.path.exists(self.source):
                raise DamagedData(f"{printable(self.source)}: is gone") from None
            raise DamagedData(f"{self.name(i)}: is gone") from None
        except OSError as error:
            raise DamagedData(f"{self.name(i)}: cannot be read: {error.strerror}") from error
        if self.starts is not None and len(content) != self.sizes[i]:
            raise DamagedData(f"{self.name(i)}: the archive ends within it")
        if not content:
            raise DamagedData(f"{self.name(i)}: an empty file (0 bytes)")
        return content

    def _content(self, i: int) -> bytes:
        if self.starts is None:
            path = os.path.join(os.fsencode(self.source), self.relative_name(i))
            with open(path, "rb", buffering=0) as file:
                return file.readall()
        # Opened anew for each image: about 5 us, and no descriptor to share or to close.
        descriptor = os.open(self.source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, int(self.sizes[i]), int(self.starts[i]))
        finally:
            os.close(descriptor)


def pack_names(names: Iterable[bytes]) -> tuple[bytes, np.ndarray]:
    """``(names, ends)`` of an ``ImageSplit``."""
    names = list(names)
    return b"".join(names), np.cumsum([len(name) for name in names], dtype=np.int64)


def printable(path: str | bytes) -> str:
    """``path`` on one line: undecodable bytes and control characters as escapes."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def too_large(name: str) -> str:
    """The message for a file over ``MAX_FILE_BYTES``."""
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


@dataclass(slots=True)
class Listing:
    """Images in a fixed order: paths below root, sizes in bytes, labels (0 without classes)."""

    classes: tuple[str, ...] = ()
    names: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    ignored: int = 0


def list_classes(root: str, top: str, keep_damaged: bool) -> Listing:
    """The images in the class folders of root/``top``, by class name, folder and file name.

    With ``keep_damaged`` empty files are listed like others. Raises ``DamagedData`` naming the
    file or folder: no or empty class folders, images beside the class folders, and files that
    cannot be used.
    """
    path = os.path.join(root, top) if top else root
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
    listing = Listing(tuple(sorted(classes)), ignored=ignored)
    for label, name in enumerate(listing.classes):
        before = len(listing.names)
        _add_tree(listing, root, os.path.join(top, name), label, keep_damaged)
        if len(listing.names) == before:
            raise DamagedData(
                f"{printable(os.path.join(path, name))}: an empty class folder (no images in it)"
            )
    return listing


def list_flat(root: str, top: str, keep_damaged: bool) -> Listing:
    """All images below root/``top`` at any depth, by folder and file name; label 0.

    Raises ``DamagedData`` naming a file that cannot be used, or the folder if it has no images.
    """
    listing = Listing()
    _add_tree(listing, root, top, 0, keep_damaged)
    if not listing.names:
        path = os.path.join(root, top) if top else root
        raise DamagedData(f"{printable(path)}: no images in it, at any depth")
    return listing


def _add_tree(listing: Listing, root: str, top: str, label: int, keep_damaged: bool) -> None:
    folders: list[tuple[str, list[tuple[str, int]]]] = []
    above, folder = set(), top
    while folder:
        folder = os.path.dirname(folder)
        above.add(_identity(os.path.join(root, folder)))
    pending: list[tuple[str, frozenset]] = [(top, frozenset(above))]
    while pending:
        folder, enclosing = pending.pop()
        path = os.path.join(root, folder)
        identity = _identity(path)
        if identity in enclosing:
            continue
        files = []
        for entry in _entries(path):
            if _extension(entry.name) in IMAGE_EXTENSIONS and not entry.is_dir():
                files.append((entry.name, _size(entry, keep_damaged)))
            elif entry.is_dir():
                pending.append((os.path.join(folder, entry.name), enclosing | {identity}))
            else:
                _check_side_file(entry)
                listing.ignored += 1
        folders.append((folder, sorted(files)))
    for folder, files in sorted(folders):
        prefix = os.fsencode(os.path.join(folder, ""))
        listing.names += [prefix + os.fsencode(name) for name, _ in files]
        listing.sizes += [size for _, size in files]
        listing.labels += [label] * len(files)


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

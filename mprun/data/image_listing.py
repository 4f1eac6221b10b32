"""The image files below a folder, by name and size, and what is not counted among them.

Images are files with one of torchvision's extensions in any case; what they hold is decided when
they are decoded, so a PNG file named .jpg is read as the PNG that it is. Names that begin with a
dot are passed over (among them the ._ files of macOS). Files without an extension and those with
one of ``SIDE_EXTENSIONS`` are passed over and counted. Anything else is refused by name: it is
more likely an image in a format that is not read, or an unfinished download, than meant to be
left out. Links are followed; a link to a folder that encloses it is passed over.
"""

import os
import stat
from dataclasses import dataclass, field

from mprun.data.errors import DamagedData
from mprun.data.image_split import MAX_FILE_BYTES, printable, too_large

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

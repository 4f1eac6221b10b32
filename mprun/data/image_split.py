"""One split of an image data set: where each image lies, and its bytes on demand."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mprun.data.errors import DamagedData

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

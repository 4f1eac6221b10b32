"""The members of a tar archive by place, checked, for reading without extraction."""

import os
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from mprun.data.errors import DamagedData
from mprun.data.image_split import printable

# Seven times the training images of ImageNet; stops an archive made to never end.
MAX_MEMBERS = 10_000_000
# Of all headers of one member, which tarfile reads whole: a path takes 4 KiB, attributes 64 KiB.
MAX_HEADER_BYTES = 2**20


class Member(NamedTuple):
    """A regular file within an archive: bytes ``start : start + size`` of the archive file."""

    name: str
    start: int
    size: int


def list_members(path: str, inside: Member | None = None) -> list[Member]:
    """The regular files of an uncompressed tar, sorted by name, at their places in ``path``.

    ``inside``: a member of ``path`` that is a tar itself and is listed instead. Folders are
    passed over. Costs 25 us a member, nearly all of it ``tarfile``'s parsing, and one random
    read.

    Raises ``DamagedData`` naming archive and member for a link, device or sparse file, an absolute
    path or "..", a name that comes twice, headers of more than a MiB for one member, more than 10
    million members, and for an archive that is no tar or ends early.
    """
    shown = member_name(path, inside) if inside else printable(path)
    try:
        with open(path, "rb", buffering=0) as file:
            start, size = inside[1:] if inside else (0, os.fstat(file.fileno()).st_size)
            return sorted(_members(_Window(file.fileno(), start, size), shown, start, size))
    except OSError as error:
        raise DamagedData(f"{shown}: cannot be read: {error.strerror}") from error
    except tarfile.TarError as error:
        raise DamagedData(f"{shown}: a damaged tar archive: {error}") from error


def entries(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The members of an uncompressed tar in its order, in memory that does not grow with it.

    Raises ``tarfile.TarError`` for headers of more than ``MAX_HEADER_BYTES`` before one member and
    where no valid header follows: tarfile takes a damaged one for the end, and members would be
    missing.
    """
    reads = _BoundedReads(file)
    try:
        tar = tarfile.open(fileobj=reads, mode="r:")
        while (entry := _next(tar)) is not None:
            tar.members = []  # tarfile would keep them all, at a kilobyte each
            reads.left = MAX_HEADER_BYTES
            yield entry
        reads.seek(tar.offset)
        end = reads.read(tarfile.BLOCKSIZE)
    except (ValueError, OverflowError, RecursionError) as error:
        # tarfile's, of numbers that are none and of headers for headers.
        raise tarfile.ReadError(f"no valid header ({error})") from None
    if end != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"no valid header at byte {tar.offset}")


def _next(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    entry = tar.next()
    if entry is not None and entry.size < 0:
        raise tarfile.ReadError(f"a member of {entry.size} bytes")
    return entry


def member_name(path: str, member: Member) -> str:
    """What messages call ``member`` of the archive ``path``."""
    return f"{printable(path)}:{printable(member.name)}"


class _BoundedReads:
    """``file`` as tarfile reads headers from it, no more than ``left`` bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.left = file, MAX_HEADER_BYTES
        self.seek, self.tell = file.seek, file.tell

    def read(self, n: int) -> bytes:
        self.left -= n
        if self.left < 0:
            raise tarfile.ReadError(f"headers of more than {MAX_HEADER_BYTES:,} bytes for a member")
        return self._file.read(n)


class _Window:
    """Bytes ``start : start + size`` of a file as what ``tarfile`` reads from."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        self._descriptor, self._start, self._size, self._at = descriptor, start, size, 0

    def read(self, n: int) -> bytes:
        n = max(0, min(n, self._size - self._at))
        content = os.pread(self._descriptor, n, self._start + self._at)
        self._at += len(content)
        return content

    def seek(self, position: int) -> None:
        self._at = position

    def tell(self) -> int:
        return self._at


def _members(window: _Window, shown: str, start: int, size: int) -> list[Member]:
    members, seen = [], set()
    for entry in entries(window):
        if entry.isdir():
            continue
        name = entry.name.removeprefix("./")
        fault = _fault(entry, name, size)
        if name in seen:
            fault = "a name that comes twice"
        if fault:
            raise DamagedData(f"{shown}:{printable(name)}: {fault} in an archive")
        seen.add(name)
        if len(seen) > MAX_MEMBERS:
            raise DamagedData(f"{shown}: more than {MAX_MEMBERS:,} members")
        members.append(Member(name, start + entry.offset_data, entry.size))
    return members


def _fault(entry: tarfile.TarInfo, name: str, size: int) -> str | None:
    if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or entry.issparse():
        return "not a regular file"
    if not name or name.startswith("/") or ".." in name.split("/"):
        return "a path that is absolute or has '..'"
    if entry.offset_data + entry.size > size:
        return "cut off"
    return None

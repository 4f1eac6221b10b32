"""A cache on disk: encoded text, which is read from there, and pixels, which only save time."""

import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from mprun.data.source import DamagedData, DataError, reading
from mprun.errors import Resource
from mprun.file_system import FAILING, discard, sync, sync_folder

FORMAT = 1
# Hashing costs about 1 s per GB. Smaller files are hashed at every start, larger ones when their
# size or times have changed.
REMEMBERED_ABOVE = 16 << 20
ANNOUNCED_ABOVE = 1 << 30  # a pass takes seconds from here on, before anything else is printed
# A file may change twice within one tick of the file system's clock and keep its time.
_SETTLED_NS = 2_000_000_000
# A killed writer leaves its temporary file behind.
_ABANDONED_S = 3600

Key = Mapping[str, str | int | bool | None]
Blocks = Iterable[np.ndarray | bytes | str]  # a str is a line


class Cache:
    """Files of int32 tokens (little-endian), words (UTF-8, one a line) or pixels, with headers.

    ``key`` names an entry's inputs (hashes of contents, options). The hash of the key is the file's
    name, ``key["kind"]`` its ending. The JSON header beside it holds the format version, the key,
    the size and the SHA-256 of the entry, which is used if all of these agree. In entries of more
    than ``REMEMBERED_ABOVE`` bytes a bit that flips on the disk goes unnoticed.

    Entries are written under a temporary name, synced and renamed, the header last. Processes that
    make the same entry at the same time replace each other's by equal ones. ``folder`` None stands
    for ``mprun/<what>`` in $XDG_CACHE_HOME or ~/.cache.
    """

    def __init__(self, folder: str | Path | None, what: str = "text") -> None:
        if folder is None:
            base = Path(os.environ.get("XDG_CACHE_HOME", ""))
            # The XDG base directory specification says to ignore relative paths.
            try:
                folder = (base if base.is_absolute() else Path.home() / ".cache") / "mprun" / what
            except RuntimeError:
                none = "this user has no home directory"
                raise DataError(f"data.cache=null: {none}; name a folder, or set HOME") from None
        self.folder = Path(folder)

    def made(self, key: Key, blocks: Callable[[], Blocks]) -> Path:
        """Return the entry of ``key``; store it from ``blocks()`` if there is none."""
        return self.find(key) or self.store(key, blocks())

    def find(self, key: Key) -> Path | None:
        """Return the entry of ``key``; None if it is missing or damaged (reported on stderr)."""
        path = self._path(key)
        header = _json(path.with_suffix(".json"))
        try:
            size = path.stat().st_size
            if header is None:
                return None
            wanted = {"format": FORMAT, "key": key, "bytes": size}
            if {name: header.get(name) for name in wanted} == wanted:
                if header.get("sha256") == self.content_sha256(path):
                    return path
        except (OSError, DamagedData):
            return None
        print(f"mprun: {path}: damaged, made again", file=sys.stderr)
        return None

    def store(self, key: Key, blocks: Blocks) -> Path:
        """Write the ``blocks`` one after the other as the entry of ``key``; return its path.

        An error, of ``blocks`` too, leaves nothing behind: ``DataError`` if the folder cannot be
        written, ``Resource`` if the disk is full.
        """
        path = self._path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(f".{path.stem}.*"):
                with suppress(FileNotFoundError):  # another process was faster
                    if time.time() - left.stat().st_mtime > _ABANDONED_S:
                        discard(left)
            size, sha256 = _write(path, blocks)
            header = {"format": FORMAT, "key": key, "bytes": size, "sha256": sha256}
            _write(path.with_suffix(".json"), [json.dumps(header, indent=1).encode()])
        except OSError as error:
            reason = f"{self.folder}: {error.strerror}"
            if error.errno in FAILING:
                raise Resource(
                    f"data.cache={reason}; mprun needs this folder for encoded text"
                ) from error
            raise DataError(f"data.cache={reason}; name a folder for the encoded text") from error
        return path

    def content_sha256(self, path: Path) -> str:
        """Return the SHA-256 (hex) of a file; raise ``DamagedData`` if it cannot be read."""
        with reading(path):
            status = os.stat(path)
            if status.st_size <= REMEMBERED_ABOVE:
                return _sha256(path)
            real = os.path.realpath(path)
            state = {
                "path": real,
                "bytes": status.st_size,
                "modified_ns": status.st_mtime_ns,
                "changed_ns": status.st_ctime_ns,
            }
            name = hashlib.sha256(os.fsencode(real)).hexdigest()[:32]
            memory = self.folder / "hashes" / f"{name}.json"
            remembered = _json(memory)
            if remembered is not None and remembered.items() >= state.items():
                return remembered["sha256"]
            announce("hashing", path, status.st_size)
            sha256 = _sha256(path)
        newest = max(status.st_mtime_ns, status.st_ctime_ns)
        if abs(time.time_ns() - newest) > _SETTLED_NS:
            with suppress(OSError):  # the next start hashes again
                memory.parent.mkdir(parents=True, exist_ok=True)
                _write(memory, [json.dumps({**state, "sha256": sha256}, indent=1).encode()])
        return sha256

    def _path(self, key: Key) -> Path:
        canonical = json.dumps({"format": FORMAT, **key}, sort_keys=True)
        name = hashlib.sha256(canonical.encode()).hexdigest()[:32]
        return self.folder / f"{name}.{key['kind']}"


def announce(doing: str, path: Path, size: int) -> None:
    """Say on stderr what is done with a large file, once for each pass over it."""
    if size > ANNOUNCED_ABOVE:
        print(f"mprun: {doing} {path} ({size / 1e9:.1f} GB)", file=sys.stderr)


def _json(path: Path) -> dict | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, blocks: Blocks) -> tuple[int, str]:
    """Replace ``path`` by ``blocks`` at once, synced; return size in bytes and SHA-256 (hex)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    size, digest = 0, hashlib.sha256()
    try:
        with open(temporary, "wb") as file:
            for block in blocks:
                if isinstance(block, str):
                    block = f"{block}\n".encode()
                content = block.data if isinstance(block, np.ndarray) else block
                size += file.write(content)
                digest.update(content)
            sync(file)
        os.replace(temporary, path)
    finally:
        discard(temporary)
    sync_folder(path.parent)
    return size, digest.hexdigest()

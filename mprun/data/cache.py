"""What is slow to make from data, on disk, found again by what it was made from.

Encoded text, which a source reads from there, and arrays (decoded pixels, places within archives),
which only save time.
"""

import errno
import hashlib
import io
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from mprun.data.source import DamagedData, DataError
from mprun.errors import Resource

FORMAT = 1
# Hashing costs about 1 s per GB. Smaller files are hashed at every start, larger ones when their
# size or times have changed.
REMEMBERED_ABOVE = 16 << 20
# Within one tick of the file system's clock a file may change and keep its time.
_SETTLED_NS = 2_000_000_000
# A writer that was killed leaves its temporary file behind.
_ABANDONED_S = 3600
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

Key = Mapping[str, str | int | bool | None]


class Cache:
    """Files of int32 tokens (little-endian), words (UTF-8, one a line) or arrays, with headers.

    ``key`` says what an entry was made from (hashes of contents, options); its own hash is the
    file's name, with ``key["kind"]`` as the ending. The header beside it, JSON, holds the format
    version, the key, the size and the SHA-256 of the entry. An entry is used if all of these
    agree. Up to ``REMEMBERED_ABOVE`` bytes the whole entry is hashed each time; a larger one is
    hashed once and again whenever its size, its modification time or its change time differs: a
    bit that flips on the disk of such a file is not noticed.

    Entries are written under a temporary name, synced and renamed, the header last. Processes that
    make the same entry at once replace each other's by equal ones.

    ``folder`` None stands for ``mprun/<what>`` in $XDG_CACHE_HOME or ~/.cache.
    """

    def __init__(self, folder: str | Path | None, what: str = "text") -> None:
        if folder is None:
            base = Path(os.environ.get("XDG_CACHE_HOME", ""))
            # The XDG base directory specification has relative paths ignored.
            folder = (base if base.is_absolute() else Path.home() / ".cache") / "mprun" / what
        self.folder = Path(folder)

    def made(self, key: Key, blocks: Callable[[], Iterable[np.ndarray | bytes]]) -> Path:
        """The entry of ``key``, stored from ``blocks()`` if there is none."""
        return self.find(key) or self.store(key, blocks())

    def find(self, key: Key) -> Path | None:
        """The entry of ``key``, or None if there is none or it is damaged (said on stderr)."""
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

    def store(self, key: Key, blocks: Iterable[np.ndarray | bytes]) -> Path:
        """Write the entry of ``key``, the ``blocks`` one after the other; its path.

        Raises ``DataError`` for a folder that cannot be written, ``Resource`` where the disk is
        full; nothing is left behind by these, nor by what ``blocks`` raises.
        """
        path = self._path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned(path)
            size, sha256 = _write(path, blocks)
            header = {"format": FORMAT, "key": key, "bytes": size, "sha256": sha256}
            _write(path.with_suffix(".json"), [json.dumps(header, indent=1).encode()])
        except OSError as error:
            reason = f"{self.folder}: {error.strerror}"
            if error.errno in _FULL:
                raise Resource(f"data.cache={reason}; encoded text goes there") from error
            raise DataError(f"data.cache={reason}; name a folder for the encoded text") from error
        return path

    def content_sha256(self, path: Path) -> str:
        """SHA-256 (hex) of the file ``path``; ``DamagedData`` if it cannot be read."""
        try:
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
            sha256 = _sha256(path)
        except OSError as error:
            raise DamagedData(f"{path}: {error.strerror}") from error
        newest = max(status.st_mtime_ns, status.st_ctime_ns)
        if abs(time.time_ns() - newest) > _SETTLED_NS:
            try:
                memory.parent.mkdir(parents=True, exist_ok=True)
                _write(memory, [json.dumps({**state, "sha256": sha256}, indent=1).encode()])
            except OSError:
                pass  # the next start hashes again
        return sha256

    def _path(self, key: Key) -> Path:
        canonical = json.dumps({"format": FORMAT, **key}, sort_keys=True)
        name = hashlib.sha256(canonical.encode()).hexdigest()[:32]
        return self.folder / f"{name}.{key['kind']}"

    def _remove_abandoned(self, path: Path) -> None:
        for left in self.folder.glob(f".{path.stem}.*"):
            try:
                if time.time() - left.stat().st_mtime > _ABANDONED_S:
                    left.unlink()
            except FileNotFoundError:
                pass  # another process was faster


def _json(path: Path) -> dict | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, blocks: Iterable[np.ndarray | bytes]) -> tuple[int, str]:
    """Replace ``path`` by ``blocks`` at once, synced; their size in bytes and SHA-256 (hex)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    size, digest = 0, hashlib.sha256()
    try:
        with open(temporary, "wb") as file:
            for block in blocks:
                content = block.data if isinstance(block, np.ndarray) else block
                size += file.write(content)
                digest.update(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()


def load_arrays(key: Key) -> list[np.ndarray] | None:
    """The arrays stored under ``key``, or None where there are none or damaged ones."""
    arrays = []
    try:
        path = Cache(None, "images").find({"kind": "arrays", **key})
        if path is None:
            return None
        with open(path, "rb") as file:
            while file.tell() < path.stat().st_size:
                arrays.append(np.lib.format.read_array(file, allow_pickle=False))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: nobody's home
        return None
    return arrays


def store_arrays(key: Key, arrays: Iterable[np.ndarray]) -> None:
    """Keep ``arrays`` (of plain dtypes) under ``key``, if the cache folder can be written to."""
    with suppress(DataError, Resource, RuntimeError):
        Cache(None, "images").store({"kind": "arrays", **key}, map(_npy, arrays))


def _npy(array: np.ndarray) -> bytes:
    """In NumPy's .npy format."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=False)
    return stream.getvalue()

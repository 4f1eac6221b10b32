"""Arrays that are slow to compute, kept as files in the user's cache folder.

They lie in mprun/images below $XDG_CACHE_HOME or ~/.cache, one file per key: a line, the size
and the SHA-256 of the rest, then arrays in NumPy's .npy format, none of them pickled. A file that
does not match its header counts as missing, and where nothing can be written nothing is: a cache
only ever costs time. Files are written beside their place and renamed, so that several runs can
share them, and never deleted here.
"""

import hashlib
import io
import os
import struct
import tempfile
from contextlib import suppress

import numpy as np

_MAGIC = b"mprun arrays 1\n"
_HEADER = struct.Struct(f"<{len(_MAGIC)}sQ32s")
_EDGE_BYTES = 64 * 2**10


def load_arrays(key: str) -> list[np.ndarray] | None:
    """The arrays stored under ``key`` (hex digits), or None where there are none or damaged ones.

    Reads and hashes the whole file: about a second per GB.
    """
    folder = _folder()
    if folder is None:
        return None
    try:
        with open(os.path.join(folder, key), "rb") as file:
            magic, size, digest = _HEADER.unpack(file.read(_HEADER.size))
            if magic != _MAGIC or os.fstat(file.fileno()).st_size != _HEADER.size + size:
                return None
            content = file.read()
        if hashlib.sha256(content).digest() != digest:
            return None
        stream, arrays = io.BytesIO(content), []
        while stream.tell() < len(content):
            arrays.append(np.lib.format.read_array(stream, allow_pickle=False))
    except (OSError, ValueError, struct.error):
        return None
    return arrays


def store_arrays(key: str, arrays: list[np.ndarray]) -> None:
    """Keep ``arrays`` (of plain dtypes) under ``key``, if the cache folder can be written to."""
    folder = _folder()
    if folder is None:
        return
    stream = io.BytesIO()
    for array in arrays:
        np.lib.format.write_array(stream, array, allow_pickle=False)
    content = stream.getbuffer()
    header = _HEADER.pack(_MAGIC, len(content), hashlib.sha256(content).digest())
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(prefix=f".{key}.", dir=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(header)
                file.write(content)
            os.replace(unfinished, os.path.join(folder, key))
        except OSError:
            os.unlink(unfinished)


def key_of(*parts: str | bytes | int) -> str:
    """A key from ``parts``: SHA-256, hex."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def fingerprint(path: str) -> tuple[int, int, bytes]:
    """Tells large files apart in a moment: size, time stamp, hash of the first and last 64 KiB.

    Raises ``OSError`` if it cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        edges = hashlib.sha256(os.pread(file.fileno(), _EDGE_BYTES, 0))
        edges.update(os.pread(file.fileno(), _EDGE_BYTES, max(0, found.st_size - _EDGE_BYTES)))
    return found.st_size, found.st_mtime_ns, edges.digest()


def _folder() -> str | None:
    # The XDG specification has relative values ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return os.path.join(base, "mprun", "images") if os.path.isabs(base) else None

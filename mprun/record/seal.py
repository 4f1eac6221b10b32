"""The seal of an ended run, and the one way to read its files.

When a run ends, run.json gets `seal`: the SHA-256 of its other fields, and size and SHA-256 of each
file in `SEALED`. `content_of` returns the bytes of such a file only if they are the sealed ones. It
finds accidents and edits, not a forger, who can seal anew. A run without an end has no seal: it is
read as far as it goes.
"""

import hashlib
import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from mprun.errors import Damaged

# The files of the record, by pattern. Checkpoints have a manifest of their own, TensorBoard events
# are a view, and verbs write files of other names.
SEALED = (
    *("config.yaml", "metrics.jsonl", "numerics/step-*.json"),
    *("numerics/post-mortem.json", "numerics/post-mortem.md", "samples/step-*.png"),
)
MOST_JSON = 64 << 20  # bytes
# By path of run.json: identity of the file that was read, and the files that it seals.
_KNOWN: dict[str, tuple[tuple[int, ...], dict[str, Any] | None]] = {}
_noted = False


class BrokenSeal(Damaged):
    """A file of an ended run is not what the run left."""


def seal_of(directory: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seal of the files in `directory` and of the other fields of its run.json."""
    found = (path for pattern in SEALED for path in sorted(directory.glob(pattern)))
    files = {
        path.relative_to(directory).as_posix(): _digest(plain_content(path))
        for path in found
        if path.is_file()
    }
    return {"fields": _of_fields(msgspec.json.decode(json.dumps(fields))), "files": files}


def read_fields(directory: Path) -> dict[str, Any]:
    """Return the content of run.json; raise BrokenSeal unless it is what its seal says.

    A msgspec.DecodeError or UnicodeDecodeError says that it is not JSON.
    """
    path = directory / "run.json"
    before = _identity(path)
    fields: Any = msgspec.json.decode(plain_content(path, MOST_JSON))
    seal = fields.get("seal") if isinstance(fields, dict) else None
    if seal is not None:
        if not isinstance(seal, dict) or not isinstance(seal.get("files"), dict):
            raise BrokenSeal(f"{path}: seal: must name files and their hashes, as a run writes it")
        others = {key: value for key, value in fields.items() if key != "seal"}
        if (found := _of_fields(others)) != seal.get("fields"):
            should = f"fields of SHA-256 {str(seal.get('fields'))[:12]}..."
            raise BrokenSeal(
                f"{path}: was changed since the run ended: has {found[:12]}..., not {should}"
            )
    elif isinstance(fields, dict) and fields.get("status") not in (None, "running"):
        _note_unsealed(path)
    _KNOWN[str(path)] = before, None if seal is None else seal["files"]
    return fields


def content_of(
    directory: Path, name: str, most: int | None = None, missing: bytes | None = None
) -> bytes:
    """Return the content of a run's file.

    Args:
        name: Relative to the run directory, as in the seal.
        most: The most bytes that such a file may have.
        missing: The content of a missing file, unless the seal has one.

    Raises:
        BrokenSeal: It is not the file that the run left.
        Damaged: It is no file, or larger than `most`.
        FileNotFoundError: It is missing, and `missing` is None.
    """
    path, should = directory / name, _sealed_files(directory)
    try:
        content = plain_content(path, most)
    except (FileNotFoundError, Damaged) as error:
        gone = isinstance(error, FileNotFoundError)
        if should is not None and name in should:
            _refuse(path, should[name], "is missing" if gone else "is no such file")
        if missing is None or not gone:
            raise
        return missing
    if should is not None:
        if name not in should:
            raise BrokenSeal(f"{path}: must not exist, because the run ended without this file")
        if (found := _digest(content)) != should[name]:
            _refuse(path, should[name], f"is {_in_words(found)}")
    return content


def files_of(directory: Path, pattern: str) -> list[Path]:
    """Return the run's files that match a pattern of `SEALED`, sorted; all that were sealed."""
    found, should = sorted(directory.glob(pattern)), _sealed_files(directory)
    for name in should or ():
        path = directory / name
        if path.match(pattern) and path not in found:
            _refuse(path, (should or {})[name], "is missing")
    return found


def check_seal(directory: Path) -> None:
    """Raise BrokenSeal unless every sealed file is there as the run left it, and no other."""
    for pattern in SEALED:
        for path in files_of(directory, pattern):
            content_of(directory, path.relative_to(directory).as_posix())


def plain_content(path: Path, most: int | None = None) -> bytes:
    """Return the content of a file; raise Damaged unless it is one of at most `most` bytes."""
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer.
        with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise Damaged(f"{path}: is not a file")
            if most is not None and found.st_size > most:
                raise Damaged(f"{path}: has {found.st_size:,} bytes, must have at most {most:,}")
            return file.read()
    except IsADirectoryError:
        raise Damaged(f"{path}: is not a file") from None


def _sealed_files(directory: Path) -> dict[str, Any] | None:
    """Return what the seal says of the files; None: the run has none."""
    path = directory / "run.json"
    try:
        known = _KNOWN.get(str(path))
        if known is None or known[0] != _identity(path):
            read_fields(directory)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        raise Damaged(f"{path}: is not valid JSON") from None
    return _KNOWN[str(path)][1]


def _identity(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _digest(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _of_fields(fields: dict[str, Any]) -> str:
    """Return the SHA-256 of the fields in the order of their names, however they are laid out."""
    return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()


def _refuse(path: Path, should: Any, found: str) -> NoReturn:
    raise BrokenSeal(f"{path}: was changed since the run ended: {found}, not {_in_words(should)}")


def _in_words(digest: Any) -> str:
    if not isinstance(digest, dict):
        return "what its seal says"
    return f"{digest.get('bytes')} bytes of SHA-256 {str(digest.get('sha256'))[:12]}..."


def _note_unsealed(path: Path) -> None:
    """Say once that a run has no seal, like all of an earlier version."""
    global _noted
    if not _noted:
        _noted = True
        what = "ended without a seal, as in earlier versions: changes to its files are not found"
        print(f"mprun: {path.parent}: {what} (said once)", file=sys.stderr)

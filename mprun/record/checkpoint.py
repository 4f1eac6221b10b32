"""Checkpoints: complete, atomic, verified; resuming from one is bit-exact on a CPU.

A checkpoint is a directory `step-NNNNNNNN/` with `state.pt` (tensors and plain values only) and
`manifest.json`: the step, SHA-256 and size of state.pt, whether all its numbers are finite, and the
sizes and hashes of matching files. A single rename gives the checkpoint its name, after all of it
is on the disk. The hash finds accidents, not attackers.
"""

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mprun.errors import Damaged, Resource
from mprun.file_system import discard, sync_folder
from mprun.record.run_directory import read_json, synced

_NAME = re.compile(r"step-(\d{8,})$")


class Checkpoint(NamedTuple):
    """A whole checkpoint."""

    step: int
    state: dict[str, Any]
    manifest: dict[str, Any]
    warnings: list[str]  # a line for each newer checkpoint that is not whole


def save(folder: Path, step: int, state: dict, keep: int, **belonging: Any) -> Path:
    """Write the checkpoint of `step`, then drop those older than the newest `keep` good ones.

    A good checkpoint is whole and finite. belonging: further entries of the manifest.
    """
    folder.mkdir(exist_ok=True)
    final = folder / f"step-{step:08}"
    temporary = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        path = temporary / "state.pt"
        with synced(path) as file:
            torch.save(state, file)
        sha256 = _sha256(path)
        manifest = {"step": step, "sha256": sha256, "bytes": path.stat().st_size}
        manifest |= {"finite": all(bool(t.isfinite().all()) for t in _tensors(state)), **belonging}
        with synced(temporary / "manifest.json") as file:
            file.write(json.dumps(manifest).encode())
        if final.exists():
            _drop(final)
        os.replace(temporary, final)
        sync_folder(folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # torch.save reports a full disk as a RuntimeError with the OSError behind it.
        raise Resource(f"checkpoint {final} could not be written: {_root_cause(error)}") from error
    _hash_of(final / "state.pt", sha256)
    kept: Counter[bool] = Counter()
    for number, old in reversed(all_in(folder)):
        # Bad checkpoints only help to find out what happened; at most `keep` of them stay.
        good = kept[True] < keep and _is_good(old, number)
        if kept[True] < keep and kept[good] < keep:
            kept[good] += 1
        else:
            _drop(old)
    return final


def _drop(path: Path) -> None:
    discard(path, path.with_name(f".{path.name}.old.{os.getpid()}"))


def load_newest(folder: Path, map_location: torch.device) -> Checkpoint | None:
    """Return the newest whole checkpoint, None without any; raise Damaged if none is whole."""
    warnings: list[str] = []
    for step, path in reversed(all_in(folder)):
        try:
            manifest = _checked(path, step)
            state = _load(path / "state.pt", map_location)
            return Checkpoint(step, state, manifest, warnings)
        except Damaged as error:
            warnings.append(str(error))
    if warnings:
        raise Damaged(f"{folder}: no complete checkpoint is left ({'; '.join(warnings)})")
    return None


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(part)


def all_in(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of every checkpoint, the oldest first.

    Raises Damaged for a link or a file with the name of a checkpoint, which no run makes.
    """
    found = []
    for path in folder.glob("step-*"):
        if match := _NAME.match(path.name):
            if path.is_symlink() or not path.is_dir():
                raise Damaged(f"{path}: has the name of a checkpoint, but is not a folder")
            found.append((int(match[1]), path))
    return sorted(found)


def _is_good(path: Path, step: int) -> bool:
    try:
        return _checked(path, step).get("finite", True)
    except Damaged:
        return False


def _checked(path: Path, step: int) -> dict[str, Any]:
    """Return a checkpoint's manifest; raise Damaged unless state.pt matches it."""
    state = path / "state.pt"
    try:
        manifest: Any = read_json(path / "manifest.json")
        wanted = (manifest["step"], manifest["bytes"], manifest["sha256"])
        if wanted != (step, state.stat().st_size, _hash_of(state)):
            raise Damaged(f"{path}: does not match its manifest")
    except (OSError, LookupError, TypeError) as error:
        raise Damaged(f"{path}: {type(error).__name__}") from error
    return manifest


def _load(path: Path, map_location: torch.device) -> dict:
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise Damaged(f"{path}: is compressed; must be an uncompressed checkpoint of mprun")
        # Tensors and plain values only: a file cannot make torch run code.
        state = torch.load(path, map_location=map_location, weights_only=True)
    except Damaged:
        raise
    except Exception as error:  # torch raises many types for damaged files
        raise Damaged(f"{path}: {type(error).__name__}") from error
    if not isinstance(state, dict):
        raise Damaged(f"{path}: must be the state of a run")
    return state


_HASHES: dict[tuple[int, int, int, int], str] = {}  # by inode, device, size and time


def _hash_of(path: Path, known: str | None = None) -> str:
    """Return the SHA-256 of a file, cached while it does not change; rotation asks often."""
    stat = path.stat()
    key = (stat.st_ino, stat.st_dev, stat.st_size, stat.st_mtime_ns)
    if key not in _HASHES:
        _HASHES[key] = known or _sha256(path)
    return _HASHES[key]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _root_cause(error: BaseException) -> str:
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return "disk full" if getattr(error, "errno", None) == 28 else str(error)

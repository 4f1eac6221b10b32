"""Checkpoints: complete, atomic, verified; resuming from one is bit-exact on a CPU.

A checkpoint is a directory `step-NNNNNNNN/` with `state.pt` (tensors and plain values only) and
`manifest.json` (SHA-256, size). It appears under its name in one rename, after everything in it
is on the disk; the hash finds accidents, not attackers.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch

from mprun.errors import BadInput, Damaged, Resource

_NAME = re.compile(r"step-(\d{8,})$")


def save(folder: Path, step: int, state: dict, keep: int) -> Path:
    """Write the checkpoint of `step`, verify it, then drop all but the newest `keep`."""
    folder.mkdir(exist_ok=True)
    final = folder / f"step-{step:08}"
    temporary = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with open(temporary / "state.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        path = temporary / "state.pt"
        manifest = {"step": step, "sha256": _sha256(path), "bytes": path.stat().st_size}
        with open(temporary / "manifest.json", "w", encoding="utf-8") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
        _sync_folder(folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # torch.save reports a full disk as a RuntimeError with the OSError behind it.
        raise Resource(f"checkpoint {final} could not be written: {_root_cause(error)}") from error
    for _, old in _found(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def load_newest(folder: Path, map_location: torch.device) -> tuple[int, dict, list[str]]:
    """(step, state, warnings) of the newest whole checkpoint.

    Raises BadInput if `folder` holds no checkpoint, Damaged if none of them is whole.
    """
    warnings: list[str] = []
    for step, path in reversed(_found(folder)):
        try:
            return step, _load(path, step, map_location), warnings
        except Damaged as error:
            warnings.append(str(error))
    if warnings:
        raise Damaged(f"{folder}: no whole checkpoint left ({'; '.join(warnings)})")
    raise BadInput(f"resume={folder.parent}: has no checkpoint (train.checkpoint_every was 0)")


def _found(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = [(_NAME.match(path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _load(path: Path, step: int, map_location: torch.device) -> dict:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        whole = (
            manifest["step"] == step
            and (path / "state.pt").stat().st_size == manifest["bytes"]
            and _sha256(path / "state.pt") == manifest["sha256"]
        )
        if not whole:
            raise Damaged(f"{path}: does not match its manifest")
        # Tensors and plain values only: nothing read here can name code.
        return torch.load(path / "state.pt", map_location=map_location, weights_only=True)
    except Damaged:
        raise
    except Exception as error:  # torch raises many types for damaged files
        raise Damaged(f"{path}: {type(error).__name__}") from error


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _root_cause(error: BaseException) -> str:
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return "disk full" if getattr(error, "errno", None) == 28 else str(error)

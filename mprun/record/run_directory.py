"""A run directory: claimed once, never silently reused, every file written whole.

A sign of life of the training loop that other processes can see.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from mprun.errors import BadInput, Damaged, MprunError, Resource

# Keys that the path always shows, in a form of its own.
_IN_PATH = {"model", "data", "experiment", "precision", "seed", "name"}
_LONGEST = 200  # of a part of the path; file systems take 255 bytes


def run_name(
    config: dict[str, Any],
    choices: dict,
    overrides: tuple[str, ...],
    swept: Iterable[str] = (),
    *,
    told: Callable[[str], bool],
) -> tuple[str, str]:
    """(folder, run) of a run's path: what is learned, and the mode with all that differs from it.

    swept: keys that several runs differ in; they are in the name whatever they are, and a value
    that a file name cannot hold has a hash behind it. told: whether a key describes a run, so that
    it is in the name also where it is not swept. Both parts have at most 200 characters.
    Example: ("resnet50-digits_32", "amp-optim.lr=0.05-s0").
    """
    swept = set(swept)
    folder = choices.get("experiment") or f"{choices['model']}-{choices['data']}"
    if choices.get("experiment"):
        folder += "".join(f"-{text}" for key, text in _pairs(overrides) if key in ("model", "data"))
    pairs = [
        (key, f"{key}={value}")
        for key, value in _pairs(overrides)
        if key not in _IN_PATH and (key in swept or told(key))
    ]
    texts = [_told_apart(text) if key in swept else text for key, text in pairs]
    ends = [config["name"] or "", f"s{config['seed']}"]
    name = _joined([choices["precision"], *texts, *ends])
    if len(name) > _LONGEST and swept:
        # What is swept stays readable; a hash stands for all the rest.
        kept = [text for (key, _), text in zip(pairs, texts, strict=True) if key in swept]
        name = _joined([choices["precision"], *kept, *ends, _short_hash(name)])
    return _path_safe(folder), _path_safe(name)


def claim(parent: Path, name: str) -> Path:
    """Make and return a directory `name` (or `name.2`, `name.3`, ...) that nobody else has."""
    _make_parent("output_root", parent)
    for attempt in range(1, 10_000):
        path = parent / (name if attempt == 1 else f"{name}.{attempt}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise _not_made("output_root", parent, error) from None
    raise BadInput(f"{parent / name}: 9,999 runs of this name exist; clean up or use name=")


def claim_exactly(path: Path) -> Path:
    """Make and return exactly `path`; BadInput if it exists."""
    _make_parent("output_dir", path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        raise BadInput(
            f"output_dir={path}: exists already; use another directory or resume={path}"
        ) from None
    except OSError as error:
        raise _not_made("output_dir", path, error) from None
    return path


class locked:
    """Hold a run directory: a second process that wants the same one is refused."""

    def __init__(self, directory: Path):
        self.directory = directory

    def __enter__(self):
        self.file = open(self.directory / ".lock", "a", encoding="utf-8")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise BadInput(f"{self.directory}: in use by another process") from None
        # A sweep that put the directory aside in between holds the lock of a moved file.
        if not _is_at(self.file, self.directory / ".lock"):
            self.file.close()
            raise BadInput(f"{self.directory}: in use by another process")

    def __exit__(self, *exception):
        self.file.close()


def _is_at(file, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def write_json(path: Path, content: dict) -> None:
    """Replace `path` by `content` at once: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> dict:
    """The content of a JSON file; Damaged if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Damaged(f"{path}: not valid JSON ({error})") from None


def write_config(directory: Path, config: dict) -> None:
    """Write config.yaml, the resolved configuration as plain data."""
    text = yaml.safe_dump(config, sort_keys=False)
    (directory / "config.yaml").write_text(text, encoding="utf-8")


def read_config(directory: Path) -> dict:
    """Read config.yaml as data; tags that would build objects are refused."""
    path = directory / "config.yaml"
    if not path.is_file():
        raise BadInput(f"{directory}: no config.yaml there; give a run directory")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise Damaged(f"{path}: not valid YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict):
        raise Damaged(f"{path}: not a mapping")
    return content


def _make_parent(key: str, parent: Path) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_made(key, parent, error) from None


def _not_made(key: str, path: Path, error: OSError) -> MprunError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Resource(f"{key}={path}: {error.strerror}")
    return BadInput(f"{key}={path}: cannot be made ({error.strerror}); choose another folder")


def _pairs(overrides: tuple[str, ...]):
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        yield key, value


def _joined(parts: list[str]) -> str:
    return "-".join(str(part) for part in parts if part)


def _told_apart(text: str) -> str:
    safe = _only_safe(text)
    return safe if safe == text else f"{safe}-{_short_hash(text)}"


def _path_safe(text: str) -> str:
    safe = _only_safe(text) or "run"
    if len(safe) > _LONGEST:
        safe = f"{safe[: _LONGEST - 9]}-{_short_hash(text)}"
    return safe


def _only_safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", text).strip("_.")


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class Pulse:
    """Reads a heartbeat from outside: for how long has there been none?

    Compares time stamps with each other only, so that clocks of two machines may differ.
    """

    def __init__(self, directory: Path):
        self.path = directory / ".lock"
        self.stamp: int | None = None
        self.changed = time.monotonic()

    def silent_s(self) -> float:
        """Seconds since the last change that was seen, or since this object was made."""
        try:
            stamp = self.path.stat().st_mtime_ns
        except OSError:
            stamp = None
        if stamp != self.stamp:
            self.stamp, self.changed = stamp, time.monotonic()
        return time.monotonic() - self.changed

"""A run directory: claimed once, never silently reused, every file written whole.

A reader cannot know who made a directory. The directory is therefore data: nothing outside it is
read, written or removed through it. Its lock file carries the training loop's heartbeat.
"""

import glob
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from mprun.errors import BadInput, Damaged, Resource
from mprun.file_system import FAILING, discard, lock, sync
from mprun.record.console import printable
from mprun.record.seal import MOST_JSON, content_of, plain_content

# Keys that the path always shows, in their own form.
_IN_PATH = {"model", "data", "experiment", "precision", "seed", "name"}
_LONGEST = 200  # characters in a part of the path; file systems take 255 bytes
_MOST_CONFIG = 256 << 10  # bytes
# What these names are in a run directory.
_FILES = (".lock", "run.json", "config.yaml", "metrics.jsonl")
_FOLDERS = ("checkpoints", "numerics", "samples")
_FIRST = (".lock", "config.yaml")  # all that a run has before run.json
# Signs of name patterns that a path cannot hold, and without which others would look the same.
_SIGNS = {"*": "all", "?": "any", "!": "not "}
# Temporary files of a writing process: `.NAME.PID`.
_TEMPORARY = re.compile(r"\.(run\.json|config\.yaml|metrics\.jsonl|step-\d{8,}\S*)\.\d+")


def run_name(
    config: dict[str, Any],
    choices: dict,
    overrides: tuple[str, ...],
    swept: Iterable[str] = (),
    *,
    told: Callable[[str], bool],
) -> tuple[str, str]:
    """Return (folder, run) of a run's path: what it trains, and its mode with the overrides.

    Both parts have at most 200 characters: ("resnet50-digits_32", "amp-optim.lr=0.05-s0").

    choices: The chosen file of each group. swept: Keys that differ between several runs. The name
    always has them; a value that a file name cannot hold is followed by its hash. told: Whether a
    key describes a run, so that the name has it without a sweep, too.
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
    texts = [_distinct(text) if key in swept else _spelled(text) for key, text in pairs]
    ends = [*([config["name"]] if config["name"] else []), f"s{config['seed']}"]
    name = "-".join([choices["precision"], *texts, *ends])
    if len(name) > _LONGEST and swept:
        # The swept keys stay readable; a hash stands for all the rest.
        kept = [text for (key, _), text in zip(pairs, texts, strict=True) if key in swept]
        name = "-".join([choices["precision"], *kept, *ends, _short_hash(name)])
    return path_safe(folder), path_safe(name)


def claim(parent: Path, name: str) -> Path:
    """Make and return a directory `name` (or `name.2`, `name.3`, ...) that nobody else has."""
    with _making("output_root", parent):
        parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 10_000):
            path = parent / (name if attempt == 1 else f"{name}.{attempt}")
            with suppress(FileExistsError):
                path.mkdir()
                return path
    raise BadInput(f"{parent / name}: 9,999 runs of this name exist; delete some or use name=")


def claimed_before(parent: Path, name: str) -> list[Path]:
    """Return the directories that `claim` may have made for `name`, the newest first."""
    found = [parent / name, *parent.glob(f"{glob.escape(name)}.*")]
    whole = re.compile(rf"{re.escape(name)}(\.\d+)?")
    found = [path for path in found if whole.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=os.path.getmtime, reverse=True)


def claim_exactly(path: Path) -> Path:
    """Make and return exactly `path`; BadInput if it exists, unless a run never began there."""
    with _making("output_dir", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _making("output_dir", path), suppress(FileExistsError):
        path.mkdir()
        return path
    with suppress(OSError), open(path / ".lock", "rb") as file:  # of a process that was killed
        if lock(file, shared=True) and all(
            one.name in _FIRST or _TEMPORARY.fullmatch(one.name) for one in path.iterdir()
        ):
            return path
    raise BadInput(f"output_dir={path}: already exists; use another directory or resume={path}")


@contextmanager
def _making(key: str, path: Path) -> Iterator[None]:
    """Turn the error of a folder that cannot be made into one that names `key` and `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in FAILING:
            raise Resource(f"{key}={path}: {error.strerror}") from None
        raise BadInput(
            f"{key}={path}: cannot be created ({error.strerror}); choose another folder"
        ) from None


@contextmanager
def locked(directory: Path, new: bool = False) -> Iterator[None]:
    """Hold a run directory, and remove files that killed processes left half written.

    new: The caller has just made it: an error before it has a run.json, as on a full disk, removes
    it.

    Raises:
        BadInput: It is in use.
        Damaged: It holds a link that leads out of it, or something other than files and folders.
    """
    refuse_strange(directory)
    with open(directory / ".lock", "a", encoding="utf-8") as file:
        held = lock(file)
        # A sweep may have moved the directory in between, and the locked file with it.
        if held is False or not is_at(file, directory / ".lock"):
            raise BadInput(f"{directory}: in use by another process")
        # Without locks another process may be writing them.
        for pattern in (".*", "*/.*", "*/*/.*") if held else ():
            for path in list(directory.glob(pattern)):
                if _TEMPORARY.fullmatch(path.name) and not path.is_symlink():
                    discard(path)
        try:
            yield
        except BaseException:
            if new and not (directory / "run.json").exists():
                shutil.rmtree(directory, ignore_errors=True)
            raise


def is_at(file, path: Path) -> bool:
    """Return whether `path` still is the open file, not another that took its place."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def refuse_strange(directory: Path) -> None:
    """Raise Damaged for a link out of the directory, or an entry that is not what its name says."""
    root = os.path.realpath(directory)
    for names, what, kind in (
        (_FILES, "file", os.path.isfile),
        (_FOLDERS, "folder", os.path.isdir),
    ):
        for path in (os.path.join(directory, name) for name in names):
            if os.path.exists(path) and not kind(path):
                raise Damaged(f"{path}: must be a {what}")
    folders = [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if os.path.commonpath((root, target)) != root or not os.path.exists(target):
                        raise Damaged(
                            f"{entry.path}: is a link that leads out of the run or to nothing"
                        )
                elif entry.is_dir():
                    folders.append(entry.path)
                elif not entry.is_file():
                    raise Damaged(f"{entry.path}: is neither a file nor a folder")


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Open the new file `path`; its content is on the disk when the block ends."""
    with open(path, "xb") as file:
        yield file
        sync(file)


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` at the end: readers see the old or the new content.

    A link at `path` is replaced, too: nothing is written through it. durable: wait for the disk,
    as what cannot be made again needs it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        with synced(temporary) if durable else open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:  # a signal, too
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def json_number(value: float) -> float | str:
    """Convert a number for JSON, which has no NaN; float() reads these words back."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def plain(value: Any) -> Any:
    """Convert nested values for JSON: non-finite numbers by `json_number`, tuples as lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return json_number(value) if isinstance(value, float) else value


def json_values(value: Any) -> Any:
    """Convert to JSON's own types; numpy scalars become Python's, other objects text.

    Non-finite numbers become "nan", "inf" or "-inf".
    """
    words = json.dumps(value, default=lambda one: one.item() if hasattr(one, "item") else str(one))
    names = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
    return json.loads(words, parse_constant=names.get)


def write_text(path: Path, text: str) -> None:
    """Write a text for people at once: whoever prints the file gets `printable` text alone."""
    with replacing(path, durable=False) as file:
        file.write(printable(text).encode())


def refuse_link(path: Path) -> Path:
    """Return `path`; raise BadInput if it is a link: nothing is written through one."""
    if path.is_symlink():
        raise BadInput(
            f"{path}: is a link, and mprun writes nothing through links; remove it, or name "
            f"another folder"
        )
    return path


def write_json(path: Path, content: Any, durable: bool = True, **layout: Any) -> None:
    """Write `content` to `path` at once; durable: as for `replacing`, layout: as of json.dumps."""
    text = json.dumps(content, **{"indent": 1, **layout})
    with replacing(path, durable) as file:
        # json escapes every other control character.
        file.write(f"{text}\n".replace("\x7f", "\\u007f").encode())


def read_json(path: Path) -> dict:
    """Read a JSON file; raise Damaged if it is not JSON."""
    try:
        return json.loads(plain_content(path, MOST_JSON))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of 5,000 digits
        raise Damaged(f"{path}: is not valid JSON ({error})") from None


def write_config(directory: Path, config: dict) -> None:
    """Write config.yaml, the resolved configuration as plain data."""
    with replacing(directory / "config.yaml") as file:
        file.write(yaml.safe_dump(config, sort_keys=False).encode())


class _PlainYaml(yaml.SafeLoader):
    """A loader of plain data: no tags that build objects, no aliases, which multiply content."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def read_config(directory: Path) -> dict:
    """Read config.yaml as data."""
    path = directory / "config.yaml"
    try:
        content = yaml.load(content_of(directory, "config.yaml", _MOST_CONFIG), _PlainYaml)
    except FileNotFoundError:
        raise BadInput(f"{directory}: contains no config.yaml; name a run directory") from None
    except (ValueError, yaml.YAMLError, RecursionError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise Damaged(f"{path}: is not valid YAML ({reason})") from None
    if not isinstance(content, dict):
        raise Damaged(f"{path}: not a mapping")
    return content


def _pairs(overrides: tuple[str, ...]):
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        yield key, value


def _distinct(text: str) -> str:
    safe = _only_safe(text)
    return safe if safe == text else f"{safe}-{_short_hash(text)}"


def _spelled(text: str) -> str:
    """Return an override with words for what a pattern's signs mean, and its hash; others as is."""
    key, _, value = text.partition("=")
    words = re.sub("[*?!]", lambda sign: _SIGNS[sign[0]], value)
    return text if words == value else f"{_only_safe(f'{key}={words}')}-{_short_hash(text)}"


def path_safe(text: str) -> str:
    """Make `text` a part of a path: odd characters become underscores, a long end a hash."""
    safe = _only_safe(text) or "run"
    if len(safe) > _LONGEST:
        safe = f"{safe[: _LONGEST - 9]}-{_short_hash(text)}"
    return safe


def _only_safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", text).strip("_.")


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class Heartbeat:
    """Touch the run's lock file while the loop runs.

    The loop itself does it, not a thread, so that a hanging step shows. It costs one reading of the
    clock a step and one system call every `seconds`.
    """

    def __init__(self, directory: Path, seconds: float = 2.0):
        self.path, self.seconds = directory / ".lock", seconds
        self.last = -seconds

    def beat(self) -> None:
        """Note that the loop is alive."""
        now = time.monotonic()
        if now - self.last < self.seconds:
            return
        self.last = now
        # A disk that keeps failing shows in the next write.
        with suppress(OSError):
            self.path.touch()


class Pulse:
    """Watch a run's heartbeat from another process.

    Time stamps are compared only with each other, so the clocks of two machines may differ.
    """

    def __init__(self, directory: Path):
        self.path = directory / ".lock"
        self.stamp: int | None = None
        self.changed = time.monotonic()

    def silent_s(self) -> float:
        """Return the seconds since the last change seen, or since this object was made."""
        try:
            stamp = self.path.stat().st_mtime_ns
        except OSError:
            stamp = None
        if stamp != self.stamp:
            self.stamp, self.changed = stamp, time.monotonic()
        return time.monotonic() - self.changed

"""A cell and what its directory says: finished, in use, to be continued, or to be put aside."""

import fcntl
import os
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mprun.errors import BadInput, Damaged
from mprun.record.run_directory import locked, read_record, write_json

OUTCOMES = ("done", "diverged")
# A directory that has no lock file yet may belong to a run that made it a moment ago.
_CLAIM_S = 10.0
# Where data lie: no part of a configuration's hash, nor, unless swept, of a directory's name.
_DATA_PLACES = {"root": "on the data in", "vocabulary": "with the vocabulary in"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep: its overrides, its place, and what identifies it in the table."""

    overrides: tuple[str, ...]
    directory: Path
    config_hash: str
    mode: str
    scaler: str
    seed: int
    device: str = "auto"
    devices: str = "1"
    factories: tuple[str, ...] = ()  # the user's own code that the sweep names, as overrides
    data_places: tuple[tuple[str, str | None], ...] = ()  # as `data_places` gives them

    @property
    def log(self) -> Path:
        """What its process prints, until it ends: its directory is not there from the start."""
        return self.directory.with_name(f".{self.directory.name}.log")


class State(Enum):
    """What is to be done about a cell."""

    NEW = "new"
    IN_USE = "in use"
    FINISHED = "finished"
    RESUMABLE = "resumable"
    ABANDONED = "abandoned"


def data_places(config: dict) -> tuple[tuple[str, str | None], ...]:
    """Key -> path of what a configuration reads data from."""
    data = config.get("data")
    data = data if isinstance(data, dict) else {}
    return tuple((key, data[key]) for key in _DATA_PLACES if key in data)


def look(cell: Cell) -> State:
    """The state of a cell on disk.

    Raises BadInput if its place is taken by something else, which a run on data that lie elsewhere
    is too: what they hold is known only once they are read.
    """
    if not cell.directory.exists():
        return State.NEW
    if not cell.directory.is_dir():
        raise BadInput(f"{cell.directory}: is not a folder; use name= for a sweep of its own")
    # In this order: a run that ends in between has let go of its lock after its last record.
    in_use = _in_use(cell.directory)
    record = record_of(cell.directory)
    if record is not None and record.get("config_hash") != cell.config_hash:
        raise BadInput(
            f"{cell.directory}: holds a run of another configuration; use name= for "
            "a sweep of its own"
        )
    if record is not None:
        _check_same_places(cell, record)
    if in_use:
        return State.IN_USE
    if record is None:
        return State.ABANDONED
    if record["status"] in OUTCOMES:
        return State.FINISHED
    # Still "running" although nobody is at it: the machine or the whole sweep was killed.
    if record["status"] not in ("preempted", "running"):
        return State.ABANDONED
    kept = any(cell.directory.glob("checkpoints/step-*"))
    return State.RESUMABLE if kept else State.ABANDONED


def record_of(directory: Path) -> dict | None:
    """run.json, or None if there is none that can be read."""
    try:
        return read_record(directory, "status")
    except (FileNotFoundError, Damaged):
        return None


def outcome_words(record: dict) -> str:
    """The status of a run.json in words: "diverged at step 12", "failed: ValueError: ...", ..."""
    status, cause = record["status"], str(record.get("cause") or "")
    if status == "diverged":
        return f"diverged at step {record.get('last_step', 0)}"
    if cause.startswith(("killed by ", "hung: ")):
        return cause
    return f"failed: {cause}" if status == "failed" and cause else status


def put_aside(cell: Cell) -> None:
    """Keep what an interrupted or failed attempt left, under another name.

    Raises BadInput if another process is at it.
    """
    keep_log(cell)
    if not cell.directory.exists():
        return
    with locked(cell.directory):
        record = record_of(cell.directory)
        if record is not None and record["status"] in OUTCOMES:
            return
        if record is not None and record["status"] == "running":
            # Its sweep, which would have said so, was killed with it.
            cause = {"status": "failed", "cause": "killed by an unknown cause"}
            write_json(cell.directory / "run.json", record | cause)
        for number in range(1, 10_000):
            aside = cell.directory.with_name(f"{cell.directory.name}.attempt{number}")
            if not aside.exists():
                cell.directory.rename(aside)
                return


def keep_log(cell: Cell) -> None:
    """Move what the process of a cell printed into the run directory, if it made one."""
    if not cell.log.is_file() or not cell.directory.is_dir():
        return
    kept = cell.directory / "console.log"
    if not kept.exists():
        cell.log.rename(kept)
        return
    with open(kept, "ab") as file:
        file.write(cell.log.read_bytes())
    cell.log.unlink()


def _check_same_places(cell: Cell, record: dict) -> None:
    config = record.get("config")
    recorded = dict(data_places(config)) if isinstance(config, dict) else {}
    for key, place in cell.data_places:
        there = recorded.get(key)
        if _resolved(there) != _resolved(place):
            raise BadInput(
                f"{cell.directory}: holds a run {_DATA_PLACES[key]} {_shown(there)}, not in "
                f"{_shown(place)}; use name= for a sweep of its own"
            )


def _resolved(place: object) -> str | None:
    return None if place is None else os.path.realpath(str(place))


def _shown(place: object) -> str:
    text = "null" if place is None else str(place)
    return "".join(character if character.isprintable() else "?" for character in text)


def _in_use(directory: Path) -> bool:
    try:
        return is_held(directory / ".lock")
    except FileNotFoundError:
        try:
            return time.time() - directory.stat().st_mtime < _CLAIM_S
        except FileNotFoundError:  # put aside by another sweep
            return True


def is_held(lock: Path) -> bool:
    """Whether a process holds the lock file; FileNotFoundError if there is none."""
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True

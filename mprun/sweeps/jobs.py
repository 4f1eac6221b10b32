"""A cell and the state of its directory: finished, in use, resumable, or to be put aside."""

import os
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mprun.config.keys import current, is_as_hashed
from mprun.errors import BadInput, Damaged
from mprun.file_system import is_held
from mprun.record.keys import config_hash, flat
from mprun.record.run_directory import locked, read_config, refuse_link
from mprun.record.run_record import OUTCOMES, Record, read_record
from mprun.record.seal import check_seal
from mprun.record.seed_plan import KEY

# A directory without a lock file may belong to a run that has just made it.
_CLAIM_S = 10.0
# Paths of data: neither in a configuration's hash nor, unless swept, in a directory's name.
_DATA_PLACES = ("root", "vocabulary")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep: its overrides, its directory, and its identity in the table."""

    overrides: tuple[str, ...]
    directory: Path
    config_hash: str
    mode: str
    scaler: str
    seed: int
    device: str = "auto"
    devices: str = "1"
    outside: tuple[str, ...] = ()  # the code and the paths that the sweep names, as overrides
    data_places: tuple[tuple[str, str | None], ...] = ()  # from `data_places`
    plan: tuple[int, ...] | None = None  # in its record, as `SeedPlan.as_list`
    any_plan: bool = True  # whether a run of another plan, or of none, serves as well

    @property
    def log(self) -> Path:
        """Return the log of its process until it ends; the directory is only made later."""
        return self.directory.with_name(f".{self.directory.name}.log")


class State(Enum):
    """The state of a cell, which decides how the sweep treats it."""

    NEW, IN_USE, FINISHED, RESUMABLE, ABANDONED, DAMAGED = range(6)


def data_places(config: dict) -> tuple[tuple[str, str | None], ...]:
    """Return key -> path of the data that a configuration reads."""
    data = config.get("data")
    known = data if isinstance(data, dict) else {}
    return tuple((key, known[key]) for key in _DATA_PLACES if key in known)


def state_of(cell: Cell) -> State:
    """Return the state of a cell on disk; raise BadInput if its directory has something else.

    A run on data in another folder is something else: their content is known only once read. A link
    may lead to a finished run; any other would be written through.
    """
    state = _state_of(cell)
    if state is not State.FINISHED:
        refuse_link(cell.directory.parent)
        refuse_link(cell.directory)
    return state


def _state_of(cell: Cell) -> State:
    if not cell.directory.exists():
        return State.NEW
    if not cell.directory.is_dir():
        raise BadInput(f"{cell.directory}: is not a folder; use name= for a separate sweep")
    # The lock first: a run that ends in between releases it after its last record.
    in_use = _in_use(cell.directory)
    record = record_of(cell.directory)
    if record is not None:
        _check_same(cell, record)
    if in_use:
        return State.IN_USE
    if record is None:
        return State.DAMAGED if (cell.directory / "run.json").exists() else State.ABANDONED
    if record["status"] in OUTCOMES:
        return State.FINISHED
    # "running" without a process: the machine or the whole sweep was killed.
    stopped = record["status"] in ("preempted", "running")
    kept = stopped and any(cell.directory.glob("checkpoints/step-*"))
    return State.RESUMABLE if kept else State.ABANDONED


def record_of(directory: Path) -> Record | None:
    """Read run.json; None if it is missing or unreadable."""
    try:
        return read_record(directory, "status")
    except (FileNotFoundError, Damaged):
        return None


def damage_of(directory: Path) -> str | None:
    """Return what is wrong with the files of a run that has an outcome; None: nothing is."""
    from mprun.record.metrics_columns import read_columns  # here: it loads numpy

    metrics = directory / "metrics.jsonl"
    try:
        ended = read_record(directory, "status").get("last_step", 0)
        check_seal(directory)
        read_config(directory)
        last = read_columns(metrics).last_step
    except (Damaged, BadInput) as error:
        return str(error)
    return f"{metrics}: ends at step {last}, the run at {ended}" if last < ended else None


def outcome_words(record: dict) -> str:
    """Describe a run.json's status: "diverged at step 12", "failed: ValueError: ...", ..."""
    status, cause = record["status"], str(record.get("cause") or "")
    if status == "diverged":
        return f"diverged at step {record.get('last_step', 0)}"
    if cause.startswith(("killed by ", "hung: ", "damaged: ")):
        return cause
    return f"failed: {cause}" if status == "failed" and cause else status


def put_aside(cell: Cell, *, finished: bool = False) -> None:
    """Rename the directory of an interrupted or failed attempt; raise BadInput if it is in use.

    finished: also that of a run with an outcome, which otherwise stays.
    """
    refuse_link(cell.directory)
    keep_log(cell)
    if not cell.directory.exists():
        return
    with locked(cell.directory):
        record = record_of(cell.directory)
        if record is not None and record["status"] in OUTCOMES and not finished:
            return
        if record is not None and record["status"] == "running":
            # The sweep, which would have corrected it, was killed with the run.
            record.end("failed", "killed by an unknown cause")
        for number in range(1, 10_000):
            aside = cell.directory.with_name(f"{cell.directory.name}.attempt{number}")
            if not aside.exists():
                cell.directory.rename(aside)
                return


def keep_log(cell: Cell) -> None:
    """Move the log of a cell's process into the run directory, if there is one."""
    if not cell.log.is_file() or not cell.directory.is_dir():
        return
    kept = cell.directory / "console.log"
    if kept.is_symlink() or not kept.exists():
        cell.log.rename(kept)  # works on a full disk, and replaces a link
        return
    with open(kept, "ab") as file:
        file.write(cell.log.read_bytes())
    cell.log.unlink()


def _check_same(cell: Cell, record: dict) -> None:
    """Raise BadInput unless the run has the cell's configuration and data."""
    # An earlier version's hash is of the keys that it had.
    if cell.config_hash != record.get("config_hash") and not (
        "config" in record
        and is_as_hashed(record)
        and cell.config_hash == config_hash(current(record["config"]))
    ):
        raise BadInput(
            f"{cell.directory}: contains a run of another configuration; use name= for a separate "
            "sweep"
        )
    _check_plan(cell, record)
    recorded = dict(data_places(record.get("config", {})))
    for key, here in cell.data_places:
        there = recorded.get(key)
        if os.path.realpath(str(there)) != os.path.realpath(str(here)):
            raise BadInput(
                f"{cell.directory}: the run there has data.{key}={there or 'null'}, but this sweep "
                f"has data.{key}={here or 'null'}; use name= for a separate sweep"
            )


def _check_plan(cell: Cell, record: dict) -> None:
    """Raise BadInput if looks at a run cannot have been planned before it."""
    if cell.any_plan or cell.plan is None or record["status"] == "failed":  # which is put aside
        return
    there = flat(record.get("config", {})).get(KEY)
    if there != list(cell.plan):
        what = "without a plan" if there is None else f"under the plan {there}"
        raise BadInput(
            f"{cell.directory}: holds a run recorded {what}; until=decided needs seeds without "
            "earlier runs: choose another first seed, seed=N"
        )


def _in_use(directory: Path) -> bool:
    try:
        return bool(is_held(directory / ".lock"))
    except FileNotFoundError:
        try:
            return time.time() - directory.stat().st_mtime < _CLAIM_S
        except FileNotFoundError:  # put aside by another sweep
            return True

"""`mprun -m`: every combination of the swept values, one process per run.

A process of its own keeps peak memory, allocator state and random generators of one run away
from the next. Every combination is checked before the first one starts. A cell that diverges or
fails is an outcome in the table; the rest goes on. The same command again runs only what has no
outcome yet.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from mprun.config.compose import compose_config, hydra_session
from mprun.config.diagnose import group_options
from mprun.config.overrides import parse_overrides, sweep_values
from mprun.errors import DONE, INTERRUPTED, BadInput
from mprun.record.run_directory import config_hash, locked, read_json, run_name
from mprun.table import load_run, table

_OUTCOMES = ("done", "diverged")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    directory: Path
    config_hash: str


def sweep(overrides: list[str], config_dir: str | None, jobs: int) -> int:
    """Run all cells, `jobs` at a time; prints the table. 0 if every cell has an outcome."""
    cells, root = _plan(overrides, config_dir)
    missing = [cell for cell in cells if not _has_outcome(cell)]
    print(
        f"sweep of {len(cells)} runs in {root}"
        + (f", {len(cells) - len(missing)} finished already" if len(missing) < len(cells) else ""),
        file=sys.stderr,
    )
    try:
        codes = _run_all(missing, config_dir, jobs, len(cells) - len(missing), len(cells))
    except KeyboardInterrupt:
        print(f"sweep: {root}")
        return INTERRUPTED
    print(table([load_run(cell.directory) for cell in cells if _started(cell)]))
    print(f"sweep: {root}")
    return max((code for code in codes if code not in (0, 3)), default=DONE)


def _plan(overrides: list[str], config_dir: str | None) -> tuple[list[Cell], Path]:
    """Every cell, composed and checked, and the folder that holds them all; writes nothing.

    A cell lies where a single run of the same configuration would: a finished one counts.
    """
    parsed = parse_overrides(overrides)
    fixed = [o for o in parsed if not o.is_sweep_override()]
    swept = [o for o in parsed if o.is_sweep_override()]
    if any(o.key_or_group in ("output_dir", "resume") for o in parsed):
        raise BadInput("output_dir, resume: not with -m; each run of a sweep has its own directory")
    with hydra_session(config_dir):
        values = [sweep_values(o, group_options(o.key_or_group)) for o in swept]
    combinations = [
        (*(o.input_line for o in fixed), *combination) for combination in product(*values)
    ]
    composed = [compose_config(combination, config_dir) for combination in combinations]
    output_root = Path(composed[0].config.output_root)
    cells = []
    for one in composed:
        plain = one.as_dict()
        folder, name = run_name(plain, one.choices, one.overrides)
        cells.append(Cell(one.overrides, output_root / folder / name, config_hash(plain)))
    directories = {cell.directory for cell in cells}
    if len(directories) < len(cells):
        raise BadInput("-m: two runs of the sweep are the same; leave out the repeated value")
    parents = {directory.parent for directory in directories}
    return cells, parents.pop() if len(parents) == 1 else output_root


def _run_all(
    cells: list[Cell], config_dir: str | None, jobs: int, finished: int, total: int
) -> list[int]:
    waiting, running, codes = list(cells), {}, []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                _put_aside(cell.directory)
                finished += 1
                print(f"[{finished}/{total}] {cell.directory.name}", file=sys.stderr)
                running[_start(cell, config_dir, quiet=jobs > 1)] = cell
            for process in _ended(running):
                cell = running.pop(process)
                codes.append(process.returncode)
                _report(cell, process.returncode)
    except KeyboardInterrupt:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        raise
    return codes


def _start(cell: Cell, config_dir: str | None, quiet: bool) -> subprocess.Popen:
    quoted = str(cell.directory).replace("'", "\\'")
    command = [sys.executable, "-m", "mprun", *cell.overrides, f"output_dir='{quoted}'"]
    if config_dir is not None:
        command += ["--config-dir", config_dir]
    log = None
    if quiet:
        # Several progress displays cannot share one terminal.
        log = open(_log(cell), "w", encoding="utf-8")
    try:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=os.environ)
    finally:
        if log is not None:
            log.close()


def _report(cell: Cell, code: int) -> None:
    """One line on how a cell ended, and the last line of its log if it ended badly."""
    status = load_run(cell.directory).status if _started(cell) else "not started"
    print(f"  {cell.directory.name}: {status} (exit {code})", file=sys.stderr)
    log = _log(cell)
    if log.is_file():
        lines = log.read_text(encoding="utf-8").splitlines()
        if code not in (0, 3) and lines:
            print(f"    {lines[-1]}", file=sys.stderr)
        if cell.directory.is_dir():
            log.rename(cell.directory / "console.log")


def _log(cell: Cell) -> Path:
    cell.directory.parent.mkdir(parents=True, exist_ok=True)
    return cell.directory.parent / f".{cell.directory.name}.log"


def _ended(running: dict) -> Iterator[subprocess.Popen]:
    while not any(process.poll() is not None for process in running):
        time.sleep(0.05)
    return iter([process for process in running if process.poll() is not None])


def _started(cell: Cell) -> bool:
    return (cell.directory / "run.json").is_file()


def _has_outcome(cell: Cell) -> bool:
    if not _started(cell):
        return False
    record = read_json(cell.directory / "run.json")
    if record["config_hash"] != cell.config_hash:
        raise BadInput(
            f"{cell.directory}: holds a run of another configuration; use name= for "
            "a sweep of its own"
        )
    return record["status"] in _OUTCOMES


def _put_aside(directory: Path) -> None:
    """Keep what an interrupted or failed attempt left, under another name."""
    if not directory.exists():
        return
    with locked(directory):  # BadInput if somebody is still at it
        pass
    for number in range(1, 10_000):
        aside = directory.with_name(f"{directory.name}.attempt{number}")
        if not aside.exists():
            directory.rename(aside)
            return

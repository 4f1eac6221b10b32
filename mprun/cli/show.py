"""`mprun show RUN`: tell what a run was and how it ended, and draw its curves."""

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mprun.cli.arguments import Arguments
from mprun.comparison.verdict import comparable
from mprun.errors import DONE, BadInput
from mprun.numerics.post_mortem import bad_losses
from mprun.record.console import columns
from mprun.record.layout import hanging
from mprun.record.metrics_columns import NO_METRIC, MetricsColumns, read_columns
from mprun.record.run_record import Record, product_shares, read_record, shares_text
from mprun.training.next_commands import commands, state_of

_WHAT = """\
Tell what a run was and how it ended; draw its curves; name the commands that fit it now.

RUN is a run directory. It is read as far as it goes while the run still goes on; nothing is
written."""
_LEVELS = "▁▂▃▄▅▆▇█"
_NO_NUMBER = "x"  # in a curve: a value that is not finite


def main(words: list[str]) -> int:
    arguments = Arguments("show", _WHAT)
    arguments.add_argument("run", metavar="RUN", type=Path)
    directory = arguments.parse(words).run
    if not (directory / "run.json").is_file():
        raise BadInput(
            f"{directory}: contains no run (allowed: a run directory; mprun ls lists them)"
        )
    record = read_record(directory, "status", "created", "precision.mode", "config")
    measured = read_columns(directory / "metrics.jsonl")
    for name, text in _facts(directory, record, measured):
        print(hanging(text, columns(), 11, f"  {name:<9}"))
    print()
    for line in curves(measured, columns()):
        print(line)
    print("\nnext")
    itself = shlex.join(["mprun", "show", str(directory)])
    for fit in commands(directory, record, comparable):
        if fit.command != itself:
            print(f"  {'in the script: ' * fit.in_script}{fit.command}")
    return DONE


def _facts(directory: Path, record: Record, measured: MetricsColumns) -> Iterator[tuple[str, str]]:
    precision, config = record["precision"], record["config"]
    choices, machine = record.get("choices") or {}, record.get("environment") or {}
    yield "run", f"{directory}, begun {record['created']}"
    what = choices.get("model") or (config.get("model") or {}).get("name") or "a script of its own"
    data = choices.get("data") or (config.get("data") or {}).get("name")
    yield "model", f"{what} on {data}" if data else str(what)
    yield "mode", f"{precision['mode']}, loss scale: {precision.get('scaler', 'none')}"
    yield "seed", f"{record.get('seed', '-')}"
    packages = machine.get("packages") or {}
    named = [f"{name} {packages[name]}" for name in ("torch", "mprun") if packages.get(name)]
    device = machine.get("gpu") or machine.get("cpu") or machine.get("device", "unknown")
    yield "device", ", ".join([str(device), *named])
    # A script does not tell its length: `steps` are those that it has taken.
    total = None if "script" in record else record.get("steps")
    skipped = record.get("skipped", measured.skipped)
    last = record.get("last_step", measured.last_step)
    length = f"{last:,}" + (f" of {total:,}" if total else "") + " steps"
    yield "length", f"{length}, {skipped:,} of them skipped" + _seconds(record)
    if bad := bad_losses(measured, record.get("bad_batches", {})):
        yield "skipped", bad
    yield "ended", status_of(directory, record, measured.last_step)
    if unused := record.get("audit", {}).get("unused"):
        yield "note", f"no product ran in {unused}, because of overrides: a control"
    if products := product_shares(record.get("audit") or {}):
        yield "products", f"by calls: {shares_text(products)}"
    if final := record.get("final"):
        yield "final", ", ".join(f"{name} {_number(value)}" for name, value in final.items())


def _seconds(record: Record) -> str:
    seconds = record.get("seconds")
    return "" if seconds is None else f", {seconds:,.0f} s"


def status_of(directory: Path, record: Record, last_step: int) -> str:
    """Return how a run ended, or that it goes on, in words; last_step: of its metrics."""
    status, cause = state_of(directory, record), record.get("cause")
    if record["status"] == "running":
        return f"{status}, at step {last_step:,}"
    if status in ("diverged", "preempted"):
        status += f" at step {record.get('last_step', last_step):,}"
    return f"{status}: {cause}" if cause else status


def curves(measured: MetricsColumns, width: int) -> Iterator[str]:
    """Yield a line for each curve: its name, first value, shape and last value, over the steps."""
    rows: list[tuple[str, Any]] = [("train loss", measured.train.get("loss", []))]
    names = [name for name in measured.evals if name not in NO_METRIC]
    rows += [(f"eval {name}", measured.evals[name]) for name in names]
    scales = measured.train.get("loss_scale")
    if scales is not None and np.isfinite(scales).any() and len(np.unique(scales)) > 1:
        with np.errstate(divide="ignore"):
            rows.append(("log2 scale", np.log2(scales)))
    shown = [(name, np.asarray(values, float)) for name, values in rows if len(values)]
    if not shown:
        yield "  no curves: nothing was recorded yet"
        return
    longest = max(len(name) for name, _ in shown)
    room = max(8, width - longest - 26)
    for name, values in shown:
        first, last = (_number(values[place]) for place in (0, -1))
        yield f"  {name:<{longest}}  {first:>9} {curve(values, room)} {last}"


def curve(values: Sequence[float] | np.ndarray, room: int) -> str:
    """Return `values` as at most `room` characters of eight heights, the lowest value lowest."""
    values = np.asarray(values, float)
    parts = np.array_split(values, min(room, len(values)))
    # The last of each part, so that the curve ends where the run ended.
    heights = np.array([part[-1] for part in parts])
    finite = heights[np.isfinite(heights)]
    if not len(finite):
        return _NO_NUMBER * len(heights)
    low, high = finite.min(), finite.max()
    span = (high - low) or 1.0
    levels = len(_LEVELS) - 1
    return "".join(
        _LEVELS[round(levels * (value - low) / span)] if math.isfinite(value) else _NO_NUMBER
        for value in heights
    )


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else str(value)

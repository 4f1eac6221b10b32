"""The columns of a metrics.jsonl that a comparison needs.

It needs a few columns of every training record, which msgspec checks and decodes (100,000 records
in about 0.1 s, a tenth of json's time), and all columns of the evaluations, which json reads. It
also reads a training record that `MetricsFile` cannot have written so: with bare NaN and Infinity,
say; or it names the faulty line.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from mprun.errors import Damaged
from mprun.record.run_record import in_words
from mprun.record.seal import content_of

# `MetricsFile`'s words for the numbers that JSON lacks.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
DRAWN_RECORDS = 500
DRAWN_SKIPS = 2000
FIRST_STEPS = 20
# The keys of an evaluation's record that are not metrics.
NO_METRIC = ("split", "step", "updates", "skipped", "epoch", "seconds")
# float64 holds every whole number up to this one.
_MOST = 2**53
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]


@dataclass(slots=True, kw_only=True)
class MetricsColumns:
    """The part of one metrics.jsonl that a comparison needs; counts, ranges and steps are exact."""

    # column -> float64 [evaluations]: "step", "updates", then the metrics
    evals: dict[str, np.ndarray]
    # column -> float64 [at most 500]: "step", "updates", "skipped", "loss" and, if recorded,
    # "loss_scale", NaN where a record lacks it; evenly thinned, the first and the last included
    train: dict[str, np.ndarray]
    last_step: int  # step of the newest record, 0 if there is none
    first_losses: np.ndarray  # float64; steps 1, 2, ... up to 20, until the first missing step
    last_losses: np.ndarray  # float64; the last tenth of the train records, rounded up
    # of the same records: int64, their steps, and bool, whether the update was skipped
    last_steps: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    last_skips: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    skipped: int = 0  # skipped updates
    # int64, steps with a skipped update, at most 2,000, evenly thinned
    skip_steps: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    longest_skip_streak: int = 0  # consecutive steps whose update was skipped
    # int64, the steps whose update was skipped and whose loss itself was not finite
    nonfinite_skips: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    scale_range: tuple[float, float] | None = None  # of loss_scale over all train records
    nonfinite_step: int | None = None  # first step with a non-finite loss whose update was applied


# The fields that every record must have, and the loss scale of a train record.
class _Train(msgspec.Struct, tag_field="split", tag="train", gc=False):
    step: _Count
    updates: _Count
    skipped: _Count
    loss: float | Literal["NaN", "Infinity", "-Infinity"]
    loss_scale: float | Literal["NaN", "Infinity", "-Infinity"] | None = None


class _Eval(msgspec.Struct, tag_field="split", tag="eval", gc=False):
    step: _Count
    updates: _Count


# The record of a line, an evaluation with all of its columns; None: of another split.
_Record = _Train | dict[str, Any] | None
_decoder = msgspec.json.Decoder(_Train)
_TRAIN_LINE = b'{"split": "train", '


def read_columns(path: Path) -> MetricsColumns:
    """Read a metrics.jsonl, a missing one as empty; leave out a torn last line.

    Raises Damaged, with the line's number, for a line that is no JSON object or lacks a field that
    every record has, and for steps that do not ascend.
    """
    lines = complete_lines(content_of(path.parent, path.name, missing=b""))
    return _columns(path, [_record(path, number, line) for number, line in enumerate(lines, 1)])


def complete_lines(data: bytes) -> list[bytes]:
    """Return the lines of a metrics.jsonl, without a last line that a killed run left torn."""
    *lines, last = data.split(b"\n")
    try:
        json.loads(last)
    except (ValueError, RecursionError):  # empty after a whole line
        return lines
    return [*lines, last]  # only its newline is missing


def parsed_json(path: Path, number: int, line: bytes) -> Any:
    """Parse line `number` of a metrics.jsonl; raise Damaged if it is not JSON."""
    try:
        return json.loads(line, parse_int=_whole)
    except OverflowError:
        raise Damaged(f"{path}: line {number}: a number is too large for a float") from None
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        raise Damaged(f"{path}: line {number} is not JSON") from None


def _whole(digits: str) -> int:
    """Return a whole number; OverflowError for one that no float holds."""
    number = int(digits)
    float(number)
    return number


def _record(path: Path, number: int, line: bytes) -> _Record:
    # Without the tag msgspec takes any record for a _Train, and of fields that it skips it does not
    # check the encoding; `MetricsFile` writes ASCII.
    if line.startswith(_TRAIN_LINE) and line.isascii():
        try:
            return _decoder.decode(line)
        except msgspec.MsgspecError:
            pass
    return _parsed(path, number, line)


def _parsed(path: Path, number: int, line: bytes) -> _Record:
    """Decode any line that json accepts."""
    record = parsed_json(path, number, line) if line else {"split": ""}
    if not isinstance(record, dict) or not isinstance(record.get("split"), str):
        raise Damaged(f"{path}: line {number} is not a record of a run")
    if record["split"] not in ("train", "eval"):
        return None
    try:
        found = msgspec.convert(record, _Train | _Eval)
        return record if isinstance(found, _Eval) else found
    except msgspec.ValidationError as error:
        raise Damaged(f"{path}: line {number}: {in_words(error)}") from None


def _columns(path: Path, records: list[_Record]) -> MetricsColumns:
    at = [i for i, record in enumerate(records) if isinstance(record, _Train)]
    train = [record for record in records if isinstance(record, _Train)]
    count = len(train)
    step = np.fromiter((record.step for record in train), np.int64, count)
    skipped = np.fromiter((record.skipped for record in train), np.int64, count)
    losses = _numbers([record.loss for record in train])
    eval_at = [i for i, record in enumerate(records) if isinstance(record, dict)]
    evals = [record for record in records if isinstance(record, dict)]
    eval_steps = np.array([record["step"] for record in evals], dtype=np.int64)
    _ascending(path, "step", eval_steps, eval_at, strictly=True)
    _ascending(path, "step", step, at, strictly=True)
    _ascending(path, "skipped", skipped, at, strictly=False)
    first = step[:FIRST_STEPS]
    gapless = np.logical_and.accumulate(first == np.arange(1, len(first) + 1))
    was_skipped = np.diff(skipped, prepend=0) > 0
    skip_steps = step[was_skipped]
    bad = ~np.isfinite(losses)
    applied = np.flatnonzero(bad & ~was_skipped)
    scales = _numbers([record.loss_scale for record in train])
    known = scales[~np.isnan(scales)]
    updates = np.fromiter((record.updates for record in train), np.float64, count)
    columns = {"step": step, "updates": updates, "skipped": skipped, "loss": losses}
    columns |= {"loss_scale": scales} if len(known) else {}
    late = slice(count - -(-count // 10), None)
    return MetricsColumns(
        evals=_metrics(evals),
        train={key: evenly(own, DRAWN_RECORDS).astype(float) for key, own in columns.items()},
        last_step=int(max([*step[-1:], *eval_steps[-1:]], default=0)),
        first_losses=losses[: gapless.sum()],
        last_losses=losses[late],
        last_steps=step[late],
        last_skips=was_skipped[late],
        skipped=int(skipped[-1]) if count else 0,
        skip_steps=evenly(skip_steps, DRAWN_SKIPS),
        longest_skip_streak=_longest_streak(skip_steps),
        nonfinite_skips=step[bad & was_skipped],
        scale_range=(float(known.min()), float(known.max())) if len(known) else None,
        nonfinite_step=int(step[applied[0]]) if len(applied) else None,
    )


def _number(value: Any) -> float | None:
    """Return a number as `MetricsFile` wrote it, non-finite ones as strings; None: no number."""
    if isinstance(value, str):
        return NON_FINITE.get(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def _numbers(values: list[Any]) -> np.ndarray:
    if not set(map(type, values)) <= {float, int, type(None)}:
        values = [_number(value) for value in values]
    return np.array(values, dtype=np.float64)  # None becomes NaN


def _ascending(
    path: Path, name: str, values: np.ndarray, at: Sequence[int], strictly: bool
) -> None:
    """Raise Damaged unless `values`, found in the lines `at` (from 0), ascend."""
    difference = np.diff(values)
    wrong = np.flatnonzero(difference <= 0 if strictly else difference < 0)
    if len(wrong):
        i = wrong[0] + 1
        raise Damaged(
            f"{path}: line {at[i] + 1}: {name} {values[i]} must not come after {name} "
            f"{values[i - 1]}"
        )


def _longest_streak(steps: np.ndarray) -> int:
    if not len(steps):
        return 0
    ends = np.flatnonzero(np.diff(steps) != 1)
    bounds = np.concatenate(([-1], ends, [len(steps) - 1]))
    return int(np.diff(bounds).max())


def evenly(values: np.ndarray, limit: int) -> np.ndarray:
    """Return at most `limit` values, evenly chosen, the first and the last included."""
    if len(values) <= limit:
        return values
    return values[np.linspace(0, len(values) - 1, limit).round().astype(np.int64)]


def _metrics(evals: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return float64 columns: step, updates, then every metric that is a number somewhere."""
    always = ("step", "updates")
    keys = dict.fromkeys(key for record in evals for key in record if key not in NO_METRIC)
    columns = {}
    for key in [*always, *keys]:
        values = [record.get(key) for record in evals]
        if key in always or any(_number(value) is not None for value in values):
            columns[key] = _numbers(values)
    return columns

"""The columns of a metrics.jsonl that a comparison needs, of 100,000 records in about 50 ms."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mprun.errors import Damaged
from mprun.record.metrics_block import Unscannable
from mprun.record.metrics_scan import ScannedRecords, is_count, number, value_range

DRAWN_RECORDS = 500
DRAWN_SKIPS = 2000
FIRST_STEPS = 20
# Of an evaluation's record: what is no metric.
_NO_METRIC = ("split", "step", "updates", "skipped", "epoch", "seconds")


@dataclass(slots=True)
class MetricsColumns:
    """What a comparison needs of one metrics.jsonl; counts, ranges and steps are exact.

    evals: column -> float64 [evaluations]: "step", "updates", then the metrics.
    train: column -> float64 [at most 500], evenly thinned, the first and last record included:
    "step", "updates", "skipped", then whatever was recorded. NaN where a record lacks a column.
    """

    evals: dict[str, np.ndarray]
    train: dict[str, np.ndarray]
    records: int  # train records in the file
    last_step: int  # of the newest record, 0 if there is none
    first_losses: np.ndarray  # float64; steps 1, 2, ... up to 20, as far as none is missing
    last_losses: np.ndarray  # float64; the last tenth of the train records, rounded up
    skipped: int  # skipped updates
    skip_steps: np.ndarray  # int64, steps with a skipped update, at most 2,000, evenly thinned
    longest_skip_streak: int  # consecutive steps whose update was skipped
    scale_range: tuple[float, float] | None  # of loss_scale over all train records
    nonfinite_step: int | None  # first step with a non-finite loss whose update was applied


def read_columns(path: Path, missing_ok: bool = False) -> MetricsColumns:
    """Read a metrics.jsonl; a torn last line is left out. `missing_ok`: no file is an empty one.

    A file as `MetricsFile` writes it is scanned: only the lines that are shown are parsed, and of
    the others the few columns that are needed are cut out. Any other file of JSON lines is parsed
    line by line, with the same result.

    Raises Damaged, with the number of the line, for a line that is no JSON object or lacks what
    every record has, and for steps that do not ascend. Scanning sees damage only in what it
    reads: beginning and end of each line, its step, updates, skipped and loss_scale, and all of
    the lines that it parses.
    """
    data = b"" if missing_ok and not path.exists() else path.read_bytes()
    try:
        return _columns(path, ScannedRecords(data))
    except Unscannable:
        return _columns(path, ParsedRecords(path, data))


class ParsedRecords:
    """Every line of the file through json: the reference that scanning must agree with."""

    def __init__(self, path: Path, data: bytes):
        self.train: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        train_lines, eval_lines = [], []
        lines = data.split(b"\n")
        for line_number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                record = json.loads(line)
            except ValueError:  # not JSON, or not UTF-8
                if line_number == len(lines):
                    break
                raise Damaged(f"{path}: line {line_number} is not JSON") from None
            _check(path, line_number, record)
            if record["split"] == "train":
                self.train.append(record)
                train_lines.append(line_number)
            elif record["split"] == "eval":
                self.evals.append(record)
                eval_lines.append(line_number)
        self.lines = np.array(train_lines, dtype=np.int64)
        self.eval_lines = np.array(eval_lines, dtype=np.int64)
        self.step, self.updates, self.skipped = (
            np.array([record[key] for record in self.train], dtype=np.int64)
            for key in ("step", "updates", "skipped")
        )
        scales = [number(record.get("loss_scale")) for record in self.train]
        self.scale_range = value_range(np.array(scales, dtype=np.float64))
        losses = self.losses(np.arange(len(self.train)))
        self.nonfinite = np.flatnonzero(~np.isfinite(losses))

    def losses(self, indices: np.ndarray) -> np.ndarray:
        """float64 [len(indices)], the losses of these train records."""
        return np.array([number(self.train[i]["loss"]) for i in indices], dtype=np.float64)

    def parsed(self, indices: np.ndarray) -> list[dict[str, Any]]:
        """These train records."""
        return [self.train[i] for i in indices]


def _check(path: Path, line: int, record: Any) -> None:
    """Raise Damaged unless `record` has what every record of its split has."""
    if not isinstance(record, dict) or not isinstance(record.get("split"), str):
        raise Damaged(f"{path}: line {line} is no record of a run")
    integers = {"train": ("step", "updates", "skipped"), "eval": ("step", "updates")}
    for key in integers.get(record["split"], ()):
        if not is_count(record.get(key)):
            raise Damaged(f"{path}: line {line}: {key} is {record.get(key)}, not a count")
    if record["split"] == "train" and number(record.get("loss")) is None:
        raise Damaged(f"{path}: line {line}: loss is {record.get('loss')}, not a number")


def _columns(path: Path, records: ScannedRecords | ParsedRecords) -> MetricsColumns:
    step, skipped = records.step, records.skipped
    eval_steps = np.array([record["step"] for record in records.evals], dtype=np.int64)
    _ascending(path, "step", step, records.lines, strictly=True)
    _ascending(path, "skipped", skipped, records.lines, strictly=False)
    _ascending(path, "step", eval_steps, records.eval_lines, strictly=True)
    count = len(step)
    shown = _evenly(np.arange(count), DRAWN_RECORDS)
    first = step[:FIRST_STEPS]
    gaps = np.flatnonzero(first != np.arange(1, len(first) + 1))
    first_count = gaps[0] if len(gaps) else len(first)
    was_skipped = np.diff(skipped, prepend=0) > 0
    skip_steps = step[was_skipped]
    applied = records.nonfinite[~was_skipped[records.nonfinite]]
    return MetricsColumns(
        evals=_arrays(records.evals, ("step", "updates"), _NO_METRIC),
        train=_arrays(records.parsed(shown), ("step", "updates", "skipped"), ("split",)),
        records=count,
        last_step=int(max([*step[-1:], *eval_steps[-1:]], default=0)),
        first_losses=records.losses(np.arange(first_count)),
        last_losses=records.losses(np.arange(count - -(-count // 10), count)),
        skipped=int(skipped[-1]) if count else 0,
        skip_steps=_evenly(skip_steps, DRAWN_SKIPS),
        longest_skip_streak=_longest_streak(skip_steps),
        scale_range=records.scale_range,
        nonfinite_step=int(step[applied[0]]) if len(applied) else None,
    )


def _ascending(
    path: Path, name: str, values: np.ndarray, lines: np.ndarray, strictly: bool
) -> None:
    difference = np.diff(values)
    wrong = np.flatnonzero(difference <= 0 if strictly else difference < 0)
    if len(wrong):
        at = wrong[0] + 1
        raise Damaged(
            f"{path}: line {lines[at]}: {name} {values[at]} after {name} {values[at - 1]}"
        )


def _longest_streak(steps: np.ndarray) -> int:
    """Length of the longest run of consecutive integers in ascending `steps`."""
    if not len(steps):
        return 0
    ends = np.flatnonzero(np.diff(steps) != 1)
    bounds = np.concatenate(([-1], ends, [len(steps) - 1]))
    return int(np.diff(bounds).max())


def _evenly(values: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` of the values, evenly chosen, the first and the last included."""
    if len(values) <= limit:
        return values
    return values[np.linspace(0, len(values) - 1, limit).round().astype(np.int64)]


def _arrays(
    records: list[dict[str, Any]], always: Sequence[str], left_out: Sequence[str]
) -> dict[str, np.ndarray]:
    """float64 columns: `always` first, then every other key that holds a number somewhere."""
    keys = dict.fromkeys(key for record in records for key in record)
    columns = {}
    for key in [*always, *(key for key in keys if key not in always and key not in left_out)]:
        values = [record.get(key) for record in records]
        if not set(map(type, values)) <= {float, int}:
            values = [number(value) for value in values]
            if all(value is None for value in values) and key not in always:
                continue
        columns[key] = np.array(values, dtype=np.float64)  # None becomes NaN
    return columns

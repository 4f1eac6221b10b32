"""A metrics.jsonl as columns without parsing every line: see `metrics_block` for how."""

import json
import math
import re
from typing import Any

import numpy as np

from mprun.record.metrics_block import LOSS, Block, Unscannable, value_text

_BLOCK_BYTES = 2**20
# One match a line at most: it takes the rest of the line with it. As many matches as lines are
# therefore one in each.
_FIRST_LOSS = re.compile(LOSS + rb"([^,}\n]*)[^\n]*")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class ScannedRecords:
    """The train records of a file as columns, its evaluations as records.

    lines, step, updates, skipped: int64 [train records]; lines count from 1. nonfinite: indices
    of the train records whose loss is not finite. scale_range: of their loss_scale, or None.
    Raises Unscannable for a file of another form than `MetricsFile` writes.
    """

    def __init__(self, data: bytes):
        self.data = data
        if b"\\" in data:
            raise Unscannable("an escaped character, which could make part of a string a key")
        blocks = [Block(data, begin, end) for begin, end in _blocks(data)]
        self.starts = _joined([block.starts for block in blocks])
        self.ends = _joined([block.ends for block in blocks])
        self.step = _joined([block.step for block in blocks])
        self.updates = _joined([block.updates for block in blocks])
        self.skipped = _joined([block.skipped for block in blocks])
        is_train = _joined([block.is_train for block in blocks]).astype(bool)
        self.lines = np.flatnonzero(is_train) + 1
        self.eval_lines = np.flatnonzero(~is_train) + 1
        counts = [len(block.starts) for block in blocks]
        self.nonfinite = _joined(
            [block.nonfinite + sum(counts[:i]) for i, block in enumerate(blocks)]
        )
        self.scale_range = _scale_range([block for block in blocks if len(block.starts)])
        self.evals = self._parse(
            _joined([block.eval_starts for block in blocks]),
            _joined([block.eval_ends for block in blocks]),
        )
        for record in self.evals:
            if not (is_count(record.get("step")) and is_count(record.get("updates"))):
                raise Unscannable("an evaluation without its step")

    def losses(self, indices: np.ndarray) -> np.ndarray:
        """float64 [len(indices)], the losses of these train records; the indices are a range."""
        if not len(indices):
            return np.empty(0)
        lines = self.lines[indices] - self.lines[indices[0]]
        region = self.data[self.starts[indices[0]] : self.ends[indices[-1]]]
        texts = _FIRST_LOSS.findall(region)
        if len(texts) == lines[-1] + 1:  # evaluations between them have a loss as well
            return _numbers([texts[line] for line in lines.tolist()])
        return _numbers([self._loss_text(index) for index in indices.tolist()])

    def _loss_text(self, index: int) -> bytes:
        start, end = int(self.starts[index]), int(self.ends[index])
        at = self.data.find(LOSS, start, end)
        if at < 0:
            raise Unscannable("no loss")
        return value_text(self.data, at + len(LOSS), end)

    def parsed(self, indices: np.ndarray) -> list[dict[str, Any]]:
        """These train records."""
        return self._parse(self.starts[indices], self.ends[indices])

    def _parse(self, starts: np.ndarray, ends: np.ndarray) -> list[dict[str, Any]]:
        bounds = zip(starts.tolist(), ends.tolist(), strict=True)
        records = _loads([self.data[start:end] for start, end in bounds])
        if not all(isinstance(record, dict) for record in records):
            raise Unscannable("a line that is no object")
        return records


def number(value: Any) -> float | None:
    """A number as `MetricsFile` wrote it, non-finite ones as strings; None if it is none."""
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def is_count(value: Any) -> bool:
    """Whether this is a number of steps or updates: a whole number that float64 holds exactly."""
    return type(value) is int and 0 <= value <= 2**53


def value_range(values: np.ndarray) -> tuple[float, float] | None:
    """Least and largest of the values that are not NaN."""
    known = values[~np.isnan(values)]
    return (float(known.min()), float(known.max())) if len(known) else None


def _blocks(data: bytes):
    """Bounds of blocks of whole lines; a torn last line belongs to none."""
    begin, whole = 0, data.rfind(b"\n") + 1
    if whole < len(data) and _is_json(data[whole:]):
        whole = len(data)  # only its newline is missing
    while begin < whole:
        end = data.find(b"\n", min(begin + _BLOCK_BYTES, whole - 1), whole) + 1 or whole
        yield begin, end
        begin = end


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _scale_range(blocks: list[Block]) -> tuple[float, float] | None:
    texts = set().union(*(block.scales for block in blocks))
    if texts and not all(block.scales for block in blocks):
        raise Unscannable("records without loss_scale")
    return value_range(_numbers(sorted(texts)))


def _numbers(texts: list[bytes]) -> np.ndarray:
    values = _loads(texts)
    if not set(map(type, values)) <= {float, int}:
        values = [number(value) for value in values]
    if None in values:
        raise Unscannable("not a number")
    return np.array(values, dtype=np.float64)


def _loads(texts: list[bytes]) -> list[Any]:
    """The JSON values of `texts`, in one call, which is several times faster."""
    try:
        values = json.loads(b"[" + b",".join(texts) + b"]")
    except ValueError:
        raise Unscannable("not JSON") from None
    if len(values) != len(texts):
        raise Unscannable("several values where one belongs")
    return values


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True

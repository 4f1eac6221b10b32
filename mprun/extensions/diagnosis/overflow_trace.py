"""Describe a training run's overflows: at which scale each step would have overflowed.

A step overflows at loss scale S if its largest gradient, times S, does not fit FP16. So each step
has a limit, and overflows at every scale above it. A recorded run shows one side of that limit: a
skipped update at scale S says "below S", a clean step at scale S says "S or above". The trace may
also come from a CSV or JSONL file that another tool's training wrote.
"""

import csv
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mprun.errors import BadInput, shortened
from mprun.numerics.exponent_shares import FP16_MAX

SCAN = 256  # steps examined first for the next overflow


class OverflowTrace:
    """Per step, the scales at which an overflow is known, assumed or unknown.

    first_step: number of the first step; the entries, float64 [n], are consecutive steps. clean:
    largest scale at which the step itself is known not to overflow; 0: none is. overflow: smallest
    scale at which it is known to overflow; inf: none. likely_clean, likely_overflow: the same with
    evidence of other steps (see `carry`), and with probably_clean, as `clean`, 0 where unknown.
    grad_max: largest unscaled gradient magnitude. notes: on the source of the numbers.
    """

    def __init__(
        self,
        first_step: int,
        clean: np.ndarray,
        overflow: np.ndarray,
        grad_max: np.ndarray | None = None,
        notes: Sequence[str] = (),
        probably_clean: np.ndarray | float = 0.0,
    ):
        self.first_step, self.clean, self.overflow = first_step, clean, overflow
        self.grad_max, self.notes = grad_max, notes
        low = np.maximum(clean, probably_clean)
        self.likely_clean, self.likely_overflow = carry(
            np.where(low < overflow, low, clean), overflow
        )

    def __len__(self) -> int:
        return len(self.clean)

    def next_overflow(self, scale: float, start: int) -> int:
        """Return the first index from `start` on that likely overflows, else the length."""
        width = SCAN
        while start < len(self):
            found = np.flatnonzero(scale >= self.likely_overflow[start : start + width])
            if len(found):
                return start + int(found[0])
            start, width = start + width, 2 * width
        return len(self)

    def decided(self, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (known, likely): bool [m], the trace's knowledge of m steps at `scales` [m].

        known: the step itself shows whether it overflows. likely: the step or other steps show it.
        """
        steps = slice(len(scales))
        known = (scales <= self.clean[steps]) | (scales >= self.overflow[steps])
        likely = (scales <= self.likely_clean[steps]) | (scales >= self.likely_overflow[steps])
        return known, known | likely


def carry(clean: np.ndarray, overflow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (likely_clean, likely_overflow): own bounds, and the tightest of other steps.

    A bound is carried forward until a later step contradicts it; then the next looser
    uncontradicted bound is carried. Where there is none yet, the bound is carried backward from
    later steps, by the same rule. An overflow at a scale that had been clean before, with a clean
    step next, concerns that step alone and is not carried: one odd batch says nothing about its
    neighbours.
    """
    carried = ~_single_events(clean, overflow)
    ahead = _walk(clean, overflow, carried, range(len(clean)))
    back = _walk(clean, overflow, carried, range(len(clean) - 1, -1, -1))
    likely_overflow = np.where(np.isinf(ahead[1]), back[1], ahead[1])
    likely_overflow = np.minimum(likely_overflow, overflow)
    likely_clean = np.where(back[0] < likely_overflow, np.maximum(ahead[0], back[0]), ahead[0])
    likely_clean = np.maximum(likely_clean, clean)
    return np.where(likely_clean < likely_overflow, likely_clean, clean), likely_overflow


def _single_events(clean: np.ndarray, overflow: np.ndarray) -> np.ndarray:
    """Return bool [n]: overflowed at a scale seen clean before, clean at the next known step."""
    single = np.zeros(len(clean), bool)
    telling = np.flatnonzero((clean > 0) | np.isfinite(overflow))
    overflowed = (clean[telling] == 0).tolist()
    bounds = zip(clean[telling].tolist(), overflow[telling].tolist(), strict=True)
    seen = 0.0
    for position, (low, high) in enumerate(bounds):
        if low == 0 and high <= seen:
            if overflowed[position + 1 : position + 2] == [False]:
                single[telling[position]] = True
            else:
                seen = 0.0
        elif np.isfinite(high):
            seen = max(low, seen if seen < high else 0.0)
        else:
            seen = max(low, seen)
    return single


def _walk(
    clean: np.ndarray, overflow: np.ndarray, carried: np.ndarray, order: range
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tightest uncontradicted bounds so far at each step, in the given order."""
    likely_clean, likely_overflow = np.zeros(len(clean)), np.full(len(clean), np.inf)
    lows, highs, counts = clean.tolist(), overflow.tolist(), carried.tolist()
    low: list[float] = []  # ascending, all below all of `high`
    high: list[float] = []  # ascending
    for index in order:
        if counts[index]:
            del high[: bisect_right(high, lows[index])]
            del low[bisect_left(low, highs[index]) :]
            for ascending, value in ((low, lows[index]), (high, highs[index])):
                at = bisect_left(ascending, value)
                if ascending[at : at + 1] != [value]:
                    ascending.insert(at, value)
        # A step's own evidence precedes that of other steps.
        below = bisect_left(low, highs[index])
        above = bisect_right(high, lows[index])
        likely_clean[index] = low[below - 1] if below else 0.0
        likely_overflow[index] = high[above] if above < len(high) else np.inf
    return likely_clean, likely_overflow


MAX_STEPS = 10_000_000
_WANTED = "step and found_inf (0 or 1) or limit (largest scale without overflow)"
_WORDS = {"true": 1.0, "false": 0.0, "True": 1.0, "False": 0.0}


def read_trace_file(path: Path) -> OverflowTrace:
    """Read the trace of a CSV file with a header, or of a file with one JSON object a line.

    Columns: `step`, ascending integers; missing steps are unknown. And `limit`, the largest loss
    scale 2^k at which the step does not overflow (0: it overflows at every scale; inf: at none;
    empty: not known). Or `found_inf`, 0 or 1, with `loss_scale`, the scale of that step (without
    that column the overflow counts for every scale). Optional `grad_max`: largest unscaled gradient
    magnitude. Raises BadInput for anything else, naming the line.
    """
    rows = list(_rows(path))
    if not rows:
        raise BadInput(f"{path}: no steps in it; columns: {_WANTED}")
    has = set().union(*(row for _, row in rows))
    if "step" not in has or not has & {"found_inf", "limit"}:
        raise BadInput(f"{path}: columns {_WANTED} are needed")
    found: list[tuple[int, float, float, float]] = []
    for line, row in rows:
        try:
            found.append(_known(row, has, found[-1][0] if found else -1))
        except ValueError as error:
            raise BadInput(f"{path}: line {line}: {error}") from None
    first = found[0][0]
    count = found[-1][0] - first + 1
    if count > MAX_STEPS:
        raise BadInput(f"{path}: {count} steps; at most {MAX_STEPS} are allowed")
    clean, overflow, grad_max = np.zeros(count), np.full(count, np.inf), np.full(count, np.nan)
    at = np.array([step - first for step, *_ in found])
    clean[at], overflow[at], grad_max[at] = np.array([known for _, *known in found]).T
    notes = ["the file has no loss_scale: its overflows are taken to happen at every scale"]
    if "limit" in has:
        notes = ["known: the limit of each step, as the file gives it"]
    elif "loss_scale" in has:
        notes = ["known: whether each step overflowed at its own scale, as the file gives it"]
    if count > len(found):
        notes.append(f"{count - len(found)} steps are not in the file; of these nothing is known")
    known: np.ndarray | None = grad_max
    if not np.isfinite(grad_max).all():
        known = None
        if "limit" in has and (np.isfinite(clean) & (clean > 0)).all():
            notes.append("largest gradient for logmax: 65504 / limit (the file has no grad_max)")
            known = FP16_MAX / clean
    return OverflowTrace(first, clean, overflow, known, notes)


def _known(row: dict[str, Any], has: set[str], before: int) -> tuple[int, float, float, float]:
    """Return step, `clean` and `overflow` of `OverflowTrace`, and grad_max or NaN."""
    step = _number(row, "step")
    if step is None or step != int(min(step, 2**53)):
        raise ValueError(f"step={row.get('step')}: must be a whole number >= 0")
    if step <= before:
        raise ValueError(f"step={int(step)} after {before}; must ascend")
    bounds = _of_limit(row) if "limit" in has else _of_found_inf(row, "loss_scale" in has)
    largest = _number(row, "grad_max")
    return (int(step), *bounds, math.nan if largest is None else largest)


def _of_limit(row: dict[str, Any]) -> tuple[float, float]:
    limit = _number(row, "limit")
    if limit is None:
        return 0.0, math.inf
    # A limit 2^k says that 2^(k+1) overflows, but not where between the two overflows start.
    power = 0 < limit < math.inf and math.frexp(limit)[0] == 0.5
    return limit, 2 * limit if power else math.nextafter(limit, math.inf)


def _of_found_inf(row: dict[str, Any], scaled: bool) -> tuple[float, float]:
    found, scale = _number(row, "found_inf"), _number(row, "loss_scale")
    if found is None:
        return 0.0, math.inf
    if found not in (0, 1):
        raise ValueError(f"found_inf={found:g}: must be 0 or 1")
    if not scaled:
        return (0.0, 0.0) if found else (math.inf, math.inf)
    if scale is None or not 0 < scale < math.inf:
        raise ValueError(f"loss_scale={scale}: must be a number above 0")
    return (0.0, scale) if found else (scale, math.inf)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, values by column)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not text; give a CSV or JSONL file") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    if text.lstrip()[:1] == "{":
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield number, _json_row(path, number, line)
        return
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise BadInput(f"{path}: line {reader.line_num}: not as many values as columns")
            yield reader.line_num, {key.strip(): value for key, value in row.items()}
    except csv.Error as error:
        raise BadInput(f"{path}: line {reader.line_num}: {error}") from None


def _json_row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        raise BadInput(f"{path}: line {number} is not JSON") from None
    if not isinstance(row, dict):
        raise BadInput(f"{path}: line {number} is no JSON object")
    if "split" in row:
        raise BadInput(f"{path}: a run's own record; give the run directory, {path.parent}")
    return row


def _number(row: dict[str, Any], name: str) -> float | None:
    """Return a number >= 0; None for an empty value."""
    value = row.get(name)
    if value is None or value == "":
        return None
    try:
        number = float(_WORDS.get(value, value) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number >= 0:
        raise ValueError(f"{name}={shortened(str(value), 40)}: must be a number >= 0")
    return number

"""The overflow trace of a recorded run: its skipped updates, its scales and its probes."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mprun.errors import BadInput, Damaged
from mprun.numerics.overflow_trace import OverflowTrace, trace_from_bounds
from mprun.precision import LossScale
from mprun.record.metrics import read_metrics

def run_trace(directory: Path, record: dict[str, Any], own: LossScale) -> OverflowTrace:
    """The trace of a run directory; `record` is its run.json, `own` a fresh scale as it had.

    Every skipped update is recorded with its scale. Of the clean steps most are not recorded; their
    scale is found by running `own` over the skips, which must agree with every recorded scale.
    Raises BadInput for a run that skips nothing by its rule, or several scales in one (their
    overflows are recorded together); Damaged for records that contradict each other.
    """
    path = directory / "metrics.jsonl"
    if not own.skips_nonfinite:
        raise BadInput(
            f"{directory}: scaler=none skips nothing, so its overflows are not recorded; "
            "use a run with another scaler"
        )
    if record["config"]["scaler"].get("per", "shared") != "shared":
        raise BadInput(
            f"{directory}: scaler.per={record['config']['scaler']['per']} records the overflows of "
            "several scales as one; use a run with scaler.per=shared"
        )
    rows = [row for row in read_metrics(path) if row["split"] == "train"] if path.exists() else []
    if not rows:
        raise BadInput(f"{directory}: no step recorded yet")
    skipped = _skipped_steps(path, rows)
    last = rows[-1]["step"]
    scales, notes = _scales(rows, skipped, last, own)
    overflowed = np.zeros(last, bool)
    overflowed[np.array(sorted(skipped), np.int64) - 1] = True
    clean = np.where(overflowed | np.isnan(scales), 0.0, scales)
    overflow = np.where(overflowed, scales, np.inf)
    notes.insert(0, f"known: {last} steps, {len(skipped)} skipped, each at the run's own scale")
    return trace_from_bounds(1, clean, overflow, None, notes)


def _skipped_steps(path: Path, rows: list[dict[str, Any]]) -> set[int]:
    """Steps whose update was skipped; each has a record of its own."""
    skipped, before = set(), 0
    for row in rows:
        if row["skipped"] - before not in (0, 1):
            raise Damaged(f"{path}: step {row['step']}: skipped {row['skipped']} after {before}")
        if row["skipped"] > before:
            skipped.add(row["step"])
        before = row["skipped"]
    for a, b in pairwise(row["step"] for row in rows):
        if b <= a:
            raise Damaged(f"{path}: step {b} after {a}")
    return skipped


def _scales(
    rows: list[dict[str, Any]], skipped: set[int], last: int, own: LossScale
) -> tuple[np.ndarray, list[str]]:
    """The scale of each step, float64 [last], NaN where it is not known; and what to say of it."""
    recorded = np.full(last, np.nan)
    for row in rows:
        recorded[row["step"] - 1] = row["loss_scale"]
    if not own.needs_grad_max:
        found = _by_own_rule(skipped, last, own)
        given = ~np.isnan(recorded)
        wrong = np.flatnonzero(found[given] != recorded[given])
        if not len(wrong):
            return found, []
        step = int(np.flatnonzero(given)[wrong[0]]) + 1
        note = (
            f"recorded scales are not those of the run's rule from step {step} on: between "
            "records only scales that did not change are known"
        )
    else:
        note = "logmax: the scale of a step between two records is known only where it stood still"
    return _between_records(recorded), [note]


def _by_own_rule(skipped: set[int], last: int, own: LossScale) -> np.ndarray:
    scales, one = np.empty(last), torch.ones(())
    with torch.no_grad():
        for step in range(1, last + 1):
            scales[step - 1] = own.scale.item()
            if step in skipped:
                own.record(one)
            own.update()
    return scales


def _between_records(recorded: np.ndarray) -> np.ndarray:
    """Between two records with the same scale that scale, elsewhere NaN."""
    scales = recorded.copy()
    for a, b in pairwise(np.flatnonzero(~np.isnan(recorded)).tolist()):
        if recorded[a] == recorded[b]:
            scales[a:b] = recorded[a]
    return scales

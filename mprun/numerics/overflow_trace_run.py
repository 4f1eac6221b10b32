"""What a run's probes add to its overflow trace: limits, and the largest gradients for logmax.

The overflow trace of a recorded run: its skipped updates, its scales and its probes.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mprun.errors import BadInput, Damaged
from mprun.numerics.overflow_trace import OverflowTrace, trace_from_bounds
from mprun.numerics.probe_record import ProbeRecord, read_probes
from mprun.numerics.scaler_replay import replay
from mprun.precision import LossScale
from mprun.record.metrics import read_metrics

_GRADIENTS = ("activation_gradients", "weight_gradients")


def probed_bounds(
    directory: Path, steps: int, every_dtype: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """(clean, overflow, grad_max, probes) of the steps 1 to `steps` of a run directory.

    clean: float64 [steps], the largest scale (in powers of two from the run's own) at which no
    gradient that was probed overflows FP16, 0 where there was no probe; others, inside a kernel,
    may. overflow: twice that, at which one does; inf where there was no probe. Gradients in FP16
    count, or with `every_dtype` all of them, as if they were FP16. grad_max: largest unscaled
    weight gradient, of the nearest probe before the step (for the first ones, after it) that was
    finite; None if none was.
    """
    clean, overflow = np.zeros(steps), np.full(steps, np.inf)
    largest = np.full(steps, np.nan)
    probes = 0
    for probe in read_probes(directory):
        exponent = _limit_exponent(probe, every_dtype)
        if not 1 <= probe.step <= steps or exponent is None:
            continue
        probes += 1
        clean[probe.step - 1], overflow[probe.step - 1] = 2.0**exponent, 2.0**exponent * 2
        largest[probe.step - 1] = _largest(probe)
    return clean, overflow, _carried(largest), probes


def _limit_exponent(probe: ProbeRecord, every_dtype: bool) -> float | None:
    """log2 of a scale without overflow of which the double overflows; None if it cannot tell."""
    exponents = []
    for learner in probe.learners.values():
        scales = {probe.log2_loss_scale[name] for name in learner.loss_scales}
        if len(scales) > 1:
            return None
        scale = scales.pop() if scales else 0.0
        for kind in _GRADIENTS:
            for stats in learner.tensors.get(kind, {}).values():
                if not every_dtype and "fp16" not in stats.dtype.split("+"):
                    continue
                if stats.counts.inf or stats.counts.nan:
                    return None
                if stats.counts.headroom is not None:
                    exponents.append(scale + stats.counts.headroom)
    return min(exponents, default=None)


def _largest(probe: ProbeRecord) -> float:
    found = []
    for learner in probe.learners.values():
        scale = max((2.0 ** probe.log2_loss_scale[name] for name in learner.loss_scales), default=1)
        found += [s.amax / scale for s in learner.tensors.get("weight_gradients", {}).values()]
    return max(found, default=math.nan)


def _carried(values: np.ndarray) -> np.ndarray | None:
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return None
    before = np.searchsorted(known, np.arange(len(values)), side="right") - 1
    return values[known[np.maximum(before, 0)]]


def run_trace(directory: Path, record: dict[str, Any], own: LossScale) -> OverflowTrace:
    """The trace of a run directory; `record` is its run.json, `own` a fresh scale as it had.

    Every skipped update is recorded with its scale. Of the clean steps most are not recorded; their
    scale is found by running `own` over the skips, which must agree with every recorded scale.
    Probes show how far the gradients were from overflow: for other scales than the run's own.
    Raises BadInput for a run that skips nothing by its rule and has no probes, or that has several
    scales (their overflows are recorded together); Damaged for records that contradict each other.
    """
    path = directory / "metrics.jsonl"
    per = record["config"]["scaler"].get("per", "shared")
    if per != "shared":
        raise BadInput(
            f"{directory}: scaler.per={per} records the overflows of several scales as one; "
            "use a run with scaler.per=shared"
        )
    rows = _train_rows(path)
    if not rows:
        raise BadInput(f"{directory}: no step recorded yet")
    last = rows[-1]["step"]
    skips = own.skips_nonfinite
    probably_clean, probed, grad_max, probes = probed_bounds(directory, last, not skips)
    if not skips and not probes:
        raise BadInput(
            f"{directory}: scaler=none skips nothing, so its overflows are not recorded; use a run "
            "with another scaler, or with numerics=on"
        )
    if skips:
        skipped = _skipped_steps(path, rows)
        scales, notes = _scales(rows, skipped, last, own)
        overflowed = np.zeros(last, bool)
        overflowed[np.array(sorted(skipped), np.int64) - 1] = True
        clean = np.where(overflowed | np.isnan(scales), 0.0, scales)
        overflow = np.where(overflowed, scales, np.inf)
        notes.insert(0, f"known: {last} steps, {len(skipped)} skipped, each at the run's own scale")
        overflow = np.where((probed > clean) & (probed < overflow), probed, overflow)
    else:
        clean, overflow = np.zeros(last), probed
        notes = [f"{last} steps without a scaler; what its gradients would do in FP16 is assumed"]
    if probes:
        notes.append(
            f"{probes} probes show the scale from which on a probed gradient overflows; gradients "
            "inside kernels may overflow below it"
        )
    if grad_max is not None:
        notes.append("largest gradient for logmax: of the nearest probe before each step")
    return trace_from_bounds(1, clean, overflow, grad_max, notes, probably_clean)


def _train_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = [row for row in read_metrics(path) if row.get("split") == "train"]
    for row in rows:
        whole = isinstance(row.get("step"), int) and isinstance(row.get("skipped"), int)
        if not whole or row["step"] < 1 or not isinstance(row.get("loss_scale"), float | int):
            raise Damaged(f"{path}: a record without step, skipped or loss_scale: {row}"[:150])
    return rows


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
    if own.needs_grad_max:
        return recorded, ["logmax moves at every step: known are the steps with a record alone"]
    found = _by_own_rule(skipped, last, own)
    given = np.flatnonzero(~np.isnan(recorded))
    wrong = given[found[given] != recorded[given]]
    if not len(wrong):
        return found, []
    note = (
        f"the recorded scale of step {wrong[0] + 1} is not that of the run's own rule; between two "
        "records the scale is known where both have the same"
    )
    return _between_records(recorded), [note]


def _by_own_rule(skipped: set[int], last: int, own: LossScale) -> np.ndarray:
    """float64 [last]: the scales of `own` when exactly the steps in `skipped` overflow."""
    clean, overflow = np.full(last, np.inf), np.full(last, np.inf)
    at = np.array(sorted(skipped), np.int64) - 1
    clean[at], overflow[at] = 0.0, 0.0
    found = replay(own, trace_from_bounds(1, clean, overflow), stop_at_collapse=False)
    scales = np.empty(last)
    for (step, scale), (after, _) in pairwise([*found.changes, (last + 1, 0.0)]):
        scales[step - 1 : after - 1] = scale
    return scales


def _between_records(recorded: np.ndarray) -> np.ndarray:
    """Between two records with the same scale that scale (a change back shows as a skip)."""
    scales = recorded.copy()
    for a, b in pairwise(np.flatnonzero(~np.isnan(recorded)).tolist()):
        if recorded[a] == recorded[b]:
            scales[a:b] = recorded[a]
    return scales

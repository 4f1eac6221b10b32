"""results.json: the comparison as plain data, for scripts; no curves."""

import math
from dataclasses import asdict
from typing import Any

from mprun.compare.findings import Comparison, Group, Row
from mprun.compare.formatting import scaled, unit


def results(comparison: Comparison) -> dict[str, Any]:
    """Plain values that JSON can hold; a number that is not finite is "nan", "inf" or "-inf".

    Top: format (1), version, created, alpha (one-sided, per row), looks, stamps (what was allowed
    or changed after the runs), not_compared and notes (one line each), groups.

    Group: title, slug, metric, higher_is_better, margin (relative to the baseline's mean if
    `relative`, else in the metric's unit), window (evaluations averaged), notes, keys (what all
    runs share), baseline and modes, each a row.

    Row: label, mode, scaler, verdict (null for the baseline), mean (of the finite outcomes, in
    the metric's own unit), outcomes (seed, value, diverged: reason or null, step), runs (paths),
    differs (key -> [baseline's, own]), skipped (updates, all seeds), scale_range, samples_per_s
    (median), speedup, peak_bytes, memory_ratio, saved_ratio, first_steps (median relative
    difference of the training loss over steps 1 to 20), notes.

    Verdict: name, sentence, method, seeds, baseline_seeds, level, needed (about so many more
    seeds), look, and difference, low, high, margin in the unit of the judged value (nats for
    perplexity) with positive worse; shown: the same four in `unit`, "%" of the baseline's mean,
    "points", or "" for the metric's own.
    """
    return _plain(
        {
            "format": 1,
            "version": comparison.version,
            "created": comparison.created,
            "alpha": comparison.alpha,
            "looks": comparison.looks,
            "stamps": comparison.stamps,
            "not_compared": comparison.not_compared,
            "notes": comparison.notes,
            "groups": [_group(group) for group in comparison.groups],
        }
    )


def _group(group: Group) -> dict[str, Any]:
    return {
        "title": group.title,
        "slug": group.slug,
        "metric": group.metric,
        "higher_is_better": group.higher_is_better,
        "relative": group.relative,
        "margin": group.margin_setting,
        "window": group.window,
        "notes": group.notes,
        "keys": group.keys,
        "baseline": _row(group, group.baseline),
        "modes": [_row(group, row) for row in group.rows],
    }


def _row(group: Group, row: Row) -> dict[str, Any]:
    arm = row.arm
    return {
        "label": arm.label,
        "mode": arm.mode,
        "scaler": arm.runs[0].scaler if arm.runs else None,
        "verdict": None if row is group.baseline else _verdict(group, row),
        "mean": row.mean,
        "outcomes": [asdict(outcome) for outcome in row.outcomes],
        "runs": [run.path for run in arm.runs],
        "differs": arm.differs,
        "skipped": row.skipped,
        "scale_range": row.scale_range,
        "samples_per_s": row.samples_per_s,
        "speedup": row.speedup,
        "peak_bytes": row.peak_bytes,
        "memory_ratio": row.memory_ratio,
        "saved_ratio": row.saved_ratio,
        "first_steps": row.first_steps,
        "notes": list(dict.fromkeys([*arm.notes, *row.notes])),
    }


def _verdict(group: Group, row: Row) -> dict[str, Any]:
    verdict = row.verdict
    names = ("difference", "low", "high", "margin")
    shown = {name: scaled(group, verdict, getattr(verdict, name)) for name in names}
    return {**asdict(verdict), "shown": {"unit": unit(group), **shown}}


def _plain(value: Any) -> Any:
    """The value in JSON's own types; numpy scalars become Python's, other objects text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)

"""Summarize what the runs of a mode really computed, from the audit in their records.

A share is a share of the counted products, forward and backward; each counts as one, whatever its
size. Runs of an earlier mprun and logs of other tools have no audit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mprun.compare.findings import RunData

NOT_WATCHED = "not watched"
_NAMES = {
    "left_the_model": "tensors left the model beside its outputs",
    "written_in_a_call": "parameters written by the model itself",
}
_ALIKE = 0.01  # a smaller difference does not count; shares are shown in whole per cent


def audit_of(runs: Sequence[RunData]) -> dict[str, Any] | None:
    """Return the combined audit of `runs`; None if none of them was watched.

    Returns:
        watched: steps (for a script, calls and passes). products: dtype -> share, largest first.
        left_the_model, written_in_a_call, optimizers, not_watched: names, each once.
    """
    audits = [run.audit for run in runs if run.audit.get("watched")]
    if not audits:
        return None
    found: dict[str, Any] = {
        "watched": sum(audit["watched"] for audit in audits),
        "products": _shares(audits),
    }
    for name in (*_NAMES, "optimizers"):
        found[name] = sorted({one for audit in audits for one in audit.get(name, ())})
    unseen = {audit["not_watched"] for audit in audits if audit.get("not_watched")}
    return found | {"not_watched": sorted(unseen)}


def products_text(audit: Mapping[str, Any] | None) -> str:
    """Return the shares of products, the largest first: "fp16 85 %, fp32 15 %"."""
    if audit is None:
        return NOT_WATCHED
    return _text(audit["products"]) or "none"


def audit_notes(runs: Sequence[RunData]) -> list[str]:
    """Return notes on seeds that disagree, tensors that left a model and written parameters."""
    notes = []
    watched = [run for run in runs if run.audit.get("watched")]
    shares = [_shares([run.audit]) for run in watched]
    dtypes = {dtype for one in shares for dtype in one}
    spread = (_range([one.get(dtype, 0.0) for one in shares]) for dtype in dtypes)
    if max(spread, default=0.0) > _ALIKE:
        seeds: dict[str, list[str]] = {}
        for run, one in zip(watched, shares, strict=True):
            seeds.setdefault(_text(one) or "none", []).append(str(run.seed))
        told = (
            f"{text} (seed{'s' * (len(own) > 1)} {', '.join(own)})" for text, own in seeds.items()
        )
        notes.append(f"the seeds computed their products differently: {'; '.join(told)}")
    for name, what in _NAMES.items():
        found = sorted({one for run in watched for one in run.audit.get(name, ())})
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            notes.append(f"{what}: {', '.join(found[:5])}{more}")
    return notes


def _shares(audits: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for audit in audits:
        for name, count in audit.get("products", {}).items():
            counts[name.rpartition(" ")[2]] += count
    total = counts.total()
    return {dtype: count / total for dtype, count in counts.most_common() if count}


def _text(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{dtype} {_per_cent(share)}" for dtype, share in shares.items())


def _per_cent(share: float) -> str:
    """Return the share in whole per cent; only exact 0 is "0 %", only exact 1 "100 %"."""
    if share == 1:
        return "100 %"
    return "<1 %" if share < 0.005 else ">99 %" if share >= 0.995 else f"{100 * share:.0f} %"


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)

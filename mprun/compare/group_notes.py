"""What a reader of a comparison must know beside its numbers: missing runs, other machines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mprun.compare.findings import Arm, RunData
from mprun.compare.load import OUTCOMES
from mprun.errors import Damaged
from mprun.numerics.post_mortem import read_post_mortem


def missing_seeds(runs: Sequence[RunData]) -> list[str]:
    """ "seed 3: failed (out of memory)" for each run without an outcome."""
    notes = []
    for run in sorted(runs, key=lambda run: run.seed):
        if run.status not in OUTCOMES:
            cause = (run.cause or "").partition("\n")[0][:120]
            notes.append(f"seed {run.seed}: {run.status}" + (f" ({cause})" if cause else ""))
    return notes


def post_mortems(runs: Sequence[RunData]) -> list[str]:
    """What ended each diverged run, where it left a post-mortem, and how to find the cause."""
    notes = []
    for run in sorted(runs, key=lambda run: run.seed):
        if run.status != "diverged" or run.foreign:
            continue
        try:
            found = read_post_mortem(Path(run.path))
        except Damaged as error:  # the verdict does not rest on it
            notes.append(f"seed {run.seed}: {error}")
            continue
        if found is not None:
            lines = "; ".join(str(line) for line in found["classification"])
            notes.append(f"seed {run.seed}: {lines}; see mprun explain {run.path}")
    return notes


def group_notes(baseline: Arm, arms: Sequence[Arm]) -> list[str]:
    """Differences of environment inside a group, and a baseline whose products are not FP32."""
    every = [baseline, *arms]
    notes = []
    for what, read in _MUST_AGREE.items():
        found: dict[str, list[str]] = {}
        for arm in every:
            for run in arm.runs:
                labels = found.setdefault(str(read(run.environment)), [])
                if arm.label not in labels:
                    labels.append(arm.label)
        if len(found) > 1:
            text = "; ".join(f"{value} ({', '.join(labels)})" for value, labels in found.items())
            notes.append(f"{what} differs: {text}")
    dirty = [arm.label for arm in every if any(run.environment.get("dirty") for run in arm.runs)]
    if dirty:
        notes.append(
            f"recorded with uncommitted changes to mprun: {', '.join(dirty)}; their code may differ"
        )
    return notes + _not_ieee(baseline)


def _not_ieee(baseline: Arm) -> list[str]:
    """The flags are those of `mprun.precision.read_math_flags`."""
    lowered = sorted(
        {
            f"{name.removesuffix('.fp32_precision')} {value}"
            for run in baseline.runs
            for name, value in run.flags.items()
            if name.endswith(".fp32_precision") and value != "ieee"
        }
    )
    if not lowered:
        return []
    return [
        f"the baseline {baseline.label} did not compute FP32 products in full FP32: "
        f"{', '.join(lowered)}"
    ]


def _packages(name: str):
    return lambda environment: (environment.get("packages") or {}).get(name, "unknown")


def _machine(environment: dict[str, Any]) -> str:
    device = environment.get("device", "unknown device")
    return f"{environment.get('gpu') or environment.get('cpu') or 'unknown'} ({device})"


_MUST_AGREE = {
    "Python": lambda environment: ".".join(str(environment.get("python")).split(".")[:2]),
    "torch": _packages("torch"),
    "device": _machine,
    "mprun": lambda environment: environment.get("mprun", "unknown"),
    "commit of mprun": lambda environment: (environment.get("commit") or "unknown")[:12],
}

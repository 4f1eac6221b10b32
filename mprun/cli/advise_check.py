"""`mprun advise --check`: brief runs with the advice and without it, beside FP32."""

import sys
from contextlib import redirect_stdout
from pathlib import Path

from mprun.compare.assess import assess
from mprun.compare.findings import Row
from mprun.compare.grouping import group_runs
from mprun.compare.load import load_runs
from mprun.errors import DONE, MprunError
from mprun.numerics.advice_findings import Advice
from mprun.sweep import sweep
from mprun.sweep.plan import plan

SEEDS = (0, 1, 2)  # no verdict below 3


def check(
    advice: Advice, base: list[str], folder: Path, steps: int, config_dir: str | None
) -> dict:
    """Train FP32, the advised static scale, and scale 1, each with 3 seeds; what came of it.

    base: overrides without precision, scaler, seed and length. folder: of the runs, one process
    each; they are left there for `mprun compare`.
    """
    common = [*base, f"seed={','.join(map(str, SEEDS))}", f"train.steps={steps}"]
    common.append(f"output_root='{folder}'")
    directories = []
    arms = {"advised scale": advice.static or advice.overrides, "scale 1": advice.unscaled}
    for overrides in (["precision=fp32", "scaler=none"], *arms.values()):
        given = [*common, *overrides]
        with redirect_stdout(sys.stderr):
            code = sweep(given, config_dir)
        directories += [cell.directory for cell in plan(given, config_dir).cells]
        if code != DONE:
            raise MprunError(f"advise --check: a run did not end (exit code {code}), see {folder}")
    runs, _ = load_runs(directories)
    protos, refused = group_runs(runs)
    if not protos:
        raise MprunError(f"advise --check: {refused[0]}")
    group = assess(protos[0])
    mean = group.baseline.mean
    found = []
    for name, overrides in arms.items():
        row = next(row for row in group.rows if _is_of(row, overrides))
        difference = None
        if mean and row.mean is not None:
            difference = 100 * (row.mean - mean) / abs(mean)
        found.append(
            {
                "name": name,
                "overrides": " ".join(overrides),
                "mean": row.mean,
                "difference_percent": difference,
                "skipped": row.skipped,
                "diverged": sum(outcome.diverged is not None for outcome in row.outcomes),
                "verdict": row.verdict.sentence,
            }
        )
    return {
        "folder": str(folder),
        "seeds": len(SEEDS),
        "steps": steps,
        "metric": group.metric,
        "baseline": mean,
        "arms": found,
    }


def _is_of(row: Row, overrides: list[str]) -> bool:
    scaled = "scaler=static" in overrides
    return scaled == (row.arm.runs[0].scaler == "static")

"""One table over the runs of a sweep: what each precision mode did to the result.

Reads run.json only; imports no torch.
"""

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from mprun.record.run_directory import read_json

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Run:
    """What the table needs of one run."""

    group: tuple[str, ...]  # what is swept beside precision and seed
    mode: str
    scaler: str
    seed: int
    status: str
    step: int
    loss: float
    skipped: int
    samples_per_s: float | None
    sample: str
    peak_bytes: int | None
    saved_bytes: int | None
    measure: str = field(default="")


def load_run(directory: Path) -> Run:
    """Read one run directory."""
    record = read_json(directory / "run.json")
    memory = record.get("memory", {})
    final = record.get("final", {})
    special = [o for o in record["overrides"] if not o.startswith(_COMMON)]
    return Run(
        group=tuple(sorted(special)),
        mode=record["precision"]["mode"],
        scaler=record["precision"]["scaler"],
        seed=record["seed"],
        status=record["status"],
        step=record.get("last_step", 0),
        loss=float(final.get("loss", math.nan)),
        skipped=record.get("skipped", 0),
        samples_per_s=record.get("throughput", {}).get("samples_per_s"),
        sample=record["sample"],
        peak_bytes=memory.get("peak_bytes"),
        saved_bytes=memory.get("saved_for_backward_bytes"),
        measure=memory.get("measure", ""),
    )


# Overrides that do not separate groups: the mode has its own column, seeds are averaged.
_COMMON = (
    "precision=",
    "seed=",
    "scaler=",
    "name=",
    "output_root=",
    "output_dir=",
    "threads=",
    "device=",
    "train.log_every=",
    "train.checkpoint_every=",
)


def table(runs: list[Run]) -> str:
    """A Markdown table, one row per mode (and per what else is swept), FP32 first.

    Difference: mean over the seeds that FP32 and the mode share of (loss / FP32 loss - 1).
    """
    if not runs:
        return "no run has started"
    seeds = sorted({run.seed for run in runs})
    measure = next((run.measure for run in runs if run.measure), "peak memory")
    header = [
        "mode",
        *(f"loss, seed {seed}" for seed in seeds),
        "mean",
        "vs FP32",
        "skipped",
        "status",
        f"{runs[0].sample}s/s",
        "saved MiB",
        "peak MiB",
    ]
    several = len({run.group for run in runs}) > 1
    rows = []
    for group in dict.fromkeys(run.group for run in runs):
        own = [run for run in runs if run.group == group]
        modes = list(
            dict.fromkeys((r.mode, r.scaler) for r in sorted(own, key=lambda r: r.mode != "fp32"))
        )
        names = [mode for mode, _ in modes]
        baseline = {r.seed: r.loss for r in own if r.mode == "fp32"}
        for mode, scaler in modes:
            cells = {r.seed: r for r in own if (r.mode, r.scaler) == (mode, scaler)}
            label = f"{mode} ({scaler})" if names.count(mode) > 1 else mode
            if several:
                label += " " + " ".join(group)
            rows.append([label, *_row(cells, seeds, baseline, mode)])
    text = _markdown(header, rows)
    return (
        f"{text}\n\nloss: final evaluation; peak MiB: {measure}; saved MiB: kept for backward"
        " (under autocast with the 16-bit weight copies)"
    )


def _row(cells: dict[int, Run], seeds: list[int], baseline: dict[int, float], mode: str) -> list:
    losses = [cells[seed].loss for seed in seeds if seed in cells]
    ratios = [
        cells[seed].loss / baseline[seed] - 1
        for seed in seeds
        if seed in cells and seed in baseline
    ]
    difference = "baseline" if mode == "fp32" else _percent(ratios)
    statuses = {}
    for run in cells.values():
        statuses.setdefault(run.status, []).append(run.step)
    if len(statuses) == 1:
        (status, steps), *_ = statuses.items()
        text = f"{status} at step {_span(steps)}" if status == "diverged" else status
    else:
        text = ", ".join(f"{len(steps)} {status}" for status, steps in statuses.items())
    speeds = [run.samples_per_s for run in cells.values() if run.samples_per_s]
    saved = [run.saved_bytes for run in cells.values() if run.saved_bytes]
    peaks = [run.peak_bytes for run in cells.values() if run.peak_bytes]
    return [
        *(_number(cells[seed].loss) if seed in cells else "" for seed in seeds),
        _number(statistics.fmean(losses)) if losses else "",
        difference,
        str(sum(run.skipped for run in cells.values())),
        text,
        f"{statistics.median(speeds):,.0f}" if speeds else "",
        f"{max(saved) / _MIB:.1f}" if saved else "",
        f"{max(peaks) / _MIB:.0f}" if peaks else "",
    ]


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else str(value)


def _percent(ratios: list[float]) -> str:
    if not ratios:
        return "no FP32 run"
    mean = statistics.fmean(ratios)
    return f"{100 * mean:+.2f} %" if math.isfinite(mean) else "not finite"


def _span(steps: list[int]) -> str:
    return str(min(steps)) if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])

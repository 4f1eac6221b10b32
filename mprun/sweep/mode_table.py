"""One table over the runs of a sweep: what each precision mode did to the result.

Reads run.json only; imports no torch.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mprun.config.roles import is_told
from mprun.record.console import markdown_table
from mprun.record.run_directory import read_json
from mprun.sweep.jobs import Cell, outcome_words

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Run:
    """What the table needs of one run."""

    group: tuple[str, ...]  # what is swept beside precision and seed
    mode: str
    scaler: str
    seed: int
    status: str
    words: str  # the status as the table shows it
    step: int = 0
    loss: float = math.nan
    skipped: int = 0
    samples_per_s: float | None = None
    sample: str = ""
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    measure: str = ""

    @classmethod
    def without_record(cls, cell: Cell, swept: Iterable[str], words: str) -> "Run":
        """A run that ended before it could write a record; `words` say how."""
        return cls(
            group=_group(cell.overrides, swept),
            mode=cell.mode,
            scaler=cell.scaler,
            seed=cell.seed,
            status="failed",
            words=words,
        )


def load_run(directory: Path, swept: Iterable[str] = ()) -> Run:
    """Read one run directory.

    swept: keys that tell runs apart even if they say nothing about what is learned (device, ...).
    """
    record = read_json(directory / "run.json")
    memory = record.get("memory", {})
    final = record.get("final", {})
    return Run(
        group=_group(record["overrides"], swept),
        mode=record["precision"]["mode"],
        scaler=record["precision"]["scaler"],
        seed=record["seed"],
        status=record["status"],
        words=outcome_words(record),
        step=record.get("last_step", 0),
        loss=float(final.get("loss", math.nan)),
        skipped=record.get("skipped", 0),
        samples_per_s=record.get("throughput", {}).get("samples_per_s"),
        sample=record["sample"],
        peak_bytes=memory.get("peak_bytes"),
        saved_bytes=memory.get("saved_for_backward_bytes"),
        measure=memory.get("measure", ""),
    )


def short(text: str, length: int) -> str:
    """`text` in one line of at most `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


# Groups that never separate rows: the mode has its own column.
_OWN_COLUMN = {"precision", "scaler"}


def _group(overrides: Iterable[str], swept: Iterable[str]) -> tuple[str, ...]:
    """The overrides that separate rows: what is learned, and whatever else is swept but seeds."""
    told = []
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        if key not in _OWN_COLUMN and (is_told(key) or (key in swept and key != "seed")):
            told.append(override)
    return tuple(sorted(told))


def table(runs: list[Run]) -> str:
    """A Markdown table, one row per mode (and per what else is swept), FP32 first.

    Difference: of the mean losses over the seeds that FP32 and the mode share, as in `compare`.
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
        f"{next((run.sample for run in runs if run.sample), 'sample')}s/s",
        "saved MiB",
        "peak MiB",
    ]
    everywhere = set.intersection(*(set(run.group) for run in runs))
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
            label = " ".join([label, *(text for text in group if text not in everywhere)])
            rows.append([label, *_row(cells, seeds, baseline, mode)])
    text = markdown_table(header, rows)
    return (
        f"{text}\n\nloss: final evaluation; peak MiB: {measure}; saved MiB: kept for backward"
        " (under autocast with the 16-bit weight copies)"
    )


def _row(cells: dict[int, Run], seeds: list[int], baseline: dict[int, float], mode: str) -> list:
    losses = [cells[seed].loss for seed in seeds if seed in cells]
    shared = [seed for seed in seeds if seed in cells and seed in baseline]
    difference = "baseline"
    if mode != "fp32":
        own, base = [cells[seed].loss for seed in shared], [baseline[seed] for seed in shared]
        difference = _percent(own, base)
    speeds = [run.samples_per_s for run in cells.values() if run.samples_per_s]
    saved = [run.saved_bytes for run in cells.values() if run.saved_bytes]
    peaks = [run.peak_bytes for run in cells.values() if run.peak_bytes]
    return [
        *(_number(cells[seed].loss) if seed in cells else "" for seed in seeds),
        _number(statistics.fmean(losses)) if losses else "",
        difference,
        str(sum(run.skipped for run in cells.values())),
        _statuses(cells.values()),
        f"{statistics.median(speeds):,.0f}" if speeds else "",
        f"{max(saved) / _MIB:.1f}" if saved else "",
        f"{max(peaks) / _MIB:.0f}" if peaks else "",
    ]


def _statuses(runs: Iterable[Run]) -> str:
    """How the runs of one row ended; how many in which way, if it was not all in one."""
    steps = [run.step for run in runs if run.status == "diverged"]
    ways = Counter(
        f"diverged at step {_span(steps)}" if run.status == "diverged" else run.words
        for run in runs
    )
    texts = {short(way, 100): count for way, count in ways.items()}
    return ", ".join(text if len(ways) == 1 else f"{n} {text}" for text, n in texts.items())


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else str(value)


def _percent(own: list[float], base: list[float]) -> str:
    if not own:
        return "no FP32 run"
    mean = sum(base)
    difference = (sum(own) - mean) / mean if mean else math.nan
    return f"{100 * difference:+.2f} %" if math.isfinite(difference) else "not finite"


def _span(steps: list[int]) -> str:
    return str(min(steps)) if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}"

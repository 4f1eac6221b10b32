"""One table over the runs of a sweep: what each precision mode did to the result.

Reads run.json only; imports no torch.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
    measure = _first([run.measure for run in runs], "peak memory")
    header = [
        "mode",
        *(f"loss, seed {seed}" for seed in seeds),
        "mean",
        "vs FP32",
        "skipped",
        "status",
        f"{_first([run.sample for run in runs], 'sample')}s/s",
        "saved MiB",
        "peak MiB",
    ]
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    everywhere = set.intersection(*map(set, groups))
    rows = []
    for group, own in groups.items():
        shown = [text for text in group if text not in everywhere]
        rows += [[" ".join([label, *shown]), *row] for label, row in _rows(own, seeds)]
    text = markdown_table(header, rows)
    return (
        f"{text}\n\nloss: final evaluation; peak MiB: {measure}; saved MiB: kept for backward"
        " (under autocast with the 16-bit weight copies)"
    )


def _first(words: list[str], otherwise: str) -> str:
    return next(filter(None, words), otherwise)


def _rows(runs: list[Run], seeds: list[int]) -> Iterator[tuple[str, list[str]]]:
    """(label, cells) of each mode and scaler among runs that differ in nothing else; FP32 first."""
    cells: dict[tuple[str, str], dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: run.mode != "fp32"):
        cells.setdefault((run.mode, run.scaler), {})[run.seed] = run
    names = [mode for mode, _ in cells]
    baseline = {run.seed: run.loss for run in runs if run.mode == "fp32"}
    for (mode, scaler), by_seed in cells.items():
        label = f"{mode} ({scaler})" if names.count(mode) > 1 else mode
        yield label, _row(by_seed, seeds, None if mode == "fp32" else baseline)


def _row(by_seed: dict[int, Run], seeds: list[int], baseline: dict[int, float] | None) -> list[str]:
    """baseline: the loss of FP32 by seed; None of FP32 itself."""
    losses = {seed: by_seed[seed].loss for seed in seeds if seed in by_seed}
    runs = by_seed.values()
    return [
        *(_number(losses[seed]) if seed in losses else "" for seed in seeds),
        _number(statistics.fmean(losses.values())),
        "baseline" if baseline is None else _percent(losses, baseline),
        str(sum(run.skipped for run in runs)),
        _statuses(runs),
        _of_known(statistics.median, [run.samples_per_s for run in runs], "{:,.0f}"),
        _of_known(max, [run.saved_bytes for run in runs], "{:.1f}", _MIB),
        _of_known(max, [run.peak_bytes for run in runs], "{:.0f}", _MIB),
    ]


def _of_known(
    summary: Callable[[list[float]], float],
    values: Iterable[float | None],
    form: str,
    unit: int = 1,
) -> str:
    """The summary of the values that there are, as text; nothing without one."""
    known = [value for value in values if value]
    return form.format(summary(known) / unit) if known else ""


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


def _percent(losses: dict[int, float], baseline: dict[int, float]) -> str:
    """How far the losses of the seeds that both have are from those of FP32, together."""
    shared = losses.keys() & baseline.keys()
    if not shared:
        return "no FP32 run"
    mean = sum(baseline[seed] for seed in losses if seed in shared)
    own = sum(losses[seed] for seed in losses if seed in shared)
    difference = (own - mean) / mean if mean else math.nan
    return f"{100 * difference:+.2f} %" if math.isfinite(difference) else "not finite"


def _span(steps: list[int]) -> str:
    return str(min(steps)) if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}"

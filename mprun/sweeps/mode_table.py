"""A table over the runs of a sweep: the effect of each precision mode on the result."""

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from mprun.config.keys import role_of
from mprun.errors import shortened
from mprun.record.console import markdown_table
from mprun.record.layout import fitted_tables
from mprun.record.run_record import OUTCOMES, activation_bytes
from mprun.sweeps.jobs import Cell, outcome_words


def without_record(cell: Cell, words: str) -> dict:
    """Make the record of a run that ended before it could write one; `words` say how."""
    return {
        "overrides": cell.overrides,
        "precision": {"mode": cell.mode, "scaler": cell.scaler},
        "seed": cell.seed,
        "status": "failed",
        "cause": words.removeprefix("failed: "),
    }


def _separates(override: str, swept: Iterable[str]) -> bool:
    """Return whether rows differ in an override: of the experiment, or swept, except the seed."""
    key = override.lstrip("+").partition("=")[0]
    own_column = key in ("precision", "scaler")
    return not own_column and (role_of(key).told or (key in swept and key != "seed"))


def table(records: list[dict], swept: Iterable[str] = (), width: int | None = None) -> str:
    """Return a Markdown table, a row for each mode and other swept value, the baseline first.

    The baseline is the mode that compare.baseline of the first record names, FP32 without one.
    The difference compares the mean losses over the seeds that baseline and mode share, as in
    `compare`. A run without an outcome has no loss here and is in no mean; a mean or a difference
    that lacks seeds says so. Speed and peak memory of an emulated mode are marked, and left out if
    every mode is emulated. It fits into `width` characters.

    Args:
        records: the run.json of every run.
        swept: keys that separate runs even if they do not change the experiment (device).
    """
    if not records:
        return "no run has started"
    seeds = sorted({record["seed"] for record in records})
    measures = (record.get("memory", {}).get("measure") for record in records)
    samples = (record.get("sample") for record in records)
    configured = (record.get("config", {}).get("compare", {}).get("baseline") for record in records)
    baseline = next(filter(None, configured), "fp32")
    header = [
        "mode",
        *(f"loss, seed {seed}" for seed in seeds),
        *("mean", f"vs {'FP32' if baseline == 'fp32' else baseline}", "skipped", "status"),
        f"{next(filter(None, samples), 'sample')}s/s",
        *("act. MiB", "peak MiB"),
    ]
    groups: dict[tuple[str, ...], list[dict]] = {}
    for record in records:
        group = tuple(sorted(text for text in record["overrides"] if _separates(text, swept)))
        groups.setdefault(group, []).append(record)
    everywhere = set.intersection(*map(set, groups))
    rows = []
    # Values of a mode separate rows, but not from their baseline.
    of_it: dict[tuple[str, ...], dict[int, float]] = {}
    for group, own in groups.items():
        losses = {r["seed"]: _loss(r) for r in own if _is_of(baseline, r) and _is_outcome(r)}
        of_it.setdefault(_beside_modes(group), {}).update(losses)
    for group, own in groups.items():
        for label, *row in _rows(own, seeds, baseline, of_it[_beside_modes(group)]):
            shown = (text for text in group if text not in everywhere)
            more = [text for text in shown if text.removeprefix("precision.") not in label]
            rows.append([" ".join([label, *more]), *row])
    peak = f"peak MiB: {next(filter(None, measures), 'peak memory')}; "
    precisions = [record["precision"] for record in records]
    modes = [p.get("half_products") for p in precisions if p["mode"] != "fp32"]
    known = [half_products for half_products in modes if half_products is not None]
    if known and all("emulated" in half_products for half_products in known):
        header, *rows = [[*row[:-3], row[-2]] for row in (header, *rows)]
        peak = "speed and peak memory left out, they would be the emulation's; "
    note = f"loss: final evaluation; {peak}act. MiB: activation memory (under autocast with the "
    note += "16-bit weight copies)"
    if width is not None:
        note = textwrap.fill(note, width)
    return f"{fitted_tables(markdown_table(header, rows), width)}\n\n{note}"


def _is_of(baseline: str, record: dict) -> bool:
    """Return whether a run has the baseline's mode and its usual scaler."""
    precision = record["precision"]
    # A run without a record has no usual one.
    usual = precision.get("usual_scaler", precision["scaler"])
    return precision["mode"] == baseline and precision["scaler"] == usual


def _beside_modes(overrides: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text for text in overrides if not text.lstrip("+").startswith("precision."))


def _rows(
    records: list[dict], seeds: list[int], baseline: str, losses: dict[int, float]
) -> Iterator[list[str]]:
    """Yield a row for each mode and scaler of otherwise equal runs, the baseline first.

    losses: the baseline's, by seed.
    """
    found: dict[tuple[str, str], dict[int, dict]] = {}
    for record in sorted(records, key=lambda record: not _is_of(baseline, record)):
        precision = record["precision"]
        found.setdefault((precision["mode"], precision["scaler"]), {})[record["seed"]] = record
    names = [mode for mode, _ in found]
    for (mode, scaler), by_seed in found.items():
        label = f"{mode} ({scaler})" if names.count(mode) > 1 else mode
        own = any(_is_of(baseline, record) for record in by_seed.values())
        yield [label, *_cells(by_seed, seeds, None if own else losses)]


def _cells(
    by_seed: dict[int, dict], seeds: list[int], baseline: dict[int, float] | None
) -> list[str]:
    """Return the cells of a row. baseline: its loss by seed; None in the baseline's own row."""
    own = list(by_seed.values())
    losses = {seed: _loss(record) for seed, record in by_seed.items() if _is_outcome(record)}
    memory = [record.get("memory", {}) for record in own]
    speeds = [record.get("throughput", {}).get("samples_per_s") for record in own]
    products = [record["precision"].get("half_products") or "" for record in own]
    mark = " (emulated)" if any("emulated" in text for text in products) else ""
    return [
        *(_number(losses[seed]) if seed in losses else "" for seed in seeds),
        _mean(losses, len(seeds)),
        "baseline" if baseline is None else _percent(losses, baseline, len(seeds)),
        str(sum(record.get("skipped", 0) for record in own)),
        _statuses(own),
        _of_known(f"{{:,.0f}}{mark}", statistics.median, speeds),
        _of_known("{:.1f}", _most_mib, [*map(activation_bytes, memory)]),
        _of_known(f"{{:.0f}}{mark}", _most_mib, [m.get("peak_bytes") for m in memory]),
    ]


def _most_mib(counts: list[float]) -> float:
    return max(counts) / 2**20


def _is_outcome(record: dict) -> bool:
    return record["status"] in OUTCOMES


def _loss(record: dict) -> float:
    return float(record.get("final", {}).get("loss", math.nan))


def _mean(losses: dict[int, float], seeds: int) -> str:
    """Return the mean, with the number of seeds that it is over if those are not all."""
    if not losses:
        return ""
    of = "" if len(losses) == seeds else f" ({len(losses)} of {seeds} seeds)"
    return _number(statistics.fmean(losses.values())) + of


def _of_known(
    form: str, summary: Callable[[list[float]], float], values: Iterable[float | None]
) -> str:
    """Format the summary of the values that are known; "" without any."""
    known = [value for value in values if value]
    return form.format(summary(known)) if known else ""


def _statuses(records: list[dict]) -> str:
    """Describe how the runs of one row ended, with counts if they ended differently."""
    steps = {r.get("last_step", 0) for r in records if r["status"] == "diverged"}
    span = "-".join(map(str, sorted({min(steps), max(steps)}))) if steps else ""
    ways = Counter(
        f"diverged at step {span}" if r["status"] == "diverged" else outcome_words(r)
        for r in records
    )
    texts = {shortened(way, 100): count for way, count in ways.items()}
    return ", ".join(text if len(ways) == 1 else f"{n} {text}" for text, n in texts.items())


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else str(value)


def _percent(losses: dict[int, float], baseline: dict[int, float], seeds: int) -> str:
    """Return the relative difference to the baseline of the summed losses of shared seeds.

    Zero has no sign; "0 (identical)" if each loss equals its counterpart. If not all of the table's
    `seeds` are shared, those that are get named.
    """
    shared = [seed for seed in losses if seed in baseline]
    if not shared:
        return "no baseline loss" if losses else ""
    mean = sum(baseline[seed] for seed in shared)
    own = sum(losses[seed] for seed in shared)
    difference = (own - mean) / mean if mean else math.nan
    text = f"{100 * difference:+.2f} %"
    if not math.isfinite(difference):
        text = "not finite"
    elif all(losses[seed] == baseline[seed] for seed in shared):
        text = "0 (identical)"
    elif not text.strip("+-0. %"):
        text = text[1:]
    some = f" (seed{'s' * (len(shared) > 1)} {', '.join(map(str, sorted(shared)))})"
    return text + some * (len(shared) < seeds)

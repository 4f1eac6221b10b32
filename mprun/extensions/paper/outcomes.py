"""The outcomes of a row's runs, beside those of the paper.

A row has the paper's outcome if it equals FP32 there and `matches` here, or if it fails there and
is worse or diverges here; what diverges there and is worse here is told as that. A match tells
something only if an arm with less of the paper's techniques fails on the same runs: otherwise the
network, at this size, needs none of them.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mprun.comparison import compare
from mprun.comparison.findings import Comparison, Group
from mprun.comparison.findings import Row as Compared
from mprun.comparison.grouping import ProtoGroup
from mprun.comparison.verdict import assess
from mprun.comparison.wording import (
    baseline_name,
    difference_text,
    margin_text,
    seeds_text,
    value_text,
)
from mprun.config.option_files import modes
from mprun.errors import BadInput
from mprun.extensions.paper.rows import (
    DIVERGES,
    EQUAL,
    FAILS,
    NAIVE,
    ROWS,
    PaperArm,
    PaperRow,
    lstm_text,
)
from mprun.record.run_record import read_record

YES, NO, UNDECIDED, NOT_RUN = "yes", "no", "undecided", "not run"
_NOT_RUN_TEXT = "naive FP16 was not run"
WORSE_SIDE = "yes by the margin, yet worse"  # the whole interval is on the worse side
NOT_DIVERGED = "worse, not diverged"  # of what diverges in the paper
FAILED = ("diverged", "worse", "likely worse")
_MODES = ("fp16_naive", "fp16_master", "fp16_master_scaled", "amp")  # BF16 and FP8 came later


@dataclass(slots=True)
class Line:
    """One technique: our result beside the paper's, as text."""

    technique: str
    overrides: tuple[str, ...]
    paper: str
    same_outcome: str  # whether it is the paper's; empty if the paper has none
    verdict: str = NOT_RUN
    mean: str = ""  # of the judged metric over the seeds that ended
    shown: str = ""  # mean of `PaperRow.metric`
    difference: str = ""
    beside: str = ""  # verdict and difference by `PaperRow.metric`, if another metric decides
    seeds: Sequence[int] = ()  # that were judged
    values: Sequence[str] = ()
    runs: Sequence[str] = ()  # their directories


@dataclass(slots=True)
class RowOutcome:
    """A row with its runs."""

    row: PaperRow
    fp32: str = ""  # mean and deviation of FP32's runs
    fp32_shown: str = ""  # their mean of `PaperRow.metric`
    fp32_values: Sequence[str] = ()
    fp32_runs: Sequence[str] = ()
    network: str = ""  # that was trained, from the records
    data: str = ""  # that it was trained on
    lines: list[Line] = field(default_factory=list)  # in the order of the row's arms
    group: Group | None = None  # None: nothing was compared
    why_not: str = ""  # why nothing was compared
    probes: Path | None = None  # directory of the run that counted its tensors
    slug: str = ""  # that of the group if existing runs are judged

    @property
    def key(self) -> str:
        """The key of the row, unique on a page."""
        return f"{self.row.key}-{self.slug}" if self.slug else self.row.key

    @property
    def metric(self) -> str:
        """The judged metric."""
        return "" if self.group is None else self.group.metric

    @property
    def margin(self) -> str:
        """Return the margin of the verdicts, as it was set."""
        return "" if self.group is None else margin_text(self.group)

    @property
    def discriminates(self) -> str:
        """Tell whether an arm that lacks a technique of another one fails; empty: nothing ran."""
        ran = [line for line in self.lines if line.verdict != NOT_RUN]
        known = [control(line, ran) for line in ran]
        controls = [line for line in ran if line in known]  # naive FP16 last
        if told := [_told(line) for line in controls if line.verdict in FAILED]:
            return f"yes ({'; '.join(told)})"
        if not controls:
            return f"not known ({_NOT_RUN_TEXT})" if ran else ""
        least = controls[-1]
        return f"{'no' if _is_equal(least.verdict) else 'not known'} ({_told(least)})"


def found_of(
    row: PaperRow,
    directories: Mapping[str, Sequence[Path]],
    why_not: str = "",
    probes: Path | None = None,
) -> RowOutcome:
    """Read the existing runs of a row.

    Args:
        row: a row of the paper.
        directories: technique -> its runs, also those that have not begun.
        why_not: why there is nothing to read.
        probes: directory of the run that counts its tensors.
    """
    # These runs alone: beside them may lie others, of other seeds.
    runs = [one for own in directories.values() for one in own if (one / "run.json").exists()]
    if not why_not and runs:
        technique = {run.resolve(): name for name, own in directories.items() for run in own}
        try:
            comparison = compare(runs)
        except BadInput as error:
            return _outcome(row, str(error), probes)
        for group in comparison.groups:
            ran: dict[str, Compared] = {}
            for one in group.every_row:
                named = (technique.get(Path(run.path).resolve()) for run in one.arm.runs)
                ran[next(filter(None, named), "")] = one
            if "FP32" in ran:
                return _filled(_outcome(row, "", probes), group, ran)
        why_not = "; ".join(comparison.not_compared) or "FP32 has no outcome"
    return _outcome(row, why_not or "no runs", probes)


def beside(comparison: Comparison) -> tuple[list[RowOutcome], list[str]]:
    """Put existing runs beside the paper.

    Returns:
        For each group the rows of its network, then the row of the technique that it tests; and a
        line for each group without a row of its network.
    """
    found, without = [], []
    for group in comparison.groups:
        model = group.keys.get("model.name")
        rows = [row for row in ROWS if model in row.models]
        if not rows:
            name = "such network" if model is None else str(model).replace("_", " ")
            without.append(f"{group.title}: the paper has no {name}: there is no row to compare")
        ran = {_mode(row) for row in group.rows}
        if model is not None and "fp16_naive" in ran and ran & set(_MODES[1:3]):
            rows += [row for row in ROWS if row.key == "mandarin_weights"]
        found += [_beside(group, row) for row in rows]
    return found, without


def _beside(group: Group, row: PaperRow) -> RowOutcome:
    arms = [arm for arm in row.arms if arm.value or any(_is(arm, own) for own in group.rows)]
    arms = [replace(arm, outcome="") if arm.constructed else arm for arm in arms]
    ran = {"FP32": group.baseline}
    for own in group.rows:
        if _mode(own) not in _MODES:
            continue
        arm = next((arm for arm in arms if _is(arm, own) and arm.technique not in ran), None)
        if arm is None:
            arm = PaperArm(own.arm.label, ())
            arms.append(arm)
        ran[arm.technique] = own
    titled = replace(row.result, network=f"{group.title}: {row.result.network}")
    differs = tuple(_differences(group, row))
    told = replace(row, result=titled, arms=tuple(arms), differs=differs, tried="", constructed="")
    found = _outcome(told, "", Path(group.baseline.arm.runs[0].path))
    found.slug = group.slug
    return _filled(found, group, ran)


def _outcome(row: PaperRow, why_not: str, probes: Path | None) -> RowOutcome:
    """Return the outcome of a row without runs."""
    lines = [
        Line(arm.technique, arm.overrides, arm.value, NOT_RUN if arm.outcome else "")
        for arm in row.arms
    ]
    return RowOutcome(row, lines=lines, why_not=why_not, probes=probes)


def _filled(found: RowOutcome, group: Group, ran: Mapping[str, Compared]) -> RowOutcome:
    """Add the runs of a group; ran: technique -> its runs, also those of FP32."""
    base, found.group = ran["FP32"], group
    found.fp32 = _with_deviation([outcome.value for outcome in base.outcomes])
    found.fp32_values = [str(outcome.value) for outcome in base.outcomes]
    found.fp32_runs = [run.path for run in base.arm.runs]
    found.fp32_shown = _mean_of(base, found.row.metric)
    record = read_record(Path(base.arm.runs[0].path))
    found.network, found.data = _network(record, group), _data(record, group)
    judged = _by_metric(group, found.row.metric)
    for arm, line in zip(found.row.arms, found.lines, strict=True):
        own = ran.get(arm.technique)
        if own is None:
            continue
        line.beside = judged.get(own.arm.label, "")
        line.runs = [run.path for run in own.arm.runs]
        line.verdict, line.seeds = own.verdict.name, own.verdict.seeds
        line.mean, line.shown = value_text(own.mean), _mean_of(own, found.row.metric)
        line.difference = difference_text(group, own.verdict)
        line.values = [str(outcome.value) for outcome in own.outcomes]
    for arm, line in zip(found.row.arms, found.lines, strict=True):
        if line.verdict != NOT_RUN:
            low = ran[line.technique].verdict.low
            lesser = control(line, found.lines)
            line.same_outcome = same_outcome(arm.outcome, line.verdict, low, lesser)
            if line.same_outcome:
                _remark(line, arm.outcome, found.row)
    return found


def _by_metric(group: Group, metric: str) -> dict[str, str]:
    """Return label -> verdict and difference by another metric, with its own usual margin."""
    if metric in ("", group.metric):
        return {}
    arms = [row.arm for row in group.rows]
    proto = ProtoGroup(group.title, group.slug, group.baseline.arm, arms, group.keys)
    with suppress(BadInput):  # not every run records it
        other = assess(proto, metric=metric)
        return {
            row.arm.label: f"{row.verdict.name}, {difference_text(other, row.verdict)}".strip(", ")
            for row in other.rows
        }
    return {}


def _remark(line: Line, published: str, row: PaperRow) -> None:
    """Put beside an outcome what qualifies it: how its setting was made, another metric's word."""
    constructed = row.constructed and published != EQUAL and line.verdict in FAILED
    remarks = ["constructed setting"] * bool(constructed)
    if line.beside:
        remarks.append(f"by {row.metric} {line.beside.partition(',')[0]}")
    text, bracket, inside = line.same_outcome.partition(" (")
    if remarks:
        told = [inside.removesuffix(")")] * bool(bracket) + remarks
        line.same_outcome = f"{text} ({'; '.join(told)})"


def control(line: Line, lines: Sequence[Line]) -> Line | None:
    """Return the arm of `lines` that lacks a technique of `line`: the loss scale, then masters.

    None: none of these ran, or `line` has no technique.
    """
    scaled = "precision=fp16_master_scaled" in line.overrides
    unscaled = ("precision=fp16_master",) if scaled else None
    naive = None if line.overrides == NAIVE.overrides else NAIVE.overrides
    ran = {one.overrides: one for one in lines if one.verdict != NOT_RUN}
    return next((ran[own] for own in (unscaled, naive) if own in ran), None)


def _is(arm: PaperArm, own: Compared) -> bool:
    """Return whether the runs use this technique."""
    if not arm.overrides or not own.arm.runs:
        return False
    run, wanted = own.arm.runs[0], dict(one.split("=") for one in arm.overrides)
    scaler = wanted.get("scaler", modes()[wanted["precision"]].scaler)
    scale = wanted.get("scaler.scale")
    as_wanted = (run.mode, run.scaler) == (wanted["precision"], scaler)
    return as_wanted and (scale is None or run.keys.get("scaler.scale") == float(scale))


def _mode(row: Compared) -> str:
    """Return the named mode; records add changed fields, as "fp16_master+norm_dtype=fp16"."""
    return row.arm.mode.partition("+")[0]


def _differences(group: Group, row: PaperRow) -> Iterator[str]:
    """List the differences between the runs of a group and the paper."""
    name = group.keys.get("data.name") or "unknown data"
    yield f"data {name} (numbers compare only if that is {row.result.data})"
    if group.keys.get("model.name") not in row.models:
        yield "another network: the technique alone is compared"
    yield from row.seen_in(group)
    if (baseline := baseline_name(group)) != "FP32":
        yield f"{baseline} is the baseline in place of FP32"


def same_outcome(
    published: str, verdict: str, low: float | None = None, lesser: Line | None = None
) -> str:
    """Return whether the outcome is the paper's, in words; empty if the paper has none.

    The paper's EQUAL says that nothing is lost; a better result does not contradict it.

    Args:
        published: EQUAL, FAILS, DIVERGES or empty.
        verdict: as `mprun compare` names it.
        low: the lower end of the difference's interval; positive is worse.
        lesser: its `control`.
    """
    if not published:
        return ""
    if _is_equal(verdict):
        if published != EQUAL:
            return NO
        if low is not None and low > 0:
            return WORSE_SIDE
        if lesser is not None and lesser.verdict in FAILED:
            return YES
        return f"{YES}, tells nothing ({_NOT_RUN_TEXT if lesser is None else _told(lesser)})"
    if verdict in FAILED:
        if published == DIVERGES and verdict != "diverged":
            return NOT_DIVERGED if verdict == "worse" else f"{verdict}, not diverged"
        return YES if published in (FAILS, DIVERGES) else NO
    return UNDECIDED


def _is_equal(verdict: str) -> bool:
    return verdict == "matches" or "better" in verdict


def _told(line: Line) -> str:
    """Say how an arm that lacks a technique ended."""
    name = "naive FP16" if line.overrides == NAIVE.overrides else "unscaled FP16"
    return f"{name} {'matches too' if line.verdict == 'matches' else line.verdict}"


def counted(found: Sequence[RowOutcome]) -> str:
    """Count the outcomes that the paper has, in a sentence; runs that two rows share count once."""
    words: dict[tuple[Any, ...], str] = {}
    for one in found:
        for line in one.lines:
            if line.same_outcome and line.verdict != NOT_RUN:
                key = (one.slug or one.row.overrides, line.overrides or line.technique)
                words.setdefault(key, line.same_outcome.partition(" (")[0])
    counts = Counter(words.values())
    listed = "; ".join(f'{count} "{word}"' for word, count in counts.most_common())
    return f"{counts.total()} outcomes of the paper were judged: {listed}." if counts else ""


def _with_deviation(values: Sequence[float]) -> str:
    """Return the mean of the finite values as text: "0.5052 (sd 0.0012, n = 3)"."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    spread = f"sd {statistics.stdev(known):.2g}, " if len(known) > 1 else ""
    return f"{value_text(statistics.fmean(known))} ({spread}n = {len(known)})"


def _mean_of(row: Compared, metric: str) -> str:
    """Return the mean over runs of the last value of another metric, as text."""
    if not metric:
        return ""
    last = [run.evals[metric][-1] for run in row.arm.runs if len(run.evals.get(metric, ()))]
    known = [float(value) for value in last if math.isfinite(value)]
    return value_text(statistics.fmean(known)) if known else ""


def _network(record: dict[str, Any], group: Group) -> str:
    dtypes = record.get("precision", {}).get("effective_dtypes") or {}
    count = sum(sum(own["parameters"].values()) for own in dtypes.values())
    parts = [str(record.get("choices", {}).get("model") or group.keys.get("model.name"))]
    if group.keys.get("model.name") == "lstm_lm":
        parts.append(lstm_text(group.keys))
    return ", ".join([*parts, *([f"{count:,} parameters"] if count else [])])


def _data(record: dict[str, Any], group: Group) -> str:
    """Describe data, length, seeds and device, as far as they were recorded."""
    data, runs = record.get("data", {}), group.baseline.arm.runs
    parts = [str(data.get("name") or group.keys.get("data.name") or "unknown data")]
    if "train_samples" in data:
        parts[0] += f", {data['train_samples']:,} / {data['eval_samples']:,} held out"
    if (size := group.keys.get("data.image_size")) is not None:
        parts[0] += f", {size}x{size}"
    if (level := group.keys.get("data.level")) is not None:
        parts[0] += f", {level} level"
    steps = f"{max(run.last_step for run in runs):,} steps"
    if batch := record.get("samples_per_step"):
        steps += f" of {batch:,} {runs[0].sample}s"
    parts += [steps, f"seeds {seeds_text({run.seed for run in runs})}", *_devices(group)]
    return "; ".join(parts)


def _devices(group: Group) -> list[str]:
    """List the devices of the runs; emulation is "CPU, 16-bit products emulated"."""
    names: dict[str, None] = {}  # keeps the order
    for run in group.every_run:
        name = run.environment.get("gpu") or (run.environment.get("device") or "").upper()
        emulated = name == "CPU" and run.keys.get("cpu_half", "emulated") == "emulated"
        names["CPU, 16-bit products emulated" if emulated else name] = None
    return [name for name in names if name]

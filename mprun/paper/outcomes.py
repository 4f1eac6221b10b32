"""What came of the runs of a row, beside what the paper says.

A row of the paper has the same outcome here where it is equal to FP32 there and `matches` here, or
diverges there and is worse or diverges here. Where FP16 without masters matches as well, the row
does not discriminate: the network, at this size, does not need the technique.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mprun.compare import compare
from mprun.compare.findings import Group
from mprun.compare.findings import Row as Compared
from mprun.compare.text import difference_text, value_text
from mprun.errors import BadInput
from mprun.paper.rows import EQUAL, FAILS, NAIVE, Arm, Row
from mprun.record.run_directory import read_record

YES, NO, UNDECIDED, NOT_RUN = "yes", "no", "undecided", "not run"
_FAILED = ("diverged", "worse", "likely worse")


@dataclass(slots=True)
class Line:
    """One technique: ours beside the paper's.

    Attributes:
        value: mean of the judged metric over the seeds that ended, as text.
        shown: mean of the row's own metric, as text.
        same: whether the outcome is the paper's; empty where the paper has none.
    """

    arm: Arm
    value: str = ""
    shown: str = ""
    difference: str = ""
    verdict: str = ""
    same: str = ""
    found: Compared | None = None


@dataclass(slots=True)
class Found:
    """A row with its runs.

    Attributes:
        fp32: mean and deviation of FP32's runs, as text.
        network, data: what was trained, from its records.
        lines: of the arms, in the order of the row.
        group: as compared; None: nothing was.
        why_not: why nothing was.
        discriminates: None: FP16 without masters is not decided.
    """

    row: Row
    fp32: str = ""
    fp32_shown: str = ""
    network: str = ""
    data: str = ""
    lines: list[Line] = field(default_factory=list)
    group: Group | None = None
    why_not: str = ""
    discriminates: bool | None = None

    @property
    def metric(self) -> str:
        """The one that is judged."""
        return "" if self.group is None else self.group.metric


def found_of(row: Row, directories: Mapping[str, Sequence[Path]], why_not: str = "") -> Found:
    """Read what there is.

    Args:
        row: of the paper.
        directories: technique -> its runs, those too that were not begun.
        why_not: why nothing is to be read.
    """
    found = Found(row, why_not=why_not)
    found.lines = [Line(arm, same=NOT_RUN if arm.outcome else "") for arm in row.arms]
    folders = sorted({directory.parent for own in directories.values() for directory in own})
    folders = [folder for folder in folders if folder.is_dir()]
    if why_not or not folders:
        found.why_not = why_not or "no runs"
        return found
    try:
        comparison = compare(folders)
    except BadInput as error:
        found.why_not = str(error)
        return found
    of_technique = {
        str(Path(directory).resolve()): technique
        for technique, own in directories.items()
        for directory in own
    }
    for group in comparison.groups:
        rows = {_technique(one, of_technique): one for one in group.every_row}
        if "FP32" in rows:
            _fill(found, group, rows)
            return found
    found.why_not = "; ".join(comparison.not_compared) or "FP32 has no outcome"
    return found


def _technique(row: Compared, of_technique: Mapping[str, str]) -> str | None:
    known = [of_technique.get(str(Path(run.path).resolve())) for run in row.arm.runs]
    return next((name for name in known if name is not None), None)


def _fill(found: Found, group: Group, rows: Mapping[str | None, Compared]) -> None:
    base, found.group = rows["FP32"], group
    found.fp32 = _with_deviation([outcome.value for outcome in base.outcomes])
    found.fp32_shown = _mean_of(base, found.row.metric)
    record = read_record(Path(base.arm.runs[0].path))
    found.network, found.data = _network(record), _data(record, group)
    for line in found.lines:
        own = rows.get(line.arm.technique)
        if own is None:
            continue
        line.found, line.verdict = own, own.verdict.name
        line.value, line.shown = value_text(own.mean), _mean_of(own, found.row.metric)
        line.difference = difference_text(group, own.verdict)
        line.same = same_outcome(line.arm.outcome, own.verdict.name)
        if line.arm == NAIVE:
            decided = own.verdict.name in ("matches", *_FAILED)
            found.discriminates = own.verdict.name != "matches" if decided else None


def same_outcome(published: str, verdict: str) -> str:
    """YES, NO or UNDECIDED; empty where the paper has no outcome.

    The paper's EQUAL says that nothing is lost, which a better result does not contradict.

    Args:
        published: EQUAL, FAILS or empty.
        verdict: as `mprun compare` names it.
    """
    if not published:
        return ""
    if verdict == "matches" or "better" in verdict:
        return YES if published == EQUAL else NO
    if verdict in _FAILED:
        return YES if published == FAILS else NO
    return UNDECIDED


def _with_deviation(values: Sequence[float]) -> str:
    """ "0.5052 (sd 0.0012, n = 3)" of those that are finite."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    spread = f"sd {statistics.stdev(known):.2g}, " if len(known) > 1 else ""
    return f"{value_text(statistics.fmean(known))} ({spread}n = {len(known)})"


def _mean_of(row: Compared, metric: str) -> str:
    """The mean over runs of the last value of another metric."""
    if not metric:
        return ""
    last = [run.evals[metric][-1] for run in row.arm.runs if len(run.evals.get(metric, ()))]
    known = [float(value) for value in last if np.isfinite(value)]
    return value_text(statistics.fmean(known)) if known else ""


def _network(record: dict[str, Any]) -> str:
    dtypes = record["precision"]["effective_dtypes"]
    count = sum(sum(own["parameters"].values()) for own in dtypes.values())
    return f"{record['choices']['model']}, {count:,} parameters"


def _data(record: dict[str, Any], group: Group) -> str:
    data, steps = record["data"], record["steps"]
    batch = record["samples_per_step"]
    name = f"{data['name']}, {data['train_samples']:,} / {data['eval_samples']:,} held out"
    return f"{name}; {steps:,} steps of {batch:,} {group.baseline.arm.runs[0].sample}s"

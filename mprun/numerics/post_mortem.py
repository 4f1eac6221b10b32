"""Describe the last steps of a diverged run, in numbers and in words; needs no torch.

Files: numerics/post-mortem.json and .md in the run directory. A few skipped updates while a dynamic
scale settles are reported as normal; a row of skips at the floor is a collapse.
"""

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

from mprun.entry_points import hint_of
from mprun.errors import Damaged
from mprun.record.console import markdown_table
from mprun.record.metrics_columns import MetricsColumns
from mprun.record.run_directory import plain, write_json, write_text
from mprun.record.seal import content_of, files_of

LAST = 50  # steps
_NAMED = 5  # steps in a sentence
EXPLOSION = 10.0  # a loss that grew by this factor before the end counts as exploding
NONFINITE_EVALUATION = "non-finite evaluation "  # before the name of the metric
_FILE = Path("numerics") / "post-mortem.json"


def nonfinite_metric(values: Mapping[str, float]) -> str | None:
    """Return why a run ends after an evaluation; None if all of its values are finite.

    The loss is named if it is among them. Of another metric the value tells it from the loss.
    """
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if not bad:
        return None
    name = "loss" if "loss" in bad else f"{bad[0]} = {values[bad[0]]:g}"
    return f"{NONFINITE_EVALUATION}{name}"


class StepRow(NamedTuple):
    """One step as numbers: `step` counts from 1; `skipped` is the total up to and including it."""

    step: int
    loss: float
    loss_scale: float
    found_inf: bool
    skipped: int

    @property
    def diverged(self) -> bool:
        """Return whether the loss is not finite although its update was applied."""
        return not self.found_inf and not math.isfinite(self.loss)


class History:
    """The newest LAST steps of a run on the host, oldest first; norms: by step and metric."""

    def __init__(self):
        self.rows: deque[StepRow] = deque(maxlen=LAST)
        self.norms: dict[int, dict[str, float]] = {}

    def add(self, rows: Sequence[StepRow], metrics: Mapping[str, float]) -> None:
        """Add steps; `metrics`: those of the newest one, by name."""
        self.rows.extend(rows)
        norms = {name: value for name, value in metrics.items() if name.endswith("grad_norm")}
        if norms:
            self.norms[rows[-1].step] = norms
            for step in [step for step in self.norms if step < self.rows[0].step]:
                del self.norms[step]

    def up_to(self, step: int) -> list[dict]:
        """Return the rows up to and including `step` as dictionaries, with the known norms."""
        return [
            row._asdict() | self.norms.get(row.step, {}) for row in self.rows if row.step <= step
        ]


def explosion(rows: Sequence[Mapping]) -> tuple[float, int] | None:
    """Return the last finite loss over the lowest, and the steps since it was twice the lowest.

    None below EXPLOSION.
    """
    applied = [row for row in rows if not row["found_inf"]]
    losses = [(row["step"], row["loss"]) for row in applied if math.isfinite(row["loss"])]
    lowest = min((loss for _, loss in losses), default=0.0)
    if lowest <= 0 or losses[-1][1] < EXPLOSION * lowest:
        return None
    calm = [step for step, loss in losses if loss <= 2 * lowest]
    return losses[-1][1] / lowest, losses[-1][0] - calm[-1]


def bad_losses(measured: MetricsColumns, batches: Mapping[str, str]) -> str:
    """Say that the loss itself was not finite in skipped updates of a run; "" if it always was.

    measured: the run's metrics. batches: `bad_batches` of its run.json.
    """
    steps, skipped = measured.nonfinite_skips.tolist(), measured.skipped
    if not steps:
        return ""
    of = f"{len(steps)} of {skipped:,} skipped update{'s' * (skipped != 1)}"
    alike: dict[str, list[str]] = {}
    for step, text in batches.items():
        alike.setdefault(text, []).append(step)
    found = [f"the data of {_steps(own)}: {text}" for text, own in alike.items()]
    why = f" ({'; '.join(found)})" if found else ""
    where = _steps(steps)
    return f"the loss itself was not finite in {of}, {where}: no loss scale cures that{why}"


def _steps(steps: Sequence[int | str]) -> str:
    named = ", ".join(map(str, steps[:_NAMED]))
    more = f", ... {steps[-1]}" if len(steps) > _NAMED else ""
    return f"step{'s' * (len(steps) > 1)} {named}{more}"


def classify(cause: str, rows: Sequence[Mapping], scaler_kind: str, bad_step: int) -> list[str]:
    """Describe what happened, in one line each; the first says what ended the run.

    rows: the last steps, oldest first (`History`). scaler_kind: "none", "static", "dynamic" or
    "logmax". bad_step: the step that went wrong, if known, else the last one.
    """
    streak = len(list(takewhile(lambda row: row["found_inf"], reversed(rows))))
    before = rows[: len(rows) - streak] if "collapsed" in cause else rows
    lines = [_ending(cause, rows, streak, bad_step)]
    grown = explosion([row for row in before if row["step"] <= max(bad_step, 1)])
    if grown is not None:
        lines.append("exploding loss: grew by {:.3g} in {} steps before".format(*grown))
    if count := sum(row["found_inf"] for row in before):
        updates = "1 skipped update" if count == 1 else f"{count} skipped updates"
        why = "warm-up skips of dynamic scaling: normal"
        if scaler_kind == "static":
            why = "the static loss scale is too large for some batches"
        elif any(later["loss_scale"] > sooner["loss_scale"] for sooner, later in pairwise(before)):
            why = "dynamic scaling looking for the largest scale: normal"
        if bad := sum(row["found_inf"] and not math.isfinite(row["loss"]) for row in before):
            why = f"the loss itself was not finite in {bad} of them, which no loss scale cures"
        lines.append(f"{updates} before: {why}")
    return lines


def _ending(cause: str, rows: Sequence[Mapping], streak: int, bad_step: int) -> str:
    if "collapsed" in cause:
        floor = rows[-1]["loss_scale"] if rows else math.nan
        count = max(streak, next((int(word) for word in cause.split() if word.isdigit()), 0))
        return f"collapse: {count} skips in a row at the floor (loss scale {power(floor)})"
    if "evaluation" in cause:
        _, _, name = cause.partition(NONFINITE_EVALUATION)
        if name in ("", "loss"):
            return "non-finite loss in an evaluation"
        return f"an evaluation returned {name}; the loss is finite"
    late = f" ({rows[-1]['step']}); the cause is step {bad_step}" if rows else ""
    known = bool(rows) and bad_step < rows[-1]["step"]
    return f"non-finite loss at an applied step{late if known else ''}"


def write_post_mortem(
    directory: Path,
    cause: str,
    step: int,
    rows: list[dict],
    scaler_kind: str,
    kept: dict,
    replayable: bool = True,
) -> list[str]:
    """Write both files and return the classification.

    kept: `failure.Kept` as a dictionary. replayable: whether `mprun explain` can take the step.
    """
    lines = classify(cause, rows, scaler_kind, kept["step"])
    content = {"cause": cause, "step": step, "classification": lines, "failure": kept}
    content["rows"] = plain(rows)
    path = directory / _FILE
    path.parent.mkdir(exist_ok=True)
    write_json(path, content)
    write_text(path.with_suffix(".md"), _markdown(content, rows, replayable))
    return lines


def read_post_mortem(directory: Path) -> dict | None:
    """Read a run's post-mortem, numbers as floats; None if it has none, Damaged if torn."""
    path = directory / _FILE
    if not files_of(directory, str(_FILE)):
        return None
    try:
        content = json.loads(content_of(directory, str(_FILE)))
        content["rows"] = [
            {name: float(value) if isinstance(value, str) else value for name, value in row.items()}
            for row in content["rows"]
        ]
        content["cause"], content["step"], content["failure"]["step"], content["classification"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path}: is not a post-mortem ({error})") from None
    return content


def power(value: float) -> str:
    """Return a positive number as a power of two: "2^15.9", "2^16", "0", "inf", "nan"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.log2(abs(value))
    return f"2^{round(exponent)}" if exponent == round(exponent) else f"2^{exponent:.1f}"


def _markdown(content: dict, rows: list[dict], replayable: bool) -> str:
    kept = content["failure"]
    lines = [f"# Post-mortem: {content['cause']} (step {content['step']})", ""]
    lines += [f"- {line}" for line in content["classification"]]
    state = f"not kept ({kept['reason']})"
    if kept["folder"] is not None:
        same = "the same losses, bit for bit"
        if kept["first_difference"] is not None:
            same = f"another loss from step {kept['first_difference']} on"
        elif not kept["compared"]:
            same = "no recorded loss to compare with"
        state = f"`{kept['folder']}` (trained again from step {kept['replayed_from']}: {same})"
    explain = "`mprun explain` on this directory replays that step and looks for the cause."
    lines += [f"- State before step {kept['step']}: {state}.", ""]
    if replayable:
        lines += [hint_of("explain", explain), ""]
    norms = sorted({name for row in rows for name in row if name.endswith("grad_norm")})
    header, table = ["step", "loss", "loss scale", "skipped", *norms], []
    for row in rows:
        start = [str(row["step"]), f"{row['loss']:.6g}", power(row["loss_scale"])]
        measured = [f"{row[name]:.4g}" if name in row else "" for name in norms]
        table.append([*start, "skipped" if row["found_inf"] else "", *measured])
    return "\n".join(lines) + "\n" + markdown_table(header, table) + "\n"

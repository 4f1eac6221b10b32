"""What `mprun explain` has found, as console text and as JSON."""

import math
from dataclasses import dataclass

import torch

from mprun.numerics.first_nonfinite import Finding, in_words, reason_of
from mprun.numerics.interventions import Tried
from mprun.numerics.operands import Largest
from mprun.numerics.post_mortem import power
from mprun.precision import DTYPE_NAMES

RAMP = 12  # modules printed before the culprit
_OUTSIDE = {"forward": "(the model itself)", "loss": "(the loss)", "backward": "(no module)"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of a run that did not end well.

    finding, tried, smallest: None and empty for a run that failed with an exception.
    classification: of the post-mortem. replay: one line about the replayed step. from_start:
    whether changes were tried from the start of the run instead of its bad step.
    """

    run: str
    status: str
    cause: str
    classification: list[str]
    replay: str
    finding: Finding | None
    tried: list[Tried]
    from_start: bool
    smallest: Tried | None
    command: str | None


def as_dict(explanation: Explanation) -> dict:
    """As plain values, non-finite numbers as text."""
    finding = explanation.finding
    content = {
        "run": explanation.run,
        "status": explanation.status,
        "cause": explanation.cause,
        "classification": explanation.classification,
        "replay": explanation.replay,
        "verdict": "exception" if finding is None else finding.verdict,
        "tried_from_start": explanation.from_start,
        "tried": [
            {"change": list(one.overrides), "cures": one.cures, "result": one.result}
            for one in explanation.tried
        ],
        "smallest_cure": None if explanation.smallest is None else explanation.smallest.overrides,
        "command": explanation.command,
    }
    if finding is None:
        return content
    content |= {
        "step": finding.step,
        "kind": finding.kind,
        "reproduced": finding.reproduced,
        "in_words": in_words(finding),
        "details": finding.details,
        "weights": finding.weights,
        "culprit": None,
        "ramp": [
            {
                "phase": one.phase,
                "module": one.module,
                "largest": _plain(one.value),
                "dtype": _name(one.dtype),
            }
            for one in finding.ramp
        ],
    }
    event = finding.event
    if event is not None:
        content["culprit"] = {
            "phase": event.phase,
            "module": event.module,
            "operation": event.operation,
            "tensor": event.tensor,
            "dtype": _name(event.dtype),
            "result": event.result,
            "count": event.count,
            "of": event.of,
            "largest_input": _plain(event.largest_input),
            "in_fp32": _plain(event.would_be),
            "reason": reason_of(event),
        }
    return content


def as_text(explanation: Explanation) -> list[str]:
    """As lines for the console."""
    lines = [f"run       {explanation.run}: {explanation.status}: {explanation.cause}"]
    lines += [f"          {line}" for line in explanation.classification]
    finding = explanation.finding
    lines.append(f"replay    {explanation.replay}")
    if finding is None:
        return lines
    words = in_words(finding)
    lines.append(f"culprit   {words[0]}")
    lines += [f"          {line}" for line in words[1:]]
    if finding.ramp:
        lines += ["ramp      largest absolute values up to there (FP16 ends at 65504, 2^16)"]
        lines += [f"          {line}" for line in _ramp(finding.ramp)]
    if not explanation.tried:
        return lines
    width = max(len(" ".join(one.overrides)) for one in explanation.tried)
    since = "from the start of the run up to" if explanation.from_start else "on"
    lines.append(f"tried     {since} that step and five more")
    for one in explanation.tried:
        verdict = {True: "cures", False: "does not cure", None: "-"}[one.cures]
        lines.append(f"          {' '.join(one.overrides):<{width}}  {verdict:<13}  {one.result}")
    if explanation.smallest is None:
        fp32 = [one for one in explanation.tried if tuple(one.overrides) == ("precision=fp32",)]
        fails_too = "; FP32 fails as well: the recipe is at fault, not the precision"
        without = any(one.cures is False for one in fp32)
        lines.append(f"cure      none of these{fails_too if without else ''}")
    else:
        lines.append(f"cure      {' '.join(explanation.smallest.overrides)} (the smallest of them)")
        lines.append(f"          {explanation.command}")
    return lines


def _ramp(ramp: list[Largest]) -> list[str]:
    shown = ramp[-RAMP - 1 :]
    rows = [
        (one.phase, one.module or _OUTSIDE[one.phase], power(one.value), _name(one.dtype))
        for one in shown
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = []
    for row, one in zip(rows, shown, strict=True):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        beyond = not one.value <= torch.finfo(torch.float16).max
        lines.append(f"{cells}  {row[3]}{'  beyond FP16' if beyond else ''}")
    if len(ramp) > len(shown):
        lines.insert(0, f"... {len(ramp) - len(shown)} before")
    return lines


def _name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _plain(value: float | None):
    return str(value) if value is not None and not math.isfinite(value) else value

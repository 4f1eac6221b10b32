"""The first value of a failed step that was not finite, and what had been growing before it."""

import math
from dataclasses import dataclass, field

import torch

from mprun.numerics.observation import Observation
from mprun.numerics.operands import BACKWARD, FORWARD, INPUT, LOSS, UNSCALE, UPDATE, Event, Largest
from mprun.numerics.post_mortem import power
from mprun.numerics.replay import Steps, buffers, carried, nonfinite, optimizer_state, weights
from mprun.precision import DTYPE_NAMES

_PHASES = {
    INPUT: "casting the batch",
    FORWARD: "forward",
    LOSS: "loss",
    BACKWARD: "backward",
    UNSCALE: "unscaling the gradients",
    UPDATE: "weight update",
}
_DIVIDES = ("div", "reciprocal", "rsqrt", "pow")


@dataclass(slots=True)
class Finding:
    """What the replay of one step has shown.

    verdict: "operation" (then `event` is the culprit), "data" (the batch holds NaN or infinities),
    "earlier" (something was not finite before the step), "statistics" (the buffers of norm layers,
    before an evaluation) or "not found".
    kind, step: of what was replayed (`mprun.numerics.failure.Kept`). reproduced: whether it failed
    again. details: name -> how many values are not finite, of what the verdict is about.
    ramp: largest values by phase and module, in order of execution, up to the culprit.
    weights: weights that are not finite after the step.
    """

    verdict: str
    kind: str
    step: int
    reproduced: bool
    event: Event | None = None
    details: dict[str, str] = field(default_factory=dict)
    ramp: list[Largest] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str | None:
        """The module that the culprit belongs to: its own, or that of the weight it is about."""
        event = self.event
        if event is None:
            return None
        if event.phase in (FORWARD, BACKWARD) and event.module != "loss":
            return event.module
        name = event.tensor.rpartition(" of ")[2]
        return name.rpartition(".")[0] if "." in name else None


def find_culprit(steps: Steps, kind: str) -> Finding:
    """Replay the next step of `steps` (or, for kind "evaluation", an evaluation) and look.

    steps: from a kept state (`mprun.numerics.replay.restore`). Changes the task.
    """
    task, step = steps.built.task, steps.step + (kind != "evaluation")
    if kind == "evaluation":
        return _find_in_evaluation(steps, step)
    batch = _nonfinite_batch(steps)
    before = nonfinite(weights(task)) | nonfinite(carried(task)) | nonfinite(optimizer_state(task))
    with Observation(steps.built) as seen:
        row = steps.advance()
    after = nonfinite(weights(task))
    hidden = list(carried(task).values())
    reproduced = {
        "loss": row.diverged,
        "collapse": row.found_inf,
        "state": bool(after) or bool(nonfinite(carried(task))) or row.diverged,
    }[kind]
    finding = Finding("not found", kind, step, reproduced, weights=after)
    if not reproduced:
        return finding
    if batch:
        finding.verdict, finding.details = "data", batch
        return finding
    # Weights and LSTM state; an optimizer state alone may be infinite for long without harm.
    harmful = {name: text for name, text in before.items() if " of " not in name}
    harmful |= {name: text for name, text in before.items() if name.startswith("master of")}
    sources = _sources(seen, steps, row, hidden)
    event = _first(seen, sources)
    if harmful and (event is None or not event.seen):
        finding.verdict, finding.details = "earlier", harmful
        return finding
    if event is None or not event.seen:
        if before:
            finding.verdict, finding.details = "earlier", before
        return finding
    finding.verdict, finding.event = "operation", event
    finding.ramp = _up_to(seen, event)
    return finding


def in_words(finding: Finding) -> list[str]:
    """The finding as sentences, the culprit first."""
    if finding.verdict == "data":
        where = "; ".join(f"{name}: {text}" for name, text in finding.details.items())
        return [f"the batch of step {finding.step} is not finite ({where}): the data are the cause"]
    if finding.verdict == "earlier":
        where = "; ".join(f"{name}: {text}" for name, text in finding.details.items())
        return [f"not finite before step {finding.step} ({where}): the cause is an earlier step"]
    if finding.verdict == "statistics":
        where = "; ".join(f"{name}: {text}" for name, text in finding.details.items())
        return [f"statistics of norm layers are not finite before the evaluation ({where})"]
    if finding.event is None:
        if not finding.reproduced:
            return ["not found: the replayed step does not fail again"]
        where = "".join(f"; {name} {text}" for name, text in finding.details.items())
        return [f"not found: no operation made a value that is not finite{where}"]
    event = finding.event
    dtype = _dtype(event.dtype)
    where = f"{_PHASES[event.phase]}, {place_of(event)}: {event.operation}"
    what = f"{event.count} of {event.of} values of its {event.tensor} became {event.result}"
    if event.phase in (UNSCALE, UPDATE) or event.tensor not in ("output", "gradient"):
        what = f"{event.count} of {event.of} values of {event.tensor} became {event.result}"
    lines = [
        where,
        f"{what} in {dtype}; all it read was finite, at most {power(event.largest_input)}",
        reason_of(event),
    ]
    return lines


def reason_of(event: Event) -> str:
    """Why the operation made a value that is not finite."""
    name = event.operation.removeprefix("_foreach_")
    if event.at_zero and name.startswith("log"):
        return "logarithm of zero"
    if event.at_zero and (name.startswith(_DIVIDES) or "div" in name):
        if event.phase == UPDATE:
            return "division by zero: the optimizer's denominator and its eps round to 0"
        return "division by zero"
    limit = torch.finfo(event.dtype).max
    if event.phase == UPDATE and event.operation == "_foreach_copy_":
        return (
            f"overflow: the master weight, {power(event.largest_input)}, does not fit "
            f"{_dtype(event.dtype)}, which ends at {power(limit)}"
        )
    wide = event.would_be
    if wide is not None and math.isfinite(wide) and wide > limit:
        return (
            f"overflow: {power(wide)} in FP32, and {_dtype(event.dtype)} ends at {power(limit)}"
            f"{' (65504)' if event.dtype is torch.float16 else ''}"
        )
    if event.result == "infinity":
        return (
            f"overflow: {_dtype(event.dtype)} ends at {power(limit)}"
            f"{' (65504)' if event.dtype is torch.float16 else ''}"
        )
    if wide is not None and math.isfinite(wide):
        return f"NaN from finite values in {_dtype(event.dtype)}; the same in FP32 is finite"
    return f"NaN from finite values in {_dtype(event.dtype)}"


def place_of(event: Event) -> str:
    """The module of an event, or what stands for it outside of modules."""
    if event.phase in (FORWARD, BACKWARD):
        if event.module == "loss":
            return "the loss"
        return f"module {event.module}" if event.module else "the model itself"
    return {
        INPUT: "inputs",
        LOSS: "the loss",
        UNSCALE: "gradients",
        UPDATE: "optimizer",
    }[event.phase]


def _find_in_evaluation(steps: Steps, step: int) -> Finding:
    task = steps.built.task
    before, statistics = nonfinite(weights(task)), nonfinite(buffers(task))
    with Observation(steps.built) as seen:
        values = task.evaluate()
    reproduced = not all(math.isfinite(value) for value in values.values())
    finding = Finding("not found", "evaluation", step, reproduced)
    if not reproduced:
        return finding
    event = _first(seen, {event.order for event in seen.events})
    # Of finite losses a metric may still be infinite: perplexity from a loss of 710 on.
    finding.details = {name: f"{value:g}" for name, value in values.items()}
    if before:
        finding.verdict, finding.details = "earlier", before
    elif statistics:
        finding.verdict, finding.details = "statistics", statistics
    elif event is not None and event.seen:
        finding.verdict, finding.event = "operation", event
        finding.ramp = _up_to(seen, event)
    return finding


def _nonfinite_batch(steps: Steps) -> dict[str, str]:
    task, count = steps.built.task, 0
    count = task.samples_per_step // task.data.samples_per_batch
    found = {}
    for index in range(count):
        inputs, _ = task.data.train_batch(steps.step * count + index)
        name = "inputs" if count == 1 else f"inputs of micro-batch {index + 1}"
        found |= nonfinite({name: inputs})
    return found


def _sources(seen: Observation, steps: Steps, row, hidden) -> set[int]:
    """Events behind what failed: the loss, else the gradients, else weights or carried state."""
    if not math.isfinite(row.loss):
        found = seen.sources_of([steps.metrics["loss"]])
        if found:
            return found
    if row.found_inf:
        found = seen.reached.get(UNSCALE, set())
        if found:
            return found
    ends = [*weights(steps.built.task).values(), *hidden]
    return seen.sources_of(ends) or {event.order for event in seen.events}


def _first(seen: Observation, sources: set[int]) -> Event | None:
    events = [seen.events[order] for order in sorted(sources)]
    return next((event for event in events if event.seen), events[0] if events else None)


def _up_to(seen: Observation, event: Event) -> list[Largest]:
    """The largest values when the culprit appeared, in order of execution, its own module last."""
    ramp = seen.ramps[event.order] if event.order < len(seen.ramps) else list(seen.ramp.values())
    found = [one for one in ramp if one.phase in (FORWARD, LOSS, BACKWARD)]
    own = [one for one in found if (one.phase, one.module) == (event.phase, event.module)]
    return [one for one in found if one not in own] + own


def _dtype(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch.")).upper()

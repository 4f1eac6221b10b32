"""Find the first non-finite value of a failed step, and what had been growing before it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mprun.extensions.diagnosis.observation import INPUTS, Event, Largest, Observation
from mprun.numerics.post_mortem import StepRow, power
from mprun.numerics.probe import plainly
from mprun.numerics.replay import Steps, nonfinite_batch
from mprun.numerics.state import (
    buffers,
    carried,
    named_learners,
    nonfinite,
    optimizer_state,
    weights,
)
from mprun.numerics.trace import Phase
from mprun.precision.policy import dtype_name

# For each phase: its description, and the words for its place outside modules.
_PHASES: dict[str, tuple[str, str]] = {
    Phase.INPUT: ("casting the batch", "inputs"),
    Phase.FORWARD: ("forward", ""),
    Phase.LOSS: ("loss", "the loss"),
    Phase.BACKWARD: ("backward", ""),
    Phase.UNSCALE: ("unscaling the gradients", "gradients"),
    Phase.UPDATE: ("weight update", "optimizer"),
}
_CASTS = ("_to_copy", "_foreach_copy_")  # of one tensor, or of many in one launch


@dataclass(slots=True)
class Finding:
    """The result of replaying one step.

    verdict: "operation" (then `event` is the culprit), "data" (the batch holds NaN or infinities),
    "earlier" (something was not finite before the step), "statistics" (the buffers of norm layers,
    before an evaluation) or "not found". kind, step: of `mprun.numerics.failure.Kept`. reproduced:
    whether it failed again. details: name -> number of non-finite values, for the subject of the
    verdict; of a step that does not fail "gradients", if all are zero. ramp: largest values by
    phase and module, in order of execution, up to the culprit. weights: those that are not finite
    after the step.
    """

    verdict: str
    kind: str
    step: int
    reproduced: bool
    event: Event | None = None
    details: dict[str, str] = field(default_factory=dict)
    ramp: list[Largest] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(in_words(self))

    @property
    def module(self) -> str | None:
        """Return the culprit's module: its own, or that of the weight concerned."""
        event = self.event
        if event is None:
            return None
        name = event.tensor.rpartition(" of ")[2]
        if "." in name:
            return name.rpartition(".")[0]
        if event.phase in (Phase.FORWARD, Phase.BACKWARD) and event.module != "loss":
            return event.module
        return None


def find_culprit(steps: Steps, kind: str) -> Finding:
    """Replay the next step and find the culprit; kind: as in `Kept`, or "step": any of a step."""
    if kind == "evaluation":
        return _find_in_evaluation(steps)
    task = steps.built.task
    batch = nonfinite_batch(task, steps.step)
    before = nonfinite(weights(task)) | nonfinite(carried(task)) | nonfinite(optimizer_state(task))
    with Observation(steps.built) as seen, _Gradients(task) as gradients:
        row = steps.advance()
    after = nonfinite(weights(task))
    spoilt = bool(after) or bool(nonfinite(carried(task))) or row.diverged
    failed = {"loss": row.diverged, "collapse": row.found_inf, "state": spoilt}
    failed["skip"] = row.found_inf and not math.isfinite(row.loss)
    reproduced = failed.get(kind, row.found_inf or spoilt)
    finding = Finding("not found", kind, row.step, reproduced, weights=after)
    if not reproduced:
        if zero := gradients.in_words(seen.ramp.values()):
            finding.details = {"gradients": zero}
        return finding
    if batch:
        finding.verdict, finding.details = "data", batch
    elif _blame(finding, seen, _sources(seen, steps, row)) and finding.event is not None:
        finding.event.loss_scale = row.loss_scale
    elif before:
        # An optimizer state ("exp_avg of ...") alone may be infinite for long without harm.
        state = [name for name in before if " of " in name]
        held = {name: text for name, text in before.items() if name not in state}
        finding.verdict, finding.details = "earlier", held or before
    return finding


def _find_in_evaluation(steps: Steps) -> Finding:
    task = steps.built.task
    before, statistics = nonfinite(weights(task)), nonfinite(buffers(task))
    with Observation(steps.built) as seen:
        values = task.evaluate()
    reproduced = not all(math.isfinite(value) for value in values.values())
    finding = Finding("not found", "evaluation", steps.step, reproduced)
    if not reproduced:
        return finding
    # With finite losses a metric may still be infinite: perplexity from a loss of 710 on.
    finding.details = {name: f"{value:g}" for name, value in values.items()}
    if before:
        finding.verdict, finding.details = "earlier", before
    elif statistics:
        finding.verdict, finding.details = "statistics", statistics
    else:
        _blame(finding, seen, _all(seen))
    return finding


class _Gradients:
    """Look at the gradients of all weights inside the block, as backward makes them.

    nonzero: for each, whether it has a number that is not 0, bool, 0-dim. dtypes: theirs.
    """

    def __init__(self, task):
        self.nonzero: list[Tensor] = []
        self.dtypes: set[torch.dtype] = set()
        self._steps = [learner.steps for _, learner in named_learners(task)]

    def __enter__(self) -> "_Gradients":
        self._handles = [
            steps.watch_gradient(own, self._look_at)
            for steps in self._steps
            for own in steps.named().values()
            if own.requires_grad
        ]
        return self

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()

    def _look_at(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        with plainly():
            self.dtypes.add(gradient.dtype)
            own = gradient.coalesce().values() if gradient.is_sparse else gradient
            self.nonzero.append(own.ne(0).any())

    def in_words(self, ramp: Iterable[Largest]) -> str:
        """Say that every gradient was zero, and from where on; "" if one was not."""
        if not self.nonzero or bool(torch.stack(self.nonzero).any()):
            return ""
        names = "+".join(sorted(dtype_name(dtype).upper() for dtype in self.dtypes))
        passed = [one for one in ramp if one.phase == Phase.BACKWARD and one.value > 0]
        last = min(passed, key=lambda one: one.value, default=None)
        where = ""
        if last is not None:
            place = {"": "the model itself", "loss": "the loss"}.get(last.module, last.module)
            where = f"; the last that were not were at most {power(last.value)}, in {place}"
        return f"every gradient of a weight is zero ({names}): it trains nothing{where}"


def _sources(seen: Observation, steps: Steps, row: StepRow) -> set[int]:
    """Return events behind the failure: of the loss, else gradients, else weights or state."""
    found: set[int] = set()
    if not math.isfinite(row.loss):
        found = seen.sources_of([steps.metrics["loss"]])
    if not found and row.found_inf:
        found = seen.reached.get(Phase.UNSCALE, set())
    task = steps.built.task
    found = found or seen.sources_of([*weights(task).values(), *carried(task).values()])
    return found or _all(seen)


def _all(seen: Observation) -> set[int]:
    """Return all events but those of infinities that the code itself sets."""
    return {event.order for event in seen.events if not event.is_set}


def _blame(finding: Finding, seen: Observation, sources: set[int]) -> bool:
    """Make the first of these events that was seen to appear the culprit; False if none was."""
    known = [seen.events[i] for i in sorted(sources) if seen.events[i].seen]
    event = next((own for own in known if not own.is_set), known[0] if known else None)
    if event is None:
        return False
    ramp = seen.ramps[event.order] if event.order < len(seen.ramps) else [*seen.ramp.values()]
    found = [one for one in ramp if one.phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)]
    own = [one for one in found if (one.phase, one.module) == (event.phase, event.module)]
    finding.verdict, finding.event = "operation", event
    finding.ramp = [one for one in found if one not in own] + own  # in order of execution
    return True


def in_words(finding: Finding) -> list[str]:
    """Return the finding as sentences, the culprit first."""
    where = "; ".join(f"{name}: {text}" for name, text in finding.details.items())
    match finding.verdict:
        case "data":
            start = f"the batch of step {finding.step} is not finite"
            return [f"{start} ({where}): the data are the cause"]
        case "earlier":
            start = f"not finite before step {finding.step}"
            return [f"{start} ({where}): the cause is an earlier step"]
        case "statistics":
            return [f"statistics of norm layers are not finite before the evaluation ({where})"]
    event = finding.event
    if event is None:
        if not finding.reproduced:
            zero = finding.details.get("gradients")
            return [f"not found: the step does not fail{f', but {zero}' if zero else ''}"]
        where = "".join(f"; {name} {text}" for name, text in finding.details.items())
        if math.isfinite(float(finding.details.get("loss", "nan"))):
            own = "evaluate(): the loss is finite, and no operation made a value that is not"
            return [f"{own}{where}"]
        return [f"not found: no operation made a value that is not finite{where}"]
    tensor = event.tensor
    what = (
        "all it read was finite, at most" if not event.of_set else "its finite inputs are at most"
    )
    if event.phase not in (Phase.UNSCALE, Phase.UPDATE) and tensor in ("output", "gradient"):
        tensor = f"its {tensor}"
    return [
        f"{_PHASES[event.phase][0]}, {place_of(event)}: {event.operation}",
        f"{event.count} of {event.of} values of {tensor} became {event.result} in "
        f"{dtype_name(event.dtype).upper()}; {what} {power(event.largest_input)}",
        reason_of(event),
    ]


def place_of(event: Event) -> str:
    """Return the module of an event, or the words for its place outside modules."""
    if event.phase not in (Phase.FORWARD, Phase.BACKWARD):
        return _PHASES[event.phase][1]
    return {"": "the model itself", "loss": "the loss"}.get(event.module, f"module {event.module}")


def reason_of(event: Event) -> str:
    """Return why the operation produced a non-finite value."""
    if event.is_set:
        return "no overflow: the code itself sets this infinity, and the loss reads it"
    if event.empty:
        return f"NaN: a mask left nothing in {event.empty} rows of its input, every value is -inf"
    if event.of_set:
        return "NaN from infinities that the code itself sets"
    name = event.operation.removeprefix("_foreach_")
    dtype, limit = dtype_name(event.dtype).upper(), torch.finfo(event.dtype).max
    end = f"ends at {power(limit)}"
    if event.at_zero and name.startswith("log"):
        return "logarithm of zero"
    if event.at_zero:  # the operations that are singular at 0, other than logarithms, divide
        of_update = ": the optimizer's denominator and its eps round to 0"
        return f"division by zero{of_update if event.phase == Phase.UPDATE else ''}"
    if event.operation in _CASTS and event.tensor not in ("output", "gradient"):
        is_weight = event.tensor != INPUTS and " of " not in event.tensor
        given = "the master weight" if is_weight else event.tensor
        fits = "do not fit" if event.tensor == INPUTS else "does not fit"
        return f"overflow: {given}, {power(event.largest_input)}, {fits} {dtype}, which {end}"
    wide = math.inf if event.would_be is None else event.would_be
    of_fp16 = " (65504)" if event.dtype is torch.float16 else ""
    is_scaled = event.phase in (Phase.BACKWARD, Phase.UNSCALE) and event.loss_scale > 1
    scaled = f" at loss scale {power(event.loss_scale)}" * is_scaled
    if limit < wide < math.inf:
        return f"overflow: {power(wide)} in FP32{scaled}, and {dtype} {end}{of_fp16}"
    if event.result == "infinity":
        return f"overflow{scaled}: {dtype} {end}{of_fp16}"
    finite = "; the same in FP32 is finite" if math.isfinite(wide) else ""
    return f"NaN from finite values in {dtype}{finite}"

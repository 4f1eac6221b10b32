"""Explain a step of a user's script, in its own process, or say what its numbers need.

finding = mprun.explain(step, optimizer)   # which operation made the first infinity or NaN
print(mprun.advise(step, optimizer))       # what to keep in FP32, which loss scale
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from mprun.config.compose import compose_config
from mprun.config.schema import RunConfig
from mprun.extensions.diagnosis import advice_report
from mprun.extensions.diagnosis.advice import Advice
from mprun.extensions.diagnosis.advice import advise as derived
from mprun.extensions.diagnosis.advised_regions import layout
from mprun.extensions.diagnosis.casts import CastMeter, cast_advice
from mprun.extensions.diagnosis.changes_of_mode import SHARE, measured
from mprun.extensions.diagnosis.first_nonfinite import Finding, find_culprit
from mprun.numerics.post_mortem import StepRow
from mprun.numerics.replay import Snapshot, Steps
from mprun.prepared.shards import are_several
from mprun.script.watched import Optimizers, ScriptTask


class _Steps:
    """The steps of a script in the form that `find_culprit` takes."""

    def __init__(self, built: ScriptTask, step: Callable[[], Any]):
        self.built, self._take, self.step = built, step, 0
        self.metrics: dict[str, Tensor] = {}

    def advance(self) -> StepRow:
        row = self.built.take(self._take)
        self.step, self.metrics = row.step, self.built.metrics
        return row


def explain(step: Callable[[], Any], optimizer: Optimizers, *, steps: int = 1) -> Finding:
    """Find the operation that makes the first non-finite value, without lasting changes.

    The function runs up to `steps` steps of the script and watches every operation, so that a step
    takes about ten times as long. The function stops at the first step in which the loss, a
    gradient or an updated weight is not finite. At its end, the function restores weights,
    optimizer states, loss scales and random states, but no other state of the script.

    Args:
        step: function that runs a whole step and returns its loss, a 0-dim tensor.
        optimizer: a prepared optimizer, or several in a list or in a dict by name.
        steps: largest number of steps to try.
    """
    with _restored("explain", optimizer) as task:
        for _ in range(steps):
            finding = find_culprit(cast("Steps", _Steps(task, step)), "step")
            if finding.reproduced:
                break
    return finding


@contextmanager
def _restored(verb: str, optimizer: Optimizers) -> Iterator[ScriptTask]:
    """Put everything back after the steps in the block."""
    if are_several():
        raise ValueError(
            f"mprun.{verb}: may stop within a step, so other processes would wait forever; run "
            "the script in one process"
        )
    task = ScriptTask(optimizer)
    before = Snapshot(task, task.device)
    before.take(0, 0)
    taken = [(steps, steps.steps, steps.last) for steps in task.prepared.values()]
    try:
        yield task
    finally:
        before.restore()
        for steps, number, last in taken:  # a run of the script counts its own
            steps.steps, steps.last = number, last


@dataclass(frozen=True, slots=True)
class ScriptAdvice:
    """The needs of a script's steps; `str` gives them as text.

    precision, scaler, overrides: for `mprun.prepare`; scale: of a static loss scale, None without
    one. found: everything that was measured.
    """

    precision: str
    scale: float | None
    overrides: Mapping[str, str]
    found: Advice

    @property
    def call(self) -> str:
        """Return the call of `prepare` that follows from it."""
        words = [f'precision="{self.precision}"']
        words += [f"scaler=StaticLossScale({self.scale:.17g})"] if self.scale is not None else []
        named = ", ".join(f'"{name}": "{dtype}"' for name, dtype in self.overrides.items())
        words += [f"overrides={{{named}}}"] if self.overrides else []
        return f"mprun.prepare(model, optimizer, {', '.join(words)})"

    def __str__(self) -> str:
        hint = 'mprun.advise(step, optimizer, precision="nvfp4")'
        lines = advice_report.findings(self.found, None, hint)
        untried = "from these steps, and not tried: a script's step trains its own objects"
        return "\n".join([*lines, untried, f"  {self.call}"])


def advise(
    step: Callable[[], Any],
    optimizer: Optimizers,
    *,
    steps: int = 8,
    precision: str | None = None,
) -> ScriptAdvice:
    """Determine which settings a script needs for 16-bit training, and what the casts of a mode
    lose.

    The function runs `steps` steps with probes. Prepare the model in FP32 (`prepare(...,
    precision="fp32")`), because the exact values of numbers that a mode has already rounded are
    lost. Afterwards the function restores weights, optimizer states, loss scales and random states,
    but no other state of the script.

    Args:
        step: function that runs a whole step and returns its loss, a 0-dim tensor.
        optimizer: a prepared optimizer, or several in a list or in a dict by name.
        steps: number of steps to measure.
        precision: a mode with products in 8 or 4 bits, whose casts are measured; None: the mode of
            the script.

    Raises: ValueError: A step cannot be probed, or `precision` names no mode or matches no layer.
        BadInput: Every update was skipped.
    """
    with _restored("advise", optimizer) as task:
        if task.is_sharded:
            raise ValueError("mprun.advise: shards (fully_shard) cannot be probed")
        first = task.first.optimizer
        rates: list[float] = []
        mode = compose_config([f"precision={precision or task.policy.name}"]).config.precision
        meter = CastMeter(task, mode) if mode.matmul.input else None
        records = []

        def take() -> dict[str, Tensor]:
            rates.append(float(first.param_groups[0]["lr"]))
            task.take(step)
            return task.metrics

        with meter or nullcontext():
            for number in range(1, steps + 1):
                records.append(measured(task, number, take))
        eps = first.param_groups[0].get("eps")
        optim = SimpleNamespace(name=type(first).__name__.lower(), eps=eps)
        config = cast("RunConfig", SimpleNamespace(optim=optim))
        found = derived(records, layout(task), config, rates, share=SHARE)
        if meter is not None:
            words = [f"precision={mode.name}"]
            casts = cast_advice(meter.read(), mode.matmul, words, steps)
            found = dataclasses.replace(found, casts=casts)
    values = dict(word.split("=", 1) for word in found.overrides)
    scale, key = values.get("scaler.scale"), "precision.overrides."
    overrides = {k.removeprefix(key): v for k, v in values.items() if k.startswith(key)}
    return ScriptAdvice(
        values["precision"], None if scale is None else float(scale), overrides, found
    )

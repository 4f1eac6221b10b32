"""Explain a step of a user's script, in its own process.

finding = mprun.explain(step, optimizer)   # which operation made the first infinity or NaN
"""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

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
    """Find the operation that makes the first non-finite value; changes nothing.

    It takes up to `steps` steps of the script, watching every operation (some ten times as slow),
    until one fails: its loss, a gradient, or a weight after it is not finite. Afterwards it
    restores weights, optimizer states, loss scales and random states, but no other state of the
    script.

    Args:
        step: takes a whole step and returns its loss, 0-dim.
        optimizer: prepared; several in a list, or by name.
        steps: most steps to try.
    """
    if are_several():
        raise ValueError(
            "mprun.explain: stops within a step, where other processes would wait; "
            "run the script in one process"
        )
    task = ScriptTask(optimizer)
    before = Snapshot(task, task.device)
    before.take(0, 0)
    try:
        for _ in range(steps):
            finding = find_culprit(cast("Steps", _Steps(task, step)), "step")
            if finding.reproduced:
                break
        return finding
    finally:
        before.restore()

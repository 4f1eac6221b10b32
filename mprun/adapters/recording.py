"""What the callbacks of several trainers share: an `mprun.Run` without a `with` block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mprun.training.script_run import Diverged, Run


class Recording:
    """A run directory whose end, a divergence too, is told and never raised.

    Args:
        make: opens the run.

    Attributes:
        run: that is written.
        evaluated: step of the newest evaluation.
    """

    def __init__(self, make: Callable[[], Run]):
        self.run = make()
        self.evaluated: int | None = None

    @property
    def open(self) -> bool:
        """Whether it still takes steps."""
        return self.run.status == "running"

    def step(self, loss: Tensor | float) -> bool:
        """Record a step that was taken; False: the run has ended."""
        return self._told(lambda: self.run.step(loss))

    def evaluate(self, metrics: dict[str, Any]) -> bool:
        """Record an evaluation; False: the run has ended."""
        self.evaluated = self.run.steps
        return self._told(lambda: self.run.evaluate(**metrics))

    def end(self, error: BaseException | None = None) -> None:
        """Close the run, as "done" or as what an exception makes of it."""
        status, cause = "done", None
        if error is not None:
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            status = "preempted" if stopped else "failed"
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._told(lambda: self.run.close(status, cause))

    def _told(self, record: Callable[[], None]) -> bool:
        if self.open:
            try:
                record()
            except Diverged:
                pass  # recorded as the run's status
        return self.open

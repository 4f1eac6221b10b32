"""What the callbacks of several trainers share: an `mprun.Run` without a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import broadcast, get_rank, get_world_size, is_available, is_initialized
from torch.optim import Optimizer

from mprun.extensions.script import state_of
from mprun.extensions.script.run import Diverged, Run


class Recording:
    """A run directory whose end, a divergence too, is told and never raised.

    Of several processes the first writes it, with its own losses. All of them hear when it ends.

    Args:
        folder, optimizers, settings: of `mprun.Run`.

    Attributes:
        run: that is written; None in a process that writes none.
        open: whether it still takes steps.
        steps: recorded so far.
        evaluated: step of the newest evaluation.
    """

    def __init__(self, folder: str | Path, optimizers: Sequence[Optimizer], **settings: Any):
        together = is_available() and is_initialized() and get_world_size() > 1
        is_first = not together or get_rank() == 0
        self.run = Run(folder, optimizers, **settings) if is_first else None
        self.open, self.steps = True, 0
        self.evaluated: int | None = None
        self._every: int = settings.get("log_every", 50)
        self._device = state_of(optimizers[0]).arithmetic.device if together else None

    def step(self, loss: Tensor | float) -> bool:
        """Record a step that was taken; False: the run has ended."""
        self.steps += 1
        # Only where it reads its records a run finds that it has diverged.
        return self._told(lambda run: run.step(loss), self.steps % self._every == 0)

    def evaluate(self, metrics: dict[str, Any]) -> bool:
        """Record an evaluation; False: the run has ended."""
        self.evaluated = self.steps
        return self._told(lambda run: run.evaluate(**metrics), True)

    def end(self, error: BaseException | None = None) -> None:
        """Close the run, as "done" or as what an exception makes of it."""
        status, cause = "done", None
        if error is not None:
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            status = "preempted" if stopped else "failed"
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._told(lambda run: run.close(status, cause), False)
        self.open = False

    def _told(self, record: Callable[[Run], None], may_end: bool) -> bool:
        """Record, and let all processes know whether the run goes on where it may have ended."""
        if not self.open:
            return False
        if self.run is not None:
            try:
                record(self.run)
            except Diverged:
                pass  # recorded as the run's status
            self.open = self.run.status == "running"
        if may_end and self._device is not None:
            goes_on = torch.tensor(int(self.open), device=self._device)
            broadcast(goes_on, 0)
            self.open = bool(goes_on)
        return self.open

"""An `mprun.Run` without a `with` block, for the callbacks of several trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import broadcast, get_rank, get_world_size, is_available, is_initialized
from torch.optim import Optimizer

from mprun.extensions.script import state_of
from mprun.extensions.script.run import Diverged, Run


class RunCallback:
    """The part of a callback that all trainers share: every training becomes a run directory.

    Its end, divergence included, is returned instead of raised. The first of several processes
    writes it, with the losses of that process; all processes learn when it ends.

    Attributes:
        run: the run of the newest training; None in a process that writes none.
        open: whether it still takes steps.
        steps: number of steps recorded so far.
        evaluated: step of the newest evaluation.
    """

    def __init__(
        self,
        folder: str | Path,
        metric: str,
        *,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        **settings: Any,
    ):
        super().__init__()
        self.folder, self.metric, self.seed = folder, metric, seed
        self.config, self.settings = dict(config or {}), settings
        self.run: Run | None = None
        self.open = False
        self._sum: Any = 0.0

    def begin(self, optimizers: Sequence[Optimizer], config: dict[str, Any], seed: int) -> None:
        """Open the run."""
        config |= self.config
        together = is_available() and is_initialized() and get_world_size() > 1
        self._device = state_of(optimizers[0]).forward_context.device if together else None
        self.run = None
        if not together or get_rank() == 0:
            given: dict[str, Any] = {"config": config, "seed": seed, "metric": self.metric}
            self.run = Run(self.folder, optimizers, **given | self.settings)
        self.open, self.steps, self._sum = True, 0, 0.0
        self.evaluated: int | None = None

    def record(self, loss: Tensor | float) -> bool:
        """Record a taken step; return False if the run has ended."""
        self.steps += 1
        # A run notices divergence only when it reads its records.
        may_end = self.steps % self.settings.get("log_every", 50) == 0
        return self._told(lambda run: run.step(loss), may_end)

    def record_metric(self, metrics: Mapping[str, Any], wanted: str) -> bool:
        """Record an evaluation; return False if the run has ended.

        Raises:
            ValueError: the metric is not among `metrics`; wanted: what should have been done.
        """
        if self.metric not in metrics:
            found = ", ".join(metrics) or "nothing"
            raise ValueError(f"metric={self.metric!r}: not {wanted}, but {found}")
        self.evaluated = self.steps
        return self._told(lambda run: run.evaluate(**{self.metric: metrics[self.metric]}), True)

    def end(self, error: BaseException | None = None) -> None:
        """Close the run as "done", or with the status of an exception."""
        kind = None if error is None else type(error)
        self._told(lambda run: run.__exit__(kind, error, None), False)
        self.open = False

    def _told(self, record: Callable[[Run], object], may_end: bool) -> bool:
        """Record, return whether the run goes on; tell all processes if it may have ended."""
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

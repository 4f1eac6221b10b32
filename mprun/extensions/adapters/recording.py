"""An `mprun.Run` without a `with` block, for the callbacks of several trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mprun.script.run import Diverged, Run


class RunCallback:
    """The part of a callback that all trainers share: every training becomes a run directory.

    Its end, divergence included, is returned instead of raised. The first of several processes
    writes it, with the losses of that process.

    Attributes:
        run: the run of the newest training; None before it.
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
        given: dict[str, Any] = {"config": config | self.config, "seed": seed}
        self.run = Run(self.folder, optimizers, metric=self.metric, **given | self.settings)
        self.open, self.steps, self._sum = True, 0, 0.0
        self.evaluated: int | None = None

    def record(self, loss: Tensor | float) -> bool:
        """Record a taken step; return False if the run has ended."""
        self.steps += 1
        return self._goes_on(lambda run: run.step(loss))

    def record_metric(self, metrics: Mapping[str, Any], wanted: str) -> bool:
        """Record an evaluation; return False if the run has ended.

        Raises:
            ValueError: the metric is not among `metrics`; wanted: what should have been done.
        """
        if self.metric not in metrics:
            found = ", ".join(metrics) or "none"
            raise ValueError(f"metric={self.metric!r}: must be {wanted}, got {found}")
        self.evaluated = self.steps
        return self._goes_on(lambda run: run.evaluate(**{self.metric: metrics[self.metric]}))

    def end(self, error: BaseException | None = None) -> None:
        """Close the run as "done", or with the status of an exception."""
        kind = None if error is None else type(error)
        self._goes_on(lambda run: run.__exit__(kind, error, None))
        self.open = False

    def _goes_on(self, record: Callable[[Run], object]) -> bool:
        """Record, and return whether the run goes on."""
        if not self.open or self.run is None:
            return False
        with suppress(Diverged):  # recorded as the run's status
            record(self.run)
        self.open = self.run.status == "running"
        return self.open

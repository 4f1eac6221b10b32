"""What the steps since the last log did, kept on the device until it is asked for.

A training step only stacks a few numbers on the device; they cross to the host together, once per
log interval, so that no step waits for the device.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step as numbers: `step` counts from 1; `skipped` is the total up to and with it."""

    step: int
    loss: float
    loss_scale: float
    found_inf: bool
    skipped: int

    @property
    def diverged(self) -> bool:
        """A loss that is not finite although its update was applied."""
        return not self.found_inf and not math.isfinite(self.loss)


class Trace:
    """Collects the steps' metrics; `skipped` counts steps with a skipped update, on the device."""

    def __init__(self, device: torch.device, skipped: int = 0):
        self.skipped = torch.full((), skipped, dtype=torch.int64, device=device)
        self.host_skipped = skipped
        self.steps: list[int] = []
        self.rows: list[Tensor] = []
        self.last: dict[str, Tensor] = {}

    def add(self, step: int, metrics: dict[str, Tensor]) -> None:
        """Keep the metrics of `step` (from 1); no synchronisation."""
        found_inf = metrics.get("found_inf")
        if found_inf is None:
            self.rows.append(metrics["loss"])
        else:
            self.rows.append(torch.stack((metrics["loss"], metrics["loss_scale"], found_inf)))
            self.skipped.add_(found_inf.to(torch.int64))
        self.steps.append(step)
        self.last = metrics

    def flush(self) -> tuple[list[StepRow], dict[str, float]]:
        """Rows since the last flush and all metrics of the newest step; waits for the device."""
        if not self.rows:
            return [], {}
        names = [name for name in self.last if name != "found_inf"]
        newest = torch.stack([self.last[name].float() for name in names])
        rows = torch.stack(self.rows)
        rows = rows[:, None] if rows.dim() == 1 else rows
        values = torch.cat([rows.flatten(), newest]).tolist()
        width, result = rows.shape[1], []
        for index, step in enumerate(self.steps):
            row = values[index * width : (index + 1) * width]
            found_inf = width == 3 and row[2] != 0
            self.host_skipped += found_inf
            scale = row[1] if width == 3 else 1.0
            result.append(StepRow(step, row[0], scale, found_inf, self.host_skipped))
        metrics = dict(zip(names, values[len(result) * width :], strict=True))
        self.steps, self.rows, self.last = [], [], {}
        return result, metrics

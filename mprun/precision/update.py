"""What one step of an optimizer did, and what it did it with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did, as 0-dim device tensors.

    loss_scale: float32, the scale of the (first) loss of this step.
    found_inf: float32, 1 if the update was skipped; None if the loss scale never skips.
    grad_norm: float32, global L2 norm of the unscaled gradients before clipping, of those that are
    clipped where `clip_modules` chooses some; None if neither needed for clipping nor asked for.
    """

    loss_scale: Tensor
    found_inf: Tensor | None
    grad_norm: Tensor | None

    def metrics(self, prefix: str = "") -> dict[str, Tensor]:
        """What there is to report, by the name it has in metrics.jsonl behind `prefix`."""
        values = {
            f"{prefix}loss_scale": self.loss_scale,
            f"{prefix}found_inf": self.found_inf,
            f"{prefix}grad_norm": self.grad_norm,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class UsedGradients:
    """The gradients of one update; inverse, clip: 0-dim, what it multiplied with on the way."""

    gradients: Sequence[Tensor | None]
    inverse: Tensor | None
    clip: Tensor | None

    @torch.no_grad()
    def by_name(
        self, names: Sequence[str], updated: Sequence[Tensor], is_clipped: Sequence[bool]
    ) -> dict[str, Tensor]:
        """Copies, unscaled and clipped, in the dtype of `updated`; those that there are."""
        found = {}
        rows = zip(names, updated, self.gradients, is_clipped, strict=False)
        for name, tensor, gradient, counts in rows:
            if gradient is None:
                continue
            gradient = gradient.to(tensor.dtype, copy=True)
            if self.inverse is not None:
                gradient.mul_(self.inverse)
            if self.clip is not None and counts:
                gradient.mul_(self.clip)
            found[name] = gradient
        return found

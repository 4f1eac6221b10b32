"""Loss scales `none`, `static` and `dynamic`.

Paper: Micikevicius et al., arXiv 1710.03740, section 3.2. Whether to skip is decided on the device:
nothing here reads a tensor on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mprun.precision.loss_scale_state import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    LossScale,
    checked_count,
    checked_fraction,
    checked_scale,
)

__all__ = ["DynamicLossScale", "LossScale", "NoLossScale", "StaticLossScale"]


class NoLossScale(LossScale):
    """No scaling and no skipping: non-finite gradients reach the weights."""

    kind = "none"
    skips_nonfinite = False

    def __init__(self, device: torch.device | str = "cpu"):
        super().__init__(1.0, 1, device)

    def backward(self, loss: Tensor) -> None:
        """Propagate `loss` as it is."""
        loss.backward()

    def inverse(self) -> Tensor:
        """1, float32, 0-dim: the scale itself, not to be written to."""
        return self.scale

    def update(self) -> None:
        """Clear `found_inf`; nothing is counted, because nothing was skipped."""
        self.found_inf.zero_()


class StaticLossScale(LossScale):
    """A scale that never changes; overflowing steps are skipped and counted.

    `scale`: FP32, from 2**-126 to 2**126. `max_consecutive_skips`: >= 1; the fixed scale counts as
    its own floor, so `collapsed()` is true after that many skips in a row. Raises ValueError.
    """

    kind = "static"

    def __init__(
        self, scale: float, max_consecutive_skips: int = 50, device: torch.device | str = "cpu"
    ):
        scale = checked_scale("scale", scale, SMALLEST_SCALE, LARGEST_SCALE)
        super().__init__(scale, max_consecutive_skips, device)

    def update(self) -> None:
        """Count the skip if any, clear `found_inf`."""
        torch.ne(self.found_inf, 0, out=self.stuck)
        self._count(self.stuck)


class DynamicLossScale(LossScale):
    """Backs off on overflow, grows after `growth_interval` clean steps.

    With the defaults of the last five arguments this is the rule of torch.amp.GradScaler (same
    kernel) inside [min_scale, max_scale]; the other published rules are in `loss_scale_presets`.

    init_scale, min_scale, max_scale: FP32, 2**-126 <= min <= init <= max <= 2**126.
    growth_factor > 1 and backoff_factor in (0, 1): the product is taken in float64, rounded once.
    growth_interval >= 1: clean steps since the start, the last growth or the last overflow.
    growth_delay >= 0: further clean steps before the first growth after the start or an overflow.
    hysteresis >= 1: credit; an overflow uses one and only the one that uses the last, and those
    after it, back off. Growth refills it, or with `refill_on_clean_step` every clean step does.
    tolerance in [0, 1]: back off only if overflows since the last backoff / steps since the last
    growth or backoff >= tolerance. Not together with hysteresis > 1.
    hold_at_floor: a backoff that would reach `min_scale` or less is not done; else it is clamped.
    max_consecutive_skips >= 1: see `collapsed()`.

    Further tensors: `growth_tracker` int32 (from -growth_delay), `hysteresis_credit` int32,
    `steps_since_rescale` and `overflows_since_backoff` int64. Raises ValueError.
    """

    kind = "dynamic"

    growth_tracker: Tensor
    hysteresis_credit: Tensor
    steps_since_rescale: Tensor
    overflows_since_backoff: Tensor

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**24,
        max_consecutive_skips: int = 50,
        *,
        growth_delay: int = 0,
        refill_on_clean_step: bool = False,
        tolerance: float = 0.0,
        hold_at_floor: bool = False,
        device: torch.device | str = "cpu",
    ):
        self.min_scale = checked_scale("min_scale", min_scale, SMALLEST_SCALE, LARGEST_SCALE)
        self.max_scale = checked_scale("max_scale", max_scale, self.min_scale, LARGEST_SCALE)
        init_scale = checked_scale("init_scale", init_scale, self.min_scale, self.max_scale)
        self.growth_factor = checked_fraction(
            "growth_factor", growth_factor, 1.0, float("inf"), ends=False
        )
        self.backoff_factor = checked_fraction(
            "backoff_factor", backoff_factor, 0.0, 1.0, ends=False
        )
        self.growth_interval = checked_count("growth_interval", growth_interval, 1)
        self.growth_delay = checked_count("growth_delay", growth_delay, 0)
        self.hysteresis = checked_count("hysteresis", hysteresis, 1)
        self.tolerance = checked_fraction("tolerance", tolerance, 0.0, 1.0, ends=True)
        if self.hysteresis > 1 and self.tolerance > 0:
            raise ValueError(f"tolerance={tolerance!r}: only 0 is allowed with hysteresis > 1")
        self.refill_on_clean_step = refill_on_clean_step
        self.hold_at_floor = hold_at_floor
        # An overflow at or below this scale has no room to back off.
        last_scale = self.min_scale / (self.backoff_factor if hold_at_floor else 1.0)
        self._last_scale = min(last_scale, self.max_scale)

        super().__init__(init_scale, max_consecutive_skips, device)
        self._add("growth_tracker", torch.int32, -self.growth_delay, device)
        self._add("hysteresis_credit", torch.int32, self.hysteresis, device)
        self._add("steps_since_rescale", torch.int64, 0, device)
        self._add("overflows_since_backoff", torch.int64, 0, device)

    def update(self) -> None:
        """End the iteration: move the scale by the rule, count the skip, clear `found_inf`."""
        overflow = self.found_inf != 0
        backs_off = overflow
        if self.hysteresis > 1:
            backs_off = self._spend_credit(overflow)
        elif self.tolerance > 0:
            backs_off = self._compare_rate(overflow)
        torch.logical_and(backs_off, self.scale <= self._last_scale, out=self.stuck)

        keeps = None
        if backs_off is not overflow or self.hold_at_floor:
            keeps = (overflow ^ backs_off) | self.stuck
            before = self.scale.clone()
        torch._amp_update_scale_(
            self.scale,
            self.growth_tracker,
            self.found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        if keeps is not None:
            torch.where(keeps, before, self.scale, out=self.scale)
        self.scale.clamp_(self.min_scale, self.max_scale)
        if self.growth_delay:
            self.growth_tracker.masked_fill_(overflow, -self.growth_delay)
        self._count(overflow)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `LossScale.load_state_dict`, then brought inside this object's bounds and counts.

        The same bit for bit under the same arguments. Under a shorter interval a saved tracker
        could lie past it, and the scale would never grow again.
        """
        super().load_state_dict(state)
        self.scale.clamp_(self.min_scale, self.max_scale)
        self.growth_tracker.clamp_(-self.growth_delay, self.growth_interval - 1)
        self.hysteresis_credit.clamp_(0, self.hysteresis)

    def _grows(self, overflow: Tensor) -> Tensor:
        return (self.growth_tracker == self.growth_interval - 1) & ~overflow

    def _spend_credit(self, overflow: Tensor) -> Tensor:
        # Refilled by growth at the ceiling too, where the scale itself no longer moves.
        refill = ~overflow if self.refill_on_clean_step else self._grows(overflow)
        self.hysteresis_credit.sub_(overflow.int()).clamp_(min=0).masked_fill_(
            refill, self.hysteresis
        )
        return overflow & (self.hysteresis_credit == 0)

    def _compare_rate(self, overflow: Tensor) -> Tensor:
        self.steps_since_rescale.add_(1)
        self.overflows_since_backoff.add_(overflow)
        rate = self.overflows_since_backoff.double() / self.steps_since_rescale
        backs_off = overflow & (rate >= self.tolerance)
        self.steps_since_rescale.masked_fill_(backs_off | self._grows(overflow), 0)
        # Growth does not clear this one, so the rate can pass 1 (fairseq's rule).
        self.overflows_since_backoff.masked_fill_(backs_off, 0)
        return backs_off

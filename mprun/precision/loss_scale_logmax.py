"""Loss scale `logmax`: set every step from the statistics of the largest gradient."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from mprun.precision.loss_scale_state import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    LossScale,
    checked_fraction,
    checked_scale,
)


class LogMaxLossScale(LossScale):
    """Keeps log2 max|gradient| + `overflow_std_dev` standard deviations at `log_max`.

    Kuchaiev et al., arXiv 1805.10387, "LogNormal" scaling; NVIDIA/OpenSeq2Seq,
    optimizers/automatic_loss_scaler.py, LogMaxScaler. With x = log2 of the step's largest unscaled
    gradient magnitude: mu is the moving average of x (`beta1`), sigma the standard deviation from
    moving averages of x and x**2 (`beta2`), all bias-corrected, and
    scale = 2**(log_max - mu - overflow_std_dev * sigma), kept in [min_scale, max_scale]. 3.09
    standard deviations leave an overflow probability of 0.001. Overflowing steps are skipped.

    Differences from that source: the averages are float64, since E[x**2] - E[x]**2 cancels in
    float32; `log_max` is used in the formula, where the source writes 16; a step whose largest
    gradient is 0 changes nothing, where the source reaches log2(0). A step with a non-finite
    gradient counts as x = `overflow_log2` (default: `log_max`); the source has 2**log_max there, in
    a quantity that is already a logarithm, so that one overflow pins the scale to its floor for
    hundreds of steps: `overflow_log2=2.0**16` reproduces it.

    init_scale, min_scale, max_scale: FP32, 2**-126 <= min <= init <= max <= 2**126. log_max,
    overflow_log2: finite, at most 2**31 in magnitude. beta1, beta2 in (0, 1). overflow_std_dev in
    [0, 100]. max_consecutive_skips >= 1. Raises ValueError naming the argument.

    Further tensors: `grad_max` float32, largest of this iteration; `averages` float64 (3,): of x
    with beta1, of x with beta2, of x**2 with beta2, not bias-corrected; `start_weights` float64
    (3,): beta**steps, what the start value 0 still weighs in each.
    """

    kind = "logmax"
    needs_grad_max = True

    grad_max: Tensor
    averages: Tensor
    start_weights: Tensor

    def __init__(
        self,
        init_scale: float = 1.0,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        log_max: float = 16.0,
        beta1: float = 0.99,
        beta2: float = 0.999,
        overflow_std_dev: float = 3.09,
        overflow_log2: float | None = None,
        max_consecutive_skips: int = 50,
        device: torch.device | str = "cpu",
    ):
        self.min_scale = checked_scale("min_scale", min_scale, SMALLEST_SCALE, LARGEST_SCALE)
        self.max_scale = checked_scale("max_scale", max_scale, self.min_scale, LARGEST_SCALE)
        init_scale = checked_scale("init_scale", init_scale, self.min_scale, self.max_scale)
        self.log_max = checked_fraction("log_max", log_max, -(2.0**31), 2.0**31, ends=True)
        self.beta1 = checked_fraction("beta1", beta1, 0.0, 1.0, ends=False)
        self.beta2 = checked_fraction("beta2", beta2, 0.0, 1.0, ends=False)
        self.overflow_std_dev = checked_fraction(
            "overflow_std_dev", overflow_std_dev, 0.0, 100.0, ends=True
        )
        if overflow_log2 is None:
            overflow_log2 = self.log_max
        self.overflow_log2 = checked_fraction(
            "overflow_log2", overflow_log2, -(2.0**31), 2.0**31, ends=True
        )
        super().__init__(init_scale, max_consecutive_skips, device)
        self._add("grad_max", torch.float32, 0.0, device)
        self._add("averages", torch.float64, 0.0, device, (3,))
        self._add("start_weights", torch.float64, 1.0, device, (3,))
        betas = (self.beta1, self.beta2, self.beta2)
        self._betas = torch.tensor(betas, dtype=torch.float64, device=device)

    def record(self, found_inf: Tensor, grad_max: Tensor | None = None) -> None:
        """OR one optimizer's flag in, and keep the largest `grad_max` of the iteration.

        `found_inf`: one element, any dtype. `grad_max`: one element, floating point, max |gradient|
        after unscaling; its value is ignored when the iteration overflows. Raises ValueError
        without it.
        """
        if grad_max is None:
            raise ValueError("grad_max=None: logmax needs the largest unscaled gradient magnitude")
        super().record(found_inf)
        torch.maximum(self.grad_max, grad_max.reshape(()).float(), out=self.grad_max)

    def update(self) -> None:
        """End the iteration: set the scale, count the skip, clear `found_inf` and `grad_max`."""
        overflow = self.found_inf != 0
        torch.logical_and(overflow, self.scale <= self.min_scale, out=self.stuck)
        no_number = overflow | ~torch.isfinite(self.grad_max)
        x = self.grad_max.double().log2().masked_fill_(no_number, self.overflow_log2)
        informative = torch.isfinite(x)

        new = self._betas * self.averages + (1 - self._betas) * torch.stack((x, x, x * x))
        torch.where(informative, new, self.averages, out=self.averages)
        torch.where(
            informative,
            self._betas * self.start_weights,
            self.start_weights,
            out=self.start_weights,
        )

        mu, slow_mu, mean_square = (self.averages / (1 - self.start_weights)).unbind()
        sigma = (mean_square - slow_mu * slow_mu).clamp_(min=0).sqrt_()
        proposed = torch.exp2(self.log_max - mu - self.overflow_std_dev * sigma)
        proposed.clamp_(self.min_scale, self.max_scale)
        torch.where(informative, proposed.float(), self.scale, out=self.scale)
        self.grad_max.zero_()
        self._count(overflow)

    def to(self, device: torch.device | str) -> Self:
        """As `LossScale.to`."""
        self._betas = self._betas.to(device)
        return super().to(device)

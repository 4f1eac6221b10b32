"""Loss scales `none`, `static`, `dynamic` and `logmax`.

The device decides whether to skip: nothing here reads a tensor on the host. The published dynamic
rules are arguments of `DynamicLossScale`, set in conf/scaler/*.yaml.

Paper: Micikevicius et al., arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mprun.precision.policy import option
from mprun.torch_private import update_scale_

# Between these bounds both the scale and its reciprocal are normal FP32 numbers, so neither can
# become 0 or inf, even if subnormals are flushed to zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def checked_scale(name: str, value: object, low: float, high: float) -> float:
    """Return `value` rounded to FP32; raise ValueError unless it is a number in [low, high]."""
    return struct.unpack("f", struct.pack("f", within(name, value, low, high)))[0]


def within(name: str, value: object, low: float, high: float, *, open_ends: bool = False) -> float:
    """Return `value` as a float; raise ValueError unless it is in [low, high], or (low, high)."""
    number = math.nan  # which lies in no interval
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if low < number < high or (not open_ends and number in (low, high)):
        return float(number)
    allowed = f"strictly between {low:g} and {high:g}" if open_ends else f"from {low:g} to {high:g}"
    raise ValueError(f"{name}={value!r}: a number {allowed} is allowed")


def checked_count(name: str, value: object, low: int) -> int:
    """Return `value`; raise ValueError unless it is an integer in [low, 2**31 - 1]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
        raise ValueError(f"{name}={value!r}: an integer from {low} to {2**31 - 1} is allowed")
    return value


class LossScale(ABC):
    """State and bookkeeping shared by the kinds `none`, `static`, `dynamic` and `logmax`.

    All state is 0-dim tensors on one device (unless stated), changed in place only. A training step
    neither waits for the device nor moves them, so the calls can be captured in a CUDA graph.
    One iteration is: multiply the loss, or what enters its model in a backward pass, by `scale`,
    gradients by `inverse()`, `record` (once per optimizer that shares the scale), apply or skip,
    `update` (once).

    Raises:
        ValueError: An argument of a constructor is out of range; the message names it.
    """

    kind: ClassVar[str]
    skips_nonfinite: ClassVar[bool] = True
    needs_grad_max: ClassVar[bool] = False

    scale: Tensor  # float32
    found_inf: Tensor  # float32, 0 or 1, cleared by `update`
    steps_skipped: Tensor  # int64, total
    consecutive_skips: Tensor  # int64, since the last clean step
    stuck: Tensor  # bool: the last update was an overflow with no room left to back off

    def __init__(self, scale: float, max_consecutive_skips: int, device: torch.device | str):
        most = checked_count("max_consecutive_skips", max_consecutive_skips, 1)
        self.max_consecutive_skips = most
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self._fields: list[str] = []
        self._add(torch.float32, scale=scale, found_inf=0.0)
        self._add(torch.int64, steps_skipped=0, consecutive_skips=0)
        self._add(torch.bool, stuck=False)

    def _add(self, dtype: torch.dtype, shape: tuple[int, ...] = (), **values: float) -> None:
        """Add state tensors of this dtype and shape, filled with their values."""
        for name, value in values.items():
            setattr(self, name, torch.full(shape, value, dtype=dtype, device=self._one.device))
        self._fields += values

    def inverse(self) -> Tensor:
        """Return 1/scale, float32, 0-dim; computed in float64, rounded once, as torch.amp does."""
        return torch.div(self._one, self.scale, out=torch.empty_like(self.scale))

    def record(self, found_inf: Tensor, grad_max: Tensor | None = None) -> None:
        """OR one optimizer's flag into `found_inf`: one element of any dtype, which is non-zero or
        NaN if a gradient was not finite. grad_max: only used by `logmax`.
        """
        self.found_inf.logical_or_(found_inf.reshape(()))

    @abstractmethod
    def update(self) -> None:
        """End the iteration: apply the rule, count the skip if any, clear `found_inf`."""

    def collapsed(self) -> Tensor:
        """Return whether `max_consecutive_skips` steps in a row were skipped and the scale cannot
        back off further; bool, 0-dim."""
        return self.stuck & (self.consecutive_skips >= self.max_consecutive_skips)

    def _count(self, overflow: Tensor) -> None:
        self.steps_skipped.add_(overflow)
        # (n + 1) times the flag, in one operation.
        torch.addcmul(overflow, self.consecutive_skips, overflow, out=self.consecutive_skips)
        self.found_inf.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of every state tensor, on their device, and the `kind`."""
        return {"kind": self.kind} | {name: getattr(self, name).clone() for name in self._fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()` bit for bit, in place, from any device.

        Raises:
            ValueError: A key is missing or unknown, a tensor has another dtype or shape, or the
                state is of another kind. The message names the key; nothing is changed.
        """
        names = {"kind", *self._fields}
        if state.get("kind", self.kind) != self.kind:
            raise ValueError(f"loss scale state: kind={state['kind']!r}, needed: {self.kind!r}")
        if missing := names - set(state):
            raise ValueError(f"loss scale state: key {min(missing)!r} is missing")
        if unknown := set(state) - names:
            raise ValueError(f"loss scale state: unknown key {min(unknown)!r}")
        for name in self._fields:
            own, saved = getattr(self, name), state[name]
            form = (own.dtype, own.shape)
            if not isinstance(saved, Tensor) or (saved.dtype, saved.shape) != form:
                raise ValueError(
                    f"loss scale state: {name!r} must be a {own.dtype} tensor of shape "
                    f"{tuple(own.shape)}"
                )
        for name in self._fields:
            getattr(self, name).copy_(state[name])


class NoLossScale(LossScale):
    """No scaling and no skipping: non-finite gradients reach the weights."""

    kind = "none"
    skips_nonfinite = False

    def __init__(self, device: torch.device | str = "cpu"):
        super().__init__(1.0, 1, device)

    def update(self) -> None:
        """Clear `found_inf`; nothing is counted, because nothing was skipped."""
        self.found_inf.zero_()


class StaticLossScale(LossScale):
    """A scale that never changes; overflowing steps are skipped and counted.

    Args:
        scale: FP32, from 2**-126 to 2**126.
        max_consecutive_skips: >= 1; the fixed scale counts as its own floor, so `collapsed()` is
            true after that many skips in a row.
    """

    kind = "static"

    def __init__(
        self, scale: float, max_consecutive_skips: int = 50, device: torch.device | str = "cpu"
    ):
        scale = checked_scale("scale", scale, SMALLEST_SCALE, LARGEST_SCALE)
        super().__init__(scale, max_consecutive_skips, device)

    def update(self) -> None:
        torch.ne(self.found_inf, 0, out=self.stuck)
        self._count(self.stuck)


class DynamicLossScale(LossScale):
    """A scale that backs off on overflow and grows after `growth_interval` clean steps.

    With the defaults of the last five arguments this is torch.amp.GradScaler's rule (same kernel)
    inside [min_scale, max_scale]. The other published rules are in conf/scaler/*.yaml.

    Args:
        init_scale, min_scale, max_scale: FP32, 2**-126 <= min <= init <= max <= 2**126.
        growth_factor: > 1; the product is taken in float64, rounded once.
        backoff_factor: in (0, 1); likewise.
        growth_interval: >= 1; clean steps since the start, the last growth or the last overflow.
        growth_delay: >= 0; further clean steps before the first growth after the start or an
            overflow.
        hysteresis: >= 1; credit. Each overflow uses one; the overflow that uses the last, and those
            after it, back off. Growth refills the credit; with `refill_on_clean_step` every clean
            step does.
        tolerance: in [0, 1]; back off only if overflows since the last backoff / steps since the
            last growth or backoff >= tolerance. It excludes hysteresis > 1.
        hold_at_floor: omit a backoff that would reach `min_scale` or less; otherwise the scale is
            clamped.
        max_consecutive_skips: >= 1, see `collapsed()`.
    """

    kind = "dynamic"

    growth_tracker: Tensor  # int32, from -growth_delay
    hysteresis_credit: Tensor  # int32
    steps_since_rescale: Tensor  # int64
    overflows_since_backoff: Tensor  # int64

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
        self.growth_factor = within("growth_factor", growth_factor, 1.0, math.inf, open_ends=True)
        self.backoff_factor = within("backoff_factor", backoff_factor, 0.0, 1.0, open_ends=True)
        self.growth_interval = checked_count("growth_interval", growth_interval, 1)
        self.growth_delay = checked_count("growth_delay", growth_delay, 0)
        self.hysteresis = checked_count("hysteresis", hysteresis, 1)
        self.tolerance = within("tolerance", tolerance, 0.0, 1.0)
        if self.hysteresis > 1 and self.tolerance > 0:
            raise ValueError(f"tolerance={tolerance!r}: only 0 is allowed with hysteresis > 1")
        self.refill_on_clean_step = refill_on_clean_step
        self.hold_at_floor = hold_at_floor
        # An overflow at or below this scale has no room to back off.
        last_scale = self.min_scale / (self.backoff_factor if hold_at_floor else 1.0)
        self._last_scale = min(last_scale, self.max_scale)

        super().__init__(init_scale, max_consecutive_skips, device)
        tracker, credit = -self.growth_delay, self.hysteresis
        self._add(torch.int32, growth_tracker=tracker, hysteresis_credit=credit)
        self._add(torch.int64, steps_since_rescale=0, overflows_since_backoff=0)

    def update(self) -> None:
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
        update_scale_(
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
        """Load as `LossScale.load_state_dict` does, then clamp to this object's bounds and counts.

        Under the same arguments nothing is clamped. Under a shorter interval a saved tracker could
        lie past it, and the scale would never grow again.
        """
        super().load_state_dict(state)
        self.scale.clamp_(self.min_scale, self.max_scale)
        self.growth_tracker.clamp_(-self.growth_delay, self.growth_interval - 1)
        self.hysteresis_credit.clamp_(0, self.hysteresis)

    def _grows(self, overflow: Tensor) -> Tensor:
        return (self.growth_tracker == self.growth_interval - 1) & ~overflow

    def _spend_credit(self, overflow: Tensor) -> Tensor:
        # Growth at the ceiling also refills it, although the scale no longer moves there.
        refill = ~overflow if self.refill_on_clean_step else self._grows(overflow)
        credit = self.hysteresis_credit
        credit.sub_(overflow.int()).clamp_(min=0).masked_fill_(refill, self.hysteresis)
        return overflow & (credit == 0)

    def _compare_rate(self, overflow: Tensor) -> Tensor:
        self.steps_since_rescale.add_(1)
        self.overflows_since_backoff.add_(overflow)
        rate = self.overflows_since_backoff.double() / self.steps_since_rescale
        backs_off = overflow & (rate >= self.tolerance)
        self.steps_since_rescale.masked_fill_(backs_off | self._grows(overflow), 0)
        # Growth does not clear this count, so the rate can pass 1 (fairseq's rule).
        self.overflows_since_backoff.masked_fill_(backs_off, 0)
        return backs_off


class LogMaxLossScale(LossScale):
    """A scale that keeps log2 max|gradient| + `overflow_std_dev` deviations at `log_max`.

    Kuchaiev et al., arXiv 1805.10387, "LogNormal" scaling; NVIDIA/OpenSeq2Seq,
    optimizers/automatic_loss_scaler.py, LogMaxScaler. Let x be log2 of the step's largest unscaled
    gradient magnitude, mu the moving average of x (`beta1`), and sigma the standard deviation from
    moving averages of x and x**2 (`beta2`), all bias-corrected. Then
    scale = 2**(log_max - mu - overflow_std_dev * sigma), kept in [min_scale, max_scale]. 3.09
    standard deviations leave an overflow probability of 0.001. Overflowing steps are skipped.

    Differences from that source: the averages are float64, since E[x**2] - E[x]**2 cancels in
    float32. The formula uses `log_max`, where the source writes 16. A step whose largest gradient
    is 0 changes nothing, where the source reaches log2(0). A step with a non-finite gradient counts
    as x = `overflow_log2` (default: `log_max`). The source uses 2**log_max in this logarithm, so
    one overflow pins the scale to its floor for hundreds of steps: `overflow_log2=2.0**16`
    reproduces it.

    Args:
        init_scale, min_scale, max_scale: FP32, 2**-126 <= min <= init <= max <= 2**126.
        log_max, overflow_log2: finite, at most 2**31 in magnitude.
        beta1, beta2: in (0, 1).
        overflow_std_dev: in [0, 100].
        max_consecutive_skips: >= 1, see `collapsed()`.
    """

    kind = "logmax"
    needs_grad_max = True

    grad_max: Tensor  # float32, largest of this iteration
    # float64 (3,): x with beta1, x with beta2, x**2 with beta2, not bias-corrected.
    averages: Tensor
    start_weights: Tensor  # float64 (3,): beta**steps, the remaining weight of the start value 0

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
        self.log_max = within("log_max", log_max, -(2.0**31), 2.0**31)
        self.beta1 = within("beta1", beta1, 0.0, 1.0, open_ends=True)
        self.beta2 = within("beta2", beta2, 0.0, 1.0, open_ends=True)
        self.overflow_std_dev = within("overflow_std_dev", overflow_std_dev, 0.0, 100.0)
        overflows_at = self.log_max if overflow_log2 is None else overflow_log2
        self._overflow_log2 = within("overflow_log2", overflows_at, -(2.0**31), 2.0**31)
        super().__init__(init_scale, max_consecutive_skips, device)
        self._add(torch.float32, grad_max=0.0)
        self._add(torch.float64, (3,), averages=0.0, start_weights=1.0)
        betas = (self.beta1, self.beta2, self.beta2)
        self._betas = torch.tensor(betas, dtype=torch.float64, device=device)

    def record(self, found_inf: Tensor, grad_max: Tensor | None = None) -> None:
        """OR one optimizer's flag in, and keep the largest `grad_max` of the iteration.

        It is one element, floating point, max |gradient| after unscaling, ignored when the
        iteration overflows; with None it raises ValueError.
        """
        if grad_max is None:
            raise ValueError("grad_max=None: logmax needs the largest unscaled gradient magnitude")
        super().record(found_inf)
        torch.maximum(self.grad_max, grad_max.reshape(()).float(), out=self.grad_max)

    def update(self) -> None:
        overflow = self.found_inf != 0
        torch.logical_and(overflow, self.scale <= self.min_scale, out=self.stuck)
        no_number = overflow | ~torch.isfinite(self.grad_max)
        x = self.grad_max.double().log2().masked_fill_(no_number, self._overflow_log2)
        informative = torch.isfinite(x)

        new = self._betas * self.averages + (1 - self._betas) * torch.stack((x, x, x * x))
        torch.where(informative, new, self.averages, out=self.averages)
        weights = self.start_weights
        torch.where(informative, self._betas * weights, weights, out=weights)

        mu, slow_mu, mean_square = (self.averages / (1 - self.start_weights)).unbind()
        sigma = (mean_square - slow_mu * slow_mu).clamp_(min=0).sqrt_()
        proposed = torch.exp2(self.log_max - mu - self.overflow_std_dev * sigma)
        proposed.clamp_(self.min_scale, self.max_scale)
        torch.where(informative, proposed.float(), self.scale, out=self.scale)
        self.grad_max.zero_()
        self._count(overflow)


SCALES: dict[str, Callable[..., LossScale]] = {
    scale.kind: scale for scale in (NoLossScale, StaticLossScale, DynamicLossScale, LogMaxLossScale)
}


def get_loss_scale(name: str, device: torch.device | str = "cpu") -> LossScale:
    """Return a loss scale of conf/scaler by name, such as "apex"; ValueError if there is none."""
    values = option("scaler", name)
    own = {key: value for key, value in values.items() if key not in ("name", "kind")}
    return SCALES[values["kind"]](**own, device=device)

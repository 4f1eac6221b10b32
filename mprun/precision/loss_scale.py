"""Loss scales `none`, `static`, `dynamic` and `logmax`.

The device decides whether to skip: nothing here reads a tensor on the host. The published dynamic
rules are values of `DynamicRule`, set in conf/scaler/*.yaml.

Paper: Micikevicius et al., arXiv 1710.03740, section 3.2.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mprun.precision.loss_scale_rules import (
    LARGEST_SCALE,
    LOGMAX,
    SMALLEST_SCALE,
    TORCH_AMP,
    DynamicRule,
    LogMaxRule,
    checked_count,
    checked_scale,
)
from mprun.precision.policy import option
from mprun.torch_private import update_scale_


class LossScale(ABC):
    """The base class of the loss scales `none`, `static`, `dynamic` and `logmax`.

    The state consists of tensors on one device, 0-dim unless stated otherwise, and changes only in
    place. The methods neither wait for the device nor move the state tensors, so a CUDA graph can
    capture them.

    A training step uses a loss scale in this order:

    1. Multiply the loss, or the gradient with which the backward pass begins, by `scale`.
    2. Multiply the parameters' gradients by `inverse()`.
    3. Call `record` once for each optimizer that shares the scale.
    4. Let each optimizer apply or skip its update.
    5. Call `update` once.

    Raises:
        ValueError: An argument of a constructor is out of range; the message names it.
    """

    kind: ClassVar[str]
    skips_nonfinite: ClassVar[bool] = True
    needs_grad_max: ClassVar[bool] = False
    rule_type: ClassVar[type | None] = None

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

    @classmethod
    def of(cls, values: Mapping[str, Any], device: torch.device | str) -> Self:
        """Return one with the values of a file of conf/scaler."""
        make: Any = cls
        own = values if cls.rule_type is None else {"rule": cls.rule_type(**values)}
        return make(**own, device=device)

    def _refuse_numbers(self, rule: object, numbers: Mapping[str, Any]) -> None:
        """Raise TypeError for the numbers of a rule where the rule is wanted."""
        kind = self.rule_type or object
        if numbers or not isinstance(rule, kind):
            raise TypeError(f"rule: must be a {kind.__name__}")

    def inverse(self) -> Tensor:
        """Return 1/scale as a 0-dim float32 tensor, computed in float64 and rounded once, as in
        torch.amp."""
        return torch.div(self._one, self.scale, out=torch.empty_like(self.scale))

    def record(self, found_inf: Tensor, grad_max: Tensor | None = None) -> None:
        """Set the state `found_inf` to 1 if a gradient of one optimizer was not finite.

        found_inf: a tensor of one element, of any dtype, for one optimizer. A value that is
            non-zero or NaN means that a gradient of the optimizer was not finite.
        grad_max: the largest gradient magnitude, which only `logmax` uses.
        """
        self.found_inf.logical_or_(found_inf.reshape(()))

    @abstractmethod
    def update(self) -> None:
        """End the iteration: apply the rule, count the step if it was skipped, clear
        `found_inf`."""

    def collapsed(self) -> Tensor:
        """Return whether `max_consecutive_skips` steps in a row were skipped and the scale cannot
        decrease further, as a 0-dim bool tensor."""
        return self.stuck & (self.consecutive_skips >= self.max_consecutive_skips)

    def _count(self, overflow: Tensor) -> None:
        self.steps_skipped.add_(overflow)
        # (n + 1) times the flag, in one operation.
        torch.addcmul(overflow, self.consecutive_skips, overflow, out=self.consecutive_skips)
        self.found_inf.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the `kind` of the loss scale, and copies of all state tensors on their device."""
        return {"kind": self.kind} | {name: getattr(self, name).clone() for name in self._fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()` bit for bit, in place, from any device.

        Raises:
            ValueError: A key is missing or unknown, a tensor has another dtype or shape, or the
                state is of another kind. The error message names the key. No state is changed.
        """
        names = {"kind", *self._fields}
        if state.get("kind", self.kind) != self.kind:
            raise ValueError(f"loss scale state: kind={state['kind']!r}, must be {self.kind!r}")
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
    """A loss scale that never changes. Steps with a non-finite gradient are skipped and counted.

    Args:
        scale: FP32, from 2**-126 to 2**126.
        max_consecutive_skips: >= 1. After `max_consecutive_skips` skips in a row, `collapsed()` is
            true, because a fixed scale cannot decrease.
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
    """A loss scale that decreases after an overflow and grows after `growth_interval` clean steps.

    Args:
        rule: when and by how much the scale changes. The default is the rule of
            torch.amp.GradScaler.
    """

    kind = "dynamic"
    rule_type = DynamicRule

    growth_tracker: Tensor  # int32, from -growth_delay
    hysteresis_credit: Tensor  # int32
    steps_since_rescale: Tensor  # int64
    overflows_since_backoff: Tensor  # int64

    def __init__(
        self, rule: DynamicRule = TORCH_AMP, device: torch.device | str = "cpu", **former: Any
    ):
        self._refuse_numbers(rule, former)
        super().__init__(rule.init_scale, rule.max_consecutive_skips, device)
        self.rule, self._last_scale = rule, rule.last_scale
        tracker, credit = -rule.growth_delay, rule.hysteresis
        self._add(torch.int32, growth_tracker=tracker, hysteresis_credit=credit)
        self._add(torch.int64, steps_since_rescale=0, overflows_since_backoff=0)

    def update(self) -> None:
        overflow = self.found_inf != 0
        backs_off = overflow
        if self.rule.hysteresis > 1:
            backs_off = self._spend_credit(overflow)
        elif self.rule.tolerance > 0:
            backs_off = self._compare_rate(overflow)
        torch.logical_and(backs_off, self.scale <= self._last_scale, out=self.stuck)

        keeps = None
        if backs_off is not overflow or self.rule.hold_at_floor:
            keeps = (overflow ^ backs_off) | self.stuck
            before = self.scale.clone()
        rule = self.rule
        how = rule.growth_factor, rule.backoff_factor, rule.growth_interval
        update_scale_(self.scale, self.growth_tracker, self.found_inf, *how)
        if keeps is not None:
            torch.where(keeps, before, self.scale, out=self.scale)
        self.scale.clamp_(self.rule.min_scale, self.rule.max_scale)
        if self.rule.growth_delay:
            self.growth_tracker.masked_fill_(overflow, -self.rule.growth_delay)
        self._count(overflow)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state as `LossScale.load_state_dict` does, then clamp it to the limits of this
        object's rule.

        A state saved with this object's rule already lies within the limits, so clamping leaves it
        unchanged. If the `growth_interval` of this object is shorter than the saved count of clean
        steps, the scale would never grow again without clamping.
        """
        super().load_state_dict(state)
        self.scale.clamp_(self.rule.min_scale, self.rule.max_scale)
        self.growth_tracker.clamp_(-self.rule.growth_delay, self.rule.growth_interval - 1)
        self.hysteresis_credit.clamp_(0, self.rule.hysteresis)

    def _grows(self, overflow: Tensor) -> Tensor:
        return (self.growth_tracker == self.rule.growth_interval - 1) & ~overflow

    def _spend_credit(self, overflow: Tensor) -> Tensor:
        # Growth at the ceiling also refills it, although the scale no longer moves there.
        refill = ~overflow if self.rule.refill_on_clean_step else self._grows(overflow)
        credit = self.hysteresis_credit
        credit.sub_(overflow.int()).clamp_(min=0).masked_fill_(refill, self.rule.hysteresis)
        return overflow & (credit == 0)

    def _compare_rate(self, overflow: Tensor) -> Tensor:
        self.steps_since_rescale.add_(1)
        self.overflows_since_backoff.add_(overflow)
        rate = self.overflows_since_backoff.double() / self.steps_since_rescale
        backs_off = overflow & (rate >= self.rule.tolerance)
        self.steps_since_rescale.masked_fill_(backs_off | self._grows(overflow), 0)
        # Growth does not clear this count, so the rate can pass 1 (fairseq's rule).
        self.overflows_since_backoff.masked_fill_(backs_off, 0)
        return backs_off


class LogMaxLossScale(LossScale):
    """A loss scale computed from recent values of log2 of the largest gradient.

    The method is the "LogNormal" scaling of Kuchaiev et al., arXiv 1805.10387, first implemented in
    NVIDIA/OpenSeq2Seq (LogMaxScaler in optimizers/automatic_loss_scaler.py). After each step it
    sets scale = 2**(log_max - mu - overflow_std_dev * sigma), kept in [min_scale, max_scale]:

    - mu is the moving average of x = log2(largest unscaled gradient magnitude of a step), with
      decay `beta1`.
    - sigma is the standard deviation of this logarithm x. It is computed from moving averages of x
      and x**2 with decay `beta2`.

    All averages are bias-corrected. With overflow_std_dev=3.09, the probability of overflow is
    0.001. Overflowing steps are skipped.

    This class differs from OpenSeq2Seq in four points:

    - The averages are float64, because E[x**2] - E[x]**2 cancels in float32.
    - The exponent of the scale, log_max - mu - overflow_std_dev * sigma, has a configurable
      `log_max`; OpenSeq2Seq has the constant 16 in its place.
    - If the largest gradient of a step is 0, the averages and the scale stay unchanged; OpenSeq2Seq
      would compute log2(0).
    - For a step with a non-finite gradient, x is `overflow_log2` (default: `log_max`). OpenSeq2Seq
      uses x = 2**log_max, so one overflow keeps its scale at the floor for hundreds of steps.
      `overflow_log2=2.0**16` reproduces OpenSeq2Seq.

    Args:
        rule: the values of log_max, beta1, beta2, overflow_std_dev and the limits.
    """

    kind = "logmax"
    needs_grad_max = True
    rule_type = LogMaxRule

    grad_max: Tensor  # float32, largest of this iteration
    # float64 (3,): x with beta1, x with beta2, x**2 with beta2, not bias-corrected.
    averages: Tensor
    start_weights: Tensor  # float64 (3,): beta**steps, the remaining weight of the start value 0

    def __init__(
        self, rule: LogMaxRule = LOGMAX, device: torch.device | str = "cpu", **former: Any
    ):
        self._refuse_numbers(rule, former)
        super().__init__(rule.init_scale, rule.max_consecutive_skips, device)
        self.rule = rule
        self._overflow_log2 = rule.log_max if rule.overflow_log2 is None else rule.overflow_log2
        self._add(torch.float32, grad_max=0.0)
        self._add(torch.float64, (3,), averages=0.0, start_weights=1.0)
        betas = (rule.beta1, rule.beta2, rule.beta2)
        self._betas = torch.tensor(betas, dtype=torch.float64, device=device)

    def record(self, found_inf: Tensor, grad_max: Tensor | None = None) -> None:
        """Record `found_inf` as `LossScale.record` does, and keep the largest `grad_max` of the
        iteration.

        `grad_max` is a floating-point tensor of one element, the largest magnitude of the unscaled
        gradients. If the iteration overflows, `grad_max` is ignored. None raises ValueError.
        """
        if grad_max is None:
            raise ValueError("grad_max=None: logmax needs the largest unscaled gradient magnitude")
        super().record(found_inf)
        torch.maximum(self.grad_max, grad_max.reshape(()).float(), out=self.grad_max)

    def update(self) -> None:
        overflow = self.found_inf != 0
        torch.logical_and(overflow, self.scale <= self.rule.min_scale, out=self.stuck)
        no_number = overflow | ~torch.isfinite(self.grad_max)
        x = self.grad_max.double().log2().masked_fill_(no_number, self._overflow_log2)
        informative = torch.isfinite(x)

        new = self._betas * self.averages + (1 - self._betas) * torch.stack((x, x, x * x))
        torch.where(informative, new, self.averages, out=self.averages)
        weights = self.start_weights
        torch.where(informative, self._betas * weights, weights, out=weights)

        mu, slow_mu, mean_square = (self.averages / (1 - self.start_weights)).unbind()
        sigma = (mean_square - slow_mu * slow_mu).clamp_(min=0).sqrt_()
        proposed = torch.exp2(self.rule.log_max - mu - self.rule.overflow_std_dev * sigma)
        proposed.clamp_(self.rule.min_scale, self.rule.max_scale)
        torch.where(informative, proposed.float(), self.scale, out=self.scale)
        self.grad_max.zero_()
        self._count(overflow)


SCALES: dict[str, type[LossScale]] = {
    scale.kind: scale for scale in (NoLossScale, StaticLossScale, DynamicLossScale, LogMaxLossScale)
}


def get_loss_scale(name: str, device: torch.device | str = "cpu") -> LossScale:
    """Return a loss scale of conf/scaler by name, such as "apex"; ValueError if there is none."""
    values = option("scaler", name)
    own = {key: value for key, value in values.items() if key not in ("name", "kind")}
    return SCALES[values["kind"]].of(own, device)

"""The rules by which loss scales move, as values; `loss_scale` has their state on the device."""

import math
import struct
from dataclasses import dataclass
from typing import Any

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
    raise ValueError(f"{name}={value!r}: must be a number {allowed}")


def checked_count(name: str, value: object, low: int) -> int:
    """Return `value`; raise ValueError unless it is an integer in [low, 2**31 - 1]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
        raise ValueError(f"{name}={value!r}: must be an integer from {low} to {2**31 - 1}")
    return value


def _check_range(rule: Any) -> None:
    """Check what rules share, and round their scales to FP32."""
    checked_count("max_consecutive_skips", rule.max_consecutive_skips, 1)
    low = checked_scale("min_scale", rule.min_scale, SMALLEST_SCALE, LARGEST_SCALE)
    high = checked_scale("max_scale", rule.max_scale, low, LARGEST_SCALE)
    first = checked_scale("init_scale", rule.init_scale, low, high)
    for name, value in (("min_scale", low), ("max_scale", high), ("init_scale", first)):
        object.__setattr__(rule, name, value)  # frozen for all others


@dataclass(frozen=True, slots=True)
class DynamicRule:
    """The rule by which a `DynamicLossScale` backs off and grows.

    By default this is the rule of torch.amp.GradScaler (with the same kernel), limited to
    [min_scale, max_scale]. The fields growth_delay, refill_on_clean_step, tolerance and
    hold_at_floor extend that rule. The files conf/scaler/*.yaml contain published rules. A clean
    step is a step without overflow.

    Args:
        init_scale, min_scale, max_scale: FP32, 2**-126 <= min <= init <= max <= 2**126.
        growth_factor: > 1; multiplies the scale, in float64 with one rounding, when it grows.
        backoff_factor: in (0, 1); multiplies the scale, in float64 with one rounding, when it
            decreases.
        growth_interval: >= 1; the scale grows after this many clean steps since the start, the last
            growth or the last overflow.
        hysteresis: >= 1; number of overflows that it takes to lower the scale. The count begins
            again when the scale grows; with `refill_on_clean_step` it begins again at every clean
            step. Until the count begins again, each further overflow also lowers the scale.
        max_consecutive_skips: >= 1, see `LossScale.collapsed`.
        growth_delay: >= 0; number of clean steps that the first growth after the start or an
            overflow needs in addition to `growth_interval`.
        tolerance: in [0, 1]; an overflow lowers the scale only if the rate of overflows is at least
            `tolerance`. The rate of overflows is the number of overflows since the scale last fell,
            divided by the number of steps since it last changed. With a tolerance above
            0, hysteresis must be 1.
        hold_at_floor: what an overflow does if the decreased scale would be `min_scale` or less.
            With True, the scale stays unchanged. With False, the scale becomes `min_scale`.

    Raises:
        ValueError: An argument is out of range; the message names it.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    max_consecutive_skips: int = 50
    growth_delay: int = 0
    refill_on_clean_step: bool = False
    tolerance: float = 0.0
    hold_at_floor: bool = False

    def __post_init__(self) -> None:
        _check_range(self)
        within("growth_factor", self.growth_factor, 1.0, math.inf, open_ends=True)
        within("backoff_factor", self.backoff_factor, 0.0, 1.0, open_ends=True)
        checked_count("growth_interval", self.growth_interval, 1)
        checked_count("growth_delay", self.growth_delay, 0)
        checked_count("hysteresis", self.hysteresis, 1)
        within("tolerance", self.tolerance, 0.0, 1.0)
        if self.hysteresis > 1 and self.tolerance > 0:
            raise ValueError(f"tolerance={self.tolerance!r}: only 0 is allowed with hysteresis > 1")

    @property
    def last_scale(self) -> float:
        """Return the limit at which the scale stays: an overflow lowers only a scale above it."""
        floor = self.min_scale / (self.backoff_factor if self.hold_at_floor else 1.0)
        return min(floor, self.max_scale)


TORCH_AMP = DynamicRule()


@dataclass(frozen=True, slots=True)
class LogMaxRule:
    """The numbers in the formula of `LogMaxLossScale`: its target and the decay of its averages.

    Args:
        init_scale, min_scale, max_scale: FP32, 2**-126 <= min <= init <= max <= 2**126.
        log_max, overflow_log2: finite numbers of at most 2**31 in magnitude.
        beta1, beta2: decay of the moving averages of x and x**2, in (0, 1).
        overflow_std_dev: number of standard deviations of log2(largest scaled gradient) between its
            mean and `log_max`, in [0, 100]. Larger numbers make overflows rarer.
        max_consecutive_skips: >= 1, see `LossScale.collapsed`.

    Raises:
        ValueError: An argument is out of range; the message names it.
    """

    init_scale: float = 1.0
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    log_max: float = 16.0
    beta1: float = 0.99
    beta2: float = 0.999
    overflow_std_dev: float = 3.09
    overflow_log2: float | None = None
    max_consecutive_skips: int = 50

    def __post_init__(self) -> None:
        _check_range(self)
        within("log_max", self.log_max, -(2.0**31), 2.0**31)
        within("beta1", self.beta1, 0.0, 1.0, open_ends=True)
        within("beta2", self.beta2, 0.0, 1.0, open_ends=True)
        within("overflow_std_dev", self.overflow_std_dev, 0.0, 100.0)
        if self.overflow_log2 is not None:
            within("overflow_log2", self.overflow_log2, -(2.0**31), 2.0**31)


LOGMAX = LogMaxRule()

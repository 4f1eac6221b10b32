"""Number formats: policies, loss scales, emulation, products, weights and states in few bits.

`mprun.prepared` puts a model into a mode with them; they work without it, too.
"""

from mprun.precision.batch_statistics import BatchNormGuard, BatchStatistics
from mprun.precision.forward_context import ForwardContext, why_no_lstm, why_unsupported
from mprun.precision.loss_scale import (
    DynamicLossScale,
    LogMaxLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
    get_loss_scale,
)
from mprun.precision.loss_scale_rules import DynamicRule, LogMaxRule
from mprun.precision.policy import (
    DTYPE_NAMES,
    DTYPES,
    PrecisionPolicy,
    build_policy,
    get_policy,
    ieee_fp32,
    pin_math_flags,
    read_math_flags,
)
from mprun.precision.update import Update, WeightAverage

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "ForwardContext",
    "BatchNormGuard",
    "BatchStatistics",
    "DynamicLossScale",
    "DynamicRule",
    "LogMaxLossScale",
    "LogMaxRule",
    "LossScale",
    "NoLossScale",
    "PrecisionPolicy",
    "StaticLossScale",
    "Update",
    "WeightAverage",
    "build_policy",
    "get_loss_scale",
    "get_policy",
    "ieee_fp32",
    "pin_math_flags",
    "read_math_flags",
    "why_no_lstm",
    "why_unsupported",
]

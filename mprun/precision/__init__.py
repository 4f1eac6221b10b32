"""Number formats: policies, loss scales, emulation, products, weights and states in few bits.

`mprun.prepared` puts a model into a mode with them; they work without it, too.
"""

from mprun.precision.batch_statistics import BatchNormGuard as BatchNormGuard
from mprun.precision.batch_statistics import BatchStatistics as BatchStatistics
from mprun.precision.forward_context import ForwardContext as ForwardContext
from mprun.precision.forward_context import why_no_lstm as why_no_lstm
from mprun.precision.forward_context import why_unsupported as why_unsupported
from mprun.precision.loss_scale import DynamicLossScale as DynamicLossScale
from mprun.precision.loss_scale import LogMaxLossScale as LogMaxLossScale
from mprun.precision.loss_scale import LossScale as LossScale
from mprun.precision.loss_scale import NoLossScale as NoLossScale
from mprun.precision.loss_scale import StaticLossScale as StaticLossScale
from mprun.precision.loss_scale import get_loss_scale as get_loss_scale
from mprun.precision.loss_scale_rules import DynamicRule as DynamicRule
from mprun.precision.loss_scale_rules import LogMaxRule as LogMaxRule
from mprun.precision.policy import DTYPE_NAMES as DTYPE_NAMES
from mprun.precision.policy import DTYPES as DTYPES
from mprun.precision.policy import PrecisionPolicy as PrecisionPolicy
from mprun.precision.policy import build_policy as build_policy
from mprun.precision.policy import get_policy as get_policy
from mprun.precision.policy import ieee_fp32 as ieee_fp32
from mprun.precision.policy import pin_math_flags as pin_math_flags
from mprun.precision.policy import read_math_flags as read_math_flags
from mprun.precision.update import Update as Update
from mprun.precision.update import WeightAverage as WeightAverage

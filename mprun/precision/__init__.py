"""The precision engine: policies, master weights, loss scales, emulation.

It works without the rest of mprun:

    policy = get_policy("fp16_master_scaled")
    forward_context = ForwardContext(policy, device)
    cast = cast_model(model, policy)
    scale = DynamicLossScale(device=device)
    optimizer = MixedPrecisionOptimizer(cast, lambda named: SGD([p for _, p in named], lr), scale)
    for inputs, labels in batches:
        optimizer.zero_grad()
        with forward_context:
            with forward_context.autocast():
                logits = model(policy.cast_inputs(inputs))
            optimizer.backward(cross_entropy(logits.float(), labels))
        optimizer.step()
        scale.update()
"""

from mprun.precision.casting import CastModel, cast_model
from mprun.precision.emulation import ForwardContext, why_no_lstm, why_unsupported
from mprun.precision.loss_scale import (
    DynamicLossScale,
    LogMaxLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
    get_loss_scale,
)
from mprun.precision.optimizer import BatchNormGuard, MixedPrecisionOptimizer, Update
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

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "ForwardContext",
    "BatchNormGuard",
    "CastModel",
    "DynamicLossScale",
    "LogMaxLossScale",
    "LossScale",
    "MixedPrecisionOptimizer",
    "NoLossScale",
    "PrecisionPolicy",
    "StaticLossScale",
    "Update",
    "build_policy",
    "cast_model",
    "get_loss_scale",
    "get_policy",
    "ieee_fp32",
    "pin_math_flags",
    "read_math_flags",
    "why_no_lstm",
    "why_unsupported",
]

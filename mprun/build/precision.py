"""Policies, loss scales and optimizers from configurations."""

import torch
from torch import Tensor, nn

from mprun.config import schema
from mprun.config.check import SCALER_FIELDS
from mprun.errors import BadInput
from mprun.precision import (
    MODES,
    DynamicLossScale,
    LogMaxLossScale,
    LossScale,
    NoLossScale,
    PrecisionPolicy,
    StaticLossScale,
    build_policy,
)
from mprun.precision.torch_update import has_fused_kernel, norm_parameter_names, parameter_groups


def mode_label(config: schema.PrecisionConfig) -> str:
    """The mode's name, with every value that differs from the mode's own and every override.

    "fp32" is a baseline; "fp32+param_dtype=fp16" is not.
    """
    own = MODES[config.name]
    changed = [
        f"{field}={getattr(config, field)}"
        for field, value in own.items()
        if getattr(config, field) != value
    ]
    changed += [f"{pattern}={dtype}" for pattern, dtype in config.overrides.items()]
    return "+".join([config.name, *changed])


def policy_from(config: schema.PrecisionConfig) -> PrecisionPolicy:
    """The precision policy that a configuration describes."""
    fields = (
        "param_dtype",
        "norm_dtype",
        "master_dtype",
        "grad_dtype",
        "loss_dtype",
        "autocast_dtype",
        "fp32_math",
    )
    return build_policy(config.name, {field: getattr(config, field) for field in fields})


def build_loss_scale(config: schema.ScalerConfig, device: torch.device) -> LossScale:
    """A fresh loss scale of the configured kind."""
    arguments = {name: getattr(config, name) for name in SCALER_FIELDS[config.kind]}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    kinds = {
        "none": NoLossScale,
        "static": StaticLossScale,
        "dynamic": DynamicLossScale,
        "logmax": LogMaxLossScale,
    }
    return kinds[config.kind](**arguments, device=device)


def update_of(config: schema.OptimConfig) -> str:
    """`update` of a MixedPrecisionOptimizer: one of torch's implementations is the plain way."""
    return config.implementation if config.implementation in ("auto", "single_pass") else "plain"


def optimizer_maker(
    config: schema.OptimConfig,
    policy: PrecisionPolicy,
    device: torch.device,
    skips: bool,
    module: nn.Module,
):
    """A function from the (name, tensor) pairs of `module` to a torch optimizer.

    Biases and the parameters of the module's norm layers get groups of their own where the
    configuration tells them apart from the weights.

    implementation "auto" and "single_pass" are the fused kernel, on which a single pass builds on a
    CPU, except where the update itself is in 16 bits: a fused kernel would compute that in FP32
    registers (and torch's fused SGD does not update half parameters on a CPU at all).
    """
    implementation, fused = config.implementation, has_fused_kernel(config.name, device)
    if implementation in ("auto", "single_pass"):
        in_16_bits = policy.master_dtype is None and policy.param_dtype.itemsize == 2
        implementation = "fused" if fused and not in_16_bits else "foreach"
    elif implementation == "fused" and not fused:
        raise BadInput(
            f"optim.implementation=fused: torch {torch.__version__} has no fused "
            f"{config.name} on {device.type} (allowed: auto, foreach, loop)"
        )
    norm_names = norm_parameter_names(module)
    common = {
        "fused": implementation == "fused",
        "foreach": implementation == "foreach",
    }

    def make(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        groups = parameter_groups(
            named,
            norm_names,
            lr=config.lr,
            weight_decay=config.weight_decay,
            bias_lr_factor=config.bias_lr_factor,
            decay_bias=config.decay_bias,
            decay_norm=config.decay_norm,
        )
        match config.name:
            case "sgd":
                return torch.optim.SGD(
                    groups,
                    momentum=config.momentum or 0.0,
                    nesterov=bool(config.nesterov),
                    **common,
                )
            case "adam" | "adamw":
                kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
                # Of a fused kernel it changes nothing but that a CUDA graph may hold it. Else only
                # where needed: the capturable formula rounds differently.
                capturable = device.type == "cuda" and (skips or implementation == "fused")
                return kind(
                    groups,
                    betas=tuple(config.betas or (0.9, 0.999)),
                    **common,
                    eps=1e-8 if config.eps is None else config.eps,
                    capturable=capturable,
                )
            case "adagrad":
                return torch.optim.Adagrad(
                    groups,
                    **common,
                    initial_accumulator_value=config.initial_accumulator or 0.0,
                    eps=1e-10 if config.eps is None else config.eps,
                )
        raise BadInput(f"optim={config.name}: no builder")

    return make

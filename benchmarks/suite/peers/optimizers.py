"""torch's optimizers with the numbers of a configuration."""

import torch
from torch import nn

from mprun.assembly.precision import Rates, norm_parameter_names, parameter_groups
from mprun.config.schema import OptimConfig
from mprun.errors import BadInput


def groups_of(config: OptimConfig, network: nn.Module) -> list[dict]:
    """Group the network's parameters by rate and decay; one group if all are equal."""
    rates = Rates(
        lr=config.lr,
        weight_decay=config.weight_decay,
        bias_lr_factor=config.bias_lr_factor,
        decay_bias=config.decay_bias,
        decay_norm=config.decay_norm,
    )
    groups = parameter_groups(network.named_parameters(), rates, norm_parameter_names(network))
    return [{k: v for k, v in group.items() if k != "lr_factor"} for group in groups]


def make_optimizer(
    config: OptimConfig, network: nn.Module, fused: bool = False
) -> torch.optim.Optimizer:
    """Make a torch optimizer for `network`, fused or in the implementation that torch chooses."""
    groups, chosen = groups_of(config, network), {"fused": True} if fused else {}
    match config.name:
        case "sgd":
            return torch.optim.SGD(
                groups,
                lr=config.lr,
                momentum=config.momentum or 0.0,
                nesterov=bool(config.nesterov),
                **chosen,
            )
        case "adam" | "adamw":
            kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
            betas = tuple(config.betas or (0.9, 0.999))
            eps = 1e-8 if config.eps is None else config.eps
            return kind(groups, lr=config.lr, betas=betas, eps=eps, **chosen)
        case "adagrad":
            start = config.initial_accumulator or 0.0
            eps = 1e-10 if config.eps is None else config.eps
            return torch.optim.Adagrad(
                groups, lr=config.lr, initial_accumulator_value=start, eps=eps, **chosen
            )
    raise BadInput(f"optim={config.name}: no peer has it (allowed: sgd, adam, adamw, adagrad)")

"""Optimizers as functions of tensors: torch's with a fused kernel, others, those of keys."""

from functools import partial

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

RULES = {
    "sgd": partial(SGD, lr=0.05),
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.01),
    "adamw": partial(AdamW, lr=0.01),
    "adagrad": partial(Adagrad, lr=0.05),
}
IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True, "fused": False},
    "loop": {"foreach": False, "fused": False},
}
# Keys of `optim` of the shipped rules.
CONFIGURED = {
    "sgd": {"momentum": 0.9, "nesterov": False},
    "adam": {"betas": [0.9, 0.999], "eps": 1e-8},
    "adagrad": {"initial_accumulator": 1.0, "eps": 1e-10},
    "rmsprop": {"alpha": 0.9, "eps": 1e-3, "momentum": 0.9},
    "rmsprop_tensorflow": {"alpha": 0.9, "eps": 1.0, "momentum": 0.9, "initial_accumulator": 1.0},
}


class Foreign(torch.optim.Optimizer):
    """As others write them: a counter in the group, and state that each step replaces."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["m"] = 0.9 * state["m"] + p.grad if "m" in state else p.grad.clone()
                p.add_(state["m"], alpha=-group["lr"] / group["count"])


OTHERS = {
    "foreign": Foreign,
    "rmsprop": lambda t: torch.optim.RMSprop(t, 1e-2, momentum=0.9, centered=True),
    "nadam": lambda t: torch.optim.NAdam(t, 1e-2),
    "radam": lambda t: torch.optim.RAdam(t, 1e-2),
    "adamax": lambda t: torch.optim.Adamax(t, 1e-2),
    "adadelta": lambda t: torch.optim.Adadelta(t, 1.0),
    "adafactor": lambda t: torch.optim.Adafactor(t, 1e-2),
    "rprop": lambda t: torch.optim.Rprop(t, 1e-2),
    "asgd": lambda t: torch.optim.ASGD(t, 1e-2),
    "adagrad, decaying": lambda t: torch.optim.Adagrad(t, 1e-2, lr_decay=0.1),
    "sgd, dampening": lambda t: torch.optim.SGD(t, 0.05, 0.9, dampening=0.5),
}

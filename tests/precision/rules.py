"""torch's optimizers with a fused kernel, as functions of tensors and further settings."""

from functools import partial

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

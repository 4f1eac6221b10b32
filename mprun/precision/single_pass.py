"""An update as a single pass over the weights: what its forms have in common.

The plain way casts every gradient to FP32, unscales it in place, lets torch's optimizer update the
master weights and copies these to the model: 40 bytes a parameter for SGD with momentum, of which
a single pass needs 22. Both compute the same formulas in the same order and keep
the same state under the same names, so a checkpoint of one continues in the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

# AdamW is a kind of Adam to Python.
RULES = {AdamW: "adamw", Adam: "adam", SGD: "sgd", Adagrad: "adagrad"}
# In the order in which kernels take it.
STATE = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
}


@dataclass(frozen=True, slots=True)
class Checked:
    """What one read of the gradients told.

    norms: float32 [k], L2 norms of the unscaled gradients that count in the norm, one or several
    tensors to an entry; None: not asked for. grad_max: float32, 0-dim, largest unscaled magnitude;
    None: not asked for.
    """

    norms: Tensor | None
    grad_max: Tensor | None


class SinglePass(Protocol):
    """The two passes. Gradients are as autograd left them, scaled, None where there is none.

    inverse: 1/scale, float32, 0-dim; None: not scaled. found_inf: float32, 0-dim; None: no check.
    """

    def check(
        self,
        gradients: Sequence[Tensor | None],
        inverse: Tensor | None,
        found_inf: Tensor | None,
        *,
        norm: bool,
        grad_max: bool,
    ) -> Checked:
        """Read the gradients once; set `found_inf` to 1 if one is not finite."""
        ...

    def update(
        self,
        gradients: Sequence[Tensor | None],
        inverse: Tensor | None,
        clip: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Cast, unscale, multiply by `clip` (0-dim) what is clipped, update, copy to the model.

        Where `found_inf` is not 0 nothing is written.
        """
        ...


def rule_of(inner: Optimizer) -> str | None:
    """ "sgd", "adam", "adamw" or "adagrad"; None for another optimizer."""
    return RULES.get(type(inner))


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor as its [numel] values lie in memory; shares them."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have their values in the same order in memory."""
    if a.stride() == b.stride():
        return True
    pairs = zip(a.stride(), b.stride(), a.shape, strict=True)
    return all(one == other for one, other, size in pairs if size > 1)


def in_order_of(like: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` itself where its values lie as those of `like`, else a copy whose do."""
    if same_order(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def ordered_state(inner: Optimizer, master: Tensor) -> list[Tensor]:
    """The state tensors of a parameter, in memory as it is: kernels look at no strides."""
    state = inner.state[master]
    names = [name for name in STATE[rule_of(inner)] if name in state]
    for name in names:
        state[name] = in_order_of(master, state[name])
    return [state[name] for name in names]

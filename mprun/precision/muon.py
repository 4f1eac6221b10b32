"""Muon for the hidden matrices of a network, AdamW for all else: one optimizer.

Muon moves a matrix by its momentum made orthogonal: five steps of Newton and Schulz make all of its
singular values about 1 (Jordan et al., kellerjordan.github.io/posts/muon). torch.optim.Muon takes
them in BF16; here their dtype is a value. In BF16 every bit is torch's.

The rate of a matrix depends on its shape, by `adjust_lr`: "original" times the root of max(1,
rows / columns), "spectral_unclamped" without that bound, "match_rms_adamw" times 0.2 of the root of
the larger one, with which AdamW's rates fit (arXiv 2502.16982).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

_STEPS, _SMALLEST_NORM = 5, 1e-7  # torch's defaults, as the factors
_A, _B, _C = 3.4445, -4.775, 2.0315
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Muon(Optimizer):
    """One optimizer, because a loss scale, masters and a checkpoint belong to all weights.

    Args:
        params: groups; those with `matrices=True` have 2-D weights, which Muon moves.
        betas, eps, foreach, capturable: of AdamW; momentum, nesterov, newton_schulz_dtype,
            adjust_lr: of Muon. lr and weight_decay (decoupled) are of both.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        newton_schulz_dtype: str = "bf16",
        adjust_lr: str = "original",
        foreach: bool | None = None,
        capturable: bool = False,
    ):
        how = {"weight_decay": weight_decay, "foreach": foreach, "capturable": capturable}
        # It steps those of this optimizer's groups that have no matrices.
        self.adamw = AdamW([torch.zeros(0)], 1e-3, betas, eps, **how)  # type: ignore[arg-type]
        own = {"momentum": momentum, "nesterov": nesterov, "adjust_lr": adjust_lr}
        own |= {"lr": lr, "newton_schulz_dtype": newton_schulz_dtype, "matrices": False}
        super().__init__(params, {**self.adamw.defaults, **own})
        for weight in (own for group in self._groups(True) for own in group["params"]):
            if weight.dim() != 2:
                raise ValueError(f"a weight of shape {tuple(weight.shape)} is no matrix")
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    def _groups(self, matrices: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["matrices"] == matrices]

    def of_adamw(self) -> AdamW:
        """Return what steps all else, with this optimizer's groups and state."""
        self.adamw.param_groups, self.adamw.state = self._groups(False), self.state
        return self.adamw

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.of_adamw().step()
        for group in self._groups(True):
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, weight.grad, group)

    def _move(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        average, lr = self.state[weight]["momentum_buffer"], group["lr"]
        average.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        update = orthogonal(update, _DTYPES[group["newton_schulz_dtype"]])
        weight.mul_(1 - lr * group["weight_decay"])
        ratio = _ratio(group["adjust_lr"], *weight.shape)
        if isinstance(lr, Tensor):  # which the host does not read
            weight.addcmul_(update.to(weight.dtype), lr.to(weight.dtype), value=-ratio)
        else:
            weight.add_(update, alpha=-(lr * ratio))


def _ratio(adjust_lr: str, rows: int, columns: int) -> float:
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    smallest = 1 if adjust_lr == "original" else 0
    return math.sqrt(max(smallest, rows / columns))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix with singular values near 1, computed in `dtype`.

    FP16 ends at 2^-24, far above many momenta: for it the norm is taken, and divided by, before the
    cast. Else after it, as torch does.
    """
    if dtype is torch.float16:
        matrix = matrix / matrix.norm(dtype=torch.float32).clamp(min=_SMALLEST_NORM)
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype, copy=True)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=_SMALLEST_NORM))
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x

"""Muon for the hidden matrices of a network, AdamW for all else: one optimizer.

Muon moves a matrix by its momentum made orthogonal: five steps of Newton and Schulz make all of its
singular values about 1 (Jordan et al., kellerjordan.github.io/posts/muon). torch.optim.Muon takes
them in BF16; here their dtype is a value. In BF16 every bit is torch's.

The rate of a matrix depends on its shape, by `adjust_lr` (`_RATIOS`): with "match_rms_adamw"
AdamW's rates fit (arXiv 2502.16982).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

_STEPS, _SMALLEST_NORM = 5, 1e-7  # torch's defaults, as the factors
_A, _B, _C = 3.4445, -4.775, 2.0315
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# A matrix's rate over that of its group, of (rows, columns).
_RATIOS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}


class Muon(Optimizer):
    """One optimizer, because a loss scale, masters and a checkpoint belong to all weights.

    AdamW is torch's function, not an optimizer within this one: that one's step would be a second
    step to whoever counts, schedules or skips them.

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
        chosen = {"newton_schulz_dtype": newton_schulz_dtype, "adjust_lr": adjust_lr}
        for (name, value), known in zip(chosen.items(), ([*_DTYPES], [*_RATIOS]), strict=True):
            if value not in known:
                raise ValueError(f"{name}={value}: must be one of {', '.join(known)}")
        how = {"weight_decay": weight_decay, "foreach": foreach, "capturable": capturable}
        checked = AdamW([torch.zeros(0)], lr, betas, eps, **how)  # type: ignore[arg-type]
        of_matrices = {"momentum": momentum, "nesterov": nesterov, "matrices": False}
        super().__init__(params, {**checked.defaults, **of_matrices, **chosen})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for weight in group["params"] if group["matrices"] else ():
            if weight.dim() != 2:
                raise ValueError(f"a weight of shape {tuple(weight.shape)} is not a matrix")

    def initialise_state(self) -> None:
        """Create the state that a first step would create."""
        for group in self.param_groups:
            for weight in group["params"]:
                self._state_of(weight, group)

    def _state_of(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state and group["matrices"]:
            state["momentum_buffer"] = torch.zeros_like(weight)
        elif not state:
            device = weight.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state |= {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [own for own in group["params"] if own.grad is not None]
            states = [self._state_of(own, group) for own in moved]
            if not group["matrices"]:
                _move_by_adamw(moved, states, group)
                continue
            for own, state in zip(moved, states, strict=True):
                _move_by_muon(own, own.grad, state["momentum_buffer"], group)
        return loss


def _move_by_adamw(weights: list[Tensor], states: list[dict[str, Tensor]], group: dict) -> None:
    averages, squares, steps = (
        [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")
    )
    beta1, beta2 = group["betas"]
    how = {key: group[key] for key in ("lr", "weight_decay", "eps", "foreach", "capturable")}
    how |= {"has_complex": any(own.is_complex() for own in weights)}
    how |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
    gradients: list[Any] = [own.grad for own in weights]
    adamw(weights, gradients, averages, squares, [], steps, **how)


def _move_by_muon(weight: Tensor, gradient: Tensor, average: Tensor, group: dict[str, Any]) -> None:
    lr = group["lr"]
    average.lerp_(gradient, 1 - group["momentum"])
    update = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
    update = orthogonal(update, _DTYPES[group["newton_schulz_dtype"]])
    weight.mul_(1 - lr * group["weight_decay"])
    ratio = _RATIOS[group["adjust_lr"]](*weight.shape)
    if isinstance(lr, Tensor):  # which the host does not read
        weight.sub_(update.float() * (lr * ratio))
    else:
        weight.add_(update, alpha=-(lr * ratio))


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

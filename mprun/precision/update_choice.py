"""Which way an update takes: one pass over the weights, or torch's operations one after another."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.single_pass import SinglePass, rule_of
from mprun.precision.torch_update import is_fused

# What no published recipe of the paper's models sets, and what the single pass has no formula for.
_UNKNOWN_SETTINGS = ("maximize", "differentiable", "amsgrad", "dampening", "lr_decay")


@dataclass(frozen=True, slots=True)
class UpdateChoice:
    """path: "single_pass", or which of torch's: "fused", "foreach", "loop". reason: why."""

    single_pass: SinglePass | None
    path: str
    reason: str


def choose_update(
    asked: str,
    inner: Optimizer,
    parameters: Sequence[Tensor],
    updated: Sequence[Tensor],
    is_clipped: Sequence[bool],
    *,
    grad_dtypes: set[torch.dtype],
    gains: bool,
) -> UpdateChoice:
    """The way that `asked` names: "plain", "single_pass", or "auto" for the better one.

    updated: what `inner` updates for each of `parameters`, its master or itself. is_clipped:
    whether its gradient counts in the norm. grad_dtypes: in which gradients are unscaled. gains:
    whether there is a cast or a scale to save passes over. Raises ValueError where a single pass
    is asked for and cannot be.
    """
    path = torch_path(inner)
    if asked == "plain":
        return UpdateChoice(None, path, f"optim.implementation={path}")
    if asked not in ("auto", "single_pass"):
        raise ValueError(f"update={asked!r}: must be 'plain', 'auto' or 'single_pass'")
    device, rule = updated[0].device, rule_of(inner)
    why = _why_not(inner, updated, grad_dtypes)
    if why is None and device.type == "cpu" and not is_fused(inner):
        why = f"torch's {rule} has no fused kernel in use here, which is what a CPU runs in blocks"
    if why is None and asked == "auto" and not gains:
        why = "no cast and no loss scale: torch's own update is one pass over the weights"
    if why is None and asked == "auto" and device.type == "cpu":
        why = _why_slower_on_cpu(inner, parameters, updated)
    if why is None and device.type == "cuda":
        # Imported here: Triton is a part of torch for CUDA on Linux, and of no other.
        from mprun.precision.single_pass_self_test import why_not_on

        why = why_not_on(device, rule)
    if why is not None and asked == "single_pass":
        raise ValueError(
            f"optim.implementation=single_pass: {why} (allowed: auto, fused, foreach, loop)"
        )
    if why is not None:
        return UpdateChoice(None, path, why)
    if device.type == "cpu":
        from mprun.precision.single_pass_cpu import BlockedUpdate

        blocked = BlockedUpdate(inner, parameters, updated, is_clipped)
        return UpdateChoice(blocked, "single_pass", "torch's fused kernel in blocks of the cache")
    from mprun.precision.single_pass_triton import KernelUpdate

    kernels = KernelUpdate(inner, parameters, updated, is_clipped)
    return UpdateChoice(kernels, "single_pass", f"a Triton kernel for {rule}")


def torch_path(inner: Optimizer) -> str:
    """Which of torch's implementations `inner` runs; "default": torch chooses."""
    if is_fused(inner):
        return "fused"
    chosen = [group.get("foreach") for group in inner.param_groups]
    if all(chosen):
        return "foreach"
    return "default" if None in chosen else "loop"


def _why_slower_on_cpu(
    inner: Optimizer, parameters: Sequence[Tensor], updated: Sequence[Tensor]
) -> str | None:
    """Measured (benchmarks/update_speed.py --mode amp): one core writes as fast as it reads."""
    if any(own is not tensor for own, tensor in zip(parameters, updated, strict=True)):
        return None
    groups = inner.param_groups
    if rule_of(inner) == "sgd" and not any(group["nesterov"] for group in groups):
        return None  # its kernel unscales for nothing
    return "on a CPU FP32 gradients are as fast unscaled in place"


def _why_not(
    inner: Optimizer, updated: Sequence[Tensor], grad_dtypes: set[torch.dtype]
) -> str | None:
    rule, device = rule_of(inner), updated[0].device
    if rule is None:
        return f"{type(inner).__name__}: only SGD, Adam, AdamW and Adagrad have one"
    if device.type not in ("cpu", "cuda"):
        return f"there is none for {device.type}"
    if any(tensor.dtype is not torch.float32 for tensor in updated):
        return "weights are updated in 16 bits, operation by operation"
    if grad_dtypes != {torch.float32}:
        return "gradients are unscaled in 16 bits (precision.grad_dtype)"
    if not all(_is_dense(tensor) for tensor in updated):
        return "a parameter has gaps between its values"
    for group in inner.param_groups:
        for setting in _UNKNOWN_SETTINGS:
            if group.get(setting):
                return f"{setting}={group[setting]}: it has no formula for this setting"
        on_host = rule.startswith("adam") and not (group["fused"] or group["capturable"])
        if device.type == "cuda" and on_host:
            return f"{rule} keeps its step counter on the host unless fused or capturable"
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill their part of memory, in whatever order of dimensions."""
    expected = 1
    sizes = [(s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    for stride, size in sorted(sizes):
        if stride != expected:
            return False
        expected *= size
    return True

"""How an update is applied: torch's operations one after another, or one pass over the weights.

Both ways own what is pending between `backward` and `step`, and give the same numbers.

`PlainUpdate` takes the gradients out of `.grad` after every loss, casts and unscales them there and
then, lets torch's optimizer update the masters and copies these to the model.

`SinglePassUpdate` leaves the gradients of a step with one loss where backward wrote them, scaled
and in its dtype, until the step: one read for the check, one pass for everything else. A second
loss or micro-batch of the same step takes them out first, as the plain way does after every loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.gradients import Gradients, global_norm, norms_of
from mprun.precision.loss_scale import LossScale
from mprun.precision.single_pass import SinglePass, rule_of
from mprun.precision.torch_update import is_fused, step_unless

# What no published recipe of the paper's models sets, and what the single pass has no formula for.
_UNKNOWN_SETTINGS = ("maximize", "differentiable", "amsgrad", "dampening", "lr_decay")


@dataclass(frozen=True, slots=True)
class Ready:
    """The gradients of a step before clipping; None where there is none.

    Attributes:
        own: of the parameters.
        rows: of the row tables, unscaled.
        inverse: 1/scale that `own` is still to be multiplied with, float32, 0-dim; None: with
            nothing.
        norm: L2 norm of all unscaled gradients that count in it, float32, 0-dim; None: not asked
            for.
    """

    own: list[Tensor | None]
    rows: list[Tensor | None]
    inverse: Tensor | None
    norm: Tensor | None


class UpdateStrategy(Protocol):
    """What an optimizer asks of a way to update. Nothing in it waits for the device."""

    # Whether `apply` leaves the gradients as they were, so that a clip is not in them.
    keeps_gradients: bool

    def clear(self) -> None:
        """Forget what is pending: a new step begins."""
        ...

    def before_backward(self) -> None:
        """Another loss is about to add to `.grad`."""
        ...

    def after_backward(self, scale: LossScale) -> None:
        """A loss has been propagated, times `scale`."""
        ...

    def ready(self, needs_norm: bool) -> Ready:
        """All gradients of the step, checked; sets found_inf where one is not finite."""
        ...

    def apply(self, ready: Ready, clip: Tensor | None, found_inf: Tensor | None) -> None:
        """Clip, update the masters and copy them to the model; of row tables only clip.

        Args:
            clip: 0-dim factor of the gradients that count in the norm; None: nothing is clipped.
            found_inf: 0-dim; where it is not 0 nothing moves. None: everything does.
        """
        ...


class PlainUpdate:
    """torch's operations one after another; see `UpdateStrategy`."""

    keeps_gradients = False

    def __init__(self, inner: Optimizer, gradients: Gradients, updated: Sequence[Tensor]):
        self.inner, self.gradients, self.updated = inner, gradients, updated
        pairs = list(zip(gradients.parameters, updated, strict=True))
        self._copies = [own for own, master in pairs if own is not master]
        self._masters = [master for own, master in pairs if own is not master]

    def clear(self) -> None:
        if self.gradients.collects:
            for updated in self.updated:
                updated.grad = None

    def before_backward(self) -> None:
        """Nothing: no gradient has been left in `.grad` that must not be added to."""

    def after_backward(self, scale: LossScale) -> None:
        if self.gradients.collects:
            self.gradients.add(scale)

    def ready(self, needs_norm: bool) -> Ready:
        own, rows = self.gradients.parts()
        norm = global_norm(self.gradients.clipped([*own, *rows])) if needs_norm else None
        return Ready(own, rows, None, norm)

    def apply(self, ready: Ready, clip: Tensor | None, found_inf: Tensor | None) -> None:
        if clip is not None:
            torch._foreach_mul_(self.gradients.clipped([*ready.own, *ready.rows]), clip)
        if self.gradients.collects:
            for updated, gradient in zip(self.updated, ready.own, strict=True):
                updated.grad = None if gradient is None else gradient.to(updated.dtype)
        if found_inf is not None:
            step_unless(self.inner, found_inf)
        else:
            self.inner.step()
        if self._copies:
            torch._foreach_copy_(self._copies, self._masters)


class SinglePassUpdate:
    """One pass over the weights, by the kernels of `single_pass`; see `UpdateStrategy`."""

    keeps_gradients = True

    def __init__(self, single_pass: SinglePass, gradients: Gradients):
        self.single_pass, self.gradients = single_pass, gradients
        # The scale of the loss whose gradients are still in `.grad`.
        self._pending: LossScale | None = None

    def clear(self) -> None:
        self._pending = None

    def before_backward(self) -> None:
        if self._pending is not None and self.gradients.collects:
            self.gradients.add(self._pending)
            self._pending = None

    def after_backward(self, scale: LossScale) -> None:
        if self.gradients.any():
            self.gradients.add(scale)
        else:
            self._pending = scale

    def ready(self, needs_norm: bool) -> Ready:
        if self._pending is None:
            own, rows = self.gradients.parts()
            norm = global_norm(self.gradients.clipped([*own, *rows])) if needs_norm else None
            return Ready(own, rows, None, norm)
        scale, gradients = self._pending, self.gradients
        own = [parameter.grad for parameter in gradients.parameters]
        inverse = scale.inverse() if scale.skips_nonfinite else None
        checked = self.single_pass.check(
            own,
            inverse,
            gradients.found_inf if gradients.skips else None,
            norm=needs_norm,
            grad_max=scale.needs_grad_max,
        )
        grad_max = checked.grad_max
        of_rows = gradients.add_rows(scale)
        if grad_max is not None and of_rows is not None:
            grad_max = torch.maximum(grad_max, of_rows)
        if scale.skips_nonfinite:
            scale.record(gradients.found_inf, grad_max)
        rows = gradients.parts()[1]
        if checked.norms is None:
            return Ready(own, rows, inverse, None)
        norms = [checked.norms]
        if chosen := gradients.clipped([*[None] * len(own), *rows]):
            norms.append(norms_of(chosen))
        return Ready(own, rows, inverse, torch.linalg.vector_norm(torch.cat(norms)))

    def apply(self, ready: Ready, clip: Tensor | None, found_inf: Tensor | None) -> None:
        if clip is not None:
            rows = self.gradients.clipped([*[None] * len(ready.own), *ready.rows])
            if rows:
                torch._foreach_mul_(rows, clip)
        self.single_pass.update(ready.own, ready.inverse, clip, found_inf)


@dataclass(frozen=True, slots=True)
class UpdateChoice:
    """Which way was chosen.

    Attributes:
        path: "single_pass", or which of torch's: "fused", "foreach", "loop", "default".
        reason: why.
    """

    single_pass: SinglePass | None
    path: str
    reason: str


def choose_update(
    asked: str,
    inner: Optimizer,
    gradients: Gradients,
    updated: Sequence[Tensor],
    *,
    gains: bool,
) -> UpdateChoice:
    """The way that `asked` names: "plain", "single_pass", or "auto" for the better one.

    Args:
        updated: what `inner` updates for each parameter of `gradients`, its master or itself.
        gains: whether there is a cast or a scale to save passes over.

    Raises:
        ValueError: a single pass is asked for and cannot be.
    """
    path = torch_path(inner)
    if asked == "plain":
        return UpdateChoice(None, path, f"optim.implementation={path}")
    if asked not in ("auto", "single_pass"):
        raise ValueError(f"update={asked!r}: must be 'plain', 'auto' or 'single_pass'")
    device, rule = updated[0].device, rule_of(inner)
    parameters, is_clipped = gradients.parameters, gradients.is_clipped[: len(updated)]
    why = _why_not(inner, updated, set(gradients.dtypes[: len(updated)]))
    if why is None and asked == "auto":
        why = _why_slower(inner, parameters, updated, gains)
    if why is None and device.type == "cuda":
        # Imported here: Triton is a part of torch for CUDA on Linux, and of no other.
        from mprun.precision.single_pass_self_test import why_not_on

        why = why_not_on(device, rule)
    if why is not None:
        if asked == "auto":
            return UpdateChoice(None, path, why)
        raise ValueError(
            f"optim.implementation=single_pass: {why} (allowed: auto, fused, foreach, loop)"
        )
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


def _why_slower(
    inner: Optimizer, parameters: Sequence[Tensor], updated: Sequence[Tensor], gains: bool
) -> str | None:
    if not gains:
        return "no cast and no loss scale: torch's own update is one pass over the weights"
    if updated[0].device.type != "cpu":
        return None
    # Measured (benchmarks/update_speed.py --mode amp): one core writes as fast as it reads.
    if any(own is not tensor for own, tensor in zip(parameters, updated, strict=True)):
        return None
    if rule_of(inner) == "sgd" and not any(group["nesterov"] for group in inner.param_groups):
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
    if device.type == "cpu" and not is_fused(inner):
        return f"torch's {rule} has no fused kernel in use here, which is what a CPU runs in blocks"
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

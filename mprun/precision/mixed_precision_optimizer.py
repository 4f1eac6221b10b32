"""From a loss to an update, in every precision mode: the order of operations that is the subject.

    loss (FP32) -> times scale -> backward                     | backward(loss)
    -> cast gradients to grad_dtype -> divide by scale         |
    -> finite?                                                 |
    -> clip by global norm                                     | step()
    -> weight decay and update on the master weights           |
    -> copy the master weights to the model                    |

Casting comes before dividing by the scale: dividing in FP16 would bring the underflow back.
Dividing comes before clipping and weight decay, so that no hyper-parameter depends on the scale.
Where the gradients are not finite and the loss scale skips such steps, parameters, optimizer
state and BatchNorm statistics stay as they were. (Paper sections 3.1 and 3.2.)

Nothing here waits for the device: scale, found_inf and counters are device tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.batch_norm_guard import BatchNormGuard
from mprun.precision.casting import CastModel
from mprun.precision.inner_optimizer import initialise_state, step_unless
from mprun.precision.loss_scale import LossScale, NoLossScale


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did, as 0-dim device tensors.

    loss_scale: float32, the scale of the (first) loss of this step.
    found_inf: float32, 1 if the update was skipped; None if the loss scale never skips.
    grad_norm: float32, global L2 norm of the unscaled gradients before clipping; None if it was
    neither needed for clipping nor asked for.
    """

    loss_scale: Tensor
    found_inf: Tensor | None
    grad_norm: Tensor | None

    def metrics(self, prefix: str = "") -> dict[str, Tensor]:
        """What there is to report, by the name it has in metrics.jsonl behind `prefix`."""
        values = {
            f"{prefix}loss_scale": self.loss_scale,
            f"{prefix}found_inf": self.found_inf,
            f"{prefix}grad_norm": self.grad_norm,
        }
        return {name: value for name, value in values.items() if value is not None}


class MixedPrecisionOptimizer:
    """Wraps one torch optimizer for a model in any policy's dtypes.

    cast: the model from `cast_model`; its masters become those of this optimizer, which moves them.
    make_optimizer: builds the torch optimizer from (name, tensor) pairs; the tensors are the
        master weights where the policy has them, else the model's own parameters.
    loss_scales: one per loss that is propagated between two steps (a single one for most
        tasks, and it may be shared with other optimizers). The owner calls `update()` on each of
        them once per iteration, after all steps.
    clip_norm: maximum global L2 norm of the unscaled gradients.
    guards: BatchNorm statistics to restore when an update is skipped; saved by `zero_grad`.
    """

    def __init__(
        self,
        cast: CastModel,
        make_optimizer: Callable[[list[tuple[str, Tensor]]], Optimizer],
        loss_scales: LossScale | Sequence[LossScale] | None = None,
        *,
        clip_norm: float | None = None,
        guards: Iterable[BatchNormGuard] = (),
    ):
        named = [(n, p) for n, p in cast.module.named_parameters() if p.requires_grad]
        device = named[0][1].device
        if loss_scales is None:
            loss_scales = NoLossScale(device)
        self.loss_scales = (
            (loss_scales,) if isinstance(loss_scales, LossScale) else tuple(loss_scales)
        )
        self.skips = any(scale.skips_nonfinite for scale in self.loss_scales)
        self.clip_norm = clip_norm
        self.guards = tuple(guards) if self.skips else ()
        self.grad_dtype = cast.policy.grad_dtype
        self.has_masters = cast.policy.master_dtype is not None

        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        # updated[i] is what the optimizer updates: the master of parameters[i], or itself. The
        # masters are those of `cast`, updated in place: a copy would cost 4 bytes a parameter.
        self.updated = [
            cast.masters[name].detach().requires_grad_() if name in cast.masters else own
            for name, own in named
        ]
        pairs = list(zip(self.parameters, self.updated, strict=True))
        self._copies = [own for own, master in pairs if own is not master]
        self._masters = [master for own, master in pairs if own is not master]
        self.inner = make_optimizer(list(zip(self.names, self.updated, strict=True)))
        initialise_state(self.inner)
        # Gradients that need neither cast nor scale stay where autograd accumulates them.
        casts = any(self._dtype_for(u) is not own.dtype for own, u in pairs)
        self.collects = casts or self.skips
        self._collected: list[Tensor | None] = [None] * len(named)
        self._found_inf = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)

    @property
    def masters(self) -> dict[str, Tensor]:
        """The master weights of the parameters that have a copy, by parameter name."""
        pairs = zip(self.names, self.parameters, self.updated, strict=True)
        return {name: master for name, own, master in pairs if own is not master}

    def update_dtypes(self) -> dict[str, int]:
        """Dtype -> number of gradient elements as they are unscaled, clipped and accumulated."""
        counts: dict[str, int] = {}
        for updated in self.updated:
            name = str(self._dtype_for(updated)).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + updated.numel()
        return counts

    def zero_grad(self) -> None:
        """Forget gradients and flags; remember the guarded BatchNorm statistics."""
        for parameter in self.parameters:
            parameter.grad = None
        if self.collects:
            self._collected = [None] * len(self.parameters)
            for updated in self.updated:
                updated.grad = None
        if self.skips:
            self._found_inf.zero_()
        for guard in self.guards:
            guard.save()

    def backward(self, loss: Tensor, loss_index: int = 0) -> None:
        """Propagate `loss` (0-dim) and add its unscaled gradients to those of this step.

        May be called several times before `step`: gradients of further losses or micro-batches
        accumulate in grad_dtype, each divided by the scale of its own loss.
        """
        scale = self.loss_scales[loss_index]
        scale.scale_loss(loss).backward()
        if self.collects:
            self._collect(scale)

    @torch.no_grad()
    def step(self, measure_norm: bool = False) -> Update:
        """Clip, update the master weights and copy them to the model; skip if told to.

        measure_norm: compute the gradient norm although nothing is clipped.
        """
        norm = None
        if self.clip_norm is not None or measure_norm:
            gradients = [gradient for gradient in self._gradients() if gradient is not None]
            norm = _global_norm(gradients)
            if self.clip_norm is not None:
                torch._foreach_mul_(gradients, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if self.collects:
            for updated, gradient in zip(self.updated, self._collected, strict=True):
                updated.grad = None if gradient is None else gradient.to(updated.dtype)
        if self.skips:
            step_unless(self.inner, self._found_inf)
            for guard in self.guards:
                guard.restore_where(self._found_inf)
        else:
            self.inner.step()
        if self._copies:
            torch._foreach_copy_(self._copies, self._masters)
        scale = self.loss_scales[0].scale
        if not self.skips:
            return Update(scale, None, norm)
        # Copies: both tensors are about to change in place.
        return Update(scale.clone(), self._found_inf.clone(), norm)

    def set_lr(self, lr: float | Tensor) -> None:
        """Set the learning rate of every group; a tensor is copied on the device."""
        for group in self.inner.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr

    def state_dict(self) -> dict:
        """Master weights and the inner optimizer's state by parameter name, in their own dtypes.

        The model's own parameters belong to the model's state.
        """
        state = {
            name: dict(self.inner.state[updated])
            for name, updated in zip(self.names, self.updated, strict=True)
        }
        return {"masters": self.masters, "state": state}

    @torch.no_grad()
    def load_state_dict(self, saved: dict) -> None:
        """Restore bit for bit, dtypes included; ValueError names what does not fit.

        torch's own Optimizer.load_state_dict casts state to the parameter's dtype and so loses
        FP32 momentum of FP16 parameters; this one copies tensor by tensor.
        """
        masters = self.masters
        if saved["masters"].keys() != masters.keys() or saved["state"].keys() != set(self.names):
            raise ValueError("optimizer state is of another model or precision mode")
        for name, master in masters.items():
            _copy_exactly(f"master weights of {name}", master, saved["masters"][name])
        for name, updated in zip(self.names, self.updated, strict=True):
            own = self.inner.state[updated]
            if saved["state"][name].keys() != own.keys():
                raise ValueError(f"optimizer state of {name} is of another optimizer")
            for key, value in saved["state"][name].items():
                _copy_exactly(f"{key} of {name}", own[key], value)

    def _collect(self, scale: LossScale) -> None:
        """Move each new gradient out of `.grad`: cast, divide by the scale, check, accumulate."""
        new: list[Tensor | None] = []
        for parameter, updated in zip(self.parameters, self.updated, strict=True):
            gradient, parameter.grad = parameter.grad, None
            new.append(None if gradient is None else gradient.to(self._dtype_for(updated)))
        found_inf = torch.zeros_like(self._found_inf)
        if scale.skips_nonfinite:
            inverse = scale.inverse()
            for group in _by_dtype(new):
                torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inverse)
            largest = _largest(new) if scale.needs_grad_max else None
            scale.record(found_inf, largest)
            torch.maximum(self._found_inf, found_inf, out=self._found_inf)
        for index, gradient in enumerate(new):
            if gradient is None:
                continue
            if self._collected[index] is None:
                self._collected[index] = gradient
            else:
                self._collected[index].add_(gradient)

    def _gradients(self) -> list[Tensor | None]:
        if self.collects:
            return self._collected
        return [parameter.grad for parameter in self.parameters]

    def _dtype_for(self, updated: Tensor) -> torch.dtype:
        # Without master weights a parameter that an override keeps in FP32 has FP32 gradients.
        return self.grad_dtype if self.has_masters else updated.dtype


def _by_dtype(tensors: Iterable[Tensor | None]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _largest(tensors: Iterable[Tensor | None]) -> Tensor:
    groups = _by_dtype(tensors)
    norms = [n.float() for group in groups for n in torch._foreach_norm(group, float("inf"))]
    return torch.stack(norms).max()


def _global_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all gradients, float32: squares of FP16 values would overflow in FP16."""
    norms = [
        norm
        for group in _by_dtype(gradients)
        for norm in torch._foreach_norm(group, 2, dtype=torch.float32)
    ]
    return torch.linalg.vector_norm(torch.stack(norms), 2)


def _copy_exactly(what: str, own: Tensor, saved: Tensor) -> None:
    if own.dtype != saved.dtype or own.shape != saved.shape:
        raise ValueError(
            f"{what}: saved as {saved.dtype} {tuple(saved.shape)}, "
            f"needed {own.dtype} {tuple(own.shape)}"
        )
    own.copy_(saved)

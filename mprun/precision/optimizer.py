"""What one step of an optimizer did, and what it did it with.

From a loss to an update, in every precision mode: the order of operations that is the subject.

    loss (FP32) -> times scale -> backward                     | backward(loss)
    -> cast gradients to grad_dtype -> divide by scale         |
    -> finite?                                                 |
    -> clip by global norm                                     | step()
    -> weight decay and update on the master weights           |
    -> copy the master weights to the model                    |
    -> move the average of the weights, where there is one     |

Casting comes before dividing by the scale: dividing in FP16 would bring the underflow back.
Dividing comes before clipping and weight decay, so that no hyper-parameter depends on the scale.
Where the gradients are not finite and the loss scale skips such steps, parameters, optimizer
state and BatchNorm statistics stay as they were. (Paper sections 3.1 and 3.2.)

Nothing here waits for the device: scale, found_inf and counters are device tensors.

Where the update is a single pass (mprun.precision.single_pass), the gradients of a step with one
loss stay in `.grad`, scaled and in the dtype of backward, until `step` does all of the above with
them: one read for the check, one pass for the rest. A second loss or micro-batch of the same step
collects them first, as the plain way does after every loss.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.casting import BatchNormGuard, CastModel, matching_parameters
from mprun.precision.gradients import CollectedGradients, counted, global_norm, norms_of
from mprun.precision.loss_scale import LossScale, NoLossScale
from mprun.precision.row_updates import RowUpdate, row_tables
from mprun.precision.single_pass import SinglePass
from mprun.precision.torch_update import initialise_state, step_unless
from mprun.precision.update_choice import choose_update
from mprun.precision.weight_average import WeightAverage, choose_averaged, restore


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did, as 0-dim device tensors.

    loss_scale: float32, the scale of the (first) loss of this step.
    found_inf: float32, 1 if the update was skipped; None if the loss scale never skips.
    grad_norm: float32, global L2 norm of the unscaled gradients before clipping, of those that are
    clipped where `clip_modules` chooses some; None if neither needed for clipping nor asked for.
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


@dataclass(frozen=True, slots=True)
class UsedGradients:
    """The gradients of one update; inverse, clip: 0-dim, what it multiplied with on the way."""

    gradients: Sequence[Tensor | None]
    inverse: Tensor | None
    clip: Tensor | None

    @torch.no_grad()
    def by_name(
        self, names: Sequence[str], updated: Sequence[Tensor], is_clipped: Sequence[bool]
    ) -> dict[str, Tensor]:
        """Copies, unscaled and clipped, in the dtype of `updated`; those that there are."""
        found = {}
        rows = zip(names, updated, self.gradients, is_clipped, strict=False)
        for name, tensor, gradient, counts in rows:
            if gradient is None:
                continue
            gradient = gradient.to(tensor.dtype, copy=True)
            if self.inverse is not None:
                gradient.mul_(self.inverse)
            if self.clip is not None and counts:
                gradient.mul_(self.clip)
            found[name] = gradient
        return found


class MixedPrecisionOptimizer:
    """Wraps one torch optimizer for a model in any policy's dtypes.

    cast: the model from `cast_model`; its masters become those of this optimizer, which moves them.
    make_optimizer: builds the torch optimizer from (name, tensor) pairs; the tensors are the
        master weights where the policy has them, else the model's own parameters.
    loss_scales: one per loss that is propagated between two steps (a single one for most
        tasks, and it may be shared with other optimizers). The owner calls `update()` on each of
        them once per iteration, after all steps.
    clip_norm: maximum global L2 norm of the unscaled gradients.
    clip_modules: glob patterns over module names; only the gradients of these modules, and of what
        is inside them, count in that norm and are clipped. None: all.
    guards: BatchNorm statistics to restore when an update is skipped; saved by `zero_grad`.
    average_decay, average_modules: keep a WeightAverage of the parameters of these modules (none
        given: of all), in `averages`.
    update: "plain" (torch's operations one after the other), "single_pass", or "auto" for the
        latter where it can be used and saves something. `update_path` and `update_reason` say
        which it is, and why.

    Row tables of the model (mprun.precision.row_updates) are updated by the same rule at the rate
    of weights, in the rows that the step used. Raises ValueError for a pattern that matches no
    module, for an average of row tables, for a rule that would move unused rows, and for a single
    pass that is asked for and cannot be.
    """

    def __init__(
        self,
        cast: CastModel,
        make_optimizer: Callable[[list[tuple[str, Tensor]]], Optimizer],
        loss_scales: LossScale | Sequence[LossScale] | None = None,
        *,
        clip_norm: float | None = None,
        clip_modules: Iterable[str] = (),
        guards: Iterable[BatchNormGuard] = (),
        average_decay: float | None = None,
        average_modules: Iterable[str] = (),
        update: str = "plain",
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
        self.tables = row_tables(cast.module)
        self.rows = [
            RowUpdate(f"{name}.{key}", table, key, self.inner)
            for name, table in self.tables.items()
            for key in table.tensors()
        ]
        clipped = matching_parameters(cast.module, clip_modules, "train.clip_modules")
        self._is_clipped = [name in clipped for name in [*self.names, *(r.name for r in self.rows)]]
        if not any(self._is_clipped):
            raise ValueError(f"train.clip_modules={list(clip_modules)}: these have no weights")
        self.average = None
        if average_decay is not None:
            weights = dict(zip(self.names, self.updated, strict=True))
            chosen = choose_averaged(cast.module, weights, average_modules)
            self.average = WeightAverage(chosen, average_decay)
        # Gradients that need neither cast nor scale stay where autograd accumulates them.
        casts = any(self._dtype_for(u) is not own.dtype for own, u in pairs) or any(
            self._dtype_for(row.tensor) is not row.row_dtype for row in self.rows
        )
        multiplied = any(row.table.gradient_factor != 1 for row in self.rows)
        self.collects = casts or self.skips or multiplied
        self._found_inf = torch.zeros((), device=device)
        dtypes = [self._dtype_for(u) for u in self.updated]
        self._collected = CollectedGradients(
            self.parameters,
            self.rows,
            [*dtypes, *(self._dtype_for(row.tensor) for row in self.rows)],
            self._found_inf,
        )
        choice = choose_update(
            update,
            self.inner,
            self.parameters,
            self.updated,
            self._is_clipped[: len(pairs)],
            grad_dtypes=set(dtypes),
            gains=casts or self.skips,
        )
        self._single = choice.single_pass
        self.update_path, self.update_reason = choice.path, choice.reason
        # True: torch's operations even so, which show an observer every intermediate result.
        self.observed = False
        # The scale of the loss whose gradients are still in `.grad`.
        self._pending: LossScale | None = None
        self._used: UsedGradients | None = None

    @property
    def masters(self) -> dict[str, Tensor]:
        """The master weights of the parameters that have a copy, by parameter name."""
        pairs = zip(self.names, self.parameters, self.updated, strict=True)
        return {name: master for name, own, master in pairs if own is not master}

    @property
    def averages(self) -> dict[str, Tensor]:
        """The averaged weights, FP32, by parameter name; empty without an average."""
        return {} if self.average is None else self.average.values

    def gradient_dtypes(self) -> dict[str, int]:
        """Dtype -> number of gradient elements as backward makes them; row tables count whole."""
        tensors = [(own.dtype, own.numel()) for own in self.parameters]
        return counted(tensors + [(row.row_dtype, row.tensor.numel()) for row in self.rows])

    def update_dtypes(self) -> dict[str, int]:
        """The same as they are unscaled, clipped and accumulated."""
        updated = [*self.updated, *(row.tensor for row in self.rows)]
        return counted([(self._dtype_for(tensor), tensor.numel()) for tensor in updated])

    def state_by_name(self) -> dict[str, dict]:
        """The state of the inner optimizer and of the rows by parameter name, as it is in use."""
        pairs = zip(self.names, self.updated, strict=True)
        of_parameters = {name: self.inner.state[updated] for name, updated in pairs}
        return of_parameters | {row.name: row.state for row in self.rows}

    def zero_grad(self) -> None:
        """Forget gradients and flags; remember the guarded BatchNorm statistics."""
        for parameter in self.parameters:
            parameter.grad = None
        self._pending = self._used = None
        if self.collects:
            self._collected.clear()
            for updated in self.updated:
                updated.grad = None
        if self.skips:
            self._found_inf.zero_()
        for table in self.tables.values():
            table.gathered = None
        for guard in self.guards:
            guard.save()

    def backward(self, loss: Tensor, loss_index: int = 0) -> None:
        """Propagate `loss` (0-dim) and add its unscaled gradients to those of this step.

        May be called several times before `step`: gradients of further losses or micro-batches
        accumulate in grad_dtype, each divided by the scale of its own loss.
        """
        scale = self.loss_scales[loss_index]
        first = self._pending is None and not self._collected.any()
        if self._pending is not None and self.collects:
            self._collected.add(self._pending)
            self._pending = None
        scale.backward(loss)
        if self._single is not None and not self.observed and (first or not self.collects):
            self._pending = scale
        elif self.collects:
            self._collected.add(scale)

    @torch.no_grad()
    def step(self, measure_norm: bool = False) -> Update:
        """Clip, update the master weights and copy them to the model; skip if told to.

        measure_norm: compute the gradient norm although nothing is clipped.
        """
        needs_norm = measure_norm or self.clip_norm is not None
        inverse, norm, count = None, None, len(self.names)
        if self._pending is not None:
            own, rows, inverse, norm = self._check_pending(needs_norm)
        else:
            gradients = self._gradients()
            own, rows = gradients[:count], gradients[count:]
            if needs_norm:
                norm = global_norm(self._clipped(gradients))
        clip = None
        if self.clip_norm is not None:
            clip = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        found_inf = self._found_inf if self.skips else None
        single = None if self.observed and self._pending is None else self._single
        self._used = UsedGradients(own, inverse, clip if single is not None else None)
        if clip is not None:
            # Rows are always multiplied in place; of the others a single pass takes care itself.
            chosen = self._clipped([*(own if single is None else [None] * count), *rows])
            if chosen:
                torch._foreach_mul_(chosen, clip)
        if self._pending is None and self.collects:
            for updated, gradient in zip(self.updated, own, strict=True):
                updated.grad = None if gradient is None else gradient.to(updated.dtype)
        if single is not None:
            single.update(own, inverse, clip, found_inf)
        elif found_inf is not None:
            step_unless(self.inner, found_inf)
        else:
            self.inner.step()
        if found_inf is not None:
            for guard in self.guards:
                guard.restore_where(found_inf)
        for row, gradient in zip(self.rows, rows, strict=True):
            if gradient is not None:
                row.apply(gradient, found_inf)
        if single is None and self._copies:
            torch._foreach_copy_(self._copies, self._masters)
        if self.average is not None:
            self.average.update(found_inf)
        scale = self.loss_scales[0].scale
        if not self.skips:
            return Update(scale, None, norm)
        # Copies: both tensors are about to change in place.
        return Update(scale.clone(), self._found_inf.clone(), norm)

    def use(self, single: SinglePass) -> None:
        """Take `single` for the passes of this optimizer, whatever was chosen."""
        self._single = single

    def unscaled_gradients(self) -> dict[str, Tensor]:
        """Gradients of the last step by parameter name, as the update used them: also clipped.

        Copies in the dtype of the update; parameters without a gradient are left out. To be read
        before the next `zero_grad`; what a single pass never wrote to memory is computed here.
        """
        if self._used is None:
            return {}
        return self._used.by_name(self.names, self.updated, self._is_clipped)

    def set_lr(self, lr: float | Tensor) -> None:
        """Set the rate of every group to `lr` times the group's lr_factor (1 where it has none).

        A tensor is multiplied and copied on the device; each group then needs a tensor of its own.
        """
        for group in self.inner.param_groups:
            rate = lr * group.get("lr_factor", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict:
        """Master weights and the inner optimizer's state by parameter name, in their own dtypes.

        The model's own parameters, row tables among them, belong to the model's state.
        """
        state = {name: dict(own) for name, own in self.state_by_name().items()}
        return {"masters": self.masters, "state": state, "averages": dict(self.averages)}

    def load_state_dict(self, saved: dict) -> None:
        """Restore bit for bit, dtypes included; ValueError names what does not fit."""
        restore(saved, self.masters, self.state_by_name(), self.averages)

    def _check_pending(
        self, needs_norm: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None], Tensor | None, Tensor | None]:
        """Look at the gradients where backward left them: (own, of rows, 1/scale, norm)."""
        scale, count = self._pending, len(self.names)
        own: list[Tensor | None] = [parameter.grad for parameter in self.parameters]
        inverse = scale.inverse() if scale.skips_nonfinite else None
        checked = self._single.check(
            own,
            inverse,
            self._found_inf if self.skips else None,
            norm=needs_norm,
            grad_max=scale.needs_grad_max,
        )
        rows, grad_max = [], checked.grad_max
        if self.rows and self.collects:
            of_rows = self._collected.add_rows(scale)
            if grad_max is not None:
                grad_max = torch.maximum(grad_max, of_rows)
        if self.rows:
            rows = self._gradients()[count:]
        if scale.skips_nonfinite:
            scale.record(self._found_inf, grad_max)
        if not needs_norm:
            return own, rows, inverse, None
        norms = [checked.norms]
        if chosen := self._clipped([*[None] * count, *rows]):
            norms.append(norms_of(chosen))
        return own, rows, inverse, torch.linalg.vector_norm(torch.cat(norms))

    def _clipped(self, gradients: list[Tensor | None]) -> list[Tensor]:
        """Those that count in the norm and are clipped."""
        pairs = zip(gradients, self._is_clipped, strict=True)
        return [gradient for gradient, counts in pairs if counts and gradient is not None]

    def _gradients(self) -> list[Tensor | None]:
        if self.collects:
            return self._collected.values
        return [p.grad for p in self.parameters] + [row.gradient for row in self.rows]

    def _dtype_for(self, updated: Tensor) -> torch.dtype:
        # Without master weights a parameter that an override keeps in FP32 has FP32 gradients.
        return self.grad_dtype if self.has_masters else updated.dtype

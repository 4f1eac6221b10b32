"""From a loss to an update, in every precision mode: this order of operations is the subject.

    loss (FP32) -> times scale -> backward                     | backward(loss)
    -> cast gradients to grad_dtype -> divide by scale         |
    -> finite?                                                 |
    -> clip by global norm                                     | step()
    -> weight decay and update on the master weights           |
    -> copy the master weights to the model                    |
    -> move the average of the weights, if there is one        |

Casting comes before dividing by the scale: dividing in FP16 would bring the underflow back.
Dividing comes before clipping and weight decay, so that no hyper-parameter depends on the scale.
When gradients are not finite and the loss scale skips such steps, parameters, optimizer state and
BatchNorm statistics stay unchanged. (Paper sections 3.1 and 3.2.)

Nothing here waits for the device: scale, found_inf and counters are device tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision.casting import CastModel, copy_exactly
from mprun.precision.gradients import (
    Gathering,
    LeftForOnePass,
    Reduction,
    SummedBeforeUnscaled,
    Unscaled,
    Untouched,
)
from mprun.precision.loss_scale import LossScale, NoLossScale
from mprun.precision.packed_states import SCALE
from mprun.precision.policy import PrecisionPolicy
from mprun.precision.rounded_weights import choose_narrow
from mprun.precision.row_updates import RowUpdate, row_tables
from mprun.precision.torch_update import create_state, creates_late, initialise_state
from mprun.precision.update import ByTorch, Ready, SinglePass, norms_of
from mprun.precision.update_choice import choose_update
from mprun.torch_private import BatchNorm, buffers_of


class Update(NamedTuple):
    """The results of one step, float32, 0-dim, on the device."""

    loss_scale: Tensor  # of the (first) loss of this step
    found_inf: Tensor | None  # 1 if the update was skipped; None: the loss scale never skips
    # Global L2 norm of the unscaled gradients that count in it, before clipping; None: not needed.
    grad_norm: Tensor | None

    def metrics(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the values that exist, named as in metrics.jsonl after `prefix`."""
        values = self._asdict().items()
        return {prefix + name: value for name, value in values if value is not None}


class Stages(NamedTuple):
    """The two stages from a step's gradients to its update: gather from the losses, apply."""

    gathering: Gathering
    update: ByTorch


class MixedPrecisionOptimizer:
    """An optimizer that wraps one torch optimizer for a model in any policy's dtypes.

    Row tables of the model (`row_updates`) are updated by the same rule at the rate of weights, but
    only in the rows that the step used. `update_path` and `update_reason` say how and why the
    others are updated.

    Args:
        cast: the model from `cast_model`; its masters become those of this optimizer, which updates
            them.
        make_optimizer: builds the torch optimizer from (name, tensor) pairs; the tensors are the
            master weights if the policy has them, else the model's parameters.
        loss_scales: one per loss that is propagated between two steps. Most tasks have a single
            one, and it may be shared with other optimizers. The owner calls `update()` on each of
            them once per iteration, after all steps.
        clip_norm: maximum global L2 norm of the unscaled gradients.
        clipped: names of the parameters and row tables whose gradients count in that norm and are
            clipped; None: all.
        guards: BatchNorm statistics to restore when an update is skipped; saved by `zero_grad`.
        average_decay: keep a WeightAverage, with its values in `averages` by parameter name.
        averaged: names of the averaged parameters; None: all.
        update: "plain" (torch's operations one after the other), "single_pass", or "auto" for the
            latter if it is possible and saves time.
        parts: micro-batches of an update, each of which calls `backward` with its loss. The update
            uses their mean, divided after unscaling.
        reduction: sums over ranks, each of which propagates the losses of some of the `parts`;
            None: all of them are propagated here, and added as they come.
        seed: seed of the random bits of stochastic rounding.

    Raises:
        ValueError: A rule would move unused rows, an averaged weight is complex, or the requested
            single pass is impossible.
    """

    def __init__(
        self,
        cast: CastModel,
        make_optimizer: Callable[[list[tuple[str, Tensor]]], Optimizer],
        loss_scales: LossScale | Sequence[LossScale] | None = None,
        *,
        clip_norm: float | None = None,
        clipped: Collection[str] | None = None,
        guards: Iterable[BatchNormGuard] = (),
        average_decay: float | None = None,
        averaged: Collection[str] | None = None,
        update: str = "plain",
        parts: int = 1,
        reduction: Reduction | None = None,
        seed: int = 0,
    ):
        trained = {name: p for name, p in cast.module.named_parameters() if p.requires_grad}
        self.names, self.parameters = list(trained), list(trained.values())
        # The masters are those of `cast`, updated in place: a copy would cost 4 bytes a parameter.
        named = {name: cast.updated(name, own) for name, own in trained.items()}
        self.cast, self.updated = cast, list(named.values())
        self._hold_gradients = [*self.parameters, *self.updated]
        device = self.parameters[0].device
        if loss_scales is None or isinstance(loss_scales, LossScale):
            loss_scales = (loss_scales or NoLossScale(device),)
        self.loss_scales = tuple(loss_scales)
        self.skips = any(scale.skips_nonfinite for scale in self.loss_scales)
        self.found_inf = torch.zeros((), device=device)
        self.clip_norm, self.micro_batches, self.reduction = clip_norm, parts, reduction
        self._largest = None if reduction is None else reduction.largest
        several = parts > 1 or reduction is not None
        self.guards = tuple(guards) if self.skips or several else ()

        self.inner = make_optimizer(list(named.items()))
        self.tables = row_tables(cast.module)
        self.narrow = choose_narrow(self.inner, named, cast.policy, seed, cast.shards)
        if self.narrow is None:
            initialise_state(self.inner)
        elif self.tables:
            raise ValueError(
                f"precision={cast.policy.name}: row tables ({', '.join(self.tables)}) are updated "
                "row by row, for which there is no other rounding and no other dtype of the state"
            )
        else:
            self.narrow.initialise_state()
        self.rows = [
            RowUpdate(f"{name}.{key}", table, key, self.inner)
            for name, table in self.tables.items()
            for key in table.tensors()
        ]
        if self.rows and (reduction or (several and cast.policy.reduce_dtype is not None)):
            raise ValueError("row tables are added up in FP32, on one rank (no reduce_dtype)")
        self._kinds = self._gradient_kinds(cast.policy)
        # Called after an update, to undo other changes of a skipped step.
        self._after = [guard.restore_where for guard in self.guards] if self.skips else []
        self.averages: dict[str, Tensor] = {}
        if average_decay is not None:
            chosen = {n: own for n, own in named.items() if averaged is None or n in averaged}
            average = WeightAverage(chosen, average_decay)
            self.averages = average.values
            self._after.append(average.update)
        if cast.shards:
            self._after.append(lambda found_inf: cast.refresh())
        self.delayed = cast.delayed
        if self.delayed is not None:
            self._after.append(partial(self.delayed.roll, self._largest))

        names = [*self.names, *(row.name for row in self.rows)]
        self.is_clipped = [clipped is None or name in clipped for name in names]
        # The whole of a shard is made anew in each pass: no copy to refresh.
        self.shards = cast.shards
        self.held = self.updated if cast.shards else self.parameters
        norms = norms_of if reduction is None else reduction.norms
        of_update = (self.inner, self.held, self.updated, self.is_clipped, self.narrow, norms)
        by_torch = ByTorch(*of_update)
        dtypes = [used for _, used, _ in self._kinds]
        casts = any(made is not used for made, used, _ in self._kinds)
        own = (self.parameters, self.rows, parts, reduction)
        self._of_gathering = (*own, dtypes, self.found_inf, self.skips)
        self._plain = Stages(self._gathering(cast.policy, casts), by_torch)
        gains = casts or self.skips
        choice = choose_update(update, by_torch, dtypes, MixedPrecisionOptimizer, gains=gains)
        single_pass, self.update_path, self.update_reason = choice
        # True: use torch's operations regardless; an observer sees every intermediate result.
        self.observed = False
        self.use(single_pass)
        self._stages = self._chosen
        self._used: tuple[Ready, Tensor | None] | None = None

    def use(self, single_pass: SinglePass | None) -> None:
        """Update by `single_pass` from now on, regardless of the first choice; None: torch's
        operations."""
        self._chosen = self._plain
        if single_pass is not None:
            gathering = self._plain.gathering
            # Micro-batches are unscaled one by one, however their sum is applied.
            if type(gathering) is Unscaled and gathering.parts == 1 and gathering.ranks is None:
                gathering = LeftForOnePass(*self._of_gathering)
            self._chosen = Stages(gathering, single_pass)

    @property
    def masters(self) -> dict[str, Tensor]:
        """Return parameter name -> master weight, for the parameters that have a copy."""
        pairs = zip(self.names, self.updated, strict=True)
        return {name: updated for name, updated in pairs if name in self.cast.masters}

    @property
    def replicated(self) -> list[Tensor]:
        """Return what has to have the same bits on every rank: weights, of shards the counters."""
        kept = [] if self.delayed is None else [self.delayed.history]
        if not self.cast.shards:
            return [*self.updated, *kept]
        states = self.state_by_name().values()
        tensors = (value for state in states for value in state.values())
        counters = [own for own in tensors if isinstance(own, Tensor) and not own.dim()]
        return [*counters, *kept] + ([] if self.narrow is None else [self.narrow.updates])

    def gradient_dtypes(self) -> dict[str, int]:
        """Count gradient elements by dtype, as backward computes them; row tables count whole."""
        return elements_by_dtype((made, numel) for made, _, numel in self._kinds)

    def update_dtypes(self) -> dict[str, int]:
        """Count the same by the dtype in which they are unscaled, clipped and accumulated."""
        return elements_by_dtype((used, numel) for _, used, numel in self._kinds)

    def state_by_name(self) -> dict[str, dict]:
        """Return parameter name -> the state in use, of the inner optimizer and of the rows."""
        pairs = zip(self.names, self.updated, strict=True)
        of_parameters = {name: self.inner.state.get(updated, {}) for name, updated in pairs}
        return of_parameters | {row.name: row.state for row in self.rows}

    def zero_grad(self) -> None:
        """Forget gradients and flags; remember the guarded BatchNorm statistics."""
        self._stages = self._plain if self.observed else self._chosen
        self._stages.gathering.clear()
        self._used = None
        for tensor in self._hold_gradients:
            tensor.grad = None
        if self.skips:
            self.found_inf.zero_()
        self._release_rows()
        for row in self.rows:
            row.clear()
        for guard in self.guards:
            guard.save()

    def backward(self, loss: Tensor, loss_index: int = 0) -> None:
        """Propagate `loss` (0-dim) and add its gradients to those of this step.

        It may be called several times before `step`. Gradients of further losses or micro-batches
        accumulate in grad_dtype, each divided by its loss's scale and by `parts`. With the policy's
        reduce_dtype they accumulate in that, as if of ranks (`mprun.precision.gradients`).
        """
        self._stages.gathering.backward(loss, self.loss_scales[loss_index])
        if self.micro_batches > 1:  # of which each gathers rows of its own
            self._release_rows()

    def _release_rows(self) -> None:
        for table in self.tables.values():
            table.gathered = None

    @torch.no_grad()
    def step(self, measure_norm: bool = False) -> Update:
        """Clip, update the master weights and copy them to the model, or skip the update.

        measure_norm: compute the gradient norm even if nothing is clipped.
        """
        gathering, update = self._stages
        ready, clip = gathering.ready(), None  # reduced and unscaled
        norm = update.check(ready, measure_norm or self.clip_norm is not None)
        if self.clip_norm is not None and norm is not None:
            clip = update.clip(ready, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        self._used = ready, clip
        update.apply(ready, clip)  # and copied
        found_inf = ready.found_inf
        for row, gradient in zip(self.rows, ready.rows, strict=True):
            if gradient is not None:
                row.apply(gradient, found_inf)
        for stage in self._after:
            stage(found_inf)
        scale = self.loss_scales[0].scale
        if found_inf is None:
            return Update(scale, None, norm)
        # Copies: both tensors are about to change in place.
        return Update(scale.clone(), found_inf.clone(), norm)

    def gradients_in_use(self) -> list[Tensor | None]:
        """Return the last step's gradients by parameter, in place: scaled in `.grad`, or as added
        up; empty before the first step."""
        return [] if self._used is None else list(self._used[0].gradients)

    def unscaled_gradients(self) -> dict[str, Tensor]:
        """Return gradients of the last step by parameter name, as used in the update: clipped too.

        They are copies in the dtype of the update, FP32 for narrow weights; parameters without a
        gradient are left out. Read them before the next `zero_grad`. Values that a single pass
        never wrote to memory are computed here.
        """
        if self._used is None:
            return {}
        (ready, clip), found = self._used, {}
        named = zip(self.names, self.updated, ready.gradients, self.is_clipped, strict=False)
        for name, tensor, own, counts in named:
            if own is None:
                continue
            in_fp32 = self.narrow is not None and tensor in self.narrow
            gradient = own.detach().to(torch.float32 if in_fp32 else tensor.dtype, copy=True)
            if ready.inverse is not None:
                gradient.mul_(ready.inverse)
            if clip is not None and counts:
                gradient.mul_(clip)
            found[name] = gradient
        return found

    def set_lr(self, lr: float | Tensor) -> None:
        """Set the rate of every group to `lr` times the group's lr_factor (default 1).

        A tensor is multiplied and copied on the device; each group then needs a separate tensor.
        """
        for group in self.inner.param_groups:
            rate = lr * group.get("lr_factor", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict:
        """Return master weights and the inner optimizer's state by parameter name, dtypes kept.

        The model's parameters, including row tables, belong to the model's state.
        """
        whole, updated = self.cast.saved, dict(zip(self.names, self.updated, strict=True))

        def saved_state(name: str, own: dict) -> dict:
            like = updated[name].shape if name in updated else None
            of_numbers = [
                key
                for key, v in own.items()
                if key.endswith(SCALE) or (isinstance(v, Tensor) and v.shape == like)
            ]
            return own | {key: whole(name, own[key]) for key in of_numbers}

        state = {name: saved_state(name, own) for name, own in self.state_by_name().items()}
        masters = {name: whole(name, master) for name, master in self.masters.items()}
        saved = {"masters": masters, "state": state, "averages": dict(self.averages)}
        if self.delayed is not None:
            saved |= {"delayed": self.delayed.state_dict(self._largest)}
        return saved if self.narrow is None else saved | {"narrow": self.narrow.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, saved: dict) -> None:
        """Restore bit for bit, dtypes included; ValueError names what does not fit.

        torch's Optimizer.load_state_dict casts state to the parameter's dtype, and so loses FP32
        momentum of FP16 parameters. This one copies tensor by tensor.
        """
        masters, state = self.masters, self.state_by_name()
        if saved["masters"].keys() != masters.keys() or saved["state"].keys() != state.keys():
            raise ValueError("optimizer state belongs to another model or precision mode")
        averages = saved.get("averages", {})
        if averages.keys() != self.averages.keys():
            raise ValueError("optimizer state has averages of other weights (optim.average_decay)")
        for name, average in self.averages.items():
            copy_exactly(f"average of {name}", average, averages[name])
        for name, master in masters.items():
            whole = saved["masters"][name]
            copy_exactly(f"master weights of {name}", master, self.cast.part(name, whole))
        updated = dict(zip(self.names, self.updated, strict=True))
        for name, own in state.items():
            kept = saved["state"][name]
            if not own and name in updated and creates_late(self.inner):
                parts = {key: self.cast.part(name, value) for key, value in kept.items()}
                create_state(self.inner, updated[name], parts)
                continue
            if kept.keys() != own.keys():
                raise ValueError(f"optimizer state of {name} belongs to another optimizer")
            for key, value in kept.items():
                copy_exactly(f"{key} of {name}", own[key], self.cast.part(name, value))
        if self.narrow is not None:
            self.narrow.load_state_dict(saved["narrow"])
        if self.delayed is not None:
            self.delayed.load_state_dict(saved.get("delayed"))
        self.cast.refresh()

    def _gradient_kinds(
        self, policy: PrecisionPolicy
    ) -> list[tuple[torch.dtype, torch.dtype, int]]:
        """Return each gradient's dtype after backward, its dtype in the update and its elements;
        parameters first, then rows."""
        shards = self.cast.shards
        pairs = zip(self.names, self.parameters, strict=True)
        own_made = [shards[n].computed if n in shards else own.dtype for n, own in pairs]
        made = [*own_made, *(row.row_dtype for row in self.rows)]
        updated = [*self.updated, *(row.tensor for row in self.rows)]
        # Without master weights a parameter that an override keeps in FP32 has FP32 gradients.
        in_grad_dtype = policy.master_dtype is not None or self.narrow is not None
        used = [
            policy.grad_dtype if in_grad_dtype and not tensor.is_complex() else tensor.dtype
            for tensor in updated
        ]
        wholes = (*self.parameters, *(row.tensor for row in self.rows))
        return list(zip(made, used, (tensor.numel() for tensor in wholes), strict=True))

    def _gathering(self, policy: PrecisionPolicy, casts: bool) -> Gathering:
        """Choose the policy's way from losses to gradients."""
        if self.micro_batches > 1 and policy.reduce_dtype is not None:
            if policy.reduce_order != "rank" and self.reduction is None:
                why = "needs a reduction that keeps micro-batches apart"
                raise ValueError(f"reduce_order={policy.reduce_order}: {why}")
            own_sum = policy.reduce_dtype, policy.reduce_divide
            return SummedBeforeUnscaled(*self._of_gathering, *own_sum)
        multiplies = any(row.table.gradient_factor != 1 for row in self.rows)
        several = self.rows and self.micro_batches > 1
        if not (casts or self.skips or multiplies or several or self.masters):
            return Untouched(*self._of_gathering[:4])
        return Unscaled(*self._of_gathering)


def elements_by_dtype(tensors: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    """Return dtype name -> number of elements, from (dtype, number) pairs."""
    counts: Counter[str] = Counter()
    for dtype, numel in tensors:
        counts[str(dtype).removeprefix("torch.")] += numel
    return dict(counts)


class BatchNormGuard:
    """A guard that keeps a skipped update from changing BatchNorm's running statistics.

    The forward pass moves the statistics before an overflow of the gradients is known. Without this
    guard one infinite activation makes the evaluation NaN for ever, although the skipped update
    left the weights alone.

    The statistics of all layers are moved into one flat tensor per dtype, so that saving and
    restoring are one operation each, on the device. A module has one guard: a second one would move
    the statistics away from the first.
    """

    def __init__(self, module: nn.Module):
        homes: dict[torch.dtype, list[tuple[nn.Module, str, Tensor]]] = {}
        for layer in module.modules():
            if isinstance(layer, BatchNorm):
                for name, buffer in layer.named_buffers(recurse=False):
                    homes.setdefault(buffer.dtype, []).append((layer, name, buffer))
        self.flat = []
        self._homes: list[tuple[nn.Module, str, Tensor]] = []
        for buffers in homes.values():
            flat = torch.cat([buffer.reshape(-1) for _, _, buffer in buffers])
            parts = flat.split([buffer.numel() for _, _, buffer in buffers])
            for (layer, name, buffer), part in zip(buffers, parts, strict=True):
                own = part.view(buffer.shape)
                setattr(layer, name, own)
                self._homes.append((layer, name, own))
            self.flat.append(flat)
        self.saved = [flat.clone() for flat in self.flat]

    def is_current(self) -> bool:
        """Return whether the layers still hold the statistics that are guarded."""
        return all(buffers_of(layer).get(name) is own for layer, name, own in self._homes)

    @torch.no_grad()
    def save(self) -> None:
        for saved, flat in zip(self.saved, self.flat, strict=True):
            saved.copy_(flat)

    @torch.no_grad()
    def restore_where(self, found_inf: Tensor | None) -> None:
        """Put the saved statistics back if `found_inf` (0-dim) is non-zero; decided on the device.

        torch.where, not arithmetic: NaN * 0 would keep the NaN.
        """
        if not self.flat or found_inf is None:
            return
        skipped = found_inf != 0
        for saved, flat in zip(self.saved, self.flat, strict=True):
            torch.where(skipped, saved, flat, out=flat)


class WeightAverage:
    """average <- decay * average + (1 - decay) * weight, once per applied update.

    It is for evaluation. The average starts at the initial weights (tf.train.
    ExponentialMovingAverage without num_updates, as in bigLSTM's published code). It is FP32 in
    every mode, because it only measures: in 16 bits 0.001 times a difference would vanish. It costs
    4 bytes for each averaged parameter. Running statistics of norm layers are not averaged.

    Args:
        weights: parameter name -> tensor that the optimizer updates (the master weight, if there is
            one).
        decay: in (0, 1).
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float):
        if not 0 < decay < 1:
            raise ValueError(f"decay={decay} is not allowed: above 0, below 1")
        for name, weight in weights.items():
            if weight.is_complex():
                raise ValueError(f"optim.average_decay: {name} is complex and has no average")
        self.weights, self.decay = dict(weights), decay
        self.values = {
            name: weight.detach().to(torch.float32, copy=True) for name, weight in weights.items()
        }
        device = next(iter(self.values.values())).device
        self._rate = torch.full((), 1.0 - decay, dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, found_inf: Tensor | None) -> None:
        """Move towards the weights, unless `found_inf` (0-dim) says that they did not move.

        Nothing waits for the device.
        """
        rate = self._rate if found_inf is None else self._rate * (found_inf == 0)
        for name, average in self.values.items():
            average.lerp_(self.weights[name].float(), rate)

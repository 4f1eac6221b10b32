"""From a loss to an update, in every precision mode: the order of operations that is the subject.

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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from mprun.precision.casting import CastModel, matching_parameters
from mprun.precision.loss_scale import LossScale, NoLossScale
from mprun.precision.narrow_weights import NarrowWeights
from mprun.precision.policy import PrecisionPolicy
from mprun.precision.reduction import Reduction, Wire
from mprun.precision.row_updates import RowUpdate, row_tables
from mprun.precision.torch_update import initialise_state
from mprun.precision.update import Gradients, Ready, SinglePass
from mprun.precision.update_choice import choose_update


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did, as 0-dim device tensors.

    Attributes:
        loss_scale: float32, the scale of the (first) loss of this step.
        found_inf: float32, 1 if the update was skipped; None if the loss scale never skips.
        grad_norm: float32, global L2 norm of the unscaled gradients before clipping, of those that
            are clipped where `clip_modules` chooses some; None if neither needed for clipping nor
            asked for.
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

    Row tables of the model (`row_updates`) are updated by the same rule at the rate of weights, in
    the rows that the step used. `update_path` and `update_reason` say how the others are updated,
    and why.

    Args:
        cast: the model from `cast_model`; its masters become those of this optimizer, which moves
            them.
        make_optimizer: builds the torch optimizer from (name, tensor) pairs; the tensors are the
            master weights where the policy has them, else the model's own parameters.
        loss_scales: one per loss that is propagated between two steps (a single one for most
            tasks, and it may be shared with other optimizers). The owner calls `update()` on each
            of them once per iteration, after all steps.
        clip_norm: maximum global L2 norm of the unscaled gradients.
        clip_modules: glob patterns over module names; only the gradients of these modules, and of
            what is inside them, count in that norm and are clipped. None: all.
        guards: BatchNorm statistics to restore when an update is skipped; saved by `zero_grad`.
        average_decay: keep a WeightAverage, in `averages`.
        average_modules: of the parameters of these modules; none given: of all.
        update: "plain" (torch's operations one after the other), "single_pass", or "auto" for the
            latter where it can be used and saves something.
        parts: micro-batches of an update, each of which calls `backward` with its own loss: the
            update takes their mean, divided after unscaling.
        reduction: sums over ranks, of which each propagates the losses of some of the `parts`;
            None: all of them are propagated here.
        parameters: name -> (what the model computes with, what is updated), where the caller has
            them and brings the first up to date itself; None: all that train, of `cast`.
        seed: of the random bits of stochastic rounding.

    Raises:
        ValueError: a pattern that matches no module, an average of row tables, a rule that would
            move unused rows, a single pass that is asked for and cannot be.
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
        parts: int = 1,
        reduction: Reduction | None = None,
        parameters: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        seed: int = 0,
    ):
        # The second of each pair is what the optimizer updates: the master of a parameter, or
        # itself. The masters are those of `cast`, updated in place: a copy would cost 4 bytes a
        # parameter.
        pairs = parameters or {
            name: (own, cast.masters.get(name, own))
            for name, own in cast.module.named_parameters()
            if own.requires_grad
        }
        self.names, self._copies = list(pairs), parameters is None
        self.parameters = [own for own, _ in pairs.values()]
        self.updated = [updated for _, updated in pairs.values()]
        device = self.parameters[0].device
        if loss_scales is None or isinstance(loss_scales, LossScale):
            loss_scales = (loss_scales or NoLossScale(device),)
        self.loss_scales = tuple(loss_scales)
        self.skips = any(scale.skips_nonfinite for scale in self.loss_scales)
        self.clip_norm = clip_norm
        several = parts > 1 or reduction is not None
        self.guards = tuple(guards) if self.skips or several else ()
        self.grad_dtype = cast.policy.grad_dtype
        self.has_masters = cast.policy.master_dtype is not None

        self.inner = make_optimizer(list(zip(self.names, self.updated, strict=True)))
        self.tables = row_tables(cast.module)
        self.narrow = self._narrow_of(cast.policy, seed)
        if self.narrow is None:
            initialise_state(self.inner)
        else:
            with self.narrow.in_fp32(None, None, stores=False):
                initialise_state(self.inner)
        self.rows = [
            RowUpdate(f"{name}.{key}", table, key, self.inner)
            for name, table in self.tables.items()
            for key in table.tensors()
        ]
        self.average: WeightAverage | None = None
        if average_decay is not None:
            weights = dict(zip(self.names, self.updated, strict=True))
            chosen = choose_averaged(cast.module, weights, average_modules)
            self.average = WeightAverage(chosen, average_decay)

        self.gradients = self._gradients_of(cast, list(clip_modules), parts, reduction)
        self.collects = self.gradients.collects
        casts = any(made is not used for made, used, _ in self._gradient_kinds())
        choice = choose_update(update, self.gradients, gains=casts or self.skips)
        self._single_pass, self.update_path, self.update_reason = choice
        self.gradients.single_pass = self._single_pass
        # True: torch's operations even so, which show an observer every intermediate result.
        self.observed = False
        self._used: tuple[Ready, Tensor | None] | None = None
        # Then a step is that of the inner optimizer: nothing else looks at the gradients.
        self._is_plain = (
            self.gradients.is_plain
            and clip_norm is None
            and not (self.guards or self.rows or self.average)
        )

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
        return elements_by_dtype((made, numel) for made, _, numel in self._gradient_kinds())

    def update_dtypes(self) -> dict[str, int]:
        """The same as they are unscaled, clipped and accumulated."""
        return elements_by_dtype((used, numel) for _, used, numel in self._gradient_kinds())

    def state_by_name(self) -> dict[str, dict]:
        """The state of the inner optimizer and of the rows by parameter name, as it is in use."""
        pairs = zip(self.names, self.updated, strict=True)
        # Of a parameter that the inner optimizer does not hold there is none.
        of_parameters = {name: self.inner.state.get(updated, {}) for name, updated in pairs}
        return of_parameters | {row.name: row.state for row in self.rows}

    def zero_grad(self) -> None:
        """Forget gradients and flags; remember the guarded BatchNorm statistics."""
        self.gradients.clear(None if self.observed else self._single_pass)
        self._used = None
        for table in self.tables.values():
            table.gathered = None
        for guard in self.guards:
            guard.save()

    def backward(self, loss: Tensor, loss_index: int = 0) -> None:
        """Propagate `loss` (0-dim) and add its unscaled gradients to those of this step.

        May be called several times before `step`: gradients of further losses or micro-batches
        accumulate in grad_dtype, each divided by the scale of its own loss and by `parts`; with a
        reduce_dtype of the policy in that, as those of so many ranks (`mprun.precision.reduction`).
        """
        self.gradients.backward(loss, self.loss_scales[loss_index])

    def step(self, measure_norm: bool = False) -> Update:
        """Clip, update the master weights and copy them to the model; skip if told to.

        Args:
            measure_norm: compute the gradient norm although nothing is clipped.
        """
        if not self._is_plain or measure_norm or self.gradients.single_pass is not None:
            return self._step(measure_norm)
        self.inner.step()
        return Update(self.loss_scales[0].scale, None, None)

    @torch.no_grad()
    def _step(self, measure_norm: bool) -> Update:
        ready = self.gradients.ready(measure_norm or self.clip_norm is not None)
        found_inf, clip = ready.own.found_inf, None
        if self.clip_norm is not None and ready.norm is not None:
            clip = (self.clip_norm / (ready.norm + 1e-6)).clamp(max=1.0)
        self._used = ready, clip
        self.gradients.apply(ready, clip)
        for row, gradient in zip(self.rows, ready.rows, strict=True):
            if gradient is not None:
                row.apply(gradient, found_inf)
        if found_inf is not None:
            for guard in self.guards:
                guard.restore_where(found_inf)
        if self.average is not None:
            self.average.update(found_inf)
        scale = self.loss_scales[0].scale
        if found_inf is None:
            return Update(scale, None, ready.norm)
        # Copies: both tensors are about to change in place.
        return Update(scale.clone(), found_inf.clone(), ready.norm)

    def overlap(self, last: bool) -> bool:
        """Let the next backward pass, the last one of a step, end with the sum over all ranks;
        whether it will."""
        reduction = self.gradients.reduction
        if reduction is None:
            return False
        reduction.overlaps = last and not reduction.muted
        return reduction.overlaps

    def use(self, single_pass: SinglePass | None) -> None:
        """Take `single_pass` for the updates of this optimizer, whatever was chosen; None: torch's
        operations."""
        self._single_pass = self.gradients.single_pass = single_pass

    def unscaled_gradients(self) -> dict[str, Tensor]:
        """Gradients of the last step by parameter name, as the update used them: also clipped.

        Copies in the dtype of the update, FP32 for narrow weights; parameters without a gradient
        are left out. To be read before the next `zero_grad`; what a single pass never wrote to
        memory is computed here.
        """
        if self._used is None:
            found = {}
            if self._is_plain:
                pairs = zip(self.names, self.updated, strict=True)
                found = {n: own.grad.detach().clone() for n, own in pairs if own.grad is not None}
            return found
        (ready, clip), found, gradients = self._used, {}, self.gradients
        of_parameters = zip(
            self.names, self.updated, ready.own.gradients, gradients.is_clipped, strict=False
        )
        for name, tensor, own, is_clipped in of_parameters:
            if own is None:
                continue
            in_fp32 = self.narrow is not None and tensor in self.narrow
            gradient = own.detach().to(torch.float32 if in_fp32 else tensor.dtype, copy=True)
            if ready.own.inverse is not None:
                gradient.mul_(ready.own.inverse)
            # torch's operations have clipped the gradients themselves.
            if clip is not None and is_clipped and gradients.single_pass is not None:
                gradient.mul_(clip)
            found[name] = gradient
        return found

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
        saved = {"masters": self.masters, "state": state, "averages": dict(self.averages)}
        return saved if self.narrow is None else saved | {"narrow": self.narrow.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, saved: dict) -> None:
        """Restore bit for bit, dtypes included.

        torch's own Optimizer.load_state_dict casts state to the parameter's dtype and so loses FP32
        momentum of FP16 parameters; this one copies tensor by tensor.

        Raises:
            ValueError: names what does not fit.
        """
        masters, state = self.masters, self.state_by_name()
        if saved["masters"].keys() != masters.keys() or saved["state"].keys() != state.keys():
            raise ValueError("optimizer state is of another model or precision mode")
        averages = saved.get("averages", {})
        if averages.keys() != self.averages.keys():
            raise ValueError("optimizer state has averages of other weights (optim.average_decay)")
        for name, average in self.averages.items():
            copy_exactly(f"average of {name}", average, averages[name])
        for name, master in masters.items():
            copy_exactly(f"master weights of {name}", master, saved["masters"][name])
        for name, own in state.items():
            if saved["state"][name].keys() != own.keys():
                raise ValueError(f"optimizer state of {name} is of another optimizer")
            for key, value in saved["state"][name].items():
                copy_exactly(f"{key} of {name}", own[key], value)
        if self.narrow is not None:
            self.narrow.load_state_dict(saved["narrow"])

    def _narrow_of(self, policy: PrecisionPolicy, seed: int) -> NarrowWeights | None:
        """Those of `updated` that are BF16 but updated in FP32, or have a state in BF16."""
        narrow = policy.masters == "transient"
        if not narrow and policy.state_dtype is None:
            return None
        if self.tables:
            raise ValueError(
                f"precision={policy.name}: row tables ({', '.join(self.tables)}) are updated row "
                "by row, for which there is no other rounding and no other dtype of the state"
            )
        # A script's optimizer may leave out weights whose gradients are unscaled with its own.
        held = {id(weight) for group in self.inner.param_groups for weight in group["params"]}
        chosen = {
            name: own
            for name, own in zip(self.names, self.updated, strict=True)
            if id(own) in held
            and not own.is_complex()
            and (policy.state_dtype or own.dtype is torch.bfloat16)
        }
        if not chosen:
            return None
        rounding = policy.rounding if narrow else "nearest"
        return NarrowWeights(
            self.inner, list(chosen), list(chosen.values()), rounding, policy.state_dtype, seed
        )

    def _gradients_of(
        self,
        cast: CastModel,
        clip_modules: list[str],
        parts: int,
        reduction: Reduction | None,
    ) -> Gradients:
        clipped = matching_parameters(cast.module, clip_modules, "train.clip_modules")
        is_clipped = [name in clipped for name in [*self.names, *(r.name for r in self.rows)]]
        if not any(is_clipped):
            raise ValueError(f"train.clip_modules={clip_modules}: these have no weights")
        multiplied = any(row.table.gradient_factor != 1 for row in self.rows)
        made, used, _ = map(list, zip(*self._gradient_kinds(), strict=True))
        if self.rows and (parts > 1 or reduction is not None):
            raise ValueError("row tables take one micro-batch an update, on one rank")
        wire, policy = None, cast.policy
        if parts > 1 and policy.reduce_dtype is not None:
            wire = Wire(policy.reduce_dtype, parts, policy.reduce_divide, reduction)
        return Gradients(
            self.inner,
            self.parameters,
            self.updated,
            self.rows,
            used,
            is_clipped,
            collects=(
                made != used
                or self.skips
                or multiplied
                or len(self.masters) > 0
                or wire is not None
            ),
            skips=self.skips,
            copies=self._copies,
            narrow=self.narrow,
            parts=parts,
            wire=wire,
            reduction=reduction,
        )

    def _gradient_kinds(self) -> list[tuple[torch.dtype, torch.dtype, int]]:
        """Of parameters, then rows: dtype of the gradient as backward makes it and as it is used
        in the update, and number of elements."""
        made = [*(own.dtype for own in self.parameters), *(row.row_dtype for row in self.rows)]
        updated = [*self.updated, *(row.tensor for row in self.rows)]
        # Without master weights a parameter that an override keeps in FP32 has FP32 gradients.
        in_grad_dtype = self.has_masters or self.narrow is not None
        used = [
            self.grad_dtype if in_grad_dtype and not tensor.is_complex() else tensor.dtype
            for tensor in updated
        ]
        return list(zip(made, used, (tensor.numel() for tensor in updated), strict=True))


def elements_by_dtype(tensors: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    """Number of elements by name of the dtype, from (dtype, number) pairs."""
    counts: Counter[str] = Counter()
    for dtype, numel in tensors:
        counts[str(dtype).removeprefix("torch.")] += numel
    return dict(counts)


def copy_exactly(what: str, own: Tensor, saved: Tensor) -> None:
    """Copy `saved` into `own`, of the same dtype and shape; ValueError names `what` otherwise."""
    if own.dtype != saved.dtype or own.shape != saved.shape:
        raise ValueError(
            f"{what}: saved as {saved.dtype} {tuple(saved.shape)}, "
            f"needed {own.dtype} {tuple(own.shape)}"
        )
    own.copy_(saved)


class BatchNormGuard:
    """Keeps BatchNorm's running statistics out of reach of an update that is skipped.

    The forward pass has moved the statistics before anybody knows that the gradients overflowed:
    without this guard one infinite activation makes the evaluation NaN for ever, although the
    skipped update left the weights alone.

    The statistics of all layers are moved into one flat tensor per dtype, so that remembering and
    restoring are one operation each, on the device. One guard per module: a second one would move
    the statistics away from the first.
    """

    def __init__(self, module: nn.Module):
        homes: dict[torch.dtype, list[tuple[nn.Module, str, Tensor]]] = {}
        for layer in module.modules():
            if isinstance(layer, _BatchNorm):
                for name, buffer in layer.named_buffers(recurse=False):
                    homes.setdefault(buffer.dtype, []).append((layer, name, buffer))
        self.flat = []
        for buffers in homes.values():
            flat = torch.cat([buffer.reshape(-1) for _, _, buffer in buffers])
            parts = flat.split([buffer.numel() for _, _, buffer in buffers])
            for (layer, name, buffer), part in zip(buffers, parts, strict=True):
                setattr(layer, name, part.view(buffer.shape))
            self.flat.append(flat)
        self.saved = [flat.clone() for flat in self.flat]
        self.parts: list[list[Tensor]] = []  # of the micro-batches of this step, by dtype

    @torch.no_grad()
    def save(self) -> None:
        """Remember the statistics as they are now."""
        self.parts = []
        for saved, flat in zip(self.saved, self.flat, strict=True):
            saved.copy_(flat)

    @torch.no_grad()
    def end_part(self) -> None:
        """A micro-batch is over: keep what it made of the statistics, which go back to `save`."""
        self.parts.append([flat.clone() for flat in self.flat])
        for saved, flat in zip(self.saved, self.flat, strict=True):
            flat.copy_(saved)

    @torch.no_grad()
    def take_mean(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Let the statistics be the mean of what the micro-batches made of them, of all ranks.

        Each rank moves them by its own micro-batches from where they were: they do not depend on
        how many ranks share them out. Integers (counts of batches) are those of the first.

        Args:
            gather: `[parts, n]` of this rank -> `[parts, n]` of all, in the order of micro-batches.
        """
        made, self.parts = self.parts, []
        for flat, *own in zip(self.flat, *made, strict=True):
            parts = gather(torch.stack(own)).unbind()
            flat.copy_(parts[0])
            if flat.is_floating_point():
                for part in parts[1:]:  # one after the other: the same bits for any number of ranks
                    flat.add_(part)
                flat.div_(len(parts))

    @torch.no_grad()
    def restore_where(self, found_inf: Tensor) -> None:
        """Put the saved statistics back if `found_inf` (0-dim) is non-zero; decided on the device.

        torch.where, not arithmetic: NaN * 0 would keep the NaN.
        """
        if not self.flat:
            return
        skipped = found_inf != 0
        for saved, flat in zip(self.saved, self.flat, strict=True):
            torch.where(skipped, saved, flat, out=flat)


class WeightAverage:
    """average <- decay * average + (1 - decay) * weight, once per applied update.

    For evaluation. The average starts at the weights as they are (tf.train.
    ExponentialMovingAverage without num_updates, as bigLSTM's published code uses it). It is in
    FP32 in every mode, because it only measures: in 16 bits 0.001 times a difference would vanish.
    Costs 4 bytes for each averaged parameter. Running statistics of norm layers are not averaged.

    Args:
        weights: by parameter name, what the optimizer updates (the master weights where there are
            some).
        decay: in (0, 1).
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float):
        if not 0 < decay < 1:
            raise ValueError(f"decay={decay} is not allowed: above 0, below 1")
        self.weights, self.decay = dict(weights), decay
        self.values = {
            name: weight.detach().to(torch.float32, copy=True) for name, weight in weights.items()
        }
        device = next(iter(self.values.values())).device
        self._rate = torch.full((), 1.0 - decay, dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, found_inf: Tensor | None) -> None:
        """Move towards the weights, except where `found_inf` (0-dim) says that they did not move.

        Nothing waits for the device.
        """
        rate = self._rate if found_inf is None else self._rate * (found_inf == 0)
        for name, average in self.values.items():
            average.lerp_(self.weights[name].float(), rate)


def choose_averaged(
    model: nn.Module, weights: Mapping[str, Tensor], patterns: Iterable[str]
) -> dict[str, Tensor]:
    """Those of `weights` whose modules match `optim.average_modules`; all without a pattern.

    Raises:
        ValueError: a pattern that matches no module, nothing is chosen, and row tables: their
            average would have to move in every row.
    """
    patterns = list(patterns)
    names = matching_parameters(model, patterns, "optim.average_modules")
    tables = [t for t in row_tables(model) if any(name.startswith(f"{t}.") for name in names)]
    if tables:
        raise ValueError(
            f"optim.average_modules={patterns}: {', '.join(tables)} are updated only in the rows "
            "that a step uses and have no average; name the modules to average, e.g. [lstm]"
        )
    chosen = {name: weight for name, weight in weights.items() if name in names}
    if not chosen:
        raise ValueError(f"optim.average_modules={patterns}: these modules have no weights")
    for name, weight in chosen.items():
        if weight.is_complex():
            raise ValueError(f"optim.average_decay: {name} is complex and has no average")
    return chosen

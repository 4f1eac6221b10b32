"""The gradients of a step, and how they are applied: two ways that give the same numbers.

With torch's operations they are taken out of `.grad` after every loss, cast and unscaled there and
then; torch's optimizer updates the masters, which are copied to the model: 40 bytes a parameter for
SGD with momentum.

A single pass leaves the gradients of a step with one loss where backward wrote them, scaled and in
its dtype, until the step: one read for the check, one pass for everything else, 22 bytes. A second
loss or micro-batch of the same step takes them out first, as torch's operations do after every
loss. Formulas, their order and the names of the state are the same, so a checkpoint of one
continues in the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.loss_scale import LossScale
from mprun.precision.narrow_weights import COMPENSATION, NarrowWeights
from mprun.precision.reduction import Reduction, Wire
from mprun.precision.row_updates import RowUpdate
from mprun.precision.torch_update import STATE, rule_of, step_unless


class Scaled(NamedTuple):
    """The gradients of the parameters as the update takes them.

    Attributes:
        gradients: None where there is none; in float32 where `inverse` is None, else scaled as
            autograd left them.
        inverse: 1/scale that they are still to be multiplied with, float32, 0-dim; None: with
            nothing.
        found_inf: float32, 0-dim, not 0 where one is not finite; None: no check.
    """

    gradients: Sequence[Tensor | None]
    inverse: Tensor | None
    found_inf: Tensor | None


class Ready(NamedTuple):
    """All gradients of a step, checked, before clipping.

    Attributes:
        own: of the parameters.
        rows: of the row tables, unscaled; None where there is none.
        norm: L2 norm of all unscaled gradients that count in it, float32, 0-dim; None: not asked
            for.
    """

    own: Scaled
    rows: list[Tensor | None]
    norm: Tensor | None


class Checked(NamedTuple):
    """What one read of the gradients told.

    Attributes:
        norms: float32 [k], L2 norms of the unscaled gradients that count in the norm, one or
            several tensors to an entry; None: not asked for.
        grad_max: float32, 0-dim, largest unscaled magnitude; None: not asked for.
    """

    norms: Tensor | None
    grad_max: Tensor | None


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, or a piece of one, as the kernels of a single pass take it.

    Attributes:
        index: of the parameter.
        group: of the optimizer.
        own: what the model computes with; `master` itself where there is no copy.
        state: in the order in which kernels take it, in memory as `master` is: kernels look at no
            strides.
        step: the optimizer's counter; None: it keeps none.
        kept: of a narrow weight, what its last rounding took away; None: nothing is kept.
        part: number of the piece; None: the whole parameter.
    """

    index: int
    group: dict
    own: Tensor
    master: Tensor
    has_copy: bool
    state: list[Tensor]
    step: Tensor | None
    kept: Tensor | None = None
    part: int | None = None


class SinglePass(ABC):
    """What the optimizer `inner` does, in one read of the gradients and one pass over the weights.

    Args:
        parameters: what the model computes with.
        updated: what `inner` updates for each of them, its master or itself.
        is_clipped: whether the gradient of each counts in the norm and is clipped.
        narrow: see `Gradients`.
    """

    def __init__(
        self,
        inner: Optimizer,
        parameters: Sequence[Tensor],
        updated: Sequence[Tensor],
        is_clipped: Sequence[bool],
        narrow: NarrowWeights | None = None,
    ):
        self.inner, self.rule, self.is_clipped = inner, rule_of(inner), list(is_clipped)
        self.narrow = narrow
        self.parameters, self.updated = list(parameters), list(updated)

    @abstractmethod
    def check(self, scaled: Scaled, *, norm: bool, grad_max: bool) -> Checked:
        """Read the gradients once; set `found_inf` to 1 if one is not finite."""

    @abstractmethod
    def update(self, scaled: Scaled, clip: Tensor | None) -> None:
        """Cast, unscale, multiply by `clip` (0-dim) what is clipped, update, copy to the model.

        Where `found_inf` is not 0 nothing is written.
        """

    def weights(self, has_gradient: Sequence[bool]) -> Iterator[Weight]:
        """What `inner` updates, in the order of its groups."""
        index_of = {id(tensor): index for index, tensor in enumerate(self.updated)}
        for group in self.inner.param_groups:
            for master in group["params"]:
                index = index_of[id(master)]
                if not has_gradient[index]:
                    continue
                own, state = self.parameters[index], self.inner.state[master]
                names = [name for name in STATE[self.rule] if name in state]
                for name in names:
                    state[name] = in_order_of(master, state[name])
                tensors, step = [state[name] for name in names], state.get("step")
                kept = state.get(COMPENSATION)
                yield Weight(index, group, own, master, own is not master, tensors, step, kept)


class Gradients:
    """The gradients of a step on their way from backward to the update. Nothing here waits.

    Args:
        inner: the torch optimizer that is to be followed.
        parameters: what the model computes with.
        updated: what `inner` updates for each of them, its master or itself.
        dtypes: in which the gradients of parameters, then of rows, are unscaled and added up.
        is_clipped: whether each counts in the norm and is clipped, in the same order.
        collects: whether they are taken out of `.grad`; those that need neither cast nor scale
            stay where autograd accumulates them.
        skips: whether a step with a gradient that is not finite is skipped.
        copies: whether the update also brings `parameters` up to date; else the caller does.
        parts: micro-batches whose mean the update takes: sums are divided by it, after unscaling.
        narrow: those of `updated` that are BF16 and updated in FP32 all the same.
        wire: sums and divides instead, before unscaling, what `parts` ranks would exchange.
        reduction: sums over ranks, of which each has some of the micro-batches; None: there is one
            rank.

    Attributes:
        values: those taken, in the same order, each in its dtype; None where there is none.
        found_inf: float32, 0-dim, which becomes 1 where a gradient is not finite.
        single_pass: what this step is updated by; None: torch's operations.
    """

    def __init__(
        self,
        inner: Optimizer,
        parameters: Sequence[Tensor],
        updated: Sequence[Tensor],
        rows: Sequence[RowUpdate],
        dtypes: Sequence[torch.dtype],
        is_clipped: Sequence[bool],
        *,
        collects: bool,
        skips: bool,
        copies: bool = True,
        narrow: NarrowWeights | None = None,
        parts: int = 1,
        wire: Wire | None = None,
        reduction: Reduction | None = None,
    ):
        self.parts, self.wire, self.reduction = parts, wire, reduction
        # What this rank found in the gradients of each scale, for the others to hear of.
        self._found: dict[LossScale, tuple[Tensor, Tensor | None]] = {}
        # The scale of a loss whose backward pass has summed over the ranks.
        self._at_once: LossScale | None = None
        self.inner, self.rows = inner, list(rows)
        self.parameters, self.updated = list(parameters), list(updated)
        self.dtypes, self.is_clipped = list(dtypes), list(is_clipped)
        self.collects, self.skips, self.narrow = collects, skips, narrow
        self.found_inf = torch.zeros((), device=self.updated[0].device)
        self.values: list[Tensor | None] = [None] * len(self.dtypes)
        self.single_pass: SinglePass | None = None
        # The scale of the loss whose gradients a single pass will find in `.grad`.
        self._pending: LossScale | None = None
        self._one = torch.ones_like(self.found_inf)
        pairs = list(zip(self.parameters, self.updated, strict=True)) if copies else []
        self._copies = [own for own, master in pairs if own is not master]
        self._masters = [master for own, master in pairs if own is not master]

    @property
    def is_plain(self) -> bool:
        """Whether they stay where backward leaves them, as they are, for weights without copies."""
        sums = self.wire is not None or self.reduction is not None
        apart = self.collects or self.skips or self._copies or self.narrow is not None
        return not (apart or sums or self.parts > 1)

    def clear(self, single_pass: SinglePass | None) -> None:
        """Forget all of them, in `.grad` too: a new step begins, to be updated by `single_pass`."""
        for tensor in (*self.parameters, *self._masters):
            tensor.grad = None
        self.values = [None] * len(self.values)
        self.single_pass, self._pending = single_pass, None
        for sums in (self.wire, self.reduction):
            if sums is not None:
                sums.clear()
        self._found, self._at_once = {}, None
        if self.skips:
            self.found_inf.zero_()

    def backward(self, loss: Tensor, scale: LossScale) -> None:
        """Propagate `loss` times `scale`, and take the gradients where they may not stay."""
        if self._pending is not None and self.collects:
            self._add(self._pending)
            self._pending = None
        if self.reduction is not None and self.reduction.overlaps:
            self._summed_at_once(loss, scale, self.reduction)
            return
        scale.backward(loss)
        if any(p.grad is not None and p.grad.is_sparse for p in self.parameters):
            self.single_pass = None  # of this step: its kernels take every weight
        if self.wire is not None:
            self.wire.add(self._taken(), scale)
        elif self.reduction is not None and not self.collects:
            self.reduction.add(self._taken())
        elif (
            self.single_pass is not None
            and self.reduction is None
            and all(value is None for value in self.values)
        ):
            self._pending = scale
        elif self.collects:
            self._add(scale)

    def ready(self, needs_norm: bool) -> Ready:
        """All gradients of the step, checked; sets found_inf where one is not finite."""
        if self.wire is not None and self.wire.scale is not None:
            self.wire.close()
            self._add(self.wire.scale)
        elif self.reduction is not None:
            self._sum_over_ranks(self.reduction)
        if self.parts > 1 and not self.collects:
            for group in by_dtype([parameter.grad for parameter in self.parameters]):
                torch._foreach_div_(group, self.parts)
        scale, found_inf = self._pending, self.found_inf if self.skips else None
        if scale is None or self.single_pass is None:
            own, rows = self._parts()
            norm = global_norm(self.clipped([*own, *rows])) if needs_norm else None
            return Ready(Scaled(own, None, found_inf), rows, norm)
        inverse = scale.inverse() if scale.skips_nonfinite else None
        scaled = Scaled([parameter.grad for parameter in self.parameters], inverse, found_inf)
        checked = self.single_pass.check(scaled, norm=needs_norm, grad_max=scale.needs_grad_max)
        grad_max = checked.grad_max
        if self.rows and self.collects:
            of_rows = self._add_to([*[None] * len(self.parameters), *self._take_rows()], scale)[1]
            if grad_max is not None and of_rows is not None:
                grad_max = torch.maximum(grad_max, of_rows)
        if scale.skips_nonfinite:
            scale.record(self.found_inf, grad_max)
        rows = self._parts()[1]
        if checked.norms is None:
            return Ready(scaled, rows, None)
        norms = [checked.norms]
        if chosen := self._clipped_rows(rows):
            norms.append(norms_of(chosen))
        return Ready(scaled, rows, torch.linalg.vector_norm(torch.cat(norms)))

    def apply(self, ready: Ready, clip: Tensor | None) -> None:
        """Clip, update the masters and copy them to the model; of row tables only clip.

        Args:
            clip: 0-dim factor of the gradients that count in the norm; None: nothing is clipped.
        """
        own, found_inf = ready.own.gradients, ready.own.found_inf
        if self.single_pass is not None:
            if clip is not None and (rows := self._clipped_rows(ready.rows)):
                torch._foreach_mul_(rows, clip)
            self.single_pass.update(ready.own, clip)
            return
        if clip is not None:
            for group in by_dtype(self.clipped([*own, *ready.rows])):
                torch._foreach_mul_(group, clip)
        if self.narrow is None:
            self._step(self.updated, own if self.collects else None, found_inf)
        else:
            for places in self.narrow.chunks(self.updated):
                chunk, gradients = [self.updated[n] for n in places], [own[n] for n in places]
                with self.narrow.in_fp32(chunk, found_inf) as wide:
                    self._step(wide, gradients, found_inf)
            self.narrow.count(found_inf)
        if self._copies:
            torch._foreach_copy_(self._copies, self._masters)

    def _step(
        self,
        updated: Sequence[Tensor],
        gradients: Sequence[Tensor | None] | None,
        found_inf: Tensor | None,
    ) -> None:
        """Let `inner`, which holds these, take a step. gradients: None: they have them."""
        for tensor, gradient in zip(updated, gradients or (), strict=False):
            tensor.grad = None if gradient is None else gradient.to(tensor.dtype)
        if found_inf is not None:
            step_unless(self.inner, found_inf)
        else:
            self.inner.step()

    def clipped(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Those that count in the norm and are clipped; in the order of `values`."""
        pairs = zip(gradients, self.is_clipped, strict=True)
        return [gradient for gradient, counts in pairs if counts and gradient is not None]

    def _clipped_rows(self, rows: Sequence[Tensor | None]) -> list[Tensor]:
        return self.clipped([*[None] * len(self.parameters), *rows])

    def _parts(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Those of the parameters and those of the rows, as they are."""
        if not self.collects:
            for parameter in self.parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
            return [p.grad for p in self.parameters], [row.gradient for row in self.rows]
        count = len(self.parameters)
        return self.values[:count], self.values[count:]

    def _add(self, scale: LossScale) -> None:
        """Take every new gradient, those of one loss, and tell `scale` what was found in them."""
        found_inf, grad_max = self.collect(scale)
        if not scale.skips_nonfinite:
            return
        if self.reduction is None or self.wire is not None:
            scale.record(found_inf, grad_max)
        elif scale in self._found:
            before, most = self._found[scale]
            found_inf = torch.maximum(before, found_inf)
            if most is not None and grad_max is not None:
                grad_max = torch.maximum(most, grad_max)
            self._found[scale] = found_inf, grad_max
        else:
            self._found[scale] = found_inf, grad_max

    def _summed_at_once(self, loss: Tensor, scale: LossScale, reduction: Reduction) -> None:
        """The last backward pass of a step, which sums over all ranks as it goes."""
        inverse = scale.inverse() if scale.skips_nonfinite else None

        def sent(number: int, flat: Tensor) -> Tensor:
            if self.wire is not None:
                wide = self.wire.sent(flat.clone())
                assert wide is not None
                return wide
            if not self.collects:
                return flat
            wide = flat.to(self.dtypes[number], copy=True)
            if inverse is not None:
                return wide.mul_(inverse / self.parts)
            return wide.div_(self.parts)

        reduction.begin(self.parameters, sent)
        scale.backward(loss)
        self._taken()
        self._at_once = scale
        if self.wire is not None:
            self.wire.scale = scale

    def _sum_over_ranks(self, reduction: Reduction) -> None:
        """Let `values` (or `.grad`) be the sums, and every scale hear what any rank found.

        The gradients were checked before they were summed: an inf of one rank is one of all, but
        the largest magnitude and each scale's own flag are not to be read off a sum.
        """
        total = reduction.total()
        if not self.collects:
            for parameter, gradient in zip(self.parameters, total, strict=True):
                parameter.grad = gradient
            return
        self.values = total
        if self._at_once is not None:  # checked after the sum: what one rank has is in it
            found_inf = torch.zeros_like(self.found_inf)
            if self._at_once.skips_nonfinite:
                for group in by_dtype(total):
                    check_and_unscale(group, found_inf, self._one)
                torch.maximum(self.found_inf, found_inf, out=self.found_inf)
                self._at_once.record(found_inf)
            return
        if not self._found:
            return
        zero = torch.zeros_like(self.found_inf)
        own = [flag for pair in self._found.values() for flag in pair]
        flags = torch.stack([zero if flag is None else flag.float() for flag in own])
        # Of what is not finite only the flag counts, and a maximum over ranks may drop a NaN.
        agreed = iter(reduction.largest(flags.nan_to_num(0.0)).unbind())
        for scale, (_, most) in self._found.items():
            found_inf, grad_max = next(agreed), next(agreed)
            torch.maximum(self.found_inf, found_inf, out=self.found_inf)
            scale.record(found_inf, None if most is None else grad_max)

    def collect(
        self, scale: LossScale, direct: Sequence[Tensor | None] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Take every new gradient, unscale it and add it to `values`.

        Args:
            direct: scaled gradients of the masters themselves, to be added to those of the copies.

        Returns:
            found_inf of these, and their largest magnitude where the scale asks for it; 0-dim.
        """
        with torch._C.DisableTorchFunction():  # an emulation would look at each access
            return self._collect(scale, direct)

    def _collect(
        self, scale: LossScale, direct: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        new: list[Tensor | None] = []
        taken = self._taken() if self.wire is None else self.wire.values
        for gradient, dtype in zip(taken, self.dtypes, strict=False):
            if gradient is not None and gradient.is_sparse:
                # Summed in the dtype of the update; rows that a 16-bit sum could not hold.
                gradient = gradient.to(dtype).coalesce()
            new.append(None if gradient is None else gradient.to(dtype))
        for index, more in enumerate(direct):
            if more is not None:
                new[index] = more if (own := new[index]) is None else own + more
        return self._add_to([*new, *self._take_rows()], scale)

    def _taken(self) -> list[Tensor | None]:
        """The new gradients of the parameters, as backward left them."""
        taken = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return taken

    def _take_rows(self) -> list[Tensor | None]:
        taken = []
        for row, dtype in zip(self.rows, self.dtypes[len(self.parameters) :], strict=True):
            gradient = row.take_gradient()
            taken.append(None if gradient is None else gradient.to(dtype))
        return taken

    def _add_to(self, new: list[Tensor | None], scale: LossScale) -> tuple[Tensor, Tensor | None]:
        """Divide by the scale and the number of parts, check, add up.

        Returns:
            found_inf of these, and the largest magnitude that backward, or the sum of ranks, had to
            hold, times no scale.
        """
        found_inf, grad_max = torch.zeros_like(self.found_inf), None
        parts = self.parts if self.wire is None else self.wire.after
        if scale.skips_nonfinite:
            inverse = scale.inverse() / parts if parts > 1 else scale.inverse()
            for group in by_dtype(new):
                check_and_unscale(group, found_inf, inverse)
            if scale.needs_grad_max:
                grad_max = largest(new) * parts if by_dtype(new) else torch.zeros_like(found_inf)
        elif parts > 1:
            for group in by_dtype(new):
                torch._foreach_div_(group, parts)
        multiplied = [
            gradient.mul_(row.table.gradient_factor)
            for row, gradient in zip(self.rows, new[len(self.parameters) :], strict=True)
            if gradient is not None and row.table.gradient_factor != 1
        ]
        if scale.skips_nonfinite:
            # A factor can take a 16-bit gradient beyond its format.
            for group in by_dtype(multiplied):
                check_and_unscale(group, found_inf, self._one)
            torch.maximum(self.found_inf, found_inf, out=self.found_inf)
        if self.reduction is not None and self.wire is None:
            self.reduction.add(new)
            return found_inf, grad_max
        pairs = list(zip(self.values, new, strict=True))
        both = [p for p in pairs if p[0] is not None and p[1] is not None and not p[0].is_sparse]
        if both:
            torch._foreach_add_(*map(list, zip(*both, strict=True)))
        self.values = [_sum_of(value, gradient) for value, gradient in pairs]
        return found_inf, grad_max


def _sum_of(value: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Dense ones have been added up in place."""
    if value is None or gradient is None or not value.is_sparse:
        return gradient if value is None else value
    # In FP32: torch adds up sparse 16-bit tensors on no CPU.
    wide = torch.promote_types(value.dtype, torch.float32)
    return (value.to(wide) + gradient.to(wide)).coalesce().to(value.dtype)


def by_dtype(tensors: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Their numbers grouped by dtype, None left out: torch's foreach kernels take one dtype at a
    time. Of a coalesced sparse tensor these are its values, of a complex one both parts; what is
    written to them is written to the tensor."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            tensor = tensor._values() if tensor.is_sparse else tensor
            if tensor.is_complex():  # a lazy conjugate is one of the same memory
                tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def check_and_unscale(tensors: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply by `inverse` in place, rounded once; set `found_inf` where a value is not finite.

    Torch's kernel takes no BF16 on CUDA (NotImplementedError in torch 2.15): there it works on FP32
    copies, which all live at once.

    Args:
        tensors: of one dtype.
        found_inf, inverse: float32, 0-dim.
    """
    if tensors[0].dtype is torch.bfloat16 and tensors[0].is_cuda:
        wide = [tensor.float() for tensor in tensors]
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, inverse)
        torch._foreach_copy_(tensors, wide)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)


def largest(tensors: Iterable[Tensor | None]) -> Tensor:
    """Largest magnitude of all, float32, 0-dim."""
    groups = by_dtype(tensors)
    found = [[tensor for tensor in group if tensor.numel()] for group in groups]
    norms = [n.float() for some in found if some for n in torch._foreach_norm(some, float("inf"))]
    return torch.stack(norms).max() if norms else groups[0][0].new_zeros((), dtype=torch.float32)


def norms_of(gradients: list[Tensor]) -> Tensor:
    """L2 norm of each, float32 [n], by dtype: squares of FP16 values would overflow in FP16."""
    norms = [
        norm
        for group in by_dtype(gradients)
        for norm in torch._foreach_norm(group, 2, dtype=torch.float32)
    ]
    return torch.stack(norms)


def global_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all gradients, float32, 0-dim."""
    return torch.linalg.vector_norm(norms_of(gradients), 2)


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

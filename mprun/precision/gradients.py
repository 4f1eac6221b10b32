"""From the losses of a step to its gradients: propagate, reduce, unscale.

A policy needs one of the ways below, chosen when the optimizer is built. A gradient is in `.grad`
from backward until it is taken, then in a sum until `ready` returns it.
Nothing here waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mprun.precision.loss_scale import LossScale
from mprun.precision.policy import DIVIDE
from mprun.precision.row_updates import RowUpdate
from mprun.precision.update import (
    Gradients,
    Ready,
    any_sparse,
    by_dtype,
    check_and_unscale,
    coalesced,
    largest,
)
from mprun.torch_private import DisableTorchFunction, foreach_add_, foreach_div_


@dataclass(eq=False)
class Gathering(ABC):
    """One way from the losses of a step to its gradients."""

    parameters: Sequence[Tensor]  # backward writes to their `.grad`
    rows: Sequence[RowUpdate]  # of row tables; backward writes gradients of the gathered rows
    parts: int  # micro-batches; their sum is divided by this number
    ranks: Reduction | None  # the sum over ranks that share the micro-batches; None: one rank

    @abstractmethod
    def clear(self) -> None:
        """Forget the gathered gradients; leave `.grad` alone."""

    @abstractmethod
    def take(self, scale: LossScale) -> None:
        """Take the gradients of a loss that was propagated times `scale`, left in `.grad`."""

    @abstractmethod
    def ready(self) -> Ready:
        """Return the gradients of the step."""

    def backward(self, loss: Tensor, scale: LossScale) -> None:
        """Propagate `loss` times `scale`, and take its gradients unless they may stay.

        The last loss of a step may be summed over ranks during backward.
        """
        if self.ranks is not None and self.ranks.overlaps:
            self.ranks.begin(self.parameters, lambda number, flat: self.sent(number, flat, scale))
            scale.backward(loss)
            self.ranks.end(self.taken())
            self.summed(scale)
            return
        scale.backward(loss)
        with DisableTorchFunction():  # an emulation would look at each access
            self.take(scale)

    def sent(self, number: int, flat: Tensor, scale: LossScale) -> Tensor:
        """Return the tensor to sum for `flat`, gradients of the kind of parameter `number`; a new
        tensor unless it is `flat` unchanged."""
        return flat

    def summed(self, scale: LossScale) -> None:  # noqa: B027 - most need not know
        """Note that a loss was summed over ranks during its backward pass."""

    def taken(self) -> Gradients:
        """Return the new gradients, and remove them from parameters and rows."""
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return [*gradients, *(row.take_gradient() for row in self.rows)]


class Untouched(Gathering):
    """Gradients that need neither cast nor scale: summed by autograd, or over ranks."""

    _scale: LossScale | None = None

    def clear(self) -> None:
        self._scale = None
        if self.ranks is not None:
            self.ranks.clear()

    def take(self, scale: LossScale) -> None:
        self._scale = scale
        if self.ranks is not None:
            self.ranks.add(self.taken())

    def ready(self) -> Ready:
        ranks = self.ranks
        own = [p.grad for p in self.parameters] if ranks is None else ranks.total()
        if self.parts > 1:
            for group in by_dtype(own):
                foreach_div_(group, self.parts)
            own = coalesced(own)
        sparse, rows = any_sparse(own), [row.take_gradient() for row in self.rows]
        unread = None if ranks is not None or sparse else self._scale
        return Ready(own, None, None, rows, unread, sparse)


@dataclass(eq=False)
class Unscaled(Gathering):
    """Gradients that are cast, unscaled and checked after each loss, then added, over ranks too.

    All ranks learn of one rank's non-finite gradients before they act on them.
    """

    dtypes: Sequence[torch.dtype]  # of parameters, then rows: in them gradients are added up
    found_inf: Tensor  # float32, 0-dim, for the step; becomes 1 if a gradient is not finite
    skips: bool  # whether the step is skipped then

    def __post_init__(self) -> None:
        self.one = torch.ones_like(self.found_inf)
        self.sum: Sum | Reduction = self.ranks or Sum(len(self.parameters))
        self.clear()

    def clear(self) -> None:
        self.sum.clear()
        self._of_rows: list[Gradients] = []  # by loss, whose rows are others
        # For each loss: its scale, whether a gradient is not finite, and the largest magnitude,
        # unscaled, that backward or the sum over ranks had to hold (None: not asked for).
        self._found: list[tuple[LossScale, Tensor, Tensor | None]] = []
        self._summed: LossScale | None = None  # scale of gradients summed during backward

    def take(self, scale: LossScale) -> None:
        new = self.cast(self.taken())
        self.unscale(new, scale)
        self.sum.add(new[: len(self.parameters)])
        self._of_rows.append(new[len(self.parameters) :])

    def sent(self, number: int, flat: Tensor, scale: LossScale) -> Tensor:
        wide = flat.to(self.dtypes[number], copy=True)
        if scale.skips_nonfinite:
            return wide.mul_(scale.inverse() / self.parts)
        return wide.div_(self.parts)

    def summed(self, scale: LossScale) -> None:
        self._summed = scale

    def ready(self) -> Ready:
        total = self.sum.total()
        for number, row in enumerate(self.rows):
            of_losses = (own[number] for own in self._of_rows)
            total.append(row.total([own for own in of_losses if own is not None]))
        if self._summed is not None:
            self._found = []
            if self._summed.skips_nonfinite:  # the sum contains each rank's values
                for group in by_dtype(total):
                    check_and_unscale(group, self.found_inf, self.one)
                self._found = [(self._summed, self.found_inf, None)]
        self._agree(whole=self._summed is not None)
        return self.handed_over(total)

    def _agree(self, whole: bool) -> None:
        """Take over the findings of all ranks, unless this one has checked the whole sum.

        Gradients were checked before they were summed. An inf on one rank makes the sum inf, but
        the sum does not show the largest magnitude and each scale's flag. Of shards each rank
        checks the sums that it updates.
        """
        ranks = self.ranks
        if ranks is None or not self._found or (whole and not ranks.shards):
            return
        zero = torch.zeros_like(self.found_inf)
        own = [zero if one is None else one for _, *both in self._found for one in both]
        # A non-finite gradient only counts as a flag, and a maximum over ranks may drop a NaN.
        agreed = ranks.largest(torch.stack(own).nan_to_num(0.0)).view(-1, 2)
        self._found = [
            (scale, found_inf, None if own_max is None else grad_max)
            for (scale, _, own_max), (found_inf, grad_max) in zip(self._found, agreed, strict=True)
        ]
        torch.maximum(self.found_inf, agreed[:, 0].amax(), out=self.found_inf)

    def tell(self) -> None:
        """Tell the scales of these gradients the findings."""
        for scale, found_inf, grad_max in self._found:
            scale.record(found_inf, grad_max)

    def handed_over(self, gradients: Gradients) -> Ready:
        """Return these as the gradients of the step, and tell the scales."""
        self.tell()
        count = len(self.parameters)
        found_inf = self.found_inf if self.skips else None
        own, rows = gradients[:count], gradients[count:]
        return Ready(own, None, found_inf, rows, sparse=any_sparse(gradients))

    def cast(self, gradients: Gradients) -> Gradients:
        """Cast to the dtypes of the update, then add up sparse ones by row, which would overflow
        16 bits."""
        pairs = zip(gradients, self.dtypes, strict=True)
        return coalesced(None if own is None else own.to(dtype) for own, dtype in pairs)

    def unscale(self, gradients: Gradients, scale: LossScale) -> None:
        """Divide by scale and number of parts, in place; check, and note the findings."""
        parts = self.parts
        if not scale.skips_nonfinite:
            if parts > 1:
                for group in by_dtype(gradients):
                    foreach_div_(group, parts)
            self._multiply_rows(gradients)
            return
        found_inf, grad_max = torch.zeros_like(self.found_inf), None
        inverse = scale.inverse() / parts if parts > 1 else scale.inverse()
        for group in by_dtype(gradients):
            check_and_unscale(group, found_inf, inverse)
        if scale.needs_grad_max:
            grad_max = largest(gradients, found_inf.device) * parts
        # A factor can take a 16-bit gradient beyond its format.
        for group in by_dtype(self._multiply_rows(gradients)):
            check_and_unscale(group, found_inf, self.one)
        torch.maximum(self.found_inf, found_inf, out=self.found_inf)
        self._found.append((scale, found_inf, grad_max))

    def _multiply_rows(self, gradients: Gradients) -> list[Tensor]:
        """Multiply and return the gradients of tables that have a factor."""
        return [
            gradient.mul_(row.table.gradient_factor)
            for row, gradient in zip(self.rows, gradients[len(self.parameters) :], strict=True)
            if gradient is not None and row.table.gradient_factor != 1
        ]


class LeftForOnePass(Unscaled):
    """Gradients of a step with one loss, left in `.grad`: one read for the check, one for the rest.

    A second loss's gradients, and sparse ones, go the way of `Unscaled`.
    """

    def clear(self) -> None:
        super().clear()
        self._losses = 0
        self._left: LossScale | None = None  # the scale of the gradients in `.grad`

    def backward(self, loss: Tensor, scale: LossScale) -> None:
        if self._left is not None:  # before autograd adds to them
            with DisableTorchFunction():
                super().take(self._left)
            self._left = None
        super().backward(loss, scale)

    def take(self, scale: LossScale) -> None:
        self._losses += 1
        if self._losses == 1 and not any_sparse(p.grad for p in self.parameters):
            self._left = scale
        else:
            super().take(scale)

    def ready(self) -> Ready:
        scale = self._left
        if scale is None:
            return super().ready()
        own = [parameter.grad for parameter in self.parameters]
        rows: Gradients = [None] * len(own)
        if self.rows:
            rows = self.cast([*rows, *(row.take_gradient() for row in self.rows)])
            self.unscale(rows, scale)
            self.tell()
        inverse = scale.inverse() if scale.skips_nonfinite else None
        found_inf = self.found_inf if self.skips else None
        return Ready(own, inverse, found_inf, rows[len(own) :], scale)


@dataclass(eq=False)
class SummedBeforeUnscaled(Unscaled):
    """Gradients added up scaled, as backward computed them, in the dtype that ranks exchange.

    So data-parallel training sums: torch's DistributedDataParallel in the parameters' dtype, its
    `fp16_compress_hook` always in FP16. M micro-batches count as M ranks.

    Without `ranks` they are added in order, each addition rounded. A ring starts each part of a
    tensor at another rank: other bits with more than two ranks, but errors as large. A tree has
    smaller ones, log2(M) roundings instead of M - 1; a sum in FP32 has a single one. Those orders
    need all gradients at once (`mprun.distributed.reduction`).
    """

    dtype: torch.dtype  # of the sum and of its terms
    divide: str  # see `factors`; `parts` is then the divisor after the sum

    def __post_init__(self) -> None:
        super().__post_init__()
        self.before, self.parts = factors(self.parts, self.divide)

    def take(self, scale: LossScale) -> None:
        """Take the gradients of one rank; RuntimeError if they have another scale than before."""
        self.summed(scale)
        self.sum.add([None if own is None else self._narrowed(own) for own in self.taken()])

    def sent(self, number: int, flat: Tensor, scale: LossScale) -> Tensor:
        return self._narrowed(flat.clone())

    def summed(self, scale: LossScale) -> None:
        if self._summed not in (None, scale):
            raise RuntimeError("gradients of several loss scales cannot be summed as they are")
        self._summed = scale

    def ready(self) -> Ready:
        gradients = self.cast(self.sum.total())
        if self._summed is not None:
            self.unscale(gradients, self._summed)
            self._agree(whole=True)
        return self.handed_over(gradients)

    def _narrowed(self, gradient: Tensor) -> Tensor:
        gradient = gradient.to(self.dtype)
        return gradient.div_(self.before) if self.before > 1 else gradient


class Sum:
    """The sum of gradients over the losses of one process, in the first tensors' memory."""

    def __init__(self, count: int):
        self._values: Gradients = [None] * count

    def clear(self) -> None:
        self._values = [None] * len(self._values)

    def add(self, gradients: Gradients) -> None:
        self._values = added(self._values, gradients)

    def total(self) -> Gradients:
        values = self._values
        self.clear()
        return values


@torch.no_grad()
def added(known: Gradients, new: Gradients) -> Gradients:
    """Return sums of gradients, in the tensors of `known` if both exist."""
    sums: Gradients = []
    groups: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for one, other in zip(known, new, strict=True):
        if one is not None and other is not None:
            if one.is_sparse:
                # In FP32 and rounded once, which is the same: torch's CPU build has no 16-bit sum.
                wide = torch.promote_types(one.dtype, torch.float32)
                one = (one.to(wide) + other.to(wide)).coalesce().to(one.dtype)
            else:
                groups.setdefault(one.dtype, []).append((one, other))
        sums.append(other if one is None else one)
    for group in groups.values():
        foreach_add_([one for one, _ in group], [other for _, other in group])
    return sums


def factors(ranks: int, divide: str) -> tuple[int, int]:
    """Return the divisors of gradients before and after their sum; the product is `ranks`.

    ValueError unless `divide` is one of `DIVIDE`.

    Each addition in 16 bits rounds. Divided before, small gradients underflow, more of them with
    more ranks; divided after, large ones overflow.

    "split": about the square root before, in powers of two, as torch's FSDP divides FP16 gradients
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `_get_gradient_divide_factors`).
    """
    if divide not in DIVIDE:
        raise ValueError(f"divide={divide!r}: must be one of {', '.join(DIVIDE)}")
    if divide != "split":
        return (ranks, 1) if divide == "before" else (1, ranks)
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return (before, ranks // before) if ranks % before == 0 else (1, ranks)


class Reduction(Protocol):
    """The sum over the micro-batches of a step, of this rank and of all others.

    `mprun.distributed` defines the ranks, and how they exchange tensors.
    """

    # Whether the next backward pass ends with the sum (`begin`): its gradients must not be added.
    overlaps: bool
    shards: bool  # whether each rank gets the sums of its shards alone

    def overlap(self, last: bool) -> None:
        """Announce the next backward pass, the `last` one of a step: set `overlaps` for it."""

    def begin(self, parameters: Sequence[Tensor], sent: Callable[[int, Tensor], Tensor]) -> None:
        """Begin such a pass. `sent`: number of a parameter, and a flat tensor of gradients of its
        kind as backward computes them -> the tensor to sum."""

    def end(self, gradients: list[Tensor | None]) -> None:
        """End such a pass; gradients: those it left in `.grad`."""

    def add(self, tensors: list[Tensor | None]) -> None:
        """Add one loss's gradients, a tensor or None for each parameter; it may write to them."""

    def total(self) -> list[Tensor | None]:
        """Return the sum over all losses of all ranks, bit-equal on each; begin the next sum."""

    def clear(self) -> None:
        """Forget the added gradients."""

    def largest(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks, in the shape and dtype of `values`."""

    def norms(self, gradients: list[Tensor | None]) -> Tensor:
        """Return each whole gradient's L2 norm, as `norms_of`; None for those left out."""

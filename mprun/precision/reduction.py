"""What the gradients of several ranks go through to become one: the dtype of the sum, the division.

M micro-batches of one process are M ranks that take one micro-batch each. Data-parallel training
sums gradients as backward made them, still times the loss scale, and often in 16 bits: torch's
DistributedDataParallel in the dtype of the parameters, its `fp16_compress_hook` whatever they are.
Each addition then rounds. Where the sum is divided decides what it can hold: divided before, small
gradients underflow, and the more ranks the more of them; divided after, large ones overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mprun.precision.loss_scale import LossScale
from mprun.precision.policy import DIVIDE


def factors(ranks: int, divide: str) -> tuple[int, int]:
    """By what gradients are divided before they are summed and after; the product is `ranks`.

    "split": about the square root before, in powers of two, as torch's FSDP divides FP16 gradients
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `_get_gradient_divide_factors`).

    Raises:
        ValueError: another word for `divide`.
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

    Which ranks there are, and how they exchange tensors, is `mprun.distributed`'s.

    Attributes:
        overlaps: whether the next backward pass ends with the sum over all ranks (`begin`), so that
            its gradients are not to be added.
        muted: whether what this rank has is taken for the sum, to see what the sum costs.
    """

    overlaps: bool
    muted: bool

    def begin(self, parameters: Sequence[Tensor], sent: Callable[[int, Tensor], Tensor]) -> None:
        """Such a pass begins. `sent`: number of a parameter, and a flat tensor of gradients of its
        kind as backward makes them -> what is to be summed."""
        ...

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Add what one loss left, a tensor or None for each parameter; it may be written to."""
        ...

    def total(self) -> list[Tensor | None]:
        """The sum over all losses of all ranks, the same bits on each; the next sum begins."""
        ...

    def clear(self) -> None:
        """Forget what was added."""
        ...

    def largest(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the ranks, of the shape and dtype of `values`."""
        ...


class Wire:
    """The sum over M ranks in `dtype`, in the order of the ranks, one addition after the other.

    A ring adds each part of a tensor in an order of its own, which starts at another rank; bits
    differ from these where more than two ranks are added, errors do not.

    Args:
        dtype: of the sum and of what is added.
        ranks: M, the micro-batches of an update.
        divide: see `factors`.
        reduction: sums in place of this, over ranks that are processes.

    Attributes:
        scale: the loss scale that the gradients are times; None: there are none.
        after: what is still to be divided by.
    """

    def __init__(
        self, dtype: torch.dtype, ranks: int, divide: str, reduction: Reduction | None = None
    ):
        self.dtype, self.reduction = dtype, reduction
        self.before, self.after = factors(ranks, divide)
        self.values: list[Tensor | None] = []
        self.scale: LossScale | None = None

    def clear(self) -> None:
        """Forget what was added."""
        self.values, self.scale = [], None
        if self.reduction is not None:
            self.reduction.clear()

    def close(self) -> None:
        """Let `values` be the sum over all ranks."""
        if self.reduction is not None:
            self.values = self.reduction.total()

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], scale: LossScale) -> None:
        """Add those of one rank, scaled and as backward made them; they may be written to.

        Raises:
            RuntimeError: they are times another scale than those before.
        """
        if self.scale not in (None, scale):
            raise RuntimeError("gradients of several loss scales cannot be summed as they are")
        new, self.scale = [self.sent(gradient) for gradient in gradients], scale
        if self.reduction is not None:
            self.reduction.add(new)
            return
        pairs = zip(self.values or [None] * len(new), new, strict=True)
        self.values = [_sum(known, more) for known, more in pairs]

    def sent(self, gradient: Tensor | None) -> Tensor | None:
        """What of it is summed; it may be written to."""
        if gradient is None:
            return None
        gradient = gradient.to(self.dtype)
        return gradient.div_(self.before) if self.before > 1 else gradient


def _sum(known: Tensor | None, more: Tensor | None) -> Tensor | None:
    if known is None or more is None:
        return more if known is None else known
    if not known.is_sparse:
        return known.add_(more)
    # In FP32 and rounded once, which is the same: torch adds up sparse 16-bit tensors on no CPU.
    return (known.float() + more.float()).coalesce().to(known.dtype)

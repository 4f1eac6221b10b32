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

from torch import Tensor

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
    """

    overlaps: bool

    def overlap(self, last: bool) -> bool:
        """Set `overlaps` for the next backward pass, the `last` one of a step; what it is then."""

    def begin(self, parameters: Sequence[Tensor], sent: Callable[[int, Tensor], Tensor]) -> None:
        """Such a pass begins. `sent`: number of a parameter, and a flat tensor of gradients of its
        kind as backward makes them -> what is to be summed."""

    def add(self, tensors: list[Tensor | None]) -> None:
        """Add what one loss left, a tensor or None for each parameter; it may be written to."""

    def total(self) -> list[Tensor | None]:
        """The sum over all losses of all ranks, the same bits on each; the next sum begins."""

    def clear(self) -> None:
        """Forget what was added."""

    def largest(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the ranks, of the shape and dtype of `values`."""

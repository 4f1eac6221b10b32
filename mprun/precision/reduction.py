"""How the gradients of several ranks become one: the dtype of the sum, and the division.

M micro-batches of one process count as M ranks with one micro-batch each. Data-parallel training
sums gradients as backward computed them, still times the loss scale, and often in 16 bits: torch's
DistributedDataParallel in the parameters' dtype, its `fp16_compress_hook` always. Each addition
then rounds. The place of the division limits the sum: divided before, small gradients underflow,
more of them with more ranks; divided after, large ones overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from mprun.precision.policy import DIVIDE


def factors(ranks: int, divide: str) -> tuple[int, int]:
    """Return the divisors of gradients before and after their sum; the product is `ranks`.

    "split": about the square root before, in powers of two, as torch's FSDP divides FP16 gradients
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `_get_gradient_divide_factors`).

    Raises:
        ValueError: `divide` is another word.
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

    Attributes:
        overlaps: whether the next backward pass ends with the sum over all ranks (`begin`), so that
            its gradients must not be added.
    """

    overlaps: bool

    def overlap(self, last: bool) -> bool:
        """Set `overlaps` for the next backward pass, the `last` one of a step; return its value."""

    def begin(self, parameters: Sequence[Tensor], sent: Callable[[int, Tensor], Tensor]) -> None:
        """Begin such a pass. `sent`: number of a parameter, and a flat tensor of gradients of its
        kind as backward computes them -> the tensor to sum."""

    def add(self, tensors: list[Tensor | None]) -> None:
        """Add one loss's gradients, a tensor or None for each parameter; it may write to them."""

    def total(self) -> list[Tensor | None]:
        """Return the sum over all losses of all ranks, bit-equal on each; begin the next sum."""

    def clear(self) -> None:
        """Forget the added gradients."""

    def largest(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks, in the shape and dtype of `values`."""

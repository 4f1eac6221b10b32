"""Reading sequences of different length backwards, in static shapes and with exact gradients."""

from typing import Any

import torch
from torch import Tensor


def reversed_order(padding: Tensor) -> Tensor:
    """Return the positions, int64, from which to read a row so that its words come in reverse.

    padding: bool ``[batch, places]``, true after the words; padding stays in place.
    """
    places = torch.arange(padding.shape[1], device=padding.device)
    return torch.where(padding, places, (~padding).sum(1, keepdim=True) - 1 - places)


def reordered(values: Tensor, order: Tensor) -> Tensor:
    """Reorder ``[places, batch, width]`` by ``[places, batch]``, an order that inverts itself."""
    return _Reordered.apply(values, order)


class _Reordered(torch.autograd.Function):
    """A reordering whose gradient uses the same order; gather's adds in no fixed order on CUDA."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return values.gather(0, order[..., None].expand_as(values))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradient.gather(0, order[..., None].expand_as(gradient)), None

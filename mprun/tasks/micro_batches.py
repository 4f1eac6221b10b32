"""Losses of the micro-batches that make up one step; free where there is only one."""

import torch
from torch import Tensor


def share(loss: Tensor, count: int) -> Tensor:
    """The part of a micro-batch's mean loss in the mean over `count` micro-batches."""
    return loss if count == 1 else loss / count


def mean(losses: list[Tensor]) -> Tensor:
    """The mean of 0-dim losses."""
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

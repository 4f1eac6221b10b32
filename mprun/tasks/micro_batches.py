"""The micro-batches that make up one step, and their losses; free where there is only one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mprun.data.source import Batch, Source


def micro_batches(data: Source, step: int, count: int) -> Iterator[Batch]:
    """The `count` batches of a step (from 0), each read only once the one before it is used."""
    return (data.train_batch(step * count + number) for number in range(count))


def share(loss: Tensor, count: int) -> Tensor:
    """The part of a micro-batch's mean loss in the mean over `count` micro-batches."""
    return loss if count == 1 else loss / count


def mean(losses: list[Tensor]) -> Tensor:
    """The mean of 0-dim losses."""
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

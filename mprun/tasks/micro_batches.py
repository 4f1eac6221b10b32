"""The micro-batches that make up one step, and their losses; free where there is only one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mprun.data.source import Batch, Source


def micro_batches(
    data: Source, step: int, count: int, channels_last: bool = False
) -> Iterator[Batch]:
    """The `count` batches of a step (from 0), each read only once the one before it is used.

    channels_last: with images in NHWC order in memory, as a network in that layout wants them.
    """
    for number in range(count):
        images, labels = data.train_batch(step * count + number)
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        yield images, labels


def share(loss: Tensor, count: int) -> Tensor:
    """The part of a micro-batch's mean loss in the mean over `count` micro-batches."""
    return loss if count == 1 else loss / count


def mean(losses: list[Tensor]) -> Tensor:
    """The mean of 0-dim losses."""
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

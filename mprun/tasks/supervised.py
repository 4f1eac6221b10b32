"""The micro-batches that make up one step, and their losses; free where there is only one.

Cross-entropy of logits in a dtype of its own.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.data.source import Batch, Source


def micro_batches(
    data: Source,
    step: int,
    count: int,
    channels_last: bool = False,
    cast: Callable[..., Tensor] = Tensor.contiguous,
) -> Iterator[Batch]:
    """The `count` batches of a step (from 0), each read only once the one before it is used.

    channels_last: with images in NHWC order in memory, as a network in that layout wants them.
    cast: (images, memory_format=...) -> the images as the step wants them. A batch belongs to the
    caller alone, and the source's FP32 images are released where they were cast: in a mode with
    16-bit parameters they would be as large as twice what backward keeps of them.
    """
    for number in range(count):
        yield _laid_out(data.train_batch(step * count + number), channels_last, cast)


def _laid_out(batch: Batch, channels_last: bool, cast: Callable[..., Tensor]) -> Batch:
    images, labels = batch
    # Images of one channel are in NHWC order as they are: other strides are another convolution.
    moves = channels_last and not images.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if moves else torch.preserve_format
    return cast(images, memory_format=memory_format), labels


def share(loss: Tensor, count: int) -> Tensor:
    """The part of a micro-batch's mean loss in the mean over `count` micro-batches."""
    return loss if count == 1 else loss / count


def mean(losses: list[Tensor]) -> Tensor:
    """The mean of 0-dim losses."""
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


def cross_entropy(
    logits: Tensor, labels: Tensor, dtype: torch.dtype, label_smoothing: float = 0.0
) -> Tensor:
    """Mean over [n, classes] logits, computed in `dtype`: the bits of casting the logits first.

    CUDA's softmax reads FP16 and computes in FP32, and its backward writes FP16: neither the
    logits nor their gradient exist in FP32, which for a large vocabulary is most of the memory.
    """
    if label_smoothing:
        return F.cross_entropy(logits.to(dtype), labels, label_smoothing=label_smoothing)
    return F.nll_loss(F.log_softmax(logits, 1, dtype=dtype), labels)

"""What every data source offers; tasks and the loop rely on nothing else."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

Batch = tuple[Tensor, Tensor]


class Source(Protocol):
    """Batches by number: ``(images, labels)`` or ``(tokens, targets)`` on the source's device.

    ``train_batch(index)`` counts batches over the whole run, so that the epoch is
    ``index // batches_per_epoch``; what it returns depends on the seed and the index alone, never
    on earlier calls, worker counts or global random state. ``eval_batches()`` walks the held-out
    split in a fixed order. ``sha256`` (hex) stands for the content; ``description`` holds plain
    values for the record, among them ``name``, ``train_samples`` and ``eval_samples``.

    Image sources also have ``num_classes``, text sources ``vocab_size``. Sources that read ahead
    also have ``close()`` (ends loader processes; a closed source can be asked again) and
    ``defer_wait()``: a function that returns the seconds that the device waited for the training
    batches handed out since the last call, to be called once the device has used them.
    """

    batches_per_epoch: int
    samples_per_batch: int
    sha256: str
    description: dict[str, str | int | float]

    def train_batch(self, index: int) -> Batch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        ...

    def eval_batches(self) -> Iterator[Batch]:
        """The held-out split in a fixed order; the last batch may be smaller."""
        ...

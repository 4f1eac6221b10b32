"""What every data source offers; tasks and the loop rely on nothing else.

What a source raises when the data themselves are at fault.

The order of samples, as a pure function of seed and epoch.

Random state of one sample: set from what it is, not from what was drawn before it.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mprun.errors import Damaged

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


class DataError(ValueError):
    """Data are missing or too few for the batch asked for."""


class DamagedData(Damaged, DataError):
    """A file that cannot be used as it is; the message names it. Ends a run with exit code 4."""


def permutation(seed: int, epoch: int, n: int) -> Tensor:
    """A permutation of 0 ... n-1, int64 ``[n]`` on the CPU, the same on every machine.

    Sorts n keys of a PCG64 stream keyed by (seed, epoch). NumPy guarantees the streams of its bit
    generators across releases, but not what its ``permutation`` makes of them (NEP 19); torch
    guarantees neither. Costs about 0.1 s for a million samples, once an epoch.

    Raises ``ValueError`` if an argument is negative.
    """
    keys = _stream(seed, epoch).random_raw(n)
    return torch.from_numpy(np.argsort(keys, kind="stable"))


def rotation(seed: int, epoch: int, n: int) -> int:
    """A start in 0 ... n-1, a pure function of (seed, epoch)."""
    return int(_stream(seed, epoch).random_raw()) % n


def _stream(seed: int, epoch: int) -> np.random.PCG64:
    if seed < 0:
        raise ValueError(f"seed={seed} is not allowed: 0 or more")
    if epoch < 0:
        raise ValueError(f"epoch={epoch} is not allowed: 0 or more")
    return np.random.PCG64(np.random.SeedSequence([seed, epoch]))


class EpochOrder:
    """Which samples each training batch holds: a fresh permutation per epoch, tail dropped.

    ``batches_per_epoch`` is ``n // batch_size``. Holds one epoch's permutation on ``device``, so a
    batch costs a slice; it is computed again whenever another epoch is asked for.
    """

    def __init__(self, seed: int, n: int, batch_size: int, device: torch.device) -> None:
        if not 1 <= batch_size <= n:
            raise ValueError(
                f"batch_size={batch_size} is not allowed: 1 to {n}, the size of the training split"
            )
        if seed < 0:
            raise ValueError(f"seed={seed} is not allowed: 0 or more")
        self.batches_per_epoch = n // batch_size
        self._seed, self._n, self._batch_size, self._device = seed, n, batch_size, device
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64, device=device)

    def indices(self, index: int) -> Tensor:
        """Sample numbers of batch ``index`` of the run, int64 ``[batch_size]`` on the device."""
        epoch, batch = divmod(checked_index(index), self.batches_per_epoch)
        if epoch != self._epoch:
            order = permutation(self._seed, epoch, self._n)
            if self._device.type == "cuda":
                # From pinned memory the copy makes the host wait for nothing.
                order = order.pin_memory()
            self._order = order.to(self._device, non_blocking=True)
            self._epoch = epoch
        start = batch * self._batch_size
        return self._order[start : start + self._batch_size]


def checked_index(index: int) -> int:
    """``index``, or ``ValueError`` if it is negative."""
    if index < 0:
        raise ValueError(f"index={index} is not allowed: 0 or more")
    return index


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Afterwards Python's, NumPy's and torch's global CPU generators are as they were before."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def seed_sample(*key: int) -> None:
    """Seed Python's, NumPy's and torch's global CPU generators as a pure function of `key`.

    Keys are integers >= 0, hashed by NumPy's SeedSequence, whose output NumPy guarantees across
    releases (NEP 19). GPU generators are left alone. Costs about 20 us.
    """
    words = np.random.SeedSequence(key).generate_state(6)
    np.random.seed(words[:2])
    random.seed(int(words[2]) << 32 | int(words[3]))
    # Not torch.manual_seed, which would seed every GPU as well.
    torch.default_generator.manual_seed(int(words[4] >> 1) << 32 | int(words[5]))

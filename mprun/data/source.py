"""What every data source offers, and the order and the chances of its samples.

Tasks and the loop rely on `Source` and on nothing else. `Reader` is what a source has that reads
its samples on the way: batches on the CPU by number, in any process. The order of samples is a pure
function of seed and epoch; random state of one sample is set from what the sample is, not from what
was drawn before it.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from mprun.errors import Damaged

Batch = tuple[Tensor, Tensor]
# Text, whole numbers and others, as run.json records them.
Description = dict[str, str | int | float]


class Source(Protocol):
    """Batches by number: ``(images, labels)`` or ``(tokens, targets)`` on the source's device.

    ``train_batch(index)`` counts batches over the whole run, so that the epoch is
    ``index // batches_per_epoch``; what it returns depends on the seed and the index alone, never
    on earlier calls, worker counts or global random state. Image sources also have ``num_classes``,
    text sources ``vocab_size``. What only sources that read ahead have to say has a default here,
    for the others to inherit.

    Attributes:
        batches_per_epoch: Training batches; the tail that fills none is dropped.
        samples_per_batch: Images or tokens of a training batch.
        sha256: Stands for the content, hex.
        description: Plain values for the record, among them ``name``, ``train_samples`` and
            ``eval_samples``.
        workers: Processes that read ahead for training; None where nothing is read on the way.
        defer_wait: Returns a function that tells the seconds that the device waited for the
            training batches handed out since the last call, to be called once the device has used
            them; None where there is nothing to wait for.
    """

    batches_per_epoch: int
    samples_per_batch: int
    sha256: str
    description: Description
    workers: int | None = None
    defer_wait: Callable[[], Callable[[], float]] | None = None

    def train_batch(self, index: int) -> Batch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        ...

    def eval_batches(self) -> Iterator[Batch]:
        """The held-out split in a fixed order; the last batch may be smaller."""
        ...

    def share_out(self, own: range, parts: int, rank: int, world: int) -> None:
        """From now on only batches ``n`` with ``n % parts`` in ``own`` are asked for in training,
        and, if anything, ``eval_share`` of this rank: what reads ahead reads those."""
        return

    def eval_share(self, rank: int, world: int) -> Iterator[Batch]:
        """Batch ``rank`` of ``eval_batches()`` and every ``world``-th after it."""
        return islice(self.eval_batches(), rank, None, world)

    def replaced_files(self) -> dict[str, str] | None:
        """Files that could not be used and were replaced so far, place in the split -> name.

        None where such a file ends the run.
        """
        return None

    def close(self) -> None:
        """End loader processes; a closed source can be asked again."""
        return


def completed(source: Any) -> Source:
    """The user's own source, with the defaults of what it leaves out."""
    names = ("workers", "defer_wait", "share_out", "eval_share", "replaced_files", "close")
    whole = all(hasattr(source, name) for name in names)
    return source if whole else cast(Source, _Completed(source))


class _Completed:
    def __init__(self, source: Any) -> None:
        self._source = source
        self.workers = getattr(source, "workers", None)
        self.defer_wait = getattr(source, "defer_wait", None)
        self.replaced_files = getattr(source, "replaced_files", lambda: None)
        self.close = getattr(source, "close", lambda: None)

    def share_out(self, own: range, parts: int, rank: int, world: int) -> None:
        pass

    def eval_share(self, rank: int, world: int) -> Iterator[Batch]:
        return islice(self._source.eval_batches(), rank, None, world)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


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


class ReadBatch(NamedTuple):
    """A batch on the CPU.

    Attributes:
        images: ``[batch, ...]``, as the reader makes them.
        labels: int64 ``[batch]``; of images with boxes float32 ``[batch, most, 6]``.
        replaced: Number in the split of each sample that could not be used, in whose place others
            are here, and what messages call it.
    """

    images: Tensor
    labels: Tensor
    replaced: dict[int, str]


class Reader(ABC):
    """Batches of a split of ``samples``, a pure function of the split, ``seed`` and the number.

    With a ``seed``: training batches, in the order of ``EpochOrder``, number counting over all
    epochs. Without: the split in its own order, ``len(reader)`` batches, the last one may be
    smaller. ``where``: the split's name or folder, for messages. ``most_replaced`` is how many
    different samples may be replaced.
    """

    most_replaced = 0

    def __init__(self, samples: int, where: str, batch_size: int, seed: int | None) -> None:
        self.batch_size, self.samples, self.where = batch_size, samples, where
        cpu = torch.device("cpu")
        self._order = None if seed is None else EpochOrder(seed, samples, batch_size, cpu)

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self._order is not None:
            return self._order.batches_per_epoch
        return -(-self.samples // self.batch_size)

    def places(self, number: int) -> list[int]:
        """Which samples batch ``number`` holds; ``ValueError`` for a number out of range."""
        if self._order is not None:
            return self._order.indices(number).tolist()
        start = checked_index(number) * self.batch_size
        if start >= self.samples:
            raise ValueError(f"index={number} is not allowed: below {len(self)}")
        return list(range(start, min(start + self.batch_size, self.samples)))

    @abstractmethod
    def read(self, number: int, *, shared: bool = False) -> ReadBatch:
        """Batch ``number``; ``shared``: in shared memory, from where it can be sent for free.

        Raises ``ValueError`` for a number out of range, ``DamagedData`` naming a sample.
        """


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

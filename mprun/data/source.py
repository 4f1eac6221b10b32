"""The interface of data sources, and the order and the random states of their samples.

Tasks and the loop rely on `Source` alone. A source that reads its samples during training has a
`Reader`, which gives batches on the CPU by number, in any process. The order of samples is a pure
function of seed and epoch. A sample's random state is set from its identity, not from earlier
draws.
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
# Text and numbers, as run.json records them.
Description = dict[str, str | int | float]


class Source(Protocol):
    """Batches by number: ``(images, labels)`` or ``(tokens, targets)`` on the source's device.

    ``train_batch(index)`` counts batches over the whole run, so that the epoch is
    ``index // batches_per_epoch``. Its result depends on the seed and the index alone, never on
    earlier calls, worker counts or global random state. Image sources also have ``num_classes``,
    text sources ``vocab_size``. Members that matter only to sources that read ahead have defaults
    here, for the others to inherit.

    Attributes:
        batches_per_epoch: Training batches; the tail that fills none is dropped.
        samples_per_batch: Images or tokens of a training batch.
        sha256: Hash of the content, hex.
        description: Plain values for the record, among them ``name``, ``train_samples`` and
            ``eval_samples``.
        workers: Processes that read ahead for training; None: the source does not read ahead.
        defer_wait: Returns a function for the seconds that the device waited for the training
            batches handed out since the last call. Call that function once the device has used
            them. None: there is nothing to wait for.
    """

    batches_per_epoch: int
    samples_per_batch: int
    sha256: str
    description: Description
    workers: int | None = None
    defer_wait: Callable[[], Callable[[], float]] | None = None

    def train_batch(self, index: int) -> Batch:
        """Return batch ``index`` of the run; raise ``ValueError`` if it is negative."""
        ...

    def eval_batches(self) -> Iterator[Batch]:
        """Yield the held-out split in a fixed order; the last batch may be smaller."""
        ...

    def share_out(self, own: range, parts: int, rank: int, world: int) -> None:
        """Restrict reading ahead to the batches of one rank.

        From now on training only requests batches ``n`` with ``n % parts`` in ``own``, and
        evaluation only ``eval_share`` of this rank.
        """
        return

    def eval_share(self, rank: int, world: int) -> Iterator[Batch]:
        """Yield batch ``rank`` of ``eval_batches()`` and every ``world``-th after it."""
        return islice(self.eval_batches(), rank, None, world)

    def replaced_files(self) -> dict[str, str] | None:
        """Return the unusable files replaced so far, place in the split -> name.

        None: such a file ends the run.
        """
        return None

    def close(self) -> None:
        """End loader processes; a closed source can be asked again."""
        return


def completed(source: Any) -> Source:
    """Return the user's source, with defaults for the members that it lacks."""
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
    """Data are missing or too few for the requested batch."""


class DamagedData(Damaged, DataError):
    """A file cannot be used; the message names it. Ends a run with exit code 4."""


def permutation(seed: int, epoch: int, n: int) -> Tensor:
    """Return a permutation of 0 ... n-1, int64 ``[n]`` on the CPU, the same on every machine.

    It sorts n keys of a PCG64 stream keyed by (seed, epoch). NumPy guarantees the streams of its
    bit generators across releases, but not its ``permutation`` (NEP 19); torch guarantees neither.
    Costs about 0.1 s for a million samples, once an epoch.

    Raises:
        ValueError: An argument is negative.
    """
    keys = _stream(seed, epoch).random_raw(n)
    return torch.from_numpy(np.argsort(keys, kind="stable"))


def rotation(seed: int, epoch: int, n: int) -> int:
    """Return a start in 0 ... n-1, a pure function of (seed, epoch)."""
    return int(_stream(seed, epoch).random_raw()) % n


def _stream(seed: int, epoch: int) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence([seed, epoch]))


class EpochOrder:
    """The samples of each training batch: a fresh permutation per epoch, tail dropped.

    ``batches_per_epoch`` is ``n // batch_size``. One epoch's permutation is kept on ``device``, so
    that a batch costs a slice; another epoch computes it again.
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
        """Return the samples of the run's batch ``index``, int64 ``[batch_size]`` on the device."""
        epoch, batch = divmod(checked_index(index), self.batches_per_epoch)
        if epoch != self._epoch:
            order = permutation(self._seed, epoch, self._n)
            if self._device.type == "cuda":
                # From pinned memory the copy does not make the host wait.
                order = order.pin_memory()
            self._order = order.to(self._device, non_blocking=True)
            self._epoch = epoch
        start = batch * self._batch_size
        return self._order[start : start + self._batch_size]


class ReadBatch(NamedTuple):
    """A batch on the CPU.

    Attributes:
        images: ``[batch, ...]``, as the reader makes them.
        labels: int64 ``[batch]``; for images with boxes float32 ``[batch, most, 6]``.
        replaced: Number in the split -> name in messages, for each unusable sample that another
            one replaces here.
    """

    images: Tensor
    labels: Tensor
    replaced: dict[int, str]


class Reader(ABC):
    """Batches of a split of ``samples``, a pure function of the split, ``seed`` and the number.

    With a ``seed`` they are training batches in the order of ``EpochOrder``, and numbers count over
    all epochs. Without one they are the split in its own order, ``len(reader)`` batches, the last
    one maybe smaller. ``where``: the split's name or folder, for messages. ``most_replaced`` limits
    how many different samples may be replaced.
    """

    most_replaced = 0

    def __init__(self, samples: int, where: str, batch_size: int, seed: int | None) -> None:
        self.batch_size, self.samples, self.where = batch_size, samples, where
        cpu = torch.device("cpu")
        self._order = None if seed is None else EpochOrder(seed, samples, batch_size, cpu)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        if self._order is not None:
            return self._order.batches_per_epoch
        return -(-self.samples // self.batch_size)

    def places(self, number: int) -> list[int]:
        """Return the samples of batch ``number``; raise ``ValueError`` if it is out of range."""
        if self._order is not None:
            return self._order.indices(number).tolist()
        start = checked_index(number) * self.batch_size
        if start >= self.samples:
            raise ValueError(f"index={number} is not allowed: below {len(self)}")
        return list(range(start, min(start + self.batch_size, self.samples)))

    @abstractmethod
    def read(self, number: int, *, shared: bool = False) -> ReadBatch:
        """Read batch ``number``; ``shared``: into shared memory, which is free to send.

        Raises:
            ValueError: The number is out of range.
            DamagedData: A sample cannot be used; the message names it.
        """


def checked_index(index: int) -> int:
    """Return ``index``; raise ``ValueError`` if it is negative."""
    if index < 0:
        raise ValueError(f"index={index} is not allowed: 0 or more")
    return index


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global CPU generators at the end."""
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

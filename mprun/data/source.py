"""The interface of data sources, and the order and the random states of their samples.

Tasks and the loop rely on `Source` alone. The order of samples is a pure function of seed and
epoch, and a sample's random state one of its identity.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from mprun.errors import Damaged

Batch = tuple[Tensor, Tensor]
Description = dict[str, str | int | float]  # as run.json records it


class Source(Protocol):
    """Batches by number: ``(images, labels)`` or ``(tokens, targets)`` on the source's device.

    ``train_batch(index)`` counts batches over the whole run, so that the epoch is
    ``index // batches_per_epoch``. Its result depends on the seed and the index alone, never on
    earlier calls, worker counts or global random state. Image sources also have ``num_classes``,
    text sources ``vocab_size``. Members with defaults here matter to sources that read ahead.

    Attributes:
        description: For the record, with ``name``, ``train_samples`` and ``eval_samples``.
        defer_wait: Returns a function for the seconds that the device waited for the training
            batches handed out since the last call. Call that function once the device has used
            them. None: there is nothing to wait for.

    Raises:
        ValueError: An argument is out of range, such as a batch larger than the training split; the
            message begins with its name.
        DataError: Data are missing or too few, or the cache cannot be written.
        DamagedData: A file cannot be used, when it is listed or when it is read; it is named.
        Resource: A loader process is lost or stalled, or the disk is full.
    """

    batches_per_epoch: int  # the tail that fills none is dropped
    samples_per_batch: int  # images or tokens of a training batch
    sha256: str  # of the content, hex
    description: Description
    workers: int | None = None  # processes that read ahead; None: it does not read ahead
    defer_wait: Callable[[], Callable[[], float]] | None = None

    def train_batch(self, index: int) -> Batch:
        """Return batch ``index`` of the run; raise ``ValueError`` if it is negative."""

    def eval_batches(self) -> Iterator[Batch]:
        """Yield the held-out split in a fixed order; the last batch may be smaller."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What every source is told: the size of a batch, the seed of their order, where they go.

    Sources that read during training have ``workers`` processes, None for as many as pay off, each
    with ``prefetch`` batches in flight.
    """

    batch_size: int
    seed: int
    device: torch.device
    workers: int | None = None
    prefetch: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", torch.device(self.device))


def completed(source: Any) -> Source:
    """Return the user's source, with defaults for the members that it lacks."""
    whole = all(hasattr(source, name) for name in vars(Source) if not name.startswith("_"))
    return source if whole else cast(Source, _Completed(source))


class _Completed:
    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._source, name) or not hasattr(Source, name):
            return getattr(self._source, name)
        default = getattr(Source, name)
        return MethodType(default, self) if callable(default) else default


class DataError(ValueError):
    """Data are missing or too few for the requested batch."""


class DamagedData(Damaged, DataError):
    """A file cannot be used; the message names it. Ends a run with exit code 4."""


@contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Let an ``OSError`` become ``DamagedData``: ``what``, then the system's reason."""
    try:
        yield
    except OSError as error:
        raise DamagedData(f"{what}: {error.strerror}") from error


def permutation(seed: int, epoch: int, n: int) -> Tensor:
    """Return a permutation of 0 ... n-1, int64 ``[n]`` on the CPU, the same on every machine.

    It sorts n keys of a PCG64 stream keyed by (seed, epoch); a negative one raises ``ValueError``.
    NumPy guarantees the streams of its bit generators across releases, but not its ``permutation``
    (NEP 19); torch guarantees neither. Costs about 0.1 s for a million samples, once an epoch.
    """
    keys = stream(seed, epoch).random_raw(n)
    return torch.from_numpy(np.argsort(keys, kind="stable"))


def rotation(seed: int, epoch: int, n: int) -> int:
    """Return a start in 0 ... n-1, a pure function of (seed, epoch)."""
    return int(stream(seed, epoch).random_raw()) % n


def stream(*key: int) -> np.random.PCG64:
    """Return the random bits of ``key``, integers of 0 or more."""
    return np.random.PCG64(np.random.SeedSequence(key))


class EpochOrder:
    """The samples of each training batch: a fresh permutation per epoch, tail dropped.

    One epoch's permutation is kept on ``device``, so that a batch costs a slice.
    """

    def __init__(self, seed: int, n: int, batch_size: int, device: torch.device) -> None:
        if not 1 <= batch_size <= n:
            raise ValueError(
                f"batch_size={batch_size} is not allowed: must be 1 to {n}, the number of "
                "training samples"
            )
        at_least(0, seed=seed)
        self.batches_per_epoch = n // batch_size
        self._seed, self._n, self._batch_size, self._device = seed, n, batch_size, device
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64, device=device)

    def indices(self, index: int) -> Tensor:
        """Return the samples of the run's batch ``index``, int64 ``[batch_size]`` on the device."""
        at_least(0, index=index)
        epoch, batch = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            self._order = sent(permutation(self._seed, epoch, self._n), self._device)
            self._epoch = epoch
        start = batch * self._batch_size
        return self._order[start : start + self._batch_size]


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU to ``device``; from pinned memory, so that the host does not wait."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


class ReadBatch(NamedTuple):
    """A batch on the CPU, with the names of unusable samples that others replace in it."""

    images: Tensor  # [batch, ...], as the reader makes them
    labels: Tensor  # int64 [batch]; for images with boxes float32 [batch, most, 6]
    replaced: dict[int, str]  # number in the split -> name in messages


class Reader(ABC):
    """Batches of a split by number, on the CPU, in any process.

    With a ``seed`` they are training batches in the order of ``EpochOrder``, and numbers count over
    all epochs. Without one they are the split in its own order, the last one maybe smaller.
    ``where`` names the split or its folder in messages.
    """

    most_replaced = 0  # different samples of the split

    def __init__(self, samples: int, where: str, batch_size: int, seed: int | None) -> None:
        self.batch_size, self.samples, self.where = batch_size, samples, where
        cpu = torch.device("cpu")
        self._order = None if seed is None else EpochOrder(seed, samples, batch_size, cpu)

    def __len__(self) -> int:  # batches of an epoch
        if self._order is not None:
            return self._order.batches_per_epoch
        return -(-self.samples // self.batch_size)

    def places(self, number: int) -> list[int]:
        """Return the samples of batch ``number``; raise ``ValueError`` if it is out of range."""
        if self._order is not None:
            return self._order.indices(number).tolist()
        at_least(0, index=number)
        start = number * self.batch_size
        if start >= self.samples:
            raise ValueError(f"index={number} is not allowed: must be below {len(self)}")
        return list(range(start, min(start + self.batch_size, self.samples)))

    @abstractmethod
    def read(self, number: int) -> ReadBatch:
        """Read batch ``number``; raise ``DamagedData`` naming an unusable sample.

        A number out of range raises ``ValueError``.
        """


def at_least(least: int, **values: int) -> None:
    """Raise ``ValueError`` that names the first of ``values`` below ``least``."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}={value} is not allowed: must be {least} or more")


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

    Keys are integers >= 0, hashed by NumPy's SeedSequence, which NumPy keeps across releases (NEP
    19). GPU generators are left alone. Costs about 20 us.
    """
    words = np.random.SeedSequence(key).generate_state(6)
    np.random.seed(words[:2])
    random.seed(int(words[2]) << 32 | int(words[3]))
    # Not torch.manual_seed, which would seed every GPU as well.
    torch.default_generator.manual_seed(int(words[4] >> 1) << 32 | int(words[5]))

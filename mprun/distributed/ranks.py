"""A rank's share of an update, and the exchanges between the ranks.

An update takes M micro-batches (`train.accumulate`), numbered 0 ... M-1 in every run. Each of W
ranks takes M/W consecutive ones. A language model with a state divides its streams among the ranks
instead, because a stream has to be read in order. The samples and the random numbers of a
micro-batch depend on its number, not on the rank. The same configuration is therefore the same run
on any number of ranks that divides M.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mprun.data.source import seed_sample
from mprun.distributed.rank_info import launched_by
from mprun.precision.random_states import restore_dropout_state

T = TypeVar("T")


class Ranks:
    """The only rank of a run on one process, and the base of a rank among several.

    All ranks must call the methods that exchange something in the same order.
    """

    rank: int = 0  # 0 ... world-1
    world: int = 1  # number of ranks, W
    tensors: Any = None  # torch's process group, for tensors on the device

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes the records."""
        return self.rank == 0

    def micro_batches(self, count: int) -> range:
        """Return which of an update's `count` micro-batches this rank takes; W must divide it."""
        if count % self.world:
            raise ValueError(f"{self.world} ranks cannot divide {count} micro-batches evenly")
        own = count // self.world
        return range(self.rank * own, (self.rank + 1) * own)

    def streams(self, count: int) -> slice:
        """Return which of the `count` streams (columns of a batch of tokens) this rank reads."""
        own = self.micro_batches(count)
        return slice(own.start, own.stop)

    def gather(self, own: Tensor) -> Tensor:
        """Concatenate `[n, ...]` of each rank to `[W * n, ...]`, in the order of ranks."""
        return own

    def largest(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks."""
        return values

    def all_of(self, own: T) -> list[T]:
        """Return every rank's value, in the order of ranks; plain values alone."""
        return [own]

    def mean(self, rows: Sequence[Tensor], count: int) -> list[float]:
        """Return the mean over the held-out samples of all ranks, the same on each.

        It adds in the order of batches and waits for the device. rows: sums over each of this
        rank's held-out batches, float64 `[n]`. count: samples in them.
        """
        return (sum(rows[1:], rows[0]) / count).tolist()

    def in_order(self, batches: Sequence[Tensor]) -> Tensor:
        """Concatenate the held-out batches `[n, ...]` of all ranks to `[N, ...]`, in order."""
        return torch.cat(list(batches))

    def first(self, value: T) -> T:
        """Return rank 0's value; plain values alone."""
        return value

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; a failure on one rank is one on all."""
        return work()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Enclose code that may fail on one rank: the ranks tell each other of a failure."""
        yield

    def found(self, directory: Path) -> None:
        """Tell the launcher the run's directory."""

    @property
    def launched_by(self) -> list[str]:
        """Return by which torchrun the ranks were started, as each machine names it; or []."""
        own = launched_by()
        return [] if own is None else [own]

    def description(self) -> dict[str, Any]:
        """Return plain values for run.json: the ranks' backend and their hosts."""
        return {}

    def ends_by(self, tell: Callable[[str, int], None]) -> None:
        """Call `tell` with cause and exit code if the process ends while its main thread waits."""

    def stops(self, signal_number: int) -> int:
        """Return the signal that any rank was sent, 0: none."""
        return signal_number

    def check_equal(self, state: Callable[[], Sequence[int]], step: int) -> None:
        """Check that `state`, not called by a single rank, is the same on all after `step`."""

    def leave(self, code: int) -> None:
        """End the exchange; the run has ended with this exit code."""


ALONE = Ranks()


def seed_micro_batch(device: torch.device, *key: int) -> None:
    """Seed every generator as a pure function of `key`: seed, step, number of the micro-batch.

    It does not wait for the device and costs about 30 us. It does nothing during the capture of a
    CUDA graph, which has one seed: steps that draw in several micro-batches are not captured.
    """
    index: int | Any = device.index  # None for "cuda", which torch's stub does not know
    if device.type == "cuda":
        index = torch.cuda.current_device() if index is None else index
        if torch.cuda.is_current_stream_capturing():
            return
    seed_sample(*key)
    if device.type == "cuda":
        torch.cuda.default_generators[index].manual_seed(torch.default_generator.initial_seed())
        restore_dropout_state(None, device)

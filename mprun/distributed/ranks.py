"""What a rank does of an update, and what the ranks tell each other.

An update takes M micro-batches (`train.accumulate`), numbered 0 ... M-1 in every run. Of W ranks
each takes M/W consecutive ones; a language model's streams are shared out instead, since a stream
has to be read in order. Which samples a micro-batch holds and what is drawn at random in it depend
on its number and not on the rank, so that the same configuration is the same run on any number of
ranks that divides M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mprun.data.source import seed_sample
from mprun.precision.random_states import restore_dropout_state

T = TypeVar("T")


class Ranks:
    """The one rank of a run on one process, and what a rank of several has in common with it.

    Every method that exchanges something is called by all ranks in the same order.

    Attributes:
        rank: 0 ... world-1.
        world: number of ranks, W.
    """

    rank: int = 0
    world: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the records."""
        return self.rank == 0

    def micro_batches(self, count: int) -> range:
        """Which of the `count` micro-batches of an update this rank takes.

        Raises:
            ValueError: the ranks do not divide them.
        """
        if count % self.world:
            raise ValueError(f"{self.world} ranks do not divide {count} micro-batches")
        own = count // self.world
        return range(self.rank * own, (self.rank + 1) * own)

    def streams(self, count: int) -> slice:
        """Which of the `count` streams (columns of a batch of tokens) this rank reads."""
        own = self.micro_batches(count)
        return slice(own.start, own.stop)

    def gather(self, own: Tensor) -> Tensor:
        """`[n, ...]` of each rank as `[W * n, ...]`, in the order of ranks."""
        return own

    def mean(self, rows: Sequence[Tensor], count: int) -> list[float]:
        """What this rank's held-out batches came to, float64 `[n]` each, and their samples: on all
        ranks the sum in the order of batches over the number of all. Waits for the device."""
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return (total / count).tolist()

    def in_order(self, batches: Sequence[Tensor]) -> Tensor:
        """Of held-out batches `[n, ...]` of this rank and of the others all samples, in the order
        of batches: `[N, ...]`. Where there are several ranks it waits for the device."""
        return torch.cat(list(batches))

    def first(self, value: T) -> T:
        """The value that rank 0 has; plain values alone."""
        return value

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns; where it fails on one rank it fails on all."""
        return work()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around what one rank may fail in: the others hear of it, and it of theirs."""
        yield

    def found(self, directory: Path) -> None:
        """Let who looks after the ranks know the run's directory."""

    def description(self) -> dict[str, Any]:
        """Plain values for run.json: how the ranks exchange, and where they are."""
        return {}

    def beat(self, step: int) -> None:
        """Say that this rank has come to `step`."""

    def stops(self, signal_number: int) -> int:
        """The signal that any rank was sent, 0: none."""
        return signal_number

    def check_equal(self, state: Callable[[], Sequence[int]], step: int) -> None:
        """What has to be the same on all ranks after `step`: plain numbers, computed if asked."""

    def leave(self, code: int) -> None:
        """The run has ended with this exit code."""


ALONE = Ranks()


def seed_micro_batch(device: torch.device, *key: int) -> None:
    """Seed every generator as a pure function of `key`: seed, step, number of the micro-batch.

    Nothing waits for the device. Costs about 30 us. Nothing is done while a CUDA graph is captured,
    which has one seed: what draws in several micro-batches is not captured.
    """
    index: int | Any = device.index  # None of "cuda", which torch's stub does not know
    if device.type == "cuda":
        index = torch.cuda.current_device() if index is None else index
        if torch.cuda.is_current_stream_capturing():
            return
    seed_sample(*key)
    if device.type == "cuda":
        torch.cuda.default_generators[index].manual_seed(torch.default_generator.initial_seed())
        restore_dropout_state(None, device)

"""The ranks of a run on several processes, over torch.distributed: NCCL on CUDA, gloo on a CPU.

There are two groups. Gradients, losses and statistics are on the device and go through the first.
The hosts' questions (stop or not, which folder, who failed) go through gloo, in parallel with the
device's work. A store that every rank stays connected to holds what must survive a lost rank: why a
rank failed, and when each was last heard.
"""

import faulthandler
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mprun import errors
from mprun.distributed.rank_info import RankInfo
from mprun.distributed.ranks import Ranks
from mprun.distributed.store import (
    LOST,
    START_S,
    fail,
    failure_of,
    late_ranks,
    leave,
    named,
    store_of,
)
from mprun.distributed.watch import AFTER_GLOO_S, AFTER_WATCH_S, Watch, kill_stopped, no_answer
from mprun.errors import BadInput, MprunError, RankFailed, Resource, shortened
from mprun.record.memory import ran_out
from mprun.torch_private import exchanges_begun

T = TypeVar("T")

# Words of the RuntimeErrors that torch.distributed's libraries raise for a lost or waiting rank.
_OF_OTHERS = (
    *("gloo", "nccl", "tcpstore", "connection", "socket"),
    *("timed out", "timeout", "watchdog"),
)
_TO_LEAVE_S = 10.0  # for NCCL to take down what connects the ranks


class RankGroup(Ranks):
    """This process as one of several ranks, which waits `timeout_s` for the others.

    Raises BadInput if this machine has too few GPUs, Resource if the ranks do not meet.
    """

    def __init__(self, rank_info: RankInfo, device: torch.device, timeout_s: float):
        assert rank_info.rank is not None
        self.rank, self.world, self.device = rank_info.rank, rank_info.world, device
        if device.type == "cuda":
            self.device_name = _chosen_gpu(rank_info)
        self.timeout_s = timeout_s
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.serves = self.rank == 0 and not rank_info.served
        self.whole_store = store_of(rank_info, self.serves)
        self.store = dist.PrefixStore(f"mprun/{attempt}", self.whole_store)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        start, wait = timedelta(seconds=START_S), timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(
                "gloo", store=self.store, rank=self.rank, world_size=self.world, timeout=start
            )
            self.host: Any = dist.new_group(backend="gloo", timeout=wait)
            if self.backend == "nccl":
                wait += timedelta(seconds=AFTER_GLOO_S + AFTER_WATCH_S)
            self.tensors = dist.new_group(backend=self.backend, timeout=wait)
            # A connection of its own: another one may be in use, for as long as it waits.
            own = dist.PrefixStore(f"mprun/{attempt}", self.whole_store.clone())
            self.watch = Watch(own, self.rank, self.world, timeout_s, self._begun)
            told = self.all_of((socket.gethostname(), super().launched_by))
        except (RuntimeError, OSError) as error:
            raise self.explained(error) from error
        self.all_hosts = [host for host, _ in told]
        self._launched_by = sorted({name for _, names in told for name in names})
        self._stop: tuple[Tensor, Any] | None = None
        if device.type == "cuda":
            self._check_gpus()

    def _begun(self) -> int:
        return exchanges_begun(self.host) + exchanges_begun(self.tensors)

    def _check_gpus(self) -> None:
        """Raise BadInput if two ranks have one GPU, which NCCL refuses later and in many words."""
        gpus = list(zip(self.all_hosts, self.all_of(self.device_name), strict=True))
        for rank, gpu in enumerate(gpus):
            if (first := gpus.index(gpu)) != rank:
                raise BadInput(
                    f"devices={self.world // len(set(self.all_hosts))}: ranks {first} and {rank} "
                    f"have the same GPU of {gpu[0]} ({gpu[1]}); each rank needs its own"
                )

    # Exchanges between the devices, for a step.

    def gather(self, own: Tensor) -> Tensor:
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(parts, own, self.tensors)
        return torch.cat(parts)

    def mean(self, rows: Sequence[Tensor], count: int) -> list[float]:
        return super().mean(self._all(rows, torch.float64), sum(self.all_of(count)))

    def in_order(self, batches: Sequence[Tensor]) -> Tensor:
        return super().in_order(self._all(batches, torch.float32))

    def _all(self, batches: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return the held-out batches of all ranks, which take every W-th; the last may be smaller.

        It waits for the device.
        """
        said = self.all_of([tuple(batch.shape) for batch in batches])
        shapes = [own[i] for i in range(len(said[0])) for own in said if i < len(own)]
        table = torch.zeros(len(said[0]), *shapes[0], dtype=dtype, device=self.device)
        for row, batch in zip(table, batches, strict=False):
            row[: len(batch)] = batch
        table = self.gather(table).unflatten(0, (self.world, -1))
        return [
            table[i % self.world, i // self.world, : shape[0]] for i, shape in enumerate(shapes)
        ]

    def sum(self, tensor: Tensor) -> Any:
        """Begin to sum a tensor over the ranks, in place, in the library's order."""
        return dist.all_reduce(tensor, dist.ReduceOp.SUM, self.tensors, async_op=True)

    def largest(self, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, dist.ReduceOp.MAX, self.tensors)
        return values

    # Exchanges between the hosts.

    def all_of(self, own: T) -> list[T]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, own, self.host)
        return found

    def first(self, value: T) -> T:
        found: list[Any] = [value]
        dist.broadcast_object_list(found, 0, self.host)
        return found[0]

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; an error on one rank ends all of them.

        The lowest rank that failed raises its own error, every other a RankFailed that quotes it.
        """
        result, failed = None, None
        try:
            result = work()
        except MprunError as error:
            failed = error
        said = self.all_of(None if failed is None else (str(failed), failed.exit_code))
        for rank, one in enumerate(said):
            if one is not None:
                if failed is not None and rank == self.rank:
                    raise failed
                same = all(other == one for other in said)
                raise RankFailed(one[0] if same or rank == 0 else f"rank {rank}: {one[0]}", one[1])
        return result  # type: ignore[return-value]

    def stops(self, signal_number: int) -> int:
        """Post this rank's signal; return the signal that any rank posted one step ago, 0: none.

        Call it once a step: the exchange then has a whole step to finish before it is waited for.
        """
        agreed = 0
        if self._stop is not None:
            before, work = self._stop
            work.wait()
            agreed = int(before)
        flag = torch.tensor(signal_number)
        self._stop = flag, dist.all_reduce(flag, dist.ReduceOp.MAX, self.host, async_op=True)
        return agreed

    def check_equal(self, state: Callable[[], Sequence[int]], step: int) -> None:
        """Raise Resource, which names the ranks, if the state of some differs from rank 0's."""
        states = self.all_of(tuple(state()))
        other = [rank for rank, one in enumerate(states) if one != states[0]]
        if other:
            raise Resource(
                f"step {step}: ranks {', '.join(map(str, other))} have different weights, scales "
                "or counts than rank 0. A device computes wrongly, or the network keeps "
                "statistics or random numbers per rank. mprun averages only BatchNorm's "
                "statistics, and seeds only the generators of torch, NumPy and Python"
            )

    @property
    def launched_by(self) -> list[str]:
        return self._launched_by

    def description(self) -> dict[str, Any]:
        return {"backend": self.backend, "hosts": list(dict.fromkeys(self.all_hosts))}

    # The store, which outlives a rank.

    def found(self, directory: Path) -> None:
        if self.rank == 0:
            self.whole_store.set("mprun/directory", str(directory))

    def fail(self, code: int, text: str) -> None:
        """Record why this rank ends, unless another rank recorded a failure before."""
        fail(self.store, [self.rank], code, text)

    def explained(self, error: BaseException) -> BaseException:
        """Return the failed rank's error for one that only says that the ranks lost contact."""
        if isinstance(error, MprunError) or not isinstance(error, RuntimeError | OSError):
            return error
        if ran_out(error):  # NCCL's, too
            return error
        if not any(word in str(error).lower() for word in _OF_OTHERS):
            return error
        said = failure_of(self.store, wait_s=1.0)
        if said is None:
            # The library puts the line of its source in front.
            text = re.sub(r"^\[\S+\]\s*", "", str(error)).partition("\n")[0].partition(". ")[0]
            timed_out = "timed out" in text.lower() or "timeout" in text.lower()
            why = no_answer(self.timeout_s) if timed_out else f"{LOST} ({shortened(text, 80)})"
            late = late_ranks(self.store, self.world, self.rank)
            if not late and self.world == 2:
                late = [1 - self.rank]
            if not late:
                return RankFailed(f"the other ranks: {why}", errors.RESOURCE)
            fail(self.store, late, errors.RESOURCE, why)
            said = failure_of(self.store) or (late, errors.RESOURCE, why)
            kill_stopped(late)
        ranks, code, text = said
        return RankFailed(f"{named(ranks)}: {text}", code)

    @contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.watch.ending.acquire()  # never given back: this thread ends the process now
            found = self.explained(error)
            if not isinstance(found, RankFailed):
                self.fail(*_failure(found))
            if found is error:
                raise
            raise found from error

    def ends_by(self, tell: Callable[[str, int], None]) -> None:
        self.watch.tell = tell

    def leave(self, code: int) -> None:
        """End this rank, rank 0 last: a launcher ends all ranks when the first one ends."""
        with suppress(RuntimeError):
            if self.rank:
                self.store.wait(["ended"], timedelta(seconds=self.timeout_s))
            else:
                self.store.set("ended", str(code))
        # NCCL waits here for all ranks, one of which may be lost by now.
        bound = threading.Timer(_TO_LEAVE_S, os._exit, (code,))
        bound.start()
        dist.destroy_process_group()
        self.watch.stop()
        leave(self.store, self.serves, self.world, _TO_LEAVE_S)
        bound.cancel()


def _chosen_gpu(rank_info: RankInfo) -> str:
    """Take the GPU of this rank and return its UUID; raise BadInput if there are too few.

    Where a batch system shows each task its own GPU alone (srun --gpus-per-task=1), it is GPU 0.
    """
    count, own = torch.cuda.device_count(), rank_info.local_rank
    if own >= count and count != 1:
        raise BadInput(
            f"devices={rank_info.devices}: rank {rank_info.rank} needs GPU {own}, but this machine "
            f"shows {count} (allowed: 1 to {count})"
        )
    own = min(own, count - 1)
    torch.cuda.set_device(own)
    return str(getattr(torch.cuda.get_device_properties(own), "uuid", f"of rank {rank_info.rank}"))


def _failure(error: BaseException) -> tuple[int, str]:
    """Return the exit code that an error ends its rank with, and its text."""
    text = str(error).partition("\n")[0]
    if isinstance(error, MprunError):
        return error.exit_code, text
    if isinstance(error, KeyboardInterrupt):  # carries the signal's name
        return errors.exit_code_of(error), f"stopped by {text or 'SIGINT'}"
    of_the_machine = isinstance(error, OSError) or ran_out(error)
    return errors.RESOURCE if of_the_machine else errors.BUG, f"{type(error).__name__}: {text}"


class RankLog:
    """Log of a rank other than 0, `RUN/ranks/rank-00001.log`; removed when all went well."""

    def __init__(self, directory: Path, rank: int):
        self.path = directory / "ranks" / f"rank-{rank:05}.log"
        self.path.parent.mkdir(exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
        faulthandler.enable()

    def close(self, keep: bool) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if not keep:
            with suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()  # succeeds for the last rank

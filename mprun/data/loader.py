"""Sources that read their samples during training, by loader processes.

A `BatchLoader` lets processes read the batches of a `Reader` ahead. A `DeviceFeed` brings them to
the device and notes how long it waited for them. A `LoadedSource` has both for each split.
"""

import atexit
import itertools
import multiprocessing.util  # noqa: F401 - must register its exit function before ours
import os
import signal
import threading
import time
import warnings
import weakref
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing import (
    active_children,
    forkserver,
    get_context,
    parent_process,
    resource_tracker,
)
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mprun.data.source import Batch, DamagedData, ReadBatch, Reader, Source, checked_index
from mprun.errors import ASKING, MprunError, Resource

MOST_WORKERS = 16
# A batch takes seconds; a file system that is silent for this long will not answer.
STALL_AFTER_S = 300.0
# A lost process is noticed within this time.
_LOOK_EVERY_S = 2.0
# Batches kept for repeated requests; grows as far as a caller goes back, up to the second number.
_KEPT, _KEPT_AT_MOST = 2, 32
# The loaders to close at exit.
_open: "weakref.WeakSet[BatchLoader]" = weakref.WeakSet()


def default_workers(device: torch.device) -> int:
    """Return the default number of loader processes for the cores this process may use.

    On CUDA it is all cores, up to 16: the host has little else to do. On a CPU training itself
    needs the cores: one process, or none on a single core.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the ranks share the cores
    cores = max(1, available_cores() // ranks)
    if device.type == "cuda":
        return min(cores, MOST_WORKERS)
    return 1 if cores > 1 else 0


def available_cores() -> int:
    """Count the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BatchLoader:
    """Batches of ``reader`` by number, read ahead by ``workers`` processes (0: by the caller).

    The processes stay until ``close()``; each has one torch thread and up to ``prefetch`` batches
    in flight. A request for the next number takes the next batch. The last two are kept, so that
    asking again is free. Any other number starts reading there. A number always gives the same
    batch, whatever the workers and earlier requests.

    ``last``: the end of the numbers, exclusive (evaluation); None: no end. ``pin_memory``: read
    into page-locked memory. Batches may be handed out more than once: do not write to them.

    ``replaced``: files that ``on_corrupt="skip"`` replaced so far in the requested batches, number
    in the split -> name.

    The processes are started from a fork server, a fresh process. A fork of this process would copy
    CUDA's state and the locks of existing threads (TensorBoard's, OpenMP's). That can hang it, and
    Python 3.12 warns of it. The server imports torch once for all of them. As with every start
    method but fork, a script that uses this needs the usual ``if __name__ == "__main__":``.
    """

    def __init__(
        self,
        reader: Any,
        workers: int,
        prefetch: int = 2,
        *,
        last: int | None = None,
        pin_memory: bool = False,
        stall_after: float = STALL_AFTER_S,
    ) -> None:
        if workers < 0:
            raise ValueError(f"workers={workers} is not allowed: 0 or more")
        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch} is not allowed: 1 or more")
        self.reader, self.workers, self.last = reader, workers, last
        self.replaced: dict[int, str] = {}
        self._prefetch, self._pin_memory = prefetch, pin_memory
        self._stall_after = stall_after
        self._recent: OrderedDict[int, ReadBatch] = OrderedDict()
        self._keep = _KEPT
        self._numbers = _Numbers(last)
        self._loader: DataLoader | None = None
        self._iterator: Iterator[ReadBatch | Exception] = iter(())
        self._processes: list[BaseProcess] = []
        self._next = -1
        if workers:
            start_fork_server()  # imports torch while the caller builds the model

    def like(self, reader: Any, last: int) -> "BatchLoader":
        """Return a loader of another reader's batches, with as many processes."""
        settings: dict[str, Any] = {
            "pin_memory": self._pin_memory,
            "stall_after": self._stall_after,
        }
        return BatchLoader(reader, self.workers, self._prefetch, last=last, **settings)

    def batch(self, number: int) -> ReadBatch:
        """Return batch ``number``; waits until it is read.

        Raises:
            DamagedData: A file cannot be used; the message names it.
            Resource: A process is lost or stalled.
        """
        if number in self._recent:
            return self._recent[number]
        if self.workers:
            batch = self._from_workers(number)
        else:
            batch = self.reader.read(number)
            if self._pin_memory:
                batch = batch._replace(
                    images=batch.images.pin_memory(), labels=batch.labels.pin_memory()
                )
        self._count_replaced(batch)
        self._recent[number] = batch
        while len(self._recent) > self._keep:
            self._recent.popitem(last=False)
        return batch

    def close(self) -> None:
        """End the processes and forget the batches; a closed loader can be asked again."""
        self._recent.clear()
        self._stop()

    def _from_workers(self, number: int) -> ReadBatch:
        if number != self._next:
            self._start(number)
        waiting_since = time.monotonic()
        while True:
            try:
                batch = next(self._iterator)
            except RuntimeError as error:
                # torch has no types for these; any other error comes from the reader.
                if "exited unexpectedly" in str(error) or "killed by signal" in str(error):
                    raise self._lost(str(error)) from None
                if "timed out" not in str(error):
                    raise
                if time.monotonic() - waiting_since > self._stall_after:
                    self._stop(gently=False)
                    raise Resource(
                        f"{self.reader.where}: no batch for {self._stall_after:g} s from "
                        f"{self.workers} loader processes; does the file system still answer?"
                    ) from None
            except (ConnectionError, EOFError, FileNotFoundError) as error:
                # The sending process is gone while a batch is under way.
                raise self._lost(f"{type(error).__name__}: {error}") from None
            else:
                break
        self._next = number + 1
        if isinstance(batch, Exception):
            raise batch
        return ReadBatch(*batch)

    def _start(self, number: int) -> None:
        if self.last is None and self._next >= 0:
            self._keep = min(max(self._keep, self._next - number), _KEPT_AT_MOST)
        # A hit between misses would leave the processes behind, which then restart once more.
        self._recent.clear()
        self._numbers.first = number
        if self._loader is not None and self._next == self.last:
            try:
                self._iterator = iter(self._loader)  # the next evaluation: the same processes
                return
            except RuntimeError:
                pass  # a process is lost; start new ones
        self._stop()
        before = set(active_children())
        with warnings.catch_warnings():
            # The caller decides on the number of processes.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self._loader = DataLoader(
                _Readings(self.reader),
                batch_size=None,
                sampler=self._numbers,
                num_workers=self.workers,
                prefetch_factor=self._prefetch,
                collate_fn=_as_it_is,
                pin_memory=self._pin_memory,
                timeout=_LOOK_EVERY_S,
                worker_init_fn=_settle,
                multiprocessing_context=get_context("forkserver"),
                # A separate generator: torch draws a seed for the workers, but the run's random
                # numbers must not depend on how often a loader was started.
                generator=torch.Generator(),
                persistent_workers=True,
            )
            _open.add(self)
            self._iterator = iter(self._loader)
        self._processes = [child for child in active_children() if child not in before]

    def _stop(self, *, gently: bool = True) -> None:
        if not gently:
            self._kill()
        # When no reference is left, torch asks the processes to end and waits for them.
        self._iterator, self._loader = iter(()), None
        self._next = -1
        # They ignore the signal that torch, and Python at exit, sends to remaining processes.
        self._kill()
        self._processes = []
        _open.discard(self)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()

    def _lost(self, why: str) -> Resource:
        self._stop(gently=False)
        return Resource(
            f"data.workers={self.workers}: a loader process is lost, killed or out of memory or of "
            f"shared memory (/dev/shm): {why}"
        )

    def _count_replaced(self, batch: ReadBatch) -> None:
        self.replaced |= batch.replaced
        most = self.reader.most_replaced
        if len(self.replaced) > most:
            raise DamagedData(
                f"{list(batch.replaced.values())[-1]}: cannot be used, nor can {most} others of "
                f"{self.reader.samples}; data.on_corrupt=skip replaces no more than {most}"
            )


def start_fork_server() -> None:
    """Start the process from which loader processes are forked, if it does not run yet."""
    resource_tracker.ensure_running()  # it would unblock the signals below
    # The started process inherits the blocked signals; those that arrive meanwhile come later.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        forkserver.set_forkserver_preload(["torch.utils.data", "mprun.data.image_folder"])
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Numbers:
    """Batch numbers from ``first``, up to ``last`` or for ever."""

    def __init__(self, last: int | None):
        self.first, self._last = 0, last

    def __iter__(self) -> Iterator[int]:
        if self._last is None:
            return itertools.count(self.first)
        return iter(range(self.first, self._last))


class _Readings(Dataset):
    """Batches, or errors in their place: an error raised in a worker arrives as a traceback."""

    def __init__(self, reader: Reader):
        self._reader = reader

    def __getitem__(self, number: int) -> ReadBatch | Exception:
        try:
            return self._reader.read(number, shared=get_worker_info() is not None)
        except (MprunError, OSError, MemoryError) as error:
            return error


def _as_it_is(batch):
    return batch


def _settle(worker: int) -> None:
    """Prepare a loader process: ignore signals, end with the parent."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
    # torch's processes check whether their direct parent is gone. Here that is the fork server,
    # which stays as long as they do.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None  # the one that started this process
    wait([parent.sentinel])
    os._exit(1)


@atexit.register  # registered after torch's and multiprocessing's functions, so it runs first
def _close_open() -> None:
    for loader in list(_open):
        loader.close()


class _OnDevice(NamedTuple):
    images: Tensor
    labels: Tensor
    copied: torch.cuda.Event


class DeviceFeed:
    """``batch(number)``: uint8 images and int64 labels of a loader's batch on ``device``.

    On CUDA the next batch is fetched from the loader, which had a whole step to read it. It is
    copied from pinned memory on a separate stream while the device works on this batch. No call
    waits for the device.
    """

    def __init__(self, loader: BatchLoader, device: torch.device) -> None:
        self._loader, self.device = loader, device
        self._waited = 0.0
        self._gaps: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []
        # The batch after the last one requested, or the error in its place.
        self._ahead: tuple[int, _OnDevice | MprunError | OSError] | None = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return images uint8 ``[batch, height, width, channels]`` and labels.

        It raises the loader's errors.
        """
        if self._copies is not None:
            return self._cuda_batch(number)
        started = time.perf_counter()
        read = self._loader.batch(number)
        self._waited += time.perf_counter() - started
        return read.images, read.labels

    def defer_wait(self) -> Callable[[], float]:
        """Return a function for the seconds that the device waited for batches since the last call.

        On a CPU that is the time that ``batch`` took. On CUDA it is, for each batch, the time that
        the device was idle, but at most the host's wait for the loader. Call the function once the
        device has finished the steps that use the batches.
        """
        waited, self._waited = self._waited, 0.0
        gaps, self._gaps = self._gaps, []

        def seconds() -> float:
            return waited + sum(
                min(blocked, idle_from.elapsed_time(idle_to) / 1000)
                for blocked, idle_from, idle_to in gaps
            )

        return seconds

    def close(self) -> None:
        """Drop the batch read ahead and end the loader's processes; it can be asked again."""
        self._ahead = None
        self._loader.close()

    def _cuda_batch(self, number: int) -> tuple[Tensor, Tensor]:
        stream = torch.cuda.current_stream(self.device)
        idle_from, idle_to = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        idle_from.record(stream)  # the device reaches it at the end of the last step
        started = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        here = ahead[1] if ahead is not None and ahead[0] == number else self._copy(number)
        if isinstance(here, Exception):
            raise here
        if number + 1 != self._loader.last:
            try:
                self._ahead = number + 1, self._copy(number + 1)
            except (MprunError, OSError) as error:
                self._ahead = number + 1, error  # raised if the next batch is requested
        blocked = time.perf_counter() - started
        stream.wait_event(here.copied)
        idle_to.record(stream)
        self._gaps.append((blocked, idle_from, idle_to))
        # Their memory belongs to the other stream, which must not reuse it before this one is done.
        here.images.record_stream(stream)
        here.labels.record_stream(stream)
        return here.images, here.labels

    def _copy(self, number: int) -> _OnDevice:
        read = self._loader.batch(number)
        with torch.cuda.stream(self._copies):
            images = read.images.to(self.device, non_blocking=True)
            labels = read.labels.to(self.device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._copies)
        return _OnDevice(images, labels, copied)


class _Share:
    """One rank's part of a reader's batches: of every ``parts`` batches, the numbers ``own``."""

    def __init__(self, reader: Any, own: range, parts: int) -> None:
        self._reader, self._own, self._parts = reader, own, parts
        self.where, self.samples = reader.where, reader.samples
        self.most_replaced = reader.most_replaced

    def read(self, number: int, *, shared: bool = False) -> ReadBatch:
        step, place = divmod(number, len(self._own))
        batch: ReadBatch = self._reader.read(step * self._parts + self._own[place], shared=shared)
        return batch


class LoadedSource(Source):
    """A training and a held-out split, read by ``workers`` processes each (0: by the caller).

    The processes start with the first batch and end with ``close()``; neither their number nor
    ``prefetch`` changes a sample. ``_float`` turns the readers' batches into float images on the
    device.
    """

    def __init__(
        self,
        train: Reader,
        held_out: Reader,
        workers: int,
        device: torch.device,
        prefetch: int = 2,
    ) -> None:
        pinned = device.type == "cuda"
        self._train = BatchLoader(train, workers, prefetch, pin_memory=pinned)
        self._eval_count = len(held_out)
        self._held_out = BatchLoader(
            held_out, workers, prefetch, last=self._eval_count, pin_memory=pinned
        )
        self._train_feed = DeviceFeed(self._train, device)
        self._eval_feed = DeviceFeed(self._held_out, device)
        # A single rank takes all batches.
        self._own, self._parts = range(1), 1
        self._shared_feed = self._eval_feed, self._eval_count
        self.batches_per_epoch, self.samples_per_batch = len(train), train.batch_size
        self.defer_wait = self._train_feed.defer_wait

    def train_batch(self, index: int) -> Batch:
        """Return batch ``index`` of the run; raise ``ValueError`` if it is negative."""
        images, labels = self._train_feed.batch(self._place(checked_index(index)))
        return self._float(images), labels

    def eval_batches(self) -> Iterator[Batch]:
        """Yield the held-out split in its own order; the last batch may be smaller."""
        return self._evaluated(self._eval_feed, self._eval_count)

    def share_out(self, own: range, parts: int, rank: int, world: int) -> None:
        train, held_out, feed = self._train, self._held_out, self._eval_feed
        self._own, self._parts = own, parts
        self._train_feed.close()  # batches read before have other numbers
        train.reader = _Share(train.reader, own, parts)
        count = len(range(rank, self._eval_count, world))
        if count:
            reader = _Share(held_out.reader, range(rank, rank + 1), world)
            loader = held_out.like(reader, last=count)
            feed = DeviceFeed(loader, self._train_feed.device)
        self._shared_feed = feed, count

    def eval_share(self, rank: int, world: int) -> Iterator[Batch]:
        return self._evaluated(*self._shared_feed)

    def _evaluated(self, feed: DeviceFeed, count: int) -> Iterator[Batch]:
        for number in range(count):
            images, labels = feed.batch(number)
            yield self._float(images), labels
        feed.defer_wait()  # drop it: only training reports its waiting

    def _place(self, index: int) -> int:
        """Return the number of batch ``index`` in the reader of this rank's part."""
        step, number = divmod(index, self._parts)
        if number not in self._own:
            raise ValueError(f"index={index} is not allowed: a batch of another rank")
        return step * len(self._own) + number - self._own.start

    def close(self) -> None:
        """End the loader processes; the source can be asked again."""
        for feed in (self._train_feed, self._eval_feed, self._shared_feed[0]):
            feed.close()

    @abstractmethod
    def _float(self, images: Tensor) -> Tensor:
        """Turn the readers' images into the float images that a network takes."""

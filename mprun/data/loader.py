"""Sources that read their samples during training, by loader processes.

A `BatchLoader` reads the batches of a `Reader` ahead, a `DeviceFeed` brings them to the device, and
a `LoadedSource` has both for each split.
"""

import atexit
import math
import multiprocessing.util  # noqa: F401 - must register its exit function before ours
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import (
    active_children,
    forkserver,
    get_context,
    parent_process,
    resource_tracker,
)
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mprun.data.source import Batch, DamagedData, ReadBatch, Reader, Serving, Source, at_least
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

    On CUDA all cores, up to 16: the host has little else to do. On a CPU, whose cores train, one
    process, or none on a single core.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the ranks share the cores
    cores = max(1, available_cores() // ranks)
    if device.type == "cuda":
        return min(cores, MOST_WORKERS)
    return 1 if cores > 1 else 0


def available_cores() -> int:
    """Count the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Numbers:
    """The batches that a rank takes: of every ``parts`` those in ``own``, below ``last``.

    Iteration begins at ``first``, which is one of them.
    """

    def __init__(self, own: range = range(1), parts: int = 1, last: float = math.inf) -> None:
        self.own, self.parts, self.last, self.first = own, parts, last, own.start

    def __iter__(self) -> Iterator[int]:
        number = self.first
        while number < self.last:
            yield number
            number = self.after(number)

    def after(self, number: int) -> int:
        """Return the number after ``number``, whether or not it is below ``last``."""
        step, place = divmod(number, self.parts)
        return number + 1 if place + 1 in self.own else (step + 1) * self.parts + self.own.start


class BatchLoader:
    """Batches of ``reader`` by number, read ahead by ``workers`` processes (0: by the caller).

    The processes stay until ``close()``; each has one torch thread and up to ``prefetch`` batches
    in flight. A request for the next of ``numbers`` takes the next batch. The last two are kept, so
    that asking again is free. Any other number starts reading there. Batches may be handed out more
    than once: do not write to them. ``pin_memory``: read into page-locked memory. ``replaced``:
    that of all requested batches.

    The processes are started from a fork server, a fresh process. A fork of this process would copy
    CUDA's state and the locks of existing threads (TensorBoard's, OpenMP's). That can hang it, and
    Python 3.12 warns of it. The server imports torch once for all of them. As with every start
    method but fork, a script that uses this needs the usual ``if __name__ == "__main__":``.
    """

    def __init__(
        self,
        reader: Reader,
        workers: int,
        prefetch: int = 2,
        *,
        numbers: Numbers | None = None,
        pin_memory: bool = False,
    ) -> None:
        at_least(0, workers=workers)
        at_least(1, prefetch=prefetch)
        self.reader, self.workers, self.numbers = reader, workers, numbers or Numbers()
        self.replaced: dict[int, str] = {}
        self._prefetch, self._pin_memory = prefetch, pin_memory
        self._recent: dict[int, ReadBatch] = {}
        self._keep = _KEPT
        self._loader: DataLoader | None = None
        self._iterator: Iterator[ReadBatch | Exception] = iter(())
        self._processes: list[BaseProcess] = []
        self._next = -1
        if workers:
            _start_fork_server()  # imports torch while the caller builds the model

    def batch(self, number: int) -> ReadBatch:
        """Wait for batch ``number`` and return it.

        It raises the reader's errors, and ``Resource`` if a process is lost or stalled.
        """
        if number in self._recent:
            return self._recent[number]
        if self.workers:
            batch = self._from_workers(number)
        else:
            batch = self.reader.read(number)
            if self._pin_memory:
                images, labels = batch.images.pin_memory(), batch.labels.pin_memory()
                batch = batch._replace(images=images, labels=labels)
        self.replaced |= batch.replaced
        most = self.reader.most_replaced
        if len(self.replaced) > most:
            raise DamagedData(
                f"{list(batch.replaced.values())[-1]}: cannot be used, and {most} others of "
                f"{self.reader.samples} were already replaced; data.on_corrupt=skip replaces at "
                f"most {most}"
            )
        self._recent[number] = batch
        while len(self._recent) > self._keep:
            del self._recent[next(iter(self._recent))]
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
                if time.monotonic() - waiting_since > STALL_AFTER_S:
                    self._kill()
                    self._stop()
                    raise Resource(
                        f"{self.reader.where}: no batch for {STALL_AFTER_S:g} s from "
                        f"{self.workers} loader processes; does the file system still answer?"
                    ) from None
            except (ConnectionError, EOFError, FileNotFoundError) as error:
                # The sending process is gone while a batch is under way.
                raise self._lost(f"{type(error).__name__}: {error}") from None
            else:
                break
        self._next = self.numbers.after(number)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def _start(self, number: int) -> None:
        numbers = self.numbers
        if numbers.last == math.inf and self._next >= 0:
            back = (self._next - number) * len(numbers.own) // numbers.parts
            self._keep = min(max(self._keep, back), _KEPT_AT_MOST)
        # A hit between misses would leave the processes behind, which then restart once more.
        self._recent.clear()
        numbers.first = number
        if self._loader is not None and self._next >= numbers.last:
            with suppress(RuntimeError):  # a process is lost; start new ones
                self._iterator = iter(self._loader)  # the next evaluation: the same processes
                return
        self._stop()
        before = set(active_children())
        with warnings.catch_warnings():
            # The caller decides on the number of processes.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self._loader = DataLoader(
                _Readings(self.reader),
                batch_size=None,
                sampler=numbers,
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

    def _stop(self) -> None:
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
        self._kill()
        self._stop()
        return Resource(
            f"data.workers={self.workers}: a loader process is lost, killed or out of memory or of "
            f"shared memory (/dev/shm): {why}"
        )


def _start_fork_server() -> None:
    resource_tracker.ensure_running()  # it would unblock the signals below
    # The started process inherits the blocked signals; those that arrive meanwhile come later.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        forkserver.set_forkserver_preload(["torch.utils.data", "mprun.data.image_folder"])
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Readings(Dataset):
    """Batches, or errors in their place: an error raised in a worker arrives as a traceback."""

    def __init__(self, reader: Reader):
        self._reader = reader

    def __getitem__(self, number: int) -> ReadBatch | Exception:
        try:
            return self._reader.read(number)
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


_OnDevice = tuple[Tensor, Tensor, torch.cuda.Event]  # images, labels, both are copied


class DeviceFeed:
    """``batch(number)``: images and labels of a loader's batch on ``device``.

    On CUDA the next batch is fetched from the loader, which had a whole step to read it. It is
    copied from pinned memory on a separate stream while the device works on this batch. No call
    waits for the device.
    """

    def __init__(self, loader: BatchLoader, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self._waited = 0.0
        self._gaps: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []
        # The batch after the last one requested, or the error in its place, by number.
        self._ahead: dict[int, _OnDevice | MprunError | OSError] = {}
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return images and labels as the reader makes them; raise the loader's errors."""
        if self._copies is not None:
            return self._cuda_batch(number)
        started = time.perf_counter()
        read = self.loader.batch(number)
        self._waited += time.perf_counter() - started
        return read.images, read.labels

    def defer_wait(self) -> Callable[[], float]:
        """Return `Source.defer_wait`'s function for the batches since the last call.

        On a CPU the wait is the time that ``batch`` took. On CUDA it is, for each batch, the time
        that the device was idle, but at most the host's wait for the loader.
        """
        waited, self._waited = self._waited, 0.0
        gaps, self._gaps = self._gaps, []

        def seconds() -> float:
            idle = [(blocked, start.elapsed_time(end) / 1000) for blocked, start, end in gaps]
            return waited + sum(map(min, idle))

        return seconds

    def close(self) -> None:
        """Drop the batch read ahead and end the loader's processes; it can be asked again."""
        self._ahead.clear()
        self.loader.close()

    def _cuda_batch(self, number: int) -> tuple[Tensor, Tensor]:
        stream = torch.cuda.current_stream(self.device)
        idle_from, idle_to = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        idle_from.record(stream)  # the device reaches it at the end of the last step
        started = time.perf_counter()
        here = self._ahead.pop(number, None)
        self._ahead.clear()
        if isinstance(here, Exception):
            raise here
        images, labels, copied = here or self._copy(number)
        following = self.loader.numbers.after(number)
        if following < self.loader.numbers.last:
            try:
                self._ahead[following] = self._copy(following)
            except (MprunError, OSError) as error:
                self._ahead[following] = error  # raised if the next batch is requested
        blocked = time.perf_counter() - started
        stream.wait_event(copied)
        idle_to.record(stream)
        self._gaps.append((blocked, idle_from, idle_to))
        # Their memory belongs to the other stream, which must not reuse it before this one is done.
        images.record_stream(stream)
        labels.record_stream(stream)
        return images, labels

    def _copy(self, number: int) -> _OnDevice:
        read = self.loader.batch(number)
        with torch.cuda.stream(self._copies):
            images = read.images.to(self.device, non_blocking=True)
            labels = read.labels.to(self.device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._copies)
        return images, labels, copied


class LoadedSource(Source):
    """A training and a held-out split, read by processes of their own (0: by the caller).

    The processes start with the first batch and end with ``close()``; neither their number (None:
    `default_workers`) nor the batches in flight change a sample.
    """

    def __init__(self, train: Reader, held_out: Reader, serving: Serving) -> None:
        self._held_out, self._device, workers = held_out, serving.device, serving.workers
        self.workers = default_workers(self._device) if workers is None else workers
        self._settings = self.workers, serving.prefetch
        self._train = self._feed(train, Numbers())
        self._eval_feeds: dict[tuple[int, int], DeviceFeed] = {}  # (rank, world) -> its batches
        self.batches_per_epoch, self.samples_per_batch = len(train), train.batch_size
        self.defer_wait = self._train.defer_wait

    def train_batch(self, index: int) -> Batch:
        numbers = self._train.loader.numbers
        at_least(0, index=index)
        if index % numbers.parts not in numbers.own:
            raise ValueError(f"index={index} is not allowed: this batch belongs to another rank")
        images, labels = self._train.batch(index)
        return self._float(images), labels

    def eval_batches(self) -> Iterator[Batch]:
        return self.eval_share(0, 1)

    def share_out(self, own: range, parts: int, rank: int, world: int) -> None:
        self._train.close()  # batches read before are others
        self._train.loader.numbers = Numbers(own, parts)

    def eval_share(self, rank: int, world: int) -> Iterator[Batch]:
        numbers = Numbers(range(rank, rank + 1), world, last=len(self._held_out))
        # Each share has processes of its own, which stay for the next evaluation.
        if (rank, world) not in self._eval_feeds:
            self._eval_feeds[rank, world] = self._feed(self._held_out, numbers)
        feed = self._eval_feeds[rank, world]
        for number in numbers:
            images, labels = feed.batch(number)
            yield self._float(images), labels
        feed.defer_wait()  # drop it: only training reports its waiting

    def close(self) -> None:
        for feed in (self._train, *self._eval_feeds.values()):
            feed.close()

    def _feed(self, reader: Reader, numbers: Numbers) -> DeviceFeed:
        pinned = self._device.type == "cuda"
        loader = BatchLoader(reader, *self._settings, numbers=numbers, pin_memory=pinned)
        return DeviceFeed(loader, self._device)

    def _float(self, images: Tensor) -> Tensor:
        """Turn the readers' images into the float images that a network takes."""
        return images

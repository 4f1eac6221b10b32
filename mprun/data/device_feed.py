"""Batches of a loader on the device, and how long the device waited for them."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mprun.data.loader import BatchLoader
from mprun.errors import MprunError


class _OnDevice(NamedTuple):
    images: Tensor
    labels: Tensor
    copied: torch.cuda.Event


class DeviceFeed:
    """``batch(number)``: uint8 images and int64 labels of a loader's batch on ``device``.

    On CUDA the batch after the one asked for is fetched from the loader (which had a whole step to
    read it) and copied from pinned memory on a stream of its own while the device works on this
    one. No call waits for the device.
    """

    def __init__(self, loader: BatchLoader, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._waited = 0.0
        self._gaps: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []
        # The batch after the last one asked for, or the error that came in its place.
        self._ahead: tuple[int, _OnDevice | MprunError | OSError] | None = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Images uint8 ``[batch, height, width, channels]`` and labels; errors as the loader's."""
        if self._copies is not None:
            return self._cuda_batch(number)
        started = time.perf_counter()
        read = self._loader.batch(number)
        self._waited += time.perf_counter() - started
        return read.images, read.labels

    def defer_wait(self) -> Callable[[], float]:
        """What tells the seconds that the device waited for the batches since the last call.

        On a CPU the time that ``batch`` took. On CUDA, per batch, the time that the device had
        nothing to do, but no more than the host waited for the loader; to be called once the
        device has come to the end of the steps that use them.
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
        """Forget what is read ahead and end the loader's processes; it can be asked again."""
        self._ahead = None
        self._loader.close()

    def _cuda_batch(self, number: int) -> tuple[Tensor, Tensor]:
        stream = torch.cuda.current_stream(self._device)
        idle_from, idle_to = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        idle_from.record(stream)  # reached when the last step's work is done
        started = time.perf_counter()
        here = self._copy(number) if not self._is_ahead(number) else self._ahead[1]
        self._ahead = None
        if isinstance(here, Exception):
            raise here
        if number + 1 != self._loader.last:
            try:
                self._ahead = number + 1, self._copy(number + 1)
            except (MprunError, OSError) as error:
                self._ahead = number + 1, error  # belongs to the next batch, if it is asked for
        blocked = time.perf_counter() - started
        stream.wait_event(here.copied)
        idle_to.record(stream)
        self._gaps.append((blocked, idle_from, idle_to))
        # Their memory is the other stream's; it must not be reused before this one is done.
        here.images.record_stream(stream)
        here.labels.record_stream(stream)
        return here.images, here.labels

    def _is_ahead(self, number: int) -> bool:
        return self._ahead is not None and self._ahead[0] == number

    def _copy(self, number: int) -> _OnDevice:
        read = self._loader.batch(number)
        with torch.cuda.stream(self._copies):
            images = read.images.to(self._device, non_blocking=True)
            labels = read.labels.to(self._device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._copies)
        return _OnDevice(images, labels, copied)

"""Record a function of device work as a CUDA graph and replay it; which updates a graph can hold.

torch documentation, CUDA semantics, "CUDA Graphs": capture on a side stream, after a warm-up on
that stream, with all inputs and outputs at fixed addresses. A replay repeats the kernels of one
step with that step's host numbers, so every number that changes from step to step has to be a
tensor on the device.
"""

import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from mprun.precision import MixedPrecisionOptimizer
from mprun.precision.torch_update import is_fused

_WAITS = "called a synchronizing CUDA operation"


class CannotCapture(Exception):
    """Why a function cannot be captured, in one line."""


class CudaRecorder:
    """Records functions on `stream`; all recordings share one pool of memory.

    They may share it because they are never replayed at the same time and what one of them leaves
    is not read by another but for its output, which is kept.

    Attributes:
        seconds: that captures took so far.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream):
        self.device, self.stream = device, stream
        self.seconds = 0.0
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, function: Callable[[], Any]) -> tuple[Any, str | None]:
        """(what `function` returns, the first thing in it that waits for the device, or None).

        A step that waits cannot be captured, and a failed capture costs more than this look.
        """
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = function()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            if _WAITS in str(warning.message):
                place = f"{warning.filename.rpartition('/')[2]}:{warning.lineno}"
                return result, f"the step waits for the device ({place})"
        return result, None

    def record(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture `function`, which is called once and computes nothing yet.

        The current stream must be `stream`.

        Returns:
            What replays it, on the current stream, and returns its output: the same tensor each
            time, which the next replay overwrites.

        Raises:
            CannotCapture: after which everything can go on eagerly.
            torch.OutOfMemoryError: the memory for a second set of activations is missing.
        """
        graph, started = torch.cuda.CUDAGraph(), time.perf_counter()
        held = torch.cuda.memory_allocated(self.device)
        needed = torch.cuda.max_memory_allocated(self.device) - held  # by the eager steps so far
        watched = torch.cuda.get_sync_debug_mode()
        if watched:
            torch.cuda.set_sync_debug_mode("default")  # a capture begins with a wait, once
        try:
            # "thread_local": a thread that reads data or writes metrics may ask for an event while
            # this one captures, which "global" would take for a mistake.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                if not self.seconds:
                    # A first block for the pool, split as the step needs it. Segment by segment,
                    # each of the size that is missing, a pool grows to up to twice its need.
                    torch.empty(needed, dtype=torch.uint8, device=self.device)
                output = function()
        except Exception as error:
            first = _first(error)
            self._recover()
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            line = str(first).partition("\n")[0]
            raise CannotCapture(f"{type(first).__name__}: {line}") from error
        finally:
            if watched:
                torch.cuda.set_sync_debug_mode(watched)
        # What eager steps left, their gradients among it, is of no use to a replay.
        torch.cuda.empty_cache()
        self.seconds += time.perf_counter() - started

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _recover(self) -> None:
        """Undo what a failed capture leaves in torch: an open pool, and a generator in capture.

        Nothing of it remains where the capture itself was sound and only Python code failed.
        """
        index = torch.cuda.current_device()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        # The same seed and offset in a state that knows of no capture.
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())


def _first(error: BaseException) -> BaseException:
    """The error that broke the capture: the end of a broken capture raises one of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def why_not_captured(
    optimizers: Iterable[MixedPrecisionOptimizer], constant_rate: bool
) -> str | None:
    """The reason why the updates of `optimizers` cannot be replayed, or None.

    Read from torch.optim of torch 2.11 to 2.15. SGD and Adagrad keep no number on the host that
    their formulas read (Adagrad counts its steps there, for lr_decay alone, which is 0 here; a
    replay does not count). Adam and AdamW count steps for their bias correction: on the device if
    fused or capturable. Fused kernels and the single pass take a tensor as their rate; foreach and
    loop implementations ask the host for its value.

    Args:
        constant_rate: the learning rate never changes, so that its number may be part of the graph.
    """
    for optimizer in optimizers:
        inner = optimizer.inner
        single_pass = optimizer.update_path == "single_pass"
        name, groups = type(inner).__name__, inner.param_groups
        counts_on_host = not all(group.get("capturable") for group in groups)
        if isinstance(inner, Adam) and counts_on_host and not single_pass:
            return (
                f"{name} without a fused kernel counts its steps on the host, "
                "where a replay does not count"
            )
        on_device = all(isinstance(group["lr"], Tensor) for group in groups)
        reads_on_device = single_pass or is_fused(inner)
        if not constant_rate and not (on_device and reads_on_device):
            return (
                f"optim.schedule: {name} without a fused kernel reads its rate on the host, "
                "and a replay would keep the first one"
            )
    return None

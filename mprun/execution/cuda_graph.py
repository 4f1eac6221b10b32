"""Record a function of device work as a CUDA graph and replay it; check which updates allow it.

torch documentation, CUDA semantics, "CUDA Graphs": capture on a side stream, after a warm-up on
that stream, with all inputs and outputs at fixed addresses. A replay repeats the kernels of one
step with the host numbers of that step. Every number that changes from step to step therefore has
to be a tensor on the device.
"""

import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from mprun.precision.muon import Muon
from mprun.precision.torch_update import reads_rate_on_device
from mprun.record.memory import ran_out
from mprun.torch_private import end_graph_pool

_WAITS = "called a synchronizing CUDA operation"


class CannotCapture(Exception):
    """The one-line reason why a function cannot be captured."""


class CudaRecorder:
    """Record functions on `stream`; all recordings share one pool of memory.

    Sharing is safe: recordings never replay at the same time, and no recording reads what another
    leaves in the pool. Only its output is read, and that is kept.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream):
        self.device, self.stream = device, stream
        self.seconds = 0.0  # that captures took so far
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, function: Callable[[], Any]) -> tuple[Any, str | None]:
        """Call `function`; return its result and where it first waits for the device, or None.

        A step that waits cannot be captured, and a failed capture costs more than this check.
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
        """Capture `function`, called once on `stream`, the current one; it computes nothing yet.

        Returns:
            A function that replays it on the current stream and returns its output: the same
            tensor each time, which the next replay overwrites.

        Raises:
            CannotCapture: the capture failed; everything can go on eagerly.
            torch.OutOfMemoryError: the memory for a second set of activations is missing.
        """
        graph, started = torch.cuda.CUDAGraph(), time.perf_counter()
        held = torch.cuda.memory_allocated(self.device)
        needed = torch.cuda.max_memory_allocated(self.device) - held  # the eager steps' need
        watched = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")  # a capture begins with a wait, once
        try:
            # "thread_local": threads that read data or write metrics may query an event during the
            # capture, which "global" would treat as an error.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                if not self.seconds:
                    # A first block for the pool, which the step splits as needed. A pool that grows
                    # segment by segment, each of the missing size, reaches up to twice its need.
                    torch.empty(needed, dtype=torch.uint8, device=self.device)
                output = function()
        except Exception as error:
            first: BaseException = error  # ending a broken capture raises another one
            while first.__context__ is not None:
                first = first.__context__
            self._recover()
            if ran_out(first):
                raise torch.OutOfMemoryError(str(first)) from first
            line = str(first).partition("\n")[0]
            raise CannotCapture(f"{type(first).__name__}: {line}") from error
        finally:
            torch.cuda.set_sync_debug_mode(watched)
        # A replay has no use for the cached memory of eager steps, nor for their gradients.
        torch.cuda.empty_cache()
        self.seconds += time.perf_counter() - started

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _recover(self) -> None:
        """Undo what a failed capture leaves in torch: an open pool and a generator in capture.

        If only Python code failed and the capture itself was sound, neither is left.
        """
        index = torch.cuda.current_device()
        with suppress(RuntimeError):
            end_graph_pool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        # Same seed and offset, in a state outside any capture.
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())


def why_not_captured(optimizers: Iterable[Optimizer], constant_rate: bool) -> str | None:
    """Return the reason why the updates of `optimizers` cannot be replayed, or None.

    Read from torch.optim of torch 2.11 to 2.15. The formulas of SGD and Adagrad read no number that
    is kept on the host. (Adagrad counts its steps there, but only for lr_decay, which is 0 here; a
    replay does not count.) Adam and AdamW count steps for their bias correction, on the device if
    fused or capturable. What reads the rate on the host needs a `constant_rate`, which a graph may
    contain.
    """
    for optimizer in optimizers:
        name, groups = type(optimizer).__name__, optimizer.param_groups
        counts_on_host = not all(group.get("capturable") for group in groups)
        if isinstance(optimizer, Adam | Muon) and counts_on_host:
            return (
                f"{name} without a fused kernel counts its steps on the host, "
                "where a replay does not count"
            )
        on_device = all(isinstance(group["lr"], Tensor) for group in groups)
        if not constant_rate and not (on_device and reads_rate_on_device(optimizer)):
            return (
                f"optim.schedule: {name} without a fused kernel reads its rate on the host, "
                "and a replay would keep the first one"
            )
    return None

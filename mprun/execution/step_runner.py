"""The one place that training steps go through, however they are executed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from mprun.execution.compilation import Compilation
from mprun.execution.graphed_step import GraphedStep
from mprun.tasks.learning_rate import LearningRate
from mprun.tasks.task import Task


class Stepper:
    """Takes training steps of `task`; each step computes what `task.train_step` computes.

    Args:
        compilation: networks to compile; None: none.
        stream: on which graphs are captured; None without graphs.
        settings: what is fixed beforehand, for the record: "cuda_graph" (why it is off, where
            `graph` is None), "channels_last" and "autotune".

    Attributes:
        skipped: steps with a skipped update so far, int64, 0-dim, on the device.

    The first step is eager and uncompiled, so that it can be watched operation by operation. It
    is the step that compiles from the second one on; a graph is captured a few steps later.
    """

    def __init__(
        self,
        task: Task,
        rate: LearningRate,
        device: torch.device,
        *,
        graph: GraphedStep | None = None,
        compilation: Compilation | None = None,
        stream: torch.cuda.Stream | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ):
        self.task, self.rate, self.graph, self.compilation = task, rate, graph, compilation
        self.stream, self.settings = stream, dict(settings)
        self.taken = 0
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    def step(self, index: int, measure: bool = False) -> dict[str, Tensor]:
        """Set the rate, take step `index` (from 0), count a skipped update; no synchronisation.

        Args:
            measure: also compute the gradient norm.

        Returns:
            0-dim device tensors by metric name.

        Raises:
            BadInput: train.compile, or a CUDA graph that is required, turns out to be impossible.
            MprunError: what the data source raises.
        """
        self.taken += 1
        with self.on_stream():
            self.rate.apply(index, self.skipped)
            metrics = self._take(index, measure)
            if "found_inf" in metrics:
                self.skipped.add_(metrics["found_inf"].to(torch.int64))
        return metrics

    def _take(self, index: int, measure: bool) -> dict[str, Tensor]:
        if self.compilation is not None and self.taken <= 2:
            if self.taken == 1:
                return self.task.train_step(index, measure)
            return self.compilation.first_step(lambda: self.task.train_step(index, measure))
        if self.graph is None:
            return self.task.train_step(index, measure)
        return self.graph.step(index, measure)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Everything inside runs on the stream of the graphs; nothing where there are none.

        Around a whole training it makes all work of the run one sequence: steps, evaluations,
        checkpoints and metrics need no further waiting, and memory is allocated for one stream.
        `step` enters it by itself where the caller has not. As either stream waits for the other
        at each change, the work of both is one sequence then too, also as to memory that one
        allocated and the other frees.
        """
        outside = None if self.stream is None else torch.cuda.current_stream(self.stream.device)
        if outside is None or outside == self.stream:
            yield
            return
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outside.wait_stream(self.stream)

    def give_back_cache(self) -> None:
        """Return memory that nothing holds to the device, where steps are replayed; it waits.

        To be called after an evaluation: a graph keeps its memory to itself, so what an evaluation
        took beside it would stay reserved, and no step could use it.
        """
        if self.graph is not None and self.graph.replayed:
            torch.cuda.empty_cache()

    @property
    def description(self) -> dict[str, str | float | int]:
        """How steps were executed so far, for run.json.

        cuda_graph: "on", or "off: " and the reason; capture_s, replayed: seconds of capturing and
        number of replayed steps; host_ms, device_ms: what `auto` measured of an eager step.
        compile: the mode, compile_s: seconds of the step that compiled. channels_last, autotune:
        "on" or "off: " and the reason.
        """
        graph, found = self.graph, dict(self.settings)
        if graph is not None:
            reason = graph.off or f"ended after {self.taken} steps, before a capture"
            found["cuda_graph"] = "on" if graph.replayed else f"off: {reason}"
            found |= graph.times
            if graph.replayed:
                found |= {
                    "capture_s": round(graph.recorder.seconds, 3),
                    "replayed": graph.replayed,
                }
        if self.compilation is not None:
            found["compile"] = self.compilation.mode
            if self.compilation.seconds is not None:
                found["compile_s"] = round(self.compilation.seconds, 3)
        return found

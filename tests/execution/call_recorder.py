"""The machinery of CUDA graphs without a GPU: recording remembers a function, replaying calls it.

So what the host does in a recorded step is tested on a CPU: fixed inputs and outputs, the carried
state, when a step is recorded and when it is eager.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class CallRecorder:
    """As `mprun.execution.cuda_graph.CudaRecorder`, for any device."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def warm(self, function: Callable[[], Any]) -> tuple[Any, str | None]:
        return function(), None

    def record(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return into_one_output(function)


def into_one_output(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """As its recording: every replay writes into one and the same output."""
    outputs: list[Tensor] = []

    def replay() -> Tensor:
        output = function()
        if not outputs:
            outputs.append(output)
        return outputs[0].copy_(output)

    return replay

"""The machinery of CUDA graphs without a GPU: recording remembers a function, replaying calls it.

So what the host does in a recorded step is tested on a CPU: fixed inputs and outputs, the carried
state, when a step is recorded and when it is eager.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class CallRecorder:
    """As `mprun.execution.CudaRecorder`, for any device."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def warm(self, function: Callable[[], Any]) -> tuple[Any, str | None]:
        return function(), None

    def record(self, function: Callable[[], Tensor]) -> "CallRecording":
        return CallRecording(function)


class CallRecording:
    """As its recording: every replay writes into one and the same output."""

    def __init__(self, function: Callable[[], Tensor]):
        self._function = function
        self._output: Tensor | None = None

    def replay(self) -> Tensor:
        output = self._function()
        if self._output is None:
            self._output = output
        else:
            self._output.copy_(output)
        return self._output

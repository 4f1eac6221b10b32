"""What asks a process to stop: signals, obeyed at the next step boundary, and its parent's end."""

import ctypes
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Interruption:
    """While active, SIGTERM, SIGUSR1 and SIGINT set `reason`; a second SIGINT stops at once."""

    def __init__(self):
        self.reason: str | None = None
        self._before: dict[int, Any] = {}  # handlers, by signal

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def __enter__(self) -> "Interruption":
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        name = signal.Signals(number).name
        if self.reason == "SIGINT" and name == "SIGINT":
            raise KeyboardInterrupt
        self.reason = name


def end_with_parent(parent: int) -> bool:
    """Ask Linux for SIGTERM when the parent dies; False if process `parent` has died already.

    Elsewhere only the second part. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # It may have died before the request: then this process has another parent by now.
    return os.getppid() == parent

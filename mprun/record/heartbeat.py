"""A sign of life of the training loop that other processes can see."""

import time
from contextlib import suppress
from pathlib import Path


class Heartbeat:
    """Sets the time stamp of the run's lock file while the loop goes on.

    From the loop itself and not from a thread: a step that hangs must show. Costs one reading of
    the clock a step, one system call every `seconds`.
    """

    def __init__(self, directory: Path, seconds: float = 2.0):
        self.path, self.seconds = directory / ".lock", seconds
        self.last = -seconds

    def beat(self) -> None:
        """Note that the loop has come this far."""
        now = time.monotonic()
        if now - self.last < self.seconds:
            return
        self.last = now
        # A disk that fails for good shows where something is written.
        with suppress(OSError):
            self.path.touch()


class Pulse:
    """Reads a heartbeat from outside: for how long has there been none?

    Compares time stamps with each other only, so that clocks of two machines may differ.
    """

    def __init__(self, directory: Path):
        self.path = directory / ".lock"
        self.stamp: int | None = None
        self.changed = time.monotonic()

    def silent_s(self) -> float:
        """Seconds since the last change that was seen, or since this object was made."""
        try:
            stamp = self.path.stat().st_mtime_ns
        except OSError:
            stamp = None
        if stamp != self.stamp:
            self.stamp, self.changed = stamp, time.monotonic()
        return time.monotonic() - self.changed

"""A cell's process: started in a group of its own, watched for a hang, ended politely or not."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mprun.record.heartbeat import Pulse

GRACE_S = 10.0  # between SIGTERM and SIGKILL of a process that hangs


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended.

    code: as subprocess says it. hung_s: the limit of silence it was killed for. cause: what is
    known beyond that.
    """

    code: int
    hung_s: float | None = None
    cause: str | None = None


class CellProcess:
    """`python -m mprun.cli.child ARGUMENTS`, with its output in the file `log`.

    directory: the run's, whose heartbeat is watched; a process without one for `stall_after`
    seconds (0: never) is killed. In a process group of its own Ctrl-C reaches the sweep alone,
    and what the run has started can be killed with it.
    """

    def __init__(self, arguments: list[str], directory: Path, log: Path, stall_after: float):
        command = [sys.executable, "-m", "mprun.cli.child", str(os.getpid()), *arguments]
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                process_group=0,
            )
        self.pulse = Pulse(directory)
        self.stall_after = stall_after
        self.hung_s: float | None = None
        self.kill_at = 0.0
        self.stopped = False

    def poll(self) -> Ended | None:
        """How it ended, or None while it runs; kills it if it hangs."""
        code = self.process.poll()
        if code is not None:
            # Loader processes that outlive a killed run would hold its memory and its lock.
            self._signal_group(signal.SIGKILL)
            return Ended(code, self.hung_s)
        if self.hung_s is not None:
            if time.monotonic() >= self.kill_at:
                self.kill()
        elif self.stall_after and self.pulse.silent_s() > self.stall_after:
            self.hung_s, self.kill_at = self.stall_after, time.monotonic() + GRACE_S
            self._signal_group(signal.SIGTERM)
        return None

    def stop(self) -> None:
        """Ask it, once, to write a checkpoint and end."""
        if not self.stopped:
            self.stopped = True
            self.process.terminate()

    def kill(self) -> None:
        """End it and all that it has started, now."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

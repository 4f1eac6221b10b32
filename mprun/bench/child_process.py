"""A bench child as its parent sees it: started, asked, ended. Never waits past a deadline."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mprun.training.signals import Interruption

CHILD_COMMAND = (sys.executable, "-m", "mprun.bench.child")
_LOOK_EVERY_S = 0.2  # how soon an interruption is noticed
_KILLED_WITHIN_S = 10.0


class ChildFailed(Exception):
    """The child answered with a failure, or died. kind: memory, refused or error."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class TimeUp(Exception):
    """The deadline came before the answer; the child is still at work."""


class Interrupted(Exception):
    """The user or the system asked to stop."""


class ChildProcess:
    """A process with JSON lines both ways and its stderr in `log`; its argument is the parent's id.

    In a process group of its own: Ctrl-C reaches the parent alone, and loader processes that the
    child started end with it. command: what to start instead of mprun.bench.child.
    """

    def __init__(
        self, log: Path, interruption: Interruption, command: Sequence[str] = CHILD_COMMAND
    ):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.interruption = log, interruption
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                process_group=0,
            )
        self._buffer = b""
        self._greeted = False

    def ask(self, deadline: float, do: str, **request) -> dict:
        """The answer to a request before `deadline` (of time.monotonic).

        Raises ChildFailed, TimeUp or Interrupted; after the last two the child is of no more use.
        """
        self.post(do, **request)
        return self.take(deadline)

    def post(self, do: str, **request) -> None:
        """Leave a request; `take` has its answer, in the order of the requests."""
        try:
            self.process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def take(self, deadline: float) -> dict:
        """The answer to the oldest request that has none yet; raises as `ask`."""
        if not self._greeted:
            self._answer(deadline)
            self._greeted = True
        return self._answer(deadline)

    def end(self) -> None:
        """End it now, with all that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a driver can hold a dead process for a while
            self.process.wait(_KILLED_WITHIN_S)
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()

    def _answer(self, deadline: float) -> dict:
        answer = json.loads(self._line(deadline))
        if not answer.pop("ok"):
            raise ChildFailed(answer["kind"], answer["reason"])
        return answer

    def _line(self, deadline: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if self.interruption.requested:
                    raise Interrupted(self.interruption.reason)
                if left <= 0:
                    raise TimeUp
                if not selector.select(min(left, _LOOK_EVERY_S)):
                    continue
                part = os.read(self.process.stdout.fileno(), 1 << 16)
                if not part:
                    raise self._died()
                self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self) -> ChildFailed:
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return ChildFailed("memory", "killed by the system (out of memory?)")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return ChildFailed("error", f"the process ended ({how}); see {self.log.name}")

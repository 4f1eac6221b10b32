"""One contender in a separate process: both sides of the protocol between a bench and its children.

A request is the name of a method of the child's worker and its arguments. The answer is the
method's result, or a `ChildFailed`. Only the child with a request works; the others wait and leave
the device alone. The parent never waits past a deadline.
"""

import os
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mprun.errors import PREEMPTED, BadInput, Resource, raised
from mprun.training.signals import end_with_parent

_SERVE = "import sys; from mprun.extensions.bench.child import serve; serve(*sys.argv[1:])"
_KILLED_WITHIN_S = 10.0


class ChildFailed(Exception):
    """The child answered with a failure, or died. kind: memory, refused or error."""

    def __init__(self, kind: str, reason: str):
        super().__init__(kind, reason)
        self.kind, self.reason = kind, reason


class TimeUp(Exception):
    """The deadline came before the answer; the child is still at work, and so unusable."""

    reason = "no time within the budget"


def serve(worker: str, descriptor: str, parent: str) -> None:
    """Answer requests in a child until the parent ends it.

    Args:
        worker: "module:class" of the object whose methods answer.
        descriptor, parent: of the pipe; process id.
    """
    if not end_with_parent(int(parent)):
        raise SystemExit(PREEMPTED)
    pipe, answers = Connection(int(descriptor)), pkgutil.resolve_name(worker)()
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send(getattr(answers, name)(**arguments))
        except Exception as error:  # any failure of a contender is a row of the report
            traceback.print_exc()
            pipe.send(_failure(error))


def _failure(error: Exception) -> ChildFailed:
    line = str(error).partition("\n")[0]
    is_memory = isinstance(error, MemoryError | Resource)
    if not is_memory and "torch" in sys.modules:  # which not every worker imports
        from mprun.record.memory import ran_out

        is_memory = ran_out(error)
    if is_memory:
        told = line.partition("; try ")[0]  # a bench chooses no other batch
        return ChildFailed("memory", f"out of memory: {told.removeprefix('out of memory: ')}")
    if isinstance(error, BadInput):
        return ChildFailed("refused", line)
    return ChildFailed("error", raised(error))


class ChildProcess:
    """A process that answers requests and prints into `log`; worker: as for `serve`.

    It leads a process group: Ctrl-C reaches only the parent, and its loader processes end with it.
    """

    def __init__(self, log: Path, worker: str):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._pipe, theirs = Pipe()
        with open(log, "wb") as file, theirs:
            descriptor = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, worker, str(descriptor), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=(descriptor,),
                process_group=0,
            )

    def ask(self, deadline: float, do: str, **request: Any) -> dict:
        """Return the answer to a request before `deadline` (time.monotonic)."""
        self.post(do, **request)
        return self.take(deadline)

    def post(self, do: str, **request: Any) -> None:
        """Send a request; `take` returns the answers in the order of the requests."""
        with suppress(BrokenPipeError):  # `take` reports it
            self._pipe.send((do, request))

    def take(self, deadline: float) -> dict:
        """Return the answer to the oldest open request; raise ChildFailed or TimeUp."""
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeUp
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            code = self.process.wait()
            if code == -signal.SIGKILL:
                raise ChildFailed(
                    "memory", "the process was killed by the system (out of memory?)"
                ) from None
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            told = f"the process ended ({how}); see {self.log.name}"
            raise ChildFailed("error", told) from None
        if isinstance(answer, ChildFailed):
            raise answer
        return answer

    def end(self) -> None:
        """Kill the child and every process that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a driver can hold a dead process for a while
            self.process.wait(_KILLED_WITHIN_S)
        self._pipe.close()

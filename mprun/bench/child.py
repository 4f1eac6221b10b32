"""One contender in a process of its own: the protocol between a bench and its children, both sides.

`python -m mprun.bench.child PARENT_ID`. A request is {"do": NAME, ...}; the answer is {"ok": true,
...} or {"ok": false, "kind": "memory" | "refused" | "error", "reason": ONE_LINE}: one JSON line
each way. Only the child that was asked works; the others wait for a line and leave the device
alone. The parent never waits past a deadline.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mprun.errors import PREEMPTED, BadInput, Resource, raised
from mprun.training.signals import Interruption, end_with_parent

if TYPE_CHECKING:
    from mprun.bench.own import Contest

_LOOK_EVERY_S = 0.2  # how soon an interruption is noticed
_KILLED_WITHIN_S = 10.0


def serve(contest: Callable[[], "Contest"], arguments: list[str]) -> int:
    """Answer requests about one contender until "end" or the end of the input.

    Args:
        contest: imports and makes what the contender is one of, which takes seconds.
        arguments: the id of the parent, with which this process ends.
    """
    if not end_with_parent(int(arguments[0])):
        return PREEMPTED
    # Whatever a library prints belongs into the log: stdout is the protocol alone.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from mprun.bench.worker import Worker

    worker = Worker(contest())
    _send(answers, {"ok": True})  # imports are done
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        if name == "end":
            break
        try:
            answer = {"ok": True, **worker.ask(name, request)}
        except Exception as error:  # any failure of a contender is a row of the report
            traceback.print_exc()
            answer = {"ok": False, **_failure(error)}
        _send(answers, answer)
    return 0


def _failure(error: Exception) -> dict[str, str]:
    """kind and one-line reason of a failure."""
    import torch

    line = str(error).partition("\n")[0]
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError | Resource)
    if memory or "DefaultCPUAllocator" in line:
        return {"kind": "memory", "reason": f"out of memory: {line}"}
    if isinstance(error, BadInput):
        return {"kind": "refused", "reason": line}
    return {"kind": "error", "reason": raised(error)}


def _send(answers: IO[str], answer: dict) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


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
    child started end with it. command: see `mprun.bench.own.Contest`.
    """

    def __init__(self, log: Path, interruption: Interruption, command: Sequence[str]):
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
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests: IO[bytes] = self.process.stdin
        self._answers: IO[bytes] = self.process.stdout
        self._buffer = b""
        self._greeted = False

    def ask(self, deadline: float, do: str, **request: Any) -> dict:
        """The answer to a request before `deadline` (of time.monotonic).

        Raises ChildFailed, TimeUp or Interrupted; after the last two the child is of no more use.
        """
        self.post(do, **request)
        return self.take(deadline)

    def post(self, do: str, **request: Any) -> None:
        """Leave a request; `take` has its answer, in the order of the requests."""
        try:
            self._requests.write(json.dumps({"do": do, **request}).encode() + b"\n")
            self._requests.flush()
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
            self._requests.close()
        self._answers.close()

    def _answer(self, deadline: float) -> dict:
        answer = json.loads(self._line(deadline))
        if not answer.pop("ok"):
            raise ChildFailed(answer["kind"], answer["reason"])
        return answer

    def _line(self, deadline: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if self.interruption.requested:
                    raise Interrupted(self.interruption.reason)
                if left <= 0:
                    raise TimeUp
                if not selector.select(min(left, _LOOK_EVERY_S)):
                    continue
                part = os.read(self._answers.fileno(), 1 << 16)
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


def _own() -> "Contest":
    from mprun.bench.own import Contest

    return Contest()


if __name__ == "__main__":
    raise SystemExit(serve(_own, sys.argv[1:]))

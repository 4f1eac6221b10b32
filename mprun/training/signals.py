"""Requests to stop a process: signals, and its parent's end."""

import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from mprun.errors import ASKING, PREEMPTED

_AGAIN_S = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Stopped(KeyboardInterrupt):
    """A request to stop in code that can be left at once; carries the signal's name."""


class Interruption:
    """Handle the signals of `ASKING` while active: set `reason`, answer at once on stderr.

    The run stops at the next step boundary. Within `breaks` it stops at once, by `Stopped`, which
    is raised again if foreign code (a compiler, a destructor) swallows it. A second SIGINT stops
    at once anywhere. Ignored signals stay ignored (SIGHUP, by nohup), except SIGINT and SIGTERM.

    Args:
        ends_process: the process ends afterwards, so that signals which were settled stay ignored.
    """

    def __init__(self, ends_process: bool = False) -> None:
        self.ends_process = ends_process
        self.reason: str | None = None
        self._breaks = False
        self._raised: weakref.ref[Stopped] | None = None
        self._before: dict[int, Any] = {}  # handlers, by signal

    @contextmanager
    def breaks(self) -> Iterator[None]:
        """Let a signal leave this block at once, by `Stopped`: it may be left unfinished."""
        before, self._breaks = self._breaks, True
        try:
            if self.reason is not None:
                raise Stopped(self.reason)
            yield
        finally:
            self._breaks = before
            if self._raised is not None:
                self._raised = None
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _break(self, name: str) -> None:
        """Raise `Stopped`; a timer raises it again if it is swallowed inside the block."""
        stopped = Stopped(name)
        self._raised = weakref.ref(stopped)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        try:
            raise stopped
        finally:
            del stopped  # the traceback holds this frame; only the handler may keep it alive

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in ASKING:
                ignored = signal.getsignal(number) == signal.SIG_IGN
                if not ignored or number in (signal.SIGINT, signal.SIGTERM):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            if not (self.ends_process and signal.getsignal(number) == signal.SIG_IGN):
                signal.signal(number, handler)

    def settle(self) -> None:
        """Ignore what asks for an end, but for SIGINT: the outcome is there, and is the exit code.

        The handlers that were there before do not come back.
        """
        for number in [*self._before]:
            if number != signal.SIGINT:
                del self._before[number]
                signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame) -> None:
        if number == signal.SIGALRM and self._raised is not None:  # the timer of `_break`
            if self._raised() is None and self.reason is not None:
                self._break(self.reason)
            return
        name = signal.Signals(number).name
        again = self.reason == "SIGINT" and name == "SIGINT"
        self.reason = name
        later = "stopping after this step; again stops at once"
        answer = "stopping" if self._breaks or again else later
        # Not by sys.stderr, whose buffer may be in use at this moment.
        with suppress(OSError):
            line = "\n" * os.isatty(2)  # below a bar
            os.write(2, f"{line}mprun: {name}: {answer}\n".encode())
        if again:  # in the middle of a step, so there is no state to keep
            raise KeyboardInterrupt(name)
        if self._breaks:
            self._break(name)


def end_with_parent(parent: int, grace_s: float | None = None) -> bool:
    """Ask Linux for SIGTERM when the parent dies; return False if `parent` has already died.

    Other systems only get the return value. Source: prctl(2), PR_SET_PDEATHSIG.

    grace_s: seconds after the parent's end at which the process exits, whatever it waits for; None:
    it takes the time that it needs.
    """
    if grace_s is not None:
        threading.Thread(target=_end_after, args=(parent, grace_s), daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # The parent may have died before the request: then this process has another one by now.
    return os.getppid() == parent


def _end_after(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(grace_s)
    os._exit(PREEMPTED)

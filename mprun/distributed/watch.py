"""A thread that ends a rank whose main thread waits for a lost one, on the host or on the device.

gloo raises an error where it waits too long. NCCL does not: the main thread waits for the device,
and NCCL's watchdog aborts the process, which then looks like the one that failed.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from mprun.distributed.store import BEAT_S, beat, fail, failure_of, late_ranks, named
from mprun.errors import RESOURCE

AFTER_GLOO_S = 3.0  # after the main thread would have heard of it from gloo
AFTER_WATCH_S = 9.0  # after which NCCL's watchdog may speak
_TO_END_S = 5.0  # for a main thread that knows that the run has failed


class Watch:
    """Beat for this rank; end its process when another one is lost and nobody else does.

    begun: returns the number of exchanges that this rank has begun. `tell` is called with the cause
    and the exit code before the process ends here, while its main thread waits.
    """

    def __init__(
        self, store: dist.Store, rank: int, world: int, timeout_s: float, begun: Callable[[], int]
    ) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.timeout_s, self.begun = timeout_s, begun
        self.tell: Callable[[str, int], None] = lambda cause, code: None
        # Held by the thread that ends the process: the main one, or this one.
        self.ending = threading.RLock()
        self._over = threading.Event()
        beat(store, rank, 0, begun())
        threading.Thread(target=self._watch, name="mprun-watch", daemon=True).start()

    def stop(self) -> None:
        """End the thread: nobody waits for anybody any more."""
        self._over.set()

    def _watch(self) -> None:
        number, begun, changed, found = 0, -1, time.monotonic(), None
        while not self._over.wait(BEAT_S):
            number += 1
            if (now := self.begun()) != begun:
                begun, changed = now, time.monotonic()
            try:
                beat(self.store, self.rank, number, begun)
            except RuntimeError:
                # Who serves the store is gone. Mostly the main thread hears of it as well.
                if not self._over.wait(self.timeout_s):
                    self._end([0], RESOURCE, "its store does not answer any more")
                return
            # Kept, because who serves the store may be gone before this rank has to end.
            if (found := failure_of(self.store)) is not None:
                self._over.wait(_TO_END_S)
                break
            if time.monotonic() - changed > self.timeout_s + AFTER_GLOO_S:
                late = late_ranks(self.store, self.world, self.rank)
                if late and self.begun() == begun:
                    own = late, RESOURCE, no_answer(self.timeout_s)
                    fail(self.store, *own)
                    # Another rank may have told another cause, or ended, and the store with it.
                    found = failure_of(self.store) or own
                    break
        if found is not None and not self._over.is_set():
            self._end(*found)

    def _end(self, ranks: list[int], code: int, text: str) -> None:
        """End the process; within seconds, whatever its main thread and its disk do."""
        threading.Timer(_TO_END_S, os._exit, (code,)).start()
        if not self.ending.acquire(blocking=False):
            return  # the main thread tells the cause, and then ends
        kill_stopped(ranks)
        cause = f"{named(ranks)}: {text}"
        with suppress(Exception):
            self.tell(cause, code)
        with suppress(OSError):
            os.write(2, f"mprun: {cause}\n".encode())
        os._exit(code)


def kill_stopped(ranks: Sequence[int]) -> None:
    """Kill these ranks where they are stopped (SIGSTOP), which no thread of their own can end.

    Only those that the same launcher has started as this process, on the same machine.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            # pid (name) state parent ...; a name may hold spaces and brackets.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "T" or int(parent) != os.getppid():
                continue
            given = (folder / "environ").read_bytes().split(b"\0")
            if any(
                b"RANK=%d" % rank in given or b"SLURM_PROCID=%d" % rank in given for rank in ranks
            ):
                os.kill(int(folder.name), signal.SIGKILL)


def no_answer(timeout_s: float) -> str:
    return f"no answer for {timeout_s:g} s (dist.timeout_s)"

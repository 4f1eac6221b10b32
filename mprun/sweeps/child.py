"""A process of a sweep or of a launcher of ranks: `python -m mprun.sweeps.child PARENT WORD...`.

It runs the command `mprun WORD...`, one cell or one rank, and ends when the process PARENT is gone;
a run writes a checkpoint first.
"""

import os
import signal
import sys
from collections.abc import Callable

from mprun.entry_points import announced, loaded
from mprun.errors import ASKING, PREEMPTED
from mprun.training.signals import end_with_parent


def child(arguments: list[str]) -> int:
    """Run the command behind the parent's process id; return its exit code."""
    # A batch system may send it to every process of a job; its default would end the run.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    return with_parent(
        arguments, lambda words: loaded(announced("console_scripts")["mprun"])(words)
    )


def with_parent(arguments: list[str], work: Callable[[list[str]], int]) -> int:
    """Call `work` with all arguments but the first, a process id; end when that process ends."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)  # a launcher of ranks has blocked these
    # A rank may wait for another one that is gone as well.
    if not end_with_parent(int(arguments[0]), grace_s=30.0 if "RANK" in os.environ else None):
        return PREEMPTED
    return work(arguments[1:])


if __name__ == "__main__":
    raise SystemExit(child(sys.argv[1:]))

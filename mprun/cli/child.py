"""One cell as a process: a run that ends, with a checkpoint, when whoever started it is gone.

`python -m mprun.cli.child PARENT_ID OVERRIDE...`
"""

import ctypes
import os
import signal
import sys

from mprun.cli import main
from mprun.errors import PREEMPTED

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> bool:
    """Ask Linux for SIGTERM when the parent dies; False if process `parent` has died already.

    Elsewhere only the second part. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # It may have died before the request: then this process has another parent by now.
    return os.getppid() == parent


def _run(arguments: list[str]) -> int:
    # A batch system may send it to every process of a job; its default would end the run.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if not end_with_parent(int(arguments[0])):
        return PREEMPTED
    return main(arguments[1:])


if __name__ == "__main__":
    raise SystemExit(_run(sys.argv[1:]))

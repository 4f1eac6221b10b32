"""The processes that a sweep starts; each ends, a run with a checkpoint, when the sweep is gone.

python -m mprun.cli.child PARENT_ID OVERRIDE...      one cell, or one rank of several
python -m mprun.cli.child --launch PARENT_ID FOLDER  Hydra's launcher for a batch of cells
"""

import os
import signal
import sys

from mprun.cli import main
from mprun.errors import ASKING, DONE, PREEMPTED
from mprun.training.signals import end_with_parent


def child(arguments: list[str]) -> int:
    """Do what the command line says; the exit code."""
    launches = arguments[0] == "--launch"
    parent, *rest = arguments[launches:]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)  # which a launcher of ranks has blocked
    if not launches:
        # A batch system may send it to every process of a job; its default would end the run.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # A rank may wait for another one that is gone as well.
    if not end_with_parent(int(parent), grace_s=30.0 if "RANK" in os.environ else None):
        return PREEMPTED
    if not launches:
        return main(rest)
    from mprun.sweep.batch import drive

    drive(*rest)
    return DONE


if __name__ == "__main__":
    raise SystemExit(child(sys.argv[1:]))

"""The processes that a sweep starts; each ends, a run with a checkpoint, when the sweep is gone.

python -m mprun.cli.child PARENT_ID OVERRIDE...      one cell
python -m mprun.cli.child --launch PARENT_ID FOLDER  Hydra's launcher for a batch of cells
"""

import signal
import sys

from mprun.cli import main
from mprun.errors import DONE, PREEMPTED
from mprun.training.signals import end_with_parent


def _launch(arguments: list[str]) -> int:
    from mprun.sweep.batch import drive

    if not end_with_parent(int(arguments[0])):
        return PREEMPTED
    drive(arguments[1])
    return DONE


def _run(arguments: list[str]) -> int:
    # A batch system may send it to every process of a job; its default would end the run.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if not end_with_parent(int(arguments[0])):
        return PREEMPTED
    return main(arguments[1:])


if __name__ == "__main__":
    given = sys.argv[1:]
    raise SystemExit(_launch(given[1:]) if given[0] == "--launch" else _run(given))

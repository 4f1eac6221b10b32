"""One cell as a process: a run that ends, with a checkpoint, when whoever started it is gone.

`python -m mprun.cli.child PARENT_ID OVERRIDE...`
"""

import signal
import sys

from mprun.cli import main
from mprun.errors import PREEMPTED
from mprun.training.signals import end_with_parent


def _run(arguments: list[str]) -> int:
    # A batch system may send it to every process of a job; its default would end the run.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if not end_with_parent(int(arguments[0])):
        return PREEMPTED
    return main(arguments[1:])


if __name__ == "__main__":
    raise SystemExit(_run(sys.argv[1:]))

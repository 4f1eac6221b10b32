"""The process in which Hydra's launcher runs: `python -m mprun.sweep.driver PARENT_ID FOLDER`."""

import json
import sys
from pathlib import Path

from mprun.errors import PREEMPTED
from mprun.sweep.launcher import launch
from mprun.sweep.worker import RunJob
from mprun.training.signals import end_with_parent


def _drive(parent: int, folder: str) -> int:
    if not end_with_parent(parent):
        return PREEMPTED
    jobs = json.loads((Path(folder) / "jobs.json").read_text(encoding="utf-8"))
    launch(jobs["launcher"], folder, len(jobs["cells"]), RunJob(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(_drive(int(sys.argv[1]), sys.argv[2]))

"""What a worker of a Hydra launcher does: one cell, in a process of its own.

Workers are reused (joblib) or are told to end early (submitit); the run itself is neither.
"""

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mprun.errors import PREEMPTED
from mprun.record.run_directory import write_json
from mprun.sweep.attempt import Attempt, Outcome
from mprun.sweep.jobs import Cell


@dataclass(frozen=True, slots=True)
class RunJob:
    """Runs job number `HydraConfig.get().job.num` of a batch's folder; can be pickled."""

    folder: str

    def __call__(self, config: DictConfig) -> None:
        run_job(Path(self.folder), HydraConfig.get().job.num)


def run_job(folder: Path, number: int) -> None:
    """Run cell `number` of `folder`/jobs.json to its end and say there how it ended."""
    jobs = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    os.chdir(jobs["working_folder"])
    _show_devices(jobs["visible_devices"])
    cell = cell_of(jobs["cells"][number])
    result = folder / f"job-{number}.json"
    if _unwanted(folder, jobs):
        write_json(result, _ended(Outcome("stopped before its first step", PREEMPTED)))
        return
    write_json(result, {"state": "running"})
    attempt = Attempt(cell, jobs["config_dir"], jobs["stall_after"])
    try:
        while (outcome := attempt.poll()) is None:
            if _unwanted(folder, jobs):
                attempt.stop()
            time.sleep(0.2)
    except BaseException as error:
        # submitit says in this way that the time is up; exit: it will call again.
        attempt.stop()
        while (outcome := attempt.poll()) is None:
            time.sleep(0.2)
        if isinstance(error, Exception):
            write_json(result, _ended(outcome))
        raise
    write_json(result, _ended(outcome))


def cell_of(fields: dict) -> Cell:
    """A cell from its fields as JSON gives them back."""
    exact = {key: tuple(fields[key]) for key in ("overrides", "factories")}
    exact["directory"] = Path(fields["directory"])
    exact["data_places"] = tuple((key, place) for key, place in fields["data_places"])
    return Cell(**fields | exact)


def _ended(outcome: Outcome) -> dict:
    return {"state": "ended", **asdict(outcome)}


def _unwanted(folder: Path, jobs: dict) -> bool:
    """Whether the sweep wants its runs to stop, or is gone."""
    if (folder / "stop").exists():
        return True
    if not jobs["ends_with_sweep"]:
        return False
    try:
        with open(folder / "alive", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _show_devices(visible: str | None) -> None:
    if visible == "all":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    elif visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible

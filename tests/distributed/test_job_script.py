"""The job script of docs/several_gpus.md: what it does after each way in which srun can end."""

import os
import re
import signal
import subprocess
import time

import pytest

from mprun.config.compose import compose_config
from mprun.record.run_directory import write_json

from ..helpers import numbers_of, record_of, rows_of
from ..pages import with_programs
from .processes import ROOT, children_of
from .test_launch import state_of

SCRIPT = ROOT / "docs" / "examples" / "train.sbatch"
# In place of srun: notes its words, makes the record of a run that began, ends with the next code.
SRUN = """#!/bin/bash
echo "srun $*" >> "$SAID"
mkdir -p "$HOME/runs/7" && touch "$HOME/runs/7/run.json"
code=$(head -n 1 "$CODES"); sed -i 1d "$CODES"; exit "$code"
"""
# In place of srun: starts two tasks, and ends with the worst code, as srun does.
SRUN_OF_TWO = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_NODEID=0 SLURM_JOB_NODELIST=localhost
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" 2>> "$SAID.$task" &
    tasks+=($!)
done
worst=0
for task in "${tasks[@]}"; do wait "$task"; code=$?; ((code > worst)) && worst=$code; done
exit $worst
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$SAID"
[ -z "$REFUSES" ]
"""
WORDS = re.compile(r"^words=\((experiment=.*)\)$", re.MULTILINE)
# A network of this size, and data for it, in place of the script's own.
SMALL = (
    "model=lstm_lm data=text data.root=$HOME/texts data.batch_size=2 data.sequence_length=4 "
    "model.embedding_size=4 model.hidden_size=4 model.num_layers=1 device=cpu threads=1 "
    "precision=fp16_master_scaled precision.overrides.output=fp32 name=7 train.log_every=1 "
    "train.eval_every=0 train.steps=300"
)


def beside_slurm(folder, srun: str, **more: str) -> dict[str, str]:
    """The environment of a job: its own srun and scontrol, and the real `mprun`."""
    programs = with_programs(folder)
    for name, text in (("srun", srun), ("scontrol", SCONTROL)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    own = {"HOME": str(folder), "SLURM_JOB_ID": "7", "SAID": str(folder / "said")}
    return programs | own | {"OMP_NUM_THREADS": "1"} | more


@pytest.mark.parametrize(
    ("codes", "ends", "resumed", "requeued"),
    [
        ([0], 0, [False], False),
        ([75], 0, [False], True),
        ([143], 0, [False], True),
        ([3], 3, [False], False),
        ([5, 137, 0], 0, [False, True, True], False),
        ([137, 75], 0, [False, True], True),
        ([5, 5, 5], 5, [False, True, True], False),
        ([5, 4], 4, [False, True], False),
    ],
)
def test_what_it_does_after_each_exit_code(codes, ends, resumed, requeued, tmp_path):
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    own = beside_slurm(tmp_path, SRUN, CODES=str(tmp_path / "codes"))
    done = subprocess.run(["bash", SCRIPT], env=own, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (ends, "")
    said = (tmp_path / "said").read_text().splitlines()
    assert ("scontrol requeue 7" in said) == requeued
    ran = [line for line in said if line.startswith("srun ")]
    assert [f" resume={tmp_path}/runs/7" in line for line in ran] == resumed
    for line in ran:
        words = line.partition(" mprun ")[2].split()
        assert compose_config(words[:6], files=False).config.data.root == "/data/imagenet"


def test_a_job_that_slurm_does_not_queue_again_has_not_succeeded(tmp_path):
    (tmp_path / "codes").write_text("75\n")
    own = beside_slurm(tmp_path, SRUN, CODES=str(tmp_path / "codes"), REFUSES="1")
    assert subprocess.run(["bash", SCRIPT], env=own).returncode == 75


def test_a_job_that_is_queued_again_after_its_end_has_succeeded(tmp_path):
    run = tmp_path / "runs" / "7"
    run.mkdir(parents=True)
    write_json(run / "run.json", {"seed": 0, "status": "done"})
    own = beside_slurm(tmp_path, SRUN, CODES=os.devnull)
    assert subprocess.run(["bash", SCRIPT], env=own).returncode == 0
    assert not (tmp_path / "said").exists()


@pytest.mark.slow
def test_it_goes_on_to_the_end_after_each_preemption(tmp_path):
    """Asked to stop before Python runs, before a run is there, and in it; srun is all that is made.

    SLURM starts a job that was queued again with the same number.
    """
    text = SCRIPT.read_text(encoding="utf-8")
    assert WORDS.search(text)
    script = tmp_path / "train.sbatch"
    script.write_text(WORDS.sub(f"words=({SMALL})", text))
    homes = [tmp_path / "stopped", tmp_path / "straight"]
    for home in homes:
        (home / "texts").mkdir(parents=True)
        for split in ("train", "valid", "test"):
            (home / "texts" / f"{split}.txt").write_text("the cat sat on a mat \n" * 500)
    own = beside_slurm(homes[0], SRUN_OF_TWO)
    run, started = homes[0] / "runs" / "7", ["bash", str(script)]

    def steps() -> int:
        return len(rows_of(run)) if (run / "metrics.jsonl").exists() else 0

    # Whether the tasks are to be stopped now: they begin, import, and train twice.
    stops = [lambda: True, lambda: "torch" in maps(tasks[0]), lambda: steps() > 5]
    stops += [lambda: steps() > taken + 5]
    for number, now in enumerate(stops):
        taken = steps()
        job = subprocess.Popen(started, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        tasks: list[int] = []
        while len(tasks) < 2 or not now():
            time.sleep(0.02)
            assert job.poll() is None, job.communicate()
            tasks = [task for srun in children_of(job.pid) for task in children_of(srun)]
        for task in tasks:
            os.kill(task, signal.SIGTERM)
        assert job.wait(300) == 0, job.communicate()
        job.communicate()
        said = (homes[0] / "said").read_text().splitlines()
        assert said == ["scontrol requeue 7"] * (number + 1)
        assert (run / "run.json").exists() == (number > 1)
        assert number < 2 or record_of(run)["status"] == "preempted"
    assert subprocess.run(started, env=own, timeout=300).returncode == 0
    assert subprocess.run(started, env=own, timeout=300).returncode == 0
    straight = beside_slurm(homes[1], SRUN_OF_TWO)
    assert subprocess.run(started, env=straight, timeout=300).returncode == 0
    assert not (homes[1] / "said").exists()
    other = homes[1] / "runs" / "7"
    assert (record_of(run)["status"], record_of(run)["attempts"]) == ("done", 3)
    assert state_of(run) == state_of(other)
    assert numbers_of(run) == numbers_of(other)


def maps(pid: int) -> str:
    """The files that a process has in memory."""
    with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
        return file.read()

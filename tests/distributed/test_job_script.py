"""The job script of docs/several_gpus.md: what it does after each way in which srun can end."""

import os
import subprocess

import pytest

from .processes import ROOT

SCRIPT = ROOT / "docs" / "examples" / "train.sbatch"
# In place of srun: notes its words, makes the record of a run that began, ends with the next code.
SRUN = """#!/bin/bash
echo "srun $*" >> "$SAID"
mkdir -p "$HOME/runs/7" && touch "$HOME/runs/7/run.json"
code=$(head -n 1 "$CODES"); sed -i 1d "$CODES"; exit "$code"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$SAID"
"""


@pytest.mark.parametrize(
    ("codes", "ends", "starts", "requeued"),
    [
        ([0], 0, ["output_dir"], False),
        ([75], 0, ["output_dir"], True),
        ([3], 3, ["output_dir"], False),
        ([5, 137, 0], 0, ["output_dir", "resume", "resume"], False),
        ([137, 75], 0, ["output_dir", "resume"], True),
        ([5, 5, 5], 5, ["output_dir", "resume", "resume"], False),
        ([5, 4], 4, ["output_dir", "resume"], False),
    ],
)
def test_what_it_does_after_each_exit_code(codes, ends, starts, requeued, tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    own = {"HOME": str(tmp_path), "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    own |= {"SAID": str(tmp_path / "said"), "CODES": str(tmp_path / "codes")}
    done = subprocess.run(["bash", SCRIPT], env=os.environ | own, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (ends, "")
    said = (tmp_path / "said").read_text().splitlines()
    assert ("scontrol requeue 7" in said) == requeued
    ran = [line for line in said if line.startswith("srun ")]
    assert len(ran) == len(starts)
    for line, word in zip(ran, starts, strict=True):
        assert f" {word}={tmp_path}/runs/7" in line
        assert ("experiment=" in line) == (word == "output_dir")

"""Runs of a sweep are copies of it: what it has imported may not have touched the device."""

import os
import subprocess

import pytest

from mprun.record.run_record import read_record

from . import runtime as fake_cuda
from .cells import MODELS
from .conftest import ROOT


@pytest.mark.slow
def test_copies_of_a_sweep_take_the_device(device, tmp_path):
    """A process that was forked from one with a CUDA context can make none of its own."""
    environment = fake_cuda.environment(device.folder) | {"PYTHONPATH": str(ROOT)}
    words = [*MODELS["conv_autoencoder"], "device=cuda", "threads=1", "train.steps=3"]
    command = [device.python, "-m", "mprun", "-m", "-j", "2", *words, "precision=fp32,amp"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    runs = [path.parent for path in tmp_path.glob("outputs/*/*/run.json")]
    assert len(runs) == 2
    for run in runs:
        record = read_record(run)
        assert (record["status"], record["environment"]["device"]) == ("done", "cuda")

"""Ranks on GPUs, over NCCL: needs two of them."""

import subprocess

import pytest
import torch

from ..helpers import record_of
from .processes import mprun, start
from .test_faults import TIMEOUT_S, arguments_of, faulty
from .test_same_bits import free_port

MODES = ("fp32", "tf32", "fp16_master_scaled", "amp", "bf16_master", "amp_bf16")
OVERRIDES = {
    "classification": "model=resnet50 data=synthetic_images data.image_size=64",
    "language_model": "model=lstm_lm data=synthetic_tokens",
    "gan": "model=dcgan",
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def loss_of(folder, *overrides):
    ended = mprun("device=cuda", *overrides, f"output_dir={folder}")
    assert ended.returncode == 0, ended.stderr
    record = record_of(folder)
    return record["final"]["loss"], record


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", OVERRIDES)
def test_two_gpus_learn_what_one_does(task, mode, tmp_path):
    """Kernels and sums differ in their order; 20 steps at a usual rate stay within a hundredth."""
    own = [*OVERRIDES[task].split(), f"precision={mode}", "train.steps=20", "data.batch_size=16"]
    own.append("train.accumulate=2" if task != "language_model" else "train.accumulate=1")
    alone, _ = loss_of(tmp_path / "one", *own)
    for engine in ("auto", "flat"):
        both, record = loss_of(tmp_path / engine, *own, "devices=2", f"dist.engine={engine}")
        assert both == pytest.approx(alone, rel=1e-2)
        assert record["ranks"]["backend"] == "nccl"
        overlaps = engine == "auto" and task != "gan"
        assert record["ranks"]["engine"] == ("ddp" if overlaps else "flat")


def test_the_same_bits_twice(tmp_path):
    own = ["model=resnet50", "precision=amp", "train.accumulate=2", "devices=2", "train.steps=10"]
    own += ["data.batch_size=8", "deterministic=true"]
    assert loss_of(tmp_path / "a", *own)[0] == loss_of(tmp_path / "b", *own)[0]


def tasks(words, gpus):
    """Two tasks of srun, each of which is shown some GPUs; exit codes and what they printed."""
    own = {"SLURM_STEP_ID": 0, "SLURM_NTASKS": 2, "SLURM_NNODES": 1, "SLURM_NODEID": 0}
    own |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": free_port()}
    started = []
    for task, shown in enumerate(gpus):
        more = own | {"SLURM_PROCID": task, "SLURM_LOCALID": task, "CUDA_VISIBLE_DEVICES": shown}
        started.append(start(*words, stderr=subprocess.PIPE, **more))
    said = [one.communicate(timeout=300)[1] for one in started]
    return [one.returncode for one in started], said


def test_each_rank_is_shown_its_own_gpu(tmp_path):
    words = ["device=cuda", *OVERRIDES["language_model"].split(), f"output_dir={tmp_path / 'run'}"]
    codes, said = tasks(words, ("0", "1"))
    assert codes == [0, 0], said
    codes, said = tasks([*words[:-1], f"output_dir={tmp_path / 'no'}"], ("0", "0"))
    assert codes == [2, 2], said
    assert "ranks 0 and 1 have the same GPU" in said[0]


@pytest.mark.parametrize("engine", ["flat", "ddp"])
def test_a_rank_that_hangs_is_named(engine, tmp_path):
    own = [word for word in arguments_of("hung", tmp_path / "run") if word != "device=cpu"]
    own += ["device=cuda", f"dist.engine={engine}"]
    ended = mprun(*own, **faulty("hung:training", tmp_path))
    assert ended.returncode == 5, ended.stderr
    assert f"mprun: rank 1: no answer for {TIMEOUT_S} s" in ended.stderr

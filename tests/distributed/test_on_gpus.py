"""Ranks on GPUs, over NCCL: needs two of them."""

import pytest
import torch

from ..helpers import record_of
from .processes import done, ended
from .test_faults import TIMEOUT_S, arguments_of, faulty
from .test_launch import srun

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
    done("device=cuda", *overrides, f"output_dir={folder}")
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


def test_each_rank_is_shown_its_own_gpu(tmp_path):
    words = ["device=cuda", *OVERRIDES["language_model"].split()]
    first, second = ({"CUDA_VISIBLE_DEVICES": gpu} for gpu in (0, 1))
    ended(srun([*words, f"output_dir={tmp_path / 'run'}"], each=(first, second)), 0)
    said = ended(srun([*words, f"output_dir={tmp_path / 'no'}"], each=(first, first)), 2)
    assert "ranks 0 and 1 have the same GPU" in said[0]


@pytest.mark.parametrize("engine", ["flat", "ddp"])
def test_a_rank_that_hangs_is_named(engine, tmp_path):
    own = [word for word in arguments_of("hung", tmp_path / "run") if word != "device=cpu"]
    own += ["device=cuda", f"dist.engine={engine}"]
    said = done(*own, code=5, **faulty("hung:training", tmp_path)).stderr
    assert f"mprun: rank 1: no answer for {TIMEOUT_S} s" in said

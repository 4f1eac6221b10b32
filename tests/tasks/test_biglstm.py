"""bigLSTM at its published widths takes a step; only the vocabulary is reduced."""

import math

import pytest
import torch

from ..helpers import TINY_LM


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled"])
def test_biglstm_takes_a_step(build_run, mode):
    scaler = "scaler=none" if mode == "fp32" else "scaler.init_scale=1024"
    tokens = ["data=synthetic_tokens", "data.vocab_size=64", "data.batch_size=2"]
    tokens.append("data.sequence_length=4")
    task = build_run("model=biglstm", *tokens, f"precision={mode}", scaler).task
    model = task.learner.model
    # 151.06 M as published, and 2 x 32,768 for torch's second bias vector.
    assert sum(p.numel() for p in model.lstm.parameters()) == 151_060_480 + 2 * 4 * 8192
    # 8,192 candidates of 64 words are the full softmax, of tables in FP32.
    assert model.softmax.sampler.count == 64
    assert model.output.weight.dtype == model.embedding.weight.dtype == torch.float32
    weights = [model.lstm.weight_hh_l0, model.embedding.weight, model.output.weight]
    before = [weight.detach().clone() for weight in weights]
    metrics = task.train_step(0, measure=True)
    # Near-uniform predictions at the start: log(64) = 4.16, weights of +-0.04 move it little.
    assert abs(metrics["loss"].item() - math.log(64)) < 0.5
    assert torch.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
    for old, weight in zip(before, weights, strict=True):
        assert not torch.equal(old, weight)


@pytest.mark.parametrize("factor", ["1", "128"])
def test_the_settings_of_the_published_code(build_run, factor):
    """All of them at once on a small model: nothing is refused and a step is taken."""
    own = [*TINY_LM, "model=biglstm", "model.projection_size=4", "model.sampled_softmax=12"]
    own += ["model.time_reduction=sum", f"model.embedding_gradient_factor={factor}"]
    own += ["train.clip_norm=1", "train.clip_modules=[lstm]", "optim.average_decay=0.999"]
    own += ["optim.average_modules=[lstm]", "scaler.init_scale=128"]
    task = build_run(*own, "precision=fp16_master_scaled").task
    learner, model = task.learner, task.learner.model
    tables = {"embedding.weight", "output.weight", "output.bias"}
    state = learner.steps.state_by_name()
    assert all((state[name]["sum"] == 1.0).all() for name in tables)
    assert model.dropout.p == model.lstm.dropout == pytest.approx(0.1)  # keep probability 0.9
    assert learner.averages.keys() == {f"lstm.{name}" for name, _ in model.lstm.named_parameters()}
    before = {name: learner.named[name].detach().clone() for name in tables}
    metrics = task.train_step(0, measure=True)
    assert metrics["found_inf"] == 0 and metrics["loss"].isfinite()
    for name, old in before.items():
        assert not torch.equal(learner.named[name], old), name

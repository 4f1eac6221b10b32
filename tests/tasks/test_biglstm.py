"""bigLSTM at its published widths takes a step; only the vocabulary is reduced."""

import math

import pytest
import torch


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled"])
def test_biglstm_takes_a_step(build_run, mode):
    built = build_run(
        "model=biglstm",
        "data=synthetic_tokens",
        "data.vocab_size=64",
        "data.batch_size=2",
        "data.sequence_length=4",
        "scaler=none" if mode == "fp32" else "scaler.init_scale=1024",
        f"precision={mode}",
    )
    lstm = built.task.learner.model.lstm
    # 151.06 M as published, and 2 x 32,768 for torch's second bias vector.
    assert sum(p.numel() for p in lstm.parameters()) == 151_060_480 + 2 * 4 * 8192
    before = built.task.learner.optimizer.updated[0].detach().clone()
    metrics = built.task.train_step(0, measure=True)
    # Near-uniform predictions at the start: log(64) = 4.16, weights of +-0.04 move it little.
    assert abs(metrics["loss"].item() - math.log(64)) < 0.5
    assert torch.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
    assert not torch.equal(before, built.task.learner.optimizer.updated[0])

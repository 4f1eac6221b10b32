"""Losses of a run read outputs in the mode's dtype; gradients are scaled where the loss leaves."""

import pytest
import torch

from mprun.precision import StaticLossScale
from mprun.tasks import supervised

from ..helpers import TINY_LM, mixed, network

UNSCALED = ("fp32", "amp_bf16", "bf16_master", "fp16_naive")
SCALED = [(mode, scale) for mode in ("fp16_master_scaled", "amp") for scale in (1.0, 1024.0)]


@pytest.mark.parametrize(("mode", "loss_scale"), [*((mode, None) for mode in UNSCALED), *SCALED])
def test_gradients_are_those_of_widened_outputs(mode, loss_scale):
    found = []
    for stays in (False, True):
        scale = loss_scale and StaticLossScale(loss_scale)
        learner = mixed(network(norm=torch.nn.BatchNorm1d), mode, scale=scale)
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        outputs = (learner.inside if stays else learner.network)(inputs)
        half = learner.prepared.policy.half_dtype or torch.float32
        assert outputs.dtype is (half if stays else torch.float32)
        loss = outputs.float().square().mean()
        (learner.outside(loss) if stays else loss).backward()
        found.append([own.grad for own in learner.updated])
    for one, other in zip(*found, strict=True):
        assert one.any() and torch.equal(one, other) and one.dtype is other.dtype


@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp"])
def test_logits_and_their_gradient_exist_only_in_16_bits(monkeypatch, build_run, mode):
    seen = []

    def watched(logits, *others):
        logits.register_hook(lambda gradient: seen.append(gradient.clone()))
        seen.append(logits.detach())
        return own(logits, *others)

    own = supervised.cross_entropy
    monkeypatch.setattr(supervised, "cross_entropy", watched)
    run = build_run(*TINY_LM, f"precision={mode}", "scaler=static", "scaler.scale=1024")
    run.task.train_step(0)
    logits, gradient = seen
    assert logits.dtype is gradient.dtype is torch.float16
    # Each token's gradients are probabilities, minus 1 at its target, over the number of tokens.
    assert 0.1 * 1024 < gradient.float().abs().sum() < 2 * 1024

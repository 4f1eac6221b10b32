"""Micro-batches add up to the gradients of one batch under any scale, and in which dtype."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun.precision import (
    DynamicLossScale,
    DynamicRule,
    LogMaxLossScale,
    LogMaxRule,
    NoLossScale,
    StaticLossScale,
)

from ..helpers import mixed, network
from .weights import OneWeight


def batch():
    return torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3


@pytest.mark.parametrize(
    "scale",
    [NoLossScale, lambda: StaticLossScale(1000.0), DynamicLossScale],
    ids=["none", "1000", "dynamic"],
)
@pytest.mark.parametrize("micro_batches", [1, 2, 8, 24])
@pytest.mark.few
def test_micro_batches_are_one_batch(scale, micro_batches):
    inputs, labels = batch()
    exact = network(activation=nn.Tanh).double()
    F.cross_entropy(exact(inputs.double()), labels).backward()
    learner = mixed(network(activation=nn.Tanh), "fp32", scale=scale(), parts=micro_batches)
    learner.zero_grad()
    for x, y in zip(inputs.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
        F.cross_entropy(learner.network(x), y).backward()
        learner.end_part()
    learner.step()
    for own, other in zip(learner.updated, exact.parameters(), strict=True):
        # 24 samples' gradients below 1 in FP32, summed in any order: some 2^-24 each.
        torch.testing.assert_close(own.double(), other - other.grad, rtol=0, atol=24 * 2.0**-24)


def updated_by(mode, gradients, scale=None):
    """The weight, 0 before, after a step of rate 1 by the sum of these gradients."""
    model = OneWeight()
    learner = mixed(model, mode, scale=scale)
    learner.zero_grad()
    for gradient in gradients:
        learner.network(gradient).backward()
    learner.step()
    return model.w.item()


@pytest.mark.parametrize("scale", [1.0, 64.0, 1024.0])
def test_fp16_gradients_accumulate_in_fp32(scale):
    """Small shares added to a large one would be lost in FP16: 1 + 8 * 2^-12 is 1 there."""
    gradients = (1.0, *[2.0**-12] * 8)
    assert updated_by("fp16_master", gradients, StaticLossScale(scale)) == -(1 + 2.0**-9)


def test_naive_gradients_accumulate_in_fp16():
    assert updated_by("fp16_naive", (1.0, *[2.0**-12] * 8)) == -1.0


def test_bf16_gradients_of_weights_without_masters_accumulate_in_fp32():
    """In BF16 1 + 2^-8 is 1; the weight, -(1 + 2^-5), has fewer bits than BF16."""
    gradients = (1.0, *[2.0**-8] * 8)
    assert updated_by("bf16_kahan", gradients) == -(1 + 2.0**-5)
    assert updated_by("bf16_naive", gradients) == -1.0


def test_a_growing_scale_divides_by_what_the_loss_was_multiplied_with():
    """The scale moves after the step; a scale moved between would halve the update."""
    model, scale = OneWeight(), DynamicLossScale(DynamicRule(4.0, growth_interval=1))
    learner = mixed(model, "amp", scale=scale)
    for step in range(4):
        learner.zero_grad()
        learner.network(0.5).backward()
        assert learner.step().loss_scale.item() == 4.0 * 2**step
    assert scale.scale.item() == 64.0
    assert model.w.item() == -2.0


class Shifted(OneWeight):
    """A loss of more than 7, in FP16 or in FP32."""

    def forward(self, gradient, dtype):
        return (self.w.to(dtype) * gradient).sum() + 7.0


def test_the_loss_is_scaled_in_fp32():
    """7 * 2^16 is beyond 65504: an FP16 loss must not overflow when it is scaled."""
    model = Shifted()
    learner = mixed(model, "fp16_master_scaled", scale=DynamicLossScale(DynamicRule(2.0**16)))
    for dtype, skipped in ((torch.float16, 1.0), (torch.float32, 0.0)):
        learner.zero_grad()
        # The gradient of an FP16 sum is 2^16 itself.
        learner.network(2.0**-10, dtype).backward()
        assert learner.step().found_inf.item() == skipped
    assert model.w.item() == -(2.0**-10)


def test_logmax_sees_the_largest_gradient_of_a_micro_batch_not_of_their_sum():
    scale = LogMaxLossScale(LogMaxRule(2.0**4))
    learner = mixed(OneWeight(), "fp16_master_scaled", scale=scale, parts=3)
    for gradient in (0.5, -0.75, 0.5):
        learner.network(gradient).backward()
        learner.end_part()
    learner.step()
    assert learner.prepared.grad_max.item() == 0.75

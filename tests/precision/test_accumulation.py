"""Micro-batches and several losses add up to the same gradients under any scale."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun.precision import (
    DynamicLossScale,
    MixedPrecisionOptimizer,
    NoLossScale,
    StaticLossScale,
    cast_model,
    get_policy,
)


def sgd(named):
    return torch.optim.SGD([t for _, t in named], 1.0)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 6, generator=generator), torch.arange(24) % 3


def updated(mode, scale, micro_batches):
    policy = get_policy(mode)
    cast = cast_model(network(), policy)
    optimizer = MixedPrecisionOptimizer(cast, sgd, scale)
    optimizer.zero_grad()
    inputs, labels = batch()
    for x, y in zip(inputs.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
        logits = cast.module(policy.cast_inputs(x)).float()
        optimizer.backward(F.cross_entropy(logits, y) / micro_batches)
    optimizer.step()
    return [u.detach() for u in optimizer.updated]


def in_float64():
    model = network(torch.float64)
    inputs, labels = batch()
    F.cross_entropy(model(inputs.double()), labels).backward()
    return [(p - p.grad).detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "scale",
    [NoLossScale(), StaticLossScale(1000.0), DynamicLossScale()],
    ids=["none", "1000", "dynamic"],
)
@pytest.mark.parametrize("micro_batches", [1, 2, 8, 24])
def test_micro_batches_are_one_batch(scale, micro_batches):
    for ours, exact in zip(updated("fp32", scale, micro_batches), in_float64(), strict=True):
        # 24 samples' gradients below 1 in FP32, summed in any order: some 2^-24 each.
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=24 * 2.0**-24)


@pytest.mark.parametrize("scale", [1.0, 64.0, 1024.0])
def test_fp16_gradients_accumulate_in_fp32(scale):
    """Small shares added to a large one would be lost in FP16: 1 + 8 * 2^-12 is 1 there."""
    model = nn.Linear(1, 1, bias=False)
    cast = cast_model(model, get_policy("fp16_master"))
    with torch.no_grad():
        cast.masters["weight"].zero_()
    optimizer = MixedPrecisionOptimizer(cast, sgd, StaticLossScale(scale))
    optimizer.zero_grad()
    for gradient in (1.0, *[2.0**-12] * 8):
        optimizer.backward((model.weight.float() * gradient).sum())
    optimizer.step()
    assert optimizer.masters["weight"].item() == -(1 + 2.0**-9)


def test_naive_gradients_accumulate_in_fp16():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    cast = cast_model(model, get_policy("fp16_naive"))
    optimizer = MixedPrecisionOptimizer(cast, sgd)
    for gradient in (1.0, *[2.0**-12] * 8):
        optimizer.backward((model.weight.float() * gradient).sum())
    optimizer.step()
    assert model.weight.item() == -1.0


def test_each_loss_is_divided_by_its_own_scale():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    scales = StaticLossScale(2.0**3), StaticLossScale(2.0**11)
    optimizer = MixedPrecisionOptimizer(cast_model(model, get_policy("amp")), sgd, scales)
    scaled = []
    model.weight.register_hook(lambda gradient: scaled.append(gradient.item()))
    optimizer.zero_grad()
    optimizer.backward((model.weight * 0.5).sum(), 0)
    optimizer.backward((model.weight * 0.25).sum(), 1)
    update = optimizer.step()
    assert scaled == [0.5 * 2**3, 0.25 * 2**11]
    assert model.weight.item() == -0.75
    assert update.loss_scale.item() == 8.0


def test_a_growing_scale_divides_by_what_the_loss_was_multiplied_with():
    """The scale moves after the step; a scale moved between would halve the update."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    scale = DynamicLossScale(4.0, growth_interval=1)
    optimizer = MixedPrecisionOptimizer(cast_model(model, get_policy("amp")), sgd, scale)
    for step in range(4):
        optimizer.zero_grad()
        optimizer.backward((model.weight * 0.5).sum())
        assert optimizer.step().loss_scale.item() == 4.0 * 2**step
        scale.update()
    assert model.weight.item() == -2.0


def test_the_loss_is_scaled_in_fp32():
    """7 * 2^16 is beyond 65504: an FP16 loss must not overflow when it is scaled."""
    model = nn.Linear(1, 1, bias=False)
    cast = cast_model(model, get_policy("fp16_master_scaled"))
    with torch.no_grad():
        model.weight.zero_()
        cast.masters["weight"].zero_()
    optimizer = MixedPrecisionOptimizer(cast, sgd, DynamicLossScale(2.0**16))
    optimizer.zero_grad()
    loss = (model.weight * 2.0**-10).sum() + 7.0
    assert loss.dtype == torch.float16
    optimizer.backward(loss)
    assert optimizer.step().found_inf.item() == 1.0  # 2^16 itself is the gradient of the FP16 sum
    optimizer.zero_grad()
    optimizer.backward((model.weight.float() * 2.0**-10).sum() + 7.0)
    assert optimizer.step().found_inf.item() == 0.0
    assert optimizer.masters["weight"].item() == -(2.0**-10)

"""Micro-batches and several losses add up to the same gradients under any scale."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun.precision import DynamicLossScale, NoLossScale, StaticLossScale

from ..helpers import mixed, network


def one_weight(mode, scale=None):
    """(the network of one weight, which is 0; its optimizer, SGD of rate 1)."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, mixed(model, mode, scale=scale)[1]


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 6, generator=generator), torch.arange(24) % 3


@pytest.mark.parametrize(
    "scale",
    [NoLossScale(), StaticLossScale(1000.0), DynamicLossScale()],
    ids=["none", "1000", "dynamic"],
)
@pytest.mark.parametrize("micro_batches", [1, 2, 8, 24])
def test_micro_batches_are_one_batch(scale, micro_batches):
    inputs, labels = batch()
    exact = network(activation=nn.Tanh).double()
    F.cross_entropy(exact(inputs.double()), labels).backward()
    cast, optimizer = mixed(network(activation=nn.Tanh), "fp32", scale=scale)
    optimizer.zero_grad()
    for x, y in zip(inputs.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
        optimizer.backward(F.cross_entropy(cast.module(x), y) / micro_batches)
    optimizer.step()
    for own, other in zip(optimizer.updated, exact.parameters(), strict=True):
        # 24 samples' gradients below 1 in FP32, summed in any order: some 2^-24 each.
        torch.testing.assert_close(own.double(), other - other.grad, rtol=0, atol=24 * 2.0**-24)


@pytest.mark.parametrize("scale", [1.0, 64.0, 1024.0])
def test_fp16_gradients_accumulate_in_fp32(scale):
    """Small shares added to a large one would be lost in FP16: 1 + 8 * 2^-12 is 1 there."""
    model, optimizer = one_weight("fp16_master", StaticLossScale(scale))
    optimizer.zero_grad()
    for gradient in (1.0, *[2.0**-12] * 8):
        optimizer.backward((model.weight.float() * gradient).sum())
    optimizer.step()
    assert optimizer.masters["weight"].item() == -(1 + 2.0**-9)


def test_naive_gradients_accumulate_in_fp16():
    model, optimizer = one_weight("fp16_naive")
    for gradient in (1.0, *[2.0**-12] * 8):
        optimizer.backward((model.weight.float() * gradient).sum())
    optimizer.step()
    assert model.weight.item() == -1.0


def test_each_loss_is_divided_by_its_own_scale():
    model, optimizer = one_weight("amp", (StaticLossScale(2.0**3), StaticLossScale(2.0**11)))
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
    scale = DynamicLossScale(4.0, growth_interval=1)
    model, optimizer = one_weight("amp", scale)
    for step in range(4):
        optimizer.zero_grad()
        optimizer.backward((model.weight * 0.5).sum())
        assert optimizer.step().loss_scale.item() == 4.0 * 2**step
        scale.update()
    assert model.weight.item() == -2.0


def test_the_loss_is_scaled_in_fp32():
    """7 * 2^16 is beyond 65504: an FP16 loss must not overflow when it is scaled."""
    model, optimizer = one_weight("fp16_master_scaled", DynamicLossScale(2.0**16))
    optimizer.zero_grad()
    loss = (model.weight * 2.0**-10).sum() + 7.0
    assert loss.dtype == torch.float16
    optimizer.backward(loss)
    assert optimizer.step().found_inf.item() == 1.0  # 2^16 itself is the gradient of the FP16 sum
    optimizer.zero_grad()
    optimizer.backward((model.weight.float() * 2.0**-10).sum() + 7.0)
    assert optimizer.step().found_inf.item() == 0.0
    assert optimizer.masters["weight"].item() == -(2.0**-10)

"""Clipping works on unscaled gradients: the result does not depend on the loss scale."""

import math

import pytest
import torch
from torch import nn

from mprun.precision import DynamicLossScale, DynamicRule, NoLossScale, StaticLossScale
from mprun.tasks import OfParameters

from .. import helpers
from ..helpers import making, mixed
from .weights import OneWeight

CLIP = 0.5


def network():
    return helpers.network(hidden=32, activation=nn.Tanh)


def batch():
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


def mean_square(outputs):
    return 5 * outputs.square().mean()


def one_step(mode, scale, clip_norm=CLIP, measure=False):
    """Gradient norm, and what one SGD step of rate 1 took off each weight."""
    learner = mixed(network(), mode, scale=scale, clip=clip_norm and OfParameters(clip_norm))
    before = [updated.detach().clone() for updated in learner.updated]
    update = helpers.one_step(learner, batch(), mean_square, measure)
    return update.grad_norm, [b - a.detach() for b, a in zip(before, learner.updated, strict=True)]


def by_torch():
    model = network()
    mean_square(model(batch())).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    with torch.no_grad():
        return norm, [p - (p - p.grad) for p in model.parameters()]


SCALES = {
    "none": NoLossScale,
    "1": lambda: StaticLossScale(1.0),
    "128": lambda: StaticLossScale(128.0),
    "65536": lambda: StaticLossScale(65536.0),
    "dynamic": lambda: DynamicLossScale(DynamicRule(2.0**10)),
}


@pytest.mark.parametrize("scale", SCALES)
def test_equals_torch_on_unscaled_gradients(scale):
    norm, steps = one_step("fp32", SCALES[scale]())
    expected_norm, expected = by_torch()
    assert expected_norm > 2 * CLIP  # it does clip
    # A power of two scales exactly, so there is no difference at all.
    assert torch.equal(norm, expected_norm)
    assert all(torch.equal(a, b) for a, b in zip(steps, expected, strict=True))


def test_another_scale_differs_by_its_rounding_only():
    norm, steps = one_step("fp32", StaticLossScale(1000.0))
    expected_norm, expected = by_torch()
    # Relative error 2^-24 for each of: scaling, the reciprocal, the product, and the norm's own.
    torch.testing.assert_close(norm, expected_norm, rtol=2.0**-22, atol=0)
    for ours, theirs in zip(steps, expected, strict=True):
        # The weights are below 1, so subtracting from them rounds by 2^-25 on either side.
        torch.testing.assert_close(ours, theirs, rtol=2.0**-20, atol=2.0**-23)


@pytest.mark.parametrize("mode", ["fp16_master", "bf16_master"])
def test_master_weights_are_clipped_alike_under_any_scale(mode):
    norm, steps = one_step(mode, StaticLossScale(1.0))
    for scale in (2.0, 16.0, 128.0):
        other_norm, other = one_step(mode, StaticLossScale(scale))
        if mode == "bf16_master":
            # BF16 has FP32's range: a power of two changes no bit.
            assert torch.equal(norm, other_norm)
            assert all(torch.equal(a, b) for a, b in zip(steps, other, strict=True))
        else:
            # FP16 subnormals (below 2^-14) keep more bits when scaled: 2^-25 absolute each.
            torch.testing.assert_close(norm, other_norm, rtol=2.0**-11, atol=0)
    unclipped_norm, unclipped = one_step(mode, StaticLossScale(128.0), None, measure=True)
    _, clipped = one_step(mode, StaticLossScale(128.0))
    factor = CLIP / (unclipped_norm + 1e-6)
    for a, b in zip(clipped, unclipped, strict=True):
        # Both are differences of weights below 1, each rounded by at most 2^-25.
        torch.testing.assert_close(a, b * factor, rtol=2.0**-22, atol=2.0**-23)


def test_small_gradients_are_not_enlarged():
    norm, steps = one_step("fp32", StaticLossScale(128.0), clip_norm=1e6)
    unclipped_norm, unclipped = one_step("fp32", StaticLossScale(128.0), None, measure=True)
    assert torch.equal(norm, unclipped_norm)
    assert all(torch.equal(a, b) for a, b in zip(steps, unclipped, strict=True))


def test_the_norm_is_computed_only_when_asked_for():
    assert one_step("fp32", NoLossScale(), None)[0] is None
    assert one_step("fp32", NoLossScale(), None, measure=True)[0] is not None


def test_the_norm_of_fp16_gradients_does_not_overflow():
    model = OneWeight()
    model.w = nn.Parameter(torch.zeros(289))
    learner = mixed(model, "fp16_naive", making(torch.optim.SGD, 2.0**-10, foreach=True))
    learner.network(4096.0).backward()
    # 4096^2 = 2^24 and the norm, 17 times 4096, are beyond 65504, the largest FP16 number.
    assert learner.step(measure=True).grad_norm.item() == 69632.0


@pytest.mark.few(16)
@pytest.mark.parametrize("clip_norm", [CLIP, None])
@pytest.mark.parametrize("clipped", [None, ["0.weight"]])
@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e20, 1e18])
def test_a_gradient_that_is_not_finite_skips_the_step(value, measure, clipped, clip_norm):
    model, clip = network(), clip_norm and OfParameters(clip_norm, clipped)
    learner = mixed(model, "fp32", scale=StaticLossScale(1.0), clip=clip)
    mean_square(learner.network(batch())).backward()
    learner.updated[-1].grad.view(-1)[0] = value
    before = [updated.detach().clone() for updated in learner.updated]
    update = learner.step(measure)
    # The square of 1e20 overflows FP32: the norm of all, by which they are clipped, is infinite.
    by_norm = value == 1e20 and clip_norm is not None and clipped is None
    skips = by_norm or not math.isfinite(value)
    assert update.found_inf == skips
    same = [torch.equal(a, b) for a, b in zip(before, learner.updated, strict=True)]
    assert all(same) if skips else not all(same)


@pytest.mark.parametrize("mode", ["bf16_stochastic", "bf16_kahan"])
def test_gradients_of_bf16_weights_are_clipped_in_fp32(mode):
    """Without masters too: the factor times a gradient is no number of BF16."""
    learner = mixed(network(), mode, making(torch.optim.SGD, 0.0), clip=OfParameters(CLIP))
    learner.zero_grad()
    mean_square(learner.network(batch())).backward()
    gradients = {name: own.grad.clone() for name, own in learner.named.items()}
    norm = learner.step().grad_norm
    in_float64 = torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm()
    # FP32's sum of 300 squares, and its root.
    torch.testing.assert_close(norm.double(), in_float64, rtol=300 * 2.0**-24, atol=0)
    assert norm > 2 * CLIP
    for name, clipped in learner.steps.unscaled_gradients().items():
        assert clipped.dtype is torch.float32
        assert torch.equal(clipped, gradients[name] * (CLIP / (norm + 1e-6)))
        assert torch.equal(gradients[name], gradients[name].bfloat16().float())
        assert not torch.equal(clipped, clipped.bfloat16().float())

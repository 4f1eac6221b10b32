"""Weights evolve by the FP32 rule, with the gradients of their rounding, written out by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun.precision import (
    DynamicLossScale,
    DynamicRule,
    ForwardContext,
    NoLossScale,
    StaticLossScale,
    build_policy,
    get_policy,
)

from .. import helpers
from ..helpers import assert_same_bits, making, mixed, one_step
from .rules import IMPLEMENTATIONS, RULES

SCALES = {
    "fp16_master": NoLossScale,
    "fp16_master_scaled": lambda: DynamicLossScale(DynamicRule(2.0**8, growth_interval=3)),
    "bf16_master": NoLossScale,
}


def network():
    return helpers.network(norm=nn.BatchNorm1d)


class ByHand:
    """The network in 16 bits, its norm layer in FP32 where the mode says so, in plain torch."""

    def __init__(self, mode):
        self.policy, self.model = get_policy(mode), network()
        self.model.to(self.policy.param_dtype)
        self.model[1].to(self.policy.norm_dtype)

    def gradients(self, inputs, labels, scale):
        """The gradients of each parameter, unscaled in `grad_dtype`."""
        half, first, norm, act, last = self.policy.param_dtype, *self.model
        with ForwardContext(self.policy, torch.device("cpu")):  # its products, as on a GPU
            normed = norm(first(inputs.to(half)).to(self.policy.norm_dtype)).to(half)
            loss = F.cross_entropy(last(act(normed)).float(), labels)
            found = torch.autograd.grad(loss * scale, [*self.model.parameters()])
        return [gradient.to(self.policy.grad_dtype) / scale for gradient in found]


def weights_after(steps, learner, reference, expected, theirs):
    """Take the same steps in both; their weights must have the same bits after each."""
    scale = learner.prepared.loss_scale.scale
    for _ in range(steps):
        inputs, labels = torch.randn(12, 6), torch.randint(3, (12,))
        with torch.no_grad():
            for parameter, weight in zip(reference.model.parameters(), expected, strict=True):
                parameter.copy_(weight)
        found = reference.gradients(inputs, labels, scale.item())
        one_step(learner, inputs, lambda logits, y=labels: F.cross_entropy(logits, y))
        for weight, gradient in zip(expected, found, strict=True):
            weight.grad = gradient
        theirs.step()
        assert_same_bits(learner.updated, expected)


@pytest.mark.few(12)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw", "adagrad"])
@pytest.mark.parametrize("mode", SCALES)
def test_weights_follow_the_fp32_rule_with_gradients_of_their_rounding(
    mode, optimizer, implementation
):
    scale, chosen = SCALES[mode](), IMPLEMENTATIONS[implementation] | {"weight_decay": 0.01}
    learner = mixed(network(), mode, making(RULES[optimizer], **chosen), scale)
    initial = [own.detach().clone() for own in learner.updated]
    expected = [own.clone().requires_grad_() for own in initial]
    weights_after(5, learner, ByHand(mode), expected, RULES[optimizer](expected, **chosen))
    assert not any(map(torch.equal, expected, initial))


@pytest.mark.parametrize("optimizer", ["momentum", "adagrad"])
@pytest.mark.parametrize("mode", ["fp16_naive", "bf16_naive", "fp32"])
def test_without_masters_weights_follow_the_rule_in_their_dtype(mode, optimizer):
    make = making(RULES[optimizer], foreach=True, weight_decay=0.01)
    learner, reference = mixed(network(), mode, make), ByHand(mode)
    expected = [own.detach().clone().requires_grad_() for own in reference.model.parameters()]
    assert_same_bits(learner.updated, expected)
    weights_after(5, learner, reference, expected, make([*enumerate(expected)]))


def test_weights_move_where_gradients_need_neither_cast_nor_scale():
    """16-bit gradients of 16-bit weights, unscaled: nothing to do to them before the update."""
    policy = build_policy("own", {"param_dtype": "fp16", "grad_dtype": "fp16"})
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    one_step(mixed(model, policy, making(torch.optim.SGD, 0.25)), torch.ones(1, 2), torch.sum)
    assert model.weight.tolist() == [[0.75, 0.75]]


def test_a_frozen_parameter_is_left_alone_and_evaluated_unrounded():
    model = network()
    model[0].weight.requires_grad_(False)
    learner = mixed(model, "fp16_master", making(torch.optim.SGD, 0.1))
    before, last = model[0].weight.clone(), model[3].bias.clone()
    one_step(learner, torch.randn(4, 6))
    assert "0.weight" not in learner.named and "0.bias" in learner.named
    assert not torch.equal(model[3].bias, last)
    with learner.evaluating(in_mode=False) as evaluated:
        assert torch.equal(evaluated[0].weight, before)
        assert not torch.equal(before, before.half().float())


def test_frozen_layers_are_evaluated_unrounded():
    """They compute in FP16, although no optimizer holds them (decision 4: FP32 evaluation)."""
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(8, 4)
    model[0].requires_grad_(False)
    original, first = model[0].weight.detach().clone(), model[0](inputs)
    seen = []
    learner = mixed(model, "fp16_master")
    model[1].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    one_step(learner, inputs)
    with learner.evaluating(False) as evaluated:
        evaluated(inputs)
        assert torch.equal(evaluated[0].weight, original)
    rounded, exact = seen
    assert torch.equal(exact, first) and not torch.equal(rounded, first)


class Writes(nn.Linear):
    """Sets one of its own weights in each call."""

    def forward(self, x):
        with torch.no_grad():
            self.weight[0, 0] = 0.3
        return super().forward(x)


@pytest.mark.parametrize("mode", ["fp16_master", "fp16_master_scaled", "amp"])
def test_what_a_call_writes_stays_and_other_weights_keep_their_digits(mode):
    model = Writes(6, 3)
    before = model.weight.detach().clone()
    mixed(model, mode, scale=StaticLossScale(8.0)).network(torch.randn(4, 6))
    before[0, 0] = 0.3  # not rounded to 16 bits: the write goes to the FP32 weight
    assert torch.equal(model.weight, before)
    assert not torch.equal(before, before.half().float())


OTHER = {"fp16_naive": "fp16_master", "fp16_master": "fp16_naive", "amp": "fp16_naive"}


@pytest.mark.parametrize("mode", OTHER)
def test_a_state_that_does_not_fit_is_refused_by_what_it_is_of(mode):
    def made(kind="momentum", mode=mode):
        return mixed(network(), mode, making(RULES[kind], foreach=True), StaticLossScale(8.0))

    source = made()
    one_step(source, torch.randn(4, 6))
    saved = source.state_dict()
    with pytest.raises(ValueError, match="the optimizer of this run"):
        made("adam").load_state_dict(saved)
    with pytest.raises(ValueError, match="saved as torch.float"):
        made(mode=OTHER[mode]).load_state_dict(saved)
    with pytest.raises(ValueError, match="the model of this run"):
        mixed(nn.Linear(6, 3), mode, scale=StaticLossScale(8.0)).load_state_dict(saved)

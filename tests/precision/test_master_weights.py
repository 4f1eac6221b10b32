"""Masters evolve by the FP32 rule, and after every step the model is their rounding."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun.precision import (
    DynamicLossScale,
    ForwardContext,
    MixedPrecisionOptimizer,
    NoLossScale,
    StaticLossScale,
    build_policy,
    cast_model,
)

from .. import helpers
from ..helpers import assert_same_bits, making, mixed, one_step
from .rules import IMPLEMENTATIONS, RULES

SCALES = {
    "fp16_master": NoLossScale,
    "fp16_master_scaled": lambda: DynamicLossScale(2.0**8, growth_interval=3),
    "bf16_master": NoLossScale,
}


def network():
    return helpers.network(norm=nn.BatchNorm1d)


@pytest.mark.few(12)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw", "adagrad"])
@pytest.mark.parametrize("mode", SCALES)
def test_masters_follow_the_fp32_rule_and_the_model_is_their_rounding(
    mode, optimizer, implementation
):
    initial = {name: p.detach().clone() for name, p in network().named_parameters()}
    scale, chosen = SCALES[mode](), IMPLEMENTATIONS[implementation] | {"weight_decay": 0.01}
    cast, ours = mixed(network(), mode, making(RULES[optimizer], **chosen), scale)
    model, policy = cast.module, cast.policy
    # The reference updates its own FP32 tensors with the model's gradients, by torch's rule.
    reference = {name: p.clone().requires_grad_() for name, p in initial.items()}
    theirs = RULES[optimizer](list(reference.values()), **chosen)
    forward_context = ForwardContext(policy, torch.device("cpu"))
    for _ in range(5):
        inputs, labels = torch.randn(12, 6), torch.randint(3, (12,))
        ours.zero_grad()
        with forward_context:
            loss = F.cross_entropy(model(policy.cast_inputs(inputs)).float(), labels)
            current = scale.scale.item()
            gradients = torch.autograd.grad(
                loss * current, list(model.parameters()), retain_graph=True
            )
            ours.backward(loss)
        ours.step()
        scale.update()
        for parameter, gradient in zip(reference.values(), gradients, strict=True):
            parameter.grad = gradient.float() / current
        theirs.step()
        own = dict(model.named_parameters())
        for name, expected in reference.items():
            if name in ours.masters:
                assert ours.masters[name].dtype == torch.float32
                assert torch.equal(ours.masters[name], expected)
                assert own[name].dtype == policy.param_dtype
                assert torch.equal(
                    own[name],
                    ours.masters[name].half()
                    if mode != "bf16_master"
                    else ours.masters[name].bfloat16(),
                )
            else:
                assert name.startswith("1.")  # BatchNorm: FP32 already, no copy
                assert torch.equal(own[name], expected)
    moved = [name for name in initial if not torch.equal(reference[name], initial[name])]
    assert moved == list(initial)


def test_masters_move_where_gradients_need_neither_cast_nor_scale():
    """16-bit gradients of 16-bit weights, unscaled: nothing to do to them before the update."""
    policy = build_policy("own", {"param_dtype": "fp16", "grad_dtype": "fp16"})
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    cast = cast_model(model, policy)
    optimizer = MixedPrecisionOptimizer(cast, making(torch.optim.SGD, 0.25))
    one_step(cast, optimizer, torch.ones(1, 2), torch.sum)
    assert model.weight.tolist() == optimizer.masters["weight"].tolist() == [[0.75, 0.75]]


def test_a_frozen_parameter_is_left_alone():
    model = network()
    model[0].weight.requires_grad_(False)
    cast, optimizer = mixed(model, "fp16_master", making(torch.optim.SGD, 0.1))
    before, last = model[0].weight.clone(), model[3].bias.clone()
    one_step(cast, optimizer, torch.randn(4, 6))
    assert "0.weight" not in optimizer.masters
    assert torch.equal(model[0].weight, before)
    assert "0.bias" in optimizer.masters
    assert not torch.equal(model[3].bias, last)


OTHER = {"fp16_naive": "fp16_master", "fp16_master": "amp", "amp": "fp16_naive"}


@pytest.mark.parametrize("mode", OTHER)
def test_state_round_trip_is_bit_exact_and_names_what_does_not_fit(mode):
    def trained(steps, kind="momentum", mode=mode):
        make = making(RULES[kind], foreach=True)
        cast, optimizer = mixed(network(), mode, make, StaticLossScale(8.0))
        for _ in range(steps):
            one_step(cast, optimizer, torch.randn(4, 6))
        return optimizer

    source, target = trained(3), trained(1)
    saved = source.state_dict()
    target.load_state_dict(saved)
    assert_same_bits(target.state_dict(), saved)
    with pytest.raises(ValueError, match="another optimizer"):
        trained(1, "adam").load_state_dict(saved)
    with pytest.raises(ValueError, match="another model or precision mode|saved as torch.float"):
        trained(0, mode=OTHER[mode]).load_state_dict(saved)

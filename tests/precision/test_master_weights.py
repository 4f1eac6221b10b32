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
    get_policy,
)

MAKERS = {
    "sgd": lambda t, **kw: torch.optim.SGD(t, 0.05, 0.9, weight_decay=1e-2, **kw),
    "adam": lambda t, **kw: torch.optim.Adam(t, 1e-2, weight_decay=1e-2, **kw),
    "adamw": lambda t, **kw: torch.optim.AdamW(t, 1e-2, weight_decay=1e-2, **kw),
    "adagrad": lambda t, **kw: torch.optim.Adagrad(t, 1e-2, **kw),
}
IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True, "fused": False},
    "loop": {"foreach": False, "fused": False},
}
SCALES = {
    "fp16_master": NoLossScale,
    "fp16_master_scaled": lambda: DynamicLossScale(2.0**8, growth_interval=3),
    "bf16_master": NoLossScale,
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", MAKERS)
@pytest.mark.parametrize("mode", SCALES)
def test_masters_follow_the_fp32_rule_and_the_model_is_their_rounding(
    mode, optimizer, implementation
):
    policy, device = get_policy(mode), torch.device("cpu")
    initial = {name: p.detach().clone() for name, p in network().named_parameters()}
    cast = cast_model(network(), policy)
    model, scale = cast.module, SCALES[mode]()
    half = policy.param_dtype
    chosen = IMPLEMENTATIONS[implementation]
    ours = MixedPrecisionOptimizer(
        cast, lambda named: MAKERS[optimizer]([t for _, t in named], **chosen), scale
    )
    # The reference updates its own FP32 tensors with the model's gradients, by torch's rule.
    reference = {name: p.clone().requires_grad_() for name, p in initial.items()}
    theirs = MAKERS[optimizer](list(reference.values()), **chosen)
    arithmetic = ForwardContext(policy, device)
    torch.manual_seed(1)
    for _ in range(8):
        inputs, labels = torch.randn(12, 6), torch.randint(3, (12,))
        ours.zero_grad()
        with arithmetic:
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
                assert own[name].dtype == half
                assert torch.equal(own[name], ours.masters[name].to(half))
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
    optimizer = MixedPrecisionOptimizer(
        cast_model(model, policy), lambda named: torch.optim.SGD([t for _, t in named], lr=0.25)
    )
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(1, 2).half()).float().sum())
    optimizer.step()
    assert model.weight.tolist() == optimizer.masters["weight"].tolist() == [[0.75, 0.75]]


def test_masters_start_unrounded_and_exist_once():
    cast = cast_model(network(), get_policy("fp16_master"))
    optimizer = MixedPrecisionOptimizer(
        cast, lambda named: torch.optim.SGD([t for _, t in named], 0.1)
    )
    initial = dict(network().named_parameters())
    for name, master in optimizer.masters.items():
        assert torch.equal(master, initial[name])
        assert not torch.equal(master, master.half().float())
        # A second FP32 copy would cost 4 bytes a parameter for the whole run.
        assert master.data_ptr() == cast.masters[name].data_ptr()


def test_a_frozen_parameter_is_left_alone():
    model = network()
    model[0].weight.requires_grad_(False)
    cast = cast_model(model, get_policy("fp16_master"))
    optimizer = MixedPrecisionOptimizer(
        cast, lambda named: torch.optim.SGD([t for _, t in named], 0.1)
    )
    before, bias = model[0].weight.clone(), model[0].bias.clone()
    optimizer.zero_grad()
    optimizer.backward(model(torch.randn(4, 6).half()).float().square().mean())
    optimizer.step()
    assert "0.weight" not in optimizer.masters
    assert torch.equal(model[0].weight, before)
    assert "0.bias" in optimizer.masters
    assert not torch.equal(model[0].bias, bias)


@pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master", "amp"])
def test_state_round_trip_is_bit_exact_and_names_what_does_not_fit(mode):
    def trained(steps, seed, kind="adam", lr_scale=StaticLossScale):
        torch.manual_seed(seed)
        cast = cast_model(network(), get_policy(mode))
        optimizer = MixedPrecisionOptimizer(
            cast, lambda named: MAKERS[kind]([t for _, t in named], foreach=True), lr_scale(8.0)
        )
        for _ in range(steps):
            optimizer.zero_grad()
            inputs = cast.policy.cast_inputs(torch.randn(4, 6))
            optimizer.backward(cast.module(inputs).float().square().mean())
            optimizer.step()
        return optimizer

    source, target = trained(3, 1, "sgd"), trained(1, 2, "sgd")
    saved = source.state_dict()
    target.load_state_dict(saved)
    loaded = target.state_dict()
    for group in ("masters", "state"):
        assert loaded[group].keys() == saved[group].keys()
    for name, state in saved["state"].items():
        for key, value in state.items():
            assert loaded["state"][name][key].dtype == value.dtype
            assert torch.equal(loaded["state"][name][key], value)
    for name, master in saved["masters"].items():
        assert torch.equal(loaded["masters"][name], master)
    with pytest.raises(ValueError, match="another optimizer"):
        trained(1, 2, "adam").load_state_dict(saved)
    other = {"fp16_naive": "fp16_master", "fp16_master": "amp", "amp": "fp16_naive"}[mode]
    cast = cast_model(network(), get_policy(other))
    wrong = MixedPrecisionOptimizer(
        cast, lambda named: MAKERS["sgd"]([t for _, t in named], foreach=True)
    )
    with pytest.raises(ValueError, match="another model or precision mode|saved as torch.float"):
        wrong.load_state_dict(saved)

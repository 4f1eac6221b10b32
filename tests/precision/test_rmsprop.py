"""TensorFlow's RMSprop against its formula in float64, and in the modes."""

import math

import numpy as np
import pytest
import torch

from mprun.assembly.precision import optimizer_maker
from mprun.config.schema import OptimConfig
from mprun.errors import BadInput
from mprun.precision import get_policy
from mprun.precision.torch_update import TensorFlowRMSprop

from .. import helpers
from ..helpers import one_step, raises_line
from ..shipped import OF_ANY_NETWORK

INCEPTION = {"alpha": 0.9, "eps": 1.0, "momentum": 0.9}


def first_update(make, gradient):
    weight = torch.zeros(1, dtype=torch.float64)
    weight.grad = torch.tensor([gradient], dtype=torch.float64)
    make([weight], lr=1.0, **INCEPTION).step()
    return -weight.item()


def test_where_eps_and_the_start_matter():
    """With eps 1 the two forms differ most where gradients are large."""
    assert first_update(TensorFlowRMSprop, 2.0) == pytest.approx(2 / math.sqrt(0.9 + 0.4 + 1))
    assert first_update(torch.optim.RMSprop, 2.0) == pytest.approx(2 / (math.sqrt(0.4) + 1))
    assert first_update(TensorFlowRMSprop, 1e-6) == pytest.approx(1e-6 / math.sqrt(1.9))
    assert first_update(torch.optim.RMSprop, 1e-6) == pytest.approx(1e-6)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_formula_with_a_falling_rate(as_tensor):
    """The buffer of momentum contains each step's rate, so that an old one stays in it."""
    draw = np.random.default_rng(0)
    expected, mean, buffer = draw.normal(size=7), np.full(7, 0.5), np.zeros(7)
    weight = torch.tensor(expected)
    ours = TensorFlowRMSprop([weight], weight_decay=0.1, initial_accumulator=0.5, **INCEPTION)
    for rate in (0.5, 0.5, 0.25, 0.125):
        gradient = draw.normal(size=7)
        weight.grad = torch.tensor(gradient)
        ours.param_groups[0]["lr"] = torch.tensor(rate) if as_tensor else rate
        ours.step()
        gradient = gradient + 0.1 * expected
        mean += 0.1 * (gradient**2 - mean)
        buffer = 0.9 * buffer + rate * gradient / np.sqrt(mean + 1.0)
        expected = expected - buffer
    np.testing.assert_allclose(weight, expected, rtol=1e-13)


def test_a_complex_weight_is_two_numbers():
    parts = torch.randn(5, 2)
    whole, apart = torch.view_as_complex(parts.clone()), parts.clone()
    for weight in (whole, apart):
        ours = TensorFlowRMSprop([weight], lr=0.1, **INCEPTION)
        for step in (1.0, -3.0):
            weight.grad = torch.full_like(weight, step)
            if weight is whole:  # an imaginary part too
                weight.grad += 1j * step
            ours.step()
    assert torch.equal(torch.view_as_real(whole), apart)


@pytest.mark.parametrize("mode", [mode for mode in OF_ANY_NETWORK if mode != "tf32"])
@pytest.mark.parametrize("rule", ["rmsprop", "rmsprop_tensorflow"])
def test_every_mode(rule, mode):
    start = {"initial_accumulator": 1.0} if rule == "rmsprop_tensorflow" else {}
    config = OptimConfig(rule, lr=0.1, **INCEPTION, **start)
    model = helpers.network(hidden=8)
    own = helpers.mixed(
        model, mode, optimizer_maker(config, get_policy(mode), torch.device("cpu"), model)
    )
    before = [updated.detach().clone() for updated in own.updated]
    for step in range(3):
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        one_step(own, inputs, lambda outputs: 100 * outputs.square().mean())
    for updated, old in zip(own.updated, before, strict=True):
        assert updated.isfinite().all() and not torch.equal(updated, old)
    assert bool(own.optimizer.param_groups[0].get("foreach")) is (rule == "rmsprop")
    for name, state in own.steps.state_by_name().items():
        assert {"square_avg", "momentum_buffer"} <= state.keys(), name


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["optim.implementation=foreach"], "optim.implementation=foreach: rmsprop_tensorflow has"),
        (["optim.implementation=fused"], "optim.implementation=fused: torch .* has no fused rms"),
        (["optim.alpha=1"], "optim.alpha=1"),
        (["optim.alpha=null"], "optim.alpha=null"),
    ],
)
def test_what_is_refused(build_run, overrides, line):
    with pytest.raises((BadInput, ValueError), match=line):
        build_run("model=conv_autoencoder", "optim=rmsprop_tensorflow", *overrides)


def test_the_other_rules_do_not_read_its_keys(build_run):
    with raises_line(BadInput, "optim.alpha=0.9: adam has no such setting; optim=rmsprop or"):
        build_run("model=conv_autoencoder", "optim.alpha=0.9")

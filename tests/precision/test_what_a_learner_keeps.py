"""A skipped step leaves every kind of state bit for bit as it was; a saved one goes on the same."""

import copy
import math

import pytest
import torch
from torch import nn

from mprun.assembly.precision import optimizer_maker
from mprun.config.schema import OptimConfig
from mprun.precision import StaticLossScale, build_policy, get_policy
from mprun.tasks import OfParameters

from ..helpers import assert_same_bits, making, mixed, one_step
from ..shipped import OF_ANY_NETWORK
from .rules import CONFIGURED, OTHERS

MOMENTUM = making(torch.optim.SGD, 0.05, momentum=0.9, foreach=True)
ADAMW = making(torch.optim.AdamW, 0.01, weight_decay=0.1)
# No host stops these: their update is undone, or does not happen.
ON_THE_DEVICE = {
    "adamw": making(torch.optim.AdamW, 0.01, fused=True),
    "momentum": making(torch.optim.SGD, 0.01, momentum=0.9),
    "dampening": making(torch.optim.SGD, 0.01, momentum=0.9, dampening=0.5),  # its state is late
    "rmsprop": making(torch.optim.RMSprop, 0.01, foreach=True),
}
ROUNDED = {"param_dtype": "bf16", "master_dtype": None}
BF16 = ROUNDED | {"grad_dtype": "bf16"}
# Name -> mode, or the values of one; what makes the optimizer, or the optimizer's keys; the rest.
CASES = {
    **{mode: (mode, MOMENTUM, {}) for mode in OF_ANY_NETWORK if mode != "tf32"},
    **{f"{mode} adamw": (mode, ADAMW, {}) for mode in ("bf16_stochastic", "bf16_kahan")},
    # What counts in its groups is no state by name.
    **{name: ("fp32", making(rule), {}) for name, rule in OTHERS.items() if name != "foreign"},
    **{
        f"{name} in {form}": ({"update": {"state_dtype": form}}, make, {})
        for name, make in ON_THE_DEVICE.items()
        for form in ("dynamic8", "fp8")
    },
    **{
        f"three groups of {name}": ("fp16_master_scaled", {"name": name, **keys}, {})
        for name, keys in CONFIGURED.items()
    },
    "muon": ({"param_dtype": "fp16"}, {"name": "muon"}, {}),
    "muon in bf16": (BF16, {"name": "muon"}, {}),
    "muon in blocks": ({"update": {"state_dtype": "dynamic8"}}, {"name": "muon"}, {}),
    "muon, narrow state": (
        ROUNDED | {"update": {"rounding": "stochastic", "state_dtype": "bf16"}},
        {"name": "muon"},
        {},
    ),
    "clipped": ("bf16_kahan", ADAMW, {"clip": OfParameters(1.0)}),
    "averaged": ("fp16_master_scaled", MOMENTUM, {"average": OfParameters(0.75)}),
}
MUON = {"newton_schulz_dtype": "bf16", "adjust_lr": "original", "adamw_lr_factor": 0.5}
MUON |= {"momentum": 0.95, "nesterov": True, "betas": [0.9, 0.95], "eps": 1e-8}
APART = {"bias_lr_factor": 2.0, "decay_bias": False, "decay_norm": False}


def made(case):
    """A learner of layers that are large enough for state in blocks."""
    values, make, more = CASES[case]
    policy = get_policy(values) if isinstance(values, str) else build_policy("own", values)
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 8)]
    model = nn.Sequential(*layers)
    if isinstance(make, dict):
        keys = make | (MUON if make["name"] == "muon" else APART)
        config = OptimConfig(lr=0.02, weight_decay=0.1, **keys)
        make = optimizer_maker(config, policy, torch.device("cpu"), model)
    return mixed(model, policy, make, StaticLossScale(64.0), seed=3, **more)


def advance(learner, *steps, factor=1.0):
    for step in steps:
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        update = one_step(learner, inputs, lambda y: y.square().mean() * factor)
        assert update.found_inf == (not math.isfinite(factor))


@pytest.mark.few(8)
@pytest.mark.parametrize("case", CASES)
def test_a_skipped_step_changes_nothing_and_a_saved_state_goes_on(case):
    straight, resumed = made(case), made(case)
    advance(straight, 0, 1)
    saved = copy.deepcopy(straight.state_dict())
    advance(straight, 2, factor=math.inf)
    assert_same_bits(straight.state_dict(), saved)
    resumed.load_state_dict(saved)
    assert_same_bits(resumed.state_dict(), saved)
    assert set(saved["state"]) <= set(straight.named)
    for learner in (straight, resumed):
        advance(learner, 3, 4)
    assert_same_bits(resumed.state_dict(), straight.state_dict())
    assert not torch.equal(straight.state_dict()["model"]["0.weight"], saved["model"]["0.weight"])

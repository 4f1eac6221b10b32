"""The paper's mechanisms as numbers worked by hand (Micikevicius et al., arXiv 1710.03740).

FP16 has 11 significant bits: between 1 and 2 neighbours are 2^-10 apart, the smallest positive
value is 2^-24, and rounding is to nearest, ties to even.
"""

import pytest
import torch

from mprun.precision import NoLossScale, StaticLossScale, build_policy

from ..helpers import making, mixed
from .weights import OneWeight


def sgd(lr=1.0, **further):
    return making(torch.optim.SGD, lr, foreach=True, **further)


def trained(start, gradient, policy, make=None, scale=None, steps=1):
    """The weight as the mode computes with it, and its master (or None), after some steps."""
    learner = mixed(OneWeight(start), policy, make or sgd(), scale)
    for _ in range(steps):
        learner.zero_grad()
        learner.network(gradient).backward()
        learner.step()
    ((own, dtype),) = learner.steps.computed()
    return own.to(dtype).item(), own.item() if own.dtype is torch.float32 else None


# Section 3.1: an update is lost where it is less than half the distance to the next FP16 number.
@pytest.mark.parametrize(
    ("start", "update", "result"),
    [
        (1.0, 2.0**-11, 1.0),  # ratio 2048: a tie, and 1 is even
        (1 + 2.0**-10, 2.0**-11, 1 + 2.0**-9),  # the odd neighbour: the tie goes up
        (1.0, 2.0**-11 + 2.0**-21, 1 + 2.0**-10),  # just more than half the distance
        (2 - 2.0**-10, 2.0**-11 - 2.0**-21, 2 - 2.0**-10),  # ratio 4094 at the top of the binade
        (1.0, -(2.0**-12), 1.0),  # below a power of two numbers are twice as dense
        (1.0, -(2.0**-11), 1 - 2.0**-11),
    ],
)
def test_lost_update(start, update, result):
    assert trained(start, -update, "fp16_naive") == (result, None)


def test_the_master_keeps_what_fp16_loses():
    step = 2.0**-11
    assert trained(1.0, -step, "fp16_master") == (1.0, 1 + step)
    # Two updates together are one FP16 step; naively they stay lost for ever.
    assert trained(1.0, -step, "fp16_master", steps=2) == (1 + 2.0**-10, 1 + 2.0**-10)
    assert trained(1.0, -step, "fp16_naive", steps=100) == (1.0, None)


def test_bf16_loses_updates_from_a_ratio_of_256_on():
    assert trained(1.0, -(2.0**-8), "bf16_naive") == (1.0, None)
    assert trained(1.0, -(2.0**-8), "bf16_master") == (1.0, 1 + 2.0**-8)
    assert trained(1.0, -(2.0**-8 + 2.0**-15), "bf16_naive") == (1 + 2.0**-7, None)


# Section 3.2: gradients below half the smallest FP16 number become 0.
@pytest.mark.parametrize(
    ("gradient", "stored"),
    [
        (2.0**-24, 2.0**-24),
        (2.0**-25, 0.0),  # a tie between 0 and 2^-24: 0 is even
        (2.0**-25 * (1 + 2.0**-10), 2.0**-24),  # just above it rounds up
        (2.0**-26, 0.0),
    ],
)
def test_underflow(gradient, stored):
    # lr 2^20 makes the update visible in the FP32 master: 0 - 2^20 * gradient.
    assert trained(0.0, gradient, "fp16_master", sgd(2.0**20))[1] == -stored * 2.0**20


@pytest.mark.parametrize("gradient", [2.0**-25, 2.0**-26, 3 * 2.0**-30])
def test_a_loss_scale_recovers_it(gradient):
    _, master = trained(0.0, gradient, "fp16_master", sgd(2.0**20), StaticLossScale(2.0**8))
    assert master == -gradient * 2.0**20


def test_dividing_by_the_scale_in_fp16_brings_the_underflow_back():
    policy = build_policy("ablation", {"param_dtype": "fp16", "grad_dtype": "fp16"})
    gradient, scale = 2.0**-26, StaticLossScale(2.0**8)
    assert trained(0.0, gradient, policy, sgd(2.0**20), scale)[1] == 0.0
    assert trained(0.0, gradient, "fp16_master", sgd(2.0**20), scale)[1] == -(2.0**-6)


@pytest.mark.parametrize(
    "scale", [NoLossScale, lambda: StaticLossScale(2.0**8)], ids=["none", "static"]
)
def test_grad_dtype_is_honoured_for_fp32_parameters_too(scale):
    policy = build_policy("ablation", {"grad_dtype": "fp16"})
    gradient = 1 + 2.0**-11  # between two FP16 numbers, the lower one is even
    assert trained(0.0, gradient, policy, scale=scale())[0] == -1.0
    assert trained(0.0, gradient, "fp32", scale=scale())[0] == -gradient


def test_weight_decay_is_applied_to_the_masters():
    start = 1e-4
    # 1e-4 * 1e-4 is 1e-8, which FP16 rounds to 0 (2^-25 is 3e-8).
    assert torch.tensor(1e-8, dtype=torch.float16) == 0
    half = torch.tensor(start).half().item()
    assert trained(start, 0.0, "fp16_naive", sgd(weight_decay=1e-4)) == (half, None)
    _, master = trained(start, 0.0, "fp16_master", sgd(weight_decay=1e-4))
    w = torch.tensor(start)
    assert master == torch.add(w, w * 1e-4, alpha=-1.0).item() != start


def test_weight_decay_does_not_depend_on_the_scale():
    results = {
        trained(0.5, 2.0**-6, "fp16_master", sgd(0.1, weight_decay=0.01), scale, steps=3)
        for scale in (StaticLossScale(1.0), StaticLossScale(128.0), StaticLossScale(65536.0))
    }
    assert len(results) == 1


def test_naive_fp16_adam_is_nan_after_one_update_of_a_small_gradient():
    adam = making(torch.optim.Adam, 1e-3, eps=1e-8, foreach=True)
    # eps is 0 in FP16 and so is the square of 2^-13 * sqrt(0.001): 0 / 0 or x / 0.
    assert torch.tensor(1e-8, dtype=torch.float16) == 0
    weight, _ = trained(1.0, 0.0, "fp16_naive", adam)
    assert weight != weight
    weight, _ = trained(1.0, 2.0**-13, "fp16_naive", adam)
    assert weight in (float("inf"), float("-inf"))
    # In FP32 the first update of Adam is lr times the sign of the gradient (within eps / 2^-13).
    _, master = trained(1.0, 2.0**-13, "fp16_master", adam)
    assert master == pytest.approx(1 - 1e-3, rel=2.0**-22, abs=1e-3 * 1e-8 * 2**13)

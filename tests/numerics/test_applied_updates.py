"""Which part of its wanted update a 16-bit weight takes: by hand, and where updates are lost."""

import math

import pytest
import torch
from torch import nn

from mprun.numerics.exponent_shares import AppliedUpdates
from mprun.numerics.probe import UpdateMeter
from mprun.precision import StaticLossScale
from mprun.precision.torch_update import TensorFlowRMSprop

from ..helpers import making, mixed, one_step
from .small_runs import SMALL, probed

UNIT = 2.0**-9  # a quarter of the gap above 1 in BF16, half of the one below


def measured(mode, weights, gradients, rule=torch.optim.SGD, steps=1, scale=None, **settings):
    """The meter's sums of the last of some steps with equal gradients; the learner."""
    model = nn.Linear(len(weights), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
    loss_scale = None if scale is None else StaticLossScale(scale)
    learner = mixed(model, mode, making(rule, **{"lr": 1.0} | settings), loss_scale)
    for _ in range(steps):
        meter = UpdateMeter(learner.steps, [*learner.named])
        one_step(learner, torch.tensor([gradients]), torch.sum)
        found = meter.sums()
    return {name: AppliedUpdates(*sums.tolist()) for name, sums in found.items()}, learner


def standard_error(sums):
    """Return the standard error of the ratio, if errors are independent with mean 0."""
    return math.sqrt(sums.squares) / sums.wanted


def test_by_hand():
    """A weight of 1 is moved in units: 4 up is the next number, 1 up is lost, 2 down is below.

    3 up is nearer to 4. Applied 4 + 0 + 2 + 4 of 4 + 1 + 2 + 3; errors 0, 1, 0, 1.
    """
    gradients = [-4 * UNIT, -1 * UNIT, 2 * UNIT, -3 * UNIT]
    found, _ = measured("bf16_naive", [1.0] * 4, gradients)
    assert found == {"weight": AppliedUpdates(10 * UNIT, 10 * UNIT, 2 * UNIT**2)}
    lost, _ = measured("bf16_naive", [1.0] * 3, gradients[:3])
    assert lost["weight"].ratio == 6 / 7 and standard_error(lost["weight"]) == 1 / 7
    # The sign counts: a weight that goes the wrong way is no update.
    wrong = AppliedUpdates(-3.0, 4.0, 49.0)
    assert (wrong.ratio, standard_error(wrong)) == (-0.75, 1.75)
    assert math.isnan(AppliedUpdates().ratio)


def test_a_compensation_counts_as_applied():
    """Ten updates below half a gap: the weight stands still at first, its compensation moves."""
    found, learner = measured("bf16_kahan", [1.0, -1.0], [0.125 * UNIT, UNIT], steps=10)
    assert found["weight"].ratio == 1.0
    found, _ = measured("bf16_naive", [1.0, -1.0], [0.125 * UNIT, UNIT], steps=10)
    assert found["weight"].ratio == 0.0
    assert not UpdateMeter(learner.steps, []).sums()


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_stochastic_rounding_has_no_bias(share):
    """The mean of 2^14 coins is within 4.5 of its deviations (1 in 100,000)."""
    count = 1 << 14
    found, _ = measured("bf16_stochastic", [1.0] * count, [-share * 4 * UNIT] * count)
    own = found["weight"]
    # The gradient is BF16; p(1 - p) is the variance of a coin of one gap.
    wanted = float(torch.tensor(share * 4 * UNIT).bfloat16()) / (4 * UNIT)
    expected = math.sqrt((1 - wanted) / wanted / count)
    assert standard_error(own) == pytest.approx(expected, rel=0.1)
    assert abs(own.ratio - 1) < 4.5 * standard_error(own)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "fused": True}),
        (torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.1, "fused": True}),
        (torch.optim.Adagrad, {"lr": 1e-4, "fused": True}),
        (torch.optim.RMSprop, {"lr": 1e-4, "momentum": 0.9, "weight_decay": 0.1}),
        (TensorFlowRMSprop, {"lr": 1e-4, "momentum": 0.9, "weight_decay": 0.1}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.few(3)
def test_wanted_is_what_fp32_masters_do(rule, settings, scale):
    """The same weights and gradients: what masters move by in FP32, to its rounding."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(300, generator=draw).bfloat16().float().tolist()
    gradients = torch.randn(300, generator=draw).bfloat16().float().tolist()
    for mode in ("bf16_kahan", "bf16_stochastic"):
        found, _ = measured(mode, weights, gradients, rule, scale=scale, **settings)
        none, masters = measured("bf16_master", weights, gradients, rule, scale=scale, **settings)
        assert none == {}
        moved = masters.updated[0].detach().double() - torch.tensor([weights], dtype=torch.double)
        # Weights of about 1 are rounded to 2^-24, 300 of them at random.
        assert found["weight"].wanted == pytest.approx(moved.abs().sum().item(), abs=300 * 2.0**-24)


def test_a_skipped_step_and_nesterov_s_momentum_tell_nothing():
    found, _ = measured("bf16_kahan", [1.0], [math.inf], scale=2.0)
    assert found == {"weight": AppliedUpdates()}
    settings = {"momentum": 0.9, "nesterov": True}
    assert measured("bf16_naive", [1.0], [1.0], **settings)[0] == {}


def test_of_a_large_weight_a_part_stands_for_all():
    """2^20 equal weights, of which every fifth is looked at."""
    found, _ = measured("bf16_naive", [1.0] * (1 << 20), [-4 * UNIT] * (1 << 20))
    assert found["weight"].applied == found["weight"].wanted
    assert found["weight"].wanted == pytest.approx(4 * UNIT * (1 << 20), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16_naive", "bf16_stochastic", "bf16_kahan", "bf16_master"])
def test_where_updates_are_lost(build_run, mode):
    """The rate of the quickstart: nearest rounding keeps less than half, the others all.

    Kahan's compensation is BF16 itself and loses what is below its own gaps: 2^-9 of it.
    """
    own = probed(build_run("experiment=quickstart_lost_updates", f"precision={mode}").task)["model"]
    found = own.total_applied()
    match mode:
        case "bf16_naive":
            assert 0.05 < found.ratio < 0.5 and own.lost_updates
        case "bf16_stochastic":
            assert standard_error(found) < 0.05
            assert abs(found.ratio - 1) < 4.5 * standard_error(found)
        case "bf16_kahan":
            assert found.ratio == pytest.approx(1, abs=2.0**-9)
        case "bf16_master":  # updated in FP32: nothing is rounded away
            assert not own.applied_updates and own.total_lost().share("bf16") > 0.5
    if mode in ("bf16_stochastic", "bf16_kahan"):
        assert not own.lost_updates  # which would be a verdict on nothing
        assert own.applied_updates.keys() == own.tensors["weights"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["conv_autoencoder", "lstm_lm"])
def test_micro_batches_and_clipping_are_in_what_is_wanted(build_run, model):
    """The first is updated by two micro-batches, the second is clipped: Kahan takes all of it."""
    task = build_run(*SMALL[model], "optim=sgd_plain", "precision=bf16_kahan").task
    found = probed(task)["model"].total_applied()
    assert found.wanted > 0 and found.ratio == pytest.approx(1, abs=2.0**-9)

"""Delayed scaling: scales by hand and from plain numbers, its state, what leaves it alone."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from mprun.precision import DynamicLossScale, DynamicRule
from mprun.precision.block_formats import ELEMENTS, SCALES
from mprun.precision.delayed_scaling import DelayedScaling
from mprun.precision.scaled_linear import install
from mprun.precision.scaled_products import ScaledProducts

from ..helpers import assert_same_bits, making, mixed, one_step

CPU = torch.device("cpu")
F32_MAX = float(torch.finfo(torch.float32).max)


def made(length: int, margin: int = 0, names=("a",)) -> DelayedScaling:
    products = ScaledProducts(scale="delayed", history=length, margin=margin)
    return DelayedScaling(names, products, CPU)


def record(own: DelayedScaling, amax: float, place: int = 0, name: str = "a") -> float:
    kept = own.layers[name][place]
    return float(SCALES["delayed"].of(torch.tensor(amax), ELEMENTS["e4m3"], "", kept)[0])


def test_scales_by_hand():
    """Three updates count, one power of two is left free: 224 / amax."""
    own, inf, nan = made(length=3, margin=1), math.inf, math.nan
    for amax, expected in (
        (0.0, 1.0),  # nothing seen: the first scale
        (2.0, 112.0),
        (7.0, 32.0),
        (1.0, 32.0),  # 7 counts
        (0.0, 32.0),
        (1.0, 224.0),  # 7 is gone
        (inf, 224.0),
        (4.0, 224.0),  # kept for as long as the infinity is there
        (4.0, 224.0),
        (4.0, 56.0),
        (nan, 56.0),
        (nan, 56.0),
        (nan, 56.0),  # no finite one is left
        (2.0**-140, F32_MAX),
    ):
        record(own, amax)
        own.roll()
        assert float(own.layers["a"][0, 0]) == expected, amax
    assert own.layers["a"][:, 0].tolist() == [F32_MAX, 1.0, 1.0]  # each operand by itself


def test_an_update_is_as_its_largest_micro_batch_and_rank():
    own, ranks = made(length=4), [made(length=4) for _ in range(2)]
    parts = [1.0, math.nan, 3.0, 2.0]
    assert [record(own, amax) for amax in (1.0, 3.0)] == [1.0, 1.0]
    assert math.isnan(record(own, math.nan))  # whatever the scale: the product has to show it
    assert math.isnan(record(made(4), math.inf))
    for rank, amaxes in zip(ranks, (parts[:2], parts[2:]), strict=True):
        for amax in amaxes:
            record(rank, amax)
    seen = torch.stack([rank.present[..., 1] for rank in ranks]).amax(0)
    own.roll()
    for rank in ranks:
        rank.roll(lambda amax: seen)
        assert_same_bits(rank.state_dict(), own.state_dict())
    assert float(own.layers["a"][0, 0]) == np.float32(448) / np.float32(3)


class Reference:
    """One tensor in NumPy: FP32 for the scale, float64 for what is cast."""

    def __init__(self, length: int, top: float) -> None:
        self.amaxes, self.scale, self.top, self.length = [], np.float32(1), top, length
        self.now = np.float32(0)

    def cast(self, x: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
        values = x.detach().numpy()
        self.now = max(self.now, np.abs(values).max())
        coded = np.clip(values * self.scale, -self.top, self.top)
        codes = torch.from_numpy(coded).to(dtype).double().numpy()
        return codes * float(np.float32(1) / self.scale)

    def roll(self) -> None:
        self.amaxes, self.now = [*self.amaxes, self.now][-self.length :], np.float32(0)
        self.scale = np.float32(self.top) / max(self.amaxes)


def test_a_layer_against_plain_numbers():
    """Twelve updates of two micro-batches, of sizes that rise past the scale and fall again."""
    layer, products = nn.Linear(24, 16), ScaledProducts(scale="delayed", history=3)
    delayed = install(nn.Sequential(layer, nn.ReLU()), products, {})
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    x_, w_, g_ = references = [Reference(3, top) for top in (448.0, 448.0, 57344.0)]
    clipped = 0
    for update in range(12):
        layer.zero_grad()
        wanted = 0
        for _ in range(2):
            x = (torch.randn(8, 24) * 10.0 ** (update % 5)).requires_grad_()
            grad = torch.randn(8, 16) * 10.0 ** -(update % 4)
            clipped += int((x.abs() * float(x_.scale) > 448).sum())
            y = layer(x)
            y.backward(grad)
            qx, qw, qg = x_.cast(x, e4m3), w_.cast(layer.weight, e4m3), g_.cast(grad, e5m2)
            bias = layer.bias.detach().double().numpy()
            wanted = wanted + qg.T @ qx
            for found, exact in ((y, qx @ qw.T + bias), (x.grad, qg @ qw)):
                size = np.abs(exact).max()
                assert np.abs(found.detach().double().numpy() - exact).max() <= 2.0**-18 * size
        found = layer.weight.grad.double().numpy()
        assert np.abs(found - wanted).max() <= 2.0**-18 * np.abs(wanted).max()
        with torch.no_grad():
            layer.weight.mul_(1.5)
        delayed.roll()
        for reference in references:
            reference.roll()
        assert delayed.layers["0"][:, 0].tolist() == [float(own.scale) for own in references]
    assert clipped > 50


def a_run():
    """A learner in the mode, and what takes its steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
    make = making(torch.optim.AdamW, 1e-2)
    own = mixed(model, "fp8_delayed", make, DynamicLossScale(DynamicRule(1024.0), device=CPU))

    def step(number: int, factor: float = 1.0):
        random = torch.Generator().manual_seed(number)
        return one_step(own, torch.randn(8, 16, generator=random) * factor)

    return own, step


def test_the_state_goes_on_bit_for_bit():
    own, step = a_run()
    for number in range(5):
        step(number)
    saved = copy.deepcopy(own.state_dict())
    step(5)
    other, once_more = a_run()
    other.load_state_dict(saved)
    once_more(5)
    assert_same_bits(other.state_dict(), own.state_dict())
    # The control: without the history the same step has other bits.
    other, once_more = a_run()
    other.load_state_dict(saved | {"delayed": copy.deepcopy(other.state_dict()["delayed"])})
    once_more(5)
    with pytest.raises(AssertionError):
        assert_same_bits(other.state_dict(), own.state_dict())


def test_a_state_that_does_not_fit_is_refused():
    own, _ = a_run()
    saved = own.state_dict()
    kept = saved.pop("delayed")
    with pytest.raises(ValueError, match="must have a history of scales"):
        own.load_state_dict(saved)
    for change in {"layers": ["0", "1"]}, {"history": kept["history"][:5]}:
        with pytest.raises(ValueError, match="must have the same layers"):
            own.load_state_dict(saved | {"delayed": kept | change})


def test_an_evaluation_casts_by_the_present_scales_and_records_nothing():
    own, step = a_run()
    delayed = own.prepared.delayed
    for number in range(3):
        step(number)
    before, x = copy.deepcopy(delayed.state_dict()), torch.randn(8, 16)
    assert (before["present"][..., 0] != 1).all()
    with own.evaluating(in_mode=True) as model:
        found = model(x)
        model(x * 2.0**20)
    with own.evaluating(in_mode=False) as model:
        assert not torch.equal(model(x), found)
    assert_same_bits(delayed.state_dict(), before)
    with torch.no_grad():
        assert torch.equal(own.network(x), found)  # the same scales
    assert not torch.equal(delayed.present, before["present"])


def test_a_skipped_update_moves_the_history_and_a_nan_is_seen():
    own, step = a_run()
    delayed = own.prepared.delayed
    step(0)
    first = delayed.layers["0"][0, 0].clone()
    for factor in (math.inf, math.nan):  # of an input; the gradients hold NaN
        assert step(1, factor).found_inf == 1
        assert torch.equal(delayed.layers["0"][0, 0], first)
    inputs = delayed.history[:3, 0, 0]
    assert inputs[0] == 0 and inputs[1] == F32_MAX and inputs[2] > 0
    assert step(2).found_inf == 0
    assert delayed.history.isfinite().all()  # else a checkpoint would not count as good


@pytest.mark.parametrize(
    "change",
    [{"granularity": "row"}, {"granularity": "none"}, {"grad_rounding": "stochastic"}]
    + [{"hadamard": ("grad_weight",)}, {"weight_granularity": "16x16"}],
)
def test_what_has_no_history_is_refused(change):
    products = ScaledProducts(scale="delayed", **change)
    with pytest.raises(ValueError, match="scale=delayed: needs granularity=tensor"):
        install(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), products, {})

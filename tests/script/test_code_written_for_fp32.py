"""FP32 tensors made in forward, and hooks on its values, are served, and reported in a line."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun
from mprun.precision import StaticLossScale, get_policy

from ..helpers import raises_line
from .networks import MODES

CASTS = [mode for mode in MODES if get_policy(mode).param_dtype.itemsize == 2]  # no autocast
SCALED = [mode for mode in MODES if get_policy(mode).half_dtype is torch.float16]


class States(nn.Module):
    """As tutorials begin an LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x):
        zeros = torch.zeros(1, x.size(0), 16)
        return self.head(self.lstm(x, (zeros, zeros))[0][:, -1])


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(9, 2)

    def forward(self, x):
        places = torch.linspace(0, 1, x.size(1))[None, :, None].expand(len(x), -1, 1)
        return self.head(torch.cat([x, places], -1)).mean(1)


class Table(nn.Module):
    """A plain attribute, which no cast of a module reaches."""

    def __init__(self):
        super().__init__()
        self.table, self.head = torch.randn(5, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(x + self.table).mean(1)


class Router(nn.Module):
    """Experts of a mixture, chosen in FP32 and added up in zeros."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = x.flatten(0, 1)
        weights = self.router(x.float()).softmax(-1)
        total = torch.zeros(len(x), 8)
        for number, expert in enumerate(self.experts):
            rows = (weights.argmax(-1) == number).nonzero().flatten()
            total.index_add_(0, rows, expert(x[rows]) * weights[rows, number, None])
        return self.head(total.view(-1, 5, 8).mean(1))


MODELS = {
    States: "lstm: lstm",
    Positions: "head: linear",
    Table: "head: linear",
    Router: "router: linear",
}


def trained(model, mode, steps=4, **options):
    """Losses of a short training, and the lines that were said."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mprun.prepare(model, optimizer, mode, **options)
    generator, losses = torch.Generator().manual_seed(0), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            x = torch.randn(6, 5, 8, generator=generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), (x.mean((1, 2)) > 0).long())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, [str(one.message) for one in said]


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("mode", CASTS)
@pytest.mark.few
def test_an_operation_with_fp32_beside_16_bits_computes_in_16_bits(mode, kind):
    """It trains as in FP32 but for rounding, and says which operation once, with the cure."""
    torch.manual_seed(0)
    losses, said = trained(kind(), mode)
    torch.manual_seed(0)
    plain, nothing = trained(kind(), "fp32")
    own = [line for line in said if "meets fp32" in line]
    assert [line.partition(" meets")[0] for line in own][:1] == [MODELS[kind]], said
    assert all("x.new_zeros" in line and "overrides" in line for line in own)
    assert len({*own}) == len(own) and not any("meets fp32" in line for line in nothing)
    # A loss near 0.7 of some dozen roundings in 8 bits, or 2 in MXFP4 and NVFP4, a step.
    coarse = get_policy(mode).matmul is not None
    assert losses == pytest.approx(plain, abs=0.2 if coarse else 0.05)


def test_an_operation_that_is_wrong_anyway_raises_torchs_own_error():
    class Wrong(nn.Linear):
        def forward(self, x):
            return F.linear(torch.zeros(3, 7), self.weight)

    model = Wrong(8, 2)
    mprun.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "bf16_master")
    with pytest.raises(RuntimeError, match="dtype|shapes cannot be multiplied"):
        model(torch.randn(3, 8))


# Operations without a kernel in 16 bits, or that say themselves that they take none.
LACKING = {
    "fft_rfft": lambda x: torch.fft.rfft(x).abs(),
    "fft_irfft": torch.fft.irfft,
    "fft_fft2": lambda x: torch.fft.fft2(x).abs(),
    "stft": lambda x: torch.stft(x.flatten(), 8, return_complex=True).abs(),
    "quantile": lambda x: torch.quantile(x, 0.5),
}
HALVES = [mode for mode in MODES if mode != "fp32" and get_policy(mode).matmul is None]


class Spectral(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute, self.last = compute, nn.Linear(8, 8)

    def forward(self, x):
        return self.compute(x).mean() + self.last(x).mean()


def spectral_loss(mode, compute, **options):
    """After its backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Spectral(compute))
    mprun.prepare(model, None, mode, **options)
    loss = model(torch.randn(4, 8))
    loss.backward()
    return loss


@pytest.mark.filterwarnings("ignore:ComplexHalf|BComplex32|Casting complex|A window")
@pytest.mark.parametrize("operation", LACKING)
@pytest.mark.parametrize("mode", HALVES)
@pytest.mark.few
def test_an_operation_that_16_bits_lack_is_named_with_its_cures(mode, operation):
    """In the call or, of a rectangular STFT in FP16, in the backward pass."""
    compute = LACKING[operation]
    if operation == "stft" and get_policy(mode).half_dtype is torch.bfloat16:
        assert spectral_loss(mode, compute).isfinite()  # torch has it, by FP32 inside
    else:
        place = "the backward pass: aten::_fft" if operation == "stft" else f"1: {operation} "
        with raises_line(NotImplementedError, place, "x.float()", "overrides"):
            spectral_loss(mode, compute)
    assert spectral_loss(mode, lambda x: compute(x.float())).isfinite()
    assert spectral_loss(mode, compute, overrides={"1": "fp32"}).isfinite()


class Hooked(nn.Module):
    """Clamps a gradient inside, as reinforcement learning and some recurrent networks do."""

    def __init__(self, seen):
        super().__init__()
        self.first, self.last, self.seen = nn.Linear(8, 8), nn.Linear(8, 2), seen

    def forward(self, x):
        x = self.first(x)
        x.register_hook(self.clamped)
        return self.last(x).mean(1)

    def clamped(self, gradient):
        self.seen.append(gradient.clone())
        return gradient.clamp(-0.003, 0.003)


@pytest.mark.parametrize("mode", SCALED)
def test_a_hook_inside_gets_gradients_without_the_scale(mode):
    """At every call, audited or not. FP16 holds multiples of 2^-24: of a scaled gradient it loses
    less than half of that, divided by the scale, in each of some four operations."""
    found = []
    for scale in (16.0, 1024.0):
        seen = []
        torch.manual_seed(0)
        model = Hooked(seen)
        trained(model, mode, steps=6, scaler=StaticLossScale(scale))
        found.append(torch.stack(seen))
    once, again = found
    assert len(once) == 6 and once.dtype is torch.float32 and once.abs().max() > 0.003
    torch.testing.assert_close(once[0], again[0], rtol=0, atol=4 * 2.0**-25 / 16)
    # Later ones are of weights that have moved nearly alike.
    largest, others = (own.abs().amax((1, 2, 3)).tolist() for own in (once, again))
    assert largest == pytest.approx(others, rel=0.02)
    torch.manual_seed(0)
    seen = []
    trained(Hooked(seen), "fp32", steps=1)
    assert seen[0].abs().max().item() == pytest.approx(largest[0], rel=0.02)

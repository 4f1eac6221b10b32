"""FP32 tensors made in forward, and hooks on its values, are served, and reported in a line."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun
from mprun.precision import StaticLossScale, get_policy

from ..helpers import raises_line
from .loops import Forward, classified, holding
from .networks import HALF_WEIGHTS, MODES, take_step

SCALED = [mode for mode in MODES if get_policy(mode).half_dtype is torch.float16]


def linear(*sizes):
    return lambda: nn.Linear(*sizes)


def states(model, x):
    """Begin an LSTM as tutorials do."""
    zeros = torch.zeros(1, x.size(0), 16)
    return model.head(model.net(x, (zeros, zeros))[0][:, -1])


def positions(model, x):
    places = torch.linspace(0, 1, x.size(1))[None, :, None].expand(len(x), -1, 1)
    return model.net(torch.cat([x, places], -1)).mean(1)


def table(model, x):
    """Add a plain attribute, which no cast of a module reaches."""
    return model.net(x + model.plain[0]).mean(1)


def router(model, x):
    """Choose experts of a mixture in FP32, and add them up in zeros."""
    x = x.flatten(0, 1)
    weights = model.net(x.float()).softmax(-1)
    total = torch.zeros(len(x), 8)
    for number, expert in enumerate(model.experts):
        rows = (weights.argmax(-1) == number).nonzero().flatten()
        total.index_add_(0, rows, expert(x[rows]) * weights[rows, number, None])
    return model.head(total.view(-1, 5, 8).mean(1))


MODELS = {
    "States": holding(states, net=lambda: nn.LSTM(8, 16, batch_first=True), head=linear(16, 2)),
    "Positions": holding(positions, net=linear(9, 2)),
    "Table": holding(table, net=linear(8, 2), plain=lambda: [torch.randn(5, 8)]),
    "Router": holding(
        router,
        net=linear(8, 2),
        experts=lambda: nn.ModuleList([linear(8, 8)(), linear(8, 8)()]),
        head=linear(8, 2),
    ),
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
            loss = take_step(optimizer, classified, model, x, (x.mean((1, 2)) > 0).long())
            losses.append(loss.item())
    return losses, [str(one.message) for one in said]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mode", HALF_WEIGHTS)
@pytest.mark.few
def test_an_operation_with_fp32_beside_16_bits_computes_in_16_bits(mode, kind):
    """It trains as in FP32 but for rounding, and says which operation once, with the cure."""
    torch.manual_seed(0)
    losses, said = trained(MODELS[kind](), mode)
    torch.manual_seed(0)
    plain, nothing = trained(MODELS[kind](), "fp32")
    own = [line for line in said if "meets fp32" in line]
    first = "net: lstm" if kind == "States" else "net: linear"
    assert [line.partition(" meets")[0] for line in own][:1] == [first], said
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


def spectral_loss(mode, compute, **options):
    """After its backward pass."""
    torch.manual_seed(0)
    both = Forward(lambda model, x: compute(x).mean() + model.net(x).mean(), net=linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), both)
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


def hooked(seen):
    """A model that clamps a gradient inside, as reinforcement learning does."""

    def clamped(gradient):
        seen.append(gradient.clone())
        return gradient.clamp(-0.003, 0.003)

    def act(model, x):
        x = model.net(x)
        x.register_hook(clamped)
        return model.last(x).mean(1)

    return Forward(act, net=linear(8, 8), last=linear(8, 2))


@pytest.mark.parametrize("mode", SCALED)
def test_a_hook_inside_gets_gradients_without_the_scale(mode):
    """At every call, audited or not. FP16 holds multiples of 2^-24: of a scaled gradient it loses
    less than half of that, divided by the scale, in each of some four operations."""
    found = []
    for scale in (16.0, 1024.0):
        seen = []
        torch.manual_seed(0)
        trained(hooked(seen), mode, steps=6, scaler=StaticLossScale(scale))
        found.append(torch.stack(seen))
    once, again = found
    assert len(once) == 6 and once.dtype is torch.float32 and once.abs().max() > 0.003
    torch.testing.assert_close(once[0], again[0], rtol=0, atol=4 * 2.0**-25 / 16)
    # Later ones are of weights that have moved nearly alike.
    largest, others = (own.abs().amax((1, 2, 3)).tolist() for own in (once, again))
    assert largest == pytest.approx(others, rel=0.02)
    torch.manual_seed(0)
    seen = []
    trained(hooked(seen), "fp32", steps=1)
    assert seen[0].abs().max().item() == pytest.approx(largest[0], rel=0.02)

"""Attention in FP8 against its definition in float64, with casts by lists of all numbers."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mprun
from mprun.precision import get_policy
from mprun.precision.audit import Contradiction
from mprun.precision.block_formats import ELEMENTS
from mprun.precision.policy import build_policy
from mprun.precision.scaled_attention import InScaledAttention, ScaledAttention, cast
from mprun.precision.scaled_operators import Calls

from ..helpers import TINY_GPT, record_of, run
from . import exact_formats as exact

B16 = torch.bfloat16
HEAD, TENSOR = ScaledAttention(), ScaledAttention(granularity="tensor")
# All finite numbers of a format that are not negative, rising.
NUMBERS = {name: np.array([float(own) for own in exact.GRIDS[name]]) for name in ("e4m3", "e5m2")}


def by_list(x, form, granularity="head"):
    """Cast as published: FP32 scale, product in FP32, the nearest number, ties to even codes."""
    known, x = NUMBERS[form], np.asarray(x, np.float32)
    amax = np.abs(x).max(None if granularity == "tensor" else (-2, -1), keepdims=True)
    amax = np.maximum(amax, known[-1] / np.finfo(np.float32).max)  # of zeros
    encode = (known[-1] / amax.astype(np.float64)).astype(np.float32)
    scaled = np.minimum(np.abs(x * encode).astype(np.float64), known[-1])
    above = np.searchsorted(known, scaled).clip(1)
    low, high = known[above - 1], known[above]
    is_low = scaled - low < high - scaled
    is_low |= (scaled - low == high - scaled) & ((above - 1) % 2 == 0)
    factor = (1 / encode.astype(np.float64)).astype(np.float32)
    code = np.where(is_low, low, high).astype(np.float32)
    return np.copysign(code * factor, x).astype(np.float64)


def made(*shapes, seed=0, dtype=B16):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def attended(how, query, key, value, *more, gradient=None, **named):
    """Return output and gradients of attention within the mode."""
    with InScaledAttention(how, query.dtype, Calls()):
        found = F.scaled_dot_product_attention(query, key, value, *more, **named)
    inputs = [own for own in (query, key, value, *more) if own.requires_grad]
    gradient = torch.ones_like(found) if gradient is None else gradient
    return [found.detach(), *torch.autograd.grad(found, inputs, gradient)]


def test_the_lists_are_those_of_torch():
    for form, least, top in (("e4m3", 2.0**-9, 448.0), ("e5m2", 2.0**-16, 57344.0)):
        codes = torch.arange(128, dtype=torch.uint8).view(ELEMENTS[form].dtype).float()
        assert (NUMBERS[form][1], NUMBERS[form][-1]) == (least, top)
        assert (codes[codes.isfinite()].double().numpy() == NUMBERS[form]).all()


@pytest.mark.parametrize("granularity", ["head", "tensor"])
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_a_cast_is_that_of_the_list(form, granularity):
    """Numbers of 40 powers of two, both signs, a head of zeros, ties of the format."""
    x = torch.randn(3, 2, 40, 16) * 2.0 ** torch.randint(-30, 10, (3, 2, 40, 16))
    x[1, 1] = 0
    x[2, 0, 0, 0] = ELEMENTS[form].top  # the scale of this head is 1
    x[2, 0, 1:] = 1 + torch.arange(39 * 16).view(39, 16) / 64
    x = x.clamp(-ELEMENTS[form].top, ELEMENTS[form].top)
    assert (cast(x, form, granularity).double().numpy() == by_list(x, form, granularity)).all()


def defined(q, k, v, gradient, scale, how, mask=None):
    """Compute the docstring's equations in float64; also how near a cast is to another number.

    Casts of P and dS are of FP32 numbers, which differ by some 2^-22 from these.
    """
    form, of_gradients = how.format.name, how.grad_format.name

    def of(x, name=form):
        return by_list(x, name, how.granularity)

    def nearness(x, name):
        known, amax = NUMBERS[name], np.abs(x).max((-2, -1), keepdims=True)
        amax = np.abs(x).max() if how.granularity == "tensor" else amax
        middles = (known[1:] + known[:-1]) / 2
        scaled = np.abs(x) * (known[-1] / amax)
        return (np.abs(scaled[..., None] - middles) / middles).min()

    q, k, v, g = of(q), of(k), of(v), of(gradient, of_gradients)
    scores = q @ k.swapaxes(-1, -2) * scale + (0 if mask is None else mask)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    of_p = g @ v.swapaxes(-1, -2)
    of_s = p * (of_p - (of_p * p).sum(-1, keepdims=True))
    near = min(nearness(p, form), nearness(of_s, of_gradients))
    cast_p, cast_s = of(p), of(of_s, of_gradients)
    turned = cast_s.swapaxes(-1, -2) @ q * scale
    return near, (cast_p @ v, cast_s @ k * scale, turned, cast_p.swapaxes(-1, -2) @ g)


OTHERS = ScaledAttention(ELEMENTS["e5m2"], ELEMENTS["e4m3"])
FORMS = {"head": HEAD, "tensor": TENSOR, "e5m2": OTHERS}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("how", FORMS)
def test_both_passes_are_their_definition(how, is_causal):
    """No cast is near a tie, so codes are equal; left are the sums in FP32 of 8 numbers or fewer,
    and exp: 32 units of 2^-24 of the largest term."""
    tensors = made((2, 2, 6, 4), (2, 2, 8, 4), (2, 2, 8, 5), (2, 2, 6, 5), dtype=torch.float32)
    q, k, v, gradient = tensors
    mask = np.where(np.tri(6, 8), 0.0, -np.inf) if is_causal else None
    near, expected = defined(*[own.detach().numpy() for own in tensors], 0.7, FORMS[how], mask)
    assert near > 2.0**-18
    found = attended(FORMS[how], q, k, v, gradient=gradient, is_causal=is_causal, scale=0.7)
    for own, wanted in zip(found, expected, strict=True):
        bound = 32 * 2.0**-24 * np.abs(wanted).max()
        assert (np.abs(own.double().numpy() - wanted) <= bound).all()


def test_with_one_key_every_bit_is_a_cast():
    """P is 1, which all formats hold; so O is cast(V) and dV is cast(dO), rounded to BF16."""
    q, k, v, gradient = made((3, 2, 1, 8), (3, 2, 1, 8), (3, 2, 1, 8), (3, 2, 1, 8))
    found, of_q, of_k, of_v = attended(HEAD, q, k, v, gradient=gradient.detach())
    for own, given, form in ((found, v, "e4m3"), (of_v, gradient, "e5m2")):
        assert torch.equal(own, torch.from_numpy(by_list(given.detach().float(), form)).to(B16))
    assert not of_q.any() and not of_k.any()


class Bounded:
    """A float64 value, and a bound on the error of what is computed for it."""

    def __init__(self, value, error=0.0):
        self.value, self.error = value, error + torch.zeros_like(value)

    def cast(self, form):
        """Half a unit of a number, or of the smallest one at the scale of this head."""
        largest = (self.value.abs() + self.error).amax((-2, -1), keepdim=True)
        least = largest * NUMBERS[form][1] / NUMBERS[form][-1]
        half = 2.0 ** -(exact.FORMS[form].mantissa + 1)
        own = torch.maximum((self.value.abs() + self.error) * half, least / 2)
        return Bounded(self.value, self.error + own * (1 + 2.0**-20))

    def __matmul__(self, other):
        a, b = self.value.abs(), other.value.abs()
        error = a @ other.error + self.error @ b + self.error @ other.error
        return Bounded(self.value @ other.value, error + 2.0**-18 * (a @ b))

    @property
    def mT(self):
        return Bounded(self.value.mT, self.error.mT)


@pytest.mark.parametrize("size", [4, 32])
def test_gradients_are_those_of_float64_within_the_formats(size):
    """Bounds are those of each cast, carried through every sum."""
    q, k, v, g = (Bounded(own.detach().double()) for own in made(*4 * [(2, 3, size, size)]))
    scale = size**-0.5
    of, back = (lambda own: own.cast("e4m3")), (lambda own: own.cast("e5m2"))
    scores = of(q) @ of(k).mT
    p = (scores.value * scale).softmax(-1)
    off = (2 * scores.error.amax(-1, keepdim=True) * scale).exp() - 1
    p = Bounded(p, torch.minimum(p * off, torch.ones_like(p)))
    of_p = back(g) @ of(v).mT
    mean = (p.value * of_p.value).sum(-1, keepdim=True)
    above = p.value + p.error
    off_mean = (above * of_p.error + p.error * of_p.value.abs()).sum(-1, keepdim=True)
    off_s = above * (of_p.error + off_mean) + p.error * (of_p.value - mean).abs()
    of_s = back(Bounded(p.value * (of_p.value - mean), off_s))
    bounds = [of(p) @ of(v), of_s @ of(k), of_s.mT @ of(q), of(p).mT @ back(g)]
    inputs = made(*3 * [(2, 3, size, size)])
    given = [own.value.to(B16).requires_grad_() for own in (q, k, v)]
    assert all(torch.equal(one, other) for one, other in zip(given, inputs, strict=True))
    found = attended(HEAD, *given, gradient=g.value.to(B16))
    wide = [own.value.clone().requires_grad_() for own in (q, k, v)]
    exact = F.scaled_dot_product_attention(*wide)
    expected = [exact, *torch.autograd.grad(exact, wide, g.value)]
    factors = (1, scale, scale, 1)
    for own, wanted, bound, factor in zip(found, expected, bounds, factors, strict=True):
        assert torch.allclose(bound.value * factor, wanted, rtol=1e-9)
        error = (own.double() - wanted).abs()
        assert (error <= bound.error * factor + 2.0**-8 * own.abs() + 1e-9).all()
        assert error.max() > 0


def test_heads_that_share_keys_are_repeated_ones():
    """Sums of their gradients are in FP32, rounded once."""
    q, k, v = made((2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4), dtype=torch.float32)
    found, of_q, *of_shared = attended(HEAD, q, k, v, enable_gqa=True)
    repeated = [own.repeat_interleave(3, 1).detach().requires_grad_() for own in (k, v)]
    expected, of_repeated_q, *of_each = attended(HEAD, q, *repeated)
    assert torch.equal(found, expected) and torch.equal(of_q, of_repeated_q)
    for own, each in zip(of_shared, of_each, strict=True):
        assert torch.equal(own, each.unflatten(1, (2, 3)).sum(2))
    one = [own[0].detach().requires_grad_() for own in (q, k, v)]  # without a batch
    assert torch.equal(attended(HEAD, *one, enable_gqa=True)[0], found[0])


def test_masks_mean_what_they_mean_to_torch():
    """By words, by numbers with a gradient, and rows without a key, which are zeros."""
    q, k, v = made(*3 * [(2, 2, 5, 4)], dtype=torch.float32)
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    causal = attended(HEAD, q, k, v, is_causal=True)
    of_words = attended(HEAD, q, k, v, lower)
    of_numbers = attended(HEAD, q, k, v, torch.zeros(5, 5).masked_fill(~lower, -math.inf))
    for own in (of_words, of_numbers):
        assert all(torch.equal(one, other) for one, other in zip(causal, own, strict=True))
    bias = torch.randn(1, 2, 5, 5, requires_grad=True)
    wide = F.scaled_dot_product_attention(q, k, v, bias)
    of_torch = torch.autograd.grad(wide, bias, torch.ones_like(wide))[0]
    *_, of_bias = attended(HEAD, q, k, v, bias)
    assert of_bias.shape == bias.shape
    assert (of_bias - of_torch).norm() < 0.25 * of_torch.norm()
    lower[2] = False
    found, *gradients = attended(HEAD, q, k, v, lower)
    assert not found[:, :, 2].any() and not gradients[0][:, :, 2].any()
    assert all(own.isfinite().all() for own in gradients)


def test_what_is_not_finite_is_seen():
    q, k, v = made(*3 * [(1, 1, 4, 4)])
    with torch.no_grad():
        k[0, 0, 1, 1] = math.inf
    found, *_ = attended(HEAD, q, k, v)
    assert not found.isfinite().any()


class Block(nn.Module):
    """Attention of two heads, in residual form."""

    def __init__(self, dropout=0.0, again=False):
        super().__init__()
        self.inputs, self.dropout, self.again = nn.Linear(8, 24), dropout, again

    def attend(self, x):
        q, k, v = (own.unflatten(-1, (2, 4)).transpose(1, 2) for own in self.inputs(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return found.transpose(1, 2).flatten(2)

    def forward(self, x):
        found = checkpoint(self.attend, x, use_reentrant=False) if self.again else self.attend(x)
        return x + found


def prepared(mode="fp8_attention", seed=0, kind=Block, overrides=None, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(kind(**options), kind(**options), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return mprun.prepare(model, optimizer, mode, overrides=overrides)


def stepped(model, optimizer, steps=3):
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(7))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [own.detach().clone() for own in model.parameters()]


def counted(optimizer):
    return mprun.state_of(optimizer).forward_context.rerouted()


def test_a_model_computes_its_attention_so():
    model, optimizer = prepared()
    found = stepped(model, optimizer)
    others = stepped(*prepared("bf16_master"))
    assert not all(torch.equal(one, other) for one, other in zip(found, others, strict=True))
    calls = counted(optimizer)
    assert (calls["forward e4m3-attention"], calls["backward e5m2-attention"]) == (6, 6)
    products = mprun.state_of(optimizer).models[0].audit.result()["products"]
    assert (products["forward e4m3-attention"], products["backward e5m2-attention"]) == (6, 6)
    kind = mprun.state_of(optimizer).forward_context.kind()
    assert kind == "emulated-bf16 emulated-e4m3-attention emulated-e5m2-attention"
    x = torch.randn(4, 6, 8)
    model.eval()
    with torch.no_grad():  # evaluations are FP32
        plain = nn.Sequential(Block(), Block(), nn.Linear(8, 3))
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model(x), plain(x))


def test_what_a_checkpoint_computes_again_has_the_same_bits():
    one, other = stepped(*prepared()), stepped(*prepared(again=True))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_a_compiled_model_is_one_graph():
    model, optimizer = prepared()
    assert len(stepped(torch.compile(model, fullgraph=True), optimizer, steps=5)) == 6
    # Of graphs too: the operator counts where it computes.
    assert counted(optimizer)["forward e4m3-attention"] == 10


def test_autocast_casts_before():
    model, optimizer = prepared(dataclasses.replace(get_policy("amp_bf16"), attention=HEAD))
    stepped(model, optimizer)
    assert counted(optimizer)["backward e5m2-attention"] == 6


def test_an_override_takes_a_module_out():
    model, optimizer = prepared(overrides={"0": "fp32"})
    stepped(model, optimizer)
    assert counted(optimizer)["forward e4m3-attention"] == 3


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.own(x, x, x, need_weights=False)[0]


def test_what_is_not_emulated_is_refused():
    says = r"format=e4m3: .*dropout_p=0.1 is not emulated; set dropout_p=0, or"
    with pytest.raises(ValueError, match=says):
        stepped(*prepared(dropout=0.1))
    with pytest.raises(ValueError, match=r"0.own is an MultiheadAttention, .* that calls F.scaled"):
        prepared(kind=Inside)
    model, _ = prepared()
    x = torch.randn(4, 6, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_mode_without_any_attention_is_a_contradiction():
    model, optimizer = prepared(kind=lambda: nn.Linear(8, 8))
    with pytest.raises(Contradiction, match="ran in emulated-e4m3-attention emulated-e5m2-attent"):
        stepped(model, optimizer)


def test_beside_products_in_fp8_it_has_to_run_too():
    values = {"param_dtype": "bf16", "attention": {"format": "e4m3"}}
    both = build_policy("both", values | {"matmul": dict.fromkeys(("input", "weight"), "e4m3")})
    stepped(*prepared(both))
    model, optimizer = prepared(both, kind=lambda: nn.Linear(8, 8))
    with pytest.raises(Contradiction, match="ran in emulated-e4m3-attention"):
        stepped(model, optimizer)


def test_a_run_trains_and_records_it(tmp_path):
    assert run(tmp_path / "run", *TINY_GPT, "precision=fp8_attention", "train.steps=2") == 0
    record = record_of(tmp_path / "run")
    assert "emulated-e4m3-attention" in record["precision"]["half_products"]
    assert record["emulated"]["forward e4m3-attention"] == 2
    rows = {(row["operation"], row["dtype"]): row for row in record["operations"]["rows"]}
    forward = rows["scaled_attention", "emulated e4m3"]
    backward = rows["scaled_attention_backward", "emulated e4m3+e5m2"]
    # Five products of the same size backward, of which one is the forward pass's, and two forward.
    assert 2 * backward["flops"] == 5 * forward["flops"] > 0
    assert record["operations"]["not_in_16_bits"] == []

"""Writes of a model to its weights and buffers within `forward` are computed in FP32."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import mprun
from mprun.precision import get_policy
from mprun.prepared.writes import Writes

from ..helpers import assert_same_bits, record_of
from .loops import classified
from .networks import MODES, WITHOUT_MASTERS, batches, net, prepared, take_step, train

WITH_MASTERS = [mode for mode in MODES if mode not in WITHOUT_MASTERS]
MOMENTUM = 0.999


def by_methods(own, other):
    own.mul_(MOMENTUM).add_(other, alpha=1 - MOMENTUM)


def by_data(own, other):
    own.data = own.data * MOMENTUM + other.data * (1 - MOMENTUM)


def by_lerp(own, other):
    own.lerp_(other, 1 - MOMENTUM)


def by_copy(own, other):
    own.copy_(MOMENTUM * own.detach() + (1 - MOMENTUM) * other.detach())


def by_operators(own, other):
    own *= MOMENTUM
    own += (1 - MOMENTUM) * other


def by_rows(own, other):
    for row in range(len(own)):
        own[row] = MOMENTUM * own[row] + (1 - MOMENTUM) * other[row]


def by_foreach(own, other):
    torch._foreach_mul_([own], MOMENTUM)
    torch._foreach_add_([own], [other], alpha=1 - MOMENTUM)


def by_out(own, other):
    torch.lerp(own, other, 1 - MOMENTUM, out=own)


FOLLOWS = [by_methods, by_data, by_lerp, by_copy, by_operators, by_rows, by_foreach, by_out]


class Pair(nn.Module):
    """MoCo, BYOL, DINO: a second network follows the first one inside of `forward`."""

    def __init__(self, follow):
        super().__init__()
        self.follow = follow
        self.query = nn.Sequential(nn.Flatten(), nn.Linear(25, 16), nn.ReLU(), nn.Linear(16, 4))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.expected = None

    def forward(self, images):
        with torch.no_grad():
            for own, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self.follow(own, other)
            keys = self.key(images)
        return self.query(images) + keys


def followed(model, optimizer, run, steps=5):
    """The key network as FP32 alone computes it, from the query network's weights."""
    expected = [own.detach().clone() for own in model.key.parameters()]
    for images, labels in batches(steps):
        with torch.no_grad():
            for own, other in zip(expected, model.query.parameters(), strict=True):
                model.follow(own, other.detach())
        take_step(optimizer, classified, model, images, labels)
        run.step(0.0)
    return expected


def with_casts_first(kinds):
    """Cases of each mode with each kind: quick is one of each, and each where weights are cast."""
    for kind in kinds:
        for mode in WITH_MASTERS:
            slow = mode != "bf16_master" and kind is not kinds[0]
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(mode, kind, marks=marks, id=f"{mode}-{kind.__name__}")


@pytest.mark.parametrize(("mode", "follow"), [*with_casts_first(FOLLOWS)])
def test_a_momentum_network_moves_as_in_fp32(mode, follow, tmp_path):
    torch.manual_seed(0)
    model = Pair(follow)
    optimizer = torch.optim.SGD(model.query.parameters(), 0.1)
    model, optimizer = mprun.prepare(model, optimizer, mode)
    with mprun.Run(tmp_path, optimizer, config={}, seed=0) as run:
        expected = followed(model, optimizer, run)
    assert all(map(torch.equal, model.key.parameters(), expected))
    written = record_of(run.directory)["audit"]["written_in_a_call"]
    names = {f"key.{name}" for name, _ in model.key.named_parameters()}
    casts = get_policy(mode).param_dtype is not torch.float32  # else they are written themselves
    assert {*written} == (names if casts else {*written} & names)


class Normalised(nn.Linear):
    """EDM2: the weight itself is kept normalised."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(self.weight / self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


class Forced(nn.Linear):
    """EDM2's own code: the copy that is normalised was taken with gradients."""

    def forward(self, x):
        weight = self.weight.to(torch.float32)
        with torch.no_grad():
            self.weight.copy_(weight / weight.norm(dim=1, keepdim=True))
        return x @ (weight / weight.norm(dim=1, keepdim=True)).T.to(x.dtype)


class Limited(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            norm = self.weight.norm().item()
            if norm > 0.1:
                self.weight.mul_(0.1 / norm)
        return super().forward(x)


class Shrunk(nn.Linear):
    """A constant tensor takes part."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(self.weight * torch.tensor(0.999))
        return super().forward(x)


class Clamped(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.0123, 0.0123)
        return super().forward(x)


class Averaged(nn.Linear):
    """Its buffer is replaced by a mean of weights."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mean", torch.zeros(sizes[0]))

    def forward(self, x):
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * self.weight.mean(0)
        return super().forward(x) + self.mean.sum()


class Quantised(nn.Linear):
    """Quantisation-aware training: buffers follow activations, which have no graph yet."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.low.copy_(torch.minimum(self.low, x.min().to(self.low.dtype)))
            self.high.copy_(torch.maximum(self.high, x.max().to(self.high.dtype)))
        scale = ((self.high - self.low) / 255).clamp(min=1e-8)
        zero = (-128 - self.low / scale).round().clamp(-128, 127).int()
        x = torch.fake_quantize_per_tensor_affine(x.float(), scale.float(), zero, -128, 127)
        return super().forward(x.to(self.weight.dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_activations_are_computed_once(mode):
    """A mode computes with 16 bits as it likes; nothing else ends a call."""
    torch.manual_seed(0)
    model, optimizer = prepared(mode, nn.Sequential(nn.Flatten(), Quantised(25, 4)))
    images, labels = next(batches(1))
    for _ in range(4):
        loss = take_step(optimizer, classified, model, images, labels)
    largest = images.to(get_policy(mode).param_dtype).max().float()
    assert torch.equal(model[1].high.float(), largest) and loss.isfinite()


def versions(model):
    """How often each weight was written to, as autograd counts."""
    return torch.tensor([own._version for own in model.parameters()])


KINDS = [Normalised, Forced, Limited, Shrunk, Clamped, Averaged]


@pytest.mark.parametrize(("mode", "kind"), [*with_casts_first(KINDS)])
def test_a_layer_that_changes_its_own_weight_does_it_in_fp32(mode, kind):
    """The first call changes it as in a plain model, to the bit; no version counts twice."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(25, 4), nn.LayerNorm(4))
    plain = copy.deepcopy(model)
    model, optimizer = prepared(mode, model)
    images, labels = next(batches(1))
    before, as_plain = versions(model), versions(plain)
    loss = classified(model, images.flatten(1), labels)
    plain(images.flatten(1))
    assert_same_bits(model.state_dict(), plain.state_dict())
    assert (versions(model) - before).equal(versions(plain) - as_plain)
    loss.backward()
    optimizer.step()
    assert all(own.isfinite().all() for own in model.parameters())


class Codebook(nn.Linear):
    """An activation becomes a code, with its graph."""

    def forward(self, x):
        codes = self.weight.data
        codes[0] = x.mean(0)
        return super().forward(x) + codes[0].square().sum()


@pytest.mark.parametrize("mode", ["fp32", "bf16_master", "fp16_master"])
def test_an_activation_that_is_written_to_a_weight_keeps_its_graph(mode):
    """Gradients are those of FP32 up to four roundings of BF16, with inputs of one sign."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 4), nn.Sigmoid(), Codebook(4, 3))
    model, _ = prepared(mode, copy.deepcopy(plain))
    for own in (plain, model):
        own(torch.ones(2, 6)).sum().backward()
    assert_close(model[0].bias.grad, plain[0].bias.grad, rtol=4 * 2.0**-8, atol=2.0**-8)
    assert_close(model[2].weight[0], plain[2].weight[0], rtol=2.0**-8, atol=0)


class Several(nn.Linear):
    """One call writes activations to the weight and to a tensor of the script."""

    def forward(self, x):
        codes = self.weight.data
        other = torch.zeros_like(codes[0])
        torch._foreach_add_([codes[0], other], [x.mean(0), x.mean(0)])
        return super().forward(x) + (codes[0] * other).sum()


class Apart(nn.Linear):
    """A copy of the weight takes activations, one after the other."""

    def forward(self, x):
        codes = self.weight.data.clone()
        codes.add_(x.mean(0)).add_(x[0]).add_(x[1])
        return super().forward(x) + codes.sum()


def unwatched(self, func, types, args=(), kwargs=None):
    return func(*args, **kwargs or {})


OF_CASTS = ["fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4_plain"]


@pytest.mark.parametrize("mode", [*MODES, *OF_CASTS])
@pytest.mark.few(4)
def test_a_model_that_writes_nothing_has_the_same_bits_unwatched(mode, monkeypatch):
    """FP8 casts write to tensors of their own, made from weights alone."""
    found = []
    for watched in (True, False):
        if not watched:
            monkeypatch.setattr(Writes, "__torch_function__", unwatched)
        model, optimizer = prepared(mode, net())
        found.append((train(model, optimizer, steps=4), model.state_dict()))
    assert_same_bits(*found)


@pytest.mark.parametrize("kind", [Several, Apart])
def test_what_is_no_weight_alone_takes_activations_as_the_mode_computes(kind, monkeypatch):
    """A copy has no FP32 beside it once an activation was added; neither has a list with others."""
    found = []
    for watched in (True, False):
        if not watched:
            monkeypatch.setattr(Writes, "__torch_function__", unwatched)
        torch.manual_seed(0)
        model, _ = prepared("bf16_master", nn.Sequential(nn.Linear(6, 4), kind(4, 3)))
        outputs = model(torch.randn(2, 6))
        outputs.sum().backward()
        found.append((outputs, [own.grad for own in model.parameters()]))
    assert_same_bits(*found)

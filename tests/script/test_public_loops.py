"""Loops of public projects brought these cases to light: each was wrong without a word."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun
from mprun.precision import StaticLossScale, get_policy

from .loops import Forward
from .networks import HALF_WEIGHTS, MODES, WITHOUT_MASTERS, prepared, take_step

MASTERS = [mode for mode in HALF_WEIGHTS if mode not in WITHOUT_MASTERS]
FP8 = [mode for mode in MODES if get_policy(mode).matmul]
SCALED = ["amp", "fp16_master_scaled"]
INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
LABELS = INPUTS.argmax(1)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def by_autograd_grad(model, optimizer, loss):
    found = torch.autograd.grad(loss, [*model.parameters()])
    for own, gradient in zip(model.parameters(), found, strict=True):
        own.grad = gradient


def in_place(model, optimizer, loss):
    (0.0 * loss.nan_to_num(posinf=0.0)).backward(retain_graph=True)
    found = torch.autograd.grad(loss, [*model.parameters()])
    for own, gradient in zip(model.parameters(), found, strict=True):
        own.grad.copy_(gradient)


def task_by_task(model, optimizer, loss):
    """As PCGrad: a pass a task, and their gradients put together."""
    taken = []
    for one in (loss, sum(own.square().sum() for own in model.parameters())):
        optimizer.zero_grad()
        one.backward(retain_graph=True)
        taken.append([own.grad for own in model.parameters()])
    for own, *gradients in zip(model.parameters(), *taken, strict=True):
        own.grad = sum(gradients)


@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize("set_gradients", [by_autograd_grad, in_place, task_by_task])
def test_an_infinite_gradient_that_a_script_sets_by_hand_is_skipped(mode, set_gradients):
    model, optimizer = prepared(mode, mlp())
    skips = []
    for step in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(INPUTS), LABELS) * (1e6 if step == 1 else 1.0)
        set_gradients(model, optimizer, loss)
        before = [own.detach().clone() for own in model.parameters()]
        optimizer.step()
        moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
        skips.append(mprun.state_of(optimizer).found_inf.item())
        assert all(moved) if step != 1 else not any(moved)
    assert skips == [0, 1, 0] and mprun.state_of(optimizer).scale.scale < 2**16


@pytest.mark.parametrize("mode", SCALED)
def test_a_gradient_that_is_clipped_or_cleaned_counts_as_the_pass_has_made_it(mode):
    """As EDM does: `nan_to_num` hides an overflow from whoever looks at the step."""
    model, optimizer = prepared(mode, mlp())
    (F.cross_entropy(model(INPUTS), LABELS) * 1e6).backward()
    for own in model.parameters():
        torch.nan_to_num(own.grad, nan=0.0, posinf=1.0, neginf=-1.0, out=own.grad)
    optimizer.step()
    assert mprun.state_of(optimizer).found_inf == 1


@pytest.mark.parametrize("mode", SCALED)
def test_a_pass_of_a_penalty_alone_is_looked_at(mode):
    """As WGAN-GP has it, `penalty.backward()` by itself: it reaches weights past the outputs."""
    model, optimizer = prepared(mode, mlp())

    def penalty():
        inputs = INPUTS.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(10 * model(inputs).sum(), inputs, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    skips = []
    for _ in range(12):
        take_step(optimizer, penalty)
        skips.append(mprun.state_of(optimizer).found_inf.item())
    assert skips[0] == 1 and 0 in skips
    assert all(own.isfinite().all() for own in model.parameters())


@pytest.mark.parametrize("mode", SCALED)
def test_tuples_that_a_script_keeps_in_a_list_of_the_model_are_none_of_its_outputs(mode):
    """As actor_critic.py of PyTorch's examples keeps what it makes of them."""
    norms = []
    for scale in (1.0, 64.0):
        torch.manual_seed(0)
        model = Forward(lambda m, x: m.net(x), net=lambda: nn.Linear(8, 2), saved=list)
        prepared(mode, model, scaler=StaticLossScale(scale))
        for row in INPUTS[:5]:
            first, second = model(row)
            model.saved.append((first, second.square()))
        sum(first + second for first, second in model.saved).backward()
        norms.append(model.net.weight.grad.norm().item())
    # Some five roundings to 11 bits of each of five gradients.
    assert norms[0] == pytest.approx(norms[1], rel=25 * 2**-11)


def codebook(model, inputs):
    """Follow activations, which have a graph, by `.data`, and compute from that."""
    found = model.net(inputs)
    model.average.data.lerp_(found.float().mean(0).to(model.average), 0.01)
    model.codes.data.copy_(model.average * 0.5)
    return found


@pytest.mark.parametrize("mode", MASTERS)
def test_a_codebook_that_follows_activations_with_a_graph_moves_as_in_fp32(mode):
    """As vector-quantize-pytorch has it: 1 % a call, of which 16 bits would lose most."""
    ends = []
    for own in ("fp32", mode):
        torch.manual_seed(0)
        buffers = dict.fromkeys(("average", "codes"), lambda: torch.ones(8))
        model = Forward(codebook, net=lambda: nn.Linear(8, 8), **buffers)
        mprun.prepare(model, precision=own)
        for _ in range(6):
            model(INPUTS)
        assert torch.equal(model.codes, model.average * 0.5)
        ends.append(model.average)
    # A hundredth of an activation near 1 with some ten roundings to 8 bits, or products in FP8.
    coarse = get_policy(mode).matmul is not None
    torch.testing.assert_close(*ends, rtol=0, atol=6 * 0.01 * (0.3 if coarse else 10 * 2**-8))


@pytest.mark.parametrize("mode", MASTERS)
def test_weights_loaded_by_data_between_two_first_calls_stay(mode):
    """A script that calls the model once to see its shapes, and then fills it."""
    model, _ = prepared(mode, mlp())
    model(INPUTS)
    for own in model.parameters():
        own.data.fill_(1 / 3)
    second = model(INPUTS)
    assert all((own == 1 / 3).all() for own in model.parameters())
    model(INPUTS).sum().backward()
    assert torch.equal(model(INPUTS), second) or get_policy(mode).draws


class Normalising(nn.Linear):
    """Computes more than a product, as the layers of mnist_forward_forward of the examples do."""

    def forward(self, inputs):
        inputs = inputs / (inputs.norm(dim=1, keepdim=True) + 1e-4)
        return F.linear(inputs, self.weight.to(inputs.dtype), self.bias).relu()


class ByHand(nn.Linear):
    def forward(self, inputs):
        return (inputs @ self.weight.T).relu() + self.bias


@pytest.mark.parametrize("kind", [Normalising, ByHand])
@pytest.mark.parametrize("mode", FP8)
def test_a_linear_layer_with_a_forward_of_its_own_keeps_it_in_fp8(mode, kind):
    inputs = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for own in ("fp32", mode):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), kind(32, 32), nn.Linear(32, 32))
        model, optimizer = prepared(own, model)
        found.append(model(10 * inputs))
        found[-1].square().mean().backward()
        optimizer.step()
    products = mprun.state_of(optimizer).models[0].audit.counts()
    in_16_bits = [name for name in products if name.startswith("forward") and "16" in name]
    # The output layer, and the product by hand.
    assert sum(products[name] for name in in_16_bits) == (2 if kind is ByHand else 1)
    # FP4 has steps of a third; some three layers.
    assert (found[0] - found[1]).norm() < 0.5 * found[0].norm()

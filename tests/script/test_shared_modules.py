"""Models that share a module or a weight: one FP32 master, one gradient, one step, in every mode.

They are held against one module that holds both, which a script can write too.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun

from ..helpers import assert_same_bits, raises_line
from .loops import Forward, Tied
from .networks import MODES, reloaded, sgd, take_step

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def sequential(*layers):
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))


def one_encoder():
    """An actor and a critic."""
    encoder = nn.Linear(6, 12)
    return sequential(encoder), sequential(encoder)


def one_within_the_other():
    """A critic that calls the actor."""
    actor, head = sequential(nn.Linear(6, 12)), sequential(nn.Linear(4, 12))
    return actor, Forward(lambda m, x: m.head(m.net(x).relu()), lambda: actor, head=lambda: head)


def one_weight():
    """Two models with a layer each whose weight is the same parameter."""
    first, second = sequential(nn.Linear(6, 12)), sequential(nn.Linear(6, 12))
    second[0].weight = first[0].weight
    return first, second


SHARED = [one_encoder, one_within_the_other, one_weight]


def made(kind):
    torch.manual_seed(0)
    return kind()


def trained(first, second, optimizers, steps=5):
    def loss(factor):
        own = F.cross_entropy(first(INPUTS), torch.arange(8) % 4) + second(INPUTS).square().mean()
        return own * factor

    for step in range(steps):
        take_step(optimizers, loss, torch.inf if step == 2 else 1.0)
    return [*first.parameters(), *second.parameters()]


def squares_of(*models):
    return sum(model(INPUTS).square().mean() for model in models)


def of_both(first, second):
    """The parameters of both, each once, in the order in which one module has them."""
    return [*nn.ModuleList([first, second]).parameters()]


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(3)
def test_models_that_share_train_as_one_module_that_holds_both(mode, kind):
    first, second = made(kind)
    optimizer = sgd(of_both(first, second), lr=0.02)
    assert mprun.prepare([first, second], optimizer, mode) == ([first, second], optimizer)
    assert len(mprun.state_of(optimizer).models) == 1
    own = trained(first, second, [optimizer])
    both = nn.ModuleList(made(kind))
    optimizer = sgd(both.parameters(), lr=0.02)
    mprun.prepare(both, optimizer, mode)
    assert_same_bits(own, trained(*both, [optimizer]))


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("audited", [True, False])
def test_in_fp32_it_is_the_plain_script(kind, audited):
    found = []
    for mode in (None, "fp32"):
        models = made(kind)
        optimizer = sgd(of_both(*models), lr=0.02)
        if mode is not None:
            mprun.prepare([*models], optimizer, mode)
            mprun.state_of(optimizer).models[0].calls = 0 if audited else 100
        for _ in range(5):
            take_step(optimizer, squares_of, *models)
        found.append(of_both(*models))
    assert_same_bits(*found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_each_has_an_optimizer_of_its_own_and_the_shared_part_one_of_them(mode):
    """An overflow in one of them skips for it alone, and the scale moves once."""
    actor, critic = made(one_encoder)
    optimizers = [sgd(actor.parameters(), 0.02), sgd(critic[1:].parameters(), 0.02)]
    mprun.prepare([actor, critic], optimizers, mode)
    trained(actor, critic, optimizers, steps=2)
    scale = mprun.state_of(optimizers[0]).scale
    first = float(scale.scale)
    for gradient in (0.5, torch.inf)[: 1 + scale.skips_nonfinite]:
        before = [own.detach().clone() for own in of_both(actor, critic)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(actor(INPUTS), torch.arange(8) % 4).backward()
        for own in critic[1:].parameters():
            own.grad = torch.full_like(own, gradient)
        for optimizer in optimizers:
            optimizer.step()
        moved = [not torch.equal(*one) for one in zip(of_both(actor, critic), before, strict=True)]
        of_actor = len([*actor.parameters()])
        assert all(moved[:of_actor]) and {*moved[of_actor:]} == {gradient == 0.5}
    expected = first / 2 if scale.kind == "dynamic" else first
    assert float(scale.scale) == expected


@pytest.mark.parametrize("mode", ["fp32", "amp", "fp16_master_scaled", "fp16_naive"])
def test_a_teacher_that_holds_a_layer_of_its_student_is_none_that_trains(mode):
    student = sequential(nn.Linear(6, 12))
    teacher = nn.Sequential(student[0], nn.ReLU(), nn.Linear(12, 4)).eval()
    optimizer = sgd(student.parameters(), lr=0.02)
    mprun.prepare([student, teacher], optimizer, mode, scaler="none")
    kept = teacher[2].weight.detach().clone()
    for _ in range(3):
        with torch.no_grad():
            target = teacher(INPUTS)
        take_step(optimizer, lambda wanted: F.mse_loss(student(INPUTS), wanted), target)
    assert torch.equal(teacher[2].weight, kept) and teacher[0] is student[0]
    assert F.mse_loss(student(INPUTS), target) < F.mse_loss(torch.zeros(8, 4), target) * 4


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize(
    "mode", ["fp32", "amp", "fp16_master_scaled", "bf16_stochastic", "fp8_rowwise"]
)
@pytest.mark.few
def test_copies_of_one_or_both_are_prepared_and_share_as_they_do(mode, kind):
    first, second = made(kind)
    mprun.prepare([first, second], None, mode)
    for own, other in (copy.deepcopy((first, second)), copy.deepcopy([first, second])):
        found = of_both(own, other)
        assert len(found) == len(of_both(first, second))
        assert not {*map(id, found)} & {*map(id, of_both(first, second))}
        for copied, model in ((own, first), (other, second)):
            assert_same_bits(copied(INPUTS).detach(), model(INPUTS).detach())
    target = copy.deepcopy(second)  # as of a target network
    before = target(INPUTS).detach()
    assert_same_bits(before, second(INPUTS).detach())
    take_step(sgd(second.parameters()), squares_of, second)
    assert_same_bits(target(INPUTS).detach(), before)
    plain = copy.copy(second).__getstate__()
    assert "forward" not in plain and "__deepcopy__" not in plain


@pytest.mark.parametrize("name", ["0", "[0]", "*"])
def test_overrides_are_patterns_over_the_names_of_each(name):
    first, second = made(one_encoder)
    mprun.prepare([first, second], None, "fp16_master_scaled", overrides={name: "fp32"})
    state = mprun.state_of(optimizer := sgd(of_both(first, second)))
    dtypes = {id(own): dtype for own, dtype in state.computed()}
    assert dtypes[id(first[0].weight)] is torch.float32
    assert (dtypes[id(second[2].weight)] is torch.float32) == (name == "*")
    assert optimizer is state.optimizer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_two_calls_of_prepare_name_the_call_that_takes_both(mode):
    first, second = made(one_encoder)
    mprun.prepare(first, None, mode)
    with raises_line(ValueError, "0 is a part of a Sequential that is already prepared"):
        mprun.prepare(second, None, mode)


@pytest.mark.parametrize("mode", ["amp", "fp16_master_scaled", "bf16_master"])
def test_a_weight_of_two_models_of_two_calls_is_skipped_for_the_overflow_of_either(mode):
    first, second = made(one_weight)
    mprun.prepare(first, None, mode, scaler="static")
    mprun.prepare(second, None, mode, scaler="static")
    shared = first[0].weight
    optimizer = sgd([shared])
    assert len(mprun.state_of(optimizer).models) == 2
    for model in (first, second):
        before = shared.detach().clone()
        take_step(optimizer, lambda own: squares_of(own) * torch.inf, model)
        assert torch.equal(shared, before)


@pytest.mark.parametrize("mode", ["fp16_naive", "bf16_stochastic"])
def test_a_weight_that_another_call_has_cast_names_the_call_that_takes_both(mode):
    first, second = made(one_weight)
    mprun.prepare(first, None, mode)
    with raises_line(ValueError, "0.weight is torch.", "a prepared model has it, too; give both"):
        mprun.prepare(second, None, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_a_weight_of_two_layers_is_one_in_a_copy_and_in_a_saved_model(mode):
    model = Tied()
    mprun.prepare(model, None, mode)
    for own in (copy.deepcopy(model), reloaded(model, weights_only=False)):
        assert own.head.weight is own.embedding.weight is not model.head.weight
        assert_same_bits(own.head.weight.float(), model.head.weight.float())

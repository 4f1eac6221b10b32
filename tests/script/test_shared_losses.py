"""Losses and optimizers that are not one to one, as torch's own optimizers allow them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun
from mprun.precision.loss_scale import LogMaxLossScale, LogMaxRule

from ..helpers import assert_same_bits, network
from .networks import MODES, prepared, sgd


def step(model, optimizers, count=5):
    torch.manual_seed(1)
    for _ in range(count):
        inputs, labels = torch.randn(16, 6), torch.randint(3, (16,))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("scaler", [None, "logmax"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few
def test_one_loss_is_propagated_for_every_optimizer(mode, scaler):
    # Here an overflow is one of both parts; each optimizer skips for its own gradients, as torch's.
    model = network(hidden=8)
    both = [sgd(model[0].parameters()), sgd(model[2].parameters())]
    model, both = mprun.prepare(model, both, mode, scaler=scaler)
    one, optimizer = prepared(mode, network(hidden=8), scaler=scaler)
    step(model, both)
    step(one, [optimizer])
    assert_same_bits([*model.parameters()], [*one.parameters()])


def test_an_optimizer_that_no_loss_has_reached_does_not_step():
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    optimizers = [sgd(part.parameters()) for part in model]
    model, (first, second) = mprun.prepare(model, optimizers, "amp")
    (model[0](torch.randn(4, 6)).sum()).backward()
    with pytest.raises(RuntimeError, match="no gradients"):
        second.step()


def test_gradients_that_the_model_has_forgotten_say_nothing_of_the_next_step():
    """`model.zero_grad()`, as Trainers call it, is seen by the optimizer too."""
    model, optimizer = prepared("amp", network())
    (model(torch.full((4, 6), 6e4)).sum() * 1e4).backward()
    assert mprun.state_of(optimizer).models[0].found_inf
    model.zero_grad()
    (model(torch.randn(4, 6)).sum() * 1e-4).backward()
    assert not mprun.state_of(optimizer).models[0].found_inf


def test_the_largest_gradient_of_each_pass_that_a_script_clears_moves_a_scale_by_it():
    ends = []
    for steps in (True, False):
        torch.manual_seed(0)
        model, optimizer = prepared("amp", network(), lr=0.0, scaler="logmax")
        inputs = torch.randn(4, 6)
        for factor in (1.0, 2.0**-6, 2.0**-3):
            optimizer.zero_grad()
            (model(inputs).square().mean() * factor).backward()
            if steps or factor == 2.0**-3:
                optimizer.step()
        ends.append(mprun.state_of(optimizer).scale.state_dict())
    assert ends[0]["scale"] != 1
    assert_same_bits(*ends)


def test_a_closure_that_overflows_lowers_a_scale_by_the_largest_gradient():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    model, optimizer = mprun.prepare(
        model,
        optimizer,
        "amp",
        scaler=LogMaxLossScale(LogMaxRule(init_scale=2.0**24, log_max=14.0)),
    )

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 6)).square().mean() * 64.0
        loss.backward()
        return loss

    before = model[0].weight.detach().clone()
    optimizer.step(closure)
    assert not torch.equal(model[0].weight, before)
    assert mprun.state_of(optimizer).scale.scale < 2.0**24


def test_a_wrapper_that_runs_its_methods_as_its_own_shares_what_they_forget():
    """As the optimizers that Lightning gives to manual optimization."""

    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.__class__ = type("Wrapper", (Wrapper, type(optimizer)), {})

        def __getattr__(self, name):
            return getattr(self.optimizer, name)

    model, optimizer = prepared("amp", network())
    model(torch.randn(4, 6)).sum().backward()
    Wrapper(optimizer).zero_grad()
    with pytest.raises(RuntimeError, match="no gradients"):
        optimizer.step()

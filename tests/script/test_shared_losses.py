"""Losses and optimizers that are not one to one, as torch's own optimizers allow them."""

import gc
from functools import partial

import pytest
import torch
from torch import nn

import mprun
from mprun.precision import DynamicLossScale, DynamicRule
from mprun.precision.audit import FIRST
from mprun.precision.loss_scale import LogMaxLossScale, LogMaxRule

from ..helpers import assert_same_bits, network
from .loops import classified
from .networks import MODES, batches, loss_of, net, prepared, sgd, take_step


def step(model, optimizers, count=5):
    torch.manual_seed(1)
    for _ in range(count):
        inputs, labels = torch.randn(16, 6), torch.randint(3, (16,))
        take_step(optimizers, classified, model, inputs, labels)


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


def test_models_of_two_modes_in_one_loss_have_each_the_gradients_of_its_own():
    """Each in the arithmetic of its mode; what is counted is of one mode or not at all."""
    inputs, found = torch.randn(16, 6), []
    for together in (False, True):
        torch.manual_seed(0)
        pair = [prepared(mode, network())[0] for mode in ("fp16_master", "bf16_master")]
        losses = [model(inputs).square().sum() for model in pair]
        for loss in [sum(losses)] if together else losses:
            loss.backward()
        found.append([[own.grad for own in model.parameters()] for model in pair])
        for model, dtype in zip(pair, (torch.float16, torch.bfloat16), strict=True):
            assert {one for _, one in model.forward.shared.audit.products} == {dtype}
    assert_same_bits(*found)


@pytest.mark.parametrize("place", [0, 1])
def test_a_new_model_in_a_loss_is_watched_beside_one_of_many_calls(place):
    inputs, pair = torch.randn(16, 6), [prepared("bf16_master", network())[0] for _ in range(2)]
    for _ in range(FIRST + 1):
        pair[place](inputs).sum().backward()
    sum(model(inputs).square().sum() for model in pair).backward()
    products = pair[1 - place].forward.shared.audit.products
    assert {*products} == {("forward", torch.bfloat16), ("backward", torch.bfloat16)}


def test_a_shared_scale_moves_at_the_latest_when_one_optimizer_steps_again():
    scale = DynamicLossScale(DynamicRule(1024.0, growth_interval=1), device=torch.device("cpu"))
    pair = [prepared("fp16_master_scaled", network(), scaler=scale) for _ in range(2)]
    found, (model, optimizer) = [], pair[0]
    for _ in range(3):
        take_step(optimizer, lambda: model(torch.randn(4, 6)).square().mean())
        found.append(float(scale.scale))
    assert found == [1024, 2048, 4096]


@pytest.mark.parametrize("which", [0, 1])
def test_an_overflow_in_either_model_of_an_optimizer_skips_its_step(which):
    pair = [network(), network()]
    optimizer = sgd([own for model in pair for own in model.parameters()])
    mprun.prepare(pair, optimizer)
    before = [own.detach().clone() for model in pair for own in model.parameters()]
    large, small = pair[which](torch.full((4, 6), 6e4)), pair[1 - which](torch.randn(4, 6))
    (large.sum() * 1e4 + small.sum() * 1e-5).backward()
    optimizer.step()
    assert mprun.state_of(optimizer).found_inf == 1
    assert_same_bits([own.detach() for model in pair for own in model.parameters()], before)


@pytest.mark.parametrize("second", ["none", "gone"])
def test_gradients_that_no_optimizer_clears_overflow_for_one_step_alone(second):
    """A head is trained, and the body's gradients add up: they stay infinite for ever."""
    model = network()
    head, body = sgd(model[2].parameters()), sgd(model[0].parameters())
    both = [head] if second == "none" else [head, body]
    model, both = mprun.prepare(model, both, "fp16_master_scaled")
    skipped = []
    for magnitude in (6e4, 1e-2, 1e-2):
        head.zero_grad()
        (model(torch.full((4, 6), magnitude)).sum() * magnitude).backward()
        for optimizer in both:
            optimizer.step()
        both, optimizer, body = [head], None, None
        gc.collect()
        skipped.append(int(mprun.state_of(head).found_inf))
    assert skipped == [1, 0, 0] and not model[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("first", ["model", "judge"])
def test_the_scale_of_a_frozen_network_moves_with_the_updates_that_it_serves(first):
    """Whether it comes before the model that is trained or behind."""
    model, optimizer = prepared("fp16_master_scaled", network())
    own = DynamicLossScale(DynamicRule(1024.0, growth_interval=2), device=torch.device("cpu"))
    judge = nn.Linear(3 if first == "model" else 6, 6).requires_grad_(False)
    judge = mprun.prepare(judge, precision="fp16_master_scaled", scaler=own)
    scales = []
    for inputs, factor in ((1.0, 1e-3), (1.0, 1e-3), (6e4, 1e4)):
        optimizer.zero_grad()
        given = torch.full((4, 6), inputs, requires_grad=True)
        outputs = judge(model(given)) if first == "model" else model(judge(given))
        (outputs.sum() * factor).backward()
        optimizer.step()
        scales.append(float(own.scale))
    assert scales == [1024, 2048, 1024]


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
    scale = LogMaxLossScale(LogMaxRule(init_scale=2.0**24, log_max=14.0))
    make = partial(torch.optim.LBFGS, max_iter=2)
    model, optimizer = prepared("amp", network(), make, scaler=scale)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 6)).square().mean() * 64.0
        loss.backward()
        return loss

    before = model[0].weight.detach().clone()
    optimizer.step(closure)
    assert not torch.equal(model[0].weight, before)
    assert scale.scale < 2.0**24


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


# Optimizers that hooks step within the backward pass: the outcome is that of steps after it, by
# torch.amp's rule for several optimizers, which the ordinary loop keeps: each skips its step for
# its own gradients, and the scale falls once if any did.

OVERFLOWS = 2  # step with a loss that is too large


def trained(mode, hooked, parts=lambda model: [[own] for own in model.parameters()], after=()):
    """The model, its optimizers and the scales after each of 6 steps.

    parts: the parameters of each optimizer; those numbered `after` step behind the pass.
    """
    model = net()
    optimizers = [torch.optim.SGD(part, 0.05, momentum=0.9) for part in parts(model)]
    scale = DynamicLossScale(DynamicRule(2.0**20, growth_interval=3))
    scaler = scale if mprun.precision.get_policy(mode).half_dtype is torch.float16 else None
    mprun.prepare(model, optimizers, mode, scaler=scaler)
    waiting = [one for n, one in enumerate(optimizers) if not hooked or n in after]

    def stepping(optimizer):
        """A hook of each parameter: the last of them steps."""
        came, parameters = set(), optimizer.param_groups[0]["params"]

        def hook(own):
            came.add(own)
            if len(came) == len(parameters):
                came.clear()
                optimizer.step()
                optimizer.zero_grad()

        for own in parameters:
            own.register_post_accumulate_grad_hook(hook)

    for optimizer in optimizers:
        if optimizer not in waiting:
            stepping(optimizer)
    torch.manual_seed(3)
    scales = []
    for number, batch in enumerate(batches(6)):
        (classified(model, *batch) * (1e4 if number == OVERFLOWS else 1)).backward()
        for optimizer in waiting:
            optimizer.step()
            optimizer.zero_grad()
        scales.append(float(scale.scale))
    return model, optimizers, scales


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_are_those_of_steps_behind_the_pass(mode):
    """With an overflow in a mode with a loss scale; BatchNorm's statistics go back with it."""
    own, optimizers, scales = trained(mode, hooked=True)
    plain, others, expected = trained(mode, hooked=False)
    assert_same_bits(own.state_dict(), plain.state_dict())
    assert scales == expected
    for one, other in zip(optimizers, others, strict=True):
        assert_same_bits(one.state_dict()["state"], other.state_dict()["state"])


def halves(model):
    body, head = [*model.body.parameters()], [*model.head.parameters()]
    return [head, [*model.conv.parameters(), *model.norm.parameters(), *body]]


@pytest.mark.parametrize("after", [(), (0,), (1,)])
def test_some_step_within_it_and_others_behind_it(after):
    mode = "fp16_master_scaled"
    own, _, scales = trained(mode, hooked=True, parts=halves, after=after)
    plain, _, expected = trained(mode, hooked=False, parts=halves)
    assert_same_bits(own.state_dict(), plain.state_dict())
    assert scales == expected and len({*scales}) > 1


def test_only_what_overflows_is_skipped():
    """A gradient that is infinite of its own: the other optimizer moves, the scale falls once."""
    model = net()
    optimizers = [torch.optim.SGD(part, 0.05) for part in halves(model)]
    scale = DynamicLossScale(DynamicRule(4.0))
    mprun.prepare(model, optimizers, "fp16_master_scaled", scaler=scale)
    for optimizer in optimizers:
        last = optimizer.param_groups[0]["params"][0]  # the first to be used, so the last to come
        last.register_post_accumulate_grad_hook(lambda _, steps=optimizer.step: steps())
    bad = model.head.bias
    bad.register_hook(lambda gradient: gradient / 0)
    before = {name: own.detach().clone() for name, own in model.named_parameters()}
    loss_of(model).backward()
    moved = {name for name, own in model.named_parameters() if not torch.equal(own, before[name])}
    assert "conv.weight" in moved and not {"head.weight", "head.bias"} & moved
    assert scale.scale == 2.0 and scale.steps_skipped == 1


def test_a_parameter_that_gets_no_gradient_does_not_hold_the_scale_up():
    """Its optimizer never steps; the scale still moves once a pass, never within one."""
    model = net()
    model.unused = torch.nn.Linear(2, 2)
    optimizers = {own: torch.optim.SGD([own], 0.05) for own in model.parameters()}
    scale = DynamicLossScale(DynamicRule(4.0, growth_interval=1))
    mprun.prepare(model, [*optimizers.values()], "fp16_master_scaled", scaler=scale)
    within = []
    for own, optimizer in optimizers.items():

        def hook(_, optimizer=optimizer):
            optimizer.step()
            within.append(float(scale.scale))

        own.register_post_accumulate_grad_hook(hook)
    for number, batch in enumerate(batches(3)):
        classified(model, *batch).backward()
        assert scale.scale == 4.0 * 2 ** (number + 1)
        assert {*within} == {4.0 * 2**number}
        within.clear()
        model.zero_grad()

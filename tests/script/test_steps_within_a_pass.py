"""Optimizers that hooks step within the backward pass: the outcome is that of steps after it.

torch.amp's rule for several optimizers, which the ordinary loop keeps: each skips its step for its
own gradients, and the scale falls once if any did.
"""

import pytest
import torch
from torch.nn import functional as F

import mprun
from mprun.precision.loss_scale import DynamicLossScale, DynamicRule

from ..helpers import assert_same_bits
from .networks import MODES, batches, net

OVERFLOWS = 2  # step with a loss that is too large


def trained(mode, hooked, parts=lambda model: [[own] for own in model.parameters()], after=()):
    """The model, its optimizers and the scales after each of 6 steps.

    parts: the parameters of each optimizer; those numbered `after` step behind the pass.
    """
    model = net()
    optimizers = [torch.optim.SGD(part, 0.05, momentum=0.9) for part in parts(model)]
    scale = DynamicLossScale(DynamicRule(2.0**20, growth_interval=3))
    scaler = scale if mprun.precision.get_policy(mode).half_dtype is torch.float16 else None
    mprun.prepare(model, optimizers, mode, **({"scaler": scaler} if scaler else {}))
    waiting = [one for n, one in enumerate(optimizers) if not hooked or n in after]

    def steps(optimizer, own):
        missing = {id(one) for group in optimizer.param_groups for one in group["params"]}
        came = set()

        def hook(_):
            came.add(id(own))
            seen[optimizer] = seen.get(optimizer, set()) | {id(own)}
            if seen[optimizer] == missing:
                seen.pop(optimizer)
                optimizer.step()
                optimizer.zero_grad()

        return hook

    seen = {}
    for optimizer in optimizers:
        for own in [] if optimizer in waiting else optimizer.param_groups[0]["params"]:
            own.register_post_accumulate_grad_hook(steps(optimizer, own))
    torch.manual_seed(3)
    scales = []
    for number, (images, labels) in enumerate(batches(6)):
        loss = F.cross_entropy(model(images), labels)
        (loss * (1e4 if number == OVERFLOWS else 1)).backward()
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
    images, labels = next(batches(1))
    F.cross_entropy(model(images), labels).backward()
    moved = {name for name, own in model.named_parameters() if not torch.equal(own, before[name])}
    assert "conv.weight" in moved and not {"head.weight", "head.bias"} & moved
    assert scale.scale == 2.0 and scale.steps_skipped == 1


def test_a_parameter_that_gets_no_gradient_does_not_hold_the_scale_up():
    """Its optimizer never steps; the scale still moves once a pass, never within one."""
    model, unused = net(), torch.nn.Linear(2, 2)
    model.unused = unused
    optimizers = {own: torch.optim.SGD([own], 0.05) for own in model.parameters()}
    scale = DynamicLossScale(DynamicRule(4.0, growth_interval=1))
    mprun.prepare(model, [*optimizers.values()], "fp16_master_scaled", scaler=scale)
    within = []
    for own, optimizer in optimizers.items():

        def hook(_, optimizer=optimizer):
            optimizer.step()
            within.append(float(scale.scale))

        own.register_post_accumulate_grad_hook(hook)
    for number, (images, labels) in enumerate(batches(3)):
        F.cross_entropy(model(images), labels).backward()
        assert scale.scale == 4.0 * 2 ** (number + 1)
        assert {*within} == {4.0 * 2**number}
        within.clear()
        model.zero_grad()

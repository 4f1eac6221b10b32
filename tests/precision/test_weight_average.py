"""The average of the weights: its recursion, which updates count, and who looks at it."""

import copy

import pytest
import torch
from torch import nn

from mprun.assembly.task import weights_in
from mprun.precision import DynamicLossScale, DynamicRule
from mprun.tasks import OfParameters

from ..helpers import assert_same_bits, making, mixed, one_step

DECAY = 0.75


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


def learner_of(mode, patterns=("body",), decay=DECAY):
    torch.manual_seed(0)
    model = Network()
    averaged = weights_in(model, patterns, "optim.average_modules")
    average = None if decay is None else OfParameters(decay, averaged)
    rule = making(torch.optim.SGD, 0.25, foreach=True)
    return mixed(model, mode, rule, DynamicLossScale(DynamicRule(256.0)), average=average)


def step(learner, index, spoil=1.0):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(index))
    return one_step(learner, inputs, lambda outputs: outputs.square().mean() * spoil)


@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "fp16_naive"])
def test_the_recursion(mode):
    learner = learner_of(mode)
    weights = learner.named
    average = weights["body.weight"].detach().double()
    for index in range(5):
        step(learner, index)
        average = DECAY * average + (1 - DECAY) * weights["body.weight"].detach().double()
    own = learner.averages
    assert own.keys() == {"body.weight", "body.bias"}
    assert own["body.weight"].dtype == torch.float32
    # Five roundings of numbers below 1.
    torch.testing.assert_close(own["body.weight"].double(), average, rtol=0, atol=5 * 2.0**-24)
    assert not torch.equal(own["body.weight"], weights["body.weight"].detach().float())


@pytest.mark.parametrize("in_mode", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "amp", "fp16_naive"])
def test_evaluation_sees_the_average_and_puts_the_weights_back(mode, in_mode):
    learner = learner_of(mode)
    for index in range(3):
        step(learner, index)
    weights = copy.deepcopy(dict(learner.model.named_parameters()))
    averages, inputs = learner.averages, torch.randn(8, 4)
    with learner.evaluating(in_mode) as model:
        outputs = model(inputs)
        seen = dict(model.named_parameters())
        dtype = weights["body.weight"].dtype if in_mode else torch.float32
        assert torch.equal(seen["body.weight"], averages["body.weight"].to(dtype))
        assert not torch.equal(seen["body.weight"], weights["body.weight"].to(dtype))
        head = weights["head.weight"]
        assert torch.equal(seen["head.weight"].to(head.dtype), head)
    plain = Network()
    plain.load_state_dict({n: own.float() for n, own in (weights | averages).items()})
    assert torch.equal(outputs, plain(inputs)) is (not in_mode or mode == "fp32")
    assert_same_bits(dict(learner.model.named_parameters()), weights)


def test_a_state_without_it_or_with_one_that_nobody_asked_for_is_refused():
    learner = learner_of("fp16_master_scaled")
    saved = learner.state_dict()
    with pytest.raises(ValueError, match="average"):
        learner_of("fp16_master_scaled", decay=None).load_state_dict(saved)
    with pytest.raises(ValueError, match="average"):
        learner.load_state_dict(saved | {"averages": {}})


def test_no_pattern_means_every_weight():
    learner = learner_of("fp32", ())
    assert list(learner.averages) == [n for n, _ in learner.model.named_parameters()]


def test_refusals():
    with pytest.raises(ValueError, match="optim.average_modules: 'lstm' matches no module"):
        learner_of("fp32", ("lstm",))

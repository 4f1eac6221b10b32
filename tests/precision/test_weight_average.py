"""The average of the weights: its recursion, which updates count, and who looks at it."""

import copy

import pytest
import torch
from torch import nn

from mprun.build.task import weights_in
from mprun.models.lstm import RowTable
from mprun.precision import DynamicLossScale, ForwardContext
from mprun.tasks import Learner

from ..helpers import assert_same_bits, making, mixed, one_step

DECAY = 0.75


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


class WithTable(Network):
    def __init__(self):
        super().__init__()
        self.table = RowTable(5, 4)


def learner_of(mode, patterns=("body",), network=Network, decay=DECAY):
    torch.manual_seed(0)
    model = network()
    average = {
        "average_decay": decay,
        "averaged": weights_in(model, patterns, "optim.average_modules"),
    }
    rule = making(torch.optim.SGD, 0.25, foreach=True)
    return Learner(*mixed(model, mode, rule, DynamicLossScale(256.0), **average))


def step(learner, index, spoil=1.0):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(index))
    return one_step(
        learner.cast, learner.optimizer, inputs, lambda outputs: outputs.square().mean() * spoil
    )


@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "fp16_naive"])
def test_the_recursion(mode):
    learner = learner_of(mode)
    weights = dict(zip(learner.optimizer.names, learner.optimizer.updated, strict=True))
    average = weights["body.weight"].detach().double()
    for index in range(5):
        step(learner, index)
        average = DECAY * average + (1 - DECAY) * weights["body.weight"].detach().double()
    own = learner.optimizer.averages
    assert own.keys() == {"body.weight", "body.bias"}
    assert own["body.weight"].dtype == torch.float32
    # Five roundings of numbers below 1.
    torch.testing.assert_close(own["body.weight"].double(), average, rtol=0, atol=5 * 2.0**-24)
    assert not torch.equal(own["body.weight"], weights["body.weight"].detach().float())


def test_a_skipped_update_does_not_move_it():
    learner = learner_of("fp16_master_scaled")
    step(learner, 0)
    before = copy.deepcopy(learner.optimizer.averages)
    assert step(learner, 1, spoil=float("inf")).found_inf == 1
    assert_same_bits(learner.optimizer.averages, before)
    assert step(learner, 2).found_inf == 0
    assert not torch.equal(learner.optimizer.averages["body.weight"], before["body.weight"])


@pytest.mark.parametrize("in_mode", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "amp"])
def test_evaluation_sees_the_average_and_puts_the_weights_back(mode, in_mode):
    learner = learner_of(mode)
    for index in range(3):
        step(learner, index)
    weights = copy.deepcopy(dict(learner.model.named_parameters()))
    averages = learner.optimizer.averages
    forward_context = ForwardContext(learner.cast.policy, torch.device("cpu"))
    with learner.evaluating(forward_context, in_mode) as model:
        seen = dict(model.named_parameters())
        dtype = weights["body.weight"].dtype if in_mode else torch.float32
        assert torch.equal(seen["body.weight"], averages["body.weight"].to(dtype))
        assert not torch.equal(seen["body.weight"], weights["body.weight"].to(dtype))
        assert torch.equal(
            seen["head.weight"].to(weights["head.weight"].dtype), weights["head.weight"]
        )
    assert_same_bits(dict(learner.model.named_parameters()), weights)


def test_it_belongs_to_the_checkpoint():
    one, other = learner_of("fp16_master_scaled"), learner_of("fp16_master_scaled")
    for index in range(3):
        step(one, index)
    other.load_state_dict(one.state_dict())
    for index in range(3, 5):
        step(one, index), step(other, index)
    assert_same_bits(other.optimizer.averages, one.optimizer.averages)
    saved = one.state_dict()
    with pytest.raises(ValueError, match="average"):
        learner_of("fp16_master_scaled", decay=None).load_state_dict(saved)
    saved["optimizer"]["averages"] = {}
    with pytest.raises(ValueError, match="average"):
        other.load_state_dict(saved)


def test_no_pattern_means_every_weight():
    learner = learner_of("fp32", ())
    assert list(learner.optimizer.averages) == [n for n, _ in learner.model.named_parameters()]


@pytest.mark.parametrize(
    ("patterns", "network", "message"),
    [
        (("lstm",), Network, "optim.average_modules: 'lstm' matches no module"),
        ((), WithTable, r"optim.average_modules=\[\]: table are updated only"),
        (("body", "t*"), WithTable, "table are updated only"),
    ],
)
def test_refusals(patterns, network, message):
    with pytest.raises(ValueError, match=message):
        learner_of("fp32", patterns, network)


def test_chosen_modules_beside_a_table_are_averaged():
    learner = learner_of("fp32", ("body",), WithTable)
    assert learner.optimizer.averages.keys() == {"body.weight", "body.bias"}

"""The average of the weights: its recursion, which updates count, and who looks at it."""

import pytest
import torch
from torch import nn

from mprun.models import RowTable
from mprun.precision import (
    DynamicLossScale,
    ForwardContext,
    MixedPrecisionOptimizer,
    cast_model,
    get_policy,
)
from mprun.tasks import TrainState

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
    cast = cast_model(network(), get_policy(mode))
    optimizer = MixedPrecisionOptimizer(
        cast,
        lambda named: torch.optim.SGD([t for _, t in named], 0.25, foreach=True),
        DynamicLossScale(256.0),
        average_decay=decay,
        average_modules=patterns,
    )
    return TrainState(cast, optimizer)


def step(learner, index, spoil=1.0):
    torch.manual_seed(index)
    inputs = learner.cast.policy.cast_inputs(torch.randn(8, 4))
    learner.optimizer.zero_grad()
    learner.optimizer.backward(learner.model(inputs).float().square().mean() * spoil)
    update = learner.optimizer.step()
    learner.optimizer.loss_scales[0].update()
    return update


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
    before = {name: value.clone() for name, value in learner.optimizer.averages.items()}
    assert step(learner, 1, spoil=float("inf")).found_inf == 1
    assert all(torch.equal(learner.optimizer.averages[n], v) for n, v in before.items())
    assert step(learner, 2).found_inf == 0
    assert not torch.equal(learner.optimizer.averages["body.weight"], before["body.weight"])


@pytest.mark.parametrize("in_mode", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "amp"])
def test_evaluation_sees_the_average_and_puts_the_weights_back(mode, in_mode):
    learner = learner_of(mode)
    for index in range(3):
        step(learner, index)
    weights = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    averages = learner.optimizer.averages
    arithmetic = ForwardContext(learner.cast.policy, torch.device("cpu"))
    with learner.evaluating(arithmetic, in_mode) as model:
        seen = dict(model.named_parameters())
        dtype = weights["body.weight"].dtype if in_mode else torch.float32
        assert torch.equal(seen["body.weight"], averages["body.weight"].to(dtype))
        assert not torch.equal(seen["body.weight"], weights["body.weight"].to(dtype))
        assert torch.equal(
            seen["head.weight"].to(weights["head.weight"].dtype), weights["head.weight"]
        )
    own = dict(learner.model.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in weights.items())


def test_it_belongs_to_the_checkpoint():
    one, other = learner_of("fp16_master_scaled"), learner_of("fp16_master_scaled")
    for index in range(3):
        step(one, index)
    other.load_state_dict(one.state_dict())
    for index in range(3, 5):
        step(one, index), step(other, index)
    for name, average in one.optimizer.averages.items():
        assert torch.equal(other.optimizer.averages[name], average)
    saved = one.state_dict()
    with pytest.raises(ValueError, match="average"):
        learner_of("fp16_master_scaled", decay=None).load_state_dict(saved)
    saved["optimizer"]["averages"] = {}
    with pytest.raises(ValueError, match="average"):
        other.load_state_dict(saved)


def test_no_pattern_means_every_weight():
    assert learner_of("fp32", ()).optimizer.averages.keys() == {
        "body.weight",
        "body.bias",
        "head.weight",
        "head.bias",
    }


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

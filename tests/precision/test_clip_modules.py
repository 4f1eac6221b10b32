"""Clipping of chosen modules: their norm, their gradients, and nobody else's."""

import pytest
import torch
from torch import nn

from mprun.assembly.task import weights_in
from mprun.precision import StaticLossScale
from mprun.tasks import OfParameters

from .. import helpers
from ..helpers import assert_same_bits, making, mixed

CLIP = 0.125


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.body(self.table(ids)))


def one_step(patterns, clip=CLIP, scale=None, mode="fp32"):
    """Reported norm, and by name what one SGD step of rate 1 took off each weight."""
    torch.manual_seed(0)
    rule = making(torch.optim.SGD, 1.0, foreach=True)
    model = Network()
    clipped = weights_in(model, patterns, "train.clip_modules")
    learner = mixed(model, mode, rule, scale, clip=clip and OfParameters(clip, clipped))
    before = {name: weight.detach().clone() for name, weight in learner.named.items()}
    ids = torch.tensor([0, 1, 1, 5])
    update = helpers.one_step(learner, ids, lambda y: 3 * y.square().sum(), measure=True)
    steps = {name: before[name] - own.detach() for name, own in learner.named.items()}
    return update.grad_norm, steps


@pytest.mark.parametrize(
    ("patterns", "clipped"),
    [
        ([], {"table", "body.0", "body.2", "head"}),
        (["body"], {"body.0", "body.2"}),
        (["body.*"], {"body.0", "body.2"}),
        (["body.0", "head"], {"body.0", "head"}),
        (["table"], {"table"}),
    ],
)
def test_only_these_are_clipped(patterns, clipped):
    whole, free = one_step([], clip=None)
    total = torch.stack([step.double().norm() for step in free.values()]).norm()
    torch.testing.assert_close(whole.double(), total, rtol=2.0**-18, atol=0)
    norm, steps = one_step(patterns)
    inside = {name for name in free if name.rpartition(".")[0] in clipped}
    assert {name.rpartition(".")[0] for name in inside} == clipped
    expected = torch.stack([free[name].double().norm() for name in inside]).norm()
    # The gradients are differences of weights below 4 here: 2^-23 each.
    torch.testing.assert_close(norm.double(), expected, rtol=2.0**-18, atol=0)
    assert norm > 2 * CLIP
    for name in free:
        factor = CLIP / expected.float() if name in inside else 1.0
        torch.testing.assert_close(steps[name], free[name] * factor, rtol=2.0**-18, atol=2.0**-22)


def test_under_a_scale_the_same():
    assert_same_bits(one_step(["body"]), one_step(["body"], scale=StaticLossScale(256.0)))


def test_a_pattern_without_a_match_is_named():
    with pytest.raises(ValueError, match="train.clip_modules: 'lstm' matches no module.*body"):
        one_step(["body", "lstm"])
    says = r"train.clip_modules=\['body.1'\]: no module that matches these patterns has weights"
    with pytest.raises(ValueError, match=says):
        one_step(["body.1"])

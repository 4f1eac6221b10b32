"""A gradient is unscaled in its memory if nobody else holds it, and otherwise left as it is."""

import torch
from torch import nn

import mprun
from mprun.precision import StaticLossScale

from .networks import prepared

SCALE = 1024.0


def test_what_nobody_holds_is_unscaled_in_place():
    model, optimizer = prepared("amp", nn.Linear(8, 4), scaler=StaticLossScale(SCALE))
    arrived = []
    steps = mprun.state_of(optimizer)
    steps.watch_gradient(model.weight, lambda own: arrived.append(own.data_ptr()))
    model(torch.randn(2, 8)).square().sum().backward()
    assert model.weight.grad.data_ptr() == arrived[0]


class Sums(nn.Module):
    """Weights whose gradients are one tensor, two views of one, and one of which a hook keeps."""

    def __init__(self):
        super().__init__()
        for name in ("one", "other", "left", "right", "kept"):
            setattr(self, name, nn.Parameter(torch.ones(4)))

    def forward(self, x):
        sides = torch.cat([self.left, self.right]).view(2, 4).sum(0)
        return (self.one + self.other + sides + self.kept) * x


def test_what_somebody_holds_keeps_its_values_and_is_unscaled_once():
    model, optimizer = prepared("amp", Sums(), scaler=StaticLossScale(SCALE))
    kept = []
    mprun.state_of(optimizer).watch_gradient(model.kept, lambda own: kept.append(own.view(-1)))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    model(x).sum().backward()
    for own in model.parameters():
        assert torch.equal(own.grad, x)  # exact: the scale is a power of two
    assert torch.equal(kept[0], SCALE * x)

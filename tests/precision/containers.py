"""Networks whose layers stand in containers of every kind, used in every way."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Linear):
    """A linear layer that remembers in which dtype its input came."""

    def __init__(self):
        super().__init__(4, 4)
        self.seen = None

    def forward(self, x):
        self.seen = x.dtype
        return super().forward(x)


class Bare(nn.Module):
    """A container of a user, without `forward`."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Layer(), Layer()


class Bypassed(Bare):
    """Another, whose `forward` the model does not call."""

    def forward(self, x):
        return self.two(self.one(x))


class Recomputed(Bypassed):
    """A block that computes its layers anew in the backward pass."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Net(nn.Module):
    """Layers before and after `parts`, of which `order` makes a function."""

    def __init__(self, parts, order):
        super().__init__()
        self.first, self.parts, self.last = Layer(), parts, Layer()
        self.order = order

    def forward(self, x):
        return self.last(self.order(self.parts, self.first(x)))


class Parent(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers, self.own = layers, Layer()

    def forward(self, x):
        return self.own(in_turn(self.layers, x))


class Shared(nn.Module):
    """Two parents with one list of layers."""

    def __init__(self):
        super().__init__()
        self.first, layers, self.last = Layer(), nn.ModuleList([Layer(), Layer()]), Layer()
        self.encoder, self.decoder = Parent(layers), Parent(layers)

    def forward(self, x):
        return self.last(self.decoder(self.encoder(self.first(x))))


class Scaled(nn.Module):
    """A block that computes with parameters in containers of torch."""

    def __init__(self):
        super().__init__()
        self.layer, ones = Layer(), torch.ones(4)
        self.gains = nn.ParameterList([nn.Parameter(ones), nn.Parameter(ones.clone())])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4))})

    def forward(self, x):
        return self.layer(x) @ self.gains[0].diag() * self.gains[1] + self.shifts["a"]


def in_turn(parts, x):
    for part in parts:
        x = torch.relu(part(x))
    return x


def _two():
    return [Layer(), Layer()]


# Kind -> network whose container is `parts`.
KINDS = {
    "ModuleList": lambda: Net(nn.ModuleList(_two()), in_turn),
    "ModuleDict": lambda: Net(
        nn.ModuleDict({"a": Layer(), "b": Layer()}), lambda own, x: own["b"](own["a"](x))
    ),
    "Sequential": lambda: Net(nn.Sequential(*_two()), lambda own, x: own(x)),
    "Sequential in parts": lambda: Net(nn.Sequential(*_two()), in_turn),
    "own": lambda: Net(Bare(), lambda own, x: own.two(own.one(x))),
    "own in parts": lambda: Net(Bypassed(), lambda own, x: own.two(own.one(x))),
    "nested": lambda: Net(
        nn.ModuleList([nn.ModuleDict({"a": nn.Sequential(*_two())}), nn.ModuleDict({"a": Bare()})]),
        lambda own, x: own[1]["a"].one(in_turn(own[0]["a"], x)),
    ),
    "recomputed": lambda: Net(nn.ModuleList([Recomputed()]), in_turn),
    "recomputed inside": lambda: Net(nn.Sequential(Recomputed(), Layer()), lambda own, x: own(x)),
    "parameters": lambda: Net(nn.ModuleList([Scaled()]), in_turn),
}


def seen_in(model):
    """Return module name -> dtype that it saw, of each layer that ran."""
    layers = ((name, own.seen) for name, own in model.named_modules() if isinstance(own, Layer))
    return {name: seen for name, seen in layers if seen is not None}

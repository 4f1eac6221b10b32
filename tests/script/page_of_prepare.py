"""Rows of docs/script/prepare.md, which tests run, and the models with which they do."""

import torch
from torch import nn

import mprun

from ..pages import ROOT

PAGE = ROOT / "docs" / "script" / "prepare.md"
FP16, BF16 = "fp16_master_scaled", "bf16_master"


def rows(title, head):
    """Return the rows of a table of a section: first cell -> last cell."""
    section = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    table = section.partition(f"| {head} |")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {first: last for first, last in cells}


def linear(*sizes):
    torch.manual_seed(0)
    sizes = sizes or (4, 4, 2)
    return nn.Sequential(*(nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr)


def prepared(mode=FP16, model=None, make=sgd, **options):
    model = linear() if model is None else model
    return mprun.prepare(model, make(model), mode, **options)


class Calls(nn.Module):
    """A linear layer, and what `act(self, y)` makes of its output."""

    def __init__(self, act, **parts):
        super().__init__()
        torch.manual_seed(0)
        self.act, self.layer = act, nn.Linear(4, 4)
        for name, part in parts.items():
            (self.register_buffer if isinstance(part, torch.Tensor) else setattr)(name, part)

    def forward(self, *given):
        return self.act(self, self.layer(given[0]), *given[1:])


ONES = torch.ones(2, 4)


def call(act, *given, mode=FP16, **parts):
    """Call a prepared model that does `act` with what its layer makes of ones."""
    model, optimizer = prepared(mode, Calls(act, **parts))
    return model(*(given or (ONES,)))


def step(model, optimizer, given=ONES, factor=1.0):
    optimizer.zero_grad()
    loss = (model(given) * factor).sum()
    loss.backward()
    optimizer.step()
    return loss

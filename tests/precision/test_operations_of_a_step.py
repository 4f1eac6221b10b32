"""How many operations loss scales add to a step: each is a launch on a GPU."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.precision import BatchNormGuard
from mprun.precision.loss_scale import DynamicLossScale, StaticLossScale


class Operations(TorchDispatchMode):
    """The names of all operations, but of those that only allocate."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not name.startswith(("empty", "detach", "_to_copy")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operations(function, *arguments):
    with Operations() as seen:
        function(*arguments)
    return seen.names


def test_the_inverse_is_one_operation():
    assert operations(StaticLossScale(3.0).inverse) == ["div"]


def test_the_dynamic_rule_takes_eight_operations():
    found = operations(DynamicLossScale().update)
    assert len(found) == 8, found


def test_a_guard_of_nothing_does_nothing():
    guard = BatchNormGuard(nn.Linear(2, 2))
    assert operations(guard.save) == operations(guard.restore_where, torch.ones(())) == []

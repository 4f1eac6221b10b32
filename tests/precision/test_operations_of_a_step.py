"""How many operations loss scales add to a step: each is a launch on a GPU."""

import torch
from torch import nn

from mprun.precision import BatchNormGuard
from mprun.precision.loss_scale import DynamicLossScale, StaticLossScale

from .operations import Operations


def operations(function, *arguments):
    """The names of all operations, but of those that only allocate."""
    with Operations() as seen:
        function(*arguments)
    return [name for name in seen.names if not name.startswith(("empty", "detach", "_to_copy"))]


def test_the_inverse_is_one_operation():
    assert operations(StaticLossScale(3.0).inverse) == ["div"]


def test_the_dynamic_rule_takes_eight_operations():
    found = operations(DynamicLossScale().update)
    assert len(found) == 8, found


def test_a_guard_of_nothing_does_nothing():
    guard = BatchNormGuard(nn.Linear(2, 2))
    assert operations(guard.save) == operations(guard.restore_where, torch.ones(())) == []

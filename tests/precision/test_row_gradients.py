"""Sparse gradients of rows without a wait: each row once, in shapes that no value decides."""

import pytest
import torch

from mprun.precision import torch_update
from mprun.precision.torch_update import moves_used_rows_alone, skipping
from mprun.precision.update import each_row_once, rows_once

from ..helpers import assert_same_bits

ADAGRAD = {"lr": 0.1, "initial_accumulator_value": 1.0}
RULES = {"sgd": lambda own: torch.optim.SGD(own, lr=0.1)}
RULES["adagrad"] = lambda own: torch.optim.Adagrad(own, **ADAGRAD)


def sparse(ids, values, rows):
    size = rows, *values.shape[1:]
    return torch.sparse_coo_tensor(ids[None], values, size, check_invariants=False)


def coalesced(rows, values, size):
    how = {"is_coalesced": True, "check_invariants": False}
    return torch.sparse_coo_tensor(rows[None], values, size, **how)


def in_order(gradient):
    """Coalesced, with the values of each row added as they come: torch's CPU has another order."""
    ids, values = gradient._indices()[0], gradient._values()
    rows = ids.unique()
    sums = torch.zeros(len(gradient), *values.shape[1:], dtype=values.dtype)
    for number, value in zip(ids, values, strict=True):
        sums[number] += value
    return coalesced(rows, sums[rows], gradient.shape)


def without_a_wait(gradient):
    """Compute `each_row_once` as on CUDA."""
    found = rows_once(gradient._indices()[0], gradient._values(), len(gradient))
    return coalesced(*found, gradient.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("count", "rows"), [(1, 9), (7, 9), (40, 60), (40, 9), (9, 9)])
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.few
def test_each_row_is_added_in_order_and_others_are_zeros(dtype, count, rows, shape):
    torch.manual_seed(count + rows)
    ids, values = torch.randint(rows, (count,)), torch.randn(count, *shape).to(dtype)
    expected = in_order(sparse(ids, values, rows))
    found, sums = rows_once(ids, values, rows)
    assert len(found) == min(count, rows)
    assert torch.equal(found, found.unique())  # rising, each once
    assert_same_bits(sums[torch.isin(found, ids)], expected.values())
    assert not sums[~torch.isin(found, ids)].any()
    assert torch.equal(found[torch.isin(found, ids)], expected.indices()[0])


def test_on_a_cpu_it_is_coalesce():
    found = each_row_once(sparse(torch.tensor([3, 1, 3]), torch.randn(3, 2), 5))
    assert found.is_coalesced() and found._nnz() == 2
    assert each_row_once(found) is found


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_zeros_change_no_bit(rule):
    own = [torch.nn.Parameter(torch.randn(30, 4)) for _ in range(2)]
    own[1].data.copy_(own[0].data)
    optimizers = [RULES[rule]([one]) for one in own]
    for _ in range(5):
        gradient = sparse(torch.randint(30, (12,)), torch.randn(12, 4), 30)
        own[0].grad, own[1].grad = in_order(gradient), without_a_wait(gradient)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(*own)
    assert_same_bits(*(optimizer.state_dict()["state"] for optimizer in optimizers))


@pytest.mark.parametrize("rule", RULES)
def test_a_skip_on_the_device_moves_no_row(rule, monkeypatch):
    monkeypatch.setattr(torch_update, "_is_on_host", lambda flag: False)
    own = torch.nn.Parameter(torch.randn(30, 4))
    own.data[:4] = torch.tensor([0.0, -0.0, 1e-40, -1e-40])
    optimizer = RULES[rule]([own])
    before = own.detach().clone(), [value.clone() for value in optimizer.state[own].values()]
    values = torch.randn(12, 4)
    values[0, 0], values[1, 1] = float("inf"), float("nan")
    own.grad = gradient = without_a_wait(sparse(torch.arange(12), values, 30))
    with skipping(optimizer, torch.ones(())):
        assert own.grad is not gradient
        optimizer.step()
    assert own.grad is gradient
    assert_same_bits(own.detach(), before[0])
    for name, old in zip(optimizer.state[own], before[1], strict=True):
        if name != "step":  # which only lr_decay reads
            assert_same_bits(optimizer.state[own][name], old)


def test_what_else_moves_rows(monkeypatch):
    own = [torch.nn.Parameter(torch.randn(3, 2))]
    assert all(moves_used_rows_alone(make(own)) for make in RULES.values())
    others = [
        torch.optim.SGD(own, lr=0.1, momentum=0.9),
        torch.optim.SGD(own, lr=0.1, weight_decay=0.1),
        torch.optim.Adagrad(own, lr_decay=0.1),
        torch.optim.SparseAdam(own),
    ]
    assert not any(map(moves_used_rows_alone, others))
    monkeypatch.setattr(torch_update, "_is_on_host", lambda flag: False)
    own[0].grad = sparse(torch.arange(2), torch.ones(2, 2), 3)
    others[0].step()
    before = own[0].detach().clone()
    with skipping(others[0], torch.ones(())):  # gradients of 0 would let the momentum move them
        others[0].step()
    assert torch.equal(own[0], before)

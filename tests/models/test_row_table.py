"""Rows of a table: sparse gradients, rows alone rounded, nothing of the table's size in a step."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from mprun.models.lstm import OutputTable, RowTable, SampledSoftmax

from ..helpers import mixed, one_step


def numbered(kind, rows, width, *factor):
    table = kind(rows, width, *factor)
    with torch.no_grad():
        table.weight.copy_(torch.arange(rows * width).view(rows, width))
        if kind is OutputTable:
            table.bias.copy_(-torch.arange(rows))
    return table


@pytest.mark.parametrize("ids", [[3], [3, 3, 3], [0, 1, 2, 3], [[4, 0], [4, 1]]])
def test_rows_and_biases_equal_a_dense_lookup(ids):
    table, ids = numbered(OutputTable, 5, 3, 3.0), torch.tensor(ids)
    weight = table.weight.detach().clone().requires_grad_()
    bias = table.bias.detach().clone().requires_grad_()
    rows, biases = table(ids)
    wanted = F.embedding(ids, weight), F.embedding(ids, bias[:, None]).squeeze(-1)
    assert torch.equal(rows, wanted[0]) and torch.equal(biases, wanted[1])
    factors = torch.randn_like(rows)
    ((rows * factors).sum() + (biases**2).sum()).backward()
    (3.0 * ((wanted[0] * factors).sum() + (wanted[1] ** 2).sum())).backward()
    for own, dense in ((table.weight, weight), (table.bias, bias)):
        assert own.grad.is_sparse and own.grad._nnz() == ids.numel()
        # Sums of at most three numbers in another order, and a factor before or after them.
        torch.testing.assert_close(own.grad.to_dense(), dense.grad, rtol=2.0**-20, atol=2.0**-20)


def test_a_slice_is_a_view():
    table = numbered(OutputTable, 7, 2)
    rows, biases = table(slice(4, 8))
    assert rows.data_ptr() == table.weight[4:].data_ptr() and len(rows) == len(biases) == 3


def test_an_id_outside_the_table_is_an_error():
    with pytest.raises(IndexError):
        numbered(RowTable, 5, 3)(torch.tensor([5]))


class Read(nn.Module):
    """A table that is read, and what was read of it."""

    def __init__(self, table):
        super().__init__()
        self.table, self.layer, self.held = table, nn.Linear(4, 4), []

    def forward(self, ids):
        rows = self.table(ids)
        self.held.append((self.table.weight.dtype, rows.dtype, rows.detach()))
        return self.layer(rows)


@pytest.mark.parametrize("kind", [RowTable, nn.Embedding])
def test_a_mode_rounds_the_rows_that_are_read_and_no_others(kind):
    """So does it with a user's embedding: the values are those of a table in 16 bits."""
    table = RowTable(9, 4) if kind is RowTable else nn.Embedding(9, 4, sparse=True)
    nn.init.normal_(table.weight)
    model, ids = Read(table), torch.tensor([1, 3, 3])
    before = table.weight.detach().clone()
    learner = mixed(model, "fp16_master_scaled", torch.optim.Adagrad)
    one_step(learner, ids)
    ((held, rows, values),) = model.held
    assert (held, rows) == (torch.float32, torch.float16)
    assert torch.equal(values, before.half()[ids])
    whole = Read(nn.Embedding(9, 4))  # with dense gradients
    one_step(mixed(whole, "fp16_master_scaled", torch.optim.Adagrad), ids)
    assert whole.held[0][:2] == (torch.float16, torch.float16)
    gradient = table.weight.grad.coalesce()
    assert gradient.dtype is torch.float32 and gradient.indices().tolist() == [[1, 3]]
    moved = (table.weight != before).any(1)
    assert moved.nonzero().flatten().tolist() == [1, 3]


def test_a_mode_without_masters_keeps_the_table_in_its_format():
    model = Read(RowTable(9, 4))
    nn.init.normal_(model.table.weight)
    learner = mixed(model, "fp16_naive", torch.optim.Adagrad)
    one_step(learner, torch.tensor([1, 3, 3]))
    assert model.held[0][:2] == (torch.float16, torch.float16)
    assert learner.steps.state_by_name()["table.weight"]["sum"].dtype is torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equal_ids_are_added_up_in_fp32(dtype):
    """8192 ones: 2048 (FP16) or 256 (BF16) if they were added up in 16 bits."""
    table = numbered(RowTable, 3, 4)
    mode = "fp16_master" if dtype is torch.float16 else "bf16_master"
    learner = mixed(nn.Sequential(table), mode, torch.optim.Adagrad)
    learner.zero_grad()
    learner.model(torch.ones(8192, dtype=torch.int64)).sum().backward()
    gradient = table.weight.grad.coalesce()
    assert gradient.indices().tolist() == [[1]] and (gradient.values() == 8192).all()


def test_shapes_depend_on_the_number_of_ids_alone():
    """Fake tensors have no values: whatever read one, as a wait for the device, would fail."""
    with FakeTensorMode():
        table, softmax = OutputTable(793_472, 1024), SampledSoftmax(793_472, 8192)
        hidden = torch.randn(2560, 1024, requires_grad=True)
        targets = torch.zeros(2560, dtype=torch.int64)
        losses = softmax(hidden, targets, table)
        losses.mean().backward()
        assert table.weight.grad.is_sparse and table.bias.grad.is_sparse
        assert hidden.grad.shape == hidden.shape
        with pytest.raises(DataDependentOutputException):
            losses.mean().item()

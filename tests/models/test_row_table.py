"""Rows of a table: each used row once, gradients added up in FP32, nothing of the table's size."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from mprun.models.lstm import RowTable, SampledSoftmax
from mprun.precision.emulation import HalfEmulation


def numbered(rows, width, **options):
    table = RowTable(rows, width, **options)
    with torch.no_grad():
        table.weight.copy_(torch.arange(rows * width).view(rows, width))
        if table.bias is not None:
            table.bias.copy_(-torch.arange(rows))
    return table


def test_each_row_is_gathered_once():
    table = numbered(10, 2, bias=True)
    rows = table.gather(torch.tensor([[7, 2, 7], [2, 9, 2]]))
    assert rows.ids.tolist() == [2, 7, 9, 2, 2, 2]  # padded with the first
    assert rows.used.tolist() == [True, True, True, False, False, False]
    assert rows.place.tolist() == [[1, 0, 1], [0, 2, 0]]
    assert rows.leaves["weight"].tolist()[:3] == [[4, 5], [14, 15], [18, 19]]
    assert rows.leaves["bias"].tolist() == [-2, -7, -9, -2, -2, -2]
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in rows.leaves.values())


@pytest.mark.parametrize("ids", [[3], [3, 3, 3], [0, 1, 2, 3], [4, 0, 4, 1]])
def test_lookup_equals_an_embedding(ids):
    table, ids = numbered(5, 3), torch.tensor(ids)
    weight = table.weight.detach().clone().requires_grad_()
    factors = torch.randn(len(ids), 3)
    out, expected = table(ids), F.embedding(ids, weight)
    assert torch.equal(out, expected)
    (out * factors).sum().backward()
    (expected * factors).sum().backward()
    rows = table.gathered
    gradient = torch.zeros(5, 3).index_add_(0, rows.ids, rows.leaves["weight"].grad)
    # Unused places have no gradient, so adding them changes nothing: bit-equal.
    assert torch.equal(gradient, weight.grad)
    assert table.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equal_ids_are_added_up_in_fp32(dtype):
    """8192 ones: 2048 (FP16) or 256 (BF16) if they were added up in 16 bits."""
    table = numbered(3, 1)
    table.row_dtype = dtype
    with HalfEmulation(dtype):
        table(torch.ones(8192, dtype=torch.int64)).sum().backward()
    gradient = table.gathered.leaves["weight"].grad
    assert gradient.dtype == dtype and gradient[0].item() == 8192


def test_rows_are_rounded_when_they_are_gathered():
    table = RowTable(4, 2)
    torch.nn.init.constant_(table.weight, 1 + 2.0**-12)
    table.row_dtype = torch.float16
    out = table(torch.tensor([1, 2]))
    assert out.dtype == torch.float16 and (out == 1).all()
    assert table.weight.dtype == torch.float32
    with torch.no_grad():
        assert table(torch.tensor([[1], [2]])).dtype == torch.float16
        blocks = list(table.blocks(3))
    assert [len(block["weight"]) for block in blocks] == [3, 1]
    assert all((block["weight"] == 1).all() for block in blocks)


def test_blocks_of_an_fp32_table_are_views():
    table = numbered(7, 2, bias=True)
    blocks = list(table.blocks(4))
    assert blocks[1]["weight"].data_ptr() == table.weight[4:].data_ptr()
    assert torch.equal(torch.cat([b["bias"] for b in blocks]), table.bias)


def test_a_lookup_without_gradients_is_not_remembered():
    table = numbered(5, 3)
    with torch.no_grad():
        assert table(torch.tensor([[1, 1], [4, 0]])).shape == (2, 2, 3)
    assert table.gathered is None
    table(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="gathered before"):
        table(torch.tensor([1]))


def test_a_hook_sees_the_gradient_of_the_rows():
    table, seen = numbered(5, 3), []
    handle = table.register_gradient_hook(seen.append)
    table(torch.tensor([1, 1])).sum().backward()
    assert torch.equal(seen[0], torch.tensor([[2.0] * 3, [0.0] * 3]))
    handle.remove()
    table.gathered = None
    table(torch.tensor([1, 1])).sum().backward()
    assert len(seen) == 1


def test_an_id_outside_the_table_is_an_error():
    with pytest.raises(IndexError):
        numbered(5, 3)(torch.tensor([5]))


def test_shapes_depend_on_the_number_of_ids_alone():
    """Fake tensors have no values: whatever read one, as a wait for the device, would fail."""
    with FakeTensorMode():
        table, softmax = RowTable(793_472, 1024, bias=True), SampledSoftmax(793_472, 8192)
        hidden = torch.randn(2560, 1024, requires_grad=True)
        targets = torch.zeros(2560, dtype=torch.int64)
        losses = softmax(hidden, targets, table)
        losses.mean().backward()
        assert table.gathered.leaves["weight"].grad.shape == (2560 + 8192, 1024)
        assert hidden.grad.shape == hidden.shape
        with pytest.raises(DataDependentOutputException):
            losses.mean().item()

"""FLOPs and bytes of single operations against counts by hand, and against torch's formulas."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from mprun.extensions.bench.roofline.operations import bytes_of

from .roofline_rows import rows_of

PHASES = ("forward", "backward")


def costs(rows):
    return [(row.kind, row.flops, row.bytes) for row in rows]


def test_linear_by_hand():
    def step():
        layer, x = nn.Linear(8, 4, dtype=torch.float16), torch.empty(3, 8, dtype=torch.float16)
        return lambda: layer(x).backward(torch.empty(3, 4, dtype=torch.float16))

    rows = rows_of(step)
    # Forward: 3*8*4 multiply-adds; bias 4, x 24, weight 32 read, result 12 written; 2 bytes each.
    assert costs(rows)[0] == ("matrix product", 2 * 3 * 8 * 4, 2 * (4 + 24 + 32 + 12))
    # Backward: the weight's gradient reads 12 and 24, writes 32; x needs none.
    weight, bias = costs(rows)[1:3]
    assert weight == ("matrix product", 2 * 3 * 8 * 4, 2 * (12 + 24 + 32))
    assert bias == ("sum", 0, 2 * (12 + 4))
    assert [(row.phase, row.form) for row in rows[:2]] == [(p, "fp16") for p in PHASES]


def test_convolution_by_hand():
    def step():
        layer = nn.Conv2d(2, 6, 3)
        x = torch.empty(5, 2, 10, 10, requires_grad=True)
        return lambda: layer(x).backward(torch.empty(5, 6, 8, 8))

    x, weight, y = 5 * 2 * 100, 6 * 2 * 9, 5 * 6 * 64
    flops = 2 * y * 2 * 9
    assert costs(rows_of(step)) == [
        ("convolution", flops, 4 * (x + weight + y)),
        ("convolution bias", 0, 4 * (2 * y + 6)),
        ("convolution backward", flops, 4 * (y + weight + x)),
        ("convolution weight gradient", flops, 4 * (y + x + weight)),
        ("convolution bias gradient", 0, 4 * (y + 6)),
    ]


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_convolution_flops_are_torchs_without_groups(kind):
    def step():
        layer = kind(6, 4, 4, stride=2, padding=1)
        x = torch.ones(3, 6, 12, 12, requires_grad=True)
        return lambda: layer(x).sum().backward()

    work = step()
    with FlopCounterMode(display=False) as torchs:
        work()
    assert sum(row.flops for row in rows_of(step)) == torchs.get_total_flops()


def test_groups_divide_the_flops_of_all_three_passes():
    def step():
        layer = nn.Conv2d(8, 8, 3, groups=4, bias=False)
        x = torch.empty(2, 8, 6, 6, requires_grad=True)
        return lambda: layer(x).sum().backward()

    # 4x4 places, 8 filters, 2 channels of 3x3 each.
    assert [row.flops for row in rows_of(step) if row.flops] == 3 * [2 * 2 * 16 * 8 * 2 * 9]


def test_batch_norm_reads_twice():
    def step():
        norm, x = nn.BatchNorm2d(3), torch.empty(4, 3, 5, 5, requires_grad=True)
        return lambda: norm(x).backward(torch.empty(4, 3, 5, 5))

    big, channels = 4 * 4 * 3 * 25, 4 * 3
    forward, backward = [row for row in rows_of(step) if row.kind.startswith("batch norm")]
    # Weight and bias read, both statistics read and written, both saved ones written.
    assert forward.bytes == 3 * big + channels * (2 + 4 + 2)
    # x and the gradient twice, the result; weight, statistics, saved ones, two gradients.
    assert backward.bytes == 5 * big + channels * (1 + 2 + 2 + 2)


def test_in_place_copies_fills_and_lists():
    def step():
        a, b, half = torch.empty(100), torch.empty(100), torch.empty(100, dtype=torch.float16)

        def work():
            a.add_(b)  # two read, one written
            a.zero_()  # one written
            half.copy_(a)  # 4 bytes read, 2 written
            torch._foreach_copy_([half, half], [a, b])
            torch._foreach_mul_([a, b], 2.0)
            a.view(10, 10).t().unsqueeze(0)  # views
            torch.zeros_like(a)

        return work

    assert [size for _, _, size in costs(rows_of(step))] == [1200, 400, 600, 1200, 1600, 400]


def test_tensors_count_with_the_memory_they_cover():
    assert bytes_of(torch.empty(3, 1).expand(3, 1000)) == 12
    assert bytes_of(torch.empty(20).unfold(0, 5, 1)) == 80  # 16 windows of 5 over 20 numbers
    assert bytes_of(torch.empty(4, 6, dtype=torch.float16)[:, ::2]) == 2 * 12
    assert bytes_of(torch.empty(0, 7)) == 0


def test_embedding_by_rows_touched_and_a_dense_gradient():
    def step():
        table, ids = nn.Embedding(1000, 16), torch.zeros(7, dtype=torch.int64)
        return lambda: table(ids).backward(torch.empty(7, 16))

    ids, rows, table = 8 * 7, 4 * 7 * 16, 4 * 1000 * 16
    moved = [size for _, _, size in costs(rows_of(step))]
    assert moved[:3] == [ids + 2 * rows, table, 2 * rows + ids]


def test_fused_sgd_with_momentum_moves_20_bytes_a_parameter():
    def step():
        weight = nn.Parameter(torch.empty(1000))
        weight.grad = torch.empty(1000)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
        optimizer.state[weight]["momentum_buffer"] = torch.empty(1000)
        return optimizer.step

    assert costs(rows_of(step)) == [("update", 0, 20 * 1000)]


def test_dropout_is_one_kernel_with_a_byte_mask():
    def step():
        x = torch.empty(1000, requires_grad=True)
        return lambda: F.dropout(x, 0.5).backward(torch.empty(1000))

    assert costs(rows_of(step))[:2] == [
        ("dropout", 0, 1000 * (4 + 4 + 1)),
        ("dropout backward", 0, 1000 * (4 + 1 + 4)),
    ]


def test_relu_and_residual_fold_into_batch_norm():
    def step():
        norm = nn.BatchNorm2d(3)
        x = torch.empty(4, 3, 5, 5, requires_grad=True)

        def work():
            y = F.relu(norm(x) + x)
            F.relu(y * 2).sum().backward()

        return work

    rows = {(row.kind, row.phase): row for row in rows_of(step)}
    big = 4 * 4 * 3 * 25
    assert rows["residual add", "forward"].folded_bytes == big  # the residual is still read
    assert rows["gradient add", "backward"].folded_bytes == big
    relus = [row.folded_bytes for row in rows_of(step) if row.kind.startswith("relu")]
    assert relus == [0, None, None, 0]  # only the one behind BatchNorm, and its gradient


def test_tf32_is_a_format_of_fp32_products():
    def step():
        a = torch.empty(4, 4)
        return lambda: (a @ a, a.half() @ a.half())

    assert [row.form for row in rows_of(step, "tf32") if row.flops] == ["tf32", "fp16"]

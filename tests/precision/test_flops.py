"""Counts of products against torch's own counter, and against masks written out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mprun.numerics.trace import Operation, name_of
from mprun.precision.flops import attention_flops, recurrent_flops

SIZES = st.integers(1, 5)


class Counted(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.total += Operation(func, name_of(func), args, kwargs or {}, result).flops
        return result


@settings(max_examples=20, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.booleans())
def test_products_are_counted_as_torch_counts_them(n, rows, inner, columns, learned):
    def work():
        left = torch.ones(n, rows, inner, requires_grad=True)
        right = torch.ones(n, inner, columns, requires_grad=learned)
        bias = torch.zeros(n, rows, columns)
        products = torch.bmm(left, right) + torch.baddbmm(bias, left, right)
        weight = torch.ones(2, columns, requires_grad=learned)
        images = left[:, None].expand(-1, 2, -1, -1)
        kernel = torch.ones(3, 2, 1, 2, requires_grad=learned)
        maps = F.conv_transpose2d(F.conv2d(images, kernel, padding=1), kernel)
        (F.linear(products, weight, weight[:, 0]).sum() + maps.sum()).backward()

    with FlopCounterMode(display=False) as theirs:
        work()
    with Counted() as own:
        work()
    assert own.total == theirs.get_total_flops() > 0
    with Counted() as grouped:
        F.conv1d(torch.ones(n, 3, 4), torch.ones(3, 1, 2), groups=3)
    assert grouped.total == 2 * n * 3 * 3 * 2


@settings(max_examples=40, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.booleans(), st.integers(1, 3), st.integers(1, 3))
def test_attention_counts_the_pairs_of_its_mask(heads, queries, keys, size, causal, k, v):
    pairs = torch.ones(queries, keys)
    pairs = int((pairs.tril() if causal else pairs).sum())
    given = [torch.empty(2, heads, n, s) for n, s in ((queries, size), (keys, size), (keys, 7))]
    expected = 2 * 2 * heads * pairs * (k * size + v * 7)
    assert attention_flops(given, k, v, causal=causal) == expected


def test_each_weight_of_a_recurrent_layer_meets_each_time_step_once():
    lstm, x = nn.LSTM(3, 4), torch.ones(5, 2, 3)  # four gates, of 4 x 3 and 4 x 4 weights
    for inputs, positions in ((x, 10), (nn.utils.rnn.pack_padded_sequence(x, [5, 3]), 8)):
        assert recurrent_flops(lstm, inputs) == 2 * positions * 4 * (4 * 3 + 4 * 4)

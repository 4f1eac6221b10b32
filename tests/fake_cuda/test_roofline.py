"""The roofline's 8-bit products are those that the CUDA path hands to cuBLAS."""

import pytest

from ..extensions.bench.test_roofline_gpt import K, M, N, by_kind, rows_of_linear

PRODUCTS = """
from unittest import mock

import torch
from torch import nn

from mprun.extensions.bench.roofline.count import Counter
from mprun.precision import get_policy, scaled_operators
from mprun.precision.scaled_linear import install


def answer():
    products, held = [], {}

    def recorded(multiply):
        def call(left, right, *rest, **named):
            found = multiply(left, right, *rest, **named)
            products.append([left.nbytes, right.nbytes, found.nbytes])
            # Held, so that no later one has its address.
            held.update({own.untyped_storage().data_ptr(): own for own in (left, right)})
            return found
        return call

    network = nn.Sequential(nn.Linear(KK, MM, bias=False), nn.ReLU()).bfloat16().cuda()
    install(network, get_policy("MODE").matmul, {})
    x = torch.ones(NN, KK, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    counter = Counter("ieee")
    with (
        mock.patch.object(scaled_operators, "scaled_mm", recorded(scaled_operators.scaled_mm)),
        mock.patch.object(torch, "mm", recorded(torch.mm)),
    ):
        network(x).backward(torch.ones(NN, MM, dtype=torch.bfloat16, device="cuda"))
    with counter:
        network(x).backward(torch.ones(NN, MM, dtype=torch.bfloat16, device="cuda"))
    rows = [[row.kind, row.flops, row.bytes] for row in counter.rows]
    held_bytes = sum(own.nbytes for own in held.values())
    return {"products": products, "operands": held_bytes, "rows": rows}
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp8_tensorwise", "fp8_rowwise", "mxfp8"])
def test_operands_of_a_linear_layer(script, mode):
    text = PRODUCTS.replace("MODE", mode)
    for name, size in (("KK", K), ("MM", M), ("NN", N)):
        text = text.replace(name, str(size))
    found = script(text)
    rows = rows_of_linear(mode)
    kind = "matrix product" if mode == "mxfp8" else "fp8 product"
    by_rows = N + M + N + K + M + K
    scales = {"mxfp8": 0, "fp8_tensorwise": 3 * 8, "fp8_rowwise": 4 * by_rows}[mode]
    assert sum(by_kind(rows, kind)) == sum(map(sum, found["products"])) + scales
    # Each layout is written by a cast, which reads BF16 and writes its factors besides.
    sizes = (N * K, M * K, N * M)
    casts = sum(by_kind(rows, "scaled cast"))
    factors = {"fp8_tensorwise": 3, "fp8_rowwise": by_rows}.get(mode)
    if factors is None:  # a factor for 32 numbers along the sum; of N = 48 there are two blocks
        factors = N * K // 32 + 2 * (M * K // 32) + N * M // 32 + 2 * K + 2 * M
    read = sum(2 * size for size in sizes) * (1 if mode == "fp8_tensorwise" else 2)
    assert casts == read + found["operands"] + 4 * factors
    # What the device dispatches is what is counted without it.
    kinds = (kind, "scaled cast", "amax", "cast")
    assert sorted(row for row in found["rows"] if row[0] in kinds) == sorted(
        [row.kind, row.flops, row.bytes] for row in rows if row.kind in kinds
    )

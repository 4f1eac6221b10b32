"""A transformer in FP8 and in BF16 without masters: FLOPs, bytes and memory by hand."""

from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun.errors import BadInput
from mprun.extensions.bench.measure import _product_of
from mprun.extensions.bench.roofline.count import count
from mprun.extensions.bench.roofline.limits import GPUS, Ceilings, limit, why_not
from mprun.precision import get_policy
from mprun.precision.scaled_linear import install

from ...helpers import skipping_what_onednn_lacks
from .roofline_rows import rows_of

WIDTH, LAYERS, TIME, BATCH, WORDS = 128, 1, 64, 4, 1024
SMALL = (
    "model=gpt",
    f"model.num_layers={LAYERS}",
    "data=synthetic_tokens",
    f"data.vocab_size={WORDS}",
    f"data.sequence_length={TIME}",
    f"data.batch_size={BATCH}",
)
BLOCKS, TABLE = LAYERS * 12 * WIDTH**2, WORDS * WIDTH
NORMS = (2 * LAYERS + 1) * WIDTH
POSITIONS = TIME * WIDTH
NARROW = BLOCKS + TABLE + POSITIONS  # BF16 in the modes that keep norms in FP32


@cache
def counted(mode, *more):
    return count((*SMALL, *more), mode)


def flops_by_form(found):
    sums = Counter()
    for row in found.rows:
        sums[row.form] += row.flops
    return +sums  # without those that are 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "tf32", "amp_bf16", "bf16_stochastic", "fp8_tensorwise"])
def test_products_by_format(mode):
    tokens = BATCH * TIME
    linear, output = (3 * 2 * tokens * weights for weights in (BLOCKS, TABLE))
    # Scores and what is attended to; backward the scores again and four gradients. Query i sees i
    # keys, in all heads together WIDTH numbers each.
    attention = 7 * 2 * LAYERS * BATCH * WIDTH * TIME * (TIME + 1) // 2
    found = flops_by_form(counted(mode))
    if mode == "fp8_tensorwise":
        assert found == {"fp8": linear, "bf16": output + attention}
    else:
        form = mode if mode in ("fp32", "tf32") else "bf16"
        assert found == {form: linear + output + attention}


@pytest.mark.slow
def test_gpt2_by_hand():
    data = ("data=synthetic_tokens", "data.vocab_size=50304", "data.sequence_length=1024")
    found = count(("model=gpt2", *data, "data.batch_size=1"), "bf16_master")
    weights = 12 * 12 * 768**2 + 50_304 * 768
    attention = 3.5 * 4 * 12 * 768 * 1025 / 2
    assert found.flops / 1024 == 6 * weights + attention
    assert 6 * weights == pytest.approx(0.741e9, rel=1e-3)
    # Without the scores that are made again: 0.057.
    assert attention * 12 / 14 == pytest.approx(0.0567e9, rel=2e-3)
    rate = limit(found, GPUS["H200"])["flop_only"]
    assert rate == pytest.approx(790e12 / (6 * weights + attention))


N, K, M = 48, 32, 64  # rows, inputs and outputs of a linear layer
X, WEIGHT, Y = N * K, M * K, N * M


def rows_of_linear(mode):
    """The rows of one linear layer in a mode, both passes; its input needs a gradient."""

    def step():
        network = nn.Sequential(nn.Linear(K, M, bias=False), nn.ReLU()).bfloat16()
        install(network, get_policy(mode).matmul, {})
        x = torch.empty(N, K, dtype=torch.bfloat16, requires_grad=True)
        return lambda: network(x).backward(torch.empty(N, M, dtype=torch.bfloat16))

    # Autograd copies a gradient that somebody else holds, too.
    rows = [row for row in rows_of(step) if row.kind not in ("relu", "relu backward", "copy")]
    assert [row.flops for row in rows if row.flops] == 3 * [2 * N * K * M]
    return rows


def by_kind(rows, kind):
    return [row.bytes for row in rows if row.kind == kind]


def test_an_fp8_linear_by_hand():
    rows = rows_of_linear("fp8_tensorwise")
    # Operands of one byte, two scales of 4; results in BF16.
    assert by_kind(rows, "fp8 product") == [
        X + WEIGHT + 8 + 2 * Y,
        Y + WEIGHT + 8 + 2 * X,
        Y + X + 8 + 2 * WEIGHT,
    ]
    # Each operand is read for its largest number, in BF16, and once more to be cast: one scale is
    # written, and its codes by rows and by columns, since each operand is in two products.
    assert by_kind(rows, "amax") == [2 * X + 4, 2 * WEIGHT + 4, 2 * Y + 4]
    assert by_kind(rows, "scaled cast") == [size * (2 + 1 + 1) + 4 for size in (X, WEIGHT, Y)]
    assert {row.form for row in rows if row.flops} == {"fp8"}
    assert len(rows) == 3 + 3 + 3
    # Whatever is fused: codes are read, results written.
    assert sum(row.least_bytes for row in rows) == sum(by_kind(rows, "fp8 product"))


def test_an_fp8_linear_with_scales_by_row_by_hand():
    rows = rows_of_linear("fp8_rowwise")
    # A factor for each row of the left operand, and for each column of the right one.
    assert by_kind(rows, "fp8 product") == [
        X + WEIGHT + 4 * (N + M) + 2 * Y,
        Y + WEIGHT + 4 * (N + K) + 2 * X,
        Y + X + 4 * (M + K) + 2 * WEIGHT,
    ]
    # Two casts of each operand, one for each of its products: read in BF16, written once.
    forward = [(X, N), (WEIGHT, M)]
    backward = [(WEIGHT, K), (Y, N), (X, K), (Y, M)]
    expected = [3 * size + 4 * factors for size, factors in forward + backward]
    assert sorted(by_kind(rows, "scaled cast")) == sorted(expected)
    assert len(rows) == 3 + 6


def test_an_mxfp8_linear_by_hand():
    rows = rows_of_linear("mxfp8")
    # No GPU with a ceiling here multiplies these blocks: decoded to BF16, added up in FP32.
    assert by_kind(rows, "matrix product") == [
        2 * (X + WEIGHT) + 4 * Y,
        2 * (Y + WEIGHT) + 4 * X,
        2 * (Y + X) + 4 * WEIGHT,
    ]
    assert by_kind(rows, "cast") == [6 * Y, 6 * X, 6 * WEIGHT]  # to BF16
    # Read and written in BF16, with a factor for each 32 numbers along the sum of the product:
    # of 48 numbers there are two blocks.
    casts = [(X, N * K / 32), (WEIGHT, M * K / 32)]
    casts += [(WEIGHT, K * M / 32), (Y, N * M / 32), (X, K * 2), (Y, M * 2)]
    expected = [4 * size + 4 * factors for size, factors in casts]
    assert sorted(by_kind(rows, "scaled cast")) == sorted(expected)
    assert {row.form for row in rows if row.flops} == {"bf16"}
    assert len(rows) == 3 + 3 + 6


@pytest.mark.parametrize("causal", [False, True])
def test_attention_multiplies_what_the_mask_leaves(causal):
    def step():
        q, k, v = (torch.empty(2, 3, 16, 8, requires_grad=True) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()

    pairs = 16 * 17 // 2 if causal else 16 * 16
    # As torch's formulas of both passes have it, which take every pair.
    found = [row.flops for row in rows_of(step) if row.flops]
    assert found == [2 * 2 * 2 * 3 * pairs * 8, 5 * 2 * 2 * 3 * pairs * 8]


# Bytes of a weight in FP32: gradient, weight and two states read, all but the first written.
FUSED = 4 + 3 * 8


def moved(found, kind, phase):
    """Bytes of the rows that are as large as the weights, not as the batch."""
    rows = (row for row in found.rows if (row.kind, row.phase) == (kind, phase))
    return sum(row.bytes for row in rows)


@pytest.mark.slow
def test_bytes_of_the_update_with_masters():
    found = counted("bf16_master")
    assert moved(found, "update", "update") == found.parameters * FUSED
    assert moved(found, "unscale and check", "update") == 0  # nothing is scaled
    scaled = counted("fp16_master_scaled")
    assert moved(scaled, "update", "update") == scaled.parameters * FUSED
    assert moved(scaled, "unscale and check", "update") < 100  # the norm, which clipping needs
    without = counted("fp16_master_scaled", "train.clip_norm=null")
    assert moved(without, "unscale and check", "update") >= scaled.parameters * 8


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16_stochastic", "bf16_kahan"])
def test_weights_without_masters_are_updated_by_torch_s_kernel(mode):
    found = counted(mode)
    assert found.update == "fused" and found.memory.copies == 0
    # FP32 gradients and states of both kinds of weights.
    assert moved(found, "update", "update") == found.parameters * FUSED
    narrow_state = counted(mode, "precision.update.state_dtype=bf16")
    assert narrow_state.update == "fused"  # widened, updated and rounded by torch's operations
    rows = [row for row in narrow_state.rows if row.phase == "update"]
    assert sum(row.bytes for row in rows if row.kind == "copy") >= 6 * NARROW


# Bytes of a parameter: weight, copy for a step, states, and the gradient, in FP32.
IN_BLOCKS = 1 + 4 / 256  # a code, and a scale for each block
HELD = [
    ("fp32", (), 4 + 8 + 4),
    ("amp_bf16", (), 4 + 8 + 4),
    ("bf16_master", (), 4 + 2 + 8 + 4),
    ("fp8_tensorwise", (), 4 + 2 + 8 + 4),
    ("bf16_stochastic", (), 2 + 8 + 4),
    ("bf16_kahan", (), 2 + 2 + 8 + 4),
    ("bf16_stochastic", ("precision.update.state_dtype=bf16",), 2 + 4 + 4),
    ("bf16_kahan", ("precision.update.state_dtype=bf16",), 2 + 2 + 4 + 4),
    ("bf16_stochastic", ("precision.update.state_dtype=dynamic8",), 2 + 2 * IN_BLOCKS + 4),
    ("bf16_kahan", ("precision.update.state_dtype=fp8",), 2 + 2 + 2 * IN_BLOCKS + 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "more", "size"), HELD)
def test_bytes_of_a_parameter(mode, more, size):
    found = counted(mode, *more)
    norms = NORMS * 16
    if found.policy.state_dtype == "bf16":
        norms = NORMS * (4 + 4 + 4)
    counters = 4 * (4 * LAYERS + 2 + 2 * LAYERS + 1)  # of each matrix and norm
    wide = found.parameters * 16 if mode in ("fp32", "amp_bf16") else NARROW * size + norms
    assert found.memory.of_weights == pytest.approx(wide, abs=counters)


def test_what_has_fp8_products():
    for mode in ("fp8_tensorwise", "fp8_rowwise", "fp8_unscaled"):
        for gpu, has in (("H200", True), ("H100", True), ("A100", False), ("V100", False)):
            reason = why_not(get_policy(mode), [], GPUS[gpu])
            assert (reason is None) if has else ("FP8" in reason or "BF16" in reason)
    assert GPUS["H200"].flops["fp8"] == 2 * GPUS["H200"].flops["bf16"]


@pytest.mark.slow
def test_measured_ceilings_without_fp8_are_no_error_of_the_program():
    known = {"bf16": 1e12, "fp32": 1e11}
    with pytest.raises(BadInput, match="the step has FP8 products"):
        limit(counted("fp8_tensorwise"), Ceilings("toy", "", known, 1e11, 0.0))
    more = Ceilings("toy", "", {**known, "fp8": 2e12}, 1e11, 1e9)
    assert limit(counted("fp8_tensorwise"), more)["eager"] > 0


def test_the_product_of_which_fp8_is_timed():
    a, b = (torch.randn(32, 32).clamp(-2, 2).to(torch.float8_e4m3fn) for _ in range(2))
    expected = a.float() @ b.float().T
    with skipping_what_onednn_lacks():
        found = _product_of(a, b)().float()
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=2**-8)

"""Formats in blocks: casts against exact fractions and torchao; products against float64.

Counts, of numbers that differ: grids 0, scales at their limits 0, elements 0.
"""

import dataclasses
import math
from fractions import Fraction as Q

import pytest
import torch
from torch import nn

from mprun.precision import get_policy
from mprun.precision.block_formats import (
    ELEMENTS,
    SCALE_ROUNDINGS,
    SCALES,
    cast_blocks,
    decoded,
    encoded,
    in_blocks,
    turn,
    turning,
)
from mprun.precision.philox import bits_of, micro_batches
from mprun.precision.scaled_linear import install
from mprun.precision.scaled_products import ScaledProducts, cast, product
from mprun.torch_private import schema_of

from ..shipped import IN_BLOCKS
from . import exact_formats as exact
from .operations import Operations

E4M3, E5M2, E2M1, _ = ELEMENTS.values()
ONE = torch.ones(())
MX = ScaledProducts(E4M3, E4M3, E4M3, "1x32", scale="e8m0")
NV = ScaledProducts(E2M1, E2M1, E2M1, "1x16", scale="e4m3")
PAIRS = [(element, how) for element in (E4M3, E5M2, E2M1) for how in SCALE_ROUNDINGS]


def of(products, element=None, **changes):
    """The operand of the input, in another format."""
    changes |= {} if element is None else {"input": element}
    return dataclasses.replace(products, **changes).operand("input", "output")


def exactly(operand, matrix):
    """The decoded numbers by exact arithmetic, in FP32 as every one of them is: summed along k."""
    if operand.turned:
        matrix = turn(matrix, -1).float()
    form = (operand.block, operand.element.name, operand.scale, operand.scale_rounding)
    rows = exact.in_blocks(matrix.tolist(), *form)
    return torch.tensor([[float(exact.f32(value)) for value in row] for row in rows])


def numbers(made):
    return decoded(made.values, made.spread)


# Elements.


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=lambda own: own.name)
def test_every_number_is_cast_to_itself_and_every_midpoint_to_even(element):
    grid = [float(value) for value in exact.GRIDS[element.name]]
    middles = [(a + b) / 2 for a, b in zip(grid, grid[1:], strict=False)]
    even = [pair[place % 2] for place, pair in enumerate(zip(grid, grid[1:], strict=False))]
    middle = torch.tensor(middles)
    above, below = (torch.nextafter(middle, torch.tensor(end)) for end in (math.inf, 0.0))
    beyond = torch.tensor([element.top * 1.01, 1e30, math.inf])
    given = torch.cat([torch.tensor(grid), middle, above, below, beyond])
    expected = torch.tensor([*grid, *even, *grid[1:], *grid[:-1], *[element.top] * 3])
    for sign in (1.0, -1.0):
        found = decoded(encoded(given * sign, element), ONE)
        assert torch.equal(found, expected * sign)
        assert torch.equal(found.signbit(), (expected * sign).signbit())  # -0 stays
    assert len(grid) == {"e4m3": 127, "e5m2": 124, "e2m1": 8}[element.name]


# Scales.


def limits(powers):
    """Amax at each mantissa where a rounding turns, and by one unit on either side."""
    mantissas = torch.tensor([1, 1.125, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875, 2 - 2.0**-23])
    at = (mantissas[:, None] * torch.tensor([2.0**power for power in powers])).flatten()
    return torch.cat([at, *(torch.nextafter(at, torch.tensor(end)) for end in (math.inf, 0.0))])


def wrong_scales(element, how, amax):
    """How many scales are not the exact ones; each is a power of two, and so is its inverse."""
    encode, decode, _ = SCALES["e8m0"].of(amax, element, how)
    expected = [exact.e8m0(Q(value), element.name, how) for value in amax.tolist()]
    powers = torch.tensor([2.0**power for power in expected], dtype=torch.float64)
    assert torch.equal(encode.double() * decode.double(), torch.ones(len(amax)).double())
    return int((decode.double() != powers).sum())


@pytest.mark.parametrize(("element", "how"), PAIRS, ids=lambda own: getattr(own, "name", own))
def test_scales_at_their_limits(element, how):
    amax = limits([-126, -118, -20, -1, 0, 9, 60, 126])
    assert wrong_scales(element, how, torch.cat([amax, torch.zeros(1)])) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("element", "how"), PAIRS, ids=lambda own: getattr(own, "name", own))
def test_all_scales(element, how):
    """65,000 for each of the twelve pairs, subnormal numbers too."""
    amax = limits(range(-126, 127))
    amax = amax.clamp(max=torch.finfo(torch.float32).max)
    any_bits = torch.randint(0, 0x7F800000, (58_000,), dtype=torch.int32)
    assert wrong_scales(element, how, torch.cat([amax, any_bits.view(torch.float32)])) == 0


def test_a_scale_of_rows_is_the_power_of_two_below():
    """A logarithm in FP32 takes the power above for quotients a unit below it."""
    amax = torch.nextafter(torch.tensor([448.0 * 2**8, 448.0, 7.0]), torch.tensor(math.inf))
    encode, _, _ = SCALES["pow2"].of(amax, E4M3, "")
    assert encode.tolist() == [2.0**-9, 0.5, 32.0]
    exact_ones = [exact.factors(Q(a), Q(a), "e4m3", "pow2", "")[0] for a in amax.tolist()]
    assert [Q(value) for value in encode.tolist()] == exact_ones


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda own: own.name)
@pytest.mark.parametrize("scale", ["fp32", "pow2"])
def test_scales_of_numbers_are_exact_down_to_zero(scale, element):
    """Subnormal numbers too; the largest scale is the largest FP32 number, or power of two."""
    amax = limits([-126, -118, -111, -60, -40, -20, -1, 0, 9, 60, 126])
    tiny = torch.tensor([0.0, 2.0**-149, 2.0**-130, 1e-12, 9.9e-13])
    bits = torch.randint(0, 0x7F800000, (300,), dtype=torch.int32)
    amax = torch.cat([amax, tiny, bits.view(torch.float32)])
    encode, decode, _ = SCALES[scale].of(amax, element, "")
    expected = [exact.factors(Q(a), Q(a), element.name, scale, "") for a in amax.tolist()]
    own = zip(encode.tolist(), decode.tolist(), strict=True)
    assert [(Q(a), Q(b)) for a, b in own] == expected
    assert encode.isfinite().all() and (decode > 0).all()
    bad = SCALES[scale].of(torch.tensor([math.nan, math.inf]), element, "")[1]
    assert bad[0].isnan() and bad[1].isinf()


def test_scales_of_two_levels_are_rounded_step_by_step():
    """torch's number / tensor, a reciprocal and a product, would round one step more."""
    for amax in (torch.randn(8, 64).abs() * 1e-3).unbind():
        whole = Q(amax.max().item())
        expected = [exact.factors(Q(a), whole, "e2m1", "e4m3", "") for a in amax.tolist()]
        encode, stored, found = SCALES["e4m3"].of(amax, E2M1, "")
        own = zip(encode.tolist(), stored.tolist(), strict=True)
        assert [(Q(a), Q(b)) for a, b in own] == expected and Q(found.item()) == whole


# Casts of matrices.


def sets(rows, columns):
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(rows, columns, generator=draw)
    spread = torch.randn(rows, columns, generator=draw)
    yield "normal", base
    yield "heavy tails", base * torch.exp(3 * spread)
    yield "of BF16", (base * torch.exp(2 * spread[:, :1])).bfloat16().float()
    yield "rows of zeros", base * (torch.arange(rows) % 2)[:, None]
    yield "a row of 1e6", torch.cat([base[:-1], base[-1:] * 1e6])
    yield "subnormal", base * 1e-40
    yield "near the largest", base.clamp(-3, 3) * 1e38


CASTS = {
    **{f"mx {e.name} {how}": (dataclasses.replace(MX, scale_rounding=how), e) for e, how in PAIRS},
    "nv 1x16": (NV, E2M1),
    "nv 16x16": (dataclasses.replace(NV, granularity="16x16"), E2M1),
    "4/6 1x16": (dataclasses.replace(NV, scale="four_over_six"), E2M1),
    "4/6 16x16": (dataclasses.replace(NV, granularity="16x16", scale="four_over_six"), E2M1),
    "fp8 1x128": (dataclasses.replace(MX, granularity="1x128", scale="pow2"), E4M3),
    "fp8 16x128, fp32": (dataclasses.replace(MX, granularity="16x128", scale="fp32"), E4M3),
    "e2m1 of rows": (dataclasses.replace(NV, granularity="row", scale="fp32"), E2M1),
}


def different(products, element, matrix):
    """How many decoded numbers are not those of exact arithmetic."""
    operand = of(products, element)
    return int((numbers(cast(matrix, operand)) != exactly(operand, matrix)).sum())


@pytest.mark.parametrize(
    "name", ["mx e4m3 rceil", "mx e2m1 even", "nv 16x16", "4/6 1x16", "fp8 1x128"]
)
def test_a_ragged_matrix_is_cast_exactly(name):
    """19 x 40 fills no block: its end counts as zeros."""
    products, element = CASTS[name]
    assert different(products, element, dict(sets(19, 40))["heavy tails"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASTS)
def test_every_cast_is_exact(name):
    products, element = CASTS[name]
    wrong = {key: different(products, element, own) for key, own in sets(48, 136)}
    assert wrong == dict.fromkeys(wrong, 0)


def test_along_the_other_dimension_it_is_the_cast_of_the_transposed():
    matrix = torch.randn(50, 70)
    for products in (MX, NV, *(get_policy(mode).matmul for mode in IN_BLOCKS)):
        for which in ("input", "weight", "grad_output"):
            operand = products.operand(which, "output")._replace(stream=0)
            one, other = cast(matrix, operand, 0).T, cast(matrix.t(), operand)
            assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
            assert torch.equal(one.factor, other.factor)
            if operand.block[0] == operand.block[1]:  # one cast serves both directions
                assert torch.equal(numbers(cast(matrix, operand)).t(), numbers(other))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("products", [MX, dataclasses.replace(MX, scale="pow2")])
def test_a_block_that_is_not_finite_spoils_only_its_own_sums(products, bad):
    matrix = torch.randn(3, 96)
    matrix[1, 40] = bad
    found = product(cast(matrix, of(products)), cast(torch.eye(96), of(products)).T, torch.float32)
    assert not found[1, 32:64].isfinite().any()
    assert found[0].isfinite().all() and found[2].isfinite().all()


@pytest.mark.parametrize("products", [MX, NV, CASTS["fp8 1x128"][0]])
def test_zeros_stay_zeros(products):
    zeros = cast(torch.zeros(5, 40), of(products))
    ones = cast(torch.ones(3, 40), of(products))
    assert torch.equal(product(zeros, ones.T, torch.float32), torch.zeros(5, 3))


@pytest.mark.parametrize("size", [1e-15, 1e20, 4e22])
def test_amax_of_two_tensors_may_be_too_large_to_be_multiplied(size):
    """The largest of both lie in different rows of the sum, so the product is far smaller."""
    left, right = torch.zeros(1, 64), torch.zeros(64, 1)
    left[0, :16], left[0, 32:48] = size, size * 2.0**-15
    right[32:48, 0], right[16:32, 0] = 2.0**-15 * size, size
    found = product(cast(left, of(NV)), cast(right, of(NV), 0), torch.float32)
    assert torch.allclose(found, 16 * torch.tensor(2.0**-30 * size**2), rtol=2.0**-3, atol=0)


# The Hadamard transform.


def test_turning_changes_no_product():
    """Small whole numbers: BF16 has every turned number, and every sum is exact."""
    by = turning(torch.device("cpu"))
    assert torch.equal(by @ by.t(), torch.eye(16)) and set(by.abs().unique().tolist()) == {0.25}
    assert (by * 4)[:, 0].tolist() == [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    a, b = (torch.randint(-3, 4, (37, n)).float() for n in (5, 9))
    turned = [turn(own, 0) for own in (a, b)]
    assert [own.shape for own in turned] == [(48, 5), (48, 9)]
    assert torch.equal(turned[0].float().t() @ turned[1].float(), a.t() @ b)
    assert torch.equal(turn(a.t(), -1), turned[0].t())
    # A constant becomes one number a block: the columns' signs add up in the first alone.
    assert torch.equal(turn(torch.ones(1, 16), -1).float(), by.sum(0)[None])


# Stochastic rounding.

ROUNDED = dataclasses.replace(NV, grad_rounding="stochastic")


def rounded(matrix, number=0, seed=0, layer="a", product="grad_input", products=ROUNDED):
    micro_batches.begin_step(matrix.device, seed, number)
    return numbers(cast(matrix, products.operand("grad_output", product, layer)))


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=lambda own: own.name)
def test_stochastic_rounding_is_right_on_average(element):
    """Each number becomes one of its neighbours; a mean of 2,048 is within 4.5 of its errors."""
    grid = torch.tensor([float(value) for value in exact.GRIDS[element.name]])[-20:]
    low, high = grid[:-1], grid[1:]
    for part in (0.0, 0.03125, 0.5, 0.90625):
        given = (low + part * (high - low)).repeat(2048, 1)
        blocks = torch.arange(given.numel() // 8)
        bits = bits_of([blocks, *[torch.ones_like(blocks)] * 3], seed=5)
        for sign in (1.0, -1.0):
            found = decoded(encoded(given * sign, element, bits), ONE) * sign
            assert ((found == low) | (found == high)).all()
            share = ((found - low) / (high - low)).mean(0)
            assert ((share - part).abs() <= 4.5 * math.sqrt(part * (1 - part) / 2048)).all()


def test_random_bits_are_those_of_seed_micro_batch_layer_product_and_place():
    matrix = torch.randn(96, 64)
    found = rounded(matrix)
    assert torch.equal(rounded(matrix), found)
    # Again in the same micro-batch, as of a layer that is called twice: the next bits.
    operand = ROUNDED.operand("grad_output", "grad_input", "a")
    again = [numbers(cast(matrix, operand)) for _ in range(2)]
    for one, other in ((found, again[0]), (found, again[1]), again):
        assert 0.05 < (one != other).float().mean() < 0.6
    for other in ({"number": 1}, {"seed": 1}, {"layer": "b"}, {"product": "grad_weight"}):
        assert 0.05 < (rounded(matrix, **other) != found).float().mean() < 0.6
    # A part of the rows is rounded as in the whole, with a scale that does not see the others.
    of_rows = dataclasses.replace(ROUNDED, scale="e8m0")
    part = rounded(matrix[:33], products=of_rows)
    assert torch.equal(part, rounded(matrix, products=of_rows)[:33])
    micro_batches.begin_step(matrix.device, 0, 4)
    micro_batches.begin(matrix.device, 3)
    assert torch.equal(numbers(cast(matrix, operand)), rounded(matrix, number=7))
    with micro_batches.apart():
        assert [micro_batches.draw(stream, 3) for stream in (1, 1, 2)] == [0, 3, 0]
        assert micro_batches.number(torch.device("meta")).is_meta


# The three products of a layer.

TOKENS, INPUTS, OUTPUTS = 24, 40, 20


@pytest.mark.few(4)
@pytest.mark.parametrize("mode", IN_BLOCKS)
def test_products_of_a_layer_are_those_of_the_decoded_operands(mode):
    """FP32 sums of k terms are within k units of their largest intermediate value."""
    products = get_policy(mode).matmul
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    install(nn.Sequential(layer, nn.ReLU()), products, {})
    micro_batches.begin_step(torch.device("cpu"), 0, 0)
    x = torch.randn(TOKENS, INPUTS).requires_grad_()
    gradient = torch.randn(TOKENS, OUTPUTS) * 1e-3
    found = layer(x)
    found.backward(gradient)
    x, w, g = x.detach(), layer.weight.detach(), gradient
    for name, made, left, right in (
        ("output", found, ("input", x), ("weight", w)),
        ("grad_input", layer_input_gradient(layer, x, g), ("grad_output", g), ("weight", w.t())),
        ("grad_weight", layer.weight.grad, ("grad_output", g.t()), ("input", x.t())),
    ):
        if name in products.high_precision:
            continue
        if name in products.dequantized:  # of the output's cast, which is exact
            own = exactly(products.operand(right[0], "output"), right[1].t())
            right = right[0], own.t()
        a, b = (of_product(products.operand(own, name, "0"), of) for own, of in (left, right))
        bound = a.size(1) * 2.0**-23 * (a.abs() @ b.abs().t())
        assert ((made.detach().double() - a @ b.t()).abs() <= bound).all()


def of_product(operand, matrix):
    micro_batches.begin(matrix.device, 0)
    if operand.stream:  # its random bits are counted by the rows of the gradient, as it comes
        dim = -1 if matrix.size(0) == TOKENS else 0
        made = cast(matrix if dim == -1 else matrix.t(), operand, dim)
        found = numbers(made if dim == -1 else made.T).double()
    else:
        found = exactly(operand, matrix).double()
    if not (largest := {"e4m3": 448, "four_over_six": 256}.get(operand.scale)):
        return found
    amax = (turn(matrix, -1) if operand.turned else matrix).abs().max().double()
    return found * amax / (largest * operand.element.top)


def layer_input_gradient(layer, x, gradient):
    micro_batches.begin(x.device, 0)
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(layer(x), x, gradient)
    return found


@pytest.mark.parametrize("mode", IN_BLOCKS)
def test_decoded_numbers_are_those_of_bf16(mode):
    """So a product in BF16 is the product of these formats, up to the order of its sum."""
    products = get_policy(mode).matmul
    matrix = torch.randn(64, 128) * torch.randn(64, 1).exp()
    made = cast(matrix, products.operand("input", "output"))
    found = numbers(made)
    if products.scale == "fp32":
        assert products.multiplied == (torch.float32,)
        return
    assert torch.equal(found.bfloat16().float(), found) and products.multiplied == (torch.bfloat16,)
    own = made.operand
    form = own.element.name, *own.block, own.scale, own.scale_rounding, 0, torch.bfloat16
    written, factor, _ = torch.ops.mprun.cast_blocks(matrix, *form)  # as on CUDA
    assert written.dtype is torch.bfloat16 and torch.equal(factor, made.factor)
    assert torch.equal(numbers(made._replace(values=written)), found)


def test_what_a_layer_keeps_of_its_scales_is_one_number_a_block():
    """Whoever puts saved tensors elsewhere would move the factors as large as the numbers."""
    layer, sizes = nn.Linear(256, 128, bias=False), []
    install(nn.Sequential(layer, nn.ReLU()), get_policy("fp8_block").matmul, {})
    with torch.autograd.graph.saved_tensors_hooks(lambda own: sizes.append(own.shape), id):
        layer(torch.randn(4, 256).requires_grad_())
    assert sizes == [(4, 256), (128, 256), (1, 2)]  # the input, uncast; the weight, cast once


def test_a_product_is_one_operation():
    """More would be the network's own to whoever looks for its first infinity."""
    made = cast(torch.randn(32, 32), of(NV))
    with Operations() as seen:
        product(made, made.T, torch.float32)
    assert [schema_of(func).name for func in seen.ran if not func.is_view] == ["mprun::scaled_mm"]


# torchao, whose prototypes compute the same on a CPU.


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int16)


@pytest.mark.slow  # its import takes seconds
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("element", "how"), PAIRS, ids=lambda own: getattr(own, "name", own))
def test_torchao_s_mx_tensors(element, how):
    """131,000 blocks' scales and elements are the same, with two exceptions of torchao's.

    rceil: it takes a logarithm in FP32, which is a power of two too low just above one. Amax
    below 2^-118: its encode stops at 2^126, but its decode goes on to 2^-127.
    """
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    dtype = torch.float4_e2m1fn_x2 if element is E2M1 else element.dtype
    amax = limits(range(-100, 101))
    draw = torch.Generator().manual_seed(1)
    at_limits = (torch.rand(len(amax), 32, generator=draw) * 2 - 1) * amax[:, None]
    at_limits[:, 5] = amax
    operand = of(MX, element, scale_rounding=how)
    for name, matrix in (*sets(4096, 32), ("at limits", at_limits)):
        scale, codes = to_mx(matrix, dtype, 32, ScaleCalculationMode(how))
        codes = f4_unpacked_to_f32(unpack_uint4(codes)) if element is E2M1 else codes.float()
        made = cast(matrix, operand)
        ours = made.factor[:, 0].double().log2().int() + 127
        theirs = scale.view(torch.uint8).flatten().int()
        other = ours != theirs
        if name == "at limits" and how == "rceil":
            quotients = [Q(value) / Q(element.top) for value in amax[other].tolist()]
            above = [q / Q(2) ** exact.log2_floor(q) - 1 for q in quotients]
            assert other.any() and all(0 < part < Q(20, 2**23) for part in above)
            assert torch.equal(theirs[other] + 1, ours[other])
        else:
            assert not other.any()
        small = matrix.abs().amax(1) < 2.0**-118
        assert (decoded(made.values, ONE) == codes.view_as(matrix))[~small & ~other].all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", SCALE_ROUNDINGS)
@pytest.mark.parametrize("of_gradient", [E4M3, E5M2], ids=lambda e: e.name)
def test_torchao_s_mx_layer(how, of_gradient):
    """Output and both gradients, in FP32: every bit."""
    pytest.importorskip("torchao")
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    layer = nn.Linear(96, 160, bias=False)
    products = dataclasses.replace(MX, grad_output=of_gradient, scale_rounding=how)
    install(nn.Sequential(layer, nn.ReLU()), products, {})
    x = torch.randn(4, 64, 96) * torch.randn(96).exp()
    gradient = torch.randn(4, 64, 160) * 1e-4
    own, other = (x.clone().requires_grad_() for _ in range(2))
    weight = layer.weight.detach().clone().requires_grad_()
    found = layer(own)
    found.backward(gradient)
    chosen = (E4M3.dtype, E4M3.dtype, of_gradient.dtype, 32, KernelPreference.EMULATED)
    kernels = (config.MXFP8Dim0CastKernelChoice.TORCH, config.MXFP8Dim1CastKernelChoice.TORCH)
    how = config.ScaleCalculationMode(how)
    expected = mx_mm.apply(other, weight, *chosen, *kernels, how, False)
    expected.backward(gradient)
    pairs = (found, expected), (own.grad, other.grad), (layer.weight.grad, weight.grad)
    assert all(torch.equal(bits(one.detach()), bits(theirs.detach())) for one, theirs in pairs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchao_s_fp8_blocks(dtype):
    """Elements and scales; but of zero blocks its scale is that of amax 1e-12 in `dtype`."""
    pytest.importorskip("torchao")
    from torchao.prototype.blockwise_fp8_training import kernels

    x = torch.randn(512, 256) * (2 * torch.randn(512, 256)).exp()
    x[3] = 0
    x = x.to(dtype)
    for name, block in (
        ("torch_blockwise_scale_act_quant_lhs", "1x128"),
        ("torch_blockwise_scale_act_quant_rhs", "128x1"),
        ("torch_blockwise_scale_weight_quant", "128x128"),
    ):
        codes, factor = getattr(kernels, name)(x)
        made = cast(x, of(MX, granularity=block, scale="fp32"))
        assert torch.equal(made.values.float(), codes.float())
        own = made.factor
        zeros = own < 1e-14
        assert torch.equal(own[~zeros], factor[~zeros])
        assert zeros.sum() == (2 if block == "1x128" else 0)


def test_a_block_may_be_longer_than_the_matrix():
    matrix = torch.linspace(-3, 3, 40).sin().view(8, 5)
    expected = cast_blocks(matrix, "e4m3", 4, 5, "pow2", "", 0)
    found = cast_blocks(matrix, "e4m3", 4, 2**40, "pow2", "", 0)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    one, other = (in_blocks(found[1], (4, size), matrix.shape) for size in (2**40, 5))
    assert torch.equal(decoded(found[0], one), decoded(found[0], other))


@pytest.mark.parametrize("mode", ["nvfp4", "fp8_tensorwise"])
def test_autocast_does_not_reach_into_a_product(mode):
    """It would round operands and sums to BF16."""
    layer, x = nn.Linear(64, 48, bias=False).bfloat16(), torch.randn(32, 64).bfloat16()
    install(nn.Sequential(layer, nn.ReLU()), get_policy(mode).matmul, {})
    found = []
    for is_on in (False, True):
        micro_batches.begin_step(x.device, 0, 0)
        layer.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            y = layer(x)
            y.backward(torch.linspace(-1, 1, 32 * 48).view(32, 48).bfloat16())
        found.append((y, layer.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_int8_in_blocks_is_decoded_by_the_factor_of_each_block():
    matrix = torch.randn(33, 70, generator=torch.Generator().manual_seed(1))
    form = matrix, "int8", 4, 8, "fp32", "", 0
    codes, factor, _ = cast_blocks(*form)
    spread = factor.repeat_interleave(4, 0)[:33].repeat_interleave(8, 1)[:, :70]
    assert torch.equal(cast_blocks(*form, torch.float32)[0], codes.float() * spread)

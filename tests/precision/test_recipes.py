"""Recipes that others publish, each a mode: its casts by an independent reference, and it trains.

Counts, of numbers that differ, stand beside each comparison.
"""

import dataclasses
from fractions import Fraction as Q

import numpy as np
import pytest
import torch
from torch import nn

from mprun.precision import get_policy
from mprun.precision.block_formats import ELEMENTS, cast_blocks, decoded, encoded
from mprun.precision.philox import micro_batches
from mprun.precision.scaled_linear import install
from mprun.precision.scaled_products import cast

from . import exact_formats as exact

E2M1 = ELEMENTS["e2m1"]
ONE = torch.ones(())
RECIPES = ["nvfp4_4over6", "mxfp4_hadamard", "fp8_deepseek", "fp8_delayed_megatron"]
RECIPES += ["int8_rowwise", "qat_int8", "qat_nvfp4"]


def heavy(*shape, spread=1.5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    size = torch.randn(shape, generator=draw).mul(spread).exp2()
    return torch.randn(shape, generator=draw) * size


def layer_of(products, outputs, inputs):
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight.data = heavy(outputs, inputs, seed=3)
    install(nn.Sequential(layer, nn.ReLU()), products, {})
    return layer


def three_products(mode, x, gradient):
    """A weight; output, gradient of the input and of the weight of its layer in the mode."""
    layer = layer_of(get_policy(mode).matmul, gradient.size(1), x.size(1))
    own = x.clone().requires_grad_()
    made = layer(own)
    made.backward(gradient)
    return layer.weight.detach(), (made, own.grad, layer.weight.grad)


# Training.


def losses_in(mode, steps=40):
    """A perceptron learns which of four quarters a point is in, its input turned to 32 numbers."""
    torch.manual_seed(0)
    layers = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
    model, draw = nn.Sequential(*layers).bfloat16(), torch.Generator().manual_seed(1)
    delayed = None if mode is None else install(model, get_policy(mode).matmul, {})
    masters = [own.detach().float() for own in model.parameters()]
    turned, found = torch.randn(2, 32, generator=draw), []
    for step in range(steps):
        point = torch.randn(64, 2, generator=draw)
        label = (point[:, 0] > 0).long() * 2 + (point[:, 1] > 0).long()
        micro_batches.begin_step(point.device, 0, step)
        loss = nn.functional.cross_entropy(model((point @ turned).bfloat16()).float(), label)
        model.zero_grad()
        loss.backward()
        for own, master in zip(model.parameters(), masters, strict=True):
            master -= 0.1 * own.grad.float()
            own.data.copy_(master)
        if delayed is not None:
            delayed.roll()
        found.append(loss.item())
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", RECIPES)
def test_a_recipe_trains(mode):
    found, plain = losses_in(mode), losses_in(None)
    assert found[0] == pytest.approx(plain[0], rel=0.1) and found != plain
    assert sum(found[-5:]) < 0.6 * sum(found[:5])
    assert sum(found[-5:]) == pytest.approx(sum(plain[-5:]), rel=0.25)


# NVFP4, four over six.


def four_over_six(matrix, rows=1):
    """Numbers of E2M1 and scales of blocks of `rows` x 16."""
    codes, stored, _ = cast_blocks(matrix, "e2m1", rows, 16, "four_over_six", "", 0)
    return decoded(codes, ONE), stored


def test_a_block_goes_to_four_where_that_is_nearer():
    """The example of the paper: 3/4 of the largest is 4.5 of 6, and 3 of 4."""
    matrix = torch.zeros(3, 16)
    matrix[0, :4] = torch.tensor([10.0, 20.0, 30.0, 40.0])
    matrix[1, :4] = torch.tensor([10.0, 20.0, 40.0, 60.0])  # 1, 2, 4, 6
    matrix[2, :2] = torch.tensor([60.0, -20.0])  # exact in both, 6 and 2 or 4 and 1.33
    numbers, stored = four_over_six(matrix)
    assert numbers[0, :4].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert numbers[1, :4].tolist() == [1.0, 2.0, 4.0, 6.0]
    assert numbers[2, :2].tolist() == [6.0, -2.0]
    # Of the tensor's largest number 60 and 256: 40 / 4 and 60 / 6 are 10, which is 256.
    assert stored.flatten().tolist() == [256.0, 256.0, 256.0]
    assert four_over_six(torch.zeros(2, 16))[0].eq(0).all()


def as_in_transformer_engine(matrix):
    """Numbers and scales by its kernel's steps in FP32, one after the other; errors are added in
    the order of numbers."""
    f = np.float32
    x = matrix.numpy().reshape(-1, 16)
    whole = np.abs(x).max()
    first = min(f(1536) / whole, np.finfo(f).max)
    base = np.abs(x).max(1, keepdims=True) / f(6) * first
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], f)
    even = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], f)
    found = []
    for times in (f(1), f(1.5)):
        stored = np.minimum(base * times, f(448))
        stored = torch.from_numpy(stored).to(torch.float8_e4m3fn).float().numpy()
        scaled = np.abs(x * (f(1) / (stored * (f(1) / first))))
        # At a midpoint, the even one of both.
        place = np.searchsorted(even, scaled, "left")
        place += (place < 7) & (scaled == even[np.minimum(place, 6)]) & (place % 2 == 1)
        number = np.copysign(grid[place], x)
        error = np.zeros(len(x), f)
        for column in range(16):
            error += (number[:, column] * stored[:, 0] * whole / f(1536) - x[:, column]) ** 2
        found.append((number, stored, error))
    is_four = (found[1][2] < found[0][2])[:, None]
    pairs = zip(found[0][:2], found[1][:2], strict=True)
    number, stored = (np.where(is_four, four, six) for six, four in pairs)
    return torch.from_numpy(number), torch.from_numpy(stored), is_four.mean()


def test_blocks_of_transformer_engine_s_steps():
    """All 24,576 scales of three kinds of blocks are equal, and all 393,216 numbers."""
    for matrix in (heavy(512, 256), heavy(512, 256, spread=0), heavy(512, 256).bfloat16().float()):
        numbers, stored = four_over_six(matrix)
        expected, scales, share = as_in_transformer_engine(matrix)
        assert 0.2 < share < 0.8
        assert int((stored.view(-1, 1) != scales).sum()) == 0
        assert int((numbers.view(-1, 16) != expected).sum()) == 0


@pytest.mark.parametrize("rows", [1, 16])
def test_squares_of_small_numbers_do_not_underflow(rows):
    """A power of two changes no choice, where FP32 would have only zeros to compare."""
    matrix = heavy(32, 64)
    expected = four_over_six(matrix, rows)
    assert all(map(torch.equal, four_over_six(matrix * 2.0**-90, rows), expected))


# MXFP4 with a Hadamard transform and stochastic rounding, after arXiv 2502.20586.


def gradients(products, x, gradient, times=1):
    """The gradients of the weight and of the input in so many micro-batches."""
    layer, of_weight, of_input = layer_of(products, gradient.size(1), x.size(1)), [], []
    for number in range(times):
        micro_batches.begin_step(x.device, 7, number)
        own = x.clone().requires_grad_()
        layer.weight.grad = None
        layer(own).backward(gradient)
        of_weight.append(layer.weight.grad)
        of_input.append(own.grad)
    expected = gradient.t().double() @ x.double(), gradient.double() @ layer.weight.double()
    return zip((torch.stack(of_weight), torch.stack(of_input)), expected, strict=True)


def off(products, times=300):
    """How many standard errors the mean of each number of both gradients is off, by median."""
    for found, expected in gradients(products, heavy(32, 48), heavy(32, 64, seed=2), times):
        error = found.double().std(0) / times**0.5
        yield ((found.double().mean(0) - expected).abs() / error).median().item()


@pytest.mark.slow
def test_both_gradients_are_right_on_average():
    """Half of all numbers of a normal distribution are within 0.67 standard errors."""
    recipe = get_policy("mxfp4_hadamard").matmul
    assert all(far < 0.8 for far in off(recipe))
    # With the other operand to nearest its error stays, whatever the number of draws.
    assert all(far > 1.5 for far in off(dataclasses.replace(recipe, grad_rounding="stochastic")))


def test_the_output_of_the_recipe_is_that_of_the_mode():
    x, layer = heavy(8, 64).bfloat16(), nn.Linear(64, 32).bfloat16()
    expected = layer(x)
    install(nn.Sequential(layer, nn.ReLU()), get_policy("mxfp4_hadamard").matmul, {})
    assert torch.equal(layer(x), x @ layer.weight.t() + layer.bias)
    assert torch.allclose(layer(x), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.slow
@pytest.mark.parametrize("operand", ["grad_output", "input", "weight"])
def test_a_stochastic_cast_is_a_neighbour_by_fractions(operand):
    """0 of 6,144 numbers are other than the two of E2M1 beside the exact quotient."""
    product = "grad_input" if operand == "weight" else "grad_weight"
    own = get_policy("mxfp4_hadamard").matmul.operand(operand, product, "a")
    assert own.stream
    matrix = heavy(32, 64)
    micro_batches.begin_step(matrix.device, 0, 0)
    form = own.element.name, *own.block, own.scale, own.scale_rounding, own.stream
    codes, factor, _ = cast_blocks(matrix, *form)
    numbers = decoded(codes, ONE)
    grid, wrong, differ = sorted({*exact.GRIDS["e2m1"], *(-n for n in exact.GRIDS["e2m1"])}), 0, 0
    for row, values in enumerate(matrix.tolist()):
        for column, value in enumerate(values):
            amax = max(map(abs, values[column // 32 * 32 :][:32]))
            power = exact.e8m0(Q(amax), "e2m1", "rceil")
            assert factor[row, column // 32].item() == 2.0**power
            quotient = Q(value) / Q(2) ** power
            lower = max(number for number in grid if number <= quotient)
            upper = min(number for number in grid if number >= quotient)
            wrong += Q(numbers[row, column].item()) not in (lower, upper)
            differ += Q(numbers[row, column].item()) != exact.nearest(quotient, "e2m1")
    assert wrong == 0 and differ > 100


# DeepSeek-V3's blocks (arXiv 2412.19437, sections 3.3.2 and 3.5.2).


def fractions_of(matrix, block):
    rows = exact.in_blocks(matrix.tolist(), block, "e4m3", "fp32", "")
    return torch.tensor([[float(exact.f32(value)) for value in row] for row in rows])


@pytest.mark.slow
def test_deepseek_casts_the_cast_input_again():
    """All three products by fractions: 0 of 30,784 numbers differ."""
    x, gradient = heavy(40, 144), heavy(40, 136, seed=2)
    weight, (made, of_x, of_weight) = three_products("fp8_deepseek", x, gradient)
    cast_x, cast_weight = fractions_of(x, (1, 128)), fractions_of(weight, (128, 128))
    again, once = (fractions_of(of.t(), (1, 128)) for of in (cast_x, x))
    cast_gradient = fractions_of(gradient, (1, 128)), fractions_of(gradient.t(), (1, 128))
    assert torch.equal(made, cast_x @ cast_weight.t())
    assert torch.equal(of_x, cast_gradient[0] @ cast_weight)
    assert torch.equal(of_weight, cast_gradient[1] @ again.t())
    # Transformer Engine casts the uncast input: four fifths of these numbers are others.
    assert (again != once).float().mean() > 0.5
    assert not torch.equal(of_weight, cast_gradient[1] @ once.t())


@pytest.mark.slow  # its import takes seconds
@pytest.mark.filterwarnings("ignore")
def test_torchao_s_kernels_give_the_same_three_products():
    """0 of 327,680 numbers differ where its casts are composed as DeepSeek-V3 does."""
    pytest.importorskip("torchao")
    from torchao.prototype.blockwise_fp8_training import kernels

    def theirs(name, matrix, rows, columns):
        codes, factor = getattr(kernels, f"torch_blockwise_scale_{name}")(matrix)
        spread = factor.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return codes.float() * spread[: matrix.size(0), : matrix.size(1)]

    x, gradient = heavy(256, 512), heavy(256, 256, seed=1)
    weight, (made, of_x, of_weight) = three_products("fp8_deepseek", x, gradient)
    cast_x = theirs("act_quant_lhs", x, 1, 128)
    cast_weight = theirs("weight_quant", weight, 128, 128)
    again = theirs("act_quant_rhs", cast_x, 128, 1)
    assert torch.equal(made, cast_x @ cast_weight.t())
    assert torch.equal(of_x, theirs("act_quant_lhs", gradient, 1, 128) @ cast_weight)
    assert torch.equal(of_weight, theirs("act_quant_rhs", gradient, 128, 1).t() @ again)


# Delayed scaling with Megatron-LM's defaults.


def test_the_scale_is_of_the_update_before_alone():
    """Transformer Engine's rules in NumPy: 0 of 18 scales differ, where a long history keeps 8."""
    sizes, found = (1.0, 8.0, 0.5, 0.0, 3.0, 2.0), {}
    for mode in ("fp8_delayed_megatron", "fp8_delayed"):
        torch.manual_seed(0)
        layer = nn.Linear(16, 16, bias=False)
        delayed = install(nn.Sequential(layer, nn.ReLU()), get_policy(mode).matmul, {})
        found[mode] = []
        for size in sizes:
            x = torch.full((4, 16), size).requires_grad_()
            layer(x).backward(torch.full((4, 16), size / 64))
            delayed.roll()
            found[mode].append(delayed.present[0, :, 0].tolist())  # input, weight, grad_output
    weight = layer.weight.abs().max().item()
    expected, last = [], [np.float32(1)] * 3
    for size in sizes:
        amaxes, tops = (size, weight, size / 64), (448, 448, 57344)
        pairs = zip(amaxes, tops, last, strict=True)
        last = [np.float32(top) / np.float32(own) if own else kept for own, top, kept in pairs]
        expected.append([float(own) for own in last])
    assert found["fp8_delayed_megatron"] == expected
    assert found["fp8_delayed"][-1][0] == 448 / 8


# INT8 by row.

INT8 = ELEMENTS["int8"]


def in_int8(matrix):
    """Codes and factors of rows by fractions, each step rounded to FP32."""
    codes, factors = [], []
    for row in matrix.tolist():
        amax = max(map(abs, row))
        encode = min(exact.f32(Q(127) / Q(amax)), exact.F32_MAX) if amax else exact.F32_MAX
        # Python rounds halves of a fraction to even.
        wide = (round(exact.f32(Q(value) * encode)) for value in row)
        codes.append([max(-127, min(127, code)) for code in wide])
        factors.append(float(exact.f32(1 / encode)))
    return torch.tensor(codes, dtype=torch.int64), torch.tensor(factors)


def int8_product(left, right):
    """left @ right.T: exact sums of codes, rounded to FP32, times the factors of right and left."""
    (a, of_a), (b, of_b) = in_int8(left), in_int8(right)
    return (a @ b.t()).float() * of_b * of_a[:, None]


def test_int8_by_row_is_exact():
    """0 of 15,040 numbers of the three products differ."""
    x, gradient = heavy(40, 120), heavy(40, 64, seed=2)
    x[3] = 0.0
    weight, (made, of_x, of_weight) = three_products("int8_rowwise", x, gradient)
    assert torch.equal(made, int8_product(x, weight))
    assert torch.equal(of_x, int8_product(gradient, weight.t()))
    assert torch.equal(of_weight, int8_product(gradient.t(), x.t()))


def test_every_integer_and_every_half_between():
    grid = torch.arange(-127, 128).float()
    assert torch.equal(decoded(encoded(grid.clone(), INT8), ONE), grid)
    halves = grid[:-1] + 0.5
    even = torch.tensor([float(round(Q(half))) for half in halves.tolist()])
    assert torch.equal(decoded(encoded(halves.clone(), INT8), ONE), even)
    beyond = torch.tensor([127.4, 128.0, 1e30, -1e30])
    assert encoded(beyond, INT8).tolist() == [127, 127, 127, -127]


def test_sums_of_integers_are_exact_where_fp32_rounds():
    """FP32 loses a 1 beside 4,096 products of 127 x 127."""
    x, weight = torch.full((1, 4097), 127.0), torch.full((1, 4097), 127.0)
    x[0, -1], weight[0, -1] = 1.0, 127.0
    layer = nn.Linear(4097, 1, bias=False)
    layer.weight.data = weight
    install(nn.Sequential(layer, nn.ReLU()), get_policy("int8_rowwise").matmul, {})
    assert layer(x).item() == float(np.float32(4096 * 127 * 127 + 127))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_is_seen(bad):
    layer, x = layer_of(get_policy("int8_rowwise").matmul, 32, 48), heavy(8, 48)
    x[2, 5] = bad
    made = layer(x)
    assert not made[2].isfinite().any() and made[3:].isfinite().all()


@pytest.mark.slow  # its import takes seconds
@pytest.mark.filterwarnings("ignore")
def test_torchao_s_int8_rows():
    """It rounds amax / 127 and its inverse, one step more: 1 of 1,048,576 codes is another one, and
    539 of 2,048 factors are a unit off."""
    pytest.importorskip("torchao")
    from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise

    matrix = heavy(2048, 512)
    theirs, factor = quantize_int8_rowwise(matrix)
    own = cast(matrix, get_policy("int8_rowwise").matmul.operand("input", "output"))
    assert own.values.dtype is torch.int8
    apart = (own.values.int() - theirs.int()).abs()
    assert int(apart.sum()) == 1 and (own.factor.flatten() != factor).sum() == 539
    assert torch.allclose(own.factor.flatten(), factor, rtol=2.0**-22, atol=0)


# Quantisation-aware training: products of the output alone.


class Straight(torch.autograd.Function):
    """Other numbers in place of the given ones, whose gradient is passed on."""

    @staticmethod
    def forward(ctx, given, other):
        return other

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def nvfp4_numbers(matrix):
    rows = exact.in_blocks(matrix.tolist(), (1, 16), "e2m1", "e4m3", "")
    numbers = torch.tensor([[float(value) for value in row] for row in rows])
    return numbers * (matrix.abs().max() * (1 / 2688))


def int8_numbers(matrix):
    codes, factor = in_int8(matrix)
    return codes.float() * factor[:, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "numbers"), [("qat_int8", int8_numbers), ("qat_nvfp4", nvfp4_numbers)]
)
def test_gradients_are_those_of_fake_quantisation(mode, numbers):
    """As autograd's through numbers that fractions cast: 0 of 12,480 numbers differ."""
    x, gradient = heavy(40, 120), heavy(40, 64, seed=2)
    weight, (made, of_x, of_weight) = three_products(mode, x, gradient)
    own, weight = (given.clone().requires_grad_() for given in (x, weight))
    cast_x, cast_weight = (Straight.apply(g, numbers(g.detach())) for g in (own, weight))
    expected = cast_x @ cast_weight.t()
    expected.backward(gradient)
    assert torch.equal(of_x, own.grad) and torch.equal(of_weight, weight.grad)
    assert torch.allclose(made, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert not torch.equal(of_x, gradient @ weight)

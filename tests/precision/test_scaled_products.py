"""Linear layers in FP8: casts, products, gradients; torch's kernels and torchao's layers agree."""

import dataclasses
import math
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mprun.models.gpt import TiedOutput
from mprun.precision import forward_context, get_policy, scaled_products
from mprun.precision.block_formats import ELEMENTS, decoded
from mprun.precision.forward_context import why_unsupported
from mprun.precision.module_dtypes import chosen_dtypes
from mprun.precision.philox import micro_batches
from mprun.precision.scaled_linear import chosen_layers, install
from mprun.precision.scaled_operators import Calls, multiplied_on_cuda, promised
from mprun.precision.scaled_products import ScaledProducts, product, why_no_product

from ..helpers import mixed, skipping_what_onednn_lacks
from ..shipped import ALL_MODES
from .test_recipes import RECIPES

E4M3, E5M2, E2M1, _ = ELEMENTS.values()
TENSOR = ScaledProducts()
ROW = ScaledProducts(grad_output=E4M3, granularity="row", scale="pow2")
UNSCALED = ScaledProducts(granularity="none")
DELAYED = ScaledProducts(scale="delayed")
WEIGHT_IN_BF16 = dataclasses.replace(ROW, high_precision=("grad_weight",))
BLOCKS = ScaledProducts(grad_output=E4M3, granularity="1x32", scale="e8m0")
TURNED = get_policy("nvfp4").matmul


def cast(matrix, element, products, dim=-1):
    operand = dataclasses.replace(products, input=element).operand("input", "output")
    return scaled_products.cast(matrix, operand, dim)


def skip_without_rows(needed: bool) -> None:
    """Skip where torch's own kernel on a CPU, as of 2.11, has a scale for each tensor alone."""
    one = torch.ones(16, 16).to(E4M3.dtype)
    factors = (torch.ones(16, 1), torch.ones(1, 16)) if needed else (torch.ones(()), torch.ones(()))
    try:
        torch._scaled_mm(one, one.t(), *factors, out_dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("this torch has no products with scales by row on a CPU")


REFUSED = "_scaled_mm: scales by row need compute capability 9.0"


@pytest.mark.parametrize(
    ("mode", "capability", "said", "named"),
    [
        ("fp8_tensorwise", (8, 9), None, None),
        ("fp8_tensorwise", (8, 6), None, "has no FP8 products; compute capability 8.9"),
        ("fp8_rowwise", (8, 9), None, None),
        ("fp8_rowwise", (8, 9), REFUSED, f"Made refuses a small product of .*: {REFUSED}"),
        ("tf32", (7, 5), None, r"\(compute capability 7.5\) has no TF32"),
        # AMD's numbers mean something else: MI300X is 9.4, RX 7900 is 11.0.
        ("tf32", "11.0 of ROCm", None, r"Made \(ROCm\) has no TF32"),
        ("fp8_tensorwise", "9.4 of ROCm", "no e4m3fn here", "no e4m3fn here"),
        ("bf16_master", "9.4 of ROCm", None, None),
    ],
)
def test_gpus_that_lack_the_products_are_refused(mode, capability, said, named, monkeypatch):
    """The GPU that answers is made."""
    monkeypatch.setattr(torch.version, "hip", "6.4" if isinstance(capability, str) else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Made")
    monkeypatch.setattr(forward_context, "why_no_product", lambda products, device: said)
    reason = why_unsupported(get_policy(mode), torch.device("cuda"))
    assert reason is None if named is None else re.search(named, reason)


def test_small_products_show_what_a_device_refuses(monkeypatch):
    cpu = torch.device("cpu")
    assert why_no_product(ROW, cpu) is why_no_product(TENSOR, cpu) is None
    tried = []

    def without_e5m2(a, b, dtype, fast):
        tried.append((a.operand.element, b.operand.element, fast))
        if a.operand.element is E5M2:
            raise RuntimeError("e5m2 is not here\nException raised from ...")

    monkeypatch.setattr(scaled_products, "product", without_e5m2)
    assert why_no_product(TENSOR, cpu) == "e5m2 is not here"
    assert tried == [(E4M3, E4M3, True), (E5M2, E4M3, False)]
    kept = dataclasses.replace(TENSOR, high_precision=("grad_input", "grad_weight"))
    assert why_no_product(kept, cpu) is None


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_every_finite_number_is_decoded(element):
    every = torch.arange(256, dtype=torch.uint8).view(element.dtype)
    expected = every.float()
    finite = expected.isfinite()
    found = decoded(every, torch.tensor(0.375))
    assert torch.equal(found[finite], expected[finite] * 0.375)
    turned = decoded(every.view(16, 16).t(), torch.ones(()))
    assert torch.equal(turned, found.view(16, 16).t() / 0.375)


@pytest.mark.parametrize(
    ("products", "amax", "factor"),
    [
        (TENSOR, 896.0, 2.0),
        (TENSOR, 100.0, float(torch.tensor(4.48, dtype=torch.float32).reciprocal())),
        (ROW, 100.0, 0.25),
        (ROW, 448.0, 1.0),
        (UNSCALED, 1e6, 1.0),
        (TENSOR, 2.0**-60, 2.0**-60 / 448),
        (ROW, 2.0**-110, 2.0**-118),
        (TENSOR, 0.0, 2.0**-128),  # of the largest FP32 number
    ],
)
def test_scales_by_hand(products, amax, factor):
    found = cast(torch.tensor([[amax, -amax / 2], [0.0, 0.0]]), E4M3, products)
    assert found.factor.reshape(-1)[0].item() == pytest.approx(factor, rel=2.0**-23)
    largest = found.values.float()[0, 0].item()
    if products is not UNSCALED and amax:
        assert largest == min(448.0, float(torch.tensor(amax / factor).to(E4M3.dtype).float()))
    assert largest <= 448.0


@pytest.mark.parametrize(
    "mode", ["fp8_tensorwise", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4_plain"]
)
def test_small_gradients_keep_their_digits(mode):
    """A loss times a power of two has gradients times it, bit for bit, as far as BF16 goes."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 1))
    install(model.bfloat16(), get_policy(mode).matmul, {})
    x, found = torch.randn(16, 64).bfloat16(), []
    for factor in (1.0, 2.0**-50, 2.0**-80):
        model.zero_grad()
        (model(x).float().sum() * factor).backward()
        found.append([own.grad.float() / factor for own in model.parameters()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_scales_by_row_go_along_the_sum():
    matrix = torch.tensor([[1.0, 1024.0], [0.5, 2.0]])
    # Down to powers of two: of the columns 448 / 1 and 448 / 1024, of the rows 448 / 1024 and 224.
    assert cast(matrix, E4M3, ROW, 0).factor.tolist() == [[2.0**-8, 4.0]]
    assert cast(matrix, E4M3, ROW).factor.tolist() == [[4.0], [2.0**-7]]


@pytest.mark.parametrize(
    "products", [TENSOR, ROW, UNSCALED, BLOCKS, TURNED], ids=lambda p: p.granularity
)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden_by_the_cast(products, bad):
    left, right = torch.ones(3, 16), torch.ones(16, 5)
    left[1, 2] = bad
    own, other = cast(left, E4M3, products), cast(right, E4M3, products, 0)
    found = product(own, other, torch.bfloat16)
    assert not found[1].isfinite().any()
    if products is TURNED:  # its tensor's scale is not finite
        assert not found.isfinite().any()


def equal_but_for_the_order_of_sums(found, expected, left, right):
    """Return whether two results of casts of `left` [n, k] times `right` [k, m] agree.

    A processor's kernel adds the k exact FP32 products in an order of its own. Each addition rounds
    by half an ulp of at most the sum of magnitudes, which casts to 8 bits change by a quarter at
    most (E5M2: 2^-3 each). A result in BF16 is rounded once more.
    """
    magnitudes = 1.25**2 * (left.double().abs() @ right.double().abs())
    bound = 2 * left.shape[-1] * 2.0**-24 * magnitudes
    if expected.dtype is torch.bfloat16:
        bound = bound + 2.0**-8 * expected.double().abs()
    apart = (found.double() - expected.double()).abs()
    return found.dtype is expected.dtype and bool((apart <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("products", [TENSOR, ROW, UNSCALED], ids=lambda p: p.granularity)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)])
def test_a_product_is_that_of_torch_s_own_kernel(products, dtype, formats):
    if products is ROW and dtype is torch.float32:
        pytest.skip("torch stores sums with scales by row in BF16 alone")
    skip_without_rows(products is ROW)
    left, right = torch.randn(37, 53) * 3, torch.randn(29, 53)
    own, other = cast(left, formats[0], products), cast(right, formats[1], products).T
    factors = own.factor, other.factor
    with skipping_what_onednn_lacks():
        expected = torch._scaled_mm(own.values, other.values, *factors, out_dtype=dtype)
    assert equal_but_for_the_order_of_sums(product(own, other, dtype), expected, left, right.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("recipe", "products"),
    [("tensorwise", TENSOR), ("rowwise", ROW), ("rowwise_with_gw_hp", WEIGHT_IN_BF16)],
)
@pytest.mark.filterwarnings("ignore")
def test_torchao_gives_the_same_but_for_the_order_of_sums(recipe, products, dtype):
    pytest.importorskip("torchao")
    skip_without_rows(products is not TENSOR)
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    layer, theirs = (nn.Linear(48, 64).to(dtype) for _ in range(2))
    theirs.load_state_dict(layer.state_dict())
    theirs = Float8Linear.from_float(theirs, Float8LinearConfig.from_recipe_name(recipe))
    install(nn.Sequential(layer, nn.ReLU()), products, {})
    own = torch.randn(4, 32, 48, dtype=dtype).requires_grad_()
    other = own.detach().clone().requires_grad_()
    found = layer(own)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    with skipping_what_onednn_lacks():
        expected = theirs(other)
        expected.backward(gradient)
    weight, rows = layer.weight.detach(), own.detach().flatten(0, 1)
    passed = gradient.flatten(0, 1)
    for mine, others, *factors in (
        (found, expected, rows, weight.T),
        (own.grad, other.grad, passed, weight),
        (layer.weight.grad, theirs.weight.grad, passed.T, rows),
    ):
        pair = mine.flatten(0, -2), others.flatten(0, -2)
        assert equal_but_for_the_order_of_sums(*pair, *factors)
    assert torch.equal(layer.bias.grad, theirs.bias.grad)


def test_gradients_against_float64():
    """Errors of casts to 3 and 2 bits of mantissa: 2^-4 and 2^-3 of each factor at most; sums of
    64 and more products of both signs come closer."""
    layer = nn.Linear(64, 48)
    install(nn.Sequential(layer, nn.ReLU()), TENSOR, {})
    x, gradient = torch.randn(96, 64, requires_grad=True), torch.randn(96, 48)
    layer(x).backward(gradient)
    exact_x = gradient.double() @ layer.weight.double()
    exact_weight = gradient.double().t() @ x.double()
    for found, exact in ((x.grad, exact_x), (layer.weight.grad, exact_weight)):
        assert 0.01 < (found.double() - exact).norm() / exact.norm() < 2.0**-3


def test_a_cast_serves_two_products_if_it_is_the_same_in_both():
    """By row the sums of the second one run along the other dimension."""
    without = dataclasses.replace(TENSOR, high_precision=("grad_weight",))
    for products, kept in ((TENSOR, (1, 1, 1)), (ROW, (0, 0, 0)), (without, (0, 1, 0))):
        plan = products.plan()
        assert (plan.keeps_input, plan.keeps_weight, plan.keeps_gradient) == kept


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.inner = nn.Linear(16, 32), nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.output = nn.Linear(32, 4)

    def forward(self, x):
        return self.output(self.inner(self.inputs(x)))


@pytest.mark.parametrize(
    ("modules", "overrides", "expected"),
    [
        (("*",), {}, ["inputs", "inner.0"]),
        (("inner.*",), {}, ["inner.0"]),
        (("*", "output"), {}, ["inputs", "inner.0", "output"]),
        (("*",), {"inner": torch.float32}, ["inputs"]),
        (("*",), {"inner": torch.bfloat16}, ["inputs"]),
        (("*", "!inner.*"), {}, ["inputs"]),
        (("*", "!inner"), {}, ["inputs"]),
        (("inn*r",), {}, ["inner.0"]),
        (("!inner.*",), {}, ["inputs"]),
        (("!in*", "inner.0"), {}, ["inner.0"]),
        (("!inner.*", "output"), {}, ["inputs", "output"]),
        (("*", "!middle"), {}, "'!middle' matches no nn.Linear"),
        (("!last 15%",), {}, ["inputs"]),
        (("middle",), {}, "'middle' matches no nn.Linear; the model has inputs, inner.0, output"),
        (("out*",), {}, "no nn.Linear is left to compute in E4M3/E5M2; output, the output layer"),
        (("inputs",), {"inputs": torch.float32}, []),
        (("!*",), {}, "no nn.Linear is left .*; patterns with ! take all of them out"),
        (("in*", "!in*"), {}, "patterns with ! take all of them out"),
        (("!last 150%",), {}, "'!last 150%': must be of the form '!last 15%', from 1 to 100"),
        (("!last x%",), {}, "'!last x%': must be of the form '!last 15%'"),
        (("*", "!last 0%"), {}, "'!last 0%': must be of the form '!last 15%'"),
        (("! Last 15%",), {}, "'! Last 15%': must be of the form '!last 15%'"),
        (("last 15",), {}, "'!last 15': must be of the form '!last 15%'"),
    ],
)
def test_which_layers(modules, overrides, expected):
    """A list, or what a refusal says."""
    products, model = ScaledProducts(modules=modules), Two()
    chosen = chosen_dtypes(model, overrides, "precision.overrides")
    if isinstance(expected, list):
        assert chosen_layers(model, products, chosen) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            chosen_layers(model, products, chosen)


def test_marked_output_layers_are_left_out_and_no_other():
    model = Two()
    model.inputs.is_output = model.inner[0].is_output = True
    assert chosen_layers(model, ScaledProducts(), {}) == ["output"]
    assert chosen_layers(model, ScaledProducts(modules=("inputs",)), {}) == ["inputs"]
    model.output.is_output = True
    with pytest.raises(ValueError, match="left .*; output, the output layer, has to be named"):
        chosen_layers(model, ScaledProducts(), {})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.output = nn.Embedding(48, 32), TiedOutput()

    def forward(self, x):
        return self.output(x, self.table.weight)


def test_a_tied_output_is_the_linear_layer_with_its_table():
    model, plain = Tied(), nn.Linear(32, 48, bias=False)
    plain.load_state_dict({"weight": model.table.weight})
    wholes = nn.ModuleList([nn.Linear(1, 1), plain])
    products = dataclasses.replace(BLOCKS, modules=("output",))
    assert chosen_layers(model, products, {}) == ["output"]
    install(model, products, {})
    install(wholes, dataclasses.replace(BLOCKS, modules=("1",)), {})
    found = []
    for network in (model, plain):
        x = torch.linspace(-2, 2, 64 * 32).sin().view(64, 32).requires_grad_()
        y = network(x)
        y.square().sum().backward()
        found.append([y, x.grad, next(network.parameters()).grad])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert not torch.equal(found[0][0], x @ plain.weight.t())
    with pytest.raises(ValueError, match="output, the output layer, has to be named"):
        install(Tied(), BLOCKS, {})


def test_an_fp32_override_stays_fp32_and_evaluation_is_without_fp8():
    learner = mixed(Two(), "fp8_tensorwise", overrides={"inner": torch.float32})
    calls, x = learner.prepared.forward_context.calls, torch.randn(8, 16)
    learner.network(x).sum().backward()
    # The first layer's input needs no gradient.
    expected = {"forward e4m3 x e4m3": 1, "backward e5m2 x e4m3": 1}
    assert calls == expected
    with learner.evaluating(in_mode=False) as model:
        model(x)
    assert calls == expected


def test_each_model_counts_its_own_products():
    """They share a process, a mode and the shapes of their layers."""
    one, other = (mixed(Two(), "fp8_tensorwise") for _ in range(2))
    x = torch.randn(8, 16)
    one.network(x).sum().backward()
    for _ in range(3):
        other.network(x).sum()
    own, others = (learner.prepared.forward_context.rerouted() for learner in (one, other))
    assert own["forward e4m3 x e4m3"] == 2 and others["forward e4m3 x e4m3"] == 6
    assert own["backward e5m2 x e4m3"] == 3 and "backward e5m2 x e4m3" not in others


class Checkpointed(nn.Module):
    """`Two`, of which a part, or all of it, is computed again in backward."""

    def __init__(self, part, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.two, self.part = Two(), part
        if reentrant is not None:
            module = self.two.inner if part else self.two
            run = module.forward
            module.forward = lambda x: checkpoint(run, x, use_reentrant=reentrant)

    def forward(self, x):
        return self.two(x)


@pytest.mark.parametrize("mode", ["fp8_tensorwise", "fp8_rowwise"])
@pytest.mark.parametrize("part", [True, False], ids=["part", "all"])
def test_a_checkpoint_changes_no_bit(mode, part):
    x, found = torch.randn(8, 16), []
    for reentrant in (None, True, False):
        model = Checkpointed(part, reentrant)
        learner, own = mixed(model, mode), x.clone().requires_grad_()
        learner.network(own).square().sum().backward()
        again = 0 if reentrant is None else 1 if part else 2
        assert learner.prepared.forward_context.calls["forward e4m3 x e4m3"] == 2 + again
        found.append([own.grad, *(p.grad for p in model.parameters())])
    for plain, *recomputed in zip(*found, strict=True):
        assert all(torch.equal(plain, gradient) for gradient in recomputed)


def test_a_second_derivative_is_refused():
    """Its values would be those of a cast taken for a constant."""
    model = Two()
    install(model, TENSOR, {})
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="products with casts have no second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


COMPILED = {
    "tensor": TENSOR,
    "row": ROW,
    "unscaled": UNSCALED,
    "weight in bf16": WEIGHT_IN_BF16,
    "blocks": BLOCKS,
    "turned": TURNED,
    "delayed": DELAYED,
} | {mode: get_policy(mode).matmul for mode in RECIPES}


@pytest.mark.slow  # the first use of the compiler's tracer takes seconds
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch 2.11's tracer does
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_network_is_one_graph_with_the_same_bits(name):
    """`aot_eager` traces forward and backward as every backend does, and runs torch's kernels."""
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 16)).bfloat16()
    calls, chosen = Calls(), dataclasses.replace(COMPILED[name], modules=("0", "2"))
    delayed = install(model, chosen, {}, calls=calls)
    x = torch.randn(8, 24).bfloat16()

    def step(called):
        model.zero_grad()
        calls.clear()
        micro_batches.begin(x.device, 0)
        found = called(x)
        found.float().square().sum().backward()
        amaxes = [] if delayed is None else [delayed.present.clone()]
        if delayed is not None:
            delayed.present[..., 1] = 0
        return [found, *(own.grad for own in model.parameters()), *amaxes], dict(calls)

    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    (expected, of_eager), (found, of_compiled) = step(model), step(compiled)
    assert all(map(torch.equal, found, expected))
    times = {"output": 2, "grad_input": 1, "grad_weight": 2}  # the input needs no gradient
    count = sum(n for product, n in times.items() if product not in chosen.high_precision)
    assert of_compiled == of_eager and sum(of_eager.values()) == count


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(x).relu()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch 2.11's tracer has several
@pytest.mark.parametrize("products", [TENSOR, BLOCKS, DELAYED])
def test_equal_blocks_are_compiled_once(products):
    """A graph for each of ten would reach the compiler's limit of eight."""
    from torch._dynamo.testing import CompileCounter  # the compiler

    torch.compiler.reset()
    model = nn.Sequential(*(Block() for _ in range(10)))
    install(model, products, {})
    graphs = CompileCounter()
    for block in model:
        block.compile(backend=graphs, dynamic=False)
    model(torch.randn(8, 16))
    assert graphs.frame_count <= 3  # two kinds of inputs: the first needs no gradient


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("sizes", [(32, 32, 32), (32, 32, 20), (20, 20, 32), (7, 5, 3)])
def test_a_compiler_is_promised_the_strides_of_cuda(sizes, by_row):
    """cuBLAS takes multiples of 16; torch's kernel for a CPU stands in for it."""
    skip_without_rows(by_row)
    n, k, m = sizes
    a, b = torch.randn(n, k).to(E4M3.dtype), torch.randn(m, k).to(E4M3.dtype).t()
    factors = (torch.rand(n, 1), torch.rand(1, m)) if by_row else (torch.rand(()), torch.rand(()))
    form = (a, b, *factors, None, None, torch.bfloat16, True, 0, 0.0, "e4m3 x e4m3", None)
    found, told = multiplied_on_cuda(*form), promised(*(t.to("meta") for t in form[:4]), *form[4:])
    assert (found.shape, found.stride()) == (told.shape, told.stride())
    # Both round the sum of k terms once, in their own order.
    exact = torch.mm(a.double(), b.double()) * factors[0] * factors[1]
    assert torch.allclose(found.double(), exact, rtol=2**-8, atol=1e-5 * k)


def test_sums_are_those_of_scaled_factors():
    """2^19 in one place of a tensor flushes what is below 2^19 * 2^-18.8; by row it does not."""
    x = torch.full((2, 16), 0.5)
    x[0, 0] = 2.0**19
    weight = torch.eye(16)
    for products, expected in ((TENSOR, 0.0), (ROW, 0.5)):
        own, other = cast(x, E4M3, products), cast(weight, E4M3, products).T
        assert product(own, other, torch.bfloat16)[1, 3].item() == expected


@pytest.mark.parametrize("mode", [mode for mode in ALL_MODES if get_policy(mode).matmul])
def test_no_rows_have_an_output_and_gradients_of_zero(mode):
    """As an expert that gets no token."""
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 4)).bfloat16()
    install(model, get_policy(mode).matmul, {})
    given = torch.empty(0, 32, dtype=torch.bfloat16, requires_grad=True)
    made = model(given)
    made.sum().backward()
    assert made.shape == (0, 4) and made.dtype is torch.bfloat16
    assert given.grad.shape == given.shape and not model[0].weight.grad.any()

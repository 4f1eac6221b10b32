import pytest
import torch
import torch.nn.functional as F

from mprun.precision.emulation import HalfEmulation

from .emulated import HALVES, assert_within

OPERATIONS = {
    "mm": (torch.mm, [(33, 300), (300, 40)]),
    "mm_large": (torch.mm, [(256, 300), (300, 256)]),
    "mm_transposed": (lambda a, b: a.t() @ b, [(300, 256), (300, 256)]),
    "addmm": (torch.addmm, [(40,), (33, 300), (300, 40)]),
    "addmm_scaled": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
        [(256, 200), (256, 99), (99, 200)],
    ),
    "bmm": (torch.bmm, [(5, 33, 300), (5, 300, 40)]),
    "bmm_large": (torch.bmm, [(5, 130, 99), (5, 99, 140)]),
    "baddbmm": (torch.baddbmm, [(5, 33, 40), (5, 33, 300), (5, 300, 40)]),
    "addbmm": (torch.addbmm, [(33, 40), (5, 33, 60), (5, 60, 40)]),
    "mv": (torch.mv, [(70, 300), (300,)]),
    "addmv": (torch.addmv, [(70,), (70, 300), (300,)]),
    "linear_3d": (F.linear, [(4, 9, 300), (50, 300), (50,)]),
    "linear_3d_no_bias": (F.linear, [(4, 9, 300), (50, 300)]),
    "einsum": (lambda a, b: torch.einsum("bik,bjk->bij", a, b), [(3, 20, 50), (3, 30, 50)]),
    "conv1d": (F.conv1d, [(4, 8, 30), (12, 8, 5), (12,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), [(8, 16, 15, 15), (32, 16, 3, 3), (32,)]),
    "conv2d_large": (lambda x, w: F.conv2d(x, w, None, 1, 1), [(8, 16, 32, 32), (32, 16, 3, 3)]),
    "conv2d_grouped_dilated": (
        lambda x, w: F.conv2d(x, w, None, 1, 2, 2, 4),
        [(4, 16, 15, 15), (32, 4, 3, 3)],
    ),
    "conv3d": (F.conv3d, [(2, 4, 6, 7, 8), (6, 4, 3, 3, 3), (6,)]),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1),
        [(8, 16, 9, 9), (16, 24, 4, 4), (24,)],
    ),
    "embedding": (lambda w: F.embedding(torch.arange(4000) % 7, w), [(11, 32)]),
    "embedding_bag": (
        lambda w: F.embedding_bag(torch.arange(4000).view(40, 100) % 7, w, mode="sum"),
        [(11, 32)],
    ),
}


def operands(shapes, dtype):
    # A scale that keeps sums of a few hundred products near one, away from overflow and subnormals.
    return [(torch.randn(s) * 0.3).to(dtype).requires_grad_() for s in shapes]


def run_both(function, shapes, dtype):
    """Results and gradients under emulation and in float64 on the same 16-bit operands."""
    half = operands(shapes, dtype)
    double = [t.detach().double().requires_grad_() for t in half]
    emulation = HalfEmulation(dtype)
    with emulation:
        out = function(*half)
        cotangent = torch.randn(out.shape).to(dtype)
        out.backward(cotangent)
    expected = function(*double)
    expected.backward(cotangent.double())
    pairs = [(out, expected.detach())]
    pairs += [(h.grad, d.grad) for h, d in zip(half, double, strict=True)]
    return pairs, emulation


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_error_is_that_of_one_rounding(name, dtype):
    pairs, emulation = run_both(*OPERATIONS[name], dtype)
    assert emulation.rerouted
    for value, expected in pairs:
        assert value.dtype is dtype
        # Twice one rounding: the float32 sums themselves add less than 1 % of it.
        assert_within(2, value, expected, dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_dot_is_one_rounding_of_the_float64_value(dtype):
    a, b = (t.detach() for t in operands([(3000,), (3000,)], dtype))
    with HalfEmulation(dtype):
        value = torch.dot(a, b)
    expected = a.double() @ b.double()
    # Half a spacing at the value's own exponent, and the float32 sum's 3000 * 2^-24 of the sum of
    # magnitudes (about 100) on top.
    spacing = torch.finfo(dtype).eps * 2.0 ** float(expected.abs().log2().floor())
    assert abs(float(value) - float(expected)) <= spacing / 2 + 3000 * 2**-24 * 100


@pytest.mark.parametrize("dtype", HALVES)
def test_attention(dtype):
    pairs, emulation = run_both(F.scaled_dot_product_attention, [(2, 4, 50, 16)] * 3, dtype)
    assert {phase for _, phase in emulation.rerouted} == {"forward", "backward"}
    for value, expected in pairs:
        # Four: the gradient also uses the stored, once rounded output.
        assert_within(4, value, expected, dtype)


N = 8192  # exact in both formats; a 16-bit accumulator stops at 2048 (float16) or 256 (bfloat16)


def ones(dtype, *shape):
    return torch.ones(*shape, dtype=dtype, requires_grad=True)


ONES = {
    "mm": (torch.mm, [(2, N), (N, 3)], 0),
    "mm_weight_gradient": (F.linear, [(N, 4), (3, 4), (3,)], (2, 3)),
    "mm_input_gradient": (F.linear, [(2, 4), (N, 4)], 1),
    "bmm": (torch.bmm, [(2, 3, N), (2, N, 3)], 0),
    "bmm_gradient": (torch.bmm, [(2, N, 3), (2, 3, 3)], 2),
    "mv": (torch.mv, [(3, N), (N,)], 0),
    "dot": (torch.dot, [(N,), (N,)], 0),
    "conv": (F.conv2d, [(2, N, 1, 1), (3, N, 1, 1)], 0),
    "conv_batch": (F.conv2d, [(N, 4, 1, 1), (3, 4, 1, 1), (3,)], (2, 3)),
    "conv_pixels": (F.conv2d, [(2, 4, 64, 64), (3, 4, 1, 1), (3,)], (2, 3)),
    "conv_depthwise": (lambda x, w: F.conv2d(x, w, groups=4), [(N, 4, 1, 1), (4, 1, 1, 1)], 2),
    "conv_input_gradient": (F.conv2d, [(2, 4, 2, 2), (N, 4, 1, 1)], 1),
    "transposed": (F.conv_transpose2d, [(2, N, 1, 1), (N, 3, 1, 1)], 0),
    "transposed_batch": (F.conv_transpose2d, [(N, 4, 1, 1), (4, 3, 1, 1), (3,)], (2, 3)),
    "transposed_input_gradient": (F.conv_transpose2d, [(2, 4, 2, 2), (4, N, 1, 1)], 1),
    "embedding": (lambda w: F.embedding(torch.zeros(N, dtype=torch.long), w), [(1, 4)], 1),
    "embedding_bag": (
        lambda w: F.embedding_bag(torch.zeros(1, N, dtype=torch.long), w, mode="sum"),
        [(1, 4)],
        (0, 1),
    ),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ONES)
def test_sums_of_8192_ones_are_exact(name, dtype):
    function, shapes, which = ONES[name]
    inputs = [ones(dtype, *s) for s in shapes]
    with HalfEmulation(dtype):
        out = function(*inputs)
        out.backward(torch.ones_like(out))
    results = [out, *(t.grad for t in inputs)]
    for n in (which,) if isinstance(which, int) else which:
        assert torch.equal(results[n], torch.full_like(results[n], N))


def test_overflow_is_inf_exactly_where_the_float32_result_rounds_past_65504():
    # Two terms that float32 adds exactly: 65504 + r. Halfway to the next step is r = 16 -> inf.
    a = torch.tensor([[65504.0, 1.0]], dtype=torch.float16)
    rest = torch.tensor([0.0, 8.0, 15.9921875, 16.0, 32.0], dtype=torch.float16)
    b = torch.stack([torch.ones_like(rest), rest])
    with HalfEmulation():
        out = a @ b
        cancelled = a.repeat(1, 2) @ torch.cat([b, -b])
    inf = float("inf")
    assert out.tolist() == [[65504.0, 65504.0, 65504.0, inf, inf]]
    assert (-out).min() == -inf
    assert torch.equal(cancelled, torch.zeros_like(cancelled))


def test_subnormals_are_kept():
    tiny = torch.tensor([[2.0**-24]], dtype=torch.float16)
    with HalfEmulation():
        assert (tiny @ torch.ones_like(tiny)).item() == 2.0**-24
        # 2^-25 is halfway between 0 and the smallest subnormal: to even, hence 0.
        assert (tiny @ torch.full_like(tiny, 0.5)).item() == 0.0
        assert (tiny @ torch.full_like(tiny, 0.75)).item() == 2.0**-24


@pytest.mark.parametrize("dtype", HALVES)
def test_in_place_and_out_overloads_are_rerouted(dtype):
    a, b = torch.ones(2, N, dtype=dtype), torch.ones(N, 3, dtype=dtype)
    vector = torch.ones(N, dtype=dtype)
    emulation = HalfEmulation(dtype)
    with emulation:
        inplace = torch.zeros(2, 3, dtype=dtype)
        assert inplace.addmm_(a, b) is inplace
        by_out = torch.empty(2, 3, dtype=dtype)
        assert torch.mm(a, b, out=by_out) is by_out
        resized = torch.empty(0, dtype=dtype)
        torch.addmm(inplace, a, b, beta=0, out=resized)
        batched = torch.zeros(1, 2, 3, dtype=dtype).baddbmm_(a[None], b[None])
        out_vector = torch.zeros(2, dtype=dtype).addmv_(a, vector)
        view = torch.zeros(2, 6, dtype=dtype)
        view[:, ::2].addmm_(a, b)
    for result in (inplace, by_out, resized, batched, out_vector, view[:, ::2]):
        assert torch.equal(result, torch.full_like(result, N))
    assert not view[:, 1::2].any()
    names = {name for name, _ in emulation.rerouted}
    assert names == {"addmm", "addmm_", "addmv_", "baddbmm_", "mm"}


def test_in_place_product_takes_part_in_autograd():
    a, b = operands([(4, 5), (5, 6)], torch.float16)
    with HalfEmulation():
        (torch.zeros(4, 6, dtype=torch.float16).addmm_(a, b)).sum().backward()
    assert_within(2, a.grad, b.detach().double().sum(1).expand(4, 5))


def test_products_of_mixed_dtypes_still_raise():
    a, b = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2)
    with HalfEmulation() as emulation:
        with pytest.raises(RuntimeError, match="dtype"):
            a @ b
        with pytest.raises(RuntimeError, match="type"):
            F.conv2d(a[None, None], b[None, None])
    assert not emulation.rerouted


ALPHAS = {
    "add": lambda a, b: torch.add(a, b, alpha=1e-8),
    "sub": lambda a, b: torch.sub(a, b, alpha=1e-8),
    "rsub": lambda a, b: torch.rsub(b, a, alpha=1e-8),
    "in place": lambda a, b: a.clone().add_(b, alpha=1e-8),
    "out": lambda a, b: torch.sub(a, b, alpha=1e-8, out=torch.empty_like(a)),
    "of a number": lambda a, b: torch.add(a, 50000.0, alpha=1e-8),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ALPHAS)
def test_alpha_is_not_rounded_to_16_bits(name, dtype):
    """1e-8 is below FP16's smallest number, and 0.1 % off in BF16. In FP32 alpha, product and sum
    are off by 2^-24 each, far from where these results round."""
    a, b = (torch.tensor([0.0, 2.0**-11, 3.0]).to(dtype), torch.tensor([65000.0] * 3).to(dtype))
    with HalfEmulation(dtype):
        found = ALPHAS[name](a, b)
    assert found.dtype is dtype and found[0] != 0
    assert torch.equal(found, ALPHAS[name](a.double(), b.double()).to(dtype))

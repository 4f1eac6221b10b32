import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.checkpoint import checkpoint

from mprun.precision.emulation import HalfEmulation

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _seeded_two_threads():
    torch.manual_seed(0)
    torch.set_num_threads(2)


def relative(value, reference):
    return float((value.detach().double() - reference).norm() / reference.norm())


def one_rounding(reference, dtype):
    return relative(reference.to(dtype), reference)


OPERATIONS = {
    "mm": (torch.mm, [(33, 300), (300, 40)]),
    "mm_large": (torch.mm, [(256, 300), (300, 256)]),
    "mm_transposed": (lambda a, b: a.t() @ b, [(300, 256), (300, 256)]),
    "addmm": (torch.addmm, [(40,), (33, 300), (300, 40)]),
    "addmm_scaled": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), [(256, 200), (256, 99), (99, 200)]
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
        lambda x, w: F.conv2d(x, w, None, 1, 2, 2, 4), [(4, 16, 15, 15), (32, 4, 3, 3)]
    ),
    "conv3d": (F.conv3d, [(2, 4, 6, 7, 8), (6, 4, 3, 3, 3), (6,)]),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1), [(8, 16, 9, 9), (16, 24, 4, 4), (24,)]
    ),
    "embedding": (lambda w: F.embedding(torch.arange(4000) % 7, w), [(11, 32)]),
    "embedding_bag": (
        lambda w: F.embedding_bag(torch.arange(4000).view(40, 100) % 7, w, mode="sum"), [(11, 32)]
    ),
}  # fmt: skip


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
        assert relative(value, expected) <= 2 * one_rounding(expected, dtype)


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
    shapes = [(2, 4, 50, 16)] * 3
    pairs, emulation = run_both(F.scaled_dot_product_attention, shapes, dtype)
    assert {phase for _, phase in emulation.rerouted} == {"forward", "backward"}
    for value, expected in pairs:
        # Four: the gradient also uses the stored, once rounded output.
        assert relative(value, expected) <= 4 * one_rounding(expected, dtype)


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
        lambda w: F.embedding_bag(torch.zeros(1, N, dtype=torch.long), w, mode="sum"), [(1, 4)], (0, 1)
    ),
}  # fmt: skip


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
    assert sorted(name for name, _ in emulation.rerouted) == [
        "addmm", "addmm_", "addmv_", "baddbmm_", "mm",
    ]  # fmt: skip


def test_in_place_product_takes_part_in_autograd():
    a, b = operands([(4, 5), (5, 6)], torch.float16)
    with HalfEmulation():
        (torch.zeros(4, 6, dtype=torch.float16).addmm_(a, b)).sum().backward()
    expected = b.detach().double().sum(1).expand(4, 5)
    assert relative(a.grad, expected) <= 2 * one_rounding(expected, torch.float16)


def test_products_of_mixed_dtypes_still_raise():
    a, b = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2)
    with HalfEmulation() as emulation:
        with pytest.raises(RuntimeError, match="dtype"):
            a @ b
        with pytest.raises(RuntimeError, match="type"):
            F.conv2d(a[None, None], b[None, None])
    assert not emulation.rerouted


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 4, 2), nn.Flatten(),
        nn.Linear(4 * 14 * 14, 5),
    )  # fmt: skip


class EmbeddingLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.lstm = nn.LSTM(8, 16, proj_size=8)
        self.decoder = nn.Linear(8, 13)

    def forward(self, tokens):
        return self.decoder(self.lstm(self.embedding(tokens))[0])


@pytest.mark.parametrize("kind", ["half", "autocast"])
def test_every_product_of_the_networks_is_rerouted(kind):
    images, tokens = torch.randn(2, 3, 8, 8), torch.randint(0, 13, (5, 2))
    emulation = HalfEmulation()
    for model, x in ((conv_net(), images), (EmbeddingLstm(), tokens)):
        if kind == "half":
            model, x = model.half(), x.half() if x.is_floating_point() else x
        with emulation:
            with torch.autocast("cpu", torch.float16, enabled=kind == "autocast"):
                out = model(x)
            out.float().sum().backward()
        assert out.dtype is torch.float16
        assert all(p.grad.isfinite().all() for p in model.parameters())
    expected = {
        ("convolution", "forward"): 2, ("convolution_backward", "backward"): 2,
        ("addmm", "forward"): 2, ("mm", "backward"): 4,
        ("lstm", "forward"): 1, ("lstm", "backward"): 1,
    }  # fmt: skip
    if kind == "half":  # autocast leaves the embedding and its gradient in float32
        expected["embedding_dense_backward", "backward"] = 1
    assert emulation.rerouted == expected


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_float32_networks_are_left_alone():
    x, tokens = torch.randn(2, 3, 8, 8), torch.randint(0, 13, (5, 2))
    for model, inputs in ((conv_net(), x), (EmbeddingLstm(), tokens)):
        twin = copy.deepcopy(model)
        with HalfEmulation() as emulation:
            model(inputs).sum().backward()
        twin(inputs).sum().backward()
        assert not emulation.rerouted
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_bfloat16_object_leaves_float16_alone_and_other_dtypes_are_refused():
    a = torch.ones(2, 2, dtype=torch.float16)
    with HalfEmulation(torch.bfloat16) as emulation:
        a @ a
    assert not emulation.rerouted
    with pytest.raises(ValueError, match="float64"):
        HalfEmulation(torch.float64)


def test_memory_format_and_output_mask_are_kept():
    x = torch.randn(2, 16, 40, 40).half().contiguous(memory_format=torch.channels_last)
    conv = nn.Conv2d(16, 8, 3).half().to(memory_format=torch.channels_last)
    with HalfEmulation():
        out = conv(x)
        out.float().square().sum().backward()
        masked = torch.ops.aten.convolution_backward(
            torch.ones_like(out), x, conv.weight.detach(), None,
            [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False],
        )  # fmt: skip
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert conv.weight.grad.dtype is torch.float16
    assert masked[0] is None and masked[2] is None and masked[1].shape == conv.weight.shape


def test_weight_used_twice_and_expanded_gradient():
    w = (torch.randn(200, 200) * 0.05).half().requires_grad_()
    w64 = w.detach().double().requires_grad_()
    x = torch.randn(200, 200).half()
    with HalfEmulation():
        ((x @ w) @ w).float().sum().backward()
    ((x.double() @ w64) @ w64).sum().backward()
    # Two stored intermediates and the sum of two gradients: four roundings.
    assert relative(w.grad, w64.grad) <= 4 * one_rounding(w64.grad, torch.float16)


def test_exceptions_nesting_and_many_entries_leave_no_trace():
    a = torch.ones(4, 4, dtype=torch.float16)
    emulation = HalfEmulation()
    for _ in range(300):
        with pytest.raises(KeyError), emulation:
            raise KeyError
    with emulation, pytest.raises(RuntimeError):
        a @ torch.ones(3, 3, dtype=torch.float16)
    emulation.rerouted.clear()
    with emulation, emulation:
        a @ a
    with emulation:
        a @ a
    assert emulation.rerouted == {("mm", "forward"): 2}
    a @ a
    nn.LSTM(4, 4).half()(a[None])
    assert emulation.rerouted == {("mm", "forward"): 2}


def test_inference_before_training_does_not_spoil_the_working_memory():
    model = nn.Linear(300, 300).half()
    x = torch.randn(300, 300).half()
    emulation = HalfEmulation()
    with torch.inference_mode(), emulation:
        first = model(x)
    with emulation:
        out = model(x)
        out.sum().backward()
    assert torch.equal(first, out)
    expected = x.double().sum(0).expand(300, 300)
    assert relative(model.weight.grad, expected) <= 2 * one_rounding(expected, torch.float16)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segment_gives_the_same_gradients(reentrant):
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).half()
    x = torch.randn(32, 64).half()
    grads = []
    for run in (model, lambda v: checkpoint(model, v, use_reentrant=reentrant)):
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        with HalfEmulation() as emulation:
            run(inputs).float().sum().backward()
        assert emulation.rerouted["mm", "backward"] == 4
        grads.append([inputs.grad, *(p.grad for p in model.parameters())])
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


def test_grad_scaler_with_autocast():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    twin = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with HalfEmulation() as emulation:
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        scaler.scale(out.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert {phase for _, phase in emulation.rerouted} == {"forward", "backward"}
    twin(x.double()).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        step = (q.detach() - p.detach().double()) / 0.5
        # Five stored half values between input and weight gradient, 2^-11 each, and as many for the
        # rounded weights and inputs.
        assert relative(step, q.grad) <= 10 * 2.0**-11


def stored_bytes(model, x):
    """Bytes of distinct storages kept for backward, those of parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    total = sum(t.untyped_storage().nbytes() for ptr, t in kept.items() if ptr not in own)
    return total, out


def test_resnet50_stores_half_the_activations():
    model = torchvision.models.resnet50(weights=None)
    x = torch.randn(8, 3, 32, 32)
    full, _ = stored_bytes(model, x)
    model.half()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    emulation = HalfEmulation()
    with emulation:
        half, out = stored_bytes(model, x.half())
        out.float().sum().backward()
    assert half <= 0.55 * full
    assert emulation.rerouted["convolution", "forward"] == 53
    assert emulation.rerouted["convolution_backward", "backward"] == 53

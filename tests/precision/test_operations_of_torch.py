"""Every operation that torch's own database and lists know, against float64 and CUDA's autocast."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks import operations_of_torch as table
from mprun.precision.autocast import cuda_lists
from mprun.precision.emulation import HalfEmulation

from .emulated import half

AMP_LISTS = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the database's own samples
@half
def test_each_call_is_the_float64_one_rounded_once(dtype):
    pytest.importorskip("expecttest")
    compared, raised = table.compare(dtype)
    assert not raised
    assert {name: calls.wrong for name, calls in compared.calls.items() if calls.wrong} == {}
    assert sum(calls.count for calls in compared.calls.values()) > 10_000
    if dtype is torch.float16 and torch.__version__.partition("+")[0] in table.PAGE.read_text():
        assert table.PAGE.read_text(encoding="utf-8") == table.page(compared)


def test_the_comparison_sees_a_sum_in_16_bits():
    # What the native kernel makes of 8192 ones: 2048.
    compared = table.Compared(torch.float16)
    with compared:
        torch.ones(8192).half().cumsum(0)
        F.layer_norm(torch.ones(8192, 4).half(), [4], torch.ones(4).half().requires_grad_())
    exact = torch.tensor([1.0, 1 + 2**-11, 1 + 2**-10], dtype=torch.float64)
    rounded = exact.half()
    assert table.excess(rounded, exact, exact.float()) == 0
    assert table.excess(rounded.nextafter(rounded + 1), exact, exact.float()) > 0.4


# name: of a column of 8192 ones and what makes weights of one, 1, whose gradient is 8192.
SUMS = {
    "layer_norm": lambda x, one: F.layer_norm(x, [1], one(1), one(1), eps=1.0),
    "grid_sample": lambda x, one: F.grid_sample(
        one(1, 1, 1, 1), torch.zeros(1, 8192, 1, 2, dtype=x.dtype), align_corners=True
    ),
    "conv_tbc": lambda x, one: torch.conv_tbc(x.view(8192, 1, 1), one(1, 1, 1), one(1)),
    "index": lambda x, one: one(1)[torch.zeros(8192, dtype=torch.long)],
    "sparse": lambda x, one: torch.sparse.mm(
        x.view(1, 8192).expand(4, -1).to_sparse(),
        torch.ones_like(x),  # not in working memory
    ),
}


@half
@pytest.mark.parametrize("name", SUMS)
def test_8192_ones_are_8192(name, dtype):
    kept = []

    def one(*shape):
        kept.append(torch.ones(shape, dtype=dtype, requires_grad=True))
        return kept[-1]

    with HalfEmulation(dtype):
        result = SUMS[name](torch.ones(8192, 1, dtype=dtype), one)
        if kept:
            result.sum().backward()
    found = [weight.grad for weight in kept] or [result]
    assert max(float(value.abs().max()) for value in found) == 8192


@half
def test_norms_written_by_hand_are_those_of_cuda(dtype):
    """A norm over 512 channels of 3000 overflows FP16 wherever it is stored in it: in the modes
    with 16-bit weights on CUDA too. amp computes it in FP32 there, so here as well."""
    x = torch.full((2, 512), 3000.0, dtype=dtype)

    def rms(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    with HalfEmulation(dtype):
        for norm, exact in ((rms, 1.0), (F.normalize, 512**-0.5)):
            overflowed = dtype is torch.float16
            found = norm(x)
            assert bool((found == 0).all()) == overflowed
            lists = cuda_lists()
            with torch.autocast("cpu", dtype):
                assert torch.allclose(norm(x).double(), torch.tensor(exact).double(), rtol=2**-7)
            del lists


def test_what_cuda_has_no_kernel_of_is_refused_by_name():
    x = torch.rand(4, 4).half()
    for call in (
        lambda: torch.cdist(x, x),
        lambda: torch.igamma(x, x),
        lambda: torch.histc(x),
        lambda: torch.linalg.qr(x),
        lambda: torch.special.ndtri(x),
    ):
        with HalfEmulation(), pytest.raises(NotImplementedError, match="CUDA has no fp16 kernel"):
            call()


def test_mixed_dtypes_are_the_errors_that_cuda_makes_of_them():
    """Else a network trains here and ends on the GPU."""
    h = torch.randn(4, 8).half()
    for call in (
        lambda: torch.zeros(4, 8).index_put_((torch.tensor([0, 2]),), h[:2]),
        lambda: torch.zeros(4, 8).index_add_(0, torch.tensor([0, 2]), h[:2]),
        lambda: torch.zeros(4, 8).scatter_add_(0, torch.zeros(4, 8).long(), h),
        lambda: F.cross_entropy(h, torch.arange(4), torch.ones(8)),
        lambda: nn.GRU(8, 8).half()(h[:, None], torch.zeros(1, 1, 8)),
        lambda: nn.LSTM(8, 8).half()(h[:, None], (torch.zeros(1, 1, 8),) * 2),
    ):
        with HalfEmulation(), pytest.raises(RuntimeError, match=r"dtype|scalar type|data type"):
            call()


def test_results_that_are_no_numbers_of_16_bits_stay_what_they_are():
    with HalfEmulation():
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 8).half(), [5, 3])
        assert packed.batch_sizes.dtype is torch.int64
        assert nn.GRU(8, 6).half()(packed)[0].data.dtype is torch.float16
        weights = torch.ones(70_000).half()
        assert torch.bincount(torch.zeros(70_000).long(), weights=weights) == 70_000
        out = torch.empty(3).half()
        torch.cumsum(torch.ones(3).half(), 0, dtype=torch.float16, out=out)
        assert out.tolist() == [1, 2, 3]
        assert nn.GRU(8, 8).half()(torch.empty(3, 0, 8).half())[0].shape == (3, 0, 8)


def test_softmax_of_which_a_dtype_is_asked_for():
    lists, y = cuda_lists(), torch.randn(2, 4).half()
    with HalfEmulation(), torch.autocast("cpu", torch.float16):
        assert F.cross_entropy(y, torch.tensor([0, 1])).dtype is torch.float32
        assert F.softmax(y, -1, dtype=torch.float32).dtype is torch.float32
        assert F.log_softmax(y, -1, dtype=torch.float16).dtype is torch.float16
    assert lists is not None


def test_einsum_is_a_product():
    """On CUDA's list of 16 bits; the arguments of torch's own test do not fit (`ELSEWHERE`)."""
    lists, a = cuda_lists(), torch.ones(2, 3)
    with HalfEmulation(), torch.autocast("cpu", torch.float16):
        assert torch.einsum("ij,kj->ik", a, a).dtype is torch.float16
    assert lists is not None


def test_a_few_rows_are_written_in_place():
    big = torch.zeros(8, 4).half()
    with HalfEmulation() as emulation:
        big[torch.tensor([3, 5])] = torch.ones(2, 4).half()
        big.index_put_((torch.zeros(5000).long(),) * 2, torch.ones(5000).half(), True)
    assert big[3, 0] == 1 and big[0, 0] == 5000 and not emulation.rerouted


def of_header(macro):
    """The names on one of CUDA's lists, as torch ships them."""
    found = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:[^\n]*\\\n)+[^\n]*)", AMP_LISTS)
    names = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", found[1])
    return [f"{name}.{overload}".rstrip(".") for name, overload in names]


@pytest.mark.parametrize(
    ("macro", "fewest"),
    [("LOWER_PRECISION_FP", 30), ("FP32", 50), ("FP32_SET_OPT_DTYPE", 10), ("PROMOTE", 10)],
)
def test_every_name_on_the_lists_that_torch_ships_is_on_ours(macro, fewest):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names, lists = of_header(macro), cuda_lists()
    missing = [name for name in names if not has(f"aten::{name}", "AutocastCPU")]
    assert len(names) >= fewest and missing == [] and lists is not None


def cases():
    """(list, name, arguments) of torch's own tests of CUDA's autocast, on a CPU."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    table.thaw()
    torch.manual_seed(0)
    lists = AutocastTestLists(torch.device("cpu"))
    for kind in ("fp16", "fp32", "need_autocast_promote"):
        for space in ("torch", "nn", "methods"):
            for name, args, *more in getattr(lists, f"{space}_{kind}", []):
                kwargs = more[0] if more and isinstance(more[0], dict) else {}
                where = {"torch": torch, "nn": torch._C._nn, "methods": torch.Tensor}[space]
                yield kind, space, name, getattr(where, name, None), args, kwargs


def ready(tree, to=None):
    """The tree with fresh leaves of the graph in place of its tensors, of dtype `to`."""

    def one(value):
        fits = isinstance(value, torch.Tensor) and value.is_floating_point()
        fits = fits and value.dtype is not torch.float64
        return value.detach().to(to or value.dtype).requires_grad_() if fits else value

    return tree_map(one, tree)


# cuDNN's own, a CUDA kernel, and one whose arguments do not fit (torch's test skips it as well).
ELSEWHERE = {
    *("cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "einsum"),
}


@pytest.mark.filterwarnings("ignore")  # deprecated ones are on the lists too
def test_what_torch_tests_of_autocast_on_cuda_holds_here(dtype=torch.float16):
    """Result and gradient equal those of the call with its arguments cast by hand."""
    checked, lists = set(), cuda_lists()
    for kind, space, name, function, args, kwargs in cases():
        if function is None or name in ELSEWHERE:
            continue
        wanted = dtype if kind == "fp16" else torch.float32
        outcomes = []
        for to in (None, wanted):
            given = ready((args, kwargs), to)
            with HalfEmulation(dtype):
                with torch.autocast("cpu", dtype, enabled=to is None):
                    result = function(*given[0], **given[1])
                first = next(t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
                if first.requires_grad:
                    first.float().sum().backward()
            leaves = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
            outcomes.append((first.detach(), [t.grad for t in leaves if t.is_leaf]))
        (own, own_grads), (by_hand, grads) = outcomes
        assert own.dtype is wanted, (space, name, own.dtype)
        assert torch.equal(own.nan_to_num(), by_hand.nan_to_num()), (space, name)
        for one, other in zip(own_grads, grads, strict=True):
            assert (one is None) == (other is None)
            # Cast by autograd, a gradient has the dtype of its argument: compare in the narrower.
            if one is not None:
                narrow = min(one.dtype, other.dtype, key=lambda d: d.itemsize)
                close = {"rtol": 2 * torch.finfo(narrow).eps, "atol": torch.finfo(narrow).tiny}
                close["equal_nan"] = True
                assert torch.allclose(*(g.to(narrow) for g in (one, other)), **close), name
        checked.add((kind, name))
    assert len(checked) > 60 and lists is not None


def test_binary_cross_entropy_is_an_error_under_autocast_as_on_cuda():
    lists, x = cuda_lists(), torch.rand(4).requires_grad_()
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="unsafe"):
        nn.BCELoss()(x, x.detach())
    assert lists is not None


@pytest.mark.slow
def test_torchs_own_lists_are_back_afterwards():
    script = """
import torch
from mprun.precision.autocast import cuda_lists
lists, dtypes = cuda_lists(), []
for _ in range(2):
    with torch.autocast("cpu", torch.float16):
        dtypes.append(torch.ones(4).half().softmax(-1).dtype)
    lists = None
print(dtypes)
"""
    command = [sys.executable, "-W", "error", "-c", script]  # torch warns of kernels replaced
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout == "[torch.float32, torch.float16]\n", ended.stderr

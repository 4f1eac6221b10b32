"""The stand-ins for CUDA's kernels: in which dtype they compute, and nothing left behind."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun.extensions.bench.roofline.count import Counter
from mprun.extensions.bench.roofline.cuda_kernels import cuda_kernels
from mprun.extensions.bench.roofline.shape_only import weightless
from mprun.precision.autocast import cuda_lists

from ...helpers import assert_same_bits

# Of torch's documentation, "CUDA Op-Specific Behavior".
IN_16_BITS = {
    "linear": lambda t: F.linear(t(4, 8), t(3, 8)),
    "matmul": lambda t: t(4, 8) @ t(8, 3),
    "bmm": lambda t: torch.bmm(t(2, 4, 8), t(2, 8, 3)),
    "conv2d": lambda t: F.conv2d(t(1, 3, 8, 8), t(4, 3, 3, 3)),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(1, 3, 8, 8), t(3, 4, 3, 3)),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(4, 8), t(8, 3)),
    "mv": lambda t: torch.mv(t(4, 8), t(8)),
}
IN_FP32 = {
    "pow": lambda t: t(4).half().pow(2.0),
    "exp": lambda t: t(4).half().exp(),
    "softmax": lambda t: F.softmax(t(4, 8).half(), 1),
    "log_softmax": lambda t: F.log_softmax(t(4, 8).half(), 1),
    "layer_norm": lambda t: F.layer_norm(t(4, 8).half(), (8,)),
    "group_norm": lambda t: F.group_norm(t(2, 4, 3).half(), 2),
    "sum": lambda t: t(4).half().sum(),
    "mse_loss": lambda t: F.mse_loss(t(4).half(), t(4).half()),
    "norm": lambda t: t(4).half().norm(),
    "cumsum": lambda t: t(4).half().cumsum(0),
}
WIDEST = {
    "addcmul": lambda t: torch.addcmul(t(4), t(4).half(), t(4).half()),
    "dot": lambda t: torch.dot(t(4), t(4).half()),
}
UNCHANGED = {
    "relu": lambda t: t(4).half().relu(),
    "max_pool2d": lambda t: F.max_pool2d(t(1, 3, 8, 8).half(), 2),
    "avg_pool3d": lambda t: F.avg_pool3d(t(1, 3, 8, 8, 8).half(), 2),
    "batch_norm": lambda t: F.batch_norm(t(2, 3, 4).half(), None, None, training=True),
    "sigmoid": lambda t: t(4).half().sigmoid(),
    "cat": lambda t: torch.cat([t(4).half(), t(4).half()]),
}
WANTED = dict.fromkeys(IN_16_BITS | UNCHANGED, torch.float16)
WANTED |= dict.fromkeys(IN_FP32 | WIDEST, torch.float32)


def dtypes(tensor):
    every = IN_16_BITS | UNCHANGED | IN_FP32 | WIDEST
    return {name: make(tensor).dtype for name, make in every.items()}


def test_an_operation_computes_in_the_dtype_of_cudas_lists():
    with cuda_kernels(lambda *_: None), weightless(), torch.autocast("cpu", dtype=torch.float16):
        assert dtypes(torch.empty) == WANTED


@pytest.mark.gpu
def test_cuda_itself_computes_in_that_dtype():
    with torch.autocast("cuda", dtype=torch.float16):
        assert dtypes(lambda *size: torch.rand(*size, device="cuda")) == WANTED


@pytest.mark.parametrize("lists", [lambda: None, cuda_lists], ids=["alone", "beside amp"])
def test_a_weight_is_cast_once_in_a_block_and_softmax_is_one_kernel(lists):
    held = lists()  # as a prepared amp script of the same process holds them
    counter = Counter("ieee")
    with cuda_kernels(counter.write), weightless():
        layer, x = nn.Linear(8, 8, bias=False), torch.empty(2, 8, dtype=torch.float16)
        with counter, torch.autocast("cpu", dtype=torch.float16):
            layer(layer(x))
            casts = [row.bytes for row in counter.rows if row.kind == "cast"]
            before = len(counter.rows)
            F.softmax(x, 1)
    assert casts == [64 * (4 + 2)]
    assert [row.bytes for row in counter.rows[before:]] == [16 * (2 + 4)]
    del held


def test_torch_is_as_before_afterwards():
    x = torch.linspace(-1, 1, 64).requires_grad_()
    lstm = nn.LSTM(4, 4)

    def results():
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            dtypes = (x.exp().dtype, F.softmax(x, 0).dtype, F.linear(x, x[None]).dtype)
        dropped = F.dropout(x, 0.5).detach()
        outputs, _ = lstm(x.detach().view(4, 4, 4))
        return dtypes, dropped, outputs.detach()

    before = results()
    with cuda_kernels(lambda *_: None), weightless():
        F.dropout(torch.empty(4), 0.5)
    assert_same_bits(results(), before)

"""Torch's CPU build made to take the operations that CUDA would, on tensors without values.

A step is counted on fake CPU tensors: fake CUDA tensors have no backward pass without a driver
(the engine asks for the device), and meta tensors no autocast. What a CPU does otherwise than CUDA
is put right here, for as long as a count runs and for the whole process:

autocast   the op lists of CUDA in place of the CPU's (ATen/autocast_mode.h)
dropout    one kernel that keeps a byte per number, in place of three
recurrent  one call per layer stack, in place of its matrix products (see `recurrent`)
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mprun.bench.roofline.recurrent import GATES, recurrent_kernel
from mprun.bench.roofline.rows import Write

_KEY = "AutocastCPU"
# The part of CUDA's lists that a CPU lacks or has otherwise; what is on neither of these two lists
# computes in FP32 (torch documentation, "CUDA Op-Specific Behavior").
_LOWER = {
    "_convolution",
    "convolution",
    "addmv",
    "addr",
    "einsum",
    "mv",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
}
_WIDEST = {
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "index_put",
    "tensordot",
    "scatter_add",
}
# These read 16 bits and compute in FP32 in one kernel: autocast sets their dtype argument.
_FP32_BY_ARGUMENT = {
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "sum",
    "sum.dim_IntList",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
}
_HALF_TO_FLOAT = {
    "softmax": torch.ops.aten._softmax,
    "log_softmax": torch.ops.aten._log_softmax,
}
# Kernels of the CUDA library itself, which fake CPU tensors never reach.
_NEVER = {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"}


@contextmanager
def cuda_kernels(write: Write) -> Iterator[None]:
    """Within it operations on CPU tensors are those that CUDA would run; `write` takes the rows of
    recurrent layers. Not for use while another thread computes."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Oo]verriding a previously registered")
            for name, kernel in _autocast_kernels():
                library.impl(name, kernel, _KEY)
            library.impl("dropout", _dropout, "AutogradCPU")
            for name in GATES:
                library.impl(f"{name}.input", recurrent_kernel(name, write), "AutogradCPU")
        yield


def _dropout(inputs: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return inputs
    return torch.ops.aten.native_dropout(inputs, p, True)[0]


def _autocast_kernels() -> Iterator[tuple[str, Callable]]:
    """(name of an operator, its kernel under autocast) wherever CUDA and CPU differ."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        if name == full or name in _NEVER:
            continue
        on_cuda, on_cpu = has(full, "AutocastCUDA"), has(full, _KEY)
        if on_cpu and not on_cuda:
            yield name, torch.library.fallthrough_kernel
        elif on_cuda and not on_cpu:
            yield name, _under_autocast(name)


def _under_autocast(name: str) -> Callable:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if packet in _HALF_TO_FLOAT and args[0].dtype is torch.float16:
                # CUDA's kernel takes float16 and returns float32; for bfloat16 there is a cast.
                return _HALF_TO_FLOAT[packet](args[0], args[1], True)
            if name in _FP32_BY_ARGUMENT:
                if _is_16_bit(args[0]) and kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float32
                return operator(*args, **kwargs)
            return operator(*_cast(args, target(args)), **_cast(kwargs, target(args)))

    def target(args) -> torch.dtype:
        if packet in _LOWER:
            return torch.get_autocast_dtype("cpu")
        if packet in _WIDEST:
            found: list[Tensor] = []
            tree_map(lambda t: found.append(t) if isinstance(t, Tensor) else None, args)
            return torch.float32 if any(t.dtype is torch.float32 for t in found) else None
        return torch.float32

    return kernel


def _is_16_bit(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _cast(tree, dtype: torch.dtype | None):
    def one(value):
        fits = isinstance(value, Tensor) and value.is_floating_point() and dtype is not None
        return value.to(dtype) if fits and value.dtype is not torch.float64 else value

    return tree_map(one, tree)

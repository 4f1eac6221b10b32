"""CUDA's operation lists for ``torch.autocast("cpu")``: amp on a CPU casts what amp on CUDA casts.

torch's lists for a CPU differ: softmax, layer_norm, pow, rsqrt, exp, log, sum, norms and forty more
compute in 16 bits there and in FP32 on CUDA; for fft and linalg it is the other way round. A
hand-written norm that overflows FP16 on a CPU would not overflow on the GPU that it stands for.

Sources: ATen/autocast_mode.h (the lists), ATen/autocast_mode.cpp (cat, binary_cross_entropy),
torch documentation, "CUDA Ops that can autocast to float16".
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mprun.torch_private import (
    below_cpu_autocast,
    has_kernel,
    operator_names,
    replacing_kernels,
    tree_leaves,
    tree_map,
)

F32 = torch.float32
_KEY = "AutocastCPU"
# CUDA computes these in 16 bits, a CPU leaves them alone (AT_FORALL_LOWER_PRECISION_FP).
_LOWER = frozenset(
    """
    _convolution convolution addmv addr einsum mv chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention
    """.split()
)
# Computed in the widest dtype among the arguments (AT_FORALL_PROMOTE).
_WIDEST = frozenset(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """.split()
)
# Computed in FP32 by a dtype argument, without a copy of the input (AT_FORALL_FP32_SET_OPT_DTYPE);
# operations on none of these lists get their arguments cast to FP32.
_FP32_BY_ARGUMENT = frozenset(
    """
    softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList
    linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
    """.split()
)
_HALF_TO_FLOAT = ("softmax", "log_softmax")
# Kernels of the CUDA library itself, which CPU tensors never reach.
_NEVER = frozenset({"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"})
# On both lists, but not alike.
_OTHERWISE = frozenset({"binary_cross_entropy", "grid_sampler"})
_half_to_float = False
_held: weakref.WeakValueDictionary[str, torch.library.Library] = weakref.WeakValueDictionary()


def cuda_lists() -> torch.library.Library:
    """Make ``torch.autocast("cpu")`` follow CUDA's lists, process-wide, while the result lives.

    It costs a few milliseconds, and some microseconds at each call of an operation that is not on a
    CPU's lists.
    """
    library = _held.get("lists")
    if library is None:
        library = _held["lists"] = torch.library.Library("aten", "IMPL")
        with replacing_kernels():
            for name, kernel in _kernels():
                library.impl(name, kernel, _KEY)
    return library


@contextmanager
def half_to_float() -> Iterator[None]:
    """Follow CUDA's lists, with CUDA's softmax kernel, which reads float16 and writes float32.

    A CPU only has it for tensors without values. Process-wide.
    """
    global _half_to_float
    before, lists = _half_to_float, cuda_lists()
    _half_to_float = True
    try:
        yield
    finally:
        _half_to_float = before
        del lists  # held until here


def _kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name of an operator, its kernel under autocast) wherever CUDA and CPU differ."""
    for full in operator_names():
        name = full.removeprefix("aten::")
        if name == full or name in _NEVER:
            continue
        on_cuda, on_cpu = has_kernel(full, "AutocastCUDA"), has_kernel(full, _KEY)
        if on_cpu and not on_cuda:
            yield name, torch.library.fallthrough_kernel
        elif on_cuda and (not on_cpu or name in _OTHERWISE):
            yield name, _banned if name == "binary_cross_entropy" else _under(name)


def _banned(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe under autocast, "
        "and an error on CUDA; use binary_cross_entropy_with_logits or BCEWithLogitsLoss"
    )


def _under(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with below_cpu_autocast():
            half = args[0].dtype if isinstance(args[0], Tensor) else None
            if name in _FP32_BY_ARGUMENT:
                asked = kwargs.get("dtype")
                if packet in _HALF_TO_FLOAT:  # their dtype may be the third argument
                    asked, args = (*args[2:], asked)[0], args[:2]
                    kwargs["dtype"] = asked
                if asked is None and half in (torch.float16, torch.bfloat16):
                    kwargs["dtype"] = F32
                    if _half_to_float and packet in _HALF_TO_FLOAT and half is torch.float16:
                        return getattr(torch.ops.aten, f"_{packet}")(*args, True)
                return operator(*args, **kwargs)
            if packet in _WIDEST:
                dtypes = (getattr(leaf, "dtype", None) for leaf in tree_leaves((args, kwargs)))
                if F32 not in dtypes:
                    return operator(*args, **kwargs)
            dtype = torch.get_autocast_dtype("cpu") if packet in _LOWER else F32
            args, kwargs = _cast((args, kwargs), dtype)
            return operator(*args, **kwargs)

    return kernel


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def one(value: Any) -> Any:
        fits = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if fits and value.dtype is not torch.float64 else value

    return tree_map(one, tree)

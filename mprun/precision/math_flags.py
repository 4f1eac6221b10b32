"""Pin and read back every switch by which torch lowers the precision of products on its own.

Stock torch leaves convolutions and RNNs in TF32 on Ampere and later and lets half GEMMs reduce
in half, so an unpinned "FP32" baseline is not FP32 (torch documentation, CUDA semantics).
Flags are process-wide: one run, one process.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FP32_PRODUCTS = {
    "cuda.matmul": lambda: torch.backends.cuda.matmul,
    "cudnn.conv": lambda: torch.backends.cudnn.conv,
    "cudnn.rnn": lambda: torch.backends.cudnn.rnn,
    "mkldnn.matmul": lambda: torch.backends.mkldnn.matmul,
    "mkldnn.conv": lambda: torch.backends.mkldnn.conv,
    "mkldnn.rnn": lambda: torch.backends.mkldnn.rnn,
}
_REDUCTIONS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def pin_math_flags(
    fp32_math: str, deterministic: bool = False, autotune: bool | None = None
) -> None:
    """Set every flag: FP32 products to "ieee" or "tf32", all 16-bit reductions to FP32.

    `deterministic` also selects deterministic kernels and turns cuDNN's autotuner off, because it
    may pick another kernel in another run; without it the autotuner is on. `autotune` says
    otherwise.
    """
    with warnings.catch_warnings():
        # The older switches too, about which some versions warn: where they say something else,
        # torch.compile, which asks for them, ends in an error (pytorch#166387).
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = fp32_math == "tf32"
        torch.backends.cudnn.allow_tf32 = fp32_math == "tf32"
    _pin_fp32_products(fp32_math)
    for name in _REDUCTIONS:
        if hasattr(torch.backends.cuda.matmul, name):
            setattr(torch.backends.cuda.matmul, name, False)
    torch.backends.cudnn.benchmark = not deterministic if autotune is None else autotune
    torch.backends.cudnn.deterministic = deterministic
    if deterministic != torch.are_deterministic_algorithms_enabled():
        # Not called for nothing: its first call imports torch's compiler, which takes a second.
        torch.use_deterministic_algorithms(deterministic)
        # It would launch a kernel for every new tensor; nothing here reads what it has not written.
        torch.utils.deterministic.fill_uninitialized_memory = False


@contextmanager
def ieee_fp32() -> Iterator[None]:
    """FP32 products in full FP32 inside the block (used for evaluation), as before after it."""
    before = {name: backend().fp32_precision for name, backend in _FP32_PRODUCTS.items()}
    _pin_fp32_products("ieee")
    try:
        yield
    finally:
        for name, value in before.items():
            _FP32_PRODUCTS[name]().fp32_precision = value


def read_math_flags() -> dict[str, str | bool]:
    """The flags in force now, as torch reports them."""
    flags: dict[str, str | bool] = {
        f"{name}.fp32_precision": backend().fp32_precision
        for name, backend in _FP32_PRODUCTS.items()
    }
    for name in _REDUCTIONS:
        if hasattr(torch.backends.cuda.matmul, name):
            flags[f"cuda.matmul.{name}"] = bool(getattr(torch.backends.cuda.matmul, name))
    flags["cudnn.benchmark"] = torch.backends.cudnn.benchmark
    flags["cudnn.deterministic"] = torch.backends.cudnn.deterministic
    flags["deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
    return flags


def _pin_fp32_products(fp32_math: str) -> None:
    for name, backend in _FP32_PRODUCTS.items():
        # The CPU library's own lower-precision FP32 kernels stay off in every mode.
        backend().fp32_precision = fp32_math if name.startswith("cu") else "ieee"

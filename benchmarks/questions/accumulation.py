"""The precision of sums: embedding gradients, and products over a long dimension."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.precision import pin_math_flags
from mprun.precision.emulation import HalfEmulation
from questions.answer import Answer, milliseconds

HITS = 8192
HALF = (torch.float16, torch.bfloat16)


def embedding_gradient(device: torch.device) -> Answer:
    """Find out whether 8192 gradients of one row are summed in FP32 or in 16 bits."""
    rows, numbers = [], {}
    for name, gather, hits, forward_context in _gathers(device):
        for dtype in HALF:
            with forward_context(dtype):
                ones = _row_gradient(gather, torch.ones(hits, 8), dtype, device)
                values = torch.rand(hits, 8, generator=torch.Generator().manual_seed(0))
                found = _row_gradient(gather, values, dtype, device)
            exact = values.to(dtype).double().sum(0)
            error = float(((found - exact).abs() / exact).max())
            roundings = error / (torch.finfo(dtype).eps / 2)
            kind = str(dtype).removeprefix("torch.")
            numbers[f"{name} {hits} {kind}"] = {"ones": float(ones[0]), "roundings": roundings}
            rows.append((name, str(hits), kind, f"{float(ones[0]):g}", f"{roundings:.2f}"))
    embedding = [row for row in rows if row[0] == "F.embedding" and row[1] == str(HITS)]
    sums = ", ".join(
        f"{row[3]} in {row[2]} ({row[4]} roundings on random values)" for row in embedding
    )
    text = f"F.embedding on {device.type} adds {HITS} ones up to {sums}; exact is {HITS}."
    header = ("gradient of", "hits", "dtype", "ones add up to", "largest error in roundings")
    return Answer(text, numbers, header, tuple(rows))


def _gathers(device: torch.device):
    """Return (name, function of weights and indices, number of hits, arithmetic around it)."""
    native = lambda dtype: nullcontext()  # noqa: E731
    yield "F.embedding", lambda w, i: F.embedding(i, w), HITS, native
    # CUDA has another kernel for up to 3072 indices.
    yield "F.embedding", lambda w, i: F.embedding(i, w), 3000, native
    yield "w[indices]", lambda w, i: w[i], HITS, native
    yield "index_select", lambda w, i: w.index_select(0, i), HITS, native
    if device.type == "cpu":
        yield "F.embedding, emulated", lambda w, i: F.embedding(i, w), HITS, HalfEmulation
    else:
        yield "F.embedding, deterministic", lambda w, i: F.embedding(i, w), HITS, _deterministic


@contextmanager
def _deterministic(dtype: torch.dtype) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _row_gradient(
    gather: Callable[[Tensor, Tensor], Tensor],
    gradient: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the gradient (8,) of the row that every index names, float64 on the CPU."""
    weight = torch.zeros(4, 8, dtype=dtype, device=device, requires_grad=True)
    indices = torch.full((len(gradient),), 2, device=device)
    gather(weight, indices).backward(gradient.to(device, dtype))
    return weight.grad[2].double().cpu()


def reduced_precision(device: torch.device) -> Answer:
    """Measure the accuracy that reduced-precision reductions cost, and the speed they gain."""
    rows, numbers = [], {}
    for dtype in HALF:
        for m, n, k in ((64, 64, 2**17), (256, 256, 2**15), (1024, 1024, 8192), (4096, 4096, 4096)):
            generator = torch.Generator(device).manual_seed(0)
            a = torch.rand(m, k, device=device, generator=generator).to(dtype)
            # Sums of about 2048: far from overflow, and far from FP16's coarse range of integers.
            b = (torch.rand(k, n, device=device, generator=generator) * (8192 / k)).to(dtype)
            exact = a[:256].double() @ b[:, :256].double()
            base = None
            for name, settings in _reductions(dtype):
                with _set(settings) as refused:
                    if refused:
                        continue
                    error = ((a @ b)[:256, :256].double() - exact).norm() / exact.norm()
                    ms = milliseconds(lambda a=a, b=b: a @ b, windows=5)
                base = base or ms
                kind, size = str(dtype).removeprefix("torch."), f"{m}x{k} @ {k}x{n}"
                roundings = float(error) / (torch.finfo(dtype).eps / 2)
                numbers[f"{kind} {size} {name}"] = {
                    "relative error": float(error),
                    "roundings": roundings,
                    "ms": ms,
                    "speed": base / ms,
                }
                rows.append(
                    (
                        kind,
                        size,
                        name,
                        f"{float(error):.2e}",
                        f"{roundings:.2f}",
                        f"{base / ms:.2f}x",
                    )
                )
    pin_math_flags("ieee")
    worst = {
        name: max(float(row[4]) for row in rows if row[2] == name)
        for name in dict.fromkeys(row[2] for row in rows)
    }
    fastest = {name: max(float(row[5][:-1]) for row in rows if row[2] == name) for name in worst}
    text = "; ".join(
        f"{name}: error up to {worst[name]:.2f} roundings, at most {fastest[name]:.2f}x the speed"
        for name in worst
    )
    header = ("dtype", "product", "reductions", "relative L2 error", "in roundings", "speed")
    return Answer(text + ".", numbers, header, tuple(rows))


def _reductions(dtype: torch.dtype) -> Iterator[tuple[str, dict]]:
    """Return name and flags of torch.backends.cuda.matmul, the pinned setting first."""
    flag = f"allow_{'fp16' if dtype is torch.float16 else 'bf16'}_reduced_precision_reduction"
    yield "FP32 (as mprun pins)", {flag: False}
    yield "16 bit allowed (torch's default)", {flag: True}
    yield "FP32, no split-K (cuBLASLt alone has it)", {flag: (False, False)}
    if dtype is torch.float16:
        yield "FP16 accumulation", {"allow_fp16_accumulation": True}


@contextmanager
def _set(settings: dict) -> Iterator[bool]:
    """Set flags inside, pin all again afterwards; yield whether this torch refuses them."""
    refused, library = False, torch.backends.cuda.preferred_blas_library()
    pin_math_flags("ieee")
    try:
        for name, value in settings.items():
            setattr(torch.backends.cuda.matmul, name, value)
            if isinstance(value, tuple):  # cuBLAS refuses it, but only in a product
                torch.backends.cuda.preferred_blas_library("cublaslt")
    except (AttributeError, TypeError, RuntimeError):
        refused = True
    try:
        yield refused
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        pin_math_flags("ieee")

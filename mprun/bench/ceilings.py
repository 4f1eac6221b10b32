"""What this device can do at best, measured: copy bandwidth and the rate of matrix products.

On random data, because products of zeros draw less power and clock higher. A product is 8192^3 on
CUDA and 1024^3 on a CPU; a copy moves 1 GiB on CUDA and 256 MiB on a CPU, far beyond the caches.
"""

import time
from collections.abc import Callable

import torch

from mprun.bench.measure import synchronise
from mprun.precision import pin_math_flags

_WINDOWS = 5
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def measure_ceilings(device: torch.device, window_s: float = 0.2, size: int | None = None) -> dict:
    """{"bandwidth": bytes/s, read and written together, "flops": {format: FLOP/s}, ...}.

    A multiply-add is 2 FLOP. Formats: fp32 (TF32 off), tf32 where the GPU has it, fp16, bf16; each
    is the median of five windows of at least `window_s` seconds. size: side of the matrices, for
    tests. Leaves the flags of FP32 products at "ieee".
    """
    on_gpu = device.type == "cuda"
    size = size or (8192 if on_gpu else 1024)
    elements = 2**28 if on_gpu else 2**26  # float32
    source = torch.rand(elements, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    bandwidth = moved / _median_s(lambda: target.copy_(source), device, window_s)
    del source, target
    flops = {}
    for name, dtype, math in _formats(device):
        pin_math_flags(math)
        a, b = (torch.rand(size, size, device=device).sub_(0.5).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = _median_s(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, window_s)
        flops[name] = 2 * size**3 / seconds
    pin_math_flags("ieee")
    return {
        "bandwidth": bandwidth,
        "flops": flops,
        "copy_bytes": moved // 2,
        "matmul_size": size,
        "windows": _WINDOWS,
        "threads": None if on_gpu else torch.get_num_threads(),
    }


def _formats(device: torch.device) -> list[tuple[str, torch.dtype, str]]:
    """(name, dtype of the operands, FP32 flag) of each rate that the device has."""
    formats = [("fp32", torch.float32, "ieee")]
    modern = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if modern:
        formats.append(("tf32", torch.float32, "tf32"))
    halves = _HALF if modern or device.type == "cpu" else {"fp16": torch.float16}
    return formats + [(name, dtype, "ieee") for name, dtype in halves.items()]


def _median_s(work: Callable[[], object], device: torch.device, window_s: float) -> float:
    """Seconds of one call of `work`: median over windows of several calls."""
    for _ in range(2):
        work()
    once = _window_s(work, device, 1)
    count = max(1, round(window_s / max(once, 1e-7)))
    return sorted(_window_s(work, device, count) / count for _ in range(_WINDOWS))[_WINDOWS // 2]


def _window_s(work: Callable[[], object], device: torch.device, count: int) -> float:
    synchronise(device)
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            work()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1000
    before = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - before

"""What this device can do at best, measured: copy bandwidth and the rate of matrix products.

On random data, because products of zeros draw less power and clock higher. A product is 8192^3 on
CUDA and 1024^3 on a CPU; a copy moves 1 GiB on CUDA and 256 MiB on a CPU, far beyond the caches.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from mprun.bench.measure import synchronise
from mprun.precision import pin_math_flags

_WINDOWS = 5
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def measure_ceilings(device: torch.device, seconds: float = 6.0, size: int | None = None) -> dict:
    """{"bandwidth": bytes/s, read and written together, "flops": {format: FLOP/s}, ...}.

    A multiply-add is 2 FLOP. Formats: fp32 (TF32 off), tf32 where the GPU has it, fp16, bf16; each
    is the median of up to five windows, of fewer where `seconds` in all do not allow them. size:
    side of the matrices, for tests. Leaves the flags of FP32 products at "ieee".
    """
    on_gpu = device.type == "cuda"
    size = size or (8192 if on_gpu else 1024)
    formats = _formats(device)
    each = seconds / (1 + len(formats))
    windows = {}
    elements = 2**28 if on_gpu else 2**26  # float32
    bandwidth, windows["copy"] = _copied_per_s(elements, device, each)
    flops = {}
    for name, dtype, math in formats:
        pin_math_flags(math)
        a, b = (torch.rand(size, size, device=device).sub_(0.5).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        work = partial(torch.mm, a, b, out=out)
        once, windows[name] = _median_s(work, device, each)
        flops[name] = 2 * size**3 / once
    pin_math_flags("ieee")
    return {
        "bandwidth": bandwidth,
        "flops": flops,
        "copy_bytes": 4 * elements,
        "matmul_size": size,
        "windows": windows,
        "threads": None if on_gpu else torch.get_num_threads(),
    }


def _copied_per_s(elements: int, device: torch.device, seconds: float) -> tuple[float, int]:
    """(bytes read and written per second, windows) of copies of float32."""
    source = torch.rand(elements, device=device)
    target = torch.empty_like(source)
    once, windows = _median_s(partial(target.copy_, source), device, seconds)
    return 2 * 4 * elements / once, windows


def _formats(device: torch.device) -> list[tuple[str, torch.dtype, str]]:
    """(name, dtype of the operands, FP32 flag) of each rate that the device has."""
    formats = [("fp32", torch.float32, "ieee")]
    modern = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if modern:
        formats.append(("tf32", torch.float32, "tf32"))
    halves = _HALF if modern or device.type == "cpu" else {"fp16": torch.float16}
    return formats + [(name, dtype, "ieee") for name, dtype in halves.items()]


def _median_s(
    work: Callable[[], object], device: torch.device, seconds: float
) -> tuple[float, int]:
    """(seconds of one call, windows): the median over up to five windows of several calls."""
    work()
    once = _window_s(work, device, 1)
    count = max(1, round(seconds / (_WINDOWS + 2) / max(once, 1e-7)))
    windows = max(1, min(_WINDOWS, int(seconds / (count * once))))
    times = sorted(_window_s(work, device, count) / count for _ in range(windows))
    return times[len(times) // 2], windows


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

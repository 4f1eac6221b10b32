"""What is measured of a contender: windows of steps, warm-up, time by phase; ceilings of a device.

On CUDA a window lies between two events of the current stream (the device's clock), so a contender
has to leave its work ordered on that stream. The host waits before and after it, never inside. On a
CPU the time is wall-clock time, with the processor time of the process beside it.
"""

import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mprun.precision import pin_math_flags
from mprun.record.async_copy import Moment
from mprun.record.energy import PowerMeter
from mprun.torch_private import scaled_mm

FIRST_STEPS = 20  # their losses, skipped updates and times are kept
WINDOW_S = 0.3  # minimum; beyond it NVML's counter and torch's launch queue do not matter
AGREE, IN_A_ROW = 0.02, 3  # warm-up ends when that many windows agree this well
LEAD_IN = 1  # untimed steps before each window: another process had the caches
_CEILING_WINDOWS = 5
_T = TypeVar("_T")
# torch's warning for each wait (c10::cuda::warn_or_error_on_sync).
_WAITED = "called a synchronizing CUDA operation"


class Contender:
    """The base class of a training loop that is advanced from outside.

    Initial weights, batches, loss and optimizer settings come from its `Case`, the same for every
    contender. Its process takes the first 20 steps on it and calls `prepare`: its first use.

    Attributes:
        samples_per_step, sample: as in mprun's tasks.
    """

    samples_per_step: int
    sample: str

    def settings(self) -> dict:
        """Return the settings for the report: {"channels_last": True, "optimizer": "fused"}."""
        raise NotImplementedError

    def step(self) -> Tensor:
        """Train on the next batch; return its loss, 0-dim, detached. Never wait for the device."""
        raise NotImplementedError

    def run(self, steps: int) -> Tensor:
        """Take `steps` training steps, at least 1; return the last loss. A window calls this.

        A contender that owns its loop (a trainer) overrides it: control is handed over once.
        """
        for _ in range(steps):
            loss = self.step()
        return loss

    def prepare(self) -> None:
        """Compile, capture, autotune: do all one-time work. It may take real steps."""
        return

    def skipped(self) -> int:
        """Return the updates skipped since the beginning; may wait for the device."""
        return 0

    def replays(self) -> bool:
        """Return whether steps are now replayed from a CUDA graph."""
        return False

    def eager_step(self) -> Tensor:
        """Take a step without replay, for measurements that look inside."""
        return self.step()

    def running(self) -> AbstractContextManager[Any]:
        """Return a context around many steps (a stream)."""
        return nullcontext()

    def defer_wait(self) -> Callable[[], float] | None:
        """Return a function for the seconds waited for data since the last call; None: no wait."""
        return None

    def look_inside(self, device: torch.device) -> dict:
        """Return what only the contender can measure; called last, because it may disturb it."""
        return {}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attempt(measure: Callable[[], Any]) -> Any:
    """Return the result of `measure`, or {"why_not": reason}."""
    try:
        return measure()
    except (RuntimeError, MemoryError) as error:
        return {"why_not": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def first_steps(
    contender: Contender, device: torch.device, after_each: Callable[[], None] = lambda: None
) -> dict:
    """Return losses and skipped updates of the first 20 steps, and the seconds of each.

    Compilation, capture and autotuning happen in them, so each is timed and waited for. after_each
    is called outside of a step's time.
    """
    losses, seconds = [], []
    for _ in range(FIRST_STEPS):
        before = time.perf_counter()
        loss = contender.step()
        synchronise(device)
        seconds.append(time.perf_counter() - before)
        losses.append(float(loss))
        after_each()
    return {"losses": losses, "skipped": contender.skipped(), "seconds": seconds}


def window(
    contender: Contender, device: torch.device, steps: int, meter: PowerMeter | None = None
) -> dict[str, Any]:
    """Time `steps` steps, at least 1, after one untimed step.

    Returns:
        seconds: device time on CUDA, otherwise wall-clock time. wall_s: time of the host, waiting
        included. cpu_s: processor time of all threads. sensors: power_w, sm_clock_mhz,
        temperature_c: [before, after]. energy_mj, data_wait_s: None if there is no such reading.
    """
    meter = meter or PowerMeter(None)
    contender.run(LEAD_IN)
    contender.defer_wait()
    synchronise(device)
    before, energy = meter.sample(), meter.energy_mj()
    wall, cpu = time.perf_counter(), time.process_time()
    with contender.running():
        seconds, loss = _timed(partial(contender.run, steps), device)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    energy_after, after = meter.energy_mj(), meter.sample()
    wait = contender.defer_wait()
    return {
        "steps": steps,
        "samples": steps * contender.samples_per_step,
        "seconds": seconds if device.type == "cuda" else wall,
        "wall_s": wall,
        "cpu_s": cpu,
        "energy_mj": None if energy is None or energy_after is None else energy_after - energy,
        "sensors": {name: [before[name], after[name]] for name in before if name in after},
        "data_wait_s": None if wait is None else wait(),
        "loss_is_finite": math.isfinite(float(loss)),
    }


def _timed(work: Callable[[], _T], device: torch.device) -> tuple[float, _T]:
    """Return the seconds of `work`, on CUDA the device's, and its result; wait for it."""
    start, result, end = Moment(device), work(), Moment(device)
    synchronise(device)
    return end.seconds_since(start), result


def steps_for(step_s: float, seconds: float = WINDOW_S) -> int:
    """Return the number of steps that last at least `seconds`."""
    return max(1, math.ceil(seconds / max(step_s, 1e-7)))


def warm_up(
    contender: Contender, device: torch.device, limit_s: float, steps: int | None = None
) -> dict:
    """Take windows until three in a row agree within 2 %, or for `limit_s` seconds.

    steps: steps of a window; None: as many as last 0.3 s.
    """
    started, taken = time.perf_counter(), 1
    last: list[float] = []
    first_s = window(contender, device, 1)["seconds"]
    count = steps or steps_for(first_s)
    while True:
        step_s = window(contender, device, count)["seconds"] / count
        taken += count
        if steps is None:
            # The first steps are slow: windows that took 0.3 s at first may take less now.
            count = max(count, steps_for(step_s))
        last = [*last, step_s][-IN_A_ROW:]
        apart = max(last) / min(last) - 1
        steady = len(last) == IN_A_ROW and apart <= AGREE
        if steady or time.perf_counter() - started >= limit_s:
            return {
                "steps_per_window": count,
                "step_s": statistics.median_high(last),
                "steps": taken,
                "seconds": time.perf_counter() - started,
                "steady": steady,
                "apart": apart,
            }


def host_seconds(contender: Contender, device: torch.device, repeats: int = 10) -> float:
    """Return the median time to issue one step to an idle device without waiting for it.

    On a CPU issuing is computing, so this is the time of the step.
    """
    times = []
    for _ in range(repeats):
        synchronise(device)
        before = time.perf_counter()
        contender.step()
        times.append(time.perf_counter() - before)
    synchronise(device)
    return statistics.median_high(times)


def time_split(
    step: Callable, data: Any, learners: Iterable[Any], device: torch.device, steps: int = 5
) -> dict[str, float]:
    """Return the seconds per eager step of data, forward, backward and update, and of all of it.

    For a few steps `data.train_batch`, `Tensor.backward`, and `step` of each learner are wrapped in
    two marks; forward is the rest: zeroing, casting inputs, the forward pass and the loss. On CUDA
    marks are events. If the host is slower, idle time counts in the phase where it occurs.
    """
    pairs: list[tuple[str, Moment, Moment]] = []
    caller, running = threading.get_ident(), set[str]()

    @contextmanager
    def marked(phase: str) -> Iterator[None]:
        # Another thread may call Tensor.backward, too; under a function mode it calls itself.
        if threading.get_ident() != caller or phase in running:
            yield
            return
        running.add(phase)
        start = Moment(device)
        try:
            yield
        finally:
            running.remove(phase)
            pairs.append((phase, start, Moment(device)))

    watched = [(data, "train_batch", "data"), *((own, "step", "update") for own in learners)]
    plain = Tensor.backward
    try:
        for holder, method, phase in watched:
            setattr(holder, method, marked(phase)(getattr(holder, method)))
        Tensor.backward = marked("backward")(plain)  # type: ignore[method-assign]
        for _ in range(steps):
            with marked("step"):
                step()
    finally:
        Tensor.backward = plain  # type: ignore[method-assign]
        for holder, method, _ in watched:
            vars(holder).pop(method, None)
    synchronise(device)
    sums = dict.fromkeys(("data", "forward", "backward", "update", "step"), 0.0)
    for phase, start, end in pairs:
        sums[phase] += end.seconds_since(start)
    inside = sum(sums[name] for name in ("data", "backward", "update"))
    sums["forward"] = max(0.0, sums["step"] - inside)
    return {name: seconds / steps for name, seconds in sums.items()}


def count_synchronisations(work: Callable[[], object], device: torch.device) -> int | None:
    """Call `work` and count the operations in it that made the host wait for a GPU.

    Returns None without calling `work` on a CPU.

    torch.cuda.set_sync_debug_mode("warn") sees copies to and from memory that is not page-locked,
    and reads of values (`.item()`, `if tensor`, sizes that depend on values). It sees neither
    explicit waits (`torch.cuda.synchronize`, `Event.synchronize`) nor waits inside libraries.
    """
    if device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True, action="always") as seen:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum(_WAITED in str(warning.message) for warning in seen)


def measure_ceilings(device: torch.device, seconds: float = 6.0, size: int | None = None) -> dict:
    """Measure {"bandwidth": bytes/s, read and written together, "flops": {format: FLOP/s}, ...}.

    They are the highest rates of the device. Data are random, because products of zeros draw less
    power and clock higher. A product is 8192^3 on CUDA and 1024^3 on a CPU, a multiply-add 2 FLOP;
    a copy moves 1 GiB and 256 MiB, far beyond the caches. FP8: E4M3, one scale, fast accumulation.
    Each rate is the median of up to five windows, of fewer if `seconds` in total do not allow five.
    It leaves the flags of FP32 products at "ieee". size: side of the matrices, for tests.
    """
    on_gpu = device.type == "cuda"
    size = size or (8192 if on_gpu else 1024)
    formats = _formats(device)
    each = seconds / (1 + len(formats))
    source = torch.rand(2**28 if on_gpu else 2**26, device=device)
    copied, copy = source.nbytes, partial(torch.empty_like(source).copy_, source)
    once, count = _median_s(copy, device, each)
    bandwidth, flops, windows = 2 * copied / once, {}, {"copy": count}  # read and written
    del source, copy
    for name, dtype in formats.items():
        pin_math_flags("tf32" if name == "tf32" else "ieee")
        a, b = (torch.rand(size, size, device=device).sub_(0.5).to(dtype) for _ in range(2))
        once, windows[name] = _median_s(_product_of(a, b), device, each)
        flops[name] = 2 * size**3 / once
    pin_math_flags("ieee")
    return {
        "bandwidth": bandwidth,
        "flops": flops,
        "copy_bytes": copied,
        "matmul_size": size,
        "windows": windows,
        "threads": None if on_gpu else torch.get_num_threads(),
    }


def _product_of(a: Tensor, b: Tensor) -> Callable[[], object]:
    """Return a product of two square matrices of one dtype."""
    if a.dtype.itemsize > 1:
        return partial(torch.mm, a, b, out=torch.empty_like(a))
    one = torch.ones((), device=a.device)
    fp8 = partial(scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
    return partial(fp8, a, b.t(), one, one)


def _formats(device: torch.device) -> dict[str, torch.dtype]:
    """Return the dtype of the operands for each rate that the device has."""
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
    formats = {"fp32": torch.float32}
    if capability >= (8, 0):
        formats["tf32"] = torch.float32
    formats["fp16"] = torch.float16
    if capability >= (8, 0) or not on_gpu:
        formats["bf16"] = torch.bfloat16
    if capability >= (8, 9):  # as in `mprun.precision.why_unsupported`
        formats["fp8"] = torch.float8_e4m3fn
    return formats


def _median_s(
    work: Callable[[], object], device: torch.device, seconds: float
) -> tuple[float, int]:
    """Return the median seconds of one call and the number of windows of several calls."""

    def calls(count: int) -> None:
        for _ in range(count):
            work()  # no result is kept: the next one takes its memory

    def once(count: int) -> float:
        synchronise(device)
        return _timed(partial(calls, count), device)[0] / count

    work()
    first = once(1)
    count = max(1, round(seconds / (_CEILING_WINDOWS + 2) / max(first, 1e-7)))
    windows = max(1, min(_CEILING_WINDOWS, int(seconds / (count * first))))
    return statistics.median_high(once(count) for _ in range(windows)), windows

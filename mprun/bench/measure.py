"""One window of training steps, timed without a synchronisation inside; warm-up; equality losses.

On CUDA a window lies between two events of the current stream (the device's own clock), so a
contender has to leave its work ordered on that stream. The host waits before and after it, never
inside. On a CPU it is wall-clock time, with the processor time of the process beside it.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch

from mprun.bench.contender import EQUALITY_STEPS, Contender, run_steps
from mprun.bench.energy import PowerMeter
from mprun.bench.first_steps import WeightWatch

WINDOW_S = 0.3  # at least; NVML's counter and torch's launch queue are invisible beyond that
AGREE, IN_A_ROW = 0.02, 3  # warm-up ends when that many windows agree this well
LEAD_IN = 1  # untimed steps before each window: another process had the caches


@dataclass(frozen=True, slots=True)
class Window:
    """k steps of one contender.

    seconds: of the device on CUDA, else of the wall clock. wall_s, cpu_s: of the host, waiting
    included; processor time of all threads. energy_mj: None where it cannot be read. data_wait_s:
    None where the source does not read ahead. power_w, sm_clock_mhz, temperature_c: [before, after]
    """

    steps: int
    samples: int
    seconds: float
    wall_s: float
    cpu_s: float
    energy_mj: int | None
    sensors: dict[str, list[float]]
    data_wait_s: float | None
    loss_is_finite: bool

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    def as_dict(self) -> dict:
        return asdict(self)


def synchronise(device: torch.device) -> None:
    """Wait for the device (CUDA)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def equality_losses(contender: Contender, device: torch.device) -> dict:
    """What the equality check needs of the first 20 steps, and how long each of them took.

    losses, skipped updates, and how far the weights travelled (first_steps.WeightWatch), None where
    a contender does not show them. The first steps of a fresh contender hold its
    compilation, capture and autotuning, which is why they are timed: seconds, each waited for.
    """
    watch = WeightWatch(contender) if hasattr(contender, "weights") else None
    losses, seconds = [], []
    for _ in range(EQUALITY_STEPS):
        before = time.perf_counter()
        loss = contender.step()
        synchronise(device)
        seconds.append(time.perf_counter() - before)
        losses.append(float(loss))
        if watch is not None:
            watch.record()
    return {
        "losses": losses,
        "skipped": contender.skipped(),
        "travel": None if watch is None else watch.travel(),
        "seconds": seconds,
    }


def window(
    contender: Contender, device: torch.device, steps: int, meter: PowerMeter | None = None
) -> Window:
    """Time `steps` steps, at least 1, after one untimed step."""
    run_steps(contender, LEAD_IN)
    defer_wait = getattr(contender, "defer_wait", None)
    if defer_wait is not None:
        defer_wait()
    synchronise(device)
    before = meter.sample() if meter else {}
    energy = meter.energy_mj() if meter else None
    wall, cpu = time.perf_counter(), time.process_time()
    with getattr(contender, "running", nullcontext)():
        seconds, loss = _timed(contender, device, steps)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if energy is not None:
        after = meter.energy_mj()
        energy = None if after is None else after - energy
    after = meter.sample() if meter else {}
    return Window(
        steps=steps,
        samples=steps * contender.samples_per_step,
        seconds=wall if seconds is None else seconds,
        wall_s=wall,
        cpu_s=cpu,
        energy_mj=energy,
        sensors={name: [before[name], after[name]] for name in before if name in after},
        data_wait_s=None if defer_wait is None else defer_wait()(),
        loss_is_finite=math.isfinite(float(loss)),
    )


def _timed(contender: Contender, device: torch.device, steps: int):
    """(seconds of the device or None, last loss)."""
    if device.type != "cuda":
        return None, run_steps(contender, steps)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    loss = run_steps(contender, steps)
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1000, loss


def steps_for(step_s: float, seconds: float = WINDOW_S) -> int:
    """Steps that last at least `seconds`."""
    return max(1, math.ceil(seconds / max(step_s, 1e-7)))


def warm_up(
    contender: Contender,
    device: torch.device,
    limit_s: float,
    steps: int | None = None,
    measure: Callable[..., Window] = window,
) -> dict:
    """Take windows until three in a row agree within 2 %, or for `limit_s` seconds.

    steps: of a window; None: as many as last 0.3 s. measure: takes a window. The 20 steps of the
    equality check came before. Returns the steps of a window to use, the steady step time, the
    steps taken, whether they agreed, and how far the last ones were apart (share of the smallest).
    """
    started, taken, times = time.perf_counter(), 0, []
    first = measure(contender, device, 1)
    count = steps or steps_for(first.step_s)
    while True:
        newest = measure(contender, device, count)
        taken += count
        times.append(newest.step_s)
        if steps is None:
            # The first steps are slow: what looked like 0.3 s may have become less.
            count = max(count, steps_for(newest.step_s))
        last = times[-IN_A_ROW:]
        apart = max(last) / min(last) - 1
        steady = len(last) == IN_A_ROW and apart <= AGREE
        if steady or time.perf_counter() - started >= limit_s:
            return {
                "steps_per_window": count,
                "step_s": sorted(last)[len(last) // 2],
                "steps": taken + 1,
                "seconds": time.perf_counter() - started,
                "steady": steady,
                "apart": apart,
            }


def host_seconds(contender: Contender, device: torch.device, repeats: int = 10) -> float:
    """Median time to issue one step without waiting for it, the device idle before.

    On a CPU issuing is computing, so the figure is that of the step.
    """
    times = []
    for _ in range(repeats):
        synchronise(device)
        before = time.perf_counter()
        contender.step()
        times.append(time.perf_counter() - before)
    synchronise(device)
    return sorted(times)[len(times) // 2]

"""The answer to a question, and functions to measure time."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. text: one or two sentences with the figures. numbers: all figures, plain values.

    header, rows: a table below the text, empty for none.
    """

    text: str
    numbers: dict = field(default_factory=dict)
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def milliseconds(run: Callable[[], object], windows: int = 7, window_s: float = 0.02) -> float:
    """Return median milliseconds of one call of `run` on CUDA, over windows of at least `window_s`.

    Events around many calls give device time, without a wait inside a window; three calls warm up.
    """
    for _ in range(3):
        run()
    calls = 1
    while True:
        spent = _window(run, calls)
        if spent >= 1000 * window_s:
            break
        # At most tenfold a time: the first window also contains leftovers of the warm-up.
        calls = max(calls + 1, min(10 * calls, int(1200 * window_s / max(spent, 1e-3)) * calls))
    return statistics.median(_window(run, calls) / calls for _ in range(windows))


def _window(run: Callable[[], object], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def wall_us(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return median microseconds of `run` by the host clock on an idle device, without a wait."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times[1:])

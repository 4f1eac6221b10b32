"""Facts about the device: measured ceilings, and whether its energy can be read."""

import time

import torch

from questions.answer import Answer


def energy_counter(device: torch.device) -> Answer:
    """Find out whether NVML's energy counter (mJ since the driver was loaded) works."""
    from mprun.record.energy import meter_of

    meter = meter_of(device)
    before = meter.energy_mj()
    if before is None:
        return Answer(f"No: {meter.why}.", {"readable": False, "why": meter.why})
    busy_w = _watts(meter, device, busy=True)
    idle_w = _watts(meter, device, busy=False)
    text = (
        f"Yes: the counter stood at {before / 1000:.0f} J; {busy_w:.0f} W over 1 s of matrix "
        f"products, {idle_w:.0f} W over 1 s without work."
    )
    numbers = {"readable": True, "busy_w": busy_w, "idle_w": idle_w, "driver": meter.driver()}
    return Answer(text, numbers | {"sensors": meter.sample(), "not readable": meter.why})


def _watts(meter, device: torch.device, busy: bool) -> float:
    """Return the mean power over about one second, from two readings of the counter."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    started, before = time.perf_counter(), meter.energy_mj()
    while time.perf_counter() - started < 1:
        if busy:
            for _ in range(10):
                a @ a
            torch.cuda.synchronize()
        else:
            time.sleep(0.1)
    return (meter.energy_mj() - before) / 1000 / (time.perf_counter() - started)


def ceilings(device: torch.device) -> Answer:
    """Measure the rates of a copy and a large matrix product on this device."""
    from mprun.extensions.bench.measure import measure_ceilings

    numbers = measure_ceilings(device)
    rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in numbers["flops"].items())
    text = (
        f"Copy {numbers['bandwidth'] / 1e12:.3f} TB/s (read and written); products {rates} TFLOP/s."
    )
    return Answer(text, numbers)

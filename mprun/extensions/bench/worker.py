"""The requests to a bench child: build its contender, warm it up, time windows, look inside."""

import gc
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mprun.extensions.bench import measure
from mprun.extensions.bench.cases import OWN, Case, without_device
from mprun.extensions.bench.measure import Contender
from mprun.extensions.bench.runner import RunnerContender
from mprun.precision import read_math_flags
from mprun.record.energy import PowerMeter, meter_of
from mprun.record.memory import host_memory, peak
from mprun.training.run import resolve_device

ENERGY_S = 2.0  # NVML's counter moves about ten times a second: a single window is coarse
_REPEATS = 10  # steps for the median of the host's time
_WATCHED = 5  # steps in which synchronisations are counted


class Worker:
    """Holder of one contender; its methods are requests and return plain values."""

    contender: Contender
    case: Case

    def __init__(self):
        self.device, self.meter = torch.device("cpu"), PowerMeter(None)

    def make(self, case: Case, device: torch.device) -> Contender:
        """Build the contender of a case before its first step: pin flags and draw weights."""
        return RunnerContender(case, device)

    def watched_steps(self) -> dict:
        """Take the first 20 steps; return the seconds of each and what `Contest.check` needs."""
        return measure.first_steps(self.contender, self.device)

    def ceilings(self, device: str, seconds: float, threads: int | None = None) -> dict:
        """Measure the device's ceilings in about `seconds`; return them with NVML's answers."""
        self._on(device, threads)
        measured = measure.measure_ceilings(self.device, seconds)
        return {"ceilings": measured, "driver": self.meter.driver(), "nvml": self.meter.why}

    def limit(self, case: Case, ceilings: dict, name: str) -> dict:
        """Return numbers of `roofline.limits.limit` for a step under measured ceilings.

        name: name of the device. BadInput for a step that cannot be counted.
        """
        from mprun.extensions.bench.roofline.count import count
        from mprun.extensions.bench.roofline.limits import Ceilings, limit

        torch.set_num_threads(1)
        counted = count(without_device(case.overrides), case.mode, case.config_dir)
        rates = ceilings["flops"], ceilings["bandwidth"]
        found = limit(counted, Ceilings(name, "measured in this bench", *rates, memory=0.0))
        kept = ("limit", "eager", "fused", "flop_only", "memory_bound_share", "launches")
        numbers = {key: found[key] for key in kept}
        return numbers | {"flops": counted.flops, "bytes": counted.bytes()}

    def build(self, case: Case, device: str) -> dict:
        self.case = case
        self._on(device, case.config().threads)
        self.contender = self.make(case, self.device)
        return {
            "samples_per_step": self.contender.samples_per_step,
            "sample": self.contender.sample,
            "threads": torch.get_num_threads(),
        }

    def first_steps(self) -> dict:
        found = self.watched_steps()
        # After compilation and capture every step is as fast as the fastest ones.
        usual = sorted(found["seconds"])[len(found["seconds"]) // 4]
        self.first_use_s = max(0.0, sum(found["seconds"]) - usual * len(found["seconds"]))
        return found

    def prepare(self) -> dict:
        # Autotuning and the steps before a capture cache memory that others need.
        release(self.device)
        self.contender.prepare()
        self.contender.run(2)
        measure.synchronise(self.device)
        return {
            "settings": self.contender.settings(),
            "flags": read_math_flags(),
            "first_use_s": self.first_use_s,
            "replays": self.contender.replays(),
            **_memory_left(self.device),
        }

    def warm_up(self, limit_s: float, steps: int | None = None) -> dict:
        return measure.warm_up(self.contender, self.device, limit_s, steps)

    def window(self, steps: int) -> dict:
        return measure.window(self.contender, self.device, steps, self.meter)

    def details(self, step_s: float, seconds: float) -> dict:
        """Measure everything else in about `seconds`; what disturbs the step comes last."""
        answer: dict[str, Any] = {"skipped": self.contender.skipped()}
        # For other contenders the windows have to suffice: this would cost a third of their time.
        own = self.case.contender in OWN
        if own and self.meter.energy_mj() is not None and seconds > 2 * ENERGY_S:
            answer["energy_window"] = self.window(measure.steps_for(step_s, ENERGY_S))
        repeats = max(2, min(_REPEATS, math.floor(0.2 * seconds / step_s)))
        answer["host_s"] = measure.host_seconds(self.contender, self.device, repeats)
        answer["peak"] = self._peak(step_s)
        watched = partial(self.contender.run, _WATCHED)
        counted = measure.attempt(lambda: measure.count_synchronisations(watched, self.device))
        answer["synchronisations"] = counted / _WATCHED if isinstance(counted, int) else counted
        answer |= self.contender.look_inside(self.device)
        return answer | {"nvml": self.meter.why}

    def _peak(self, step_s: float) -> dict:
        """Return the peak memory of steady steps in bytes; for replayed steps "allocated" is eager.

        A replay allocates nothing, and the peak of its capture includes earlier tensors. Eager
        steps come after the other readings: they need as much again beside the graph.
        """
        if self.device.type != "cuda":
            return {"resident": peak(self.device)["peak_bytes"]}
        measure.synchronise(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        measure.window(self.contender, self.device, min(3, measure.steps_for(step_s)))
        held = {
            "reserved": torch.cuda.max_memory_reserved(self.device),
            "process": self.meter.process_bytes(),
        }
        if self.contender.replays():
            torch.cuda.reset_peak_memory_stats(self.device)
            try:
                for _ in range(2):
                    self.contender.eager_step()
            except torch.OutOfMemoryError:
                return held | {"why_not": "no memory for an eager step beside the graph"}
        return held | {"allocated": torch.cuda.max_memory_allocated(self.device)}

    def _on(self, device: str, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = resolve_device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.meter = meter_of(self.device)


def release(device: torch.device) -> None:
    """Free cached memory that nothing uses."""
    while gc.collect():  # what the nodes of a graph hold is found once these are gone
        pass
    measure.synchronise(device)
    torch.cuda.empty_cache()  # nothing without CUDA


def _memory_left(device: torch.device) -> dict[str, int]:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return {"free": free, "held": torch.cuda.memory_reserved(device)}
    free = host_memory()
    if free < 0:
        return {"free": sys.maxsize, "held": 0}  # not Linux: children may swap
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"free": free, "held": pages * os.sysconf("SC_PAGE_SIZE")}

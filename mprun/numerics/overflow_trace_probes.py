"""What a run's probes add to its overflow trace: limits, and the largest gradients for logmax."""

import math
from pathlib import Path

import numpy as np

from mprun.numerics.probe_record import ProbeRecord, read_probes

_GRADIENTS = ("activation_gradients", "weight_gradients")


def probed_bounds(
    directory: Path, steps: int, every_dtype: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """(clean, overflow, grad_max, probes) of the steps 1 to `steps` of a run directory.

    clean: float64 [steps], the largest scale (in powers of two from the run's own) at which no
    gradient that was probed overflows FP16, 0 where there was no probe; others, inside a kernel,
    may. overflow: twice that, at which one does; inf where there was no probe. Gradients in FP16
    count, or with `every_dtype` all of them, as if they were FP16. grad_max: largest unscaled
    weight gradient, of the nearest probe before the step (for the first ones, after it) that was
    finite; None if none was.
    """
    clean, overflow = np.zeros(steps), np.full(steps, np.inf)
    largest = np.full(steps, np.nan)
    probes = 0
    for probe in read_probes(directory):
        exponent = _limit_exponent(probe, every_dtype)
        if not 1 <= probe.step <= steps or exponent is None:
            continue
        probes += 1
        clean[probe.step - 1], overflow[probe.step - 1] = 2.0**exponent, 2.0**exponent * 2
        largest[probe.step - 1] = _largest(probe)
    return clean, overflow, _carried(largest), probes


def _limit_exponent(probe: ProbeRecord, every_dtype: bool) -> float | None:
    """log2 of a scale without overflow of which the double overflows; None if it cannot tell."""
    exponents = []
    for learner in probe.learners.values():
        scales = {probe.log2_loss_scale[name] for name in learner.loss_scales}
        if len(scales) > 1:
            return None
        scale = scales.pop() if scales else 0.0
        for kind in _GRADIENTS:
            for stats in learner.tensors.get(kind, {}).values():
                if not every_dtype and "fp16" not in stats.dtype.split("+"):
                    continue
                if stats.counts.inf or stats.counts.nan:
                    return None
                if stats.counts.headroom is not None:
                    exponents.append(scale + stats.counts.headroom)
    return min(exponents, default=None)


def _largest(probe: ProbeRecord) -> float:
    found = []
    for learner in probe.learners.values():
        scale = max((2.0 ** probe.log2_loss_scale[name] for name in learner.loss_scales), default=1)
        found += [s.amax / scale for s in learner.tensors.get("weight_gradients", {}).values()]
    return max(found, default=math.nan)


def _carried(values: np.ndarray) -> np.ndarray | None:
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return None
    before = np.searchsorted(known, np.arange(len(values)), side="right") - 1
    return values[known[np.maximum(before, 0)]]

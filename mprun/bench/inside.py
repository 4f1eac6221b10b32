"""A look inside the steps of a contender, after it has been timed: some of this disturbs it."""

import torch

from mprun.bench.contender import Contender, run_steps
from mprun.bench.own import Own
from mprun.bench.phases import time_split
from mprun.bench.synchronisations import count_synchronisations
from mprun.numerics.operations import FirstStep

_STEPS = 5  # in which synchronisations are counted


def look_inside(contender: Contender, device: torch.device) -> dict:
    """syncs per step, time split and memory by kind; each is a value or {"why_not": reason}.

    Time split and memory by kind need mprun's own objects, so only mprun has them; the split only
    where steps are eager.
    """
    found = {"synchronisations": _attempt(lambda: _synchronisations(contender, device))}
    if not isinstance(contender, Own):
        return found
    if contender.replays:
        found["time_split"] = {"why_not": "replayed as one CUDA graph"}
    else:
        optimizers = [own.optimizer for own in contender.task.learners.values()]
        data = contender.built.data
        split = _attempt(lambda: time_split(contender.step, data, optimizers, device))
        found["time_split"] = split
    found["memory_by_kind"] = _attempt(lambda: _memory_by_kind(contender))
    return found


def _synchronisations(contender: Contender, device: torch.device) -> float | None:
    """Per step; None on a CPU, which waits for nobody."""
    if device.type != "cuda":
        return None
    return count_synchronisations(lambda: run_steps(contender, _STEPS)) / _STEPS


def _memory_by_kind(contender: Own) -> dict:
    """Kind -> dtype -> bytes after one more step, with what that step saved for its backward.

    The step is eager and not compiled, whatever the ones that were timed.
    """
    for learner in contender.task.learners.values():
        learner.compiled = None
    overrides = contender.config.precision.overrides
    with FirstStep(contender.task, contender.built.policy, overrides) as watched:
        contender.eager_step()
    return watched.memory()


def _attempt(measure):
    try:
        return measure()
    except (RuntimeError, MemoryError) as error:
        return {"why_not": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}

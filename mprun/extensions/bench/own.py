"""mprun as a contender: a mode on a configuration, with mprun's step.

There is no run record and no evaluation. The timed step sets the learning rate and counts skipped
updates, as in `mprun.training.loop`. A look inside splits the time of an eager step by phase and
its memory by kind.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from mprun.build import Built
from mprun.config.components import NETWORKS, TASKS
from mprun.config.schema import RunConfig
from mprun.errors import BadInput
from mprun.extensions.bench.contender import (
    Contender,
    RotatingSource,
    in_channels_last,
    rotating_batches,
)
from mprun.extensions.bench.measure import attempt, synchronise
from mprun.extensions.bench.plan import Case
from mprun.numerics.operations import FirstStep
from mprun.training.run import prepare

_CONVOLUTIONAL = {
    name
    for name, network in NETWORKS.items()
    if network.task is not None and TASKS[network.task].family == "images"
}
_PREPARED_STEPS = 12  # a graph is captured after fewer
_SPLIT_STEPS = 5


def best_settings(model: str, device_type: str, compiled: bool) -> list[str]:
    """Return the overrides of "mprun+" for a model, including ones that cannot be combined.

    Args:
        compiled: with torch.compile, for networks and devices where it helps.
    """
    settings = ["optim.implementation=single_pass"]
    if model in _CONVOLUTIONAL:
        settings.append("train.channels_last=on")
    if device_type == "cuda":
        # torch.compile hands an nn.LSTM back to eager as a whole.
        compiled = compiled and model in _CONVOLUTIONAL
        # With compiled kernels a graph may gain nothing, and it holds a second set of activations:
        # "auto" uses it only if the measured step times say that it pays.
        settings.append(f"train.cuda_graph={'auto' if compiled else 'on'}")
        if compiled:
            settings.append("train.compile=default")
    return settings


class Own(Contender):
    """A case as mprun runs it; BadInput if it cannot be built.

    Attributes:
        left_out: refused best settings -> the reason.
        built, config: the built task and its configuration, for measurements that look inside.
    """

    def __init__(self, case: Case, device: torch.device):
        self.left_out: dict[str, str] = {}
        best: list[str] = []
        if case.contender == "mprun+":
            model = case.config(f"device={device.type}").model.name
            best = best_settings(model, device.type, case.extra.get("compile", True))
        self.config, self.built = self._built_with(case, device, best)
        if not case.real_data:
            source, batches = self.built.data, rotating_batches(self.built.data)
            if self.built.task.channels_last:  # as for the tuned peers
                batches = [in_channels_last(batch) for batch in batches]
            self.built.data = RotatingSource(source, batches)
            self.built.task.data = self.built.data
        self.task = self.built.task
        self.samples_per_step, self.sample = self.task.samples_per_step, self.task.sample
        self._index = 0

    def settings(self) -> dict:
        """Return the differences from the plainest step, both configured and actual."""
        train = self.config.train
        chosen: dict[str, Any] = {
            "cuda_graph": train.cuda_graph,
            "compile": train.compile,
            "channels_last": train.channels_last,
            "autotune": train.autotune,
            "optimizer": self.config.optim.implementation,
        }
        chosen |= self.built.stepper.description
        return chosen | ({"left_out": self.left_out} if self.left_out else {})

    def replays(self) -> bool:
        return self.built.stepper.description.get("cuda_graph") == "on"

    def running(self) -> AbstractContextManager[Any]:
        """Return a context for many steps: all work on one stream, without a switch per step."""
        return self.built.stepper.on_stream()

    def prepare(self) -> None:
        """Take the steps in which compilation, capture and autotuning happen."""
        self.run(_PREPARED_STEPS)
        synchronise(self.built.device)

    def step(self) -> torch.Tensor:
        return self._advance(self.built.stepper.step)

    def eager_step(self) -> torch.Tensor:
        """Take a step by the task alone, without graph."""
        return self._advance(self.built.stepper.eager_step)

    def skipped(self) -> int:
        return int(self.built.stepper.skipped)

    def defer_wait(self) -> Callable[[], float] | None:
        defer = self.built.data.defer_wait
        return None if defer is None else defer()

    def look_inside(self, device: torch.device) -> dict:
        """Return the time split (of eager steps) and memory by kind, or {"why_not": reason}."""
        split: Any = {"why_not": "replayed as one CUDA graph"}
        if not self.replays():
            optimizers = [own.optimizer for own in self.task.learners.values()]
            split = attempt(lambda: time_split(self.step, self.built.data, optimizers, device))
        return {"time_split": split, "memory_by_kind": attempt(self._memory_by_kind)}

    def _memory_by_kind(self) -> dict:
        """Return kind -> dtype -> bytes after one more step, tensors saved for backward included.

        This step is eager and not compiled, even if the timed ones were.
        """
        for learner in self.task.learners.values():
            learner.network = learner.model
        overrides = self.config.precision.overrides
        with FirstStep(self.task, self.built.policy, overrides) as watched:
            self.eager_step()
        return watched.memory()

    def _advance(self, take: Callable[[int], dict[str, torch.Tensor]]) -> torch.Tensor:
        self._index += 1
        return take(self._index - 1)["loss"]

    def _built_with(
        self, case: Case, device: torch.device, best: list[str]
    ) -> tuple[RunConfig, Built]:
        """Build with as many of the best settings as go together; note the others."""
        while True:
            try:
                config = case.config(f"device={device.type}", *best)
                return config, prepare(config, torch.device(device.type), config.threads)
            except BadInput as error:
                key = str(error).partition("=")[0]
                refused = [setting for setting in best if setting.partition("=")[0] == key]
                if not refused:
                    raise
                self.left_out[refused[0]] = str(error)
                best = [setting for setting in best if setting not in refused]


def time_split(
    step: Callable[[], object],
    data: object,
    optimizers: Iterable[object],
    device: torch.device,
    steps: int = _SPLIT_STEPS,
) -> dict[str, float]:
    """Return the seconds per step of data, forward, backward and update, and of the whole step.

    For a few steps `data.train_batch`, and `backward` and `step` of each optimizer, are wrapped in
    two marks; afterwards the methods are restored. On CUDA marks are events, so marking waits for
    nothing. If the host is slower than the device, idle time counts in the phase where it occurs.

    Args:
        step: takes one eager training step.
        data, optimizers: the objects whose methods it calls. forward is the rest: zeroing, casting
            inputs, the forward pass and the loss.
    """
    on_device = device.type == "cuda"
    pairs: list[tuple[str, Any, Any]] = []

    def now() -> Any:
        if not on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def marked(method: Callable, phase: str) -> Callable:
        def call(*arguments, **keywords):
            start = now()
            try:
                return method(*arguments, **keywords)
            finally:
                pairs.append((phase, start, now()))

        return call

    watched = [(data, "train_batch", "data")]
    for optimizer in optimizers:
        watched += [(optimizer, "backward", "backward"), (optimizer, "step", "update")]
    try:
        for holder, method, phase in watched:
            setattr(holder, method, marked(getattr(holder, method), phase))
        for _ in range(steps):
            marked(step, "step")()
    finally:
        for holder, method, _ in watched:
            vars(holder).pop(method, None)
    synchronise(device)
    sums = dict.fromkeys(("data", "forward", "backward", "update", "step"), 0.0)
    for phase, start, end in pairs:
        sums[phase] += start.elapsed_time(end) / 1000 if on_device else end - start
    inside = sum(sums[name] for name in ("data", "backward", "update"))
    sums["forward"] = max(0.0, sums["step"] - inside)
    return {name: seconds / steps for name, seconds in sums.items()}

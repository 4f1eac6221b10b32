"""mprun's runner as a contender: a mode on a configuration, with its step, on rotating batches.

There is no run record and no evaluation. The timed step sets the learning rate and counts skipped
updates, as in `mprun.training.loop`.
"""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from mprun.config.components import TASKS
from mprun.config.schema import RunConfig
from mprun.data.source import Batch, Source
from mprun.errors import BadInput
from mprun.extensions.bench.cases import EAGER, Case
from mprun.extensions.bench.measure import Contender, attempt, synchronise, time_split
from mprun.numerics.operations import FirstStep
from mprun.training.run import prepare

BATCHES = 4  # a single batch and its results would stay in a cache
_PREPARED_STEPS = 12  # a graph is captured after fewer


def rotating_batches(source: Source) -> list[Batch]:
    """Return the first training batches, held on the device."""
    batches = (source.train_batch(index) for index in range(BATCHES))
    return [(first.clone(), second.clone()) for first, second in batches]


def in_channels_last(batch: Batch) -> Batch:
    """Return (images, labels) with the images in NHWC order in memory."""
    images, labels = batch
    return images.contiguous(memory_format=torch.channels_last), labels


class RotatingSource:
    """A source whose training batch is ``batches[index % len(batches)]``; the rest is its own."""

    def __init__(self, source: Source, batches: list[Batch]):
        self._source, self._batches = source, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def train_batch(self, index: int) -> Batch:
        return self._batches[index % len(self._batches)]


def compiles(config: RunConfig, device_type: str) -> bool:
    """Return whether torch.compile can make 16-bit steps faster here: not where they are emulated.

    It hands an nn.LSTM back to eager as a whole.
    """
    native = device_type == "cuda" or config.cpu_half == "native"
    return native and not config.model.component.recurrent


def best_settings(config: RunConfig, device_type: str, compiled: bool) -> list[str]:
    """Return the overrides of "mprun+" for a model, including ones that cannot be combined.

    Args:
        compiled: with torch.compile, for networks and devices where it helps.
    """
    task = config.model.component.task  # None: a network of the user's
    family = TASKS[task].family if task is not None else None
    settings = []
    if family == "images":
        settings.append("train.channels_last=on")
    compiled = compiled and family in ("images", "text") and compiles(config, device_type)
    if device_type == "cuda":
        # With compiled kernels a graph may gain nothing, and it holds a second set of activations:
        # "auto" uses it only if the measured step times say that it pays.
        settings.append(f"train.cuda_graph={'auto' if compiled else 'on'}")
    if compiled:
        settings.append("train.compile=default")
    return settings


class RunnerContender(Contender):
    """A case as mprun runs it; BadInput if it cannot be built.

    Attributes:
        left_out: refused best settings -> the reason.
    """

    def __init__(self, case: Case, device: torch.device):
        self.left_out: dict[str, str] = {}
        on_device = f"device={device.type}"
        best = ["train.compile=off"] if case.contender == EAGER else []
        if case.contender == "mprun+":
            compiled = case.extra.get("compile", True)
            best = best_settings(case.config(on_device), device.type, compiled)
        while True:  # with as many of the best settings as go together
            try:
                self.config = case.config(on_device, *best)
                self.built = prepare(self.config, torch.device(device.type), self.config.threads)
                break
            except BadInput as error:
                key = str(error).partition("=")[0]
                refused = next((one for one in best if one.startswith(f"{key}=")), None)
                if refused is None:
                    raise
                self.left_out[refused] = str(error)
                best.remove(refused)
        self.task = self.built.task
        if not case.real_data:
            batches = rotating_batches(self.built.data)
            if self.task.channels_last:  # as for the tuned peers
                batches = [in_channels_last(batch) for batch in batches]
            self.built.data = self.task.data = RotatingSource(self.built.data, batches)
        self.samples_per_step, self.sample = self.task.samples_per_step, self.task.sample
        self._steps = itertools.count()

    def settings(self) -> dict:
        """Return the differences from the plainest step, both configured and actual."""
        names = ("cuda_graph", "compile", "channels_last", "autotune")
        chosen = {name: getattr(self.config.train, name) for name in names}
        chosen["optimizer"] = self.config.optim.implementation
        chosen |= self.built.stepper.description
        return chosen | ({"left_out": self.left_out} if self.left_out else {})

    def replays(self) -> bool:
        return self.built.stepper.description.get("cuda_graph") == "on"

    def running(self) -> AbstractContextManager[Any]:
        """Return a context for many steps: all work on one stream, without a switch per step."""
        return self.built.stepper.on_stream()

    def prepare(self) -> None:
        while not self.built.stepper.is_decided:
            self.run(1)
        self.run(_PREPARED_STEPS)
        synchronise(self.built.device)

    def step(self) -> torch.Tensor:
        return self.built.stepper.step(next(self._steps))["loss"]

    def eager_step(self) -> torch.Tensor:
        return self.built.stepper.eager_step(next(self._steps))["loss"]

    def skipped(self) -> int:
        return int(self.built.stepper.skipped)

    def defer_wait(self) -> Callable[[], float] | None:
        defer = self.built.data.defer_wait
        return None if defer is None else defer()

    def look_inside(self, device: torch.device) -> dict:
        """Return the time split (of eager steps) and memory by kind, or {"why_not": reason}."""
        split: Any = {"why_not": "replayed as one CUDA graph"}
        if not self.replays():
            learners = self.task.learners.values()
            split = attempt(lambda: time_split(self.step, self.built.data, learners, device))
        return {"time_split": split, "memory_by_kind": attempt(self._memory_by_kind)}

    def _memory_by_kind(self) -> dict:
        """Return kind -> dtype -> bytes after one more step, activation memory included.

        This step is eager and not compiled, even if the timed ones were.
        """
        for learner in self.task.learners.values():
            learner.network = learner.model
        overrides = self.config.precision.overrides
        with FirstStep(self.task, self.built.policy, overrides) as watched:
            self.eager_step()
        return watched.memory()

"""The one place that every training step goes through, and the learning rate that it gets.

Schedules are tables by the number of applied updates; a skipped update does not advance them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun.errors import BadInput, MprunError
from mprun.execution.compiled_step import CompiledStep
from mprun.execution.graphed_step import GraphedStep
from mprun.precision.audit import LISTS, Audit, Contradiction, next_due
from mprun.precision.torch_update import reads_rate_on_device
from mprun.tasks.task import Learner, Task


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the learning rate changes over a run.

    After the warm-up, with t from 0 to 1 over the rest of the run and f = final_factor:
    constant: lr; linear: lr * (1 - (1 - f) * t); cosine: lr * (f + (1 - f) * (1 + cos(pi t)) / 2);
    polynomial: lr * (f + (1 - f) * (1 - t)^power); step: lr * gamma per milestone passed, the
    milestones being shares of the whole run; epoch_decay: lr for constant_epochs epochs, then
    times gamma at once and after each further epoch. That is ``lr_decay ** max(epoch + 1 -
    max_epoch, 0)`` of TensorFlow's ptb_word_lm.py (Zaremba et al., arXiv 1409.2329, section 4.1).

    Args:
        warmup_updates: linear rise from lr / warmup_updates to lr.
        warmup_epochs: the same, in epochs of steps_per_epoch updates, if warmup_updates is 0.
    """

    lr: float
    schedule: str
    steps_per_epoch: int = 1
    warmup_updates: int = 0
    warmup_epochs: float = 0.0
    final_factor: float = 0.0
    power: float = 1.0
    milestones: Sequence[float] = ()
    gamma: float = 0.1
    constant_epochs: float = 0.0

    def rates(self, total_updates: int) -> list[float]:
        """Return the learning rate of update 0, 1, ... total_updates - 1."""
        warmup = self.warmup_updates or round(self.warmup_epochs * self.steps_per_epoch)
        warm = min(warmup, total_updates)
        rise = [self.lr * (update + 1) / warmup for update in range(warm)]
        rest = range(warm, total_updates)
        return rise + [self.lr * self._factor(n, total_updates, warmup) for n in rest]

    def _factor(self, update: int, total_updates: int, warmup: int) -> float:
        """Return the share of lr that an update after the warm-up has."""
        t = (update - warmup) / max(1, total_updates - warmup)
        final = self.final_factor
        match self.schedule:
            case "linear":
                return 1 - (1 - final) * t
            case "cosine":
                return final + (1 - final) * (1 + math.cos(math.pi * t)) / 2
            case "polynomial":
                return final + (1 - final) * (1 - t) ** self.power
            case "step":
                return self.gamma ** sum(update >= m * total_updates for m in self.milestones)
            case "epoch_decay":
                drops = math.floor(update / self.steps_per_epoch - self.constant_epochs) + 1
                return self.gamma ** max(0, drops)
        return 1.0


class LearningRate:
    """Apply a table of rates (one per update) to the optimizers of learners.

    The schedule follows applied updates: step number minus skipped updates. On CUDA only the device
    knows that count, so a varying rate is looked up there and the optimizers read a float32 tensor,
    in every mode and in replayed and eager steps alike: a fused kernel would take a plain number in
    float64. Plain numbers are constant rates, those on a CPU and those read on the host by torch.
    """

    def __init__(self, rates: Sequence[float], learners: Sequence[Learner], device: torch.device):
        self.rates, self.learners = list(rates), list(learners)
        self.constant = min(self.rates) == max(self.rates)
        self.table = self._table_on(device)
        # Set here, because `apply` never sets a constant rate.
        for learner in self.learners:
            learner.set_lr(self.rates[0] if self.table is None else self.table[0])

    def _table_on(self, device: torch.device) -> Tensor | None:
        """Return the rates as a tensor, and give each group one to read; None: plain numbers."""
        if self.constant or device.type != "cuda":
            return None
        optimizers = [learner.optimizer for learner in self.learners]
        waits = [one for one in optimizers if not reads_rate_on_device(one)]
        if waits:
            if any(learner.steps.scale.skips_nonfinite for learner in self.learners):
                name = type(waits[0]).__name__
                raise BadInput(
                    f"optim.schedule: without a fused kernel, optimizer {name} reads its learning "
                    "rate on the host, which cannot count skipped updates; use optim=adamw, "
                    "optim.schedule=constant or scaler=none"
                )
            return None
        # One tensor a group: the groups of an optimizer may differ in their rate.
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = torch.empty((), dtype=torch.float32, device=device)
        return torch.tensor(self.rates, dtype=torch.float32, device=device)

    def apply(self, step: int, skipped: Tensor) -> None:
        """Set the rate for `step` (from 0); `skipped`: int64, 0-dim, skipped updates so far."""
        if self.constant:
            return
        if self.table is not None:
            # index_select, because indexing with a tensor would read it on the host.
            last = len(self.rates) - 1  # a bench takes steps beyond the schedule
            number = (min(step, last) - skipped).reshape(1)
            rate: float | Tensor = self.table.index_select(0, number).reshape(())
        else:
            # On a CPU reading the count does not wait; on CUDA no update is skipped here.
            rate = self.at(step, int(skipped) if skipped.device.type == "cpu" else 0)
        for learner in self.learners:
            learner.set_lr(rate)

    def at(self, step: int, skipped: int) -> float:
        """Return the rate used at `step` (from 0) after `skipped` skipped updates."""
        return self.rates[min(step - skipped, len(self.rates) - 1)]


_Take = Callable[[int, bool], dict[str, Tensor]]


class Execution(NamedTuple):
    """The objects that take the steps of one mode; see the arguments of `StepRunner`."""

    graph: GraphedStep | None
    compiled: CompiledStep | None
    settings: Mapping[str, str]


class InForce(NamedTuple):
    """A mode of a run whose mode changes.

    after: steps before it. enter: lets the task train in it; returns what takes its steps.
    """

    after: int
    name: str
    enter: Callable[[], Execution]


class StepRunner:
    """Take training steps of `task`; each step computes the same as `task.train_step`.

    Args:
        compiled: takes the first steps where networks may be compiled; None: they are not.
        stream: the stream that captures graphs; None without graphs.
        settings: choices made beforehand, for the record: "cuda_graph" and "compile" (why they are
            off, if `graph` or `compiled` is None), "channels_last" and "autotune".
        modes: those of a run whose mode changes, in order, the first with `after` 0.

    The first step of each mode is eager and uncompiled, so that it can be watched operation by
    operation. A graph is captured some steps after networks are compiled, or are known to stay
    eager.
    """

    def __init__(
        self,
        task: Task,
        rate: LearningRate,
        device: torch.device,
        *,
        graph: GraphedStep | None = None,
        compiled: CompiledStep | None = None,
        stream: torch.cuda.Stream | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        modes: Sequence[InForce] = (),
    ):
        self.task, self.rate, self.graph, self.compiled = task, rate, graph, compiled
        self.stream, self.settings = stream, dict(settings)
        self.taken = 0
        # Steps with a skipped update so far; counted on the device.
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._parameters = {
            f"{label}.{name}": parameter
            for label, learner in task.learners.items()
            for name, parameter in learner.model.named_parameters()
        }
        # It does not see compiled and replayed steps, which run no single operations.
        self.audit = Audit(task.forward_context, self._parameters)
        self._watched_at = 1  # the number of the next step that the audit watches
        self.notes: list[str] = []  # what the audit has to say after the first step
        self.modes = [*modes]
        self._present = self._newest = 0  # places in `modes`

    def entered_by(self, step: int) -> dict[str, str]:
        """Return first step and name of each later mode in which steps up to `step` were taken."""
        return {str(one.after + 1): one.name for one in self.modes[1:] if one.after < step}

    def follow(self, index: int) -> InForce | None:
        """Enter the mode of step `index` (from 0), also an earlier one; return it if it changes."""
        place = max(0, sum(mode.after <= index for mode in self.modes) - 1)
        if place == self._present:
            return None
        before, audit = self.task.forward_context, self.audit
        if self.compiled is not None:
            self.compiled.compilation.undo()
        self._present = place
        self.graph, self.compiled, settings = self.modes[place].enter()
        self.settings = {**settings, "channels_last": self.settings["channels_last"]}
        context = self.task.forward_context
        if place > self._newest:
            self._newest, context.earlier = place, before.rerouted()
        self.audit, self.notes = Audit(context, self._parameters), []
        self.audit.before = audit.result()
        self.taken, self._watched_at = 0, 1
        return self.modes[place]

    def step(self, index: int, measure: bool = False) -> dict[str, Tensor]:
        """Set the rate, take step `index` (from 0), count a skipped update; no synchronisation.

        Returns 0-dim device tensors by metric name, with `measure` the gradient norm, too.

        Raises:
            BadInput: train.compile or a required CUDA graph turns out to be impossible.
            MprunError: the data source raised it, or the step contradicts the mode, of which the
                first step has to show something.
        """
        self.follow(index)
        self.taken += 1
        watched = self.taken == self._watched_at
        if watched:
            self._watched_at = 1 + next_due(self.taken - 1)
        if not watched or not self._is_eager():
            return self._advance(self._take, index, measure)
        try:
            with self.audit.watching(step=True):
                metrics = self._advance(self._take, index, measure)
            if self.taken == 1:
                said = self.audit.check_happened(), self.audit.what_stays()
                self.notes = [line for line in said if line is not None]
            return metrics
        except Contradiction as error:
            raise MprunError(str(error)) from error

    def eager_step(self, index: int, measure: bool = False) -> dict[str, Tensor]:
        """Take the step by the task alone: no compilation, no replay."""
        self.follow(index)
        return self._advance(self.task.train_step, index, measure)

    def _advance(self, take: _Take, index: int, measure: bool) -> dict[str, Tensor]:
        with self.on_stream():
            self.rate.apply(index, self.skipped)
            metrics = take(index, measure)
            if "found_inf" in metrics:
                self.skipped.add_(metrics["found_inf"].to(torch.int64))
        return metrics

    def _is_eager(self) -> bool:
        """Return whether this step certainly runs operation by operation."""
        first = self.compiled
        if first is not None and not self.is_decided:
            return first.is_eager
        if first is not None and first.is_on:
            return False
        return self.graph is None or self.graph.is_eager

    def _take(self, index: int, measure: bool) -> dict[str, Tensor]:
        if self.compiled is not None and self.compiled.takes(index):
            return self.compiled.step(index, measure)
        if self.graph is None:
            return self.task.train_step(index, measure)
        return self.graph.step(index, measure)

    @property
    def compiles_next(self) -> bool:
        """Return whether the next step compiles networks, which may take minutes."""
        return self.compiled is not None and self.compiled.compiles_next

    @property
    def is_decided(self) -> bool:
        """Return whether it is known if later steps are compiled."""
        return self.compiled is None or self.compiled.decision is not None

    @property
    def takes_back(self) -> bool:
        """Return whether a step that compiles and is left by a signal leaves the state whole."""
        return self.compiled is not None and self.compiled.takes_back

    @property
    def decided(self) -> dict[str, str]:
        """Return what was decided by measured times and changes bits, for the run's checkpoints."""
        if self.compiled is None:
            return {}
        found = self.compiled.decision or self.compiled.recorded
        return {} if found is None else {"compile": found}

    def go_on(self, execution: Mapping[str, Any]) -> None:
        """Take up what an earlier attempt of the run has `decided`."""
        found = execution.get("compile")
        if self.compiled is not None and isinstance(found, str):
            self.compiled.go_on(found)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run everything inside on the stream of the graphs; without graphs this does nothing.

        Around a whole training it makes all work of the run one sequence: steps, evaluations,
        checkpoints and metrics need no further waiting, and memory is allocated for one stream.
        `step` enters it by itself if the caller did not. The two streams then wait for each other
        at every change, which also covers memory that one allocates and the other frees.
        """
        if self.stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self.stream.device)
        if outside == self.stream:
            yield
            return
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outside.wait_stream(self.stream)

    def give_back_cache(self) -> None:
        """Return what an evaluation took to the device, and wait for it, if steps are replayed.

        Replayed steps use only the graph's own pool; the memory would stay reserved, unused.
        """
        if self.graph is not None and self.graph.replayed:
            torch.cuda.empty_cache()

    def audit_result(self) -> dict[str, Any]:
        """Return the audit of the watched steps, and which steps it cannot watch; for run.json."""
        result = self.audit.result()
        result["optimizers"] = sorted({type(one.optimizer).__name__ for one in self.rate.learners})
        for label, learner in self.task.learners.items():
            own = learner.prepared.audit.result()
            for key in LISTS:
                result[key] = sorted({*result[key], *(f"{label}.{name}" for name in own[key])})
        unseen = []
        if self.graph is not None and self.graph.replayed:
            unseen.append("replayed steps (CUDA graph)")
        if self.compiled is not None and self.compiled.compilation.seconds is not None:
            unseen.append(f"compiled steps (train.compile={self.compiled.setting})")
        return result | ({"not_watched": ", ".join(unseen)} if unseen else {})

    @property
    def description(self) -> dict[str, str | float | int]:
        """Describe the execution of the steps so far, for run.json.

        Returns:
            cuda_graph: "on", or "off: " and the reason; capture_s, replayed: seconds of capturing
            and number of replayed steps; host_ms, device_ms: times of an eager step under `auto`.
            compile: the mode, "on: " and the times of a step, or "off: " and the reason; compile_s:
            seconds of the step that compiled. channels_last, autotune: "on" or "off: " and the
            reason.
        """
        found: dict[str, str | float | int] = dict(self.settings)
        graph = self.graph
        if graph is not None:
            reason = graph.off or f"ended after {self.taken} steps, before a capture"
            found["cuda_graph"] = "on" if graph.replayed else f"off: {reason}"
            found |= graph.times
            if graph.replayed:
                found["capture_s"] = round(graph.recorder.seconds, 3)
                found["replayed"] = graph.replayed
        if self.compiled is not None:
            early = f"off: ended after {self.taken} steps, before the decision"
            found |= {"compile": early} | self.decided
            if (seconds := self.compiled.compilation.seconds) is not None:
                found["compile_s"] = round(seconds, 3)
        return found

"""The first steps of a run whose networks are compiled, or are if that turns out to be faster.

The first step is eager, so that it can be watched operation by operation. `train.compile=auto` then
times a few eager steps, compiles, and times as many compiled ones. So a clock decides on how the
later steps round. That is why the decision is recorded, and a resumed run takes it from the record.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from mprun.errors import BadInput, MprunError
from mprun.execution.step_clock import (
    LEAST_GAIN,
    LEAST_LEFT_S,
    STEPS,
    WARM_UP,
    HostBound,
    released,
)
from mprun.numerics.replay import Snapshot
from mprun.record.memory import reset_peak
from mprun.tasks import Learner, Task
from mprun.torch_private import compile_options, said_by_a_compiler


class Compilation:
    """Give learners a compiled form of their model, which shares its tensors.

    Shapes are static: a batch of another size would be compiled once more.

    Args:
        mode: mode of torch.compile ("default", "max-autotune-no-cudagraphs").
        fullgraph: raise an error for a part that cannot be compiled, instead of leaving it eager.
    """

    def __init__(self, learners: Iterable[Learner], mode: str, *, fullgraph: bool):
        self.learners, self.mode, self.fullgraph = list(learners), mode, fullgraph
        self.seconds: float | None = None  # of the first compiled step

    def first_step(self, step: Callable[[], Any]) -> Any:
        """Install the compiled networks and take the step that compiles them.

        That may fail (it needs a C++ compiler on a CPU, Triton on a GPU).
        """
        # fallback_random: the same dropout masks as in the uncompiled network.
        options = compile_options(self.mode) | {"fallback_random": True}
        for learner in self.learners:
            learner.network = torch.compile(
                learner.model, options=options, fullgraph=self.fullgraph, dynamic=False
            )
        started = time.perf_counter()
        with warnings.catch_warnings():
            # torch looks for the gradient of a discriminator's input, which has none.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
            # The configuration decides on the precision of FP32 products.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            # Triton 3.9 announces another default; compiled code rounds as it may.
            warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION is unset")
            result = step()
        self.seconds = time.perf_counter() - started
        return result

    def undo(self) -> None:
        """Let the learners call their models as they are."""
        for learner in self.learners:
            learner.network = learner.model


class CompiledStep:
    """Take the first steps of a run: an eager one, and one that compiles.

    Attributes:
        setting: the value of train.compile.
        takes_back: a step that does not end, because it cannot be compiled or is left by a signal,
            leaves the state as it was.
        decision: whether later steps are compiled, in words, for run.json; None: not known yet.
        recorded: that of an earlier attempt of the run; None: there was none.
        compiles_next: the next step compiles, and may take minutes.
        taken: steps so far.
    """

    takes_back = False

    def __init__(self, task: Task, compilation: Compilation):
        self.task, self.compilation = task, compilation
        self.setting = compilation.mode
        self.decision: str | None = None
        self.recorded: str | None = None
        self.compiles_next = False
        self.taken = 0

    def takes(self, index: int) -> bool:
        """Return whether step `index` (from 0) is taken here: it is still one of the first."""
        return self.decision is None

    @property
    def is_eager(self) -> bool:
        """Return whether the next step is neither compiled nor timed."""
        return self.taken == 0

    @property
    def is_on(self) -> bool:
        """Return whether later steps are compiled."""
        return self.decision is not None and not self.decision.startswith("off")

    def step(self, index: int, measure: bool) -> dict[str, Tensor]:
        """Take step `index` (from 0) like `task.train_step`; BadInput if it cannot be compiled."""
        self.taken += 1
        if not self.compiles_next:
            self.compiles_next = True
            return self.task.train_step(index, measure)
        self.compiles_next, self.decision = False, self.setting
        try:
            return self.compilation.first_step(lambda: self.task.train_step(index, measure))
        except Exception as error:
            if (said := said_by_a_compiler(error)) is None:
                raise
            line = f"train.compile={self.setting}: {said} (allowed here: auto, off)"
            raise BadInput(line) from error

    def go_on(self, decision: str) -> None:
        """Take up what an earlier attempt of the run had decided."""


class CompiledIfFaster(CompiledStep):
    """Time eager steps, then compiled ones; the rest of the run goes on in the faster form.

    A compilation that fails is no error: the steps stay eager, and the decision says why.

    Args:
        steps: the length of the run.
        clocks: for eager steps, and for compiled ones.
    """

    takes_back = True

    def __init__(
        self, task: Task, compilation: Compilation, steps: int, clocks: tuple[HostBound, HostBound]
    ):
        super().__init__(task, compilation)
        self.setting, self.steps = "auto", steps
        self.device = task.forward_context.device
        self.clock, self._compiled = clocks
        self._warm = WARM_UP  # steps that are taken before others are timed
        self._eager_ms = 0.0

    def go_on(self, decision: str) -> None:
        self.recorded, self._warm = decision, 1
        self.decision = decision if decision.startswith("off") else None

    def takes(self, index: int) -> bool:
        if self.taken == 0 and (self.decision or self.recorded) is None:
            left, needed = max(self.steps - index, 0), 2 * (WARM_UP + STEPS)
            if left <= needed:
                self.decision = f"off: {left} steps are left, the measurement takes {needed}"
        return super().takes(index)

    @property
    def is_eager(self) -> bool:
        return self.compilation.seconds is None and self._warm > 0

    def step(self, index: int, measure: bool) -> dict[str, Tensor]:
        self.taken += 1
        if self.compiles_next:
            self.compiles_next = False
            return self._compile(index, measure)
        if self._warm:
            self._warm -= 1
            self.compiles_next = self.recorded is not None
            return self.task.train_step(index, measure)
        # Without loading, which is the same for both forms.
        self.task.step = index
        batches = list(self.task.load(index))
        metrics = self.clock.time(lambda: self.task.compute(released(batches), measure))
        if self.clock.enough:
            # The longer one is a step's time where many follow each other.
            milliseconds = max(self.clock.milliseconds())
            if self.clock is self._compiled:
                self._compare(milliseconds)
            else:
                self._begin(milliseconds, self.steps - index - 1)
        return metrics

    def _begin(self, milliseconds: float, left: int) -> None:
        """Compile next if the eager steps that are left take long enough."""
        self._eager_ms, seconds = milliseconds, left * milliseconds / 1000
        if seconds >= LEAST_LEFT_S:
            self.compiles_next = True
            _say("compiling the network to see whether that is faster; it may take minutes")
        else:
            pays = f"a compilation pays from {LEAST_LEFT_S:.0f} s on"
            self.decision = f"off: eager steps for {seconds:.3g} s are left, {pays}"

    def _compile(self, index: int, measure: bool) -> dict[str, Tensor]:
        """Take a step that compiles; if that fails, undo it and take it eagerly."""
        metrics, reason = self._attempt(index, measure)
        self._forget_memory()
        if metrics is None:
            self.decision = f"off: {reason}"
            _say(f"not compiled: {reason}; steps stay eager")
            return self.task.train_step(index, measure)
        self.decision = self.recorded
        self.clock, self._warm = self._compiled, WARM_UP - 1
        return metrics

    def _attempt(self, index: int, measure: bool) -> tuple[dict[str, Tensor] | None, str]:
        """Return the metrics of the step that compiles; None, and why: it cannot be compiled."""
        before = Snapshot(self.task, self.device)
        try:
            before.take(index, 0)
            with self.task.attempted():
                return self.compilation.first_step(lambda: self.task.train_step(index, measure)), ""
        except BaseException as error:
            self.compilation.undo()
            if before.step is not None:
                before.restore()
            if not isinstance(error, Exception) or isinstance(error, MprunError):
                raise
            line = str(error).strip().partition("\n")[0]
            return None, said_by_a_compiler(error) or f"{type(error).__name__}: {line}"

    def _forget_memory(self) -> None:
        """Give back what the trial took, which the run's peak of memory must not count."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        reset_peak(self.device)

    def _compare(self, milliseconds: float) -> None:
        """Decide, with the time of a compiled step."""
        eager = f"{self._eager_ms:.3g} ms"
        if milliseconds <= (1 - LEAST_GAIN) * self._eager_ms:
            self.decision = f"on: {milliseconds:.3g} ms a step, eager {eager}"
        else:
            self.compilation.undo()
            self._forget_memory()
            self.decision = f"off: compiled steps take {milliseconds:.3g} ms, eager ones {eager}"


def _say(line: str) -> None:
    with suppress(OSError):
        print(f"mprun: {line}", file=sys.stderr)

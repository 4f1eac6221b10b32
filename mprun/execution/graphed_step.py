"""A training step that is recorded once and then replayed: forward, backward, update, loss scale.

A recorded step reads its batches and the carried state at fixed addresses. Work that depends on
the step's number or on the host stays outside the recording: loading and its decisions, the copy
into fixed inputs, the learning rate (a tensor that the optimizers read), and a language model's
state at the start of an epoch. A replay saves time only if the device waits for the host, which is
measured first.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.optim import SGD

from mprun.errors import BadInput
from mprun.execution.cuda_graph import CannotCapture, CudaRecorder
from mprun.execution.step_clock import WARM_UP, HostBound, pays, released
from mprun.precision import DynamicLossScale, DynamicRule
from mprun.precision.audit import FIRST
from mprun.precision.torch_update import has_fused_kernel
from mprun.prepared import prepare
from mprun.tasks import LanguageModel, Task
from mprun.tasks.supervised import Tokens

DRAWS = "each micro-batch draws its own random numbers, and a captured step has one seed"
DEVICE_LIMITS = "the device is the limit"  # first words of the reason why steps stay eager then


class FixedInputs:
    """The inputs of a recorded step in tensors at fixed addresses; costs their memory.

    The micro-batches are copies, into which later steps write their batches. Their `fresh` (of
    `Tokens`) is False: a recorded step always reads the carried state. Between recorded steps
    `task.hidden` is the carried state of a language model, so that a checkpoint holds the start of
    the next step. Eager steps and a restored checkpoint may put other tensors there.
    """

    def __init__(self, task: Task, batches: Sequence[tuple]):
        self.batches: list[tuple] = [
            Tokens(batch.tokens.clone(), batch.targets.clone(), fresh=False)
            if isinstance(batch, Tokens)
            else tuple(part.clone() for part in batch)
            for batch in batches
        ]
        self._model: LanguageModel | None = None
        self._state: tuple[Tensor, ...] = ()
        if isinstance(task, LanguageModel):
            assert task.hidden is not None  # left by the eager steps before
            self._model, self._state = task, tuple(part.clone() for part in task.hidden)

    def fit(self, batches: Sequence[tuple]) -> bool:
        """Return whether the batches have the shapes and dtypes of the copies."""
        own, new = _tensors(self.batches), _tensors(batches)
        return len(own) == len(new) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(own, new, strict=True)
        )

    @torch.no_grad()
    def fill(self, batches: Sequence[tuple]) -> None:
        """Copy in the batches, and the task's state or zeros if fresh, before a recorded step."""
        for own, new in zip(_tensors(self.batches), _tensors(batches), strict=True):
            own.copy_(new, non_blocking=True)
        if self._model is None:
            return
        hidden = self._model.hidden
        if hidden is not self._state and hidden is not None:
            self._write(hidden)
        if hidden is None or is_fresh(batches):
            for own in self._state:
                own.zero_()
        self._model.hidden = self._state

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the new state to where the next step reads it, at the end of a recorded step."""
        if self._model is not None:
            assert self._model.hidden is not None
            self._write(self._model.hidden)
            self._model.hidden = self._state

    def _write(self, hidden: tuple[Tensor, ...]) -> None:
        for own, part in zip(self._state, hidden, strict=True):
            own.copy_(part)


def is_fresh(batches: Sequence[tuple]) -> bool:
    """Return whether the carried state starts anew with these micro-batches."""
    return any(isinstance(batch, Tokens) and batch.fresh for batch in batches)


def _tensors(batches: Sequence[tuple]) -> list[Tensor]:
    return [part for batch in batches for part in batch if isinstance(part, Tensor)]


# The names of the metrics, and the function that replays the step and returns their values.
_Recording = tuple[list[str], Callable[[], Tensor]]


class GraphedStep:
    """Take a few eager steps of `task`, then record one and replay it.

    A step whose batch has another shape than the first is eager, too.

    Args:
        required: a step that cannot be captured ends the run (BadInput); otherwise the steps stay
            eager, and `off` says why.
        clock: times eager steps first; they are recorded only if the host limits them.
        zero_state: a carried state that starts anew is zero (an LSTM of mprun), or there is none;
            otherwise the first step of an epoch is eager.
    """

    def __init__(
        self,
        task: Task,
        recorder: CudaRecorder,
        *,
        required: bool,
        clock: HostBound | None = None,
        zero_state: bool = True,
    ):
        self.task, self.recorder = task, recorder
        self.required, self.clock, self.zero_state = required, clock, zero_state
        self.off: str | None = None
        self.times: dict[str, float] = {}
        self.eager = self.replayed = 0
        # By `measure`: a step that also computes the gradient norm is another recording.
        self._recordings: dict[bool, _Recording] = {}
        self._inputs: FixedInputs | None = None

    @property
    def is_eager(self) -> bool:
        """Return whether the next step is neither recorded nor replayed nor timed."""
        return self.off is not None or self.eager < WARM_UP

    def step(self, index: int, measure: bool) -> dict[str, Tensor]:
        """Take step `index` (from 0) like `task.train_step`; the caller owns the result."""
        self.task.step = index
        batches = list(self.task.load(index))
        if not self.is_eager and self._is_decided():
            metrics = self._replayed(batches, measure)
            if metrics is not None:
                self.replayed += 1
                return metrics
        self.eager += 1
        return self._eager(batches, measure)

    def _eager(self, batches: list[tuple], measure: bool) -> dict[str, Tensor]:
        def compute(measure: bool = measure) -> dict[str, Tensor]:
            return self.task.compute(released(batches), measure)

        if self.off is not None or self._recordings:
            return compute()
        if self.eager == WARM_UP:
            # True: with the gradient norm, so that every kernel has run once before a capture.
            metrics, waits = self.recorder.warm(lambda: compute(True))
            if waits is not None:
                self._give_up(waits)
            elif self.task.draws_in_parts():
                self._give_up(DRAWS)
            return metrics
        if self.eager > WARM_UP and self.clock is not None:
            return self.clock.time(compute)
        return compute()

    def _is_decided(self) -> bool:
        if self.clock is None or self._recordings:
            return True
        if not self.clock.enough:
            return False
        host, device = self.clock.milliseconds()
        self.times = {"host_ms": round(host, 3), "device_ms": round(device, 3)}
        if pays(host, device):
            self.clock = None
            return True
        self.off = f"{DEVICE_LIMITS}, {device:.3g} ms a step of which the host needs {host:.3g}"
        return False

    def _replayed(self, batches: Sequence[tuple], measure: bool) -> dict[str, Tensor] | None:
        """Return the metrics of a recorded step; None: this step has to be eager."""
        if self._inputs is None:
            self._inputs = FixedInputs(self.task, batches)
        inputs, before = self._inputs, getattr(self.task, "hidden", None)
        if not inputs.fit(batches) or (is_fresh(batches) and not self.zero_state):
            return None
        inputs.fill(batches)
        if measure not in self._recordings:
            try:
                self._recordings[measure] = self._record(inputs, measure)
            except (CannotCapture, torch.OutOfMemoryError) as error:
                if isinstance(self.task, LanguageModel):
                    self.task.hidden = before
                self._give_up(str(error).partition("\n")[0], error)
                return None
        names, replay = self._recordings[measure]
        # A copy: the next replay overwrites the recording's own output.
        return dict(zip(names, replay().clone().unbind(), strict=True))

    def _record(self, inputs: FixedInputs, measure: bool) -> _Recording:
        """Record the step, with its metrics as one float32 vector."""
        names: list[str] = []

        def step() -> Tensor:
            metrics = self.task.compute(inputs.batches, measure)
            inputs.keep()
            names[:] = metrics
            return torch.stack([value.detach().float() for value in metrics.values()])

        for own in self.task.learners.values():
            # The step itself begins so, too; the last gradients must not count as its memory.
            own.zero_grad()
        with self.task.attempted():
            return names, self.recorder.record(step)

    def _give_up(self, reason: str, error: Exception | None = None) -> None:
        """Stay eager from here on; raise if a graph is required."""
        if self.required:
            if isinstance(error, torch.OutOfMemoryError):
                raise error
            raise BadInput(f"train.cuda_graph=on: {reason} (allowed here: auto, off)") from error
        self.off, self._recordings, self._inputs = reason, {}, None
        with suppress(OSError):
            print(f"mprun: no CUDA graph: {reason}; steps stay eager", file=sys.stderr)


_WIDTH, _BATCH = 64, 32
_REPLAYS = 3


def why_no_replay_on(device: torch.device) -> str | None:
    """Return why recorded steps are unreliable on `device`, None: they are reliable.

    It finds a driver, a torch or a kernel that is a little too old before a run relies on replays,
    and waits for the device. torch.OutOfMemoryError, which it may raise, proves nothing.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):  # which also makes `device` the current one
        return difference(CudaRecorder(device, stream), device)


def difference(recorder: CudaRecorder, device: torch.device) -> str | None:
    """Describe how steps recorded by `recorder` differ from eager ones; None: in no bit."""
    with torch.random.fork_rng(devices=[]):  # the random state belongs to the caller
        layer, inputs = nn.Linear(_WIDTH, _WIDTH), torch.randn(_BATCH, _WIDTH)
    (eager, expected), (recorded, weights) = (
        _training(copy.deepcopy(layer).to(device), inputs.to(device)) for _ in range(2)
    )
    # The first calls of a prepared model are compared by value, which waits for the device.
    for _ in range(FIRST + 1 + _REPLAYS):
        wanted = eager()
    for _ in range(FIRST):
        recorded()
    waits = recorder.warm(recorded)[1]
    if waits is not None:
        return waits
    before = _on_host(weights)
    try:
        replay = recorder.record(recorded)
    except CannotCapture as error:
        return f"a step cannot be captured ({error})"
    for _ in range(_REPLAYS):
        loss = replay()
    after = _on_host(weights)
    if all(map(torch.equal, after, before)):
        return "a replay leaves the weights as they were"
    if not all(map(torch.equal, after, _on_host(expected))):
        return "replayed steps end with other weights than eager ones"
    if loss.item() != wanted.item():
        return f"replayed steps end with the loss {loss.item()!r}, eager ones {wanted.item()!r}"
    return None


def _training(layer: nn.Linear, inputs: Tensor) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return the step of an FP16 run (masters, loss scale, skipped updates), and its weights.

    The step returns its loss, float32, 0-dim.
    """
    fused = has_fused_kernel("sgd", inputs.device)
    optimizer = SGD(layer.parameters(), lr=1.0, momentum=0.5, fused=fused)
    scale = DynamicLossScale(DynamicRule(1024.0), device=inputs.device)
    prepare(layer, optimizer, "fp16_master_scaled", scaler=scale)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = layer(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [*layer.parameters()]


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies; the CPU, which is not under test, compares them."""
    return [tensor.detach().cpu().clone() for tensor in tensors]

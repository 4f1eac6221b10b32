"""A training step that is recorded once and then replayed: forward, backward, update, loss scale.

What a recorded step reads lies at fixed addresses: the batches of a step, and the carried state.
Outside of the recording stays what depends on the step's number or on the host: loading and its
decisions, the copy into fixed inputs, the learning rate (a tensor that the optimizers read), and
the state of a language model where an epoch starts. A replay saves time only where the device waits
for the host, which is measured first.

`why_no_replay_on` asks whether a replay computes here what the eager step does: a driver, a torch
or a kernel that is a little too old must be seen before a run counts on replays.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from mprun.errors import BadInput
from mprun.execution.cuda_graph import CannotCapture, CudaRecorder
from mprun.precision import (
    DynamicLossScale,
    ForwardContext,
    MixedPrecisionOptimizer,
    cast_model,
    get_policy,
)
from mprun.precision.torch_update import has_fused_kernel
from mprun.tasks import LanguageModel, Task
from mprun.tasks.supervised import Tokens

STEPS = 5
# Replaying a graph saves what the host needs to launch kernels one by one. Where the device is
# still busy for a fifth of the step when the host has launched the last one, the host is ahead in
# every later step, and a graph would cost a second pool of memory for nothing (whole-step capture
# of ResNet-50 on a V100: -44 % time at batch 1, 0 % from batch 8 on, pytorch/benchmark#796).
LEAST_SHARE = 0.8
DEVICE_LIMITS = "the device is the limit"  # begins the reason why steps stay eager then


class HostBound:
    """Times steps one by one on an idle device: the host's part, and the device's.

    Host: from the first launch to the last. Device: from the first launch until it is idle again.
    The device is waited for between these few steps and never inside of one. (A host that launches
    more than about a thousand kernels ahead is held up by CUDA; a single step seldom does.)
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.host: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def enough(self) -> bool:
        return len(self.host) >= STEPS

    def time(self, step: Callable[[], Any]) -> Any:
        """What `step` returns; its times are kept."""
        idle, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        stream = torch.cuda.current_stream(self.device)
        idle.record(stream)
        idle.synchronize()
        begin.record(stream)
        started = time.perf_counter()
        result = step()
        self.host.append(1000 * (time.perf_counter() - started))
        end.record(stream)
        self._events.append((begin, end))
        return result

    def milliseconds(self) -> tuple[float, float]:
        """Medians of (host, device) over the steps; waits for the last one."""
        self._events[-1][1].synchronize()
        device = [begin.elapsed_time(end) for begin, end in self._events]
        return statistics.median(self.host), statistics.median(device)


def pays(host_ms: float, device_ms: float) -> bool:
    """Whether a graph is worth its memory."""
    return host_ms >= LEAST_SHARE * device_ms


class FixedInputs:
    """What a recorded step reads, in tensors that stay where they are; costs their memory.

    Of the micro-batches these are copies that the batches of later steps are written into; `fresh`
    of `Tokens` is False in them: a recorded step reads the carried state, whatever it is. To the
    carried state of a language model `task.hidden` refers between recorded steps, so that a
    checkpoint holds what the next step starts from. Steps outside, and a restored checkpoint, may
    put other tensors there.
    """

    def __init__(self, task: Task, batches: Sequence[tuple]):
        self.batches = [_copied(batch) for batch in batches]
        self._model: LanguageModel | None = None
        self._state: tuple[Tensor, ...] = ()
        if isinstance(task, LanguageModel):
            assert task.hidden is not None  # left by the eager steps before
            self._model, self._state = task, tuple(part.clone() for part in task.hidden)

    def fit(self, batches: Sequence[tuple]) -> bool:
        """Whether shapes and dtypes are those of the copies."""
        own, new = _tensors(self.batches), _tensors(batches)
        return len(own) == len(new) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(own, new, strict=True)
        )

    @torch.no_grad()
    def fill(self, batches: Sequence[tuple]) -> None:
        """Before a recorded step: its batches; the state as the task has it, or zeros if fresh."""
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
        """At the end of a recorded step: the new state goes where the next step reads it."""
        if self._model is not None:
            assert self._model.hidden is not None
            self._write(self._model.hidden)
            self._model.hidden = self._state

    def _write(self, hidden: tuple[Tensor, ...]) -> None:
        for own, part in zip(self._state, hidden, strict=True):
            own.copy_(part)


def is_fresh(batches: Sequence[tuple]) -> bool:
    """Whether the carried state starts anew with these micro-batches."""
    return any(isinstance(batch, Tokens) and batch.fresh for batch in batches)


def _copied(batch: tuple) -> tuple:
    if isinstance(batch, Tokens):
        return Tokens(batch.tokens.clone(), batch.targets.clone(), fresh=False)
    return tuple(part.clone() for part in batch)


def _tensors(batches: Sequence[tuple]) -> list[Tensor]:
    return [part for batch in batches for part in batch if isinstance(part, Tensor)]


# Real training steps, taken eagerly. They choose and load kernels (cudnn.benchmark), and create
# what lives longer than a step, on the stream and in the memory that are there later.
WARM_UP = 3
# The names of the metrics, and what replays the step and returns their values.
_Recording = tuple[list[str], Callable[[], Tensor]]


class GraphedStep:
    """Steps of `task` that are replayed after a few eager ones.

    A batch of another shape than the first is eager too.

    Args:
        required: a step that cannot be captured ends the run (BadInput); else the steps stay eager,
            and `off` says why.
        clock: eager steps are timed first, and recorded only if the host is what limits them.
        zero_state: a carried state that starts anew is zero (an LSTM of mprun), or there is none;
            else the first step of an epoch is eager.
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
        """Whether the next step is neither recorded nor replayed nor timed."""
        return self.off is not None or self.eager < WARM_UP

    def step(self, index: int, measure: bool) -> dict[str, Tensor]:
        """Step `index` (from 0) as `task.train_step`; the tensors returned belong to the caller."""
        self.task.step = index
        batches = list(self.task.load(index))
        if self.off is None and self.eager >= WARM_UP and self._is_decided():
            metrics = self._replayed(batches, measure)
            if metrics is not None:
                self.replayed += 1
                return metrics
        self.eager += 1
        return self._eager(batches, measure)

    def _eager(self, batches: list[tuple], measure: bool) -> dict[str, Tensor]:
        def compute(measure: bool = measure) -> dict[str, Tensor]:
            return self.task.compute(_handed_over(batches), measure)

        if self.off is not None or self._recordings:
            return compute()
        if self.eager == WARM_UP:
            # With the gradient norm, so that every kernel has run once before a capture.
            metrics, waits = self.recorder.warm(lambda: compute(True))
            if waits is not None:
                self._give_up(waits)
            elif self.task.draws_in_parts():
                parts = self.task.accumulate
                self._give_up(f"each of {parts} micro-batches draws random numbers of its own")
            return metrics
        if self.eager > WARM_UP and self.clock is not None:
            return self.clock.time(compute)
        return compute()

    def _is_decided(self) -> bool:
        """Whether this step is to be recorded or replayed."""
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
        """The metrics of a recorded step; None where this step has to be eager."""
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

        parameters = [p for own in self.task.learners.values() for p in own.model.parameters()]
        trained = [parameter.requires_grad for parameter in parameters]
        for own in self.task.learners.values():
            # As the step does first: gradients of the last step are no memory that this one needs.
            own.optimizer.zero_grad()
        try:
            return names, self.recorder.record(step)
        except BaseException:
            # A GAN freezes its discriminator in the middle of a step.
            for parameter, value in zip(parameters, trained, strict=True):
                parameter.requires_grad_(value)
            raise

    def _give_up(self, reason: str, error: Exception | None = None) -> None:
        """Eager from here on, or the end of the run where a graph is required."""
        if self.required:
            if isinstance(error, torch.OutOfMemoryError):
                raise error
            raise BadInput(f"train.cuda_graph=on: {reason} (allowed here: auto, off)") from error
        self.off, self._recordings, self._inputs = reason, {}, None
        with suppress(OSError):
            print(f"mprun: no CUDA graph: {reason}; steps stay eager", file=sys.stderr)


def _handed_over(batches: list[tuple]) -> Iterator[tuple]:
    """The batches one by one, out of the list: a step releases what it no longer needs."""
    while batches:
        yield batches.pop(0)


_WIDTH, _BATCH = 64, 32
_REPLAYS = 3


def why_no_replay_on(device: torch.device) -> str | None:
    """Why a recorded step cannot be relied on, None: it can. Waits for the device.

    Args:
        device: a CUDA device, by its index.

    Raises:
        torch.OutOfMemoryError: which says nothing of replays.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):  # which also makes `device` the current one
        return difference(CudaRecorder(device, stream), device)


def difference(recorder: CudaRecorder, device: torch.device) -> str | None:
    """In what steps recorded by `recorder` differ from eager ones; None: in no bit."""
    with torch.random.fork_rng(devices=[]):  # the random state belongs to the caller
        layer, inputs = nn.Linear(_WIDTH, _WIDTH), torch.randn(_BATCH, _WIDTH)
    eager, recorded = (
        _Training(copy.deepcopy(layer).to(device), inputs.to(device)) for _ in range(2)
    )
    for _ in range(WARM_UP + _REPLAYS):
        expected = eager.step()
    for _ in range(WARM_UP - 1):
        recorded.step()
    waits = recorder.warm(recorded.step)[1]
    if waits is not None:
        return waits
    before = recorded.on_host()
    try:
        replay = recorder.record(recorded.step)
    except CannotCapture as error:
        return f"a step cannot be captured ({error})"
    for _ in range(_REPLAYS):
        loss = replay()
    after, wanted = recorded.on_host(), eager.on_host()
    if all(map(torch.equal, after, before)):
        return "a replay leaves the weights as they were"
    if not all(map(torch.equal, after, wanted)):
        return "replayed steps end with other weights than eager ones"
    if loss.item() != expected.item():
        return f"replayed steps end with the loss {loss.item()!r}, eager ones {expected.item()!r}"
    return None


class _Training:
    """Of one linear layer, with what a run has in FP16: masters, loss scale, skipped updates."""

    def __init__(self, layer: nn.Linear, inputs: Tensor):
        policy, device = get_policy("fp16_master_scaled"), inputs.device
        fused = has_fused_kernel("sgd", device)
        cast = cast_model(layer, policy)
        self._layer, self._inputs = layer, policy.cast_inputs(inputs)
        self._arithmetic = ForwardContext(policy, device)
        self._scale = DynamicLossScale(1024.0, device=device)
        self._optimizer = MixedPrecisionOptimizer(
            cast,
            lambda named: SGD([p for _, p in named], lr=1.0, momentum=0.5, fused=fused),
            self._scale,
            update="auto",
        )
        self._weights = [*layer.parameters(), *cast.masters.values()]

    def on_host(self) -> list[Tensor]:
        """Copies of weights and masters, which the CPU compares: not what is being tested."""
        return [tensor.detach().cpu().clone() for tensor in self._weights]

    def step(self) -> Tensor:
        """One training step; its loss, float32, 0-dim."""
        self._optimizer.zero_grad()
        with self._arithmetic:
            loss = self._layer(self._inputs).float().square().mean()
            self._optimizer.backward(loss)
        self._optimizer.step()
        self._scale.update()
        return loss.detach()

"""Which steps of a run are probed and shadowed, and where what they show is written.

In TensorBoard: histograms over exponents for whole models, scalars per module.

The shadow step takes the same batch from the same weights in FP32, beside the mode's own step. Two
training curves that part say that rounding changed something, not how much: training is chaotic,
and any difference grows. One step from equal weights tells what rounding did to it. The task's own
`train_step` computes it, on a twin of the task whose models are FP32 copies of the master weights
and whose optimizers only collect gradients. Random numbers are those of the mode's step, so dropout
masks and generator inputs are the same.
"""

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from mprun.numerics.probe import Chosen, Probe, chosen_modules, loss_scale_names, owner
from mprun.numerics.probe_record import (
    KINDS,
    Agreement,
    LearnerProbe,
    ProbeRecord,
    TensorStats,
    write_probe,
)
from mprun.precision import (
    BatchNormGuard,
    CastModel,
    ForwardContext,
    MixedPrecisionOptimizer,
    NoLossScale,
    Update,
    fp32_copy,
    get_policy,
    ieee_fp32,
)
from mprun.precision.random_states import random_states, restore_random_states
from mprun.tasks import GAN, LanguageModel, TrainState

# Before these names of metrics stands which learner of a GAN they are of.
_PREFIX = {"generator": "g_", "discriminator": "d_"}


class Shadow:
    """Runs one training step of `task` a second time, in FP32; the task does not notice.

        with Shadow(task, chosen) as shadow:
            metrics = task.train_step(index)
        loss = shadow.run(index, metrics)
        agreements = shadow.read()

    chosen: the modules to compare, from `chosen_modules`. In a GAN the generator is compared
    against the discriminator as the mode's own step has just updated it. Costs an FP32 step, an
    FP32 copy of the models with gradients, and a copy of the mode's gradients.
    """

    def __init__(self, task, chosen: Chosen):
        self.task, self.chosen = task, chosen
        self.device = task.arithmetic.device
        self.own: dict[str, dict[str, Tensor]] = {}
        self.sums: dict[tuple[str, str], Tensor] = {}

    def __enter__(self) -> "Shadow":
        self.random = random_states(self.device)
        # Copies of the weights and of the carried state as they are before the step.
        self.twin = _twin(self.task, self.device)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            for name, learner in self.task.learners.items():
                gradients = learner.optimizer.unscaled_gradients()
                self.own[name] = {own: value.float() for own, value in gradients.items()}

    def run(self, index: int, metrics: dict[str, Tensor]) -> Tensor:
        """Take the step in FP32 and compare; its loss as a 0-dim tensor.

        index: the one the task's own step had; metrics: what that returned.
        """
        afterwards = random_states(self.device)
        restore_random_states(self.random, self.device)
        try:
            with ieee_fp32():
                loss = self.twin.train_step(index)["loss"]
        finally:
            restore_random_states(afterwards, self.device)
        for name, learner in self.twin.learners.items():
            clip, factor = self.task.learners[name].optimizer.clip_norm, None
            if clip is not None:
                norm = metrics[f"{_PREFIX.get(name, '')}grad_norm"]
                factor = (clip / (norm + 1e-6)).clamp(max=1.0)
            self._compare(name, learner.optimizer.gradients, factor)
        return loss

    def read(self) -> dict[str, dict[str, Agreement]]:
        """TrainState -> module -> agreement; waits for the device, in one transfer."""
        names: dict[str, dict[str, Agreement]] = {name: {} for name in self.chosen}
        if self.sums:
            rows = torch.stack(list(self.sums.values())).tolist()
            for (name, module), row in zip(self.sums, rows, strict=True):
                names[name][module] = Agreement(*row)
        return names

    @torch.no_grad()
    def _compare(self, name: str, fp32: dict[str, Tensor], factor: Tensor | None) -> None:
        own = self.own.pop(name)
        for parameter, reference in fp32.items():
            module = owner(parameter, self.chosen[name])
            if module is None or parameter not in own:
                continue
            # In float64: squares of gradients below 2^-75 are 0 in FP32.
            gradient, reference = own[parameter].double(), reference.double()
            if factor is not None:
                gradient = gradient / factor  # what clipping did is undone
            sums = torch.stack(
                [
                    (gradient * reference).sum(),
                    gradient.square().sum(),
                    reference.square().sum(),
                    (gradient - reference).square().sum(),
                ]
            )
            self.sums[name, module] = self.sums.get((name, module), 0) + sums


class _Gradients:
    """In place of an optimizer: collects gradients, and moves the model where the mode's own went.

    A generator's loss is computed after the discriminator's update, and it has to be the same one.
    """

    def __init__(self, module: nn.Module, own):
        self.parameters = dict(module.named_parameters())
        self.own = own
        self.gradients: dict[str, Tensor] = {}
        self.one = torch.ones((), device=own.parameters[0].device)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def backward(self, loss: Tensor, loss_index: int = 0) -> None:
        loss.backward()

    @torch.no_grad()
    def step(self, measure_norm: bool = False) -> Update:
        self.gradients = {
            name: parameter.grad
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
        for name, updated in zip(self.own.names, self.own.updated, strict=True):
            self.parameters[name].copy_(updated)
        return Update(self.one, None, None)


def _twin(task, device: torch.device):
    """The same task in FP32 on copies of its models; it shares the data."""
    policy = get_policy("fp32")
    twin = copy.copy(task)
    twin.policy, twin.arithmetic = policy, ForwardContext(policy, device)
    twin.learners = {}
    for name, learner in task.learners.items():
        model = fp32_copy(learner.build_model, learner.cast, learner.optimizer.masters)
        gradients = _Gradients(model, learner.optimizer)
        # Of an optimizer it has what a training step calls.
        optimizer = cast(MixedPrecisionOptimizer, gradients)
        twin.learners[name] = TrainState(
            CastModel(model, policy, {}), optimizer, learner.build_model
        )
    if isinstance(task, GAN):
        twin.g, twin.d = twin.learners["generator"], twin.learners["discriminator"]
        twin.discriminator_guard = BatchNormGuard(twin.d.model)
        twin.loss_scales = {}
    else:
        twin.learner = twin.learners["model"]
        twin.loss_scale = NoLossScale(device)
    if isinstance(task, LanguageModel) and task.hidden is not None:
        twin.hidden = tuple(part.detach().float() for part in task.hidden)
    return twin


if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Metrics = dict[str, Tensor]


class Probing:
    """Watches the steps of `task` that are due; writes RUN/numerics and TensorBoard.

    Args:
        directory: of the run.
        writer: a SummaryWriter.
        every: probe the steps divisible by it.
        patterns: of the modules, see `chosen_modules` (raises BadInput).
        shadow_every: shadow those divisible by it, 0: none.
    """

    def __init__(
        self,
        task,
        directory: Path,
        writer: "SummaryWriter",
        *,
        every: int,
        patterns: list[str],
        shadow_every: int,
    ):
        self.task, self.directory, self.writer = task, directory, writer
        self.every, self.shadow_every = every, shadow_every
        self.chosen = chosen_modules(task.learners, patterns)

    def due(self, step: int) -> bool:
        """Whether step `step` (from 1) is to be watched."""
        return step % self.every == 0 or self._shadows(step)

    def _shadows(self, step: int) -> bool:
        return self.shadow_every > 0 and step % self.shadow_every == 0

    def watch(self, step: int, index: int, take: Callable[[], Metrics]) -> Metrics:
        """Take step `step` by `take()` and record what it shows; returns its metrics.

        index: what `take` hands to the task's `train_step`.
        """
        # Copies: the scales move in place at the end of the step.
        scales = {name: scale.scale.clone() for name, scale in self.task.loss_scales.items()}
        probe = Probe(self.task, self.chosen) if step % self.every == 0 else None
        shadow = Shadow(self.task, self.chosen) if self._shadows(step) else None
        with ExitStack() as stack:
            for observer in (shadow, probe):
                if observer is not None:
                    stack.enter_context(observer)
            metrics = take()
        loss = metrics["loss"]
        scalars = [loss, metrics.get("found_inf", torch.zeros_like(loss)), *scales.values()]
        if shadow is not None:
            scalars.append(shadow.run(index, metrics))
        record = self._record(step, list(scales), scalars, probe, shadow)
        write_probe(self.directory, record)
        show_probe(self.writer, record)
        return metrics

    def _record(
        self,
        step: int,
        scales: list[str],
        scalars: list[Tensor],
        probe: Probe | None,
        shadow: Shadow | None,
    ) -> ProbeRecord:
        """scalars: the loss, found_inf, one value of each of `scales`, with a shadow its loss."""
        if probe is not None:
            learners, values = probe.read(scalars)
        else:
            values = torch.stack([scalar.double() for scalar in scalars]).tolist()
            learners = {
                name: LearnerProbe(loss_scale_names(self.task, name)) for name in self.task.learners
            }
        if shadow is not None:
            for name, found in shadow.read().items():
                learners[name] = replace(learners[name], shadow=found)
        return ProbeRecord(
            step=step,
            skipped=values[1] != 0,
            log2_loss_scale={
                name: math.log2(value) for name, value in zip(scales, values[2:], strict=False)
            },
            learners=learners,
            loss=None if shadow is None else values[0],
            loss_fp32=None if shadow is None else values[-1],
        )


def show_probe(writer: "SummaryWriter", record: ProbeRecord) -> None:
    """Add one probe to the SummaryWriter at its step.

    Histograms `exponents/KIND`: the binary exponents of all non-zero finite values, one bucket
    each. Scalars KIND_underflow, KIND_overflow (shares in FP16, of the non-zero values), KIND_zeros
    (share of all), KIND_log2_amax and KIND_headroom (powers of two), lost_updates_fp16 and
    lost_updates_bf16 (shares), shadow_cosine, shadow_norm_ratio and shadow_relative_error, each
    `/total` and `/MODULE`. Behind the slash a GAN has the learner first.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = []
    for learner, measured in record.learners.items():
        prefix = f"{learner}." if len(record.learners) > 1 else ""
        for kind in KINDS:
            total = measured.total(kind)
            if total is not None and total.counts.nonzero:
                values += _histogram(f"exponents/{prefix}{kind}", total).value
        for tag, name, value in _scalars(measured):
            if math.isfinite(value):
                values.append(Summary.Value(tag=f"{tag}/{prefix}{name}", simple_value=value))
    # In one event: some hundred modules with a call each would take longer than a training step.
    file_writer: Any = writer.file_writer  # torch declares it as None
    file_writer.add_summary(Summary(value=values), record.step)


def _scalars(measured: LearnerProbe):
    """(tag, module or "total", value) of all that is shown as a curve."""
    for kind in KINDS:
        total = measured.total(kind)
        if total is not None:
            for name, stats in {"total": total, **measured.tensors[kind]}.items():
                shares, headroom = stats.counts.shares(), stats.headroom
                yield f"{kind}_underflow", name, shares.underflow
                yield f"{kind}_overflow", name, shares.overflow
                yield f"{kind}_zeros", name, stats.counts.zeros / stats.counts.total
                yield f"{kind}_log2_amax", name, math.log2(stats.amax) if stats.amax else math.nan
                yield f"{kind}_headroom", name, math.nan if headroom is None else headroom
    if measured.lost_updates:
        for name, lost in {"total": measured.total_lost(), **measured.lost_updates}.items():
            yield "lost_updates_fp16", name, lost.share("fp16")
            yield "lost_updates_bf16", name, lost.share("bf16")
    agreement = measured.total_agreement()
    if agreement is not None and measured.shadow:
        for name, sums in {"total": agreement, **measured.shadow}.items():
            yield "shadow_cosine", name, sums.cosine
            yield "shadow_norm_ratio", name, sums.norm_ratio
            yield "shadow_relative_error", name, sums.relative_error


def _histogram(tag: str, stats: TensorStats):
    by_exponent = stats.counts.by_exponent()
    from torch.utils.tensorboard.summary import histogram_raw

    low, high = min(by_exponent), max(by_exponent)
    counts = [by_exponent.get(exponent, 0) for exponent in range(low, high + 1)]
    middles = [exponent + 0.5 for exponent in range(low, high + 1)]
    return histogram_raw(
        tag,
        float(low),
        float(high + 1),
        sum(counts),
        sum(c * m for c, m in zip(counts, middles, strict=True)),
        sum(c * m * m for c, m in zip(counts, middles, strict=True)),
        [float(exponent + 1) for exponent in range(low, high + 1)],
        counts,
    )

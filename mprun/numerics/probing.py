"""Choose the steps of a run to probe and to shadow, and write the results.

The shadow step takes the same batch from the same weights in FP32, beside the mode's own step. Two
diverging training curves show that rounding changed something, but not how much: training is
chaotic, and any difference grows. One step from equal weights shows the effect of rounding on it.
The task's own `train_step` computes it, on a twin of the task. The twin's models are FP32 copies of
the master weights, and its optimizers only collect gradients. Random numbers are those of the
mode's step, so dropout masks and generator inputs are the same.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mprun.numerics.exponent_shares import FORMATS, merged
from mprun.numerics.probe import Chosen, Probe, chosen_modules, loss_scale_names, owner
from mprun.numerics.probe_record import (
    KINDS,
    Agreement,
    LearnerProbe,
    ProbeRecord,
    TensorStats,
    write_probe,
)
from mprun.precision import ForwardContext, Update, get_policy, ieee_fp32
from mprun.precision.random_states import random_states, restore_random_states
from mprun.precision.recurrent import own_recurrent
from mprun.prepared.copies import plain_copy
from mprun.torch_private import foreach_div_

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_PREFIX = {"generator": "g_", "discriminator": "d_"}  # of metric names in a GAN
# TensorBoard sorts sections by their first tag, where "_" counts like "/", and opens two of them:
# eval/ and train/, whose first tags precede "train/probes".
_SECTION = "train_probes_"


class Shadow:
    """Run one training step of `task` a second time, in FP32, without effect on the task.

        with Shadow(task, chosen) as shadow:
            metrics = task.train_step(index)
        loss = shadow.run(index, metrics)
        agreements = shadow.read()

    In a GAN the generator is compared against the discriminator as the mode's own step has just
    updated it. A shadow costs an FP32 step, an FP32 copy of the models with gradients, and a copy
    of the mode's gradients.
    """

    def __init__(self, task, chosen: Chosen):
        self.task, self.chosen = task, chosen
        self.device = task.forward_context.device
        self.own: dict[str, dict[str, Tensor]] = {}
        self.sums: dict[tuple[str, str], Tensor] = {}

    def __enter__(self) -> "Shadow":
        self.random = random_states(self.device)
        # Copies of the weights and of the carried state before the step.
        policy = get_policy("fp32")
        self.twin = self.task.twin(
            {name: _Gradients(own, own.statistics) for name, own in self.task.learners.items()},
            ForwardContext(policy, self.device),
        )
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            for name, learner in self.task.learners.items():
                gradients = learner.steps.unscaled_gradients()
                self.own[name] = {own: value.float() for own, value in gradients.items()}

    def run(self, index: int, metrics: dict[str, Tensor]) -> Tensor:
        """Take step `index` in FP32, compare, and return its loss; metrics: of the own step."""
        afterwards = random_states(self.device)
        restore_random_states(self.random, self.device)
        try:
            with ieee_fp32():
                loss = self.twin.train_step(index)["loss"]
        finally:
            restore_random_states(afterwards, self.device)
        for name, learner in self.task.learners.items():
            clip, factor = learner.clip_norm, None
            if clip is not None:
                norm = metrics[f"{_PREFIX.get(name, '')}grad_norm"]
                factor = (clip / (norm + 1e-6)).clamp(max=1.0)
            self._compare(name, factor)
        return loss

    def read(self) -> dict[str, dict[str, Agreement]]:
        """Return learner -> module -> agreement; waits for the device, in one transfer."""
        found: dict[str, dict[str, Agreement]] = {name: {} for name in self.chosen}
        rows = torch.stack(list(self.sums.values())).tolist() if self.sums else []
        for (name, module), row in zip(self.sums, rows, strict=True):
            found[name][module] = Agreement(*row)
        return found

    @torch.no_grad()
    def _compare(self, name: str, factor: Tensor | None) -> None:
        own = self.own.pop(name)
        for parameter, reference in self.twin.learners[name].gradients.items():
            module = owner(parameter, self.chosen[name])
            if module is None or parameter not in own:
                continue
            # In float64: squares of gradients below 2^-75 are 0 in FP32.
            gradient, reference = own[parameter].double(), reference.double()
            if factor is not None:
                gradient = gradient / factor  # undoes the clipping
            squares = [one.square().sum() for one in (gradient, reference, gradient - reference)]
            sums = torch.stack([(gradient * reference).sum(), *squares])
            self.sums[name, module] = self.sums.get((name, module), 0) + sums


class _Gradients:
    """A stand-in for a learner: collect gradients, and copy the mode's own update.

    A generator's loss is computed after the discriminator's update, and that must be the same one.
    """

    def __init__(self, own, statistics):
        self.own = own
        self.model = self.network = own_recurrent(plain_copy(own.prepared.model))
        self.parameters = dict(self.model.named_parameters())
        self.statistics = statistics and type(statistics)(self.model)
        self.prepared = self  # which guards its statistics
        self.gradients: dict[str, Tensor] = {}
        self.one = torch.ones((), device=own.updated[0].device)

    def inside(self, *inputs: Any, part_of: "_Gradients | None" = None) -> Any:
        return self.network(*inputs)

    def outside(self, loss: Tensor) -> Tensor:
        return loss

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self.guard_step()

    def guard_step(self) -> None:
        if self.statistics is not None:
            self.statistics.save()

    def sum_at_once(self, last: bool) -> None:
        """Do nothing: one process takes every micro-batch."""

    def end_part(self) -> None:
        """Do nothing: `.grad` adds up micro-batches."""

    @torch.no_grad()
    def step(self, measure: bool = False) -> Update:
        found = {name: parameter.grad for name, parameter in self.parameters.items()}
        self.gradients = {name: grad for name, grad in found.items() if grad is not None}
        if self.own.parts > 1:
            foreach_div_(list(self.gradients.values()), self.own.parts)
        for name, updated in self.own.named.items():
            self.parameters[name].copy_(updated)
        return Update(self.one, None, None)


Metrics = dict[str, Tensor]


class Probing:
    """Watch the due steps of `task`; write RUN/numerics and TensorBoard.

    every, shadow_every: probe or shadow every n-th step; 0: none. modules: patterns, as in
    `chosen_modules`, which raises BadInput.
    """

    def __init__(
        self,
        task,
        directory: Path,
        writer: "SummaryWriter | None",
        *,
        every: int,
        shadow_every: int = 0,
        modules: Sequence[str] = (),
    ):
        self.task, self.directory, self.writer = task, directory, writer
        self.every, self.shadow_every = every, shadow_every
        self.chosen = chosen_modules(task.learners, modules)

    def due(self, step: int) -> bool:
        """Return whether to watch step `step` (from 1)."""
        return any(self._looks(step))

    def _looks(self, step: int) -> list[bool]:
        """Return whether to probe and whether to shadow the step."""
        return [n > 0 and step % n == 0 for n in (self.every, self.shadow_every)]

    def watch(self, step: int, index: int, take: Callable[[], Metrics]) -> Metrics:
        """Take step `step` by `take()` and record its probe; return its metrics."""
        with self.watching(step, index) as watched:
            watched.metrics = take()
        return watched.metrics

    @contextmanager
    def watching(self, step: int, index: int = 0) -> "Iterator[Watched]":
        """Record step `step`, `train_step(index)` inside the block, which must set its metrics."""
        with Watched(self.task, self.chosen, *self._looks(step)) as watched:
            yield watched
        record = watched.record(step, index)
        write_probe(self.directory, record)
        if self.writer is not None:
            show_probe(self.writer, record)


class Watched:
    """One step under a probe, a shadow or both, in a `with` block; `record` returns the result.

    The block must set `metrics`, the step's result: `loss`, `found_inf` if updates can be skipped,
    and for a shadow all of them.
    """

    def __init__(self, task, chosen: Chosen, probes: bool = True, shadows: bool = False):
        self.task = task
        self.probe = Probe(task, chosen) if probes else None
        self.shadow = Shadow(task, chosen) if shadows else None
        self.metrics: Metrics = {}

    def __enter__(self) -> "Watched":
        # Copies: the scales change in place at the end of the step.
        self.scales = {name: s.scale.clone() for name, s in self.task.loss_scales.items()}
        with ExitStack() as stack:
            for watcher in (self.shadow, self.probe):
                stack.enter_context(watcher or nullcontext())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def record(self, step: int, index: int = 0) -> ProbeRecord:
        """Return the record of step `step`; index: the argument of the task's `train_step`."""
        loss = self.metrics["loss"]
        scalars = [self.metrics.get("found_inf", torch.zeros_like(loss)), *self.scales.values()]
        if self.shadow is not None:
            scalars += [loss, self.shadow.run(index, self.metrics)]
        if self.probe is not None:
            learners, values = self.probe.read(scalars)
        else:
            values = torch.stack([scalar.double() for scalar in scalars]).tolist()
            names = self.task.learners
            learners = {name: LearnerProbe(loss_scale_names(self.task, name)) for name in names}
        if self.shadow is not None:
            for name, found in self.shadow.read().items():
                learners[name] = replace(learners[name], shadow=found)
        found_inf, *rest = values
        powers = {name: math.log2(scale) for name, scale in zip(self.scales, rest, strict=False)}
        return ProbeRecord(step, found_inf != 0, powers, learners, *rest[len(powers) :])


def show_probe(writer: "SummaryWriter", record: ProbeRecord) -> None:
    """Add one probe to the SummaryWriter at its step.

    Every tag begins with `train_probes_`. Histograms `exponents/KIND` of whole models: the binary
    exponents of all non-zero finite values, one bucket each. Scalars (`_scalars`), each `/total`
    and `/MODULE`: shares in FP16 of the non-zero values (zeros: of all), headroom in powers of two.
    A share of nothing has no curve, nor has one of FP16 where the values were FP16 already.
    `operations_PHASE_log2_amax/MODULE/OPERATION`: the largest results between modules.
    For a GAN the learner follows the slash.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = []
    for learner, measured in record.learners.items():
        prefix = f"{learner}." if len(record.learners) > 1 else ""
        for kind in KINDS:
            total = measured.total(kind)
            if total is not None and total.counts.nonzero:
                values += _histogram(f"{_SECTION}exponents/{prefix}{kind}", total).value
        for tag, name, value in _scalars(measured):
            if value is not None and math.isfinite(value):
                tag = f"{_SECTION}{tag}/{prefix}{name}"
                values.append(Summary.Value(tag=tag, simple_value=value))
    # One event: a call for each of some hundred modules would take longer than a training step.
    file_writer: Any = writer.file_writer  # torch declares it as None
    file_writer.add_summary(Summary(value=values), record.step)


def _scalars(measured: LearnerProbe) -> Iterator[tuple[str, str, float | None]]:
    """Yield (tag, module or "total", value) of all curves."""
    for kind, modules in measured.tensors.items():
        halves = measured.halves_before(kind)
        for name, stats in _with_total(modules):
            underflow, _, overflow = stats.shares(halves)
            yield f"{kind}_underflow", name, underflow
            yield f"{kind}_overflow", name, overflow
            yield f"{kind}_zeros", name, stats.zeros
            yield f"{kind}_log2_amax", name, math.log2(stats.amax) if stats.amax else None
            yield f"{kind}_headroom", name, stats.headroom
    for place, own in measured.operations.items():
        power = math.log2(own.stats.amax) if own.stats.amax else None
        name = "/".join(filter(None, (place.module, place.operation)))
        yield f"operations_{place.phase}_log2_amax", name, power
    for name, lost in _with_total(measured.lost_updates):
        for format in FORMATS:
            yield f"lost_updates_{format}", name, lost.share(format)
    for name, applied in _with_total(measured.applied_updates):
        yield "applied_updates", name, applied.ratio
    for name, sums in _with_total(measured.shadow or {}):
        for number in ("cosine", "norm_ratio", "relative_error"):
            yield f"shadow_{number}", name, getattr(sums, number)


def _with_total(modules: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the modules' measurements, their total first; empty if there are none."""
    return [("total", merged(modules.values())), *modules.items()] if modules else []


def _histogram(tag: str, stats: TensorStats):
    from torch.utils.tensorboard.summary import histogram_raw

    by_exponent = stats.counts.by_exponent()
    lows = np.arange(min(by_exponent), max(by_exponent) + 1.0)
    counts, ends = np.array([by_exponent.get(int(low), 0) for low in lows]), (lows + 1).tolist()
    total, squares = (float((counts * (lows + 0.5) ** power).sum()) for power in (1, 2))
    sums, buckets = (int(counts.sum()), total, squares), (ends, counts.tolist())
    return histogram_raw(tag, float(lows[0]), ends[-1], *sums, *buckets)

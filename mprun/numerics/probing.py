"""Which steps of a run are probed and shadowed, and where what they show is written.

In TensorBoard: histograms over exponents for whole models, scalars per module.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mprun.numerics.probe import Probe, chosen_modules, loss_scale_names
from mprun.numerics.probe_record import KINDS, LearnerProbe, ProbeRecord, TensorStats, write_probe
from mprun.numerics.shadow import Shadow

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

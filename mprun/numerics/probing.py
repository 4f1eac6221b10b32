"""Which steps of a run are probed and shadowed, and where what they show is written."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mprun.numerics.probe import Probe, loss_scale_names
from mprun.numerics.probe_record import LearnerProbe, ProbeRecord, write_probe
from mprun.numerics.selection import chosen_modules
from mprun.numerics.shadow import Shadow
from mprun.numerics.tensorboard import show_probe

Metrics = dict[str, Tensor]


class Probing:
    """Watches the steps of `task` that are due; writes RUN/numerics and TensorBoard.

    every: probe the steps divisible by it. shadow_every: shadow those divisible by it, 0: none.
    patterns: of the modules, see `chosen_modules` (raises BadInput). writer: a SummaryWriter.
    """

    def __init__(
        self, task, directory: Path, writer, *, every: int, patterns: list[str], shadow_every: int
    ):
        self.task, self.directory, self.writer = task, directory, writer
        self.every, self.shadow_every = every, shadow_every
        self.chosen = chosen_modules(task.learners, patterns)

    def due(self, step: int) -> bool:
        """Whether step `step` (from 1) is to be watched."""
        return step % self.every == 0 or self._shadows(step)

    def watch(self, step: int, index: int, take: Callable[[], Metrics]) -> Metrics:
        """Take step `step` by `take()` and record what it shows; returns its metrics.

        index: what `take` hands to the task's `train_step`.
        """
        # Copies: the scales move in place at the end of the step.
        scales = [scale.scale.clone() for scale in self.task.loss_scales.values()]
        probe = Probe(self.task, self.chosen) if step % self.every == 0 else None
        shadow = Shadow(self.task, self.chosen) if self._shadows(step) else None
        with ExitStack() as stack:
            for observer in (shadow, probe):
                if observer is not None:
                    stack.enter_context(observer)
            metrics = take()
        loss_fp32 = None if shadow is None else shadow.run(index, metrics)
        record = self._record(step, metrics, scales, probe, shadow, loss_fp32)
        write_probe(self.directory, record)
        show_probe(self.writer, record)
        return metrics

    def _shadows(self, step: int) -> bool:
        return self.shadow_every > 0 and step % self.shadow_every == 0

    def _record(
        self,
        step: int,
        metrics: Metrics,
        scales: list[Tensor],
        probe: Probe | None,
        shadow: Shadow | None,
        loss_fp32: Tensor | None,
    ) -> ProbeRecord:
        loss = metrics["loss"]
        fp32 = [] if loss_fp32 is None else [loss_fp32]
        scalars = [metrics.get("found_inf", torch.zeros_like(loss)), loss, *scales, *fp32]
        if probe is not None:
            learners, values = probe.read(scalars)
        else:
            values = torch.stack([scalar.double() for scalar in scalars]).tolist()
            learners = {
                name: LearnerProbe(loss_scale_names(self.task, name)) for name in self.task.learners
            }
        if shadow is not None:
            found = shadow.read()
            learners = {
                name: replace(measured, shadow=found[name]) for name, measured in learners.items()
            }
        return ProbeRecord(
            step=step,
            skipped=values[0] != 0,
            log2_loss_scale={
                name: math.log2(value)
                for name, value in zip(self.task.loss_scales, values[2:], strict=False)
            },
            learners=learners,
            loss=values[1] if fp32 else None,
            loss_fp32=values[-1] if fp32 else None,
        )

"""Write the records of a run of `mprun`: its evaluations, samples, learning rate and progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.errors import BadInput
from mprun.numerics.post_mortem import StepRow
from mprun.record.console import Progress
from mprun.record.metrics import write_sample_grid
from mprun.recording.metric_buffer import MetricBuffer
from mprun.recording.records import Records

if TYPE_CHECKING:
    from mprun.assembly import Built


class MetricLogger(Records):
    """The records of a built run that goes on after step `start`, and its progress."""

    progress: Progress

    def __init__(self, directory: Path, built: Built, buffer: MetricBuffer, start: int):
        self.task, self.rate = built.task, built.rate
        self.samples_per_step = built.task.samples_per_step
        self.steps_per_epoch = built.task.steps_per_epoch
        finished = 0.0 if buffer.late else self.samples_per_step
        self.progress = Progress(built.steps, built.task.sample, samples=finished)
        self.progress.step = start
        if start < built.steps:
            self.progress.begin(start + 1)
        self.held_out = int(built.data.description["eval_samples"])
        super().__init__(directory, buffer, start)

    def evaluate(
        self,
        step: int,
        judged: str,
        beat: Callable[[], None],
        breaks: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> dict[str, float]:
        """Evaluate, record and return the metrics; the throughput clock does not count it.

        judged: the metric of the verdict; BadInput if the task does not return it. beat: called
        between two batches. breaks: encloses what may be left unfinished.
        """
        started = time.perf_counter()

        def on_evaluated(samples: int) -> None:
            beat()
            self.progress.evaluated(samples, self.held_out)

        self.progress.evaluation()
        self.task.on_evaluated = on_evaluated
        with breaks():
            values = self.task.evaluate() or {}  # of a user's class it may be None
        if judged not in values:
            found = ", ".join(values) or "nothing"
            raise BadInput(
                f"compare.metric={judged}: the task's evaluate() returned {found}; the run can go "
                f"on once it returns {judged}"
            )
        self.write_evaluation(step, values, time.perf_counter() - started)
        samples = self.task.samples()
        if samples is not None:
            grid = write_sample_grid(self.directory, step, samples.cpu())
            self.tensorboard.image("eval/samples", grid, step)
        shown = "  ".join(f"{key} {value:.5g}" for key, value in values.items())
        self.progress.note(f"eval at step {step}: {shown}")
        self.buffer.restart_clock()
        return values

    def _extra(self, row: StepRow) -> dict[str, float]:
        return {"lr": self.rate.at(row.step - 1, row.skipped - int(row.found_inf))}

"""Write a run's records from the metric buffer: files, TensorBoard, progress, throughput."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.numerics.post_mortem import History, StepRow
from mprun.record.console import Progress
from mprun.record.metrics import MetricsFile, TensorBoardView, write_sample_grid
from mprun.training.metric_buffer import LogInterval, MetricBuffer

if TYPE_CHECKING:
    from mprun.build import Built

# Each of these steps has a record, whatever train.log_every. A comparison takes the loss at the
# start from them: a wrong cast or scale shows there, before chance drives two runs apart.
EARLY_STEPS = 20


class Records:
    """Write the intervals read from the buffer as records below `directory`.

    Attributes:
        samples_per_step: samples that the throughput counts for a step.
        history: the newest steps that were read.
        diverged_at: the step of a divergence, once `flush` has returned its cause.
    """

    samples_per_step: float = 1

    def __init__(self, directory: Path, buffer: MetricBuffer, start: int = 0):
        self.directory, self.buffer = directory, buffer
        self.metrics = MetricsFile(directory / "metrics.jsonl")
        self.board = TensorBoardView(directory, purge_step=start + 1 if start else None)
        self.history = History()
        self.speeds: list[float] = []
        self.waits: list[tuple[float, float]] = []  # seconds waited for data, seconds in all
        self.diverged_at = start
        buffer.restart_clock()

    def flush(self, logged: bool, wait: bool) -> str | None:
        """End the buffer's interval and write the intervals that arrived.

        wait: wait for the device and write all intervals.

        Returns:
            The cause of a divergence, or None. Nothing after a divergence is written.
        """
        self.buffer.close(logged)
        for interval in self.buffer.read(wait):
            cause = self._write_interval(interval)
            if cause is not None:
                return cause
        return None

    def write_evaluation(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Record the metrics of an evaluation after `step`.

        Read everything up to `step` before: the record has the number of skipped updates.
        """
        record = {
            "split": "eval",
            "step": step,
            "updates": step - self.buffer.host_skipped,
            "skipped": self.buffer.host_skipped,
            **self._place(step),
            **values,
            "seconds": seconds,
        }
        self._write(record)

    def throughput(self) -> tuple[float | None, int]:
        """Return median samples/s and number of the windows, without the first, the warm-up."""
        windows = self.speeds[1:] or self.speeds
        return (statistics.median(windows), len(windows)) if windows else (None, 0)

    def data_wait(self) -> float | None:
        """Return the share of time that the device waited for data, over the same windows."""
        return _share(self.waits[1:] or self.waits) if self.waits else None

    def close(self) -> None:
        self.metrics.sync()
        self.metrics.close()
        self.board.close()

    def _place(self, step: int) -> dict[str, float]:
        """Return further fields that locate `step` in the training."""
        return {}

    def _extra(self, row: StepRow) -> dict[str, float]:
        """Return the fields of a training record that do not come from the device."""
        return {}

    def _show(self, step: int, record: dict) -> None:
        """Show that an interval was recorded."""

    def _tell_divergence(self, row: StepRow) -> None:
        """Report a step whose loss is not finite although its update was applied."""

    def _write_interval(self, interval: LogInterval) -> str | None:
        rows, newest = interval.rows, interval.rows[-1]
        self.history.add(rows, interval.metrics)
        window = self._window(interval)
        for row in rows:
            diverged = row.diverged
            full = row is newest and (interval.logged or diverged)
            if full or diverged or row.found_inf or row.step <= EARLY_STEPS:
                extra = {**window, **interval.metrics} if full else {}
                self._write(self._record(row) | extra)
            if diverged:
                self.diverged_at = row.step
                self._tell_divergence(row)
                return "non-finite loss"
        if interval.logged:
            self._show(newest.step, self._record(newest) | window)
        if interval.collapsed is None:
            return None
        self.diverged_at = newest.step
        name, skips = interval.collapsed
        return f"{name} collapsed: {skips} skipped updates in a row at its floor"

    def _window(self, interval: LogInterval) -> dict[str, float]:
        """Return the speed of the interval, and its share of waiting for data."""
        speed = len(interval.rows) * self.samples_per_step / interval.seconds
        self.speeds.append(speed)
        if interval.waited is None:
            return {"samples_per_s": speed}
        self.waits.append((interval.waited, interval.seconds))
        return {"samples_per_s": speed, "data_wait": _share(self.waits[-1:])}

    def _record(self, row: StepRow) -> dict:
        return {
            "split": "train",
            "step": row.step,
            "updates": row.step - row.skipped,
            "skipped": row.skipped,
            **self._place(row.step),
            "loss": row.loss,
            "loss_scale": row.loss_scale,
            **self._extra(row),
        }

    def _write(self, record: dict) -> None:
        self.metrics.write(record)
        self.board.write(record)


class MetricLogger(Records):
    """The records of a built run, and its progress.

    start: the step after which the run goes on.
    """

    def __init__(self, directory: Path, built: Built, buffer: MetricBuffer, start: int):
        self.task, self.rate = built.task, built.rate
        self.samples_per_step = built.task.samples_per_step
        self.progress = Progress(built.steps, built.task.sample)
        self.progress.step = start
        self.held_out = int(built.data.description["eval_samples"])
        super().__init__(directory, buffer, start)

    def evaluate(self, step: int, beat: Callable[[], None]) -> dict[str, float]:
        """Evaluate, record and return the metrics; the throughput clock does not count it.

        beat: called between two batches.
        """
        started = time.perf_counter()

        def on_evaluated(samples: int) -> None:
            beat()
            self.progress.evaluated(samples, self.held_out)

        self.progress.evaluation()
        self.task.on_evaluated = on_evaluated
        values = self.task.evaluate()
        self.write_evaluation(step, values, time.perf_counter() - started)
        samples = self.task.samples()
        if samples is not None:
            samples = samples.cpu()
            self.board.images("eval/samples", samples, step)
            write_sample_grid(self.directory, step, samples)
        shown = "  ".join(f"{key} {value:.5g}" for key, value in values.items())
        self.progress.note(f"eval at step {step}: {shown}")
        self.buffer.restart_clock()
        return values

    def close(self) -> None:
        super().close()
        self.progress.close()

    def _place(self, step: int) -> dict[str, float]:
        return {"epoch": round(step / self.task.steps_per_epoch, 4)}

    def _extra(self, row: StepRow) -> dict[str, float]:
        return {"lr": self.rate.at(row.step - 1, row.skipped - int(row.found_inf))}

    def _show(self, step: int, record: dict) -> None:
        self.progress.show(step, record)

    def _tell_divergence(self, row: StepRow) -> None:
        self.progress.note(f"diverged at step {row.step}: loss {row.loss}")


def _share(windows: list[tuple[float, float]]) -> float:
    """Return the share of waiting in windows of (seconds waited, seconds in all), at most 1."""
    waited, seconds = (sum(column) for column in zip(*windows, strict=True))
    return round(min(1.0, waited / seconds), 4)

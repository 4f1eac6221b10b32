"""Write the records of a run from its metric buffer: files, TensorBoard, progress, throughput."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mprun.numerics.post_mortem import History, StepRow
from mprun.record.console import Progress
from mprun.record.metrics import MetricsFile, TensorBoardView
from mprun.recording.metric_buffer import LogInterval, MetricBuffer

# Each of these steps has a record, whatever train.log_every. A comparison takes the loss at the
# start from them: a wrong cast or scale shows there, before chance drives two runs apart.
EARLY_STEPS = 20


class Records:
    """Write the intervals read from the buffer as records below `directory`."""

    samples_per_step: float = 1  # as the throughput counts them
    steps_per_epoch: int | None = None  # None: the records have no epoch
    progress: Progress | None = None

    def __init__(self, directory: Path, buffer: MetricBuffer, start: int = 0):
        self.directory, self.buffer = directory, buffer
        self.metrics = MetricsFile(directory / "metrics.jsonl")
        self.tensorboard = TensorBoardView(directory, purge_step=start + 1 if start else None)
        self.history = History()  # the newest steps that were read
        self.speeds: list[float] = []
        self.waits: list[tuple[float, float]] = []  # seconds waited for data, seconds in all
        self.scale_before: float | None = None  # that of step 1, until the loss scale has settled
        self.diverged_at = start  # the step, once `flush` has returned the cause of a divergence
        buffer.restart_clock()

    def flush(self, logged: bool, wait: bool) -> str | None:
        """End the buffer's interval and write those that arrived, with `wait` all of them.

        Return the cause of a divergence, or None. Nothing after a divergence is written.
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
        head = self._head("eval", step, self.buffer.host_skipped)
        self._write({**head, **values, "seconds": seconds})

    def throughput(self, sample: str) -> dict[str, Any]:
        """Return run.json's field, of so many `sample`s, over all windows but the warm-up."""
        windows = self.speeds[1:] or self.speeds
        median = statistics.median(windows) if windows else None
        found = {"samples_per_s": median, "windows": len(windows), "sample": sample}
        return found | ({"data_wait": _share(self.waits[1:] or self.waits)} if self.waits else {})

    def close(self) -> None:
        self.metrics.close()
        self.tensorboard.close()
        if self.progress is not None:
            self.progress.close()

    def _extra(self, row: StepRow) -> dict[str, float]:
        """Return the fields of a training record that do not come from the device."""
        return {}

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
                if self.progress is not None:
                    self.progress.note(f"diverged at step {row.step}: loss {row.loss}")
                return "non-finite loss"
        if interval.logged and self.progress is not None:
            self.progress.show(newest.step, self._record(newest) | window)
        self._say_search(rows[0], newest)
        if interval.collapsed is None:
            return None
        self.diverged_at = newest.step
        name, skips = interval.collapsed
        return f"{name} collapsed: {skips} skipped updates in a row at its floor"

    def _say_search(self, first: StepRow, newest: StepRow) -> None:
        """Say once that a loss scale has found its level, if it skipped updates for that."""
        if first.step == 1:
            self.scale_before = first.loss_scale
        if self.scale_before is None or newest.found_inf:
            return
        before, self.scale_before = self.scale_before, None
        settles = newest.skipped and newest.loss_scale < before
        # A loss that is itself not finite says nothing of the scale; the run's end tells of it.
        bad = any(row.found_inf and not math.isfinite(row.loss) for row in self.history.rows)
        if self.progress is not None and settles and not bad:
            updates = f"{newest.skipped} update{'s' * (newest.skipped > 1)}"
            levels = f"{before:g} to {newest.loss_scale:g}"
            found = f"{updates} skipped while the loss scale finds its level ({levels}): normal"
            self.progress.note(found)

    def _window(self, interval: LogInterval) -> dict[str, float]:
        speed = len(interval.rows) * self.samples_per_step / interval.seconds
        self.speeds.append(speed)
        if interval.waited is None:
            return {"samples_per_s": speed}
        self.waits.append((interval.waited, interval.seconds))
        return {"samples_per_s": speed, "data_wait": _share(self.waits[-1:])}

    def _head(self, split: str, step: int, skipped: int) -> dict[str, Any]:
        head = {"split": split, "step": step, "updates": step - skipped, "skipped": skipped}
        if self.steps_per_epoch is not None:
            head["epoch"] = round(step / self.steps_per_epoch, 4)
        return head

    def _record(self, row: StepRow) -> dict[str, Any]:
        head = self._head("train", row.step, row.skipped)
        return {**head, "loss": row.loss, "loss_scale": row.loss_scale, **self._extra(row)}

    def _write(self, record: dict) -> None:
        self.metrics.write(record)
        self.tensorboard.write(record)


def _share(windows: list[tuple[float, float]]) -> float:
    """Return the share of waiting in windows of (seconds waited, seconds in all), at most 1."""
    waited, seconds = (sum(column) for column in zip(*windows, strict=True))
    return round(min(1.0, waited / seconds), 4)

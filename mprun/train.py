"""The loop: steps, records, evaluations, checkpoints, and the ways a run can end."""

import math
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mprun import checkpoint
from mprun.build import Built
from mprun.config.schema import RunConfig
from mprun.errors import Damaged, MprunError, Resource
from mprun.interruption import Interruption
from mprun.learning_rate import LearningRate
from mprun.numerics.failure import FailureKeeper, forget_failure, report_failure
from mprun.numerics.operations import FirstStep
from mprun.numerics.post_mortem import History
from mprun.numerics.probing import Probing
from mprun.record import memory
from mprun.record.console import Progress
from mprun.record.heartbeat import Heartbeat
from mprun.record.metrics import MetricsFile, TensorBoardView
from mprun.record.sample_grid import write_sample_grid
from mprun.trace import StepRow, Trace

# Each of these steps has a record, whatever train.log_every: a comparison takes the loss at the
# start from them, and a wrong cast or scale shows there before chance drives two runs apart.
EARLY_STEPS = 20


@dataclass(slots=True)
class Outcome:
    """How a run ended. status: done, diverged or preempted; `step` counts from 1."""

    status: str
    step: int
    cause: str | None = None
    skipped: int = 0
    final: dict[str, float] = field(default_factory=dict)
    samples_per_s: float | None = None
    windows: int = 0
    data_wait: float | None = None  # share of the time; None: the source does not read ahead
    saved_for_backward_bytes: int | None = None
    first_step: dict = field(default_factory=dict)
    peak: dict = field(default_factory=dict)


def train(
    built: Built,
    config: RunConfig,
    directory: Path,
    *,
    start: int = 0,
    skipped: int = 0,
    interruption: Interruption,
    evaluate_first: bool = False,
) -> Outcome:
    """Train from step `start` to the end, recording into `directory`.

    evaluate_first: begin with the evaluation of step `start`, in which an earlier attempt failed.
    """
    task, device, every = built.task, built.device, config.train
    trace = Trace(device, skipped)
    rate = built.rate
    recorder = _Recorder(directory, built, rate, trace, start)
    outcome = Outcome("done", start, skipped=skipped)
    heartbeat = Heartbeat(directory)

    def save(step: int) -> None:
        state = {
            "task": task.state_dict(),
            "step": step,
            "skipped": trace.host_skipped,
            "random": checkpoint.random_states(device),
        }
        checkpoint.save(directory / "checkpoints", step, state, every.keep_checkpoints)

    def due(step: int, interval: int) -> bool:
        return interval > 0 and step % interval == 0

    def take_step(index: int, measure: bool) -> dict:
        if index > start:
            return task.train_step(index, measure=measure)
        with FirstStep(task, built.policy, config.precision.overrides, index + 1) as first:
            metrics = task.train_step(index, measure=measure)
        outcome.saved_for_backward_bytes = first.saved.bytes
        outcome.first_step = first.record()
        recorder.progress.note(first.summary(device.type))
        return metrics

    numerics, probing = config.numerics, None
    if numerics.enabled:
        probing = Probing(
            task,
            directory,
            recorder.board.writer,
            every=numerics.every,
            patterns=numerics.modules,
            shadow_every=numerics.shadow_every,
        )
    forget_failure(directory)
    keeper = FailureKeeper(built) if config.numerics.keep_failure else None
    if keeper is not None:
        keeper.keep(start, skipped)
    memory.reset_peak(device)
    try:
        if evaluate_first:
            outcome.final = recorder.evaluate(start)
        for index in range(start, built.steps):
            heartbeat.beat()
            step, last = index + 1, index + 1 == built.steps
            logging = due(step, every.log_every) or last
            saving = due(step, every.checkpoint_every) or (last and every.checkpoint_every > 0)
            evaluating = due(step, every.eval_every) or last
            rate.apply(index, trace.skipped)
            if probing is not None and probing.due(step):
                metrics = probing.watch(step, index, partial(take_step, index, logging))
            else:
                metrics = take_step(index, logging)
            trace.add(step, metrics)
            outcome.step = step

            stop = interruption.requested
            if logging or saving or evaluating or stop:
                outcome.cause = recorder.flush(logged=logging)
                if outcome.cause is not None:
                    outcome.status = "diverged"
                    outcome.step = recorder.diverged_at
                    break
                if keeper is not None:
                    healthy = not recorder.history.rows[-1]["found_inf"]
                    keeper.keep(step, trace.host_skipped, healthy=healthy)
            if evaluating:
                # Of training alone: evaluation holds an FP32 model beside it.
                outcome.peak = memory.higher(outcome.peak, device)
                heartbeat.beat()
                outcome.final = recorder.evaluate(step)
                heartbeat.beat()
                memory.reset_peak(device)
                if not all(math.isfinite(value) for value in outcome.final.values()):
                    outcome.status, outcome.cause = "diverged", "non-finite evaluation loss"
                    break
            if saving or (stop and not last):
                save(step)
                recorder.restart_clock()
            if stop and not last:
                outcome.status, outcome.cause = "preempted", interruption.reason
                break
    except (Damaged, Resource):
        # Data failed, in an evaluation or before the step moved anything: the work is not lost.
        # (Not between micro-batches, the first of which have moved BatchNorm statistics.)
        if outcome.step > start and every.accumulate == 1 and recorder.flush(logged=False) is None:
            with suppress(MprunError, OSError):
                save(outcome.step)
                recorder.progress.note(f"checkpoint at step {outcome.step} kept for mprun resume=")
        raise
    finally:
        recorder.close()
    outcome.skipped = trace.host_skipped
    outcome.peak = memory.higher(outcome.peak, device)
    if keeper is not None and device.type == "cuda":
        # What a mode needs, not what is kept beside it.
        outcome.peak = outcome.peak | {"peak_bytes": outcome.peak["peak_bytes"] - keeper.bytes}
    outcome.samples_per_s, outcome.windows = recorder.throughput()
    outcome.data_wait = recorder.data_wait()
    if outcome.status == "diverged":
        rows = recorder.history.up_to(outcome.step)
        report_failure(
            keeper, directory, outcome.cause, outcome.step, rows, scaler_kind=config.scaler.kind
        )
    return outcome


class _Recorder:
    """Turns flushed rows into records, and keeps the clock of the throughput."""

    def __init__(self, directory: Path, built: Built, rate: LearningRate, trace: Trace, start: int):
        self.task, self.rate, self.trace = built.task, rate, trace
        self.directory = directory
        self.metrics = MetricsFile(directory / "metrics.jsonl")
        self.board = TensorBoardView(directory, purge_step=start + 1 if start else None)
        self.progress = Progress(built.steps, built.task.sample)
        self.history = History()
        self.speeds: list[float] = []
        self.take_wait = getattr(built.data, "take_wait", None)
        self.waits: list[tuple[float, float]] = []  # seconds waited for data, seconds in all
        self.diverged_at = start
        self.restart_clock()

    def restart_clock(self) -> None:
        """Start a new window of the throughput clock (after an evaluation or a checkpoint)."""
        if self.take_wait is not None:
            self.take_wait()
        self.clock = time.perf_counter()

    def flush(self, logged: bool) -> str | None:
        """Write what the device has gathered; the cause of a divergence, or None."""
        rows, metrics = self.trace.flush()
        self.history.add(rows, metrics)
        now = time.perf_counter()
        speed = len(rows) * self.task.samples_per_step / (now - self.clock) if rows else None
        window = {"samples_per_s": speed}
        if self.take_wait is not None and rows:
            self.waits.append((self.take_wait(), now - self.clock))
            window["data_wait"] = _share(self.waits[-1:])
        self.clock = now
        if speed is not None:
            self.speeds.append(speed)
        for row in rows:
            newest = row is rows[-1]
            full = newest and (logged or row.diverged)
            if full or row.step <= EARLY_STEPS or row.found_inf or row.diverged:
                extra = {**window, **metrics} if full else {}
                self._write(self._record(row) | extra)
            if row.diverged:
                self.diverged_at = row.step
                self.progress.note(f"diverged at step {row.step}: loss {row.loss}")
                return "non-finite loss"
        if rows and logged:
            self.progress.show(rows[-1].step, self._record(rows[-1]) | window)
        for name, scale in self.task.loss_scales.items():
            if scale.skips_nonfinite and bool(scale.collapsed()):
                self.diverged_at = rows[-1].step
                skips = int(scale.consecutive_skips)
                return f"{name} collapsed: {skips} skipped updates in a row at its floor"
        return None

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate, record and return the metrics; outside the throughput clock."""
        started = time.perf_counter()
        values = self.task.evaluate()
        record = {
            "split": "eval",
            "step": step,
            "updates": step - self.trace.host_skipped,
            "skipped": self.trace.host_skipped,
            "epoch": self._epoch(step),
            **values,
            "seconds": time.perf_counter() - started,
        }
        self._write(record)
        if hasattr(self.task, "samples"):
            samples = self.task.samples().cpu()
            self.board.images("eval/samples", samples, step)
            write_sample_grid(self.directory, step, samples)
        self.progress.note(
            f"eval at step {step}: " + "  ".join(f"{k} {v:.5g}" for k, v in values.items())
        )
        self.restart_clock()
        return values

    def throughput(self) -> tuple[float | None, int]:
        """Median samples/s over the windows but the first, which holds warm-up, and their count."""
        windows = self.speeds[1:] or self.speeds
        return (statistics.median(windows), len(windows)) if windows else (None, 0)

    def data_wait(self) -> float | None:
        """Share of the time that the device waited for data, over the same windows."""
        return _share(self.waits[1:] or self.waits) if self.waits else None

    def close(self) -> None:
        self.metrics.sync()
        self.metrics.close()
        self.board.close()
        self.progress.close()

    def _record(self, row: StepRow) -> dict:
        skipped_before = row.skipped - int(row.found_inf)
        return {
            "split": "train",
            "step": row.step,
            "updates": row.step - row.skipped,
            "skipped": row.skipped,
            "epoch": self._epoch(row.step),
            "loss": row.loss,
            "loss_scale": row.loss_scale,
            "lr": self.rate.at(row.step - 1, skipped_before),
        }

    def _epoch(self, step: int) -> float:
        return round(step / self.task.steps_per_epoch, 4)

    def _write(self, record: dict) -> None:
        self.metrics.write(record)
        self.board.write(record)


def _share(windows: list[tuple[float, float]]) -> float:
    """Of (seconds waited, seconds in all), at most 1."""
    waited, seconds = (sum(column) for column in zip(*windows, strict=True))
    return round(min(1.0, waited / seconds), 4)

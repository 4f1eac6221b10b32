"""The loop: steps, records, evaluations, checkpoints, and the ways a run can end.

On a GPU no step waits for the device, and neither does the loop between evaluations and
checkpoints: what the steps did is read an interval later (`metric_buffer`), so a divergence is
noticed up to an interval later than it could be.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mprun.build import Built
from mprun.config.schema import RunConfig
from mprun.errors import Damaged, MprunError, Resource
from mprun.numerics.failure import FailureKeeper, forget_failure, report_failure
from mprun.numerics.operations import FirstStep
from mprun.numerics.probing import Probing
from mprun.precision.random_states import random_states
from mprun.record import checkpoint, memory
from mprun.record.run_directory import Heartbeat
from mprun.training.metric_buffer import Trace
from mprun.training.metric_logger import Recorder
from mprun.training.signals import Interruption


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
    rate, defer_wait = built.rate, getattr(built.data, "defer_wait", None)
    trace = Trace(device, skipped, task.loss_scales, defer_wait)
    recorder = Recorder(directory, built, trace, start)
    outcome = Outcome("done", start, skipped=skipped)
    heartbeat = Heartbeat(directory)

    def save(step: int) -> None:
        state = {
            "task": task.state_dict(),
            "step": step,
            "skipped": trace.host_skipped,
            "random": random_states(device),
        }
        checkpoint.save(directory / "checkpoints", step, state, every.keep_checkpoints)

    def due(step: int, interval: int) -> bool:
        return interval > 0 and step % interval == 0

    advance = built.stepper.step

    def take_step(index: int, measure: bool) -> dict:
        if index > start:
            return advance(index, measure=measure)
        with FirstStep(task, built.policy, config.precision.overrides, index + 1) as first:
            metrics = advance(index, measure=measure)
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

    def keep(step: int) -> None:
        if trace.late:
            keeper.keep_if(step, trace.skipped, trace.sound)
        else:
            healthy = not recorder.history.rows[-1]["found_inf"]
            keeper.keep(step, trace.host_skipped, healthy=healthy)

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
                # What is evaluated or saved has to be known to be sound.
                outcome.cause = recorder.flush(logging, wait=saving or evaluating or stop)
                if outcome.cause is not None:
                    outcome.status = "diverged"
                    outcome.step = recorder.diverged_at
                    break
                if keeper is not None:
                    keep(step)
            if evaluating:
                # Of training alone: evaluation holds an FP32 model beside it.
                outcome.peak = memory.higher(outcome.peak, device)
                heartbeat.beat()
                outcome.final = recorder.evaluate(step)
                built.stepper.give_back_cache()
                heartbeat.beat()
                memory.reset_peak(device)
                if not all(math.isfinite(value) for value in outcome.final.values()):
                    outcome.status, outcome.cause = "diverged", "non-finite evaluation loss"
                    break
            if saving or (stop and not last):
                save(step)
                trace.restart_clock()
            if stop and not last:
                outcome.status, outcome.cause = "preempted", interruption.reason
                break
    except (Damaged, Resource):
        # Data failed, in an evaluation or before the step moved anything: the work is not lost.
        # (Not between micro-batches, the first of which have moved BatchNorm statistics.)
        if outcome.step > start and every.accumulate == 1 and recorder.flush(False, True) is None:
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
        kept = {key: outcome.peak[key] - keeper.bytes for key in memory.OF_CUDA}
        outcome.peak = outcome.peak | kept
    outcome.samples_per_s, outcome.windows = recorder.throughput()
    outcome.data_wait = recorder.data_wait()
    if outcome.status == "diverged":
        rows = recorder.history.up_to(outcome.step)
        report_failure(
            keeper, directory, outcome.cause, outcome.step, rows, scaler_kind=config.scaler.kind
        )
    return outcome

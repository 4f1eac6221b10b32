"""The training loop: steps, records, evaluations, checkpoints, and the ways a run can end.

On a GPU the loop waits for the device only at evaluations and checkpoints. The metrics of the steps
are read an interval later (`metric_buffer`), so a divergence is noticed up to an interval late.
"""

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun.assembly import Built
from mprun.config.schema import RunConfig
from mprun.errors import BadInput, Damaged, MprunError, Resource
from mprun.numerics.failure import LOOKED_AT, FailureKeeper, forget_failure, report_failure
from mprun.numerics.operations import FirstStep
from mprun.numerics.post_mortem import StepRow, nonfinite_metric
from mprun.numerics.probing import Probing
from mprun.numerics.replay import nonfinite_batch
from mprun.numerics.state import bits_of
from mprun.precision.random_states import random_states
from mprun.record import checkpoint, memory
from mprun.record.console import Progress
from mprun.record.metrics import write_sample_grid
from mprun.record.metrics_columns import read_columns
from mprun.record.run_directory import Heartbeat
from mprun.record.run_record import OUTCOMES, Outcome, product_shares
from mprun.recording.metric_buffer import MetricBuffer
from mprun.recording.records import Records
from mprun.training.announcements import say, what_stays
from mprun.training.signals import Interruption, Stopped


class Start(NamedTuple):
    """The point where a run begins or goes on."""

    step: int = 0
    skipped: int = 0  # updates skipped before `step`
    evaluate_first: bool = False  # evaluate after `step`, which an earlier attempt did not end
    computed: Mapping[str, Any] | None = None  # `Loop.computed` after `step`, of earlier attempts
    metrics_bytes: int = 0  # of metrics.jsonl up to `step`


BEGINNING = Start()
FIRST_STEP = ("operations", "memory_by_kind")  # fields of run.json, counted in the first step


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
        breaks: Callable[[], AbstractContextManager[None]],
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
                f"compare.metric={judged}: the task's evaluate() returned {found}, must return "
                f"{judged}; fix it and resume the run"
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


class Loop:
    """The training of a built run from `start` on, recorded into `directory`.

    checkpointed: called with the step of each checkpoint that was written. switched: called with
    the first step in another mode, and that mode.
    """

    def __init__(
        self,
        built: Built,
        config: RunConfig,
        directory: Path,
        interruption: Interruption,
        start: Start = BEGINNING,
        checkpointed: Callable[[int], None] = lambda step: None,
        switched: Callable[[int, str], None] = lambda step, mode: None,
    ):
        self.built, self.config, self.directory, self.start = built, config, directory, start.step
        self.evaluate_first, self.checkpointed = start.evaluate_first, checkpointed
        self.switched = switched
        self.interruption, self.ranks = interruption, built.task.ranks
        self.evaluates_every = config.train.evaluates_every(built.steps)
        built.stepper.skipped.fill_(start.skipped)
        self.buffer = MetricBuffer(
            built.device, start.skipped, built.task.loss_scales, built.data.defer_wait
        )
        self.logger = MetricLogger(directory, built, self.buffer, start.step)
        earlier = start.computed or {}
        built.stepper.audit.earlier = earlier.get("audit", {})
        built.stepper.go_on(earlier.get("execution", {}))
        built.forward_context.earlier = earlier.get("emulated", {})
        self.outcome = Outcome(
            "done",
            start.step,
            skipped=start.skipped,
            final=earlier.get("final", {}),
            throughput=earlier.get("throughput", {}),
            first_step={name: earlier[name] for name in FIRST_STEP if name in earlier},
        )
        self.heartbeat = Heartbeat(directory)
        numerics, self.probing = config.numerics, None
        if numerics.probes and self.ranks.is_first:
            self.probing = Probing(
                built.task,
                directory,
                self.logger.tensorboard.writer,
                every=numerics.every,
                shadow_every=numerics.shadow_every,
                modules=numerics.modules,
            )
        forget_failure(directory)
        # For a run on several ranks `mprun explain` retrains on one, with the same numbers.
        keeps = numerics.keep_failure and self.ranks.world == 1
        self.keeper = FailureKeeper(built) if keeps else None
        if self.keeper is not None:
            self.keeper.keep(start.step, start.skipped)
        memory.reset_peak(built.device)

    def train(self) -> Outcome:
        try:
            if self.evaluate_first and not self.evaluate(self.start):
                return self.finish()
            for index in range(self.start, self.built.steps):
                self.advance(index)
                if not self.after_step(index + 1):
                    break
        except Stopped:
            self.stop()
            self.save_what_is_whole()
        except (Damaged, Resource):
            # Data failed in an evaluation, or before the step changed anything: keep the work so
            # far. Not with several micro-batches: the first ones have changed BatchNorm's
            # statistics.
            if self.config.train.accumulate == 1 and self.ranks.world == 1:
                self.save_what_is_whole()
            raise
        finally:
            self.logger.close()
        return self.finish()

    def due(self, step: int) -> tuple[bool, bool, bool]:
        """Return whether to log, save, evaluate after `step`; the last has all that is enabled."""
        train, last = self.config.train, step == self.built.steps
        intervals = (train.log_every, train.checkpoint_every, self.evaluates_every)
        log, save, evaluate = (every > 0 and (last or step % every == 0) for every in intervals)
        return last or log, save, last or evaluate

    def advance(self, index: int) -> None:
        """Take step `index` (from 0), probed if it is due, without waiting for the device."""
        self.heartbeat.beat()
        if (entered := self.built.stepper.follow(index)) is not None:
            self.switched(index + 1, entered.name)
            self.logger.progress.note(f"precision {entered.name} from step {index + 1} on")
            for line in what_stays(self.built.task):
                self.logger.progress.note(f"NOTE {line}")
        take = self.built.stepper.step
        if index == self.start:
            take = partial(self._left_at_once, self._first_step)
        elif self.built.stepper.compiles_next:
            take = partial(self._left_at_once, take)
        measure, _, _ = self.due(index + 1)
        if self.probing is not None and self.probing.due(index + 1):
            metrics = self.probing.watch(index + 1, index, partial(take, index, measure))
        else:
            metrics = take(index, measure)
        while self.built.stepper.notes:
            self.logger.progress.note(f"  NOTE     {self.built.stepper.notes.pop(0)}")
        self.buffer.add(index + 1, metrics)
        self.outcome.step = index + 1
        self.logger.progress.count(index + 1)

    def after_step(self, step: int) -> bool:
        """Run everything due after `step`; return False when the run is over."""
        (log, save, evaluate), asked = self.due(step), self._asked()
        if not (log or save or evaluate or asked):
            return True
        # Wait before evaluating or saving: the state has to be known to be sound.
        if not self.log(step, log, wait=evaluate or save or asked):
            return False
        if evaluate and not self.evaluate(step):
            return False
        if evaluate or save:
            self.ranks.check_equal(self._state_in_short, step)
        stops = asked and step < self.built.steps
        if save or stops:
            self.save(step)
        if stops:
            self.stop()
        return not stops

    def _asked(self) -> bool:
        """Return whether the run has to stop; all ranks learn of it after the same step."""
        own = self.interruption.reason
        if self.ranks.world == 1:
            return own is not None
        number = self.ranks.stops(0 if own is None else int(signal.Signals[own]))
        if number and own is None:
            self.interruption.reason = signal.Signals(number).name
        return number != 0

    def _breaks(self) -> AbstractContextManager[None]:
        """Let a signal end the block at once, but not on several ranks: the others would wait."""
        return self.interruption.breaks() if self.ranks.world == 1 else nullcontext()

    def _state_in_short(self) -> list[int]:
        """Return the skipped updates, each loss scale's bits, and a sum of each learner's bits."""
        task, numbers = self.built.task, [self.buffer.host_skipped]
        numbers += [int(scale.scale.view(torch.int32)) for scale in task.loss_scales.values()]
        for learner in task.learners.values():
            tensors = (*learner.replicated, *learner.model.buffers())
            numbers.append(int(sum(map(bits_of, tensors))))
        return numbers

    def stop(self) -> None:
        self.outcome.status, self.outcome.cause = "preempted", self.interruption.reason

    def log(self, step: int, logged: bool, wait: bool) -> bool:
        """Write the records that can be read so far; return False when the run is over."""
        cause = self.logger.flush(logged, wait=wait)
        if cause is not None:
            return self.outcome.diverged(self.logger.diverged_at, cause)
        if self.keeper is None:
            return True
        if self.buffer.late:
            self.keeper.keep_if(step, self.built.stepper.skipped, self.buffer.sound)
        else:
            healthy = not self.logger.history.rows[-1].found_inf
            self.keeper.keep(step, self.buffer.host_skipped, healthy=healthy)
        return True

    def evaluate(self, step: int) -> bool:
        """Evaluate after `step`; return False when the run is over. A signal raises `Stopped`."""
        outcome, device = self.outcome, self.built.device
        # The peak of training alone: an evaluation may hold additional FP32 weights.
        outcome.memory = memory.higher(outcome.memory, device)
        self.heartbeat.beat()
        set_back = self.built.forward_context.counted()
        try:
            judged = str(self.config.compare.metric)
            outcome.final = self.logger.evaluate(step, judged, self.heartbeat.beat, self._breaks)
        except BaseException as error:
            set_back()  # the next attempt evaluates again
            if isinstance(error, BadInput) and self.ranks.world == 1:
                self.save_what_is_whole()
            raise
        self.built.stepper.give_back_cache()
        self.heartbeat.beat()
        memory.reset_peak(device)
        if (cause := nonfinite_metric(outcome.final)) is not None:
            return outcome.diverged(step, cause)
        return True

    def save(self, step: int) -> None:
        """Write a checkpoint of the state after `step`."""
        state = {
            "task": self.built.task.state_dict(),
            "step": step,
            "skipped": self.buffer.host_skipped,
            "random": random_states(self.built.device),
        }
        if not self.ranks.is_first:
            return
        state["computed"] = self.computed()
        folder, kept = self.directory / "checkpoints", self.config.train.keep_checkpoints
        checkpoint.save(folder, step, state, kept, metrics=self.logger.metrics.so_far())
        self.checkpointed(step)
        self.buffer.restart_clock()

    def computed(self) -> dict[str, Any]:
        """Return what the run has computed so far, as fields of run.json.

        These are facts of the run: the attempt that resumes from here adds its own to them.
        """
        self._read_throughput()
        return {
            "audit": self.built.stepper.audit_result(),
            "execution": self.built.stepper.decided,
            "emulated": self.built.forward_context.rerouted(),
            "final": self.outcome.final,
            "throughput": self.outcome.throughput,
            **self.outcome.first_step,
        }

    def _read_throughput(self) -> None:
        found = self.logger.throughput(self.built.task.sample)
        if found["windows"] or not self.outcome.throughput:  # else that of an earlier attempt
            self.outcome.throughput = found

    def save_what_is_whole(self) -> None:
        """Write a checkpoint of the last step taken, if there is one and it is sound."""
        step = self.outcome.step
        if step > self.start and self.logger.flush(False, wait=True) is None:
            with suppress(MprunError, OSError):
                self.save(step)
                self.logger.progress.note(f"checkpoint at step {step} kept for mprun resume=")

    def finish(self) -> Outcome:
        """Complete the outcome with the measurements; write the post-mortem of a divergence."""
        outcome, device = self.outcome, self.built.device
        outcome.skipped = self.buffer.host_skipped
        outcome.memory = memory.higher(outcome.memory, device)
        if self.keeper is not None and device.type == "cuda":
            for key in memory.OF_CUDA:
                # The copies for `mprun explain` are not part of the mode's memory.
                outcome.memory[key] -= self.keeper.bytes
        # Of the first step, which another attempt may have taken.
        by_kind = outcome.first_step.get("memory_by_kind", {})
        kept = [by_kind[kind] for kind in ("activations", "weight_copies") if kind in by_kind]
        sizes = [size for by_dtype in kept for size in by_dtype.values()]
        outcome.memory["activation_bytes"] = sum(sizes) if kept else None
        self._read_throughput()
        if outcome.skipped and outcome.status in OUTCOMES and self.ranks.world == 1:
            outcome.bad_batches = self._bad_batches()
        if outcome.status == "diverged" and outcome.cause is not None:
            reason = "numerics.keep_failure=false"
            report_failure(
                self.keeper,
                self.directory,
                outcome.cause,
                outcome.step,
                self.logger.history.up_to(outcome.step),
                scaler_kind=self.config.scaler.kind,
                reason=reason if self.ranks.world == 1 else "the run had several ranks",
            )
        return outcome

    def _bad_batches(self) -> dict[str, str]:
        """Return what is not finite in the batches of the first skipped updates with such a loss.

        The steps are those of all attempts, from the records; no step waits for this.
        """
        steps = read_columns(self.directory / "metrics.jsonl").nonfinite_skips[:LOOKED_AT]
        found = {}
        for step in steps.tolist():
            try:
                found[str(step)] = "; ".join(
                    f"{name}: {text}"
                    for name, text in nonfinite_batch(self.built.task, step - 1).items()
                )
            # A source of the user's may refuse to go back with any error; the outcome is there.
            except Exception as error:
                say(f"the batch of step {step} could not be read again: {error}")
        return {step: text for step, text in found.items() if text}

    def _left_at_once(self, take: Callable, index: int, measure: bool) -> dict[str, Tensor]:
        """Take a step that may last minutes; a signal ends it at once and discards it."""
        try:
            with self._breaks():
                return take(index, measure)
        except Stopped:
            if not self.built.stepper.takes_back:
                self.outcome.step = self.start
            raise

    def _first_step(self, index: int, measure: bool) -> dict[str, Tensor]:
        """Take the first step and count operations and memory, see `mprun.numerics.operations`."""
        built, overrides = self.built, self.config.precision.overrides
        if not self.ranks.is_first:
            return built.stepper.step(index, measure)
        with FirstStep(built.task, built.policy, overrides, index + 1) as first:
            metrics = built.stepper.step(index, measure)
        self.outcome.first_step = self.outcome.first_step or first.record()
        products = product_shares({"products": built.stepper.audit.counts()})
        self.logger.progress.note(first.summary(built.device.type, self.config.verbose, products))
        return metrics

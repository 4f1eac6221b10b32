"""`mprun.Run`: the training of a user's script as a run directory; docs/script/run.md shows one.

It leaves the same directory as a run of `mprun`. Commands that take steps again (`mprun resume=`,
`mprun explain`) cannot use it: only the script can take its steps, in `mprun.explain`.
"""

from __future__ import annotations

import atexit
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mprun.errors import DIVERGED
from mprun.numerics.post_mortem import nonfinite_metric
from mprun.numerics.probe import chosen_modules
from mprun.numerics.state import bits_of
from mprun.precision import DTYPE_NAMES
from mprun.precision.policy import usual_scaler
from mprun.record.metric_facts import as_record, stated, told_by_name
from mprun.record.run_directory import path_safe
from mprun.record.run_record import Outcome
from mprun.record.seed_plan import SeedPlan
from mprun.recording.environment import number_formats
from mprun.script.recorder import Recorder, configuration, name_of
from mprun.script.told import Told
from mprun.script.watched import Optimizers, ScriptTask

# Fields of the records; no metric may have these names.
_RESERVED = frozenset(
    "split step updates skipped epoch loss_scale found_inf lr seconds samples_per_s".split()
)


class Diverged(SystemExit):
    """Exception of a run that has diverged and is recorded.

    It ends the run's `with` block, and the script continues after the block. Without a block the
    process ends with exit code 3. No `except Exception` catches it.
    """


class Run:
    """A run directory that a script writes, in a `with` block around its training.

    On several processes, each process creates the run and calls it in the same way. The first
    process writes the directory. The other processes wait for the first process every `log_every`
    steps, at evaluations and at the end. A run ends in all processes or in none.

    Args:
        folder: parent of the run's directory, which is named after mode, scaler and seed.
        optimizer: the optimizer from `mprun.prepare`. Pass several optimizers as a list, or as a
            dict by name ({"d": ..., "g": ...}).
        config: the script's settings that affect its result, for instance `vars(args)`. Runs are
            compared only if they have the same `config`; only precision, scaler and seed may
            differ between runs.
        seed: the seed of the run. A run is paired with the FP32 run that has the same seed.
        data: the training data, given by a name, or by a path (or several paths) whose content is
            hashed.
        metric: name of the metric, among those passed to `evaluate`, that the verdict judges.
        margin: largest difference to FP32 that still counts as a match. The margin is relative
            (0.01 means 1 %), or in the metric's unit if higher values are better. None means 1 %.
        higher_is_better: whether higher values of the metric are better; True needs a margin. None
            means False and is allowed only if the metric's name contains loss, error or perplexity.
        pair_sd: known scatter (standard deviation) of the gap between one run and its FP32 partner,
            in the margin's unit. With pair_sd, a verdict on a single pair of runs is possible.
        pair_sd_source: the runs from which pair_sd was measured; required with pair_sd.
        name: name of the experiment; None: the script's file.
        log_every: number of steps between two records. The run also records its first 20 steps and
            every skipped step.
        probe_every: number of steps between two probes, see `mprun.probe`; 0: no probes.
        modules: patterns of the modules to probe; if empty, all modules without submodules.

    Attributes:
        directory: the run's directory.
        status: "running", then "done", "diverged", "preempted" or "failed".
        steps: number of steps so far.

    Raises:
        ValueError: an argument is wrong; the message names it and what is allowed.
        BadInput: the directory cannot be created.
    """

    _seed_plan: SeedPlan | None = None  # of a sweep until decided

    def __init__(
        self,
        folder: str | Path,
        optimizer: Optimizers,
        *,
        config: Mapping[str, Any],
        seed: int,
        data: str | Path | Iterable[Path] | None = None,
        metric: str = "loss",
        margin: float | None = None,
        higher_is_better: bool | None = None,
        pair_sd: float | None = None,
        pair_sd_source: str | None = None,
        name: str | None = None,
        log_every: int = 50,
        probe_every: int = 0,
        modules: Iterable[str] = (),
    ):
        seed = _integer("seed", seed, 0)
        log_every = _integer("log_every", log_every, 1)
        probe_every = _integer("probe_every", probe_every, 0)
        if not isinstance(config, Mapping):
            raise ValueError(f"config: must be a mapping, not a {type(config).__name__}")
        if higher_is_better is None and (higher_is_better := told_by_name(metric)) is not False:
            raise ValueError(
                f"metric={metric}: if higher values are better, pass higher_is_better=True and a "
                "margin in the metric's unit; otherwise pass higher_is_better=False"
            )
        if margin is not None and not 0 < margin < (math.inf if higher_is_better else 0.5):
            allowed = "above 0" if higher_is_better else "above 0 and below 0.5 (0.01: 1 %)"
            raise ValueError(f"margin={margin!r}: must be {allowed}")
        if higher_is_better and margin is None:
            raise ValueError(
                "margin=None: a margin is needed with higher_is_better, in the unit of the metric"
            )
        if pair_sd is not None and not 0 < pair_sd < math.inf:
            raise ValueError(f"pair_sd={pair_sd!r}: must be above 0, in the margin's unit")
        if (pair_sd is None) != (not (pair_sd_source or "").strip()):
            said = f"pair_sd={pair_sd!r}, pair_sd_source={pair_sd_source!r}"
            raise ValueError(f"{said}: must be passed together, or not at all")
        self.task = task = ScriptTask(optimizer)
        modules = list(modules)
        chosen_modules(task.learners, modules)
        if probe_every and task.is_sharded:
            raise ValueError(f"probe_every={probe_every}: shards (fully_shard) cannot be probed")
        self.metric, self.log_every, self.steps = metric, log_every, 0
        self._policy = task.policy
        self.status = "running"
        self.cause: str | None = None
        self._final: dict[str, float] = {}
        self._extra: dict[str, float] = {}
        self._evaluations = 0
        changed = task.first.models[0].overrides.items()
        named = [f"{pattern}={DTYPE_NAMES[dtype]}" for pattern, dtype in changed]
        mode = "+".join([task.policy.name, *named])
        usual, scaler = usual_scaler(task.policy.name), task.first.scaler_name
        script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
        compare: dict[str, Any] = {"metric": metric, "margin": margin, "window": 1}
        if pair_sd is not None:
            compare |= {"pair_sd": float(pair_sd), "pair_sd_source": pair_sd_source}
        if self._seed_plan is not None:
            compare["plan"] = self._seed_plan.as_list()
        judged = stated(metric, higher_is_better)
        values = configuration(task, config, seed, script, compare)
        own = "" if scaler == usual else f"-{scaler}"
        self.directory = Path(folder) / path_safe(f"{mode}{own}-s{seed}")
        self._told = Told(str(self.directory))
        self._recorder: Recorder | None = None  # of the first process
        if self._told.is_first:
            known: dict[str, Any] = {
                "script": {"file": script and script.name, "arguments": sys.argv[1:]},
                "choices": {"experiment": name or name_of(script)},
                "metrics": as_record({metric: judged}, None),
                "precision": {
                    "mode": mode,
                    "usual_scaler": usual,
                    **number_formats(task.learners, task.forward_context, scaler),
                },
                "ranks": {"world": self._told.world} if self._told.world > 1 else None,
            }
            with self._telling("directory", lambda: str(self.directory)):
                self._recorder = Recorder(
                    task, self.directory, values, data, known, probe_every, modules
                )
                self.directory = self._recorder.directory
        else:
            (found,) = self._hear("directory")
            self.directory = Path(found)
        atexit.register(self._at_exit)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if kind is None:
            with suppress(Diverged):  # the last step always has a record
                self.close()
        elif kind is not Diverged:
            stopped = issubclass(kind, KeyboardInterrupt)
            if isinstance(error, SystemExit):
                stopped = error.code in (None, 0)
            text = f"{kind.__name__}: {error}" if str(error) else kind.__name__
            self._break_off("preempted" if stopped else "failed", text)
        return kind is Diverged

    def step(self, loss: Tensor | float, **metrics: Tensor | float) -> None:
        """Count the step that the script has just taken; call it after `optimizer.step()`.

        On CUDA the call never waits for the device, because the numbers are read `log_every` steps
        later. On a device other than CUDA, the call waits only at steps that are recorded.

        Args:
            loss: the loss of the step, a number or a 0-dim tensor. mprun checks that the loss is
                finite. If there are several losses, as in a GAN, pass their sum, and each loss as a
                metric.
            metrics: further metrics of the step, with one number for each name.

        Raises:
            Diverged: the loss was not finite although its update was applied, or a loss scale has
                collapsed. The run is recorded, and `Diverged` ends the `with` block of the run.
            RuntimeError: no optimizer has made a step.
        """
        if self.status != "running":
            self._refuse_ended()
        if metrics:
            _refuse_reserved(_RESERVED & metrics.keys())
        found = self.task.ended(loss, metrics)
        self.steps += 1
        if (policy := self.task.policy) != self._policy:  # by mprun.switch
            self._policy = policy
            if self._recorder is not None:
                self._recorder.switched(self.steps, policy)
        is_due = self.steps % self.log_every == 0
        if self._recorder is None:
            if is_due:
                self._hear(f"step {self.steps}")
            return
        self._recorder.add(self.steps, found)
        if is_due:
            with self._telling(f"step {self.steps}"):
                self._log_step(self._recorder)
                self._recorder.keep(self.steps)
        self._recorder.watch(self.steps + 1)

    def log(self, **values: Tensor | float) -> None:
        """Add the numbers in `values` to later training records, until you pass new ones."""
        _refuse_reserved((_RESERVED | {"loss"}) & values.keys())
        self._extra |= {name: float(value) for name, value in values.items()}

    def evaluate(self, **metrics: Tensor | float) -> None:
        """Record the metrics of an evaluation that the script has computed after its latest step.

        A prepared model in eval mode computes with its master weights in FP32.

        Args:
            metrics: one number for each name, including the run's `metric`.

        Raises:
            Diverged: a metric is not finite.
        """
        values = {
            name: float(value.detach() if isinstance(value, Tensor) else value)
            for name, value in metrics.items()
        }
        self._refuse_ended()
        _refuse_reserved(_RESERVED & values.keys())
        if self.metric not in values:
            given = ", ".join(values) or "nothing"
            raise ValueError(f"evaluate: got {given}, but not {self.metric} (the run's metric)")
        self._evaluations += 1
        key = f"evaluation {self._evaluations}"
        if self._recorder is None:
            self._compare(self._hear(key))
            return
        with self._telling(key, self._in_common):
            self._diverge(self._recorder, self._recorder.evaluate(self.steps, values))
            self._final = values
            if (cause := nonfinite_metric(values)) is not None:
                self._diverge(self._recorder, (self.steps, cause))

    def rewind(self) -> int:
        """Restore models, optimizers, loss scales and random states from the newest saved copy.

        After a divergence, the newest saved copy is from before the bad step. From the restored
        state, `mprun.explain(step, optimizer, steps=...)` can search for the bad step.

        Returns: The step after which the restored copy was saved.
        """
        keeper = None if self._recorder is None else self._recorder.keeper
        if keeper is None:
            raise RuntimeError(f"{self.directory}: a run of several processes cannot rewind")
        kept = keeper.snapshot
        if kept.step is None:
            raise RuntimeError(f"{self.directory}: no copy was saved ({keeper.reason})")
        kept.restore()
        return kept.step

    def close(self, status: str = "done", cause: str | None = None) -> None:
        """End the run, in a script without a `with` block."""
        if status not in ("done", "failed", "preempted"):
            raise ValueError(f"status={status!r}: must be done, failed or preempted")
        if self.status != "running":
            return
        if self._recorder is not None:
            self._log_step(self._recorder, wait=True)
            self._told.wait_for_others()
            self._refuse_failure()
            self._end(self._recorder, status, cause)
            return
        self.status = "failed"
        self._told.leave()
        with suppress(RuntimeError):  # the first may have ended already, and the store with it
            (self.status,) = self._told.hear("end")

    def _break_off(self, status: str, cause: str) -> None:
        """End the run for an exception of the script."""
        if self.status != "running":
            return
        failed = status == "failed"
        if self._recorder is not None:
            self._end(self._recorder, status, (self._told.failure() if failed else None) or cause)
            return
        self.status = status
        if failed:
            self._told.fail(f"process {self._told.rank}: {cause}")
        self._told.leave()

    def _refuse_ended(self) -> None:
        if self.status != "running":
            raise RuntimeError(f"{self.directory}: the run has ended ({self.status})")

    def _at_exit(self) -> None:
        """End the run of a script without a `with` block when the script ends."""
        error: BaseException | None = getattr(sys, "last_value", None)
        if self.status == "running":
            with suppress(Diverged):
                self.__exit__(type(error) if error is not None else None, error, None)

    # Several processes

    @contextmanager
    def _telling(self, key: str, what: Callable[[], Any] | None = None) -> Iterator[None]:
        """Do what the first process does, and tell the others how the run goes on."""
        self._refuse_failure()
        try:
            yield
        except BaseException:
            self._told.tell(key, "failed" if self.status == "running" else self.status)
            raise
        values = [] if what is None or self._told.world == 1 else [what()]
        self._told.tell(key, self.status, *values)

    def _hear(self, key: str) -> list[Any]:
        """Wait until the first process has got there; end with it."""
        self.status, *values = self._told.hear(key)
        if self.status == "diverged":
            raise Diverged(DIVERGED)
        if self.status != "running":
            raise RuntimeError(f"{self.directory}: process 0 has ended the run ({self.status})")
        return values

    def _refuse_failure(self) -> None:
        if self._recorder is not None and (text := self._told.failure()) is not None:
            self._end(self._recorder, "failed", text)
            raise RuntimeError(text)

    def _in_common(self) -> list[float]:
        """Return what all processes have in common: numbers that depend on each bit of a weight,
        and the loss scales. Shards are no process's own."""
        scales = [float(scale.scale) for scale in self.task.loss_scales.values()]
        if self.task.is_sharded:
            return scales
        return [*scales, *torch.stack([*map(bits_of, self.task.parameters().values())]).tolist()]

    def _compare(self, values: list[Any]) -> None:
        """Raise RuntimeError if this process has other weights or scales than the first."""
        names = [*self.task.loss_scales, *self.task.parameters()]
        pairs = zip(names, self._in_common(), *values, strict=False)
        for name in [name for name, own, of_first in pairs if own != of_first][:1]:
            text = (
                f"after step {self.steps} process {self._told.rank} has another {name} than "
                "process 0: they do not train the same model"
            )
            self._told.fail(text)
            raise RuntimeError(text)

    # By the process that writes

    def _log_step(self, recorder: Recorder, wait: bool = False) -> None:
        groups = self.task.first.optimizer.param_groups
        fields = {"lr": float(groups[0]["lr"])} | self._extra
        self._diverge(recorder, recorder.log(self.steps, fields, wait))

    def _diverge(self, recorder: Recorder, found: tuple[int, str] | None) -> None:
        """End the run as diverged if it has, at a step, for a cause."""
        if found is None:
            return
        step, cause = found
        recorder.report(step, cause)
        self._end(recorder, "diverged", cause, step)
        self._say(f"diverged at step {step}: {cause} ({self.directory})")
        raise Diverged(DIVERGED)

    def _end(
        self, recorder: Recorder, status: str, cause: str | None, step: int | None = None
    ) -> None:
        self.status, self.cause = status, cause
        step = self.steps if step is None else step
        lines = recorder.end(Outcome(status, step, cause, final=self._final), self.steps)
        atexit.unregister(self._at_exit)
        self._told.tell("end", status)
        for line in (*lines, f"run: {self.directory}"):
            self._say(line)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr)


def _integer(key: str, value: Any, least: int) -> int:
    with suppress(TypeError):
        if type(value) is not bool and (number := operator.index(value)) >= least:
            return number
    raise ValueError(f"{key}={value!r}: must be an integer of at least {least}")


def _refuse_reserved(names: Iterable[str]) -> None:
    for name in sorted(names):
        raise ValueError(
            f"{name}: every record has a field of this name; give the metric another name"
        )

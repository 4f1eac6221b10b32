"""`mprun.Run`: the training of a user's script as a run directory.

    with mprun.Run("outputs/mine", optimizer, config=vars(args), seed=args.seed) as run:
        for inputs, labels in batches:
            ...
            optimizer.step()
            run.step(loss)
        run.evaluate(loss=held_out_loss)

It leaves the same directory as a run of `mprun`. Commands that take steps again (`mprun resume=`,
`mprun explain`) cannot use it: only the script can take its steps, in `mprun.explain`.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import operator
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mprun.config.keys import config_hash
from mprun.config.schema import ScalerConfig
from mprun.errors import DIVERGED, BadInput, MprunError
from mprun.extensions.script.shards import local_of
from mprun.extensions.script.told import told
from mprun.extensions.script.watched import Optimizers, ScriptTask
from mprun.numerics.failure import FailureKeeper, report_failure
from mprun.numerics.post_mortem import StepRow
from mprun.numerics.probe import chosen_modules
from mprun.numerics.probing import Probing
from mprun.numerics.state import bits_of
from mprun.precision import DTYPE_NAMES, LossScale
from mprun.precision.policy import policy_values, usual_scaler
from mprun.record import memory
from mprun.record.run_directory import Heartbeat, claim, locked, path_safe
from mprun.record.run_record import Outcome, Record, read_record
from mprun.training.environment import environment, number_formats
from mprun.training.metric_buffer import MetricBuffer
from mprun.training.metric_logger import Records

# Keys of a script's configuration that name the arm of a run, not the experiment.
_OF_ARM = ("precision", "mode", "scaler", "seed")
# Fields of the records; no metric may have these names.
_RESERVED = frozenset(
    "split step updates skipped epoch loss_scale found_inf lr seconds samples_per_s".split()
)
_SCORE = re.compile(r"(?i)acc|top[-_]?\d|bleu|auc|(^|[^a-z])(f1|map|recall)")
_MOST_CONFIG = 200_000  # characters; a record takes no more
# Keys of an optimizer's group that decide how it computes, not what.
_HOW = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")


class Diverged(SystemExit):
    """Exception of a run that has diverged and is recorded.

    It ends the run's `with` block, and the script continues after the block. Without a block the
    process ends with exit code 3. No `except Exception` catches it.
    """


class Run:
    """A run directory that a script writes, in a `with` block around its training.

    Of several processes each makes it and calls it alike. The first writes, the others wait for it
    every `log_every` steps, at evaluations and at the end: it ends in all of them or in none.

    Args:
        folder: parent of the run's directory, which is named after mode, scaler and seed.
        optimizer: from `mprun.prepare`; several in a list, or by name ({"d": ..., "g": ...}).
        config: the script's settings that decide on its result, for instance `vars(args)`. Runs
            are compared if these agree; precision, scaler and seed are left out.
        seed: runs of the same seed are compared in pairs.
        data: the training data: a name, or a path (or several) whose content is hashed.
        metric: metric of `evaluate` that the verdict rests on.
        margin: difference up to which the metric matches FP32: relative (0.01: 1 %), or in the
            metric's own unit if higher is better; None: 1 %.
        higher_is_better: the metric is an accuracy or a score; needs a margin. None: no, but the
            name of such a metric is refused.
        name: name of the experiment; None: the script's file.
        log_every: steps between two records; the first 20 and every skipped step have one too.
        probe_every: probe the steps divisible by this, see `mprun.probe`; 0: none.
        modules: patterns of the modules to probe; none: all modules without submodules.

    Attributes:
        directory: the run's directory.
        status: "running", then "done", "diverged", "preempted" or "failed".
        steps: number of steps taken so far.

    Raises:
        ValueError: an argument is wrong; the message names it and what is allowed.
        BadInput: the directory cannot be made.
    """

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
        name: str | None = None,
        log_every: int = 50,
        probe_every: int = 0,
        modules: Iterable[str] = (),
    ):
        given: Any = seed
        with suppress(TypeError):
            seed = operator.index(given)
        if type(seed) is not int or seed < 0:
            raise ValueError(f"seed={seed!r}: must be an integer of at least 0")
        for key, every, least in (("log_every", log_every, 1), ("probe_every", probe_every, 0)):
            if type(every) is not int or every < least:
                raise ValueError(f"{key}={every!r}: must be an integer of at least {least}")
        if not isinstance(config, Mapping):
            raise ValueError(f"config: must be a mapping, not a {type(config).__name__}")
        if higher_is_better is None and _SCORE.search(metric):
            raise ValueError(
                f"metric={metric}: say higher_is_better=True and a margin in its own unit, or "
                "higher_is_better=False if less of it is better"
            )
        if margin is not None and not 0 < margin < (math.inf if higher_is_better else 0.5):
            allowed = "above 0" if higher_is_better else "above 0 and below 0.5 (0.01: 1 %)"
            raise ValueError(f"margin={margin!r}: must be {allowed}")
        if higher_is_better and margin is None:
            raise ValueError("margin=None: needed with higher_is_better, in the metric's own unit")
        self.task, modules = ScriptTask(optimizer), list(modules)
        chosen_modules(self.task.learners, modules)
        if probe_every and self.task.is_sharded:
            raise ValueError(f"probe_every={probe_every}: shards (fully_shard) cannot be probed")
        self.metric, self.log_every, self.steps = metric, log_every, 0
        self.status = "running"
        self.cause: str | None = None
        self._final: dict[str, float] = {}
        self._extra: dict[str, float] = {}
        self._evaluations = 0
        first = next(iter(self.task.prepared.values()))
        changed = first.models[0].overrides.items()
        named = [f"{pattern}={DTYPE_NAMES[dtype]}" for pattern, dtype in changed]
        mode = "+".join([first.policy.name, *named])
        usual, scaler = usual_scaler(first.policy.name), first.scaler_name
        script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
        name = name or _name_of(script)
        values = self._configuration(dict(config), seed, script, data)
        if len(_canonical(values)) > _MOST_CONFIG:
            raise ValueError(
                f"config: {len(_canonical(values))} characters, must be at most {_MOST_CONFIG}; "
                "give only settings that decide on the result, and hashes of large values"
            )
        values["compare"] = {"metric": metric, "margin": margin, "window": 1}
        if higher_is_better:
            values["compare"]["higher_is_better"] = True
        own = "" if scaler == usual else f"-{scaler}"
        self.directory = Path(folder) / path_safe(f"{mode}{own}-s{seed}")
        self._told = told(str(self.directory))
        self._follows = self._told is not None and not self._told.is_first
        if self._follows:
            (found,) = self._hear("directory")
            self.directory = Path(found)
        else:
            with self._telling("directory", lambda: str(self.directory)):
                numbers = number_formats(self.task.learners, self.task.forward_context, scaler)
                self._create(
                    values,
                    data,
                    probe_every,
                    modules,
                    script={"file": script and script.name, "arguments": sys.argv[1:]},
                    choices={"experiment": name},
                    precision={"mode": mode, "usual_scaler": usual, **numbers},
                )
            self._look_for_a_twin()
        atexit.register(self._at_exit)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        if isinstance(error, SystemExit):
            stopped = error.code in (None, 0)
        text = None
        if kind is not None:
            text = f"{kind.__name__}: {error}" if str(error) else kind.__name__
        if self._follows:
            self._leave(text, stopped)
            return kind is Diverged
        if kind is None:
            try:
                self._log_step(wait=True)  # the last step always has a record
            except Diverged:
                kind = Diverged
        if kind is None:
            self._end_together("done", None)
        elif kind is not Diverged:
            if self._told is not None and not stopped:
                text = self._told.failure() or text
            self._end("preempted" if stopped else "failed", text)
        return kind is Diverged

    def step(self, loss: Tensor | float, **metrics: Tensor | float) -> None:
        """Count the step that the script has just taken; call it after `optimizer.step()`.

        It waits for the device only at steps that are recorded. On CUDA it never waits: the numbers
        are read `log_every` steps later.

        Args:
            loss: the step's loss to report, 0-dim.
            metrics: further metrics of the step, one number each.

        Raises:
            Diverged: the loss was not finite although its update was applied, or a loss scale has
                collapsed; the run is recorded, and the exception ends its `with` block.
            RuntimeError: no optimizer has taken a step.
        """
        if self.status != "running":
            self._refuse_ended()
        if metrics:
            _refuse_reserved(_RESERVED & metrics.keys())
        found = self.task.ended(loss, metrics)
        self.steps += 1
        if self._follows:
            if self.steps % self.log_every == 0:
                self._hear(f"step {self.steps}")
            return
        if self._watching is not None:
            self._stop_watching(found)
        self._buffer.add(self.steps, found)
        self._heartbeat.beat()
        if self.steps % self.log_every == 0:
            with self._telling(f"step {self.steps}"):
                self._log_step()
                self._keep()
        if self._probing is not None:
            self._begin_watching()

    def log(self, **values: Tensor | float) -> None:
        """Add numbers to the training records from now on, until they are set again."""
        _refuse_reserved((_RESERVED | {"loss"}) & values.keys())
        self._extra |= {name: float(value) for name, value in values.items()}

    def evaluate(self, **metrics: Tensor | float) -> None:
        """Record an evaluation by the script after the steps so far.

        A prepared model in eval mode computes with its master weights in FP32.

        Args:
            metrics: one number a name, including the run's `metric`.

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
        if self._follows:
            self._compare(self._hear(key))
            return
        with self._telling(key, self._in_common):
            self._flush(wait=True)
            self._final = values
            seconds = time.perf_counter() - self._evaluated
            self._records.write_evaluation(self.steps, values, seconds)
            self._buffer.restart_clock()
            for name, value in values.items():
                if not math.isfinite(value):
                    self._diverge(self.steps, f"non-finite evaluation {name}")
                    break

    def rewind(self) -> int:
        """Restore models, optimizers, loss scales and random states from the newest kept copy.

        After a divergence this is a state before the bad step. `mprun.explain(step, optimizer,
        steps=...)` can look for that step from there.

        Returns:
            The step that the copy was taken after.
        """
        if self._keeper is None:
            raise RuntimeError(f"{self.directory}: a run of several processes cannot go back")
        kept = self._keeper.snapshot
        if kept.step is None:
            raise RuntimeError(f"{self.directory}: no copy was kept ({self._keeper.reason})")
        kept.restore()
        return kept.step

    def close(self, status: str = "done", cause: str | None = None) -> None:
        """End the run; for a script without a `with` block."""
        if status not in ("done", "failed", "preempted"):
            raise ValueError(f"status={status!r}: must be done, failed or preempted")
        if self._follows:
            self._leave()
        elif self.status == "running":
            self._log_step(wait=True)
            self._end_together(status, cause)

    def _refuse_ended(self) -> None:
        if self.status != "running":
            raise RuntimeError(f"{self.directory}: the run has ended ({self.status})")

    def _at_exit(self) -> None:
        """End the run of a script without a `with` block when the script ends."""
        error: BaseException | None = getattr(sys, "last_value", None)
        if self.status == "running":
            with suppress(Diverged):
                self.__exit__(type(error) if error is not None else None, error, None)

    def _create(
        self,
        values: dict[str, Any],
        data: str | Path | Iterable[Path] | None,
        probe_every: int,
        modules: list[str],
        **fields: Any,
    ) -> None:
        """Make the directory, and in it the record."""
        content = _data(data)
        self.directory = claim(self.directory.parent, self.directory.name)
        self._lock = locked(self.directory)
        self._lock.__enter__()
        try:
            self._record = Record.new(
                self.directory, overrides=[], config_hash=config_hash(values), **fields
            )
            self._record.begin(
                values,
                initial_state=self._initial_state(),
                steps=1,
                sample="step",
                samples_per_step=1,
                data=content,
                environment=environment(self.task.device),
                ranks=self._told and {"world": self._told.world},
            )
            self._open(probe_every, modules)
        except BaseException:
            self._lock.__exit__(None, None, None)
            shutil.rmtree(self.directory)  # just made, still without content
            raise

    # Several processes

    @contextmanager
    def _telling(self, key: str, what: Callable[[], Any] | None = None) -> Iterator[None]:
        """Do what the first process does, and tell the others how the run goes on."""
        if self._told is None:
            yield
            return
        self._refuse_failure()
        try:
            yield
        except BaseException:
            self._told.tell(key, "failed" if self.status == "running" else self.status)
            raise
        self._told.tell(key, self.status, *([] if what is None else [what()]))

    def _hear(self, key: str) -> list[Any]:
        """Wait until the first process has got there; end with it."""
        assert self._told is not None
        self.status, *values = self._told.hear(key)
        if self.status == "diverged":
            raise Diverged(DIVERGED)
        if self.status != "running":
            raise RuntimeError(f"{self.directory}: process 0 has ended the run ({self.status})")
        return values

    def _leave(self, cause: str | None = None, stopped: bool = False) -> None:
        """End the run in a process that does not write it."""
        if self._told is None or self.status != "running":
            return
        self.status = "preempted" if stopped else "failed"
        if cause and not stopped:
            self._told.fail(f"process {self._told.rank}: {cause}")
        self._told.leave()
        if cause is None:
            with suppress(RuntimeError):  # the first may have ended already, and the store with it
                (self.status,) = self._told.hear("end")

    def _end_together(self, status: str, cause: str | None) -> None:
        """End the run once the others have compared their weights."""
        if self._told is not None:
            self._told.wait_for_others()
            self._refuse_failure()
        self._end(status, cause)

    def _refuse_failure(self) -> None:
        if self._told is not None and (text := self._told.failure()) is not None:
            self._end("failed", text)
            raise RuntimeError(text)

    def _in_common(self) -> list[float]:
        """Return what all processes have in common: numbers that depend on each bit of a weight,
        and the loss scales. Shards are no process's own."""
        scales = [float(scale.scale) for scale in self.task.loss_scales.values()]
        if self.task.is_sharded:
            return scales
        return [*scales, *torch.stack([*map(bits_of, self._parameters().values())]).tolist()]

    def _compare(self, values: list[Any]) -> None:
        """Raise RuntimeError if this process has other weights or scales than the first."""
        assert self._told is not None
        names = [*self.task.loss_scales, *self._parameters()]
        pairs = zip(names, self._in_common(), *values, strict=False)
        for name in [name for name, own, of_first in pairs if own != of_first][:1]:
            text = (
                f"after step {self.steps} process {self._told.rank} has another {name} than "
                "process 0: they do not train the same model"
            )
            self._told.fail(text)
            raise RuntimeError(text)

    def _open(self, probe_every: int, modules: list[str]) -> None:
        self._buffer = MetricBuffer(self.task.device, loss_scales=self.task.loss_scales)
        self._records = _Records(self.directory, self._buffer)
        # Several processes would have to go back together.
        self._keeper = FailureKeeper(self.task) if self._told is None else None
        if self._keeper is not None:
            self._keeper.keep(0, 0)
        self._heartbeat = Heartbeat(self.directory)
        self._probing: Probing | None = None
        if probe_every:
            writer = self._records.tensorboard.writer
            self._probing = Probing(
                self.task, self.directory, writer, every=probe_every, modules=modules
            )
        self._watching: Any = None
        self._evaluated = time.perf_counter()
        memory.reset_peak(self.task.device)
        self._begin_watching()

    def _begin_watching(self) -> None:
        probing = self._probing
        if probing is not None and probing.due(self.steps + 1):
            self._watching = probing.watching(self.steps + 1)
            self._watched = self._watching.__enter__()

    def _stop_watching(self, found: dict[str, Tensor] | None) -> None:
        watching, self._watching = self._watching, None
        if watching is None:
            return
        if found is None:  # the step did not finish
            self._watched.__exit__(GeneratorExit, None, None)
            return
        self._watched.metrics = found
        watching.__exit__(None, None, None)

    def _log_step(self, wait: bool = False) -> None:
        groups = next(iter(self.task.prepared.values())).optimizer.param_groups
        self._records.extra[self.steps] = {"lr": float(groups[0]["lr"])} | self._extra
        self._flush(logged=True, wait=wait)

    def _flush(self, logged: bool = False, wait: bool = False) -> None:
        cause = self._records.flush(logged, wait)
        if cause is not None:
            self._diverge(self._records.diverged_at, cause)

    def _keep(self) -> None:
        """Keep a copy of the state if one is due and the last step was sound."""
        if self._keeper is None:
            return
        if self._buffer.late:
            skipped = torch.full((), self._buffer.host_skipped, device=self.task.device)
            self._keeper.keep_if(self.steps, skipped, self._buffer.sound)
        elif self._records.history.rows:
            healthy = not self._records.history.rows[-1].found_inf
            self._keeper.keep(self.steps, self._buffer.host_skipped, healthy=healthy)

    def _diverge(self, step: int, cause: str) -> None:
        rows = self._records.history.up_to(step)
        reason = "only the script can take its steps again: run.rewind(), mprun.explain(...)"
        kind = next(iter(self.task.loss_scales.values())).kind
        report_failure(None, self.directory, cause, step, rows, scaler_kind=kind, reason=reason)
        self._end("diverged", cause, step)
        self._say(f"diverged at step {step}: {cause} ({self.directory})")
        raise Diverged(DIVERGED)

    def _end(self, status: str, cause: str | None, step: int | None = None) -> None:
        if self.status != "running":
            return
        self._stop_watching(None)
        step, skipped = self.steps if step is None else step, self._buffer.host_skipped
        speed, peak = self._records.throughput("step"), memory.higher({}, self.task.device)
        found = Outcome(status, step, cause, skipped, self._final, speed, peak)
        self.status, self.cause = status, cause
        self._records.close()
        computed = {"emulated": self.task.forward_context.rerouted(), "audit": self.task.audit()}
        self._record.end(status, cause, found.results() | computed, steps=max(1, self.steps))
        atexit.unregister(self._at_exit)
        self._lock.__exit__(None, None, None)
        if self._told is not None:
            self._told.tell("end", status)
        self._say(f"run: {self.directory}")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr)

    def _configuration(
        self, config: dict[str, Any], seed: int, script: Path | None, data: Any
    ) -> dict[str, Any]:
        """Return the parts of config.yaml that a script's run has."""
        first = next(iter(self.task.prepared.values()))
        overrides, context = first.models[0].overrides, self.task.forward_context
        file = script if script is not None and script.is_file() else None
        shapes = {n: list(p.shape) for n, p in self._parameters().items()}
        native = context.half_dtypes and not context.emulations and context.device.type == "cpu"
        return {
            "seed": seed,
            "device": context.device.type,
            "cpu_half": "native" if native else "emulated",
            "script": {
                "file": file and file.name,
                "sha256": file and hashlib.sha256(file.read_bytes()).hexdigest(),
                **{str(k): _plain(v) for k, v in config.items() if not _of_arm(k, v, seed)},
            },
            "model": {"parameters": hashlib.sha256(_canonical(shapes)).hexdigest()},
            "optim": {n: _settings(o.optimizer) for n, o in self.task.prepared.items()},
            "precision": {
                "name": first.policy.name,
                **policy_values(first.policy),
                "overrides": {pattern: DTYPE_NAMES[d] for pattern, d in overrides.items()},
            },
            "scaler": _scaler(first.scaler_name, first.scale, len(self.task.loss_scales)),
        }

    def _initial_state(self) -> str:
        """Return a digest of torch's random state and a few numbers of each parameter.

        A seed decides on both.
        """
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        for own in self._parameters().values():
            digest.update(repr(local_of(own.detach()).reshape(-1)[:8].tolist()).encode())
        return digest.hexdigest()

    def _look_for_a_twin(self) -> None:
        """Warn if a run beside this one has another seed but the same initial state."""
        for path in sorted(self.directory.parent.glob("*/run.json")):
            with suppress(MprunError, OSError):
                other = read_record(path.parent)
                same = other.get("initial_state") == self._record["initial_state"]
                if same and other.get("seed") != self._record["seed"]:
                    print(
                        f"seed={self._record['seed']}: weights and torch's random state are those "
                        f"of {path.parent} (seed={other.get('seed')}); unless the script's own "
                        "generators differ, both are one run: call torch.manual_seed(seed) first",
                        file=sys.stderr,
                    )
                    return

    def _parameters(self) -> dict[str, Tensor]:
        """Return all parameters of the models, by learner and name."""
        return {
            f"{learner}.{name}": parameter
            for learner, optimizer in self.task.prepared.items()
            for name, parameter in optimizer.module.named_parameters()
        }


class _Records(Records):
    """The records of a script's run, with the fields that the script adds to a step."""

    def __init__(self, directory: Path, buffer: MetricBuffer):
        self.extra: dict[int, dict[str, float]] = {}
        super().__init__(directory, buffer)

    def _extra(self, row: StepRow) -> dict[str, float]:
        return self.extra.pop(row.step, {})


def _of_arm(key: Any, value: Any, seed: int) -> bool:
    """Return whether a setting names the arm or the seed of a run, not the experiment."""
    is_seed = "seed" in str(key).lower() and type(value) is int and value == seed
    return key in _OF_ARM or is_seed


def _name_of(script: Path | None) -> str:
    if script is None or not script.is_file():
        return "script"
    # "main.py" tells nothing; its folder does.
    folder = script.resolve().parent.name
    return f"{folder}-{script.stem}" if script.stem in ("main", "train", "run") else script.stem


def _scaler(name: str, scale: LossScale, count: int) -> dict[str, Any]:
    values = {"name": name, "kind": scale.kind, "per": "shared" if count == 1 else "optimizer"}
    if scale.kind == "none":
        return values
    known = [field.name for field in fields(ScalerConfig)]
    own = {key: getattr(scale, key) for key in known if key != "scale" and hasattr(scale, key)}
    first = "scale" if scale.kind == "static" else "init_scale"
    return values | {first: float(scale.scale)} | own


def _settings(inner: torch.optim.Optimizer) -> Any:
    groups = [
        {key: _plain(value) for key, value in group.items() if key not in _HOW}
        for group in inner.param_groups
    ]
    return {"name": type(inner).__name__, "groups": groups}


def _plain(value: Any) -> Any:
    """Convert a value to the types of YAML and JSON."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) and math.isfinite(value) else str(value)


def _data(data: str | Path | Iterable[Path] | None) -> dict[str, Any]:
    if data is None:
        return {}
    if isinstance(data, str) and not Path(data).exists():
        return {"name": data, "sha256": hashlib.sha256(data.encode()).hexdigest()}
    paths = [Path(data)] if isinstance(data, str | Path) else [Path(path) for path in data]
    content = hashlib.sha256()
    for path in paths:
        if not path.exists():
            raise BadInput(f"data={path}: no such file or folder")
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            name = file.name if file == path else str(file.relative_to(path))
            content.update(f"{name}\0{file.stat().st_size}\0".encode())
            with open(file, "rb") as stream:
                while block := stream.read(1 << 20):
                    content.update(block)
    return {"sha256": content.hexdigest()}


def _refuse_reserved(names: Iterable[str]) -> None:
    for name in sorted(names):
        raise ValueError(f"{name}: is a field of every record; give the metric another name")


def _canonical(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, default=str).encode()

"""The run directory of a script's run: what it says of the script, and of its steps."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mprun.errors import BadInput, MprunError
from mprun.numerics.failure import FailureKeeper, report_failure
from mprun.numerics.post_mortem import StepRow, bad_losses
from mprun.numerics.probing import Probing
from mprun.precision import DTYPE_NAMES, LossScale
from mprun.precision.policy import PrecisionPolicy, policy_values
from mprun.prepared.shards import local_of
from mprun.record import memory
from mprun.record.keys import commands, hash_fields
from mprun.record.metrics_columns import read_columns
from mprun.record.run_directory import Heartbeat, claim, locked
from mprun.record.run_record import Outcome, Record, read_record
from mprun.recording.environment import environment
from mprun.recording.metric_buffer import MetricBuffer
from mprun.recording.records import Records
from mprun.script.watched import ScriptTask

# Keys of a script's configuration that name the arm of a run, not the experiment.
_OF_ARM = ("precision", "mode", "scaler", "seed")
_MOST_CONFIG = 200_000  # characters; a record takes no more
# Keys of an optimizer's group that decide how it computes, not what.
_HOW = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")


class Recorder:
    """The files of a run in the process that writes them: record, metrics, probes; kept states.

    wanted: the directory, unless there is one of that name. values: of config.yaml. known: fields
    of the record, beside those that all scripts' runs have alike. The others: as of `mprun.Run`.
    """

    def __init__(
        self,
        task: ScriptTask,
        wanted: Path,
        values: dict[str, Any],
        data: str | Path | Iterable[Path] | None,
        known: Mapping[str, Any],
        probe_every: int,
        modules: Sequence[str],
    ):
        content = content_of(data)
        self.task, self.directory = task, claim(wanted.parent, wanted.name)
        self._lock = locked(self.directory)
        self._lock.__enter__()
        try:
            self.record = Record.new(self.directory, overrides=[], **hash_fields(values), **known)
            self.record.begin(
                values,
                initial_state=initial_state(task),
                steps=1,
                sample="step",
                samples_per_step=1,
                data=content,
                environment=environment(task.device),
            )
            self._open(probe_every, modules)
        except BaseException:
            self._lock.__exit__(None, None, None)
            shutil.rmtree(self.directory)  # just made, still without content
            raise
        self._look_for_a_twin()

    def _open(self, probe_every: int, modules: Sequence[str]) -> None:
        self._buffer = MetricBuffer(self.task.device, loss_scales=self.task.loss_scales)
        self._records = _Records(self.directory, self._buffer)
        # Several processes would have to go back together.
        self.keeper = None if self.record["ranks"] else FailureKeeper(self.task)
        if self.keeper is not None:
            self.keeper.keep(0, 0)
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
        self.watch(1)

    def _look_for_a_twin(self) -> None:
        """Warn if a run beside this one has another seed but the same initial state."""
        state, seed = self.record["initial_state"], self.record["seed"]
        for path in sorted(self.directory.parent.glob("*/run.json")):
            with suppress(MprunError, OSError):
                other = read_record(path.parent)
                if other.get("initial_state") == state and other.get("seed") != seed:
                    print(
                        f"seed={seed}: weights and torch's random state are those of {path.parent} "
                        f"(seed={other.get('seed')}); unless the script's own generators differ, "
                        "both are one run: call torch.manual_seed(seed) first",
                        file=sys.stderr,
                    )
                    return

    # Probes

    def watch(self, step: int) -> None:
        """Watch the coming step if it is to be probed."""
        if self._probing is not None and self._probing.due(step):
            self._watching = self._probing.watching(step)
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

    # Steps and evaluations

    def add(self, step: int, found: dict[str, Tensor]) -> None:
        """Take the metrics of a step, without waiting."""
        self._stop_watching(found)
        self._buffer.add(step, found)
        self._heartbeat.beat()

    def log(self, step: int, extra: Mapping[str, float], wait: bool) -> tuple[int, str] | None:
        """Write records up to `step`, which has a whole one; return step and cause of a divergence,
        if one has come."""
        self._records.extra[step] = dict(extra)
        return self._flush(logged=True, wait=wait)

    def _flush(self, logged: bool, wait: bool) -> tuple[int, str] | None:
        cause = self._records.flush(logged, wait)
        return None if cause is None else (self._records.diverged_at, cause)

    def evaluate(self, step: int, values: Mapping[str, float]) -> tuple[int, str] | None:
        """Write records up to `step`, and of its evaluation unless a divergence has come before."""
        if (found := self._flush(logged=False, wait=True)) is None:
            seconds = time.perf_counter() - self._evaluated
            self._records.write_evaluation(step, values, seconds)
            self._buffer.restart_clock()
        return found

    def switched(self, step: int, policy: PrecisionPolicy) -> None:
        """Note that `step` and those after it were taken in another mode, which is then a part of
        the configuration; copies of the state are of that mode only."""
        config, precision = self.record["config"], self.record["precision"]
        now = {"at": step - 1, "to": {"name": policy.name, **policy_values(policy)}}
        switches = [*config["precision"].get("switch", []), now]
        config = config | {"precision": config["precision"] | {"switch": switches}}
        mode = f"{precision['mode']}, {policy.name} after step {step - 1}"
        told = {"config": config, "precision": precision | {"mode": mode}, **hash_fields(config)}
        self.record.switched(step, policy.name, **told)
        if self.keeper is not None:
            self.keeper.begin_anew()
            self.keeper.keep(step, self._buffer.host_skipped)

    def keep(self, step: int) -> None:
        """Keep a copy of the state if one is due and the last step was sound."""
        if self.keeper is None:
            return
        if self._buffer.late:
            skipped = torch.full((), self._buffer.host_skipped, device=self.task.device)
            self.keeper.keep_if(step, skipped, self._buffer.sound)
        elif self._records.history.rows:
            healthy = not self._records.history.rows[-1].found_inf
            self.keeper.keep(step, self._buffer.host_skipped, healthy=healthy)

    # The end

    def report(self, step: int, cause: str) -> None:
        """Write the post-mortem of a divergence."""
        rows = self._records.history.up_to(step)
        reason = "only the script can take its steps again: run.rewind(), mprun.explain(...)"
        kind = self.task.first.scale.kind
        report_failure(
            *(None, self.directory, cause, step, rows),
            scaler_kind=kind,
            reason=reason,
            replayable=False,
        )

    def end(self, outcome: Outcome, steps: int) -> list[str]:
        """Write the end of a run, and leave its directory; return what is to be said of it."""
        self._stop_watching(None)
        outcome.skipped = self._buffer.host_skipped
        outcome.throughput = self._records.throughput("step")
        outcome.memory = memory.higher({}, self.task.device)
        self._records.close()
        computed = {"emulated": self.task.forward_context.rerouted(), "audit": self.task.audit()}
        self.record.end(
            outcome.status, outcome.cause, outcome.results() | computed, steps=max(1, steps)
        )
        self._lock.__exit__(None, None, None)
        bad = bad_losses(read_columns(self.directory / "metrics.jsonl"), {})
        if not bad and outcome.status != "diverged":
            return []
        fits = (fit for fit in commands(self.directory, self.record) if fit.in_script)
        return [line for line in (bad, *map(str, fits)) if line]


class _Records(Records):
    """The records of a script's run, with the fields that the script adds to a step."""

    def __init__(self, directory: Path, buffer: MetricBuffer):
        self.extra: dict[int, dict[str, float]] = {}
        super().__init__(directory, buffer)

    def _extra(self, row: StepRow) -> dict[str, float]:
        return self.extra.pop(row.step, {})


def configuration(
    task: ScriptTask, config: Mapping[str, Any], seed: int, script: Path | None, compare: Any
) -> dict[str, Any]:
    """Return the parts of config.yaml that a script's run has."""
    first, context = task.first, task.forward_context
    file = script if script is not None and script.is_file() else None
    shapes = {name: list(own.shape) for name, own in task.parameters().items()}
    native = context.half_dtypes and not context.emulations and context.device.type == "cpu"
    overrides = first.models[0].overrides.items()
    values = {
        "seed": seed,
        "device": context.device.type,
        "cpu_half": "native" if native else "emulated",
        "script": {
            "file": file and file.name,
            "sha256": file and hashlib.sha256(file.read_bytes()).hexdigest(),
            **{str(k): _plain(v) for k, v in config.items() if not _of_arm(k, v, seed)},
        },
        "model": {"parameters": hashlib.sha256(_canonical(shapes)).hexdigest()},
        "optim": {n: _settings(o.optimizer) for n, o in task.prepared.items()},
        "precision": {
            "name": first.policy.name,
            **policy_values(first.policy),
            "overrides": {pattern: DTYPE_NAMES[dtype] for pattern, dtype in overrides},
            "switch": [],
        },
        "scaler": _scaler(first.scaler_name, first.scale, len(task.loss_scales)),
    }
    if (size := len(_canonical(values))) > _MOST_CONFIG:
        raise ValueError(
            f"config: has {size} characters, must have at most {_MOST_CONFIG}; pass only settings "
            "that affect the result, and hashes of large values"
        )
    return values | {"compare": compare}


def name_of(script: Path | None) -> str:
    """Return the name of a script's experiment."""
    if script is None or not script.is_file():
        return "script"
    # "main.py" tells nothing; its folder does.
    folder = script.resolve().parent.name
    return f"{folder}-{script.stem}" if script.stem in ("main", "train", "run") else script.stem


def content_of(data: str | Path | Iterable[Path] | None) -> dict[str, Any]:
    """Return the name of data, or the hash of its files, as the record has it."""
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


def initial_state(task: ScriptTask) -> str:
    """Return a digest of what a seed sets: torch's random state, numbers of each parameter."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for own in task.parameters().values():
        digest.update(repr(local_of(own.detach()).reshape(-1)[:8].tolist()).encode())
    return digest.hexdigest()


def _of_arm(key: Any, value: Any, seed: int) -> bool:
    """Return whether a setting names the arm or the seed of a run, not the experiment."""
    is_seed = "seed" in str(key).lower() and type(value) is int and value == seed
    return key in _OF_ARM or is_seed


def _scaler(name: str, scale: LossScale, count: int) -> dict[str, Any]:
    values = {"name": name, "kind": scale.kind, "per": "shared" if count == 1 else "optimizer"}
    if scale.kind == "none":
        return values
    # Its rule as it was given; tensors are its state.
    given = (pair for pair in vars(scale).items() if isinstance(pair[1], bool | int | float))
    own = {key: value for key, value in given if not key.startswith("_")}
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


def _canonical(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, default=str).encode()

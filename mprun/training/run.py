"""One run from a checked configuration to a finished run directory.

What is said about a run's data at its end: waiting for them, files that were replaced.
"""

import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy
import torch

from mprun.build import Built, build, mode_label
from mprun.config.compose import Composed
from mprun.config.schema import RunConfig
from mprun.errors import INTERRUPTED, STATUS_EXIT_CODE, BadInput, MprunError, Resource
from mprun.numerics.probe import chosen_modules
from mprun.numerics.replay import Snapshot
from mprun.precision import pin_math_flags
from mprun.precision.recurrent import restore_dropout_state
from mprun.record.console import DATA_BOUND
from mprun.record.metrics import TensorBoardView
from mprun.record.run_directory import (
    claim,
    claim_exactly,
    config_hash,
    locked,
    run_name,
    write_config,
    write_json,
)
from mprun.training.environment import effective_dtypes, environment, flags, updates
from mprun.training.loop import Outcome, train
from mprun.training.signals import Interruption


def start(composed: Composed) -> int:
    """Run a new configuration; returns the exit code. Writes nothing if it raises BadInput."""
    config = composed.config
    device = resolve_device(config.device)
    built = prepare(config, device, config.threads)
    _look_at_data(built)
    if config.deterministic and device.type == "cuda":
        _look_for_nondeterminism(built)
    plain = composed.as_dict()
    if config.output_dir is not None:
        directory = claim_exactly(Path(config.output_dir))
    else:
        folder, name = run_name(plain, composed.choices, composed.overrides)
        directory = claim(Path(config.output_root) / folder, name)
    with locked(directory):
        write_config(directory, plain)
        record = {
            "status": "running",
            "choices": composed.choices,
            "overrides": list(composed.overrides),
            "config_hash": config_hash(plain),
            "created": _now(),
            "attempts": 0,
        }
        _warn(config, built)
        return attempt(directory, config, built, record, first_step=0, skipped=0)


def _look_at_data(built: Built) -> None:
    """Read the first batch where files are read on the way: before anything is written."""
    if hasattr(built.data, "close"):
        try:
            built.data.train_batch(0)
        except BaseException:
            built.data.close()
            raise


def _look_for_nondeterminism(built: Built) -> None:
    """Take a step and take it back: which kernels are not deterministic is known to them alone.

    Before anything is written. Costs a step, and for its time the memory of a second state.
    """
    before = Snapshot(built.task, built.device)
    before.take(0, 0)
    try:
        with built.stepper.on_stream():
            built.task.train_step(0)
    except RuntimeError as error:
        if "deterministic" in str(error):
            raise BadInput(_nondeterministic(error)) from error
        raise
    before.restore()


def _nondeterministic(error: BaseException) -> str:
    return f"deterministic=true: {str(error).partition(', but you set')[0]}"


def prepare(config: RunConfig, device: torch.device, threads: int | None) -> Built:
    """Pin flags, seed every generator, build; touches no file.

    Raises BadInput for what cannot be built, Resource where memory does not suffice.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    autotune = {"auto": None, "on": True, "off": False}[config.train.autotune]
    pin_math_flags(config.precision.fp32_math, config.deterministic, autotune)
    random.seed(config.seed)
    numpy.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    if device.type == "cuda":
        restore_dropout_state(None, device)
    # torch says that its CPU library has no LSTM with projection; ours is emulated or slower.
    warnings.filterwarnings("ignore", message="LSTM with projections")
    with _memory_as_resource():
        built = build(config, device)
    if config.numerics.enabled:
        chosen_modules(built.task.learners, config.numerics.modules)
    return built


def attempt(
    directory: Path,
    config: RunConfig,
    built: Built,
    record: dict,
    *,
    first_step: int,
    skipped: int,
    evaluate_first: bool = False,
) -> int:
    """Train from `first_step` on and keep run.json true whatever happens; the exit code."""
    started = time.perf_counter()
    earlier = record.get("data", {})  # of the attempt before this one
    record |= {
        "status": "running",
        "config": asdict(config),
        "seed": config.seed,
        "attempts": record["attempts"] + 1,
        "steps": built.steps,
        "steps_per_epoch": built.task.steps_per_epoch,
        "sample": built.task.sample,
        "samples_per_step": built.task.samples_per_step,
        "precision": {
            "mode": mode_label(config.precision),
            "scaler": config.scaler.name,
            "half_products": built.arithmetic.kind(),
            "effective_dtypes": effective_dtypes(built.task),
            "update": updates(built.task),
            "flags": flags(),
        },
        "data": {"sha256": built.data.sha256, **built.data.description},
        "environment": environment(built.device),
    }
    write_json(directory / "run.json", record)
    interruption = Interruption()
    try:
        with interruption, closed_afterwards(built.data), built.stepper.on_stream():
            outcome = train(
                built,
                config,
                directory,
                start=first_step,
                skipped=skipped,
                interruption=interruption,
                evaluate_first=evaluate_first,
            )
        _check_honoured(built)
    except BaseException as error:
        record |= {"status": "failed", "cause": f"{type(error).__name__}: {error}", "ended": _now()}
        record["data"] |= replaced(built.data, earlier)
        record["execution"] = built.stepper.description
        with suppress(OSError):  # where the disk is full, the first error is the one to tell
            write_json(directory / "run.json", record)
        _tell(replaced_line(record["data"]))
        print(f"run: {directory}")
        if config.deterministic and "deterministic" in str(error):
            raise BadInput(_nondeterministic(error)) from error
        if isinstance(error, OSError):
            raise Resource(f"{error.strerror or error} ({error.filename or directory})") from error
        with _memory_as_resource():
            raise
    record |= _result(outcome, built, time.perf_counter() - started)
    record["data"] |= replaced(built.data, earlier)
    record["execution"] = built.stepper.description
    write_json(directory / "run.json", record)
    if outcome.status != "preempted":
        _write_hyperparameters(directory, config, record)
    if outcome.cause:
        print(f"mprun: {outcome.status} at step {outcome.step}: {outcome.cause}", file=sys.stderr)
    if outcome.status == "diverged":
        print(f"mprun: its cause: mprun explain {directory}", file=sys.stderr)
    _tell(
        data_bound(built.data, outcome.data_wait, record["seconds"]), replaced_line(record["data"])
    )
    print(f"run: {directory}")
    if outcome.status == "preempted" and outcome.cause == "SIGINT":
        return INTERRUPTED
    return STATUS_EXIT_CODE[outcome.status]


@contextmanager
def _memory_as_resource() -> Iterator[None]:
    """Say in one line that memory ran out; torch tells it of a CPU as a bare RuntimeError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error).partition("\n")[0]
        of_cpu = "DefaultCPUAllocator" in text or "Storage size calculation overflowed" in text
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or of_cpu:
            raise Resource(f"out of memory: {text}") from error
        raise


def _result(outcome: Outcome, built: Built, seconds: float) -> dict:
    return {
        "status": outcome.status,
        "cause": outcome.cause,
        "last_step": outcome.step,
        "skipped": outcome.skipped,
        "updates": outcome.step - outcome.skipped,
        "final": {
            k: v if v == v and abs(v) != float("inf") else str(v) for k, v in outcome.final.items()
        },
        "throughput": {
            "samples_per_s": outcome.samples_per_s,
            "windows": outcome.windows,
            "sample": built.task.sample,
            **({} if outcome.data_wait is None else {"data_wait": outcome.data_wait}),
        },
        "memory": {**outcome.peak, "saved_for_backward_bytes": outcome.saved_for_backward_bytes},
        **outcome.first_step,
        "emulated": built.arithmetic.rerouted(),
        "seconds": round(seconds, 3),
        "ended": _now(),
    }


def _check_honoured(built: Built) -> None:
    """A 16-bit mode on a CPU in which nothing was computed as asked for is a bug, not a result."""
    if built.arithmetic.emulations and not built.arithmetic.rerouted():
        raise MprunError(
            f"precision={built.policy.name}: no operation ran in "
            f"{built.arithmetic.kind()}; the mode did not happen"
        )


def _warn(config: RunConfig, built: Built) -> None:
    """Say on stderr what the user may not expect, before step 1."""
    lines, device = [], built.device
    policy, optim, scaler = config.precision, config.optim, config.scaler
    numerics, steps = config.numerics, config.train.steps
    if numerics.enabled and steps is not None and numerics.every > steps:
        lines.append(f"numerics.every={numerics.every}: no step of {steps} will be probed")
    fp16_update = policy.master_dtype is None and policy.param_dtype == "fp16"
    eps = {"adam": 1e-8, "adamw": 1e-8, "adagrad": 1e-10}.get(optim.name)
    eps = optim.eps if optim.eps is not None else eps
    if fp16_update and eps is not None and 0 < eps <= 2.0**-25:
        lines.append(
            f"optim.eps={eps:g} rounds to 0 in FP16 (2^-25 and below): {policy.name} "
            f"with {optim.name} divides by zero and ends in NaN; this is a finding"
        )
    half = policy.autocast_dtype or policy.param_dtype
    if scaler.kind != "none" and {half, *policy.overrides.values()} == {"fp32"}:
        lines.append(
            f"scaler={scaler.name} changes nothing in {policy.name} but rounding: "
            "FP32 gradients do not underflow"
        )
    ignored = built.data.description.get("ignored_files")
    if ignored:
        lines.append(
            f"data.root={config.data.root}: {ignored} files that are no images passed over"
        )
    candidates = getattr(config.model, "sampled_softmax", None)
    if candidates is not None and candidates >= built.data.vocab_size:
        lines.append(
            f"model.sampled_softmax={candidates}: the data have {built.data.vocab_size} words, so "
            "this is the full softmax"
        )
    if device.type == "cpu" and half != "fp32":
        how = "emulated (16-bit tensors, FP32 products rounded once)"
        lines.append(
            f"no GPU in use: {half} products are "
            f"{how if config.cpu_half == 'emulated' else 'native CPU kernels'}"
        )
    _tell(*lines)


def _tell(*lines: str | None) -> None:
    for line in lines:
        if line is not None:
            print(f"mprun: {line}", file=sys.stderr)


def resolve_device(name: str) -> torch.device:
    """The device of `auto`, `cuda` or `cpu`; BadInput if there is no CUDA device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("device=cuda: torch sees no CUDA device here; use device=cpu or auto")
    return torch.device(name)


def _write_hyperparameters(directory: Path, config: RunConfig, record: dict) -> None:
    # Five, because TensorBoard's table shows the first five columns.
    values = {
        "lr": config.optim.lr,
        "model": record["choices"].get("model"),
        "precision": record["precision"]["mode"],
        "scaler": config.scaler.name,
        "seed": config.seed,
    }
    final = record["final"] or {"loss": "nan"}  # diverged before its evaluation
    metrics = {f"hparam/eval_{k}": float(v) for k, v in final.items()}
    metrics["hparam/skipped"] = record["skipped"]
    view = TensorBoardView(directory)
    view.hyperparameters(values, metrics)
    view.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


_NAMED, _TOLD = 20, 3  # files in run.json, files on the console
_LONG_ENOUGH_S = 20.0


@contextmanager
def closed_afterwards(source) -> Iterator[None]:
    """End what a data source has started, whatever happens."""
    try:
        yield
    finally:
        if hasattr(source, "close"):
            source.close()


def data_bound(source, share: float | None, seconds: float) -> str | None:
    """One line if the device waited for more than a tenth of the time; None otherwise.

    seconds: length of the run; of a few seconds too much is start-up to say anything.
    """
    if share is None or share <= DATA_BOUND or seconds < _LONG_ENOUGH_S:
        return None
    line = f"data-bound: the device waited {100 * share:.0f} % of the time for data"
    workers = getattr(source, "workers", None)
    if workers is None:
        return line
    cores = len(os.sched_getaffinity(0))
    if workers >= cores:
        return f"{line}; data.workers={workers} on {cores} cores: smaller files would help"
    return f"{line}; more data.workers (now {workers}, {cores} cores) or smaller files would help"


def replaced(source, earlier: dict) -> dict:
    """What run.json says of files that data.on_corrupt=skip replaced; {} for other sources.

    earlier: the same of the attempt that this one continues. A file that both met counts once, even
    if it has moved: `replaced_places` holds the place of each in its split, the names only of the
    first.
    """
    if not hasattr(source, "replaced_files"):
        return {}
    places = dict.fromkeys(earlier.get("replaced_places", []))
    new = {place: name for place, name in source.replaced_files().items() if place not in places}
    names = [*earlier.get("replaced_files", []), *new.values()]
    places = [*places, *new]
    return {
        "replaced": len(places),
        "replaced_files": names[:_NAMED],
        "replaced_places": places,
    }


def replaced_line(data: dict) -> str | None:
    """One line if files were replaced."""
    count = data.get("replaced")
    if not count:
        return None
    names = ", ".join(data["replaced_files"][:_TOLD])
    more = f" and {count - _TOLD} more (run.json)" if count > _TOLD else ""
    files = "file" if count == 1 else "files"
    return f"data.on_corrupt=skip: {count} {files} replaced by the next usable one: {names}{more}"

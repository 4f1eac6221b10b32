"""One run from a checked configuration to a finished run directory."""

import fcntl
import os
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy
import torch

from mprun import checkpoint
from mprun.build import Built, build
from mprun.config.compose import Composed, config_from_record
from mprun.config.schema import RunConfig
from mprun.errors import INTERRUPTED, STATUS_EXIT_CODE, BadInput, MprunError, Resource
from mprun.interruption import Interruption
from mprun.precision import pin_math_flags
from mprun.record.environment import effective_dtypes, environment, flags
from mprun.record.metrics import TensorBoardView, truncate_metrics
from mprun.record.run_directory import (
    claim,
    claim_exactly,
    config_hash,
    read_config,
    read_json,
    run_name,
    write_config,
    write_json,
)
from mprun.train import Outcome, train

# What may differ between a run and its continuation: its length and what it writes.
RESUMABLE_KEYS = ("train.steps", "train.epochs", "train.log_every", "train.eval_every",
                  "train.checkpoint_every", "train.keep_checkpoints")  # fmt: skip


def start(composed: Composed) -> int:
    """Run a new configuration; returns the exit code. Writes nothing if it raises BadInput."""
    config = composed.config
    device = _resolve_device(config.device)
    built = _prepare(config, device, config.threads)
    plain = composed.as_dict()
    if config.output_dir is not None:
        directory = claim_exactly(Path(config.output_dir))
    else:
        folder, name = run_name(plain, composed.choices, composed.overrides)
        directory = claim(Path(config.output_root) / folder, name)
    with _locked(directory):
        write_config(directory, plain)
        record = {
            "status": "running",
            "choices": composed.choices,
            "overrides": list(composed.overrides),
            "config_hash": config_hash(plain),
            "created": _now(),
            "attempts": 0,
        }
        _warn(config, device)
        return _attempt(directory, config, built, record, first_step=0, skipped=0)


def resume(composed_overrides: tuple[str, ...], path: str) -> int:
    """Continue the run in directory `path` from its newest whole checkpoint; the exit code.

    Only RESUMABLE_KEYS may be given beside it; everything else comes from the run itself.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise BadInput(f"resume={path}: no such folder")
    plain = read_config(directory)
    with _locked(directory):
        record = read_json(directory / "run.json")
        plain = _with_overrides(plain, composed_overrides)
        config = config_from_record(plain)
        device = _resolve_device(record["environment"]["device"])
        _check_same_stack(record["environment"])
        built = _prepare(config, device, record["environment"]["threads"])
        step, state, warnings = checkpoint.load_newest(directory / "checkpoints", device)
        for line in warnings:
            print(f"mprun: warning: {line}; using the one before", file=sys.stderr)
        if step >= built.steps:
            raise BadInput(f"resume={path}: already at step {step} of {built.steps}; "
                           "give a larger train.steps")  # fmt: skip
        try:
            built.task.load_state_dict(state["task"])
        except (ValueError, KeyError) as error:
            raise BadInput(f"resume={path}: {error}") from None
        if config.optim.schedule != "constant" and built.steps != record["steps"]:
            raise BadInput(f"train.steps={built.steps}: a run with optim.schedule="
                           f"{config.optim.schedule} keeps its length ({record['steps']})")  # fmt: skip
        truncate_metrics(directory / "metrics.jsonl", step)
        write_config(directory, plain)
        checkpoint.restore_random_states(state["random"], device)
        return _attempt(directory, config, built, record, first_step=step,
                        skipped=state["skipped"])  # fmt: skip


def _prepare(config: RunConfig, device: torch.device, threads: int | None) -> Built:
    """Pin flags, seed every generator, build; touches no file."""
    if threads is not None:
        torch.set_num_threads(threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    pin_math_flags(config.precision.fp32_math, config.deterministic)
    random.seed(config.seed)
    numpy.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    return build(config, device)


def _attempt(
    directory: Path, config: RunConfig, built: Built, record: dict, *, first_step: int, skipped: int
) -> int:
    """Train, and keep run.json true whatever happens."""
    started = time.perf_counter()
    record |= {
        "status": "running",
        "attempts": record["attempts"] + 1,
        "steps": built.steps,
        "steps_per_epoch": built.task.steps_per_epoch,
        "sample": built.task.sample,
        "samples_per_step": built.task.samples_per_step,
        "precision": {
            "mode": config.precision.name,
            "scaler": config.scaler.name,
            "half_products": built.arithmetic.kind(),
            "effective_dtypes": effective_dtypes(built.task),
            "flags": flags(),
        },
        "data": {"sha256": built.data.sha256, **built.data.description},
        "environment": environment(built.device),
    }
    write_json(directory / "run.json", record)
    interruption = Interruption()
    try:
        with interruption:
            outcome = train(built, config, directory, start=first_step, skipped=skipped,
                            interruption=interruption)  # fmt: skip
        _check_honoured(built)
    except BaseException as error:
        record |= {"status": "failed", "cause": f"{type(error).__name__}: {error}",
                   "ended": _now()}  # fmt: skip
        write_json(directory / "run.json", record)
        print(f"run: {directory}")
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise Resource(f"out of memory: {str(error).splitlines()[0]}") from error
        if isinstance(error, OSError):
            raise Resource(f"{error.strerror or error} ({error.filename or directory})") from error
        raise
    record |= _result(outcome, built, time.perf_counter() - started)
    write_json(directory / "run.json", record)
    if outcome.final:
        _write_hyperparameters(directory, config, record)
    if outcome.cause:
        print(f"mprun: {outcome.status} at step {outcome.step}: {outcome.cause}", file=sys.stderr)
    print(f"run: {directory}")
    if outcome.status == "preempted" and outcome.cause == "SIGINT":
        return INTERRUPTED
    return STATUS_EXIT_CODE[outcome.status]


def _result(outcome: Outcome, built: Built, seconds: float) -> dict:
    return {
        "status": outcome.status,
        "cause": outcome.cause,
        "last_step": outcome.step,
        "skipped": outcome.skipped,
        "updates": outcome.step - outcome.skipped,
        "final": {k: v if v == v and abs(v) != float("inf") else str(v)
                  for k, v in outcome.final.items()},
        "throughput": {"samples_per_s": outcome.samples_per_s, "windows": outcome.windows,
                       "sample": built.task.sample},
        "memory": {**outcome.peak, "saved_for_backward_bytes": outcome.saved_for_backward_bytes},
        "emulated": built.arithmetic.rerouted(),
        "seconds": round(seconds, 3),
        "ended": _now(),
    }  # fmt: skip


def _check_honoured(built: Built) -> None:
    """A 16-bit mode on a CPU in which nothing was computed as asked for is a bug, not a result."""
    if built.arithmetic.emulation is not None and not built.arithmetic.rerouted():
        raise MprunError(f"precision={built.policy.name}: no operation ran in "
                         f"{built.arithmetic.kind()}; the mode did not happen")  # fmt: skip


def _warn(config: RunConfig, device: torch.device) -> None:
    """Say on stderr what the user may not expect, before step 1."""
    lines = []
    policy, optim, scaler = config.precision, config.optim, config.scaler
    fp16_update = policy.master_dtype is None and policy.param_dtype == "fp16"
    eps = {"adam": 1e-8, "adamw": 1e-8, "adagrad": 1e-10}.get(optim.name)
    eps = optim.eps if optim.eps is not None else eps
    if fp16_update and eps is not None and 0 < eps <= 2.0**-25:
        lines.append(f"optim.eps={eps:g} rounds to 0 in FP16 (2^-25 and below): {policy.name} "
                     f"with {optim.name} divides by zero and ends in NaN; this is a finding")  # fmt: skip
    half = policy.autocast_dtype or policy.param_dtype
    if scaler.kind != "none" and half == "fp32":
        lines.append(f"scaler={scaler.name} changes nothing in {policy.name} but rounding: "
                     "FP32 gradients do not underflow")  # fmt: skip
    if device.type == "cpu" and half != "fp32":
        how = "emulated (16-bit tensors, FP32 products rounded once)"
        lines.append(f"no GPU in use: {half} products are "
                     f"{how if config.cpu_half == 'emulated' else 'native CPU kernels'}")  # fmt: skip
    for line in lines:
        print(f"mprun: {line}", file=sys.stderr)


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("device=cuda: torch sees no CUDA device here; use device=cpu or auto")
    return torch.device(name)


def _check_same_stack(recorded: dict) -> None:
    """A resumed run continues bit for bit only on the torch it was started with."""
    if recorded["packages"]["torch"] != torch.__version__.split("+")[0] and (
        recorded["packages"]["torch"] != torch.__version__
    ):
        raise BadInput(f"resume: the run used torch {recorded['packages']['torch']}, this is "
                       f"{torch.__version__}; it would not continue bit for bit")  # fmt: skip


def _with_overrides(plain: dict, overrides: tuple[str, ...]) -> dict:
    import yaml

    for override in overrides:
        key, _, value = override.partition("=")
        if key == "resume":
            continue
        if key not in RESUMABLE_KEYS:
            raise BadInput(f"{override}: a resumed run keeps its configuration (allowed beside "
                           f"resume=: {', '.join(RESUMABLE_KEYS)})")  # fmt: skip
        plain["train"][key.partition(".")[2]] = yaml.safe_load(value)
    return plain


def _write_hyperparameters(directory: Path, config: RunConfig, record: dict) -> None:
    values = {
        "model": record["choices"].get("model"), "data": record["choices"].get("data"),
        "precision": config.precision.name, "scaler": config.scaler.name,
        "optimizer": config.optim.name, "lr": config.optim.lr,
        "batch_size": config.data.batch_size, "seed": config.seed,
    }  # fmt: skip
    metrics = {f"hparam/eval_{k}": float(v) for k, v in record["final"].items()}
    metrics["hparam/skipped"] = record["skipped"]
    view = TensorBoardView(directory)
    view.hyperparameters(values, metrics)
    view.close()


class _locked:
    """Hold a run directory: a second process that wants the same one is refused."""

    def __init__(self, directory: Path):
        self.directory = directory

    def __enter__(self):
        self.file = open(self.directory / ".lock", "a", encoding="utf-8")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise BadInput(f"{self.directory}: in use by another process") from None

    def __exit__(self, *exception):
        self.file.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")



"""A run's messages on stderr: its setup before step 1; its cause of end and the next command."""

import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mprun.assembly import Built
from mprun.config.rules import updates_in_16_bits
from mprun.config.schema import RunConfig, ScalerConfig
from mprun.config.trust import as_overrides
from mprun.data.loader import available_cores
from mprun.data.source import Source
from mprun.numerics.post_mortem import bad_losses
from mprun.record.console import DATA_BOUND, columns
from mprun.record.metrics_columns import read_columns
from mprun.record.run_record import Outcome
from mprun.training.continuation import not_longer
from mprun.training.next_commands import commands

_NAMED, _PRINTED = 20, 3  # files in run.json, files on the console
_LONG_ENOUGH_S = 20.0


def say(*lines: str | None) -> None:
    """Print the lines that are neither None nor empty."""
    for line in lines:
        if line:
            print(f"mprun: {line}", file=sys.stderr)


def announce(directory: Path, config: RunConfig, built: Built, record: dict, start: int) -> None:
    """Print the model, data, mode, device and run directory before step `start` + 1."""
    task, device, choices = built.task, built.device, record["choices"]
    learned = (learner.model.parameters() for learner in task.learners.values())
    size = sum(parameter.numel() for parameters in learned for parameter in parameters)
    count, held_out = (built.data.description[f"{part}_samples"] for part in ("train", "eval"))
    data = f"{count:,} {task.sample}s, {held_out:,} held out, {task.samples_per_step:,} a step"
    name, folder = record["precision"]["mode"], shlex.quote(str(directory))
    half = config.precision.autocast_dtype or config.precision.param_dtype
    if device.type == "cpu" and half != "fp32":
        how = "emulated" if config.cpu_half == "emulated" else "by native kernels"
        matmul, attention = config.precision.matmul, config.precision.attention
        formats = dict.fromkeys([matmul.input, matmul.weight, matmul.grad_output])
        if attention.format:
            formats |= dict.fromkeys([attention.format, attention.grad_format])
        casts = "/".join(own.upper() for own in formats if own)
        of_casts = casts and f", those in {casts} emulated"
        name += f" ({half} products {how}{of_casts})"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        machine = f"cpu, {threads} thread{'s' * (threads != 1)}"
    steps = f"steps {start + 1:,} to {built.steps:,}"
    if start == built.steps:  # an attempt that only evaluates, or completes the record
        steps = f"all {start:,} steps are taken"
    for what, text in {
        "model": f"{choices.get('model')}, {size:,} parameters",
        "data": f"{choices.get('data')}, {data}",
        "mode": f"{name}, {_scale(config.scaler)}",
        "device": f"{machine}; {steps}",
        "run": folder,
        "watch": f"tensorboard --logdir {folder}",
    }.items():
        print(f"  {what:<9}{text}", file=sys.stderr)


def _scale(scaler: ScalerConfig) -> str:
    if scaler.kind == "none":
        return "no loss scale"
    if scaler.scale is not None:
        return f"loss scale {scaler.scale:g}"
    start = "" if scaler.init_scale is None else f"from {scaler.init_scale:g} "
    return f"loss scale {start}({scaler.name})"


def say_ending(directory: Path, source: Source, outcome: Outcome, record: dict) -> None:
    """Print the cause unless the run succeeded, notes on its losses and data, the next command."""
    cause = f"{outcome.status} at step {outcome.step}: {outcome.cause}" if outcome.cause else None
    done = outcome.status == "done" and "measured_for" not in record
    bad = None
    if outcome.skipped:
        measured = read_columns(directory / "metrics.jsonl")
        bad = bad_losses(measured, record.get("bad_batches", {}))
    say(
        cause,
        bad,
        None if outcome.status == "done" else what_fits(directory, record),
        data_bound(source, outcome.throughput.get("data_wait"), record["seconds"]),
        replaced_line(record["data"]),
        what_fits(directory, record) if done else None,
        f"to train longer: {_longer(directory, record)}" if done else None,
    )


def what_fits(directory: Path, record: dict) -> str | None:
    """Return the command that fits an ended run best, with what it is for; None without any."""
    best = next(commands(directory, record), None)
    if best is None or (record["status"] == "done" and "measured_for" in record):
        return None
    return f"next: {best.command}" if record["status"] == "done" else str(best)


def _longer(directory: Path, record: dict) -> str:
    """Return the command that extends a finished run, or what has to be said at its begin."""
    steps, schedule = 2 * record["steps"], record["config"]["optim"]["schedule"]
    if schedule != "constant":
        return _whole_words(not_longer(schedule, record["steps"], steps))
    if "first_checkpoint" not in record:
        return _whole_words(
            f"begin again with train.steps={steps}, or with train.checkpoint_every=N, so that a "
            "resume can extend the run"
        )
    given = [f"resume={directory}", f"train.steps={steps}", *as_overrides(record["config"])]
    return shlex.join(["mprun", *given])


def _whole_words(text: str) -> str:
    """Return a line, broken between words if stderr is a narrower terminal."""
    if not sys.stderr.isatty():
        return text
    width, before = columns(1000, sys.stderr) - 1, len("mprun: to train longer: ")
    return textwrap.fill(
        text, width, initial_indent=" " * before, subsequent_indent="  ", break_on_hyphens=False
    )[before:]


def notes(config: RunConfig, built: Built) -> Iterator[str]:
    """Yield lines about what the user may not expect, before step 1."""
    policy, optim, scaler = config.precision, config.optim, config.scaler
    numerics, steps = config.numerics, config.train.steps
    if numerics.probes and steps is not None and numerics.every > steps:
        yield f"numerics.every={numerics.every}: no step of {steps} will be probed"
    fp16_update = updates_in_16_bits(policy) and policy.param_dtype == "fp16"
    if fp16_update and optim.eps is not None and 0 < optim.eps <= 2.0**-25:
        yield (
            f"optim.eps={optim.eps:g} rounds to 0 in FP16 (2^-25 and below): {policy.name} "
            f"with {optim.name} divides by zero and ends in NaN; this is a finding"
        )
    if why := built.policy.stuck(asdict(optim)):
        yield f"optim.{why}"
    yield from what_stays(built.task)
    if policy.matmul.input is None and not policy.switch:
        plain = type(policy.matmul)()
        why = f"changes nothing in {policy.name}: it casts no products"
        for key in ("modules", "high_precision"):
            if getattr(policy.matmul, key) != getattr(plain, key):
                yield f"precision.matmul.{key} {why}"
    half = policy.autocast_dtype or policy.param_dtype
    if scaler.kind != "none" and {half, *policy.overrides.values()} == {"fp32"}:
        yield (
            f"scaler={scaler.name} changes nothing in {policy.name} but rounding: "
            "FP32 gradients do not underflow"
        )
    ignored = built.data.description.get("ignored_files")
    if ignored:
        yield f"data.root={config.data.root}: {ignored} files are no images and were ignored"
    candidates = getattr(config.model, "sampled_softmax", None)
    text: Any = built.data  # has a vocabulary if the model takes words
    if candidates is not None and candidates >= text.vocab_size:
        yield (
            f"model.sampled_softmax={candidates}: the data have only {text.vocab_size} words, so "
            "this is the full softmax"
        )


def what_stays(task: Any) -> list[str]:
    """Return a line for each network of which a mode of products casts few weights."""
    found = (learner.prepared.stays for learner in task.learners.values())
    return [line for line in found if line is not None]


def data_bound(source: Source, share: float | None, seconds: float) -> str | None:
    """Return a line if the device waited for data for more than a tenth of the time, else None.

    seconds: length of the run; a run of a few seconds is mostly start-up and gets no line.
    """
    if share is None or share <= DATA_BOUND or seconds < _LONG_ENOUGH_S:
        return None
    line = f"data-bound: the device waited {100 * share:.0f} % of the time for data"
    workers, cores = source.workers, available_cores()
    if workers is None:
        return line
    cure = f"more data.workers (now {workers}, {cores} cores) or"
    if workers >= cores:
        cure = f"data.workers={workers} on {cores} cores:"
    return f"{line}; {cure} smaller files would help"


def replaced(source: Source, earlier: dict) -> dict:
    """Return run.json's fields about files that data.on_corrupt=skip replaced; {}: none possible.

    earlier: the fields of the attempt that this one continues. A file that both met counts once,
    even if it has moved: `replaced_places` has its place in its split.
    """
    files = source.replaced_files()
    if files is None:
        return {}
    known = list(dict.fromkeys(earlier.get("replaced_places", [])))
    new = {place: name for place, name in files.items() if place not in known}
    names, places = [*earlier.get("replaced_files", []), *new.values()], [*known, *new]
    return {"replaced": len(places), "replaced_files": names[:_NAMED], "replaced_places": places}


def replaced_line(data: dict) -> str | None:
    if not (count := data.get("replaced")):
        return None
    names, files = ", ".join(data["replaced_files"][:_PRINTED]), f"{count} file{'s' * (count > 1)}"
    more = f" and {count - _PRINTED} more (run.json)" if count > _PRINTED else ""
    return f"data.on_corrupt=skip: {files} replaced by the next usable one: {names}{more}"

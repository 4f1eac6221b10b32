"""What a run says to its user on stderr: before step 1 what he may not expect, at its end why."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mprun.build import Built
from mprun.config.schema import RunConfig
from mprun.data.source import Source
from mprun.record.console import DATA_BOUND
from mprun.training.loop import Outcome

_NAMED, _TOLD = 20, 3  # files in run.json, files on the console
_LONG_ENOUGH_S = 20.0


def tell(*lines: str | None) -> None:
    """Print those that there are."""
    for line in lines:
        if line is not None:
            print(f"mprun: {line}", file=sys.stderr)


def warn(config: RunConfig, built: Built) -> None:
    """Say what the user may not expect, before step 1."""
    tell(*_about_precision(config, built), *_about_data(config, built))


def tell_ending(directory: Path, source: Source, outcome: Outcome, record: dict) -> None:
    """Say how a run ended where that is not plain success, and what became of its data."""
    cause = f"{outcome.status} at step {outcome.step}: {outcome.cause}" if outcome.cause else None
    diverged = outcome.status == "diverged"
    tell(
        cause,
        f"its cause: mprun explain {directory}" if diverged else None,
        f"to go on: mprun resume={directory}" if outcome.status == "preempted" else None,
        data_bound(source, outcome.data_wait, record["seconds"]),
        replaced_line(record["data"]),
    )


def _about_precision(config: RunConfig, built: Built) -> Iterator[str]:
    policy, optim, scaler = config.precision, config.optim, config.scaler
    numerics, steps = config.numerics, config.train.steps
    if numerics.enabled and steps is not None and numerics.every > steps:
        yield f"numerics.every={numerics.every}: no step of {steps} will be probed"
    fp16_update = policy.master_dtype is None and policy.param_dtype == "fp16"
    if fp16_update and optim.eps is not None and 0 < optim.eps <= 2.0**-25:
        yield (
            f"optim.eps={optim.eps:g} rounds to 0 in FP16 (2^-25 and below): {policy.name} "
            f"with {optim.name} divides by zero and ends in NaN; this is a finding"
        )
    half = policy.autocast_dtype or policy.param_dtype
    if scaler.kind != "none" and {half, *policy.overrides.values()} == {"fp32"}:
        yield (
            f"scaler={scaler.name} changes nothing in {policy.name} but rounding: "
            "FP32 gradients do not underflow"
        )


def _about_data(config: RunConfig, built: Built) -> Iterator[str]:
    ignored = built.data.description.get("ignored_files")
    if ignored:
        yield f"data.root={config.data.root}: {ignored} files that are no images passed over"
    candidates = getattr(config.model, "sampled_softmax", None)
    text: Any = built.data  # where the model takes words
    if candidates is not None and candidates >= text.vocab_size:
        yield (
            f"model.sampled_softmax={candidates}: the data have {text.vocab_size} words, so this "
            "is the full softmax"
        )
    half = config.precision.autocast_dtype or config.precision.param_dtype
    if built.device.type == "cpu" and half != "fp32":
        emulated = "emulated (16-bit tensors, FP32 products rounded once)"
        how = emulated if config.cpu_half == "emulated" else "native CPU kernels"
        yield f"no GPU in use: {half} products are {how}"


def data_bound(source: Source, share: float | None, seconds: float) -> str | None:
    """One line if the device waited for more than a tenth of the time; None otherwise.

    seconds: length of the run; of a few seconds too much is start-up to say anything.
    """
    if share is None or share <= DATA_BOUND or seconds < _LONG_ENOUGH_S:
        return None
    line = f"data-bound: the device waited {100 * share:.0f} % of the time for data"
    workers, cores = source.workers, len(os.sched_getaffinity(0))
    if workers is None:
        return line
    if workers >= cores:
        return f"{line}; data.workers={workers} on {cores} cores: smaller files would help"
    return f"{line}; more data.workers (now {workers}, {cores} cores) or smaller files would help"


def replaced(source: Source, earlier: dict) -> dict:
    """What run.json says of files that data.on_corrupt=skip replaced; {} for other sources.

    earlier: the same of the attempt that this one continues. A file that both met counts once, even
    if it has moved: `replaced_places` holds the place of each in its split, the names only of the
    first.
    """
    found = source.replaced_files()
    if found is None:
        return {}
    known = list(dict.fromkeys(earlier.get("replaced_places", [])))
    new = {place: name for place, name in found.items() if place not in known}
    names = [*earlier.get("replaced_files", []), *new.values()]
    places = [*known, *new]
    first = names[:_NAMED]
    return {"replaced": len(places), "replaced_files": first, "replaced_places": places}


def replaced_line(data: dict) -> str | None:
    """One line if files were replaced."""
    count = data.get("replaced")
    if not count:
        return None
    names = ", ".join(data["replaced_files"][:_TOLD])
    more = f" and {count - _TOLD} more (run.json)" if count > _TOLD else ""
    files = "file" if count == 1 else "files"
    return f"data.on_corrupt=skip: {count} {files} replaced by the next usable one: {names}{more}"

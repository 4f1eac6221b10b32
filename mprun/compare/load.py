"""Find run directories and read what a comparison needs of each: run.json and metrics.jsonl.

What a reader must know of the runs beside their numbers (missing ones, how they ended, other
machines) is noted here as well.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mprun.compare.findings import Arm, RunData
from mprun.errors import BadInput, Damaged
from mprun.numerics.post_mortem import read_post_mortem
from mprun.record.metrics_columns import read_columns
from mprun.record.run_directory import read_json

OUTCOMES = ("done", "diverged")
# Keys that runs of earlier versions do not have, with their defaults.
_ADDED_LATER = {"train.compile": "off", "train.channels_last": "auto", "train.autotune": "auto"}
# What `mprun compare --tensorboard` writes beside the runs.
SUMMARY_FOLDER = "_summary"


def load_runs(
    paths: Sequence[str | Path], baseline: Path | None = None
) -> tuple[list[RunData], list[str]]:
    """Every run at or below the paths (and `baseline`), once each, and notes on what is left out.

    A path is a run directory or a folder that is searched to any depth, links included. Hidden
    folders, `_summary` and what a sweep put aside (`RUN.attemptN` beside `RUN`) are not searched.
    Of several runs with the same configuration, data and seed the first one that has an outcome
    counts (`first_with_outcome`); runs below `baseline` and the others are told apart for that.

    Raises BadInput for a path that does not exist or holds no run that can be compared, Damaged
    for a run.json or metrics.jsonl that cannot be read.
    """
    side = None if baseline is None else baseline.resolve()
    found: dict[Path, Path] = {}  # resolved -> as given
    for path in [Path(path) for path in paths] + ([] if baseline is None else [baseline]):
        directories = list(run_directories(path))
        if not directories:
            raise BadInput(
                f"{path}: no run there; give a run directory or a folder that holds runs"
            )
        for directory in directories:
            found.setdefault(directory.resolve(), directory)
    runs, notes, sides = [], [], {}
    for resolved, directory in found.items():
        record = _read_record(directory)
        if "config" not in record:
            notes.append(
                f"{directory}: left out, recorded by an older mprun (its run.json has no "
                "configuration)"
            )
            continue
        runs.append(load_run(directory, record))
        sides[str(directory)] = side is not None and resolved.is_relative_to(side)
    if not runs:
        raise BadInput(notes[0])

    def same(run: RunData) -> tuple:
        # Where the data lie is not in the hash of a configuration: what they are counts.
        return run.config_hash, run.keys.get("data.sha256"), run.seed, sides[run.path]

    kept, more = first_with_outcome(runs, same, "configuration, data and seed")
    return kept, notes + more


def run_directories(path: Path) -> Iterator[Path]:
    """The run directories at or below `path`, sorted; BadInput if it does not exist."""
    if not path.exists():
        raise BadInput(f"{path}: no such file or directory")
    if not path.is_dir():
        raise BadInput(f"{path}: not a folder; give a run directory or a folder that holds runs")
    yield from _search(path, set())


def _search(folder: Path, above: set[Path]) -> Iterator[Path]:
    resolved = folder.resolve()
    if resolved in above:
        return  # a link back up
    if (folder / "run.json").is_file():
        yield folder
        return
    try:
        with os.scandir(folder) as entries:
            names = {entry.name for entry in entries if entry.is_dir()}
    except PermissionError as error:
        raise BadInput(f"{folder}: cannot be read ({error.strerror})") from None
    for name in sorted(names, key=natural_order):
        aside = re.fullmatch(r"(.+)\.attempt\d+", name)
        if is_hidden(name) or (aside and aside[1] in names):
            continue
        yield from _search(folder / name, above | {resolved})


def is_hidden(name: str) -> bool:
    """Whether no run and no log is looked for in a folder of this name."""
    return name.startswith(".") or name == SUMMARY_FOLDER


def natural_order(name: str) -> list:
    """Sort key by which s2 comes before s10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def load_run(directory: Path, record: dict[str, Any]) -> RunData:
    """Read one run directory; `record` is the content of its run.json."""
    metrics = directory / "metrics.jsonl"
    ended = record.get("status") in OUTCOMES
    if ended and not metrics.exists():
        raise Damaged(f"{metrics}: missing, though the run is recorded as {record['status']}")
    try:
        columns = read_columns(metrics, missing_ok=True)
    except OSError as error:
        raise BadInput(f"{metrics}: cannot be read ({error.strerror})") from None
    if ended and columns.last_step < record.get("last_step", 0):
        raise Damaged(
            f"{metrics}: ends at step {columns.last_step}, the run at {record['last_step']}"
        )
    try:
        precision, environment = record["precision"], record["environment"]
        if type(record["seed"]) is not int or not isinstance(environment, dict):
            raise TypeError("seed must be an integer, environment a mapping")
        memory, throughput = record.get("memory", {}), record.get("throughput", {})
        has_scale = precision["scaler"] != "none"
        return RunData(
            path=str(directory),
            mode=precision["mode"],
            scaler=precision["scaler"],
            seed=record["seed"],
            status=record["status"],
            cause=record.get("cause"),
            last_step=record.get("last_step", columns.last_step),
            evals=columns.evals,
            train=columns.train,
            first_losses=columns.first_losses,
            last_losses=columns.last_losses,
            skipped=record.get("skipped", columns.skipped),
            skip_steps=columns.skip_steps,
            longest_skip_streak=columns.longest_skip_streak,
            scale_range=columns.scale_range if has_scale else None,
            nonfinite_step=columns.nonfinite_step,
            keys=_ADDED_LATER | flat(record["config"]) | _data_keys(record),
            choices=record["choices"],
            usual_scaler=precision.get("usual_scaler"),
            config_hash=record["config_hash"],
            created=record["created"],
            sample=record.get("sample", "sample"),
            samples_per_s=throughput.get("samples_per_s"),
            peak_bytes=memory.get("peak_bytes"),
            memory_measure=memory.get("measure", ""),
            saved_bytes=memory.get("saved_for_backward_bytes"),
            flags=precision.get("flags", {}),
            environment=environment,
            sample_grid=_newest_samples(directory),
        )
    except KeyError as error:
        raise Damaged(f"{directory / 'run.json'}: no {error.args[0]!r}") from None
    except (TypeError, AttributeError) as error:
        raise Damaged(f"{directory / 'run.json'}: not the record of a run ({error})") from None


def _data_keys(record: dict[str, Any]) -> dict[str, Any]:
    """Hash and size of the data's content as keys: equal names do not make equal data."""
    data = record.get("data") or {}
    return {f"data.{key}": data[key] for key in ("sha256", "eval_samples") if key in data}


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one: {"optim": {"lr": 0.1}} becomes {"optim.lr": 0.1}."""
    keys: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[f"{prefix}{key}"] = value
    return keys


def first_with_outcome(runs: Iterable[RunData], same, what: str) -> tuple[list[RunData], list[str]]:
    """One run for each value of the key function `same`, and a note for each that is left out.

    The first one (by its time of creation) that is done or diverged counts, so that nobody can
    pick the best of several; where none has an outcome, the newest one. `what` names the key.
    """
    alike: dict[Any, list[RunData]] = {}
    for run in runs:
        alike.setdefault(same(run), []).append(run)
    kept, notes = [], []
    for several in alike.values():
        several.sort(key=lambda run: (run.created, run.path))
        chosen = next((run for run in several if run.status in OUTCOMES), several[-1])
        kept.append(chosen)
        notes += [
            f"{run.path}: left out ({run.status}), same {what} as {chosen.path}; the first run "
            "with an outcome counts"
            for run in several
            if run is not chosen
        ]
    return kept, notes


def _read_record(directory: Path) -> dict[str, Any]:
    try:
        record = read_json(directory / "run.json")
    except OSError as error:
        raise BadInput(f"{directory / 'run.json'}: cannot be read ({error.strerror})") from None
    if not isinstance(record, dict):
        raise Damaged(f"{directory / 'run.json'}: not a JSON object")
    return record


def _newest_samples(directory: Path) -> str | None:
    """Path of samples/step-NNNNNNNN.png with the highest step."""
    grids = sorted(
        path
        for path in (directory / "samples").glob("step-*.png")
        if re.fullmatch(r"step-\d+\.png", path.name)
    )
    return str(max(grids, key=lambda path: int(path.stem[5:]))) if grids else None


def missing_seeds(runs: Iterable[RunData]) -> list[str]:
    """ "seed 3: failed (out of memory)" for each run without an outcome."""
    notes = []
    for run in sorted(runs, key=lambda run: run.seed):
        if run.status not in OUTCOMES:
            cause = (run.cause or "").partition("\n")[0][:120]
            notes.append(f"seed {run.seed}: {run.status}" + (f" ({cause})" if cause else ""))
    return notes


def post_mortems(runs: Iterable[RunData]) -> list[str]:
    """What ended each diverged run, where it left a post-mortem, and how to find the cause."""
    notes = []
    for run in sorted(runs, key=lambda run: run.seed):
        if run.status != "diverged" or run.foreign:
            continue
        try:
            found = read_post_mortem(Path(run.path))
        except Damaged as error:  # the verdict does not rest on it
            notes.append(f"seed {run.seed}: {error}")
            continue
        if found is not None:
            lines = "; ".join(str(line) for line in found["classification"])
            notes.append(f"seed {run.seed}: {lines}; see mprun explain {run.path}")
    return notes


def group_notes(baseline: Arm, arms: Sequence[Arm]) -> list[str]:
    """Differences of environment inside a group, and a baseline whose products are not FP32."""
    every = [baseline, *arms]
    notes = []
    for what, read in _MUST_AGREE.items():
        found: dict[str, dict[str, None]] = {}  # value -> labels, in order
        for arm in every:
            for run in arm.runs:
                found.setdefault(str(read(run.environment)), {})[arm.label] = None
        if len(found) > 1:
            text = "; ".join(f"{value} ({', '.join(labels)})" for value, labels in found.items())
            notes.append(f"{what} differs: {text}")
    dirty = [arm.label for arm in every if any(run.environment.get("dirty") for run in arm.runs)]
    if dirty:
        notes.append(
            f"recorded with uncommitted changes to mprun: {', '.join(dirty)}; their code may differ"
        )
    return notes + _not_ieee(baseline)


def _not_ieee(baseline: Arm) -> list[str]:
    """Whether FP32 products were less; the flags are those of `mprun.precision.read_math_flags`."""
    lowered = {
        f"{name.removesuffix('.fp32_precision')} {value}"
        for run in baseline.runs
        for name, value in run.flags.items()
        if name.endswith(".fp32_precision") and value != "ieee"
    }
    if not lowered:
        return []
    return [
        f"the baseline {baseline.label} did not compute FP32 products in full FP32: "
        f"{', '.join(sorted(lowered))}"
    ]


def _package(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda environment: (environment.get("packages") or {}).get(name, "unknown")


def _machine(environment: dict[str, Any]) -> str:
    device = environment.get("device", "unknown device")
    return f"{environment.get('gpu') or environment.get('cpu') or 'unknown'} ({device})"


_MUST_AGREE: dict[str, Callable[[dict[str, Any]], str]] = {
    "Python": lambda environment: ".".join(str(environment.get("python")).split(".")[:2]),
    "torch": _package("torch"),
    "device": _machine,
    "mprun": lambda environment: environment.get("mprun", "unknown"),
    "commit of mprun": lambda environment: (environment.get("commit") or "unknown")[:12],
}

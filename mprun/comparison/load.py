"""Find run directories and read what a comparison needs of each: run.json and metrics.jsonl.

The module also collects the notes that a reader needs beside the numbers: missing runs, how runs
ended, different machines, and what was really computed, from the audit in the records.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mprun.comparison.findings import Arm, RunData
from mprun.errors import BadInput, Damaged, shortened
from mprun.numerics.post_mortem import bad_losses, read_post_mortem
from mprun.record.console import counted
from mprun.record.keys import commands, config_hash, flat, recorded_keys
from mprun.record.metric_facts import Metric
from mprun.record.metrics_columns import read_columns
from mprun.record.run_record import (
    OUTCOMES,
    activation_bytes,
    is_foreign,
    product_shares,
    read_record,
    shares_text,
)
from mprun.record.seal import BrokenSeal, files_of

# Fields with the same name here and in run.json, which every record and which some have.
_RECORDED = ("seed", "status", "choices", "created", "environment")
_OPTIONAL = ("cause", "sample", "last_step", "skipped", "bad_batches", "execution")
# The folder that `mprun compare --tensorboard` writes beside the runs.
SUMMARY_FOLDER = "_summary"


def load_runs(
    paths: Sequence[str | Path], baseline: Path | None = None
) -> tuple[list[RunData], list[str]]:
    """Load every run at or below the paths (and `baseline`) once, with notes on those left out.

    Of several runs with the same configuration, data and seed the first one that has an outcome
    counts (`first_with_outcome`); runs below `baseline` and other runs count separately.

    Raises BadInput for a path that does not exist or holds no comparable run, and Damaged for a
    broken run.json or metrics.jsonl.
    """
    found: dict[Path, Path] = {}  # resolved -> as given
    notes: list[str] = []
    for path in [*paths, *([] if baseline is None else [baseline])]:
        for directory in run_directories(Path(path), notes.append):
            found.setdefault(directory.resolve(), directory)
    runs = []
    for directory in counted(found.values(), "reading runs"):
        record = read_run_record(directory)
        if "measured_for" in record:
            notes.append(f"{directory}: left out, measured by mprun {record['measured_for']}")
        elif "config" in record:
            runs.append(load_run(directory, record))
        else:
            why = "recorded by an older mprun (its run.json has no configuration)"
            notes.append(f"{directory}: left out, {why}")
    if not runs:
        raise BadInput(notes[0])

    def same(run: RunData) -> tuple:
        # The configuration's hash does not cover the data's location; the data's content counts.
        side = is_below(Path(run.path), baseline)
        return run.config_hash, run.keys.get("data.sha256"), run.seed, side

    kept, more = first_with_outcome(runs, same, "configuration, data and seed")
    return kept, notes + more


def is_below(path: Path, folder: Path | None) -> bool:
    """Return whether `path` is `folder` or inside it, links followed; False without a folder."""
    return folder is not None and path.resolve().is_relative_to(folder.resolve())


def _say(line: str) -> None:
    print(f"mprun: {line}", file=sys.stderr)


def run_directories(path: Path, say: Callable[[str], object] = _say) -> list[Path]:
    """Return the run directories at or below `path`, as `search` sorts them; BadInput if none.

    say: takes a line for each folder with the files of a run but without its run.json.
    """
    if not path.exists():
        raise BadInput(f"{path}: no such file or directory")
    if not path.is_dir():
        raise BadInput(
            f"{path}: is not a folder; name a run directory or a folder that contains runs"
        )

    def found_in(folder: Path) -> list[Path]:
        if (folder / "run.json").is_file() and not is_foreign(folder):
            return [folder]
        if all((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
            say(f"{folder}: left out, its run.json is gone")
        return []

    found = [*search(path, found_in)]
    if not found:
        raise BadInput(
            f"{path}: contains no run; name a run directory or a folder that contains runs"
        )
    return found


def search(
    folder: Path, found_in: Callable[[Path], list[Path]], above: frozenset[Path] = frozenset()
) -> Iterator[Path]:
    """Yield what `found_in` finds in the folder itself, else in the folders below it, sorted.

    The search follows links to any depth. It skips hidden folders, `_summary`, runs that a sweep
    put aside (`RUN.attemptN` beside `RUN`), links back up, and folders that vanish meanwhile.
    BadInput for a folder that cannot be read.
    """
    resolved = folder.resolve()
    if resolved in above:
        return
    if found := found_in(folder):
        yield from found
        return
    try:
        with os.scandir(folder) as entries:
            # entry.is_dir would raise for a link to itself.
            names = {entry.name for entry in entries if os.path.isdir(entry.path)}
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadInput(f"{folder}: the folder cannot be read ({error.strerror})") from None
    for name in sorted(names, key=natural_order):
        aside = re.fullmatch(r"(.+)\.attempt\d+", name)
        if not (name.startswith(".") or name == SUMMARY_FOLDER or (aside and aside[1] in names)):
            yield from search(folder / name, found_in, above | {resolved})


def natural_order(name: str) -> list:
    """Return a sort key by which s2 comes before s10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def load_run(directory: Path, record: dict[str, Any]) -> RunData:
    """Read one run directory; `record` is the content of its run.json."""
    metrics, ended = directory / "metrics.jsonl", record.get("status") in OUTCOMES
    if ended and not metrics.exists():
        raise Damaged(f"{metrics}: is missing, although the run is recorded as {record['status']}")
    try:
        columns = read_columns(metrics)
    except OSError as error:
        raise BadInput(f"{metrics}: cannot be read ({error.strerror})") from None
    if ended and columns.last_step < record.get("last_step", 0):
        raise Damaged(
            f"{metrics}: ends at step {columns.last_step}, but the run ended at step "
            f"{record['last_step']}"
        )
    try:
        precision, memory = record["precision"], record.get("memory", {})
        config = recorded_keys().current(record["config"])
        if config.get("train", {}).get("compile") == "auto":
            # Nothing is asked for, as with off; a note says if some arms were compiled.
            config["train"] = config["train"] | {"compile": "off"}
        data = record.get("data") or {}
        measured = {field.name: getattr(columns, field.name) for field in fields(columns)}
        if precision["scaler"] == "none":
            measured["scale_range"] = None
        # Equal names do not mean equal data: hash and size of its content are keys too.
        about_data = {f"data.{k}": data[k] for k in ("sha256", "eval_samples") if k in data}
        pictures = files_of(directory, "samples/step-*.png")
        samples = [str(path) for path in pictures if path.stem[5:].isdecimal()]
        return RunData(
            path=str(directory),
            mode=recorded_keys().label_of_today(precision["mode"]),
            scaler=precision["scaler"],
            **measured
            | {name: record[name] for name in _RECORDED}
            | {name: record[name] for name in _OPTIONAL if name in record},
            keys=flat(config) | about_data,
            config_hash=config_hash(config),
            usual_scaler=precision.get("usual_scaler"),
            samples_per_s=record.get("throughput", {}).get("samples_per_s"),
            peak_bytes=memory.get("peak_bytes"),
            memory_measure=memory.get("measure", ""),
            activation_bytes=activation_bytes(memory),
            flags=precision.get("flags", {}),
            half_products=precision.get("half_products") or "",
            audit=record.get("audit") or {},
            metrics={name: Metric(name, **own) for name, own in record.get("metrics", {}).items()},
            sample_grid=max(samples, key=natural_order, default=None),
        )
    except KeyError as error:
        raise Damaged(f"{directory / 'run.json'}: no {error.args[0]!r}") from None


def first_with_outcome(runs: Iterable[RunData], same, what: str) -> tuple[list[RunData], list[str]]:
    """Keep one run per value of the key function `same`; return notes on the others.

    The first one that is done or diverged counts, so nobody can pick the best of several, else the
    newest. Its `repeats` list the others that have an outcome. `what` names the key.
    """
    alike: dict[Any, list[RunData]] = {}
    for run in runs:
        alike.setdefault(same(run), []).append(run)
    kept, notes = [], []
    for several in alike.values():
        several.sort(key=lambda run: (run.created, run.path))
        chosen = next((run for run in several if run.status in OUTCOMES), several[-1])
        kept.append(chosen)
        for run in (run for run in several if run is not chosen):
            chosen.repeats += [run.path] * (run.status in OUTCOMES) + run.repeats
            notes.append(
                f"{run.path}: left out ({run.status}), same {what} as {chosen.path}; the first run "
                "with an outcome counts"
            )
    return kept, notes


def read_run_record(directory: Path) -> dict[str, Any]:
    """Read run.json; BadInput if it cannot be read, Damaged if it is not a record."""
    try:
        return read_record(directory)
    except OSError as error:
        raise BadInput(f"{directory / 'run.json'}: cannot be read ({error.strerror})") from None


def missing_seeds(runs: Iterable[RunData]) -> list[str]:
    """Return "seed 3: failed (out of memory)" for each run without an outcome, and its command."""
    notes = []
    for run in sorted(runs, key=lambda run: run.seed):
        if run.status not in OUTCOMES:
            cause = shortened((run.cause or "").partition("\n")[0], 120)
            note = f"seed {run.seed}: {run.status}" + (f" ({cause})" if cause else "")
            if run.status == "preempted":
                note = note.replace("preempted", f"preempted at step {run.last_step}", 1)
            notes.append(note + _what_fits(run))
    return notes


def post_mortems(runs: Iterable[RunData]) -> list[str]:
    """Return why each diverged run ended, if it left a post-mortem, and how to find the cause."""
    notes = []
    for run in runs:
        if run.status != "diverged":
            continue
        try:
            if (found := read_post_mortem(Path(run.path))) is not None:
                lines = "; ".join(map(str, found["classification"]))
                notes.append(f"seed {run.seed}: {lines}{_what_fits(run)}")
        except BrokenSeal:
            raise
        except Damaged as error:  # the verdict does not depend on it
            notes.append(f"seed {run.seed}: {error}")
    return notes


def _what_fits(run: RunData) -> str:
    """Return the command that fits a run best, behind a semicolon; "" without any."""
    directory = Path(run.path)
    fits = commands(directory, read_record(directory), lambda folder: False)
    best = next((fit for fit in fits if fit.acts and not fit.in_script), None)
    return "" if best is None else f"; {best}"


def skip_notes(runs: Iterable[RunData]) -> list[str]:
    """Return a note on each run with skipped updates whose loss itself was not finite."""
    said = ((run, bad_losses(run, run.bad_batches)) for run in runs if not run.foreign)
    return [f"seed {run.seed}: {text}{_what_fits(run)}" for run, text in said if text]


def group_notes(baseline: Arm, arms: Sequence[Arm]) -> list[str]:
    """Return notes on environments and forms of steps that differ in a group, and on a baseline
    that is not in full FP32."""
    every = [(arm.label, run) for arm in (baseline, *arms) for run in arm.runs]
    notes = []
    for what, read in _MUST_AGREE.items():
        found: dict[str, dict[str, None]] = {}  # value -> labels, in order
        for label, run in every:
            found.setdefault(str(read(run)), {})[label] = None
        if len(found) > 1:
            text = "; ".join(f"{value} ({', '.join(labels)})" for value, labels in found.items())
            notes.append(f"{what} differs: {text}")
    dirty = dict.fromkeys(label for label, run in every if run.environment.get("dirty"))
    if dirty:
        notes.append(
            f"recorded with uncommitted changes to mprun: {', '.join(dirty)}; their code may differ"
        )
    lowered = {  # see `mprun.precision.read_math_flags`
        f"{name.removesuffix('.fp32_precision')} {value}"
        for run in baseline.runs
        for name, value in run.flags.items()
        if name.endswith(".fp32_precision") and value != "ieee"
    }
    what = f"the baseline {baseline.label} did not compute FP32 products in full FP32"
    return notes + ([f"{what}: {', '.join(sorted(lowered))}"] if lowered else [])


_MUST_AGREE: dict[str, Callable[[RunData], str]] = {
    "Python": lambda run: ".".join(str(run.environment.get("python")).split(".")[:2]),
    "torch": lambda run: (run.environment.get("packages") or {}).get("torch", "unknown"),
    "device": lambda run: (
        f"{run.environment.get('gpu') or run.environment.get('cpu') or 'unknown'} "
        f"({run.environment.get('device', 'unknown device')})"
    ),
    "mprun": lambda run: run.environment.get("mprun", "unknown"),
    "commit of mprun": lambda run: (run.environment.get("commit") or "unknown")[:12],
    # Compiled steps round otherwise; under train.compile=auto each run decides for itself.
    "execution of steps": lambda run: "compiled" if run.is_compiled else "eager",
}
_AUDITED = {
    "left_the_model": "tensors left the model beside its outputs",
    "written_in_a_call": "parameters written by the model itself",
    "rounded_in_a_call": "fp32 that met 16 bits was rounded within the model",
    "destroyed_by_a_cast": "numbers that the cast to 16 bits destroys",
}
_ALIKE = 0.01  # a smaller difference of shares does not count; they are shown in whole per cent


def audit_of(runs: Sequence[RunData]) -> dict[str, Any] | None:
    """Return the combined audit of `runs`; None if none of them was watched.

    watched: steps (for a script, calls and passes). products: dtype -> share of the products of
    both passes, whatever their size, largest first. The other keys have names, each once.
    """
    audits = [run.audit for run in runs if run.audit.get("watched")]
    if not audits:
        return None
    watched = sum(audit["watched"] for audit in audits)
    found: dict[str, Any] = {"watched": watched, "products": product_shares(*audits)}
    for name in (*_AUDITED, "optimizers"):
        found[name] = sorted({one for audit in audits for one in audit.get(name, ())})
    unseen = {audit["not_watched"] for audit in audits if audit.get("not_watched")}
    return found | {"not_watched": sorted(unseen)}


def products_text(audit: Mapping[str, Any] | None) -> str:
    """Return the shares of products, the largest first: "fp16 85 %, fp32 15 %"."""
    return "not watched" if audit is None else shares_text(audit["products"])


def audit_notes(runs: Sequence[RunData]) -> list[str]:
    """Return notes on seeds that disagree, on modes of which nothing ran, on tensors that left a
    model and on written parameters."""
    notes = []
    watched = [run for run in runs if run.audit.get("watched")]
    shares = {run.seed: product_shares(run.audit) for run in watched}
    by_dtype = [[one.get(d, 0.0) for one in shares.values()] for d in set().union(*shares.values())]
    if any(max(own) - min(own) > _ALIKE for own in by_dtype):
        seeds: dict[str, list[str]] = {}
        for seed, one in shares.items():
            seeds.setdefault(shares_text(one), []).append(str(seed))
        told = [f"{text} (seed{'s' * (len(s) > 1)} {', '.join(s)})" for text, s in seeds.items()]
        notes.append(f"the seeds computed their products differently: {'; '.join(told)}")
    if unused := sorted({run.audit["unused"] for run in watched if "unused" in run.audit}):
        notes.append(f"no product ran in {', '.join(unused)}: overrides make this arm a control")
    for name, what in _AUDITED.items():
        found = sorted({one for run in watched for one in run.audit.get(name, ())})
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            notes.append(f"{what}: {', '.join(found[:5])}{more}")
    return notes

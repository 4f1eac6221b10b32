"""Curves that mprun did not record: TensorBoard events and CSV files, one arm per label.

    mprun compare --tag train/loss fp32=logs/base amp=logs/amp_s0,logs/amp_s1,logs/amp_s2

LABEL=PATH[,PATH...]: each PATH is one run (an event file, a folder with event files, a CSV file)
or a folder that holds several, taken in the order of their names (s2 before s10). The baseline is
the label `fp32` or `baseline`, else the first. Foreign logs tell no seed: runs are numbered from 0
as they are listed, and paired by that number. The log's steps say where a run ended.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mprun.compare.external_files import is_events, names_no_tag, read_csv, read_events
from mprun.compare.findings import Arm, RunData
from mprun.compare.grouping import ProtoGroup
from mprun.compare.load import SUMMARY_FOLDER, natural_order
from mprun.errors import BadInput

_BASELINES = ("fp32", "baseline")
_DRAWN = 500


def load_foreign(specs: Sequence[str], tag: str) -> tuple[ProtoGroup, list[str]]:
    """One group of the curves `tag`, and notes on how they were taken.

    specs: LABEL=PATH[,PATH...] each. A run's `evals` hold "step", "updates" (the same) and `tag`,
    float64, all points that were written. Imports no torch.

    Raises BadInput for a malformed spec, a path that is missing or holds no log, and a tag that a
    log does not have (it lists those that exist); Damaged for a CSV file with broken numbers.
    """
    paths: dict[str, list[Path]] = {}
    for spec in specs:
        label, equals, listed = spec.partition("=")
        if not label or not equals or not listed:
            raise BadInput(f"{spec}: with --tag give LABEL=PATH[,PATH...], e.g. fp32=logs/base_s0")
        if label in paths:
            raise BadInput(f"{spec}: label {label!r} is given twice; list all its paths at once")
        paths[label] = [run for part in listed.split(",") for run in _runs_at(Path(part))]
    if len(paths) < 2:
        raise BadInput(f"{specs[0]}: needs a baseline and at least one other LABEL=PATH")
    notes = [
        f"{path}: names no tag; its column Value is taken for {tag}"
        for runs in paths.values()
        for path in runs
        if names_no_tag(path, tag)
    ]
    arms = {
        label: Arm(label, label, [_load(path, tag, label, i, notes) for i, path in enumerate(runs)])
        for label, runs in paths.items()
    }
    baseline = _baseline(list(paths))
    if baseline.lower() not in _BASELINES:
        notes.append(f"no label is fp32 or baseline: the first one, {baseline}, is the baseline")
    notes.append("foreign logs: runs are paired by their position in the list, not by seed")
    others = [arm for label, arm in arms.items() if label != baseline]
    return ProtoGroup(tag, "foreign", arms[baseline], others, {}, notes), []


def refuse_same_logs(group: ProtoGroup) -> None:
    """BadInput where one log stands for several runs: it would match itself."""
    seen = set()
    for arm in (group.baseline, *group.arms):
        for run in arm.runs:
            path = Path(run.path).resolve()
            if path in seen:
                raise BadInput(f"{run.path}: listed twice; every path must be another run")
            seen.add(path)


def _baseline(labels: list[str]) -> str:
    named = [label for label in labels if label.lower() in _BASELINES]
    if len(named) > 1:
        raise BadInput(f"{named[0]}, {named[1]}: two labels name a baseline; rename one")
    return named[0] if named else labels[0]


def _runs_at(path: Path) -> list[Path]:
    """The runs that a path names: itself, or all below it in the order of their names."""
    if not path.exists():
        raise BadInput(f"{path}: no such file or directory")
    runs = _search(path, set())
    if not runs:
        raise BadInput(f"{path}: holds neither TensorBoard events nor CSV files")
    return runs


def _search(path: Path, above: set[Path]) -> list[Path]:
    if path.is_file():
        return [path]
    resolved = path.resolve()
    if resolved in above:
        return []  # a link back up
    entries = sorted(path.iterdir(), key=lambda entry: natural_order(entry.name))
    if any(is_events(entry) for entry in entries):
        return [path]
    tables = [entry for entry in entries if entry.suffix.lower() == ".csv" and entry.is_file()]
    folders = [
        entry
        for entry in entries
        if entry.is_dir() and not entry.name.startswith(".") and entry.name != SUMMARY_FOLDER
    ]
    return tables or [run for entry in folders for run in _search(entry, above | {resolved})]


def _load(path: Path, tag: str, label: str, number: int, notes: list[str]) -> RunData:
    read = read_csv if path.is_file() and not is_events(path) else read_events
    steps, values = read(path, tag)
    # A run that was resumed may have written steps twice: the last word counts.
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    newest = np.append(steps[1:] != steps[:-1], True)
    if not newest.all():
        notes.append(f"{path}: {int((~newest).sum())} steps written twice; the last value counts")
    steps, values = steps[newest], values[newest]
    strange = int((~np.isfinite(values)).sum())
    if strange:
        notes.append(
            f"{path}: {strange} of {len(values)} values of {tag} are not finite; they count only "
            "where the outcome is taken, at the end"
        )
    shown = np.arange(len(steps))
    if len(steps) > _DRAWN:
        shown = np.linspace(0, len(steps) - 1, _DRAWN).round().astype(np.int64)
    nothing = np.zeros(len(shown))
    return RunData(
        path=str(path),
        mode=label,
        scaler="none",
        seed=number,
        status="done",
        cause=None,
        last_step=int(steps[-1]),
        evals={"step": steps, "updates": steps, tag: values},
        train={
            "step": steps[shown],
            "updates": steps[shown],
            "skipped": nothing,
            "loss": values[shown],
            "loss_scale": nothing + 1.0,
        },
        # Whether these are the first steps, and each of them, a foreign log does not say.
        first_losses=np.empty(0),
        last_losses=values[len(values) - -(-len(values) // 10) :],
        foreign=True,
    )

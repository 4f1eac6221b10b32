"""Read runs from other tools' logs: which runs there are, their seeds, and the compared steps.

    mprun compare --scalar train/loss fp32=logs/base amp=logs/amp_s0,logs/amp_s1,logs/amp_s2

LABEL=PATH[,PATH...]: each PATH is one run (`log_formats` lists the formats) or a folder of several,
taken in the order of their names (s2 before s10). FILE#RUN is one run of a file that holds several
(an export of Weights & Biases); it may have wildcards. The baseline is the label `fp32` or
`baseline`, else the first label. docs/logs_of_other_tools.md has the rules of pairs, copies, steps.
"""

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np

from mprun.comparison.divergence import foreign_width, nonfinite_from
from mprun.comparison.findings import Arm, RunData
from mprun.comparison.grouping import ProtoGroup
from mprun.comparison.load import search
from mprun.comparison.wording import number_of
from mprun.errors import BadInput, shortened
from mprun.extensions.logs.log_formats import logs_in, read_logs, texts_in
from mprun.extensions.logs.wanted import PARTS, Log, listed
from mprun.record.metric_facts import told_by_name
from mprun.record.metrics_columns import evenly

_BASELINES = ("fp32", "baseline")
_DRAWN = 500
_MOST_NAMED = 20
_PARTS = {*PARTS.split()}  # in names of what is no run, but a part of one
_SEED = re.compile(r"seed[ =_-]?(\d+)", re.IGNORECASE)
_FEWEST_STEPS = 3  # with fewer steps, equal values prove no copy and the common steps make no curve


def load_foreign(
    specs: Sequence[str],
    scalar: str,
    *,
    step: str | None = None,
    paired: bool = False,
    directed: bool = True,
) -> ProtoGroup:
    """Return one group of the curves `scalar`, and notes on what counts as a run; import no torch.

    specs: LABEL=PATH[,PATH...] each. step: the column that counts the steps. paired: the runs are
    in the order of their seeds. directed: the user says whether lower is better; else the scalar's
    name must ("train/loss", "eval_ppl"). A run's `evals` hold "step", "updates" (the same) and
    `scalar`, float64, all written points; `judged` holds the steps at which it is compared.

    Raises BadInput for a malformed spec, for a path that is missing or holds no log, and for a
    scalar that a log lacks (it lists the existing ones). The same for runs that look like parts of
    runs, and for logs without common steps. Raises Damaged for broken numbers.
    """
    if not directed and told_by_name(scalar) is not False:
        raise BadInput(
            f"--scalar {scalar}: its direction is unknown; pass --higher-is-better (with --margin "
            "X in its unit) or --lower-is-better"
        )
    taken = _taken(specs, scalar, step)
    by_seed = _name_seeds(taken, paired)
    notes: list[str] = []
    arms: dict[str, Arm] = {}
    for label, logs in taken.items():
        names = listed([log.name for log in logs], _MOST_NAMED)
        notes.append(f"{label} is {number_of(len(logs), 'run')}: {names}")
        runs = [_run(log, scalar, label, notes) for log in logs]
        arms[label] = Arm(label, label, _without_copies(runs, scalar, notes))
    every = [log for logs in taken.values() for log in logs]
    counts = sorted({log.steps for log in every} - {"step", "Step", ""})
    if counts:
        notes.append(f"steps are what the logs call {', '.join(counts)}")
    notes += [f"{x.name}: names no scalar; taken for {scalar}" for x in every if not x.named]
    baseline = _baseline(list(taken))
    if baseline.lower() not in _BASELINES:
        notes.append(f"no label is fp32 or baseline: the first one, {baseline}, is the baseline")
    if not by_seed and any(len(arm.runs) > 1 for arm in arms.values()):
        notes.append(
            "the logs name no seeds, so runs are not paired: every run counts (Welch). Name seeds "
            "by LABEL=seed0:PATH, or say --paired if runs are listed in the order of the same seeds"
        )
    if by_seed:
        told = (f"{label} {', '.join(str(x.seed) for x in logs)}" for label, logs in taken.items())
        how = "by their place in the list (--paired)" if by_seed == "listed" else "in every path"
        notes.append(f"seeds are told {how}, and runs with equal ones paired: {'; '.join(told)}")
    others = [arm for label, arm in arms.items() if label != baseline]
    for arm in others:
        pairs = ((run, other) for run in arm.runs for other in arms[baseline].runs)
        equal = {run.path for run, other in pairs if _same_curve(run, other, scalar, _FEWEST_STEPS)}
        if equal and len(arm.runs) > 1:
            notes.append(
                f"{len(equal)} of {len(arm.runs)} runs of {arm.label} are runs of {baseline}, bit "
                "for bit or to the digits of the shorter: copies, or equal to the last digit"
            )
    notes += _align([arms[baseline], *others], scalar)
    return ProtoGroup(scalar, "foreign", arms[baseline], others, {}, notes, bool(by_seed))


def _taken(specs: Sequence[str], scalar: str, step: str | None) -> dict[str, list[Log]]:
    """Return label -> its runs, in the order in which they are listed."""
    taken: dict[str, list[Log]] = {}
    for spec in specs:
        label, _, listed = spec.partition("=")
        if not label or not listed:
            raise BadInput(
                f"{spec}: with --scalar pass LABEL=PATH[,PATH...], e.g. fp32=logs/base_s0"
            )
        if label in taken:
            raise BadInput(f"{spec}: label {label!r} appears twice; list all its paths at once")
        taken[label] = []
        below: dict[Path, list[Path]] = {}  # folder -> its sub-folders that hold logs
        for part in listed.split(","):
            named = re.fullmatch(r"seed(\d+):(.+)", part)
            logs = _logs_at(named[2] if named else part, scalar, step, below)
            if named and len(logs) > 1:
                raise BadInput(
                    f"{part}: contains {len(logs)} runs ({_names(logs)}); name a seed for each"
                )
            if named:
                logs[0].seed = int(named[1])
            taken[label] += logs
        _refuse_parts(label, below)
    if len(taken) < 2:
        raise BadInput(f"{specs[0]}: needs a baseline and at least one other LABEL=PATH")
    every = [log for logs in taken.values() for log in logs]
    _refuse_same(every)
    # Places in a list begin at 1, epochs at 0 or 1.
    by_kind = {(log.steps == "", "epoch" in log.steps.lower()): log for log in every}
    if len(by_kind) > 1:
        one, other = (
            f"{log.name} counts {log.steps or 'places in a list'}"
            for log in sorted(by_kind.values(), key=lambda log: log.steps)[:2]
        )
        raise BadInput(
            f"{one}, but {other}; name the column of steps in every log with --step COLUMN"
        )
    return taken


def _logs_at(given: str, scalar: str, step: str | None, below: dict[Path, list[Path]]) -> list[Log]:
    """Return the runs that a path names: itself, or all below it in the order of their names."""
    path, run = Path(given), ""
    if not path.exists() and "#" in given:
        name, _, run = given.rpartition("#")
        path = Path(name)
    if not path.exists():
        raise BadInput(f"{path}: no such file or directory")
    found = [path]
    if path.is_dir():  # Weights & Biases links to the latest run beside it
        listed = [*search(path, logs_in)] or [*search(path, texts_in)]
        found = [*{one.resolve(): one for one in listed}.values()]
        _refuse_part_files(found)
    if not found:
        raise BadInput(
            f"{path}: contains no log: TensorBoard events, MLflow runs, tables, JSON lines, text "
            "in *.log, *.out or *.txt"
        )
    for one in found:
        folder = one if one.is_dir() else one.parent
        if path.is_dir() and folder != path and folder not in below.get(folder.parent, []):
            below.setdefault(folder.parent, []).append(folder)
    logs = [log for one in found for log in read_logs(one, scalar, step)]
    chosen = [log for log in logs if not run or log.run == run or fnmatchcase(log.run, run)]
    if not chosen:
        raise BadInput(f"{given}: there is no run of this name; there are {_names(logs)}")
    return chosen


def _names(logs: Iterable[Log]) -> str:
    return listed([log.run or log.name for log in logs], _MOST_NAMED)


def _refuse_parts(label: str, below: dict[Path, list[Path]]) -> None:
    """Raise BadInput if sub-folders look like parts of a run: a run would count twice."""
    every = [folder for folders in below.values() for folder in folders]
    names = {folder.name.lower() for folder in every}
    siblings = [folder for folders in below.values() if len(folders) > 1 for folder in folders]
    seen: dict[str, Path] = {}
    for folder in every if len(names) > 1 else ():
        again = seen.setdefault(folder.name, folder) if folder in siblings else folder
        if again != folder or folder.name.lower() in _PARTS:
            others = shortened(", ".join(str(one) for one in every if one != folder), 120)
            raise BadInput(
                f"{label}: {folder} and {others}: these may be several runs, or parts of one run; "
                "name every run, e.g. "
                f"{label}={folder},{folder.parent.parent / 'other' / folder.name}"
            )


def _refuse_part_files(logs: list[Path]) -> None:
    """Raise BadInput if files of a folder are called after parts of a run, and unlike parts."""
    first: dict[Path, tuple[Path, set[str]]] = {}
    for log in logs:
        parts = _PARTS & {*re.split(r"[^a-z]+", log.name.lower())}
        other, its_parts = first.setdefault(log.parent, (log, parts))
        if log.is_file() and parts != its_parts:
            raise BadInput(
                f"{log} and {other.name}: these may be several runs, or parts of one run; name "
                "every run"
            )


def _refuse_same(logs: Iterable[Log]) -> None:
    """Raise BadInput if one log is listed as several runs: it would match itself."""
    seen = set()
    for log in logs:
        key = log.path.resolve(), log.run
        if key in seen:
            raise BadInput(
                f"{log.name}: listed twice; every path must be another run"
                + (f" (one of a file: {log.name})" if log.run else "")
            )
        seen.add(key)


def _name_seeds(taken: dict[str, list[Log]], paired: bool) -> Literal["named", "listed", ""]:
    """Set the seeds of the runs, or their places; return where seeds are told, "" if nowhere.

    Nothing is guessed: if one run has no seed, or two runs of a label share one, no run has a seed.
    """
    every = [log for logs in taken.values() for log in logs]
    given = [log.seed is not None for log in every]
    if any(given) != all(given):
        raise BadInput("LABEL=seed0:PATH: name the seed of every run, or of none")
    for log in every:
        if log.seed is None and (found := _SEED.findall(log.name)):
            log.seed = int(found[-1])
    twice = [label for label, logs in taken.items() if len({log.seed for log in logs}) < len(logs)]
    if twice and any(given):
        raise BadInput(
            f"{twice[0]}: two runs have the same seed; every run must have a different one"
        )
    if not twice and all(log.seed is not None for log in every):
        return "named"
    counts = {label: len(logs) for label, logs in taken.items()}
    if paired and len(set(counts.values())) > 1:
        text = ", ".join(f"{label} has {count}" for label, count in counts.items())
        raise BadInput(
            f"--paired: needs equally many runs in every label ({text}); name the seeds by "
            "LABEL=seed0:PATH, or omit --paired"
        )
    for logs in taken.values():
        for place, log in enumerate(logs):
            log.seed = place
    return "listed" if paired else ""


def _baseline(labels: list[str]) -> str:
    named = [label for label in labels if label.lower() in _BASELINES]
    if len(named) > 1:
        raise BadInput(f"{named[0]}, {named[1]}: two labels name a baseline; rename one")
    return named[0] if named else labels[0]


def _without_copies(runs: list[RunData], scalar: str, notes: list[str]) -> list[RunData]:
    """Keep the longest of runs that are equal at all common steps; note the others.

    Such runs are one run that was written twice: a copied file, or a resumed run and its original.
    """
    # Among runs of one or two values, several may be equal by chance, but not all.
    fewest = 1 if len({run.evals[scalar].tobytes() for run in runs}) == 1 else _FEWEST_STEPS
    kept: list[RunData] = []
    for run in sorted(runs, key=lambda run: len(run.evals["step"]), reverse=True):
        twins = ((other, _same_curve(run, other, scalar, fewest)) for other in kept)
        twin, how = next(filter(lambda found: found[1], twins), (None, ""))
        if twin is None:
            kept.append(run)
        else:
            notes.append(f"{run.path}: the same curve as {twin.path}, {how}: one run, not two")
    return sorted(kept, key=lambda run: run.seed)


def _same_curve(one: RunData, other: RunData, scalar: str, fewest: int) -> str:
    """Return how two curves are equal at their common steps; "" if they are not."""
    _, first, second = np.intersect1d(
        one.evals["step"], other.evals["step"], assume_unique=True, return_indices=True
    )
    if len(first) < max(fewest, len(one.evals["step"]) / 2):
        return ""
    values = one.evals[scalar][first], other.evals[scalar][second]
    if np.array_equal(*values, equal_nan=True):
        return "bit for bit"
    return "to the digits of the shorter" if _rounded(*values) else ""


def _rounded(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether one curve is the other one rounded to three digits or more.

    A writer keeps so many digits behind the point, or so many in all.
    """
    known = np.isfinite(one)
    if not np.array_equal(known, np.isfinite(other)) or len(set(one[known])) < _FEWEST_STEPS:
        return False
    one, other = one[known], other[known]
    apart = np.abs(one - other)
    if apart.max() > 0.005 * np.abs(one).max():
        return False  # not equal to three digits: the loops below take long
    for short in (one, other):
        tuples = [Decimal(repr(value)).normalize().as_tuple() for value in short.tolist()]
        digits = max(len(number.digits) for number in tuples)
        behind = min(int(number.exponent) for number in tuples)
        first = np.floor(np.log10(np.maximum(np.abs(short), np.finfo(float).tiny)))
        for last in (behind, first - digits + 1):
            if digits >= 3 and (apart <= 0.500001 * 10.0**last).all():
                return True
    return False


def _align(arms: list[Arm], scalar: str) -> list[str]:
    """Set the steps at which every run is judged: the last tenth of their common steps.

    Steps beyond the common ones are left out, and every arm says so; if there are none, a note is
    returned instead. BadInput if unequal logs have fewer than 3 steps in common.
    """
    runs = [run for arm in arms for run in arm.runs]
    whole = [run for run in runs if nonfinite_from(run, scalar) is None]
    if not whole:
        return []
    steps = [run.evals["step"] for run in whole]
    common = reduce(np.intersect1d, steps)
    equal = all(np.array_equal(own, common) for own in steps)
    shortest, longest = (pick(whole, key=_last_step) for pick in (min, max))
    if not equal and len(common) < _FEWEST_STEPS:
        raise BadInput(
            f"{shortest.path}: has {len(common)} steps in common with {longest.path} and the other "
            "logs: must be 3 or more. Log at equal steps, or name the column of steps with --step "
            "COLUMN"
        )
    judged = common[-foreign_width(len(common)) :]
    for run in runs:
        run.judged = judged
    if equal:
        return []
    interval = max(float(np.median(np.diff(own))) if len(own) > 1 else 0.0 for own in steps)
    if _last_step(longest) - common[-1] <= interval:
        return [f"logs of unequal steps: compared at the {len(common)} steps that all have"]
    line = (
        f"compared up to step {common[-1]:g} of {_last_step(longest):g}, at the {len(common)} "
        f"steps that all logs have: {shortest.path} ends at {_last_step(shortest):g}"
    )
    for arm in arms:
        arm.left_out.append(line)
    return []


def _last_step(run: RunData) -> float:
    return float(run.evals["step"][-1])


def _run(log: Log, scalar: str, label: str, notes: list[str]) -> RunData:
    steps, values = log.points.T
    notes += [note for note in log.notes if note not in notes]
    written = _written(values)
    steps, values = steps[written], values[written]
    strange = int((~np.isfinite(values)).sum())
    if strange:
        notes.append(
            f"{log.name}: {strange} of {len(values)} values of {scalar} are not finite; at the end "
            "they are a divergence (cut them off if they only fill the log up)"
        )
    shown = evenly(np.arange(len(steps)), _DRAWN)
    nothing = np.zeros(len(shown))
    return RunData(
        path=log.name,
        mode=label,
        scaler="none",
        seed=log.seed or 0,
        status="done",
        last_step=int(steps[-1]),
        evals={"step": steps, "updates": steps, scalar: values},
        train={
            "step": steps[shown],
            "updates": steps[shown],
            "skipped": nothing,
            "loss": values[shown],
            "loss_scale": nothing + 1.0,
        },
        # A foreign log does not say whether these are the first steps, or whether any is missing.
        first_losses=np.empty(0),
        last_losses=values[len(values) - -(-len(values) // 10) :],
        foreign=True,
    )


def _written(values: np.ndarray) -> np.ndarray:
    """Return bool [points]: False for the NaN that fill rows between a sparse column's values.

    A column is sparse if only every k-th row has a value, where k is the median distance. A longer
    stretch of NaN is not between two values.
    """
    known = np.flatnonzero(np.isfinite(values))
    every = np.median(np.diff(known)) if len(known) > 1 else 1
    if every < 2:
        return np.ones(len(values), bool)
    ends = np.concatenate([[-1], known, [len(values)]])
    at = np.searchsorted(ends, np.arange(len(values)))  # index of the next value
    between = ends[at] - ends[np.maximum(at - 1, 0)] <= every
    return ~np.isnan(values) | ~between

"""What a reader of a comparison must know beside its numbers: missing runs, other machines.

Which runs may be compared with which: groups, their baselines, and the labels of their arms.

Runs belong together if their configurations agree in everything but precision, scaler and seed
(and what cannot change a number). The baseline of a group is precision=fp32 with scaler=none.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mprun.compare.arms import (
    Cell,
    arm_label,
    canonical,
    cells_of,
    differences,
    is_no_key,
    of_arm,
    pairs_text,
    same,
    value_text,
)
from mprun.compare.findings import Arm, RunData
from mprun.compare.load import OUTCOMES, first_with_outcome
from mprun.config.rules import nearest
from mprun.config.schema import MODES
from mprun.errors import BadInput, Damaged
from mprun.numerics.post_mortem import read_post_mortem


def missing_seeds(runs: Sequence[RunData]) -> list[str]:
    """ "seed 3: failed (out of memory)" for each run without an outcome."""
    notes = []
    for run in sorted(runs, key=lambda run: run.seed):
        if run.status not in OUTCOMES:
            cause = (run.cause or "").partition("\n")[0][:120]
            notes.append(f"seed {run.seed}: {run.status}" + (f" ({cause})" if cause else ""))
    return notes


def post_mortems(runs: Sequence[RunData]) -> list[str]:
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
        found: dict[str, list[str]] = {}
        for arm in every:
            for run in arm.runs:
                labels = found.setdefault(str(read(run.environment)), [])
                if arm.label not in labels:
                    labels.append(arm.label)
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
    """The flags are those of `mprun.precision.read_math_flags`."""
    lowered = sorted(
        {
            f"{name.removesuffix('.fp32_precision')} {value}"
            for run in baseline.runs
            for name, value in run.flags.items()
            if name.endswith(".fp32_precision") and value != "ieee"
        }
    )
    if not lowered:
        return []
    return [
        f"the baseline {baseline.label} did not compute FP32 products in full FP32: "
        f"{', '.join(lowered)}"
    ]


def _packages(name: str):
    return lambda environment: (environment.get("packages") or {}).get(name, "unknown")


def _machine(environment: dict[str, Any]) -> str:
    device = environment.get("device", "unknown device")
    return f"{environment.get('gpu') or environment.get('cpu') or 'unknown'} ({device})"


_MUST_AGREE = {
    "Python": lambda environment: ".".join(str(environment.get("python")).split(".")[:2]),
    "torch": _packages("torch"),
    "device": _machine,
    "mprun": lambda environment: environment.get("mprun", "unknown"),
    "commit of mprun": lambda environment: (environment.get("commit") or "unknown")[:12],
}


_MOST_KEYS_ALLOWED = 5  # more than these to allow is another experiment, not worth a hint
_JUDGED = ("compare.metric", "compare.margin")
_LEARNED = ("model", "data")


@dataclass(slots=True)
class ProtoGroup:
    """Runs that may be compared, before any judgement."""

    title: str
    slug: str  # unique in a comparison, for file names and anchors
    baseline: Arm
    arms: list[Arm]
    keys: dict[str, Any] = field(default_factory=dict)  # the configuration that all runs share
    notes: list[str] = field(default_factory=list)


def group_runs(
    runs: Sequence[RunData],
    allow: Sequence[str] = (),
    baseline_path: Path | None = None,
    judged_otherwise: bool = False,
) -> tuple[list[ProtoGroup], list[str]]:
    """Groups with a baseline and at least one other arm, and one line for each cell without one.

    allow: keys (or groups of keys: "optim") in which runs of a group may differ all the same; a
    run that differs in one is an arm of its own, FP32 runs too. Where several FP32 configurations
    of a group differ in allowed keys, the one that most other runs agree with is the baseline.
    baseline_path: runs below it are the baseline of their group, whatever their mode.
    judged_otherwise: the command line gives metric or margin, so that compare.metric and
    compare.margin of the runs may differ.

    Runs without an outcome are in no arm; the arm's notes name them. An arm may have no run.

    Raises BadInput for an allowed key that no run has, and where more than one configuration
    could be the baseline.
    """
    _check_allowed(allow, runs)
    cells = cells_of(runs, baseline_path, ignored=_JUDGED if judged_otherwise else ())
    families: dict[str, list[Cell]] = {}
    for cell in cells:
        strict = {k: v for k, v in cell.shared.items() if not _matches(k, allow)}
        families.setdefault(canonical(strict), []).append(cell)
    groups, rest, lone = [], [], []
    for family in families.values():
        baseline = _baseline(family, allow)
        if baseline is None:
            rest += family
        elif len(family) == 1:
            lone.append(_only_baseline(baseline))
        elif not any(run.status in OUTCOMES for run in baseline.runs):
            lone.append(_no_outcome(baseline))
        else:
            groups.append(_group(baseline, family))
    _name(groups)
    baselines = [cell for cell in cells if cell.is_baseline]
    lines = [_why_not(cell, baselines) for cell in _by_configuration(rest)]
    return groups, lines + lone


def _matches(key: str, allowed: Sequence[str]) -> bool:
    return any(key == one or key.startswith(one + ".") for one in allowed)


def _check_allowed(allow: Sequence[str], runs: Sequence[RunData]) -> None:
    known = sorted({key for run in runs for key in run.keys})
    for one in allow:
        if not any(_matches(key, (one,)) for key in known):
            raise BadInput(f"--allow {one}: no run has this key{nearest(one, known)}")
        if is_no_key(one) or of_arm(one) or of_arm(f"{one}."):
            raise BadInput(f"--allow {one}: may differ anyway; leave it out")


def _baseline(family: list[Cell], allow: Sequence[str]) -> Cell | None:
    """The baseline among cells that agree in all keys but the allowed ones; None if none."""
    given = [cell for cell in family if cell.given]
    candidates = given or [cell for cell in family if cell.is_baseline]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    if given:
        raise BadInput(
            f"--baseline: {candidates[0].first.path} and {candidates[1].first.path} differ in "
            f"{pairs_text(differences(*candidates[:2], arm_keys=True))}; give one configuration"
        )
    # The configuration with which most runs of other modes agree exactly.
    following = Counter()
    for cell in family:
        if not cell.is_baseline:
            following[canonical(cell.shared)] += len(cell.runs)
    ranked = sorted(candidates, key=lambda cell: -following[canonical(cell.shared)])
    first, second = ranked[:2]
    if following[canonical(first.shared)] == following[canonical(second.shared)]:
        raise BadInput(
            f"--allow {','.join(allow)}: {first.first.path} and {second.first.path} could both be "
            f"the baseline (they differ in {pairs_text(differences(first, second))}); say which "
            "with --baseline PATH"
        )
    return first


def _group(baseline: Cell, family: list[Cell]) -> ProtoGroup:
    others = [cell for cell in family if cell is not baseline]
    arms = [_arm(cell, baseline, family) for cell in _ordered(baseline, others)]
    own = _arm(baseline, baseline, family)
    every = [run for cell in family for run in cell.runs]
    common = {
        key: value
        for key, value in baseline.first.keys.items()
        if not is_no_key(key)
        and all(key in run.keys and same(run.keys[key], value) for run in every)
    }
    notes = group_notes(own, arms)
    return ProtoGroup(_title(baseline.first), "", own, arms, common, notes)


def _ordered(baseline: Cell, others: list[Cell]) -> list[Cell]:
    """Modes in the order in which the configuration lists them, exact matches first."""

    def rank(cell: Cell) -> tuple[int, str, int]:
        mode = cell.first.mode
        name = mode.partition("+")[0]
        place = MODES.index(name) if name in MODES else len(MODES)
        return place, mode, len(differences(baseline, cell))

    return sorted(others, key=rank)


def _arm(cell: Cell, baseline: Cell, rivals: list[Cell]) -> Arm:
    """The arm of a cell, labelled so that it is told from its rivals and from the baseline."""
    runs, notes = first_with_outcome(cell.runs, lambda run: run.seed, "arm and seed")
    runs.sort(key=lambda run: run.seed)
    ended = [run for run in runs if run.status in OUTCOMES]
    differs = {
        key: pair
        for key, pair in differences(baseline, cell, arm_keys=True).items()
        if cell is not baseline
    }
    return Arm(
        label=arm_label(cell, baseline, rivals),
        mode=cell.first.mode,
        runs=ended,
        differs=differs,
        notes=missing_seeds(runs) + notes,
        missing=[run.seed for run in runs if run.status not in OUTCOMES],
    )


def _by_configuration(cells: Iterable[Cell]) -> list[Cell]:
    """One cell for each configuration, holding the runs of all its modes."""
    merged: dict[str, Cell] = {}
    for cell in cells:
        one = merged.setdefault(canonical(cell.shared), Cell([], cell.shared, {}))
        one.runs += cell.runs
    return list(merged.values())


# Runs of another length or judged otherwise cannot be compared, whatever is allowed.
_NEVER_ALLOWED = ("train.steps", "train.epochs", "compare.metric", "compare.window")


def _why_not(cell: Cell, baselines: list[Cell]) -> str:
    modes = ", ".join(dict.fromkeys(run.mode for run in cell.runs))
    what = f"{_title(cell.first)}: {modes} ({_count(cell.runs)}, e.g. {cell.first.path})"
    if not baselines:
        return f"{what}: not compared, no FP32 runs (precision=fp32, scaler=none) were given"
    best = min(baselines, key=lambda baseline: len(differences(baseline, cell)))
    found = differences(best, cell)
    # The keys first: as an error this line is cut in the middle.
    line = (
        f"{pairs_text(found)}: not as in the nearest FP32 runs ({best.first.path}), so not "
        f"compared: {what}; run it with precision=fp32"
    )
    if len(found) > _MOST_KEYS_ALLOWED or any(key in _NEVER_ALLOWED for key in found):
        return line
    return f"{line}, or --allow {','.join(found)}"


def _only_baseline(cell: Cell) -> str:
    return (
        f"{_title(cell.first)}: {cell.first.mode} alone ({_count(cell.runs)}, e.g. "
        f"{cell.first.path}): nothing to compare it with"
    )


def _no_outcome(cell: Cell) -> str:
    return (
        f"{_title(cell.first)}: not compared, the baseline {cell.first.mode} has no run with an "
        f"outcome ({'; '.join(missing_seeds(cell.runs))})"
    )


def _count(runs: list[RunData]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _title(run: RunData) -> str:
    """ "quickstart_lost_updates" or "resnet50-digits_32", from the chosen groups.

    The user's own code under its own name: "mynet:build-mydata:digits".
    """
    chosen = run.choices
    if chosen.get("experiment"):
        return str(chosen["experiment"])
    names = (run.keys.get(f"{group}.factory", chosen.get(group, group)) for group in _LEARNED)
    return "-".join(map(str, names))


def _name(groups: list[ProtoGroup]) -> None:
    """Titles that tell groups apart by the keys in which they differ, and unique slugs."""
    for title in {group.title for group in groups}:
        alike = [group for group in groups if group.title == title]
        first = alike[0].keys
        varied = [
            key
            for key in first
            if not of_arm(key) and any(not same(group.keys.get(key), first[key]) for group in alike)
        ]
        for group in alike if len(alike) > 1 else []:
            shown = [f"{key}={value_text(group.keys.get(key))}" for key in varied]
            more = [f"and {len(shown) - 3} more keys"] if len(shown) > 3 else []
            group.title = " ".join([title, *shown[:3], *more])
    taken: set[str] = set()
    for group in groups:
        slug = base = re.sub(r"[^A-Za-z0-9._-]+", "-", group.title).strip("-.")[:80] or "group"
        number = 1
        while slug.lower() in taken:
            number += 1
            slug = f"{base}-{number}"
        taken.add(slug.lower())
        group.slug = slug

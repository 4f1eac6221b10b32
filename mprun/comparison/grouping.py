"""Group the runs that may be compared, choose the baselines, and label the arms.

Runs belong together if their configurations agree in everything but precision, scaler, seed and
keys that cannot change a number. Runs that differ only in the seed are a cell, which becomes an
arm. The baseline of a group is the mode that its recorded configuration names (compare.baseline).
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from mprun.comparison.findings import Arm, RunData
from mprun.comparison.load import first_with_outcome, group_notes, is_below, missing_seeds
from mprun.comparison.wording import seeds_text, setting_text
from mprun.errors import BadInput
from mprun.record.keys import recorded_keys
from mprun.record.run_record import OUTCOMES
from mprun.spelling import nearest

# Keys that may differ inside a group: they define an arm.
_ARM_PREFIXES = ("precision.", "scaler.")
_ARM_KEYS = ("cpu_half",)  # how 16-bit products are computed without a GPU
BASELINE = "fp32"  # chosen by name if several modes compute like it
_DTYPES = ("param_dtype", "norm_dtype", "master_dtype", "grad_dtype", "loss_dtype")
# Every value of a mode's configuration if it computes in FP32 alone.
_FP32: dict[str, Any] = {f"precision.{key}": "fp32" for key in _DTYPES} | {
    "precision.autocast_dtype": None,
    "precision.fp32_math": "ieee",
    "precision.overrides": {},
    "precision.switch": [],
    "precision.reduce_dtype": None,
    "precision.matmul.input": None,
    "precision.attention.format": None,
    "precision.update.state_dtype": None,
    "precision.update.square_dtype": None,
}
_NOT_RECORDED = "(not recorded)"
_ENCODER = json.JSONEncoder(sort_keys=True, default=str)  # `json.dumps` would build one each time
_FEWEST_LOSSES = 3
_MOST_KEYS = 5  # shown; a run that differs in more is another experiment and gets no hint
# Runs of different length, or judged differently, are never compared, whatever is allowed.
_NEVER_ALLOWED = ("train.steps", "train.epochs", "compare.metric", "compare.window")
# Keys in which runs may differ if the command line sets the value for all of them.
_SAID_BY = {"compare.margin": "--margin X", "compare.baseline": "--baseline MODE"}


@dataclass(slots=True)
class ProtoGroup:
    """Runs that may be compared, before they are judged; fields as of `Group`."""

    title: str
    slug: str
    baseline: Arm
    arms: list[Arm]
    keys: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    by_seed: bool = True

    @property
    def every_run(self) -> list[RunData]:
        """Return the runs of the baseline, then those of the modes."""
        return [run for arm in (self.baseline, *self.arms) for run in arm.runs]


@dataclass(slots=True)
class SeedGroup:
    """Runs that differ only in the seed."""

    runs: list[RunData]
    shared: dict[str, Any]  # keys that must agree inside a group
    own: dict[str, Any]  # keys that define the arm
    is_baseline: bool = False  # may be the baseline: by its mode, or given by a path
    given: bool = False  # by --baseline PATH
    wanted: str = BASELINE  # the mode that is its baseline

    @property
    def first(self) -> RunData:
        """Return the first run; in all that is read from it the runs agree."""
        return self.runs[0]

    @property
    def keys(self) -> dict[str, Any]:
        """Return the keys in which its runs agree."""
        return self.shared | self.own


def group_runs(
    runs: Sequence[RunData],
    allow: Sequence[str] = (),
    baseline: str | Path | None = None,
    judged_otherwise: bool = False,
) -> tuple[list[ProtoGroup], list[str]]:
    """Return groups with a baseline and other arms, and a line per cell without a baseline.

    Runs without an outcome are in no arm; the arm's notes name them. An arm may have no run. Of
    several FP32 configurations the baseline is the one that most other runs agree with.

    Args:
        runs: the result of `load_runs`.
        allow: keys (or groups of keys: "optim") in which the arms of a group may differ.
        baseline: the mode, or the path above the runs, that is used, not compare.baseline.
        judged_otherwise: the runs may differ in compare.metric and compare.margin.

    Raises:
        BadInput: no run has an allowed key, or several configurations could be the baseline.
    """
    _check_allowed(allow, runs)
    ignored = ["compare.metric", "compare.margin"] if judged_otherwise else []
    ignored += ["compare.baseline"] if baseline else []
    cells = cells_of(runs, baseline, ignored)
    groups: list[ProtoGroup] = []
    rest: list[SeedGroup] = []  # without a baseline
    lone: list[str] = []
    for family in families(cells, allow):
        base = _baseline(family, allow)
        if base is None:
            rest += family
        elif len(family) == 1:
            lone.append(f"{_runs_text(base.runs, ' alone')}: nothing to compare it with")
        elif not any(run.status in OUTCOMES for run in base.runs):
            title, missing = title_of(base.first), "; ".join(missing_seeds(base.runs))
            what = f"the baseline {base.first.mode} has no run with an outcome"
            lone.append(f"{title}: not compared, {what} ({missing})")
        else:
            groups.append(_group(base, family))
    name_groups(groups)
    return groups, [*_why_not(rest, [cell for cell in cells if cell.is_baseline]), *lone]


def cells_of(
    runs: Sequence[RunData], baseline: str | Path | None = None, ignored: Sequence[str] = ()
) -> list[SeedGroup]:
    """Return the cells of all runs, ordered by their first run; `ignored` keys separate none."""
    no_keys = set(filter(is_no_key, {key for run in runs for key in run.keys}))
    cells: dict[tuple, SeedGroup] = {}
    for run in runs:
        given = isinstance(baseline, Path) and is_below(Path(run.path), baseline)
        own = {key: value for key, value in run.keys.items() if of_arm(key)}
        left_out = no_keys.union(own, ignored)
        shared = {key: value for key, value in run.keys.items() if key not in left_out}
        plain_fp32 = _is_plain_fp32(run)
        # FP32 computes nothing in 16 bits, so such a key does not define an arm there.
        telling = {key: own[key] for key in own if not (plain_fp32 and key in _ARM_KEYS)}
        key = (run.mode, run.scaler, canonical(telling), canonical(shared), given)
        wanted = run.keys.get("compare.baseline", BASELINE)
        wanted = baseline if isinstance(baseline, str) else wanted
        may_be = plain_fp32 if wanted == BASELINE else run.mode == wanted
        cell = cells.setdefault(key, SeedGroup([], shared, own, given or may_be, given, wanted))
        cell.runs.append(run)
    return list(cells.values())


def families(cells: Iterable[SeedGroup], allow: Sequence[str] = ()) -> list[list[SeedGroup]]:
    """Return the cells that agree in all shared keys but the allowed ones, together."""
    found: dict[str, list[SeedGroup]] = {}
    for cell in cells:
        strict = {k: v for k, v in cell.shared.items() if not _matches(k, allow)}
        found.setdefault(canonical(strict), []).append(cell)
    return list(found.values())


def of_arm(key: str) -> bool:
    """Return whether a key defines an arm: precision, scaler, or how to compute 16-bit products."""
    return key.startswith(_ARM_PREFIXES) or key in _ARM_KEYS


def is_no_key(key: str) -> bool:
    """Return whether runs that differ in `key` alone are the same experiment."""
    return not recorded_keys().role_of(key).compared


def varied_keys(family: Iterable[SeedGroup]) -> dict[tuple[str, str], list[str]]:
    """Return for each mode and scaler the keys of its arms in which they differ."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in family:
        kinds.setdefault((cell.first.mode, cell.first.scaler), []).append(cell.own)
    return {
        kind: [
            key
            for key in sorted(set().union(*arms))
            if not same(*(own.get(key, _NOT_RECORDED) for own in arms))
        ]
        for kind, arms in kinds.items()
    }


def arm_label(
    cell: SeedGroup, baseline: SeedGroup, varied: dict[tuple[str, str], list[str]]
) -> str:
    """Return the mode with what sets it apart: "amp (static scale=128) optim.lr=0.05".

    varied: `varied_keys` of the group; `baseline` tells which allowed keys differ. A scaler other
    than the mode's usual one is always named.
    """
    run = cell.first
    keys = varied[run.mode, run.scaler]
    details = [
        f"{key.removeprefix('scaler.')}={setting_text(cell.own.get(key, _NOT_RECORDED))}"
        for key in keys
    ]
    if run.scaler != _usual_scaler(run) or (keys and run.scaler != "none"):
        details.insert(0, run.scaler)
    label = f"{run.mode} ({' '.join(details)})" if details else run.mode
    if cell is baseline:
        return label
    allowed = differences(baseline.shared, cell.shared)
    if not allowed and run.mode == baseline.first.mode and same(cell.own, baseline.own):
        return f"{label} (other)"
    return label + "".join(f" {key}={setting_text(own)}" for key, (_, own) in allowed.items())


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value of one, value of other) where they differ."""
    keys = dict.fromkeys([*one, *other])
    pairs = {key: (one.get(key, _NOT_RECORDED), other.get(key, _NOT_RECORDED)) for key in keys}
    return {key: pair for key, pair in pairs.items() if not same(*pair)}


def same(*values: Any) -> bool:
    """Return whether configuration values are equal."""
    return len(set(map(canonical, values))) == 1


def canonical(value: Any) -> str:
    """Return the canonical text of plain data: equal texts mean equal values."""
    return _ENCODER.encode(value)


def _is_plain_fp32(run: RunData) -> bool:
    """Return whether a run computed in full FP32 without loss scaling, whatever its mode's name."""
    absent = _FP32 if run.mode == BASELINE else {}  # settings of an earlier mprun's record
    recorded = {key: run.keys.get(key, absent.get(key, _NOT_RECORDED)) for key in _FP32}
    return run.keys.get("scaler.kind", run.scaler) == "none" and recorded == _FP32


def _usual_scaler(run: RunData) -> str:
    """Return the scaler that needs no mention: the mode's default, unless the mode was changed."""
    if run.usual_scaler is None:  # recorded by an earlier mprun
        return recorded_keys().scalers_of_modes().get(run.mode, "none")
    return "none" if "+" in run.mode else run.usual_scaler


def _matches(key: str, allowed: Sequence[str]) -> bool:
    return any(key == one or key.startswith(one + ".") for one in allowed)


def _check_allowed(allow: Sequence[str], runs: Sequence[RunData]) -> None:
    known = sorted({key for run in runs for key in run.keys})
    for one in allow:
        if not any(_matches(key, [one]) for key in known):
            raise BadInput(f"--allow {one}: no run has this key{nearest(one, known)}")
        if is_no_key(one) or of_arm(one) or of_arm(f"{one}."):
            raise BadInput(f"--allow {one}: this key may always differ; omit it")


def _baseline(family: list[SeedGroup], allow: Sequence[str]) -> SeedGroup | None:
    """Return the baseline among cells that agree in all keys but the allowed ones; None if none."""
    plain = [cell for cell in family if cell.is_baseline]
    given = [cell for cell in plain if cell.given]
    # A user's mode that equals FP32 under another name comes after FP32 itself.
    named = [cell for cell in plain if cell.first.mode == cell.wanted]
    usual = [cell for cell in named if cell.first.scaler == _usual_scaler(cell.first)]
    candidates = given or usual or named or plain
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    if given:
        first, second = candidates[:2]
        raise BadInput(
            f"--baseline: {first.first.path} and {second.first.path} differ in "
            f"{pairs_text(differences(first.keys, second.keys))}; name runs of one configuration"
        )
    # Prefer the configuration that exactly matches most runs of other modes.
    others = [canonical(c.shared) for c in family if not c.is_baseline for _ in c.runs]
    following = {id(cell): others.count(canonical(cell.shared)) for cell in candidates}
    first, second = sorted(candidates, key=lambda cell: -following[id(cell)])[:2]
    if following[id(first)] == following[id(second)]:
        asked = f"--allow {','.join(allow)}" if allow else f"baseline {first.wanted}"
        found = differences(first.keys, second.keys)
        raise BadInput(
            f"{asked}: {first.first.path} and {second.first.path} could both be the baseline (they "
            f"differ in {pairs_text(found)}); choose one with --baseline PATH"
        )
    return first


def _group(baseline: SeedGroup, family: list[SeedGroup]) -> ProtoGroup:
    def rank(cell: SeedGroup) -> tuple[int, str, int]:
        """Sort shipped modes first, in the order of every table; exact matches of a mode first."""
        mode = cell.first.mode
        name = mode.partition("+")[0]
        place = [*recorded_keys().scalers_of_modes(), name].index(name)
        return place, mode, len(differences(baseline.shared, cell.shared))

    others = sorted((cell for cell in family if cell is not baseline), key=rank)
    varied = varied_keys(family)
    own, *arms = (_arm(cell, baseline, varied) for cell in (baseline, *others))
    every = [run.keys for cell in family for run in cell.runs]
    common = {
        key: value
        for key, value in baseline.first.keys.items()
        if not is_no_key(key) and same(*(keys.get(key, _NOT_RECORDED) for keys in every))
    }
    return ProtoGroup(title_of(baseline.first), "", own, arms, common, group_notes(own, arms))


def _arm(cell: SeedGroup, baseline: SeedGroup, varied: dict[tuple[str, str], list[str]]) -> Arm:
    """Build the arm of a cell, with a label that no other cell of its group has."""
    runs, notes = first_with_outcome(cell.runs, lambda run: run.seed, "arm and seed")
    runs.sort(key=lambda run: run.seed)
    label = arm_label(cell, baseline, varied)
    different, copies = _without_copies([run for run in runs if run.status in OUTCOMES])
    return Arm(
        label=label,
        mode=cell.first.mode,
        runs=different,
        differs=differences(baseline.keys, cell.keys),
        notes=missing_seeds(runs) + notes,
        missing=[run.seed for run in runs if run.status not in OUTCOMES],
        left_out=[
            *(f"a repeat of seed {run.seed}: {path}" for run in runs for path in run.repeats),
            *(f"{seeds} of {label}, {why}" for seeds, why in copies),
        ],
    )


def _without_copies(runs: list[RunData]) -> tuple[list[RunData], list[tuple[str, str]]]:
    """Keep the first of runs whose recorded values are equal; return the seeds of the others, why.

    Such runs differ in a seed that nothing was seeded with. Fewer than three finite training losses
    may be equal by chance.
    """
    alike: dict[Any, list[RunData]] = {}
    for run in runs:
        losses = run.train.get("loss", np.empty(0))
        evals = [(name, column.tobytes()) for name, column in run.evals.items()]
        recorded = run.status, *evals, losses.tobytes(), run.last_losses.tobytes()
        telling = np.isfinite(losses).sum() >= _FEWEST_LOSSES
        alike.setdefault(recorded if telling else run.seed, []).append(run)
    told = []
    for first, *others in alike.values():
        seeds = f"seed{'s' * (len(others) > 1)} {seeds_text(run.seed for run in others)}"
        why = f"which recorded what seed {first.seed} did, bit for bit: one run, counted once"
        told += [(seeds, why)] if others else []
    return [first for first, *_ in alike.values()], told


def _why_not(rest: list[SeedGroup], baselines: list[SeedGroup]) -> Iterator[str]:
    """Yield a line for each configuration without a baseline, with all of its modes."""
    for family in families(rest):
        what = _runs_text([run for cell in family for run in cell.runs])
        wanted, shared = family[-1].wanted, family[0].shared
        if not baselines and wanted == BASELINE:
            yield f"{what}: not compared, no FP32 runs (precision=fp32, scaler=none) were given"
            continue
        if not baselines:
            yield f"compare.baseline={wanted}: no run of that mode, so not compared: {what}"
            continue
        every = [(differences(other.shared, shared), other) for other in baselines]
        found, best = min(every, key=lambda one: len(one[0]))
        # The keys come first: as an error this line is cut in the middle.
        name = "FP32" if best.first.mode == BASELINE else best.first.mode
        line = (
            f"{pairs_text(found)}: not as in the nearest {name} runs ({best.first.path}), so not "
            f"compared: {what}; run it with precision={wanted}"
        )
        hopeless = len(found) > _MOST_KEYS or not found.keys().isdisjoint(_NEVER_ALLOWED)
        allowed = ",".join(key for key in found if key not in _SAID_BY)
        flags = [f"--allow {allowed}"] if allowed else []
        flags += [flag for key, flag in _SAID_BY.items() if key in found]
        yield line if hopeless else f"{line}, or {' '.join(flags)}"


def pairs_text(differences: dict[str, tuple[Any, Any]]) -> str:
    """Return keys with their values, "optim.lr (0.1, here 0.05)", and how many more there are."""
    shown = [
        f"{key} ({setting_text(base)}, here {setting_text(own)})"
        for key, (base, own) in list(differences.items())[:_MOST_KEYS]
    ]
    more = len(differences) - len(shown)
    return ", ".join(shown) + (f" and {more} more keys" if more else "")


def _runs_text(runs: list[RunData], word: str = "") -> str:
    """Return title, modes and count: "lstm_lm-docs_words: amp (2 runs, e.g. outputs/x)"."""
    modes = ", ".join(dict.fromkeys(run.mode for run in runs))
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return f"{title_of(runs[0])}: {modes}{word} ({count}, e.g. {runs[0].path})"


def title_of(run: RunData) -> str:
    """Return the title from the chosen groups: "quickstart_lost_updates", "resnet50-digits_32".

    The user's own code has its own name: "mynet:build-mydata:digits".
    """
    chosen, groups = run.choices, ("model", "data")
    names = (run.keys.get(f"{group}.factory", chosen.get(group, group)) for group in groups)
    return str(chosen.get("experiment") or "-".join(map(str, names)))


def name_groups(groups: list[ProtoGroup]) -> None:
    """Add to equal titles the keys in which the groups differ, and set unique slugs."""
    for title in {group.title for group in groups}:
        alike = [group for group in groups if group.title == title]
        varied = [
            key
            for key in alike[0].keys
            if not of_arm(key) and not same(*(group.keys.get(key) for group in alike))
        ]
        more = [f"and {len(varied) - 3} more keys"] if len(varied) > 3 else []
        for group in alike:
            shown = [f"{key}={setting_text(group.keys.get(key))}" for key in varied[:3]]
            group.title = " ".join([title, *shown, *more])
    taken: set[str] = set()
    for group in groups:
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", group.title).strip("-.")[:80] or "group"
        names = chain([base], (f"{base}-{number}" for number in count(2)))
        group.slug = next(name for name in names if name.lower() not in taken)
        taken.add(group.slug.lower())

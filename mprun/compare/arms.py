"""Runs that differ in nothing but the seed, how such cells differ, and what they are called."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mprun.compare.findings import RunData
from mprun.record.run_directory import NOT_HASHED, NOT_HASHED_DATA, NOT_HASHED_TRAIN

# Keys, and groups of keys, that neither change a number nor separate runs.
_NO_KEYS = (
    "seed",
    *NOT_HASHED,
    *(f"train.{key}" for key in NOT_HASHED_TRAIN),
    *(f"data.{key}" for key in NOT_HASHED_DATA),
)
# Keys that may differ inside a group: they make an arm.
_ARM_PREFIXES = ("precision.", "scaler.")
_ARM_KEYS = ("cpu_half",)  # how 16-bit products are computed where there is no GPU
# What a mode's name says already (conf/precision); every other mode comes without a scaler.
_USUAL_SCALER = {"fp16_master_scaled": "dynamic", "amp": "dynamic"}
_MOST_KEYS_SHOWN = 5
_NOT_RECORDED = "(not recorded)"


@dataclass(slots=True)
class Cell:
    """Runs that differ in nothing but the seed."""

    runs: list[RunData]
    shared: dict[str, Any]  # keys that must agree inside a group
    own: dict[str, Any]  # keys that make the arm
    is_baseline: bool = False  # one may be: FP32 without scaler, or given by --baseline
    given: bool = False  # by --baseline

    @property
    def first(self) -> RunData:
        """Any of them: they agree in all that is asked of it."""
        return self.runs[0]


def cells_of(
    runs: Sequence[RunData], baseline_path: Path | None, ignored: Sequence[str]
) -> list[Cell]:
    """The cells of all runs, in the order of their first run; `ignored` keys separate none."""
    side = None if baseline_path is None else baseline_path.resolve()
    cells: dict[tuple, Cell] = {}
    for run in runs:
        given = side is not None and Path(run.path).resolve().is_relative_to(side)
        own = {k: v for k, v in run.keys.items() if of_arm(k)}
        shared = {
            k: v
            for k, v in run.keys.items()
            if k not in own and not is_no_key(k) and k not in ignored
        }
        plain_fp32 = run.mode == "fp32" and run.scaler == "none"
        # FP32 computes nothing in 16 bits: there such a key makes no arm.
        telling = {k: v for k, v in own.items() if not (plain_fp32 and k in _ARM_KEYS)}
        key = (run.mode, run.scaler, canonical(telling), canonical(shared), given)
        cell = cells.setdefault(key, Cell([], shared, own, given or plain_fp32, given))
        cell.runs.append(run)
    return list(cells.values())


def of_arm(key: str) -> bool:
    """Whether a key describes an arm: precision, scaler, and how 16-bit products are computed."""
    return key.startswith(_ARM_PREFIXES) or key in _ARM_KEYS


def arm_label(cell: Cell, baseline: Cell, rivals: list[Cell]) -> str:
    """The mode, and no more than tells it from its rivals: "amp (static scale=128) optim.lr=0.05".

    rivals: the cells of the group; `baseline` says which allowed keys differ. A scaler that is
    not the mode's usual one is always named.
    """
    run = cell.first
    details = []
    if run.scaler != _USUAL_SCALER.get(run.mode, "none"):
        details.append(run.scaler)
    # Settings that tell it from cells of the same mode and scaler.
    alike = [
        other
        for other in rivals
        if other is not cell and (other.first.mode, other.first.scaler) == (run.mode, run.scaler)
    ]
    varied = sorted({key for other in alike for key in own_differences(cell, other)})
    details += [
        f"{key.removeprefix('scaler.')}={value_text(cell.own.get(key, _NOT_RECORDED))}"
        for key in varied
    ]
    if varied and run.scaler not in ("none", *details):
        details.insert(0, run.scaler)
    label = f"{run.mode} ({' '.join(details)})" if details else run.mode
    allowed = differences(baseline, cell) if cell is not baseline else {}
    label += "".join(f" {key}={value_text(own)}" for key, (_, own) in allowed.items())
    same_as_baseline = cell is not baseline and not allowed and not own_differences(cell, baseline)
    return f"{label} (other)" if same_as_baseline and run.mode == baseline.first.mode else label


def own_differences(one: Cell, other: Cell) -> list[str]:
    """The keys of the arm in which two cells differ."""
    return [
        key
        for key in dict.fromkeys([*one.own, *other.own])
        if not same(one.own.get(key, _NOT_RECORDED), other.own.get(key, _NOT_RECORDED))
    ]


def differences(one: Cell, other: Cell, arm_keys: bool = False) -> dict[str, tuple[Any, Any]]:
    """Key -> (value of one, value of other) where they differ; with those of the arm if asked."""
    first = one.shared | (one.own if arm_keys else {})
    second = other.shared | (other.own if arm_keys else {})
    pairs = {
        key: (first.get(key, _NOT_RECORDED), second.get(key, _NOT_RECORDED))
        for key in dict.fromkeys([*first, *second])
    }
    return {key: pair for key, pair in pairs.items() if not same(*pair)}


def is_gan(keys: dict[str, Any]) -> bool:
    """Whether runs with these keys train a generator against a discriminator."""
    return keys.get("model.name") == "dcgan" or keys.get("model.task") == "gan"


def is_no_key(key: str) -> bool:
    """Whether runs that differ in `key` alone are the same experiment."""
    return key in _NO_KEYS or key.partition(".")[0] in _NO_KEYS


def pairs_text(differences: dict[str, tuple[Any, Any]]) -> str:
    """ "optim.lr (0.1, here 0.05)", and how many more there are."""
    shown = [
        f"{key} ({value_text(base)}, here {value_text(own)})"
        for key, (base, own) in list(differences.items())[:_MOST_KEYS_SHOWN]
    ]
    more = len(differences) - len(shown)
    return ", ".join(shown) + (f" and {more} more keys" if more else "")


def value_text(value: Any) -> str:
    """A configuration value as it is typed, without a trailing ".0"."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return "null" if value is None else str(value)


def same(one: Any, other: Any) -> bool:
    """Whether two configuration values are equal."""
    return canonical(one) == canonical(other)


def canonical(value: Any) -> str:
    """Canonical text of plain data: equal texts are equal values."""
    return json.dumps(value, sort_keys=True, default=str)

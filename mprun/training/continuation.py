"""Read what a run goes on with: its record and configuration, with what a command may change.

Needs no torch, so that bad input is refused before anything is loaded.
"""

import os
from pathlib import Path

from mprun.config.compose import config_from_record
from mprun.config.keys import FIELDS, current, is_as_hashed, role_of, wanted
from mprun.config.overrides import MAPPING, assignment, mapping_of, parse_overrides
from mprun.config.schema import RunConfig
from mprun.config.trust import is_outside, vouched
from mprun.errors import BadInput, Damaged, Untrusted, no_folder, shortened
from mprun.record.keys import flat
from mprun.record.run_directory import read_config
from mprun.record.run_record import Record, of_another_version, read_record, refuse_older_state
from mprun.record.seal import check_seal

# The fields of run.json that a continuation reads.
_NEEDED = (
    *("status", "steps", "attempts", "choices", "config", "config_hash", "precision.mode"),
    *("environment.device", "environment.threads", "environment.packages.torch"),
)


def continued(overrides: tuple[str, ...], path: str, config_dir: str | None = None) -> RunConfig:
    """Return the configuration that `resume` would continue with, or raise its error."""
    return read(run_directory(path), overrides, config_dir)[1]


def read(
    directory: Path, overrides: tuple[str, ...], config_dir: str | None
) -> tuple[Record, RunConfig]:
    """Return the record of a run and the configuration to go on with; check that they fit."""
    given, record = vouched(overrides, config_dir), read_record(directory, *_NEEDED)
    check_seal(directory)
    plain = read_config(directory)
    _check_unchanged(directory, plain, record)
    refuse_older_state(f"resume={directory}", record)
    plain = _with_overrides(current(plain), overrides, record["choices"])
    changed = [one for one in overrides if not one.lstrip("+").startswith("resume=")]
    try:
        config = config_from_record(plain, given)
    except Untrusted:
        raise
    except BadInput as error:
        for override in changed:
            key = override.partition("=")[0]
            if str(error).startswith(f"config.yaml: {key} does not fit "):
                raise BadInput(f"{override}: must be {wanted(key)}") from None
        if "script" in plain or (changed and not str(error).startswith("config.yaml:")):
            raise
        raise BadInput(f"{error}; {of_another_version(record)}") from None
    check_length(config, record, config.train.steps)
    return record, config


def check_length(config: RunConfig, record: Record, steps: int | None) -> None:
    """Refuse another length if rate or mode depend on it; None: known once the data are loaded."""
    schedule, before = config.optim.schedule, record["steps"]
    if steps in (None, before):
        return
    if schedule != "constant":
        raise BadInput(f"train.steps={steps}: {not_longer(schedule, before, steps)}")
    shares = [one.at for one in config.precision.switch if isinstance(one.at, float)]
    if shares:
        raise BadInput(
            f"train.steps={steps}: a resume cannot change the number of steps, of which "
            f"at={shares[0]} of precision.switch is a share; give `at` in steps in a new run"
        )


def run_directory(path: str) -> Path:
    """Return the directory that `resume=path` means; BadInput if it is none of a run."""
    directory = Path(path)
    if not path or not os.path.isdir(path):
        raise BadInput(f"resume={path}: {no_folder(path)}")
    if not os.path.lexists(directory / "run.json"):
        if not os.path.lexists(directory / "config.yaml"):
            raise BadInput(f"resume={path}: contains no config.yaml; name a run directory")
        raise BadInput(
            f"resume={path}: contains no run.json, because the run never reached its first step"
        )
    return directory


def _check_unchanged(directory: Path, plain: dict, record: dict) -> None:
    """Raise Damaged unless the configurations in config.yaml and run.json are the run's own."""
    recorded = record["config"]
    if not is_as_hashed(record):
        raise Damaged(f"{directory / 'run.json'}: config does not match config_hash")
    # An attempt that ended between its two files has left keys of two versions.
    there, here = flat(current(recorded)), flat(current(plain))
    for key in there | here:
        if there.get(key) != here.get(key) and not role_of(key).resumable:
            raise Damaged(
                f"{directory / 'config.yaml'}: {key} is {here.get(key)!r}, but the run began with "
                f"{there.get(key)!r} (run.json)"
            )


def _allowed() -> str:
    """Return the keys that may be overridden, in a shell's braces to fit on one line."""
    groups: dict[str, list[str]] = {}
    for key in (key for key in FIELDS if role_of(key).resumable):
        group, _, field = key.rpartition(".")
        groups.setdefault(group, []).append(field)
    top = groups.pop("")
    short = [f"{group}.{{{','.join(fields)}}}" for group, fields in groups.items()]
    return " ".join([*short, *(key for key in top if key not in groups)])


def _with_overrides(plain: dict, overrides: tuple[str, ...], choices: dict) -> dict:
    """Return `plain` as overridden; choices: the run's options of groups, which may be repeated."""
    before = flat(plain) | choices
    for override in overrides:
        key = override.partition("=")[0].lstrip("+")
        if key == "resume" or is_outside(override):
            continue
        # Hydra's grammar, as for a new run: YAML takes "off" for false.
        (parsed,) = parse_overrides((override,))
        value, own = parsed.value(), before.get(key, parsed)
        if mapping_of(key) == MAPPING and isinstance(value, dict):
            found = {pattern: before.get(f"{MAPPING}.{pattern}") for pattern in value}
            key, own = MAPPING, parsed if None in found.values() else found
        elif isinstance(own, str):
            value = str(value)  # a name may look like a number
        if value == own and isinstance(value, bool) == isinstance(own, bool):
            continue
        if not role_of(key).resumable:
            kept = "its configuration" if own is parsed else shortened(assignment(key, own), 120)
            raise BadInput(f"{override}: a resumed run keeps {kept} (keys allowed: {_allowed()})")
        group, _, field = key.rpartition(".")
        (plain.setdefault(group, {}) if group else plain)[field] = value
    return plain


def not_longer(schedule: str, steps: int, wanted: int) -> str:
    """Return why a run whose rate depends on its length keeps it, and what to do instead."""
    return (
        f"optim.schedule={schedule} was computed for {steps} steps, so a resume cannot extend the "
        f"run; begin with train.steps={wanted}, or with optim.schedule=constant to extend it later"
    )

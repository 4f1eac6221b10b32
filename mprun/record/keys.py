"""The meaning of the keys of a recorded configuration, for hashes and comparisons.

The library judges records without knowing what trained. What a key means, the installed runner
tells: the entry point `keys` of the group `mprun.runner` names a module with the functions of
`Keys`, and `commands` the function that lists what fits a run. Without the runner every key may
change a result, as those of a script do.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mprun.entry_points import announced, loaded
from mprun.record.metric_facts import Metric

GROUP = "mprun.runner"


@dataclass(frozen=True, slots=True)
class Role:
    """The effect of another value of a key, wherever runs are told apart."""

    hashed: bool  # it can change a number of the run: it is part of `config_hash`
    resumable: bool  # a continuation of the run may have another value
    compared: bool  # runs that differ in it are different experiments, without a verdict
    told: bool  # a run's path and a sweep's table have it wherever set, else only if swept

    def __str__(self) -> str:
        """Return its effect in words, for a key's help."""
        parts = (
            f"{'in' if self.hashed else 'not in'} the configuration hash",
            f"runs that are compared {'must agree in it' if self.compared else 'may differ in it'}",
            f"a resumed run {'may change it' if self.resumable else 'keeps it'}",
        )
        return "; ".join(parts)


# The learned task, and how; the role of every key without another one.
RESULT = Role(hashed=True, resumable=False, compared=True, told=True)
LENGTH = Role(hashed=True, resumable=True, compared=True, told=True)
# The interval of evaluations, which changes no training: `compare` sees to it that the judged ones
# are of the same steps.
INTERVAL = Role(hashed=True, resumable=True, compared=False, told=True)
# The runs of one experiment; paths and tables have a separate place for it.
SEED = Role(hashed=True, resumable=False, compared=False, told=False)
# The place of computation: another device rounds differently, but the task is the same.
MACHINE = Role(hashed=True, resumable=False, compared=True, told=False)
# The way to read data, execute steps and write records: the same numbers at another speed.
READING = Role(hashed=False, resumable=True, compared=False, told=False)
# The reading of a result: no number of the run, and runs that say nothing of it stay comparable.
JUDGED = Role(hashed=False, resumable=True, compared=False, told=False)
# The run's name, and what is watched in it; a run keeps the values of its start.
LABEL = Role(hashed=False, resumable=False, compared=False, told=False)


class Keys:
    """The meaning of recorded keys without a runner, as in a script; a runner tells its own."""

    def role_of(self, key: str) -> Role:
        """Return the role of a dotted key."""
        return {"seed": SEED, "name": LABEL, "compare.plan": LABEL}.get(key, RESULT)

    def current(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a configuration recorded by an earlier version with the keys of this one."""
        return config

    def label_of_today(self, mode: str) -> str:
        """Return a mode as an earlier version labelled it, with the names of this one."""
        return mode

    def metric_of(self, keys: Mapping[str, Any], name: str) -> Metric | None:
        """Return a metric of the task of a run with these keys, whose record does not tell it."""
        return None

    def networks_in_turn(self, keys: Mapping[str, Any]) -> int:
        """Return how many networks a run with these keys trains in turn: 2 for a GAN."""
        return 1

    def scalers_of_modes(self) -> Mapping[str, str]:
        """Return precision mode -> its usual loss scaler, in the order of every table."""
        return {}

    def experiment(self, name: str) -> str | None:
        """Return a sentence on a shipped experiment; None for one of the user's."""
        return None


@cache
def recorded_keys() -> Keys:
    """Return the meaning of keys as the installed runner tells it."""
    named = announced(GROUP).get("keys")
    found: Keys = loaded(named) if named else Keys()
    return found


def commands(
    directory: Path, record: Mapping[str, Any], compares: Callable[[Path], bool] | None = None
) -> Iterable[Any]:
    """Yield the runner's commands that fit a run (`mprun.training.next_commands`), or none."""
    named = announced(GROUP).get("commands")
    return loaded(named)(directory, record, compares) if named else ()


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: {"optim": {"lr": 0.1}} becomes {"optim.lr": 0.1}."""
    keys: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[f"{prefix}{key}"] = value
    return keys


def hash_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that tell its configuration from others, whoever reads it."""
    left_out = sorted(key for key in flat(config) if not recorded_keys().role_of(key).hashed)
    return {"config_hash": config_hash(config), "not_hashed": left_out}


def config_hash(config: dict[str, Any]) -> str:
    """Return the SHA-256 (hex) of all values in a configuration that can change a number."""
    role_of = recorded_keys().role_of
    return digest({key: value for key, value in flat(config).items() if role_of(key).hashed})


def digest(hashed: dict[str, Any]) -> str:
    """Return the SHA-256 (hex) of plain data."""
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()

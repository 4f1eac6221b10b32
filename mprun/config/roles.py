"""What each key means, read off the schema: hash, resume, comparison and tables ask here.

Keys are dotted, as one types them. A key that no schema has (of an older record, of the user's own
code, a group) can change a result, for all that is known.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from mprun.config.rules import RESULT, Role
from mprun.config.schema import DATA, MODELS, RunConfig


def _fields(schema: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """(key, field) of a schema and of all that may stand below it, in order."""
    variants = {"model": MODELS.values(), "data": DATA.values()}
    for field in dataclasses.fields(schema):
        key = f"{prefix}{field.name}"
        yield key, field
        groups = variants.get(key) or [field.default_factory]
        for group in groups:
            if dataclasses.is_dataclass(group):
                yield from _fields(group, f"{key}.")


# Key -> its fields: more than one where several models or data sources have it, with one role.
FIELDS: dict[str, list[dataclasses.Field]] = {}
for _key, _field in _fields(RunConfig):
    FIELDS.setdefault(_key, []).append(_field)


def role_of(key: str) -> Role:
    """The role of a key: its field's own, or that of the group it stands in."""
    for name in (key, key.partition(".")[0]):
        for field in FIELDS.get(name, ()):
            if "role" in field.metadata:
                role: Role = field.metadata["role"]
                return role
    return RESULT


def is_told(key: str) -> bool:
    """Whether a key describes a run: it is in paths and tables wherever it is given."""
    return role_of(key).told


def resumable_keys() -> list[str]:
    """The keys that a continuation may set anew."""
    return [key for key in FIELDS if role_of(key).resumable]


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one: {"optim": {"lr": 0.1}} becomes {"optim.lr": 0.1}."""
    keys: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[f"{prefix}{key}"] = value
    return keys


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 (hex) over everything in the configuration that can change a number."""
    return hashlib.sha256(json.dumps(_hashed(config), sort_keys=True).encode()).hexdigest()


def _hashed(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        key: _hashed(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in tree.items()
        if role_of(f"{prefix}{key}").hashed
    }

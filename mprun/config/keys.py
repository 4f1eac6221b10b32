"""The meaning of each key, from the schema, for hash, resume, comparison, tables and help.

A key that no schema has (of an older record, the user's code, a group) may change a result.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterator
from types import UnionType
from typing import Any, get_args

from omegaconf import MISSING

from mprun.config.components import NETWORKS
from mprun.config.fields import RESULT, Role, allowed, meaning_of
from mprun.config.registry import COMPONENTS, TaskKind, kind_called, readers_of
from mprun.config.schema import ProductsConfig, RunConfig


def _fields(
    schema: Any, prefix: str = "", owner: str = "", known: Collection[dataclasses.Field] = ()
) -> Iterator[tuple[str, dataclasses.Field, str]]:
    """Yield (key, field, component) of a schema and of all groups below it, but for `known`."""
    for field in dataclasses.fields(schema):
        if field in known:
            continue
        key = f"{prefix}{field.name}"
        base: Any = field.default_factory
        yield key, field, owner
        shared = dataclasses.fields(base) if dataclasses.is_dataclass(base) else ()
        if shared:
            yield from _fields(base, f"{key}.")
        for name, component in COMPONENTS[key][0].items() if key in COMPONENTS else ():
            yield from _fields(component.config, f"{key}.", name, shared)


# Key -> its fields: more than one if several components have it, with one role.
FIELDS: dict[str, list[dataclasses.Field]] = {}
_OWNERS: dict[str, list[str]] = {}
for _key, _field, _owner in _fields(RunConfig):
    FIELDS.setdefault(_key, []).append(_field)
    _OWNERS.setdefault(_key, []).append(_owner)


# Keys whose value is a path, and of them those of data outside of the run.
PATHS = frozenset(key for key, (field, *_) in FIELDS.items() if field.metadata.get("path"))
PLACES = tuple(key for key, (field, *_) in FIELDS.items() if field.metadata.get("place"))


@dataclasses.dataclass(frozen=True, slots=True)
class Meaning:
    """A key's meaning in words; `variants`: the components that have it, none: all of its group."""

    doc: str
    kind: str
    allowed: str
    default: str
    variants: tuple[str, ...] = ()


def meanings(key: str) -> list[Meaning]:
    """Return a key's meaning, or several if components differ in it."""
    group, _, name = key.partition(".")
    readers = readers_of(group, name)
    found: dict[Meaning, list[str]] = {}
    for field, owner in zip(FIELDS[key], _OWNERS[key], strict=True):
        found.setdefault(_meaning(field), []).extend([owner] if owner else readers)
    return [dataclasses.replace(one, variants=tuple(variants)) for one, variants in found.items()]


def _meaning(field: dataclasses.Field) -> Meaning:
    rule = field.metadata
    choices = ", ".join(str(choice) for choice in rule.get("choices", ()))
    default = field.default
    if default is dataclasses.MISSING:
        default = field.default_factory() if field.default_factory in (list, dict) else MISSING
    words = "" if default == MISSING else json.dumps(default).strip('"')
    range_or_values = choices or allowed(rule.get("bounds", {}))
    return Meaning(rule["doc"], _kind(field.type), range_or_values, words)


_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_KINDS |= {list[str]: "list of texts", list[float]: "list of numbers"}


def _kind(annotation: Any) -> str:
    """Return `whole number or null` for `int | None`."""
    parts = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    words = [_KINDS.get(part, "mapping") for part in parts if part is not type(None)]
    return " or ".join([*words, "null"] if len(parts) > len(words) else words)


def wanted(key: str) -> str:
    """Return `a whole number >= 1`: what a value of another type should have been."""
    found = []
    for one in meanings(key):
        kind, nullable, _ = one.kind.partition(" or null")
        if one.allowed and kind.endswith(("text", "texts")):
            kind = kind.replace("texts", "").replace("text", "one of").rstrip()
        kind = f"a {kind}" if kind.startswith(("whole", "number", "list", "mapping")) else kind
        meaning = "" if "choices" in FIELDS[key][0].metadata else meaning_of(one.doc)
        found.append(f"{kind} {one.allowed}".rstrip() + ", or null" * bool(nullable) + meaning)
    return "; ".join(dict.fromkeys(found))


def role_of(key: str) -> Role:
    """Return the role of a key: its field's role, or that of its group."""
    for name in (key, key.partition(".")[0]):
        for field in FIELDS.get(name, ()):
            if "role" in field.metadata:
                role: Role = field.metadata["role"]
                return role
    return RESULT


def is_told(key: str) -> bool:
    """Return whether a key describes a run: paths and tables show it wherever it is set."""
    return role_of(key).told


def resumable_keys() -> list[str]:
    """Return the keys that a continuation may set anew."""
    return [key for key in FIELDS if role_of(key).resumable]


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: {"optim": {"lr": 0.1}} becomes {"optim.lr": 0.1}."""
    keys: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[f"{prefix}{key}"] = value
    return keys


def current(config: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration with the keys of an earlier mprun under their names here."""
    precision: Any = config.get("precision")
    products = precision.get("products") if isinstance(precision, dict) else None
    if not isinstance(products, dict) or "power_of_two" not in products:
        return config
    own = {key: value for key, value in products.items() if key != "power_of_two"}
    own["scale"] = "pow2" if products["power_of_two"] else "fp32"
    if products.get("input") is None:  # what had no effect
        own = {key: own[key] for key in ("high_precision", "modules") if key in own}
    later = dataclasses.asdict(ProductsConfig())  # with the defaults of keys that came with scale
    return config | {"precision": precision | {"products": later | own}}


def kind_recorded(name: str | None, own_task: str | None) -> TaskKind:
    """Return the registered facts of a record's task, by its `model.name` and `model.task`."""
    network = NETWORKS.get(name or "")
    return kind_called((network and network.task) or own_task or "")


def config_hash(config: dict[str, Any]) -> str:
    """Return the SHA-256 (hex) of all values in a configuration that can change a number."""
    hashed = {key: value for key, value in flat(config).items() if role_of(key).hashed}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()

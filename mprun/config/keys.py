"""The meaning of each key, from the schema, for hash, resume, comparison, tables and help.

A key that no schema has (of an older record, the user's code, a group) may change a result. What
the library asks of recorded keys (`mprun.record.keys.Keys`) is answered by this module.
"""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from types import UnionType
from typing import Any, cast, get_args

from omegaconf import MISSING

from mprun.config.beside import SwitchConfig
from mprun.config.components import COMPONENTS, NETWORKS  # all of them, which the schema needs
from mprun.config.fields import allowed, meaning_of
from mprun.config.option_files import modes, option_files, what_it_is
from mprun.config.registry import TaskKind, kind_called, metric_called, readers_of
from mprun.config.schema import RunConfig
from mprun.record.keys import RESULT, Role, config_hash, digest, flat
from mprun.record.metric_facts import Metric


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
_KINDS[list[SwitchConfig]] = "list of {at: NUMBER, to: MODE}"


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


def metric_of(keys: Mapping[str, Any], name: str) -> Metric | None:
    """Return a metric of the recorded task; of all tasks, if that one is not known or has none."""
    return _kind_recorded(keys).metric(name) or metric_called(name)


def networks_in_turn(keys: Mapping[str, Any]) -> int:
    """Return how many networks the recorded task trains in turn: 2 for a GAN."""
    return _kind_recorded(keys).networks


def _kind_recorded(keys: Mapping[str, Any]) -> TaskKind:
    network = NETWORKS.get(keys.get("model.name") or "")
    return kind_called((network and network.task) or keys.get("model.task") or "")


def scalers_of_modes() -> dict[str, str]:
    """Return precision mode -> its usual loss scaler, in the order of every table."""
    return {mode.name: mode.scaler for mode in modes().values()}


def experiment(name: str) -> str | None:
    """Return the sentence that describes a shipped experiment; None if there is none."""
    file = option_files("experiment").get(name)
    return None if file is None else what_it_is(file)


# What a script's configuration has of the schema; the rest of it are the script's own settings.
_OF_SCRIPTS = ("precision", "compare")


def current(config: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration with the keys of this version.

    A renamed key has its new name. A key that came later has its default, which restates what runs
    without it computed, unless its field says `restates=False`. A key that is gone is left out if
    its value restates what every run computes now. Keys of no schema stay.
    """
    groups = _OF_SCRIPTS if "script" in config else None
    named = {
        group: _of_today(group, values)
        for group, values in config.items()
        if isinstance(values, dict) and (groups is None or group in groups)
    }
    return _filled(_with_scale(config | named), RunConfig, groups)


# Of a group: keys that are gone, at the value that restates what is computed now; former names.
_GONE = {"train": {"fused_norm": "off"}, "optim": {"implementation": "single_pass"}}
_FORMER = {"numerics": {"enabled": "probes"}, "precision": {"products": "matmul"}}


def _of_today(group: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded group with the names of this version, without what is gone."""
    gone, names = _GONE.get(group, {}), _FORMER.get(group, {})
    kept = {key: one for key, one in values.items() if key not in gone or one != gone[key]}
    return {names.get(key, key): one for key, one in kept.items()}


def label_of_today(mode: str) -> str:
    """Return a mode as a record labels it (`Mode.label`), with the names of this version."""
    for former, name in _FORMER["precision"].items():
        mode = mode.replace(f"+{former}.", f"+{name}.")
    return mode


def _with_scale(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose kind of scale does not stand in `power_of_two`."""
    precision: Any = config.get("precision")
    matmul = precision.get("matmul") if isinstance(precision, dict) else None
    if not isinstance(matmul, dict) or "power_of_two" not in matmul:
        return config
    own = {key: value for key, value in matmul.items() if key != "power_of_two"}
    own["scale"] = "pow2" if matmul["power_of_two"] else "fp32"
    if matmul.get("input") is None:  # what had no effect
        own = {key: own[key] for key in ("high_precision", "modules") if key in own}
    return config | {"precision": precision | {"matmul": own}}


def _filled(
    values: dict[str, Any], schema: Any, only: Collection[str] | None = None
) -> dict[str, Any]:
    """Return `values` with the fields of `schema` that they lack; only: of these groups."""
    found = dict(values)
    for field in dataclasses.fields(schema):
        name, factory = field.name, cast(Any, field.default_factory)
        if only is not None and name not in only:
            continue
        group = factory if dataclasses.is_dataclass(factory) else None
        if schema is RunConfig and name in COMPONENTS:
            if not isinstance(found.get(name), dict):
                continue
            table, key = COMPONENTS[name]
            chosen = table.get(str(found[name].get(key)))
            group = group if chosen is None else chosen.config
        if group is not None:
            if isinstance(inner := found.get(name, {}), dict):
                found[name] = _filled(inner, group)
        elif name not in found and field.metadata.get("restates", True):
            default = field.default if factory is dataclasses.MISSING else factory()
            if default not in (dataclasses.MISSING, MISSING):
                found[name] = default
    return found


def is_as_hashed(record: Mapping[str, Any]) -> bool:
    """Return whether the configuration of a record is the one that its `config_hash` is of.

    The record names the keys without a part in its hash. One of before record form 2 does not, and
    was hashed by one of the rules that mprun has had.
    """
    config, left_out = record["config"], record.get("not_hashed")
    if left_out is not None:
        kept = {key: value for key, value in flat(config).items() if key not in left_out}
        return digest(kept) == record["config_hash"]
    nested = (_hashed(config, added) for added in ({}, _ADDED, _ADDED | _ADDED_TO_NETWORKS))
    return record["config_hash"] in (config_hash(config), *map(digest, nested))


# Records of form 1 have hashes that left these keys out at these values, and their group with them.
_ADDED: dict[str, Any] = {
    "precision.reduce_dtype": None,
    "precision.reduce_divide": "after",
    "precision.products.input": None,
    "precision.products.weight": None,
    "precision.products.grad_output": None,
    "precision.products.granularity": "tensor",
    "precision.products.power_of_two": False,
    "precision.products.high_precision": [],
    "precision.products.modules": ["*"],
    "precision.update.rounding": "nearest",
    "precision.update.state_dtype": None,
    "compare.baseline": "fp32",
}
_ADDED_TO_NETWORKS = {"model.width": 1.0, "model.variant": "v1.5", "model.aux_weight": 0.0}


def _hashed(config: dict[str, Any], added: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return what a hash of record form 1 was of, without the keys that were `added`."""
    found = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if not role_of(key).hashed or (key in added and added[key] == value):
            continue
        found[name] = _hashed(value, added, f"{key}.") if isinstance(value, dict) else value
        if found[name] == {} and any(one.startswith(f"{key}.") for one in added):
            del found[name]
    return found

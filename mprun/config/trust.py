"""What a command vouches for: the code that it may call, and the paths outside of a run.

`data.factory`, `model.factory` and a user's `model.task` are code. Fields declared by `place` are
paths, and so is a text with a separator among the options of a user's function. Anybody may have
written the record of a run. Code and paths in it therefore only count if this command's line names
them too, or an option file of the groups data, model and experiment of the user's `--config-dir`
that is in no run directory. mprun.models and mprun.tasks need no naming.
"""

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mprun.config.components import TASKS
from mprun.config.keys import FIELDS, PLACES, role_of
from mprun.config.option_files import folders, mapping_in
from mprun.config.overrides import OPTIONS, assignment, mapping_of, parse_overrides, printable
from mprun.config.registry import kind_of
from mprun.config.schema import RunConfig
from mprun.errors import BadInput, Untrusted
from mprun.record.keys import flat

FACTORY_KEYS = ("data.factory", "model.factory")
_CODE_KEYS = (*FACTORY_KEYS, "model.task")
_TASKS = [name for name, task in TASKS.items() if task.of_own_networks]
_OWN = ("mprun.models.", "mprun.tasks.")


@dataclass(frozen=True, slots=True)
class Vouched:
    """Names that this command vouches for: by key on its line, (key, name) in option files."""

    typed: Mapping[str, Any] = field(default_factory=dict)
    files: frozenset[tuple[str, str]] = frozenset()


NOTHING = Vouched()


def is_outside(override: str) -> bool:
    """Return whether an override names code or a path, which a record alone cannot."""
    key, _, value = override.lstrip("+").partition("=")
    return _is_code(key, value) or key in PLACES or (mapping_of(key) in OPTIONS and _is_path(value))


def _is_code(key: str, value: object) -> bool:
    return key in FACTORY_KEYS or (key in _CODE_KEYS and ":" in str(value))


def vouched(overrides: Iterable[str], config_dir: str | None = None) -> Vouched:
    """Return the names that a command line with these overrides and `--config-dir` vouches for.

    It raises BadInput for a factory that is not of the form key=value or has several values.
    """
    typed: dict[str, Any] = {}
    for override in parse_overrides(filter(is_outside, overrides)):
        if override.is_sweep_override():
            raise BadInput(
                f"{override.input_line}: must be one value; only a sweep (-m) takes several"
            )
        key, value = override.key_or_group, override.value()
        if key in _CODE_KEYS:
            check_form(key, str(value))
        typed[key] = str(value) if key in _CODE_KEYS else value
    return Vouched(typed, frozenset() if config_dir is None else frozenset(_in_files(config_dir)))


def check_form(key: str, name: object) -> None:
    """Raise BadInput unless `name` is of the form package.module:function."""
    text = name if isinstance(name, str) else ""
    module, colon, function = text.partition(":")
    parts = [*module.split("."), function]
    if not colon or not all(part.isidentifier() for part in parts):
        raise BadInput(f"{key}={printable(name)}: must be of the form package.module:function")


def outside(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return key -> code or path in a configuration's plain values; BadInput for a bad form."""
    found: dict[str, Any] = {}
    for key in (*_CODE_KEYS, *PLACES, *OPTIONS):
        group_name, _, name = key.partition(".")
        group = record.get(group_name)
        if not isinstance(group, Mapping) or name not in group:
            continue
        value = group[name]
        if _is_code(key, value):
            check_form(key, value)
            found[key] = value
        elif key in PLACES and value is not None:
            found[key] = str(value)
        elif key in OPTIONS and isinstance(value, Mapping):
            found |= {f"{key}.{one}": item for one, item in value.items() if _is_path(str(item))}
    return found


def _is_path(text: str) -> bool:
    """Return whether an option, or anything in it, may be a path: only its user could know."""
    return any(mark in text for mark in ("/", "\\", "~", ".."))


def _may_move(key: str) -> bool:
    return key in PLACES and role_of(key).resumable


def with_typed(record: dict[str, Any], given: Vouched) -> dict[str, Any]:
    """Return a configuration's plain values with this command's paths: where the data are now."""
    changed = dict(record)
    for key, value in given.typed.items():
        group, _, name = key.partition(".")
        if _may_move(key) and isinstance(changed.get(group), Mapping):
            changed[group] = {**changed[group], name: value}
    return changed


def check_vouched(named: Mapping[str, Any], given: Vouched) -> None:
    """Raise BadInput unless the command vouches for each name in a record, and for no other."""
    for key, name in given.typed.items():
        if _may_move(key):
            continue  # `with_typed` has put it there
        if key not in named:
            raise BadInput(f"{key}={printable(name)}: the run has no {key}; leave it out")
        if named[key] != name:
            made = f"the run was made with {key}={printable(named[key])}"
            raise BadInput(f"{key}={printable(name)}: {made}")
    unknown = [
        (key, name)
        for key, name in named.items()
        if key not in given.typed and (key, str(name)) not in given.files
        if not (key in _CODE_KEYS and name.startswith(_OWN))
    ]
    if unknown:
        key, name = unknown[0]
        why = f"{assignment(key, name)}: the run's record names this path"
        if key in _CODE_KEYS:
            why = f"{key}: the run's record names code"
        add = shlex.join(assignment(*one) for one in unknown)
        raise Untrusted(
            f"{why}. mprun uses recorded code and paths only if the command names them, too; if "
            f"you trust them, add {add}"
        )


def say_own(record: Mapping[str, Any], given: Vouched) -> None:
    """Say once, in one line, what lies outside of the run without being named by this line."""
    own = [
        f"{assignment(key, name)} (--config-dir)"
        for key, name in outside(record).items()
        if key not in given.typed and (key, str(name)) in given.files
    ]
    for key in PLACES:
        group, _, name = key.partition(".")
        if (unset := FIELDS[key][0].metadata["unset"]) and record[group].get(name, "") is None:
            own.append(f"{key}=null ({unset})")
    if own:
        _print_once(f"mprun: outside of the run, by your own defaults: {', '.join(own)}")


@cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)


def check_own_code(config: RunConfig) -> Iterator[str]:
    """Check how a `custom` factory is named, and its arguments; yield the errors."""
    for group in ("data", "model"):
        node: Any = getattr(config, group)
        if not node.component.own:
            continue
        check_form(f"{group}.factory", node.factory)
        for name, value in node.options.items():
            if not name.isidentifier() or not _is_plain(value):
                must = "must be the name of an argument, with a number, text, list or mapping"
                yield f"{group}.options.{name}={printable(value)}: {must}"
    model: Any = config.model
    if model.component.own:
        if model.task not in _TASKS:
            if ":" not in model.task:
                must = f"must be one of {', '.join(_TASKS)}, or of the form package.module:Class"
                yield f"model.task={printable(model.task)}: {must}"
            check_form("model.task", model.task)
        for key in ("label_smoothing", "aux_weight"):
            if "num_classes" not in kind_of(model).sizes and getattr(model, key):
                yield f"model.{key}={getattr(model, key):g}: must be 0 for model.task={model.task}"


def as_overrides(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the code and the paths of a configuration, as a continuation has to name them."""
    return tuple(assignment(key, value) for key, value in outside(record).items())


def _is_plain(value: object) -> bool:
    """Return whether a record can hold it and return it unchanged."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _in_files(config_dir: str) -> Iterator[tuple[str, str]]:
    own = folders(config_dir)[-1]
    for group in ("data", "model", "experiment"):
        for path in (own / group).rglob("*.yaml"):
            # A run directory above it, as written or after following its links.
            above = {*path.absolute().parents, *path.resolve().parents}
            if any((folder / "run.json").exists() for folder in above):
                continue
            content = mapping_in(path)
            for key, value in flat(content if group == "experiment" else {group: content}).items():
                if isinstance(value, str) and is_outside(f"{key}={value}"):
                    yield key, value

"""The user's functions that a command may call: those that it names itself.

`data.factory`, `model.factory` and a user's `model.task` are code. They count on this command's
line, or in an option file of the groups data, model and experiment of the user's `--config-dir`
that is in no run directory. Anybody may have written the record of a run: a name in it is compared
with those, and never imported by itself. mprun.models and mprun.tasks need no naming.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mprun.config.components import TASKS
from mprun.config.keys import flat
from mprun.config.option_files import folders, mapping_in
from mprun.config.overrides import parse_overrides, printable
from mprun.config.registry import kind_of
from mprun.config.schema import RunConfig
from mprun.errors import BadInput

FACTORY_KEYS = ("data.factory", "model.factory")
_CODE_KEYS = (*FACTORY_KEYS, "model.task")
_TASKS = [name for name, task in TASKS.items() if task.of_own_networks]
_OWN = ("mprun.models.", "mprun.tasks.")


@dataclass(frozen=True, slots=True)
class Vouched:
    """Names that this command vouches for: by key on its line, (key, name) in option files."""

    typed: Mapping[str, str] = field(default_factory=dict)
    files: frozenset[tuple[str, str]] = frozenset()


NOTHING = Vouched()


def is_factory(override: str) -> bool:
    """Return whether an override names code: a factory, or a task that is not mprun's."""
    key, _, value = override.lstrip("+").partition("=")
    return _is_code(key, value)


def _is_code(key: str, value: object) -> bool:
    return key in FACTORY_KEYS or (key in _CODE_KEYS and ":" in str(value))


def vouched(overrides: Iterable[str], config_dir: str | None = None) -> Vouched:
    """Return the names that a command line with these overrides and `--config-dir` vouches for.

    It raises BadInput for a factory that is not of the form key=value or has several values.
    """
    typed = {}
    for override in parse_overrides(filter(is_factory, overrides)):
        if override.is_sweep_override():
            raise BadInput(f"{override.input_line}: one value; only a sweep (-m) takes several")
        name = str(override.value())
        check_form(override.key_or_group, name)
        typed[override.key_or_group] = name
    return Vouched(typed, frozenset() if config_dir is None else frozenset(_in_files(config_dir)))


def check_form(key: str, name: object) -> None:
    """Raise BadInput unless `name` is of the form package.module:function."""
    text = name if isinstance(name, str) else ""
    module, colon, function = text.partition(":")
    parts = [*module.split("."), function]
    if not colon or not all(part.isidentifier() for part in parts):
        raise BadInput(f"{key}={printable(name)}: must be of the form package.module:function")


def recorded_factories(record: Mapping[str, Any]) -> dict[str, str]:
    """Return key -> factory in a configuration's plain values; BadInput for a bad form."""
    found = {}
    for key in _CODE_KEYS:
        group_name, _, name = key.partition(".")
        group = record.get(group_name)
        if isinstance(group, Mapping) and name in group and _is_code(key, group[name]):
            check_form(key, group[name])
            found[key] = group[name]
    return found


def check_vouched(named: Mapping[str, str], given: Vouched) -> None:
    """Raise BadInput unless the command vouches for each name in a record, and for no other."""
    for key, name in given.typed.items():
        if key not in named:
            raise BadInput(f"{key}={printable(name)}: the run has no {key}; leave it out")
        if named[key] != name:
            made = f"the run was made with {key}={printable(named[key])}"
            raise BadInput(f"{key}={printable(name)}: {made}")
    unknown = [
        f"{key}={printable(name)}"
        for key, name in named.items()
        if key not in given.typed and (key, name) not in given.files and not name.startswith(_OWN)
    ]
    if unknown:
        why = "the run's record names code, which runs only if you name it too"
        key = unknown[0].partition("=")[0]
        raise BadInput(f"{key}: {why}; if it is yours, add {' '.join(unknown)}")


def check_own_code(config: RunConfig) -> Iterator[str]:
    """Check how a `custom` factory is named, and its arguments; yield the errors."""
    groups: tuple[tuple[str, Any], ...] = (("data", config.data), ("model", config.model))
    for group, node in groups:
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
    """Return the factories of a configuration as a user would type them."""
    return tuple(f"{key}={name}" for key, name in recorded_factories(record).items())


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
                if key in _CODE_KEYS and isinstance(value, str) and _is_code(key, value):
                    yield key, value

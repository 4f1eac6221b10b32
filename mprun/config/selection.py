"""A configuration from the choices of a command line, without the cost of Hydra's own node.

Hydra's defaults list says which option files count, in which order and where. The files are read
once per process and merged as plain values; OmegaConf checks the result against the schema, once.
Hydra's `compose` takes seven times as long, mostly for its own configuration. Unusual input raises:
then `mprun.config.compose` calls all of Hydra, whose answer and errors count.
"""

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import InputDefault
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from mprun.config.components import COMPONENTS
from mprun.config.fields import RENAMED, nearest
from mprun.config.keys import FIELDS, wanted
from mprun.config.overrides import FREE_MAPPINGS
from mprun.config.schema import RunConfig
from mprun.errors import BadInput

SCHEMAS: dict[str, type] = {"run_schema": RunConfig} | {
    f"schema/{group}/{name}": component.config
    for group, (components, _) in COMPONENTS.items()
    for name, component in components.items()
}
_NO_PACKAGE: dict[str, str | None] = {"package": None}


class Unusual(HydraException):
    """Input that only Hydra can compose, or refuse."""


@dataclass(frozen=True, slots=True)
class _File:
    """An option file: its values, the package it names, its defaults list; `stamp`: its version."""

    stamp: tuple[int, int]
    values: dict[str, Any]
    header: dict[str, str | None]
    defaults: list[InputDefault]


_read: dict[str, _File] = {}


class OptionFolders(ConfigRepository):
    """The option files of some folders, in the form that Hydra's defaults list needs."""

    def __init__(self, folders: list[str]) -> None:
        self.folders = folders
        self.sources = []

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return an option's defaults and whether it has other values, for the defaults list."""
        if not self.config_exists(config_path):
            return None
        file = _File((0, 0), {"": 0}, _NO_PACKAGE, [])  # a schema's
        if self.schema(config_path) is None:
            file = self.file(config_path)
        config = OmegaConf.create({"": 0} if file.values else {})
        return ConfigResult("mprun", "file://", config, file.header, file.defaults)

    def file(self, config_path: str) -> _File:
        """Return an option's file, read again only if it has changed."""
        path = self.path(config_path)
        if path is None:
            raise Unusual(f"{config_path}: no such option")
        status = os.stat(path)
        stamp = status.st_mtime_ns, status.st_size
        known = _read.get(path)
        if known is None or known.stamp != stamp:
            text, values = _content(path)
            defaults = ListConfig(_defaults_in(path, values.pop("defaults", [])))
            header = _NO_PACKAGE | ConfigSource._get_header_dict(text[:512])
            known = _File(stamp, values, header, self._create_defaults_list(config_path, defaults))
            _read[path] = known
        return known

    def schema(self, config_path: str) -> type | None:
        """Return the class that a defaults list names, None for a file."""
        return None if self.path(config_path) else SCHEMAS.get(config_path)

    def group_exists(self, config_path: str) -> bool:
        return any(os.path.isdir(os.path.join(folder, config_path)) for folder in self.folders)

    def config_exists(self, config_path: str) -> bool:
        return config_path in SCHEMAS or self.path(config_path) is not None

    def path(self, config_path: str) -> str | None:
        paths = (os.path.join(folder, f"{config_path}.yaml") for folder in self.folders)
        return next((path for path in paths if os.path.isfile(path)), None)

    def blamed(self, config_path: str, error: OmegaConfBaseException) -> BadInput:
        """Return the error of an option's values in one line with file, key and what is wrong."""
        key = str(error.full_key or "").partition("[")[0]
        reason = f"must be {wanted(key)}" if key in FIELDS else "does not fit the keys"
        if isinstance(error, ConfigKeyError):
            group, dot, name = key.rpartition(".")
            beside = (
                one.removeprefix(group + dot) for one in FIELDS if one.startswith(group + dot)
            )
            hint = f"; {RENAMED[key]}" if key in RENAMED else nearest(name, beside)
            reason = f"unknown key{hint}"
            if key == config_path.partition("/")[0]:  # experiment: all of its keys are elsewhere
                reason = "its keys have no place; begin the file with '# @package _global_'"
        return BadInput(f"{self.path(config_path)}: {f'{key}: ' if key else ''}{reason}")


def _content(path: str) -> tuple[str, dict[str, Any]]:
    """Read an option file: its text, and its values by key. Raises BadInput that names the file."""
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
        values = yaml.load(text, Loader=_loader()) or {}
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise BadInput(f"{path}: {where}{reason}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise BadInput(f"{path}: must map keys, which are text, to values")
    return text, values


def _defaults_in(path: str, entries: Any) -> list[Any]:
    """Return an option file's defaults list; raise BadInput for one of another form."""
    for entry in entries if isinstance(entries, list) else [None]:
        options: list[Any] = [entry]
        if isinstance(entry, dict) and len(entry) == 1:
            options = [option for option in entry.values() if option is not None]
        if not all(isinstance(option, str) for option in options):
            raise BadInput(f"{path}: defaults: must be a list of OPTION and GROUP: OPTION")
    return entries


def _not_a_group(values: dict[str, Any]) -> str:
    """Return the first key of an option file whose value stands in place of a group of keys."""
    groups = {*FREE_MAPPINGS, *(key.rpartition(".")[0] for key in FIELDS)}
    return next((k for k, one in _leaves(values) if k in groups and one != {}), "")


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of all values that are no mapping, or an empty one."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@dataclass(frozen=True, slots=True)
class _Base:
    """The configuration of some choices of options, before any single value is set.

    pickled: OmegaConf takes 12 ms to build it, 2 ms to read it from bytes. stamps: by option file.
    """

    pickled: bytes
    choices: dict[str, Any]
    stamps: dict[str, tuple[int, int]]


_bases: dict[tuple[str, ...], _Base] = {}


def select(parsed: list[Override], folders: list[str]) -> tuple[DictConfig, dict[str, Any]]:
    """Compose the configuration that Hydra would, and name the chosen option of each group.

    parsed: command-line overrides as Hydra takes them. folders: of option files, the first counts.
    It raises the errors of Hydra or OmegaConf, or `Unusual`.
    """
    options = OptionFolders(folders)
    chosen: list[Override] = []
    values: list[Override] = []
    for override in parsed:
        value, of_group = override.value(), options.group_exists(override.key_or_group)
        if of_group and isinstance(value, list):
            raise Unusual(f"{override.input_line}: a list of options")
        (chosen if of_group and not isinstance(value, dict) else values).append(override)
    key = (*folders, "", *(str(override.input_line) for override in chosen))
    base = _bases.get(key)
    if base is None or any(options.file(name).stamp != old for name, old in base.stamps.items()):
        base = _bases[key] = _base(options, chosen)
    composed = pickle.loads(base.pickled)
    ConfigLoaderImpl._apply_overrides_to_config(values, composed)
    return composed, dict(base.choices)


def _base(options: OptionFolders, chosen: list[Override]) -> _Base:
    try:
        found = create_defaults_list(
            options, "config", chosen, prepend_hydra=False, skip_missing=False
        )
    except RecursionError:
        given = " ".join(str(override.input_line) for override in chosen)
        raise BadInput(f"{given}: the defaults of an option's file lead back to it") from None
    schemas: dict[str, Any] = {}
    values: dict[str, Any] = {}
    stamps, files = {}, {}
    for default in found.defaults:
        package, name = default.package or "", str(default.config_path)
        schema = options.schema(name)
        if schema is not None:
            if package in schemas or values.get(package):
                raise Unusual(f"{package}: a second schema, or one behind its values")
            schemas[package] = schema
            continue
        file = options.file(name)
        stamps[name] = file.stamp
        files[name] = file.values
        for part in reversed(package.split(".") if package else []):
            files[name] = {part: files[name]}
        if key := _not_a_group(files[name]):
            raise BadInput(f"{options.path(name)}: {key}: must be {wanted(key)}")
        _merge(values, files[name])
    for group in ("model", "data"):
        path = options.path(f"{group}/{found.overrides.known_choices.get(group)}")
        if path and group not in schemas:
            needs = f"its defaults need /schema/{group}/NAME@_here_"
            raise BadInput(f"{path}: names nothing to build; {needs}")
    values.pop("hydra", None)  # from config.yaml, for those who compose it with Hydra
    pickled = _pickled_schema(schemas.pop(""), tuple(sorted(schemas.items())))
    composed = pickle.loads(pickled)
    try:
        composed.merge_with(values)
    except OmegaConfBaseException:
        for name, own in files.items():
            try:
                pickle.loads(pickled).merge_with({k: own[k] for k in own if k != "hydra"})
            except OmegaConfBaseException as error:
                raise options.blamed(name, error) from None
        raise
    OmegaConf.set_struct(composed, True)
    return _Base(pickle.dumps(composed), found.overrides.known_choices, stamps)


@cache
def _pickled_schema(root: type, parts: tuple[tuple[str, type], ...]) -> bytes:
    schema = OmegaConf.structured(root)
    for package, part in parts:
        schema[package] = OmegaConf.structured(part)
    return pickle.dumps(schema)


def _merge(values: dict[str, Any], further: dict[str, Any]) -> None:
    for key, value in further.items():
        if isinstance(value, dict) != isinstance(values.get(key, value), dict):
            raise Unusual(f"{key}: a mapping in place of a value, or a value in place of one")
        if isinstance(value, dict):
            _merge(values.setdefault(key, {}), value)
        else:
            values[key] = value


@cache
def _loader() -> Any:
    """Return OmegaConf's YAML loader on libyaml's parser, which takes a tenth of the time."""
    omegaconf = get_yaml_loader()
    fast = getattr(yaml, "CSafeLoader", None)
    return omegaconf if fast is None else type("Loader", (fast, omegaconf), {})

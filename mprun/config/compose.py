"""From command-line overrides to a checked `RunConfig`, or one line with the error.

Hydra composes; this module turns each of its (multi-line, exit 1) errors into a `BadInput` that
names the key, the value and what is allowed. It imports no torch.
"""

import logging
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)
from yaml import YAMLError

from mprun.config import switches, trust
from mprun.config.broken_files import files_of
from mprun.config.components import COMPONENTS
from mprun.config.keys import FIELDS, current, role_of, wanted
from mprun.config.option_files import conf_dir, folders, modes
from mprun.config.overrides import (
    MAPPING,
    as_hydra_takes,
    line_of,
    mapping_of,
    parse_overrides,
    printable,
)
from mprun.config.registry import FOLDERS, kind_of
from mprun.config.rules import check
from mprun.config.schema import RunConfig
from mprun.errors import BadInput
from mprun.record.keys import flat
from mprun.spelling import did_you_mean, key_called, must_be, nearest

SCHEMAS: dict[str, type] = {"run_schema": RunConfig} | {
    f"schema/{group}/{name}": component.config
    for group, (components, _) in COMPONENTS.items()
    for name, component in components.items()
}
# Errors of Hydra and OmegaConf for overrides that do not compose (OSError: names too long).
_OF_PYTHON = (
    *(AssertionError, AttributeError, LookupError, ValueError, TypeError),
    *(OSError, RecursionError),
)
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, *_OF_PYTHON)


def loader() -> ConfigLoader:
    return GlobalHydra.instance().config_loader()


def group_options(group: str) -> list[str]:
    """Return the options of a group, in alphabetical order."""
    return loader().get_group_options(group, ObjectType.CONFIG)


def diagnose(parsed: list[Override], error: Exception, places: list[str]) -> str:
    """Return one line with key, value and what is allowed; needs a Hydra instance."""
    groups = set(loader().list_groups("")) - {"hydra", "schema"}
    choices = [override for override in parsed if override.key_or_group in groups]
    for override in choices:
        key, value = override.key_or_group, override.value()
        if value not in (options := group_options(key)):
            shown = "null" if value is None else printable(value)
            return f"{key}={shown}: {must_be(str(value), options, key)}"
    if len(choices) == len(parsed):  # no value of the line
        return _in_file(error, choices, groups, places)
    try:
        known = _keys(OmegaConf.to_container(_composed(choices)[0]))
    except COMPOSITION_ERRORS as group_error:
        return _in_file(group_error, choices, groups, places)
    # Set mandatory keys, so that the error found is that of the checked line.
    factories = [f"{key}=package.module:function" for key in trust.FACTORY_KEYS if key in known]
    chosen = choices + parse_overrides(factories)
    values = (override for override in parsed if override.key_or_group not in groups)
    wrong = (_wrong_value(override, chosen, known, groups) for override in values)
    return next(filter(None, wrong), None) or _in_file(error, choices, groups, places)


# Lines that choose options -> what Hydra composed of them and the choices, pickled.
Kept = dict[tuple[str, ...], bytes]


def _composed(
    overrides: list[Override], kept: Kept | None = None
) -> tuple[DictConfig, dict[str, Any]]:
    """Compose, and name the chosen option of each group.

    Hydra composes options, once for all calls with one `kept`; values are then set as it sets them.
    """
    groups = loader().list_groups("")
    chosen: list[Override] = []
    values: list[Override] = []
    for one in as_hydra_takes(overrides):
        if isinstance(one.value(), list) and one.key_or_group in groups:
            raise TypeError(f"{one.key_or_group}: only one option of a group is allowed")
        is_value = one.key_or_group not in groups or isinstance(one.value(), dict)
        plain = one.package is None and not (one.is_add() or one.is_delete())
        (values if is_value and plain else chosen).append(one)
    lines = tuple(map(line_of, chosen))
    if kept is None:
        composed, choices = _by_hydra(lines)
    else:
        if lines not in kept:
            kept[lines] = pickle.dumps(_by_hydra(lines))
        composed, choices = pickle.loads(kept[lines])
    for one in values:
        key, force = one.key_or_group, one.is_force_add()
        OmegaConf.update(composed, key, one.value(), merge=True, force_add=force)
    return composed, choices


def _by_hydra(lines: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
    composed = compose("config", overrides=[*lines], return_hydra_config=True)
    choices: Any = OmegaConf.to_container(composed.hydra.runtime.choices)
    with open_dict(composed):
        del composed["hydra"]
    for group in ("model", "data"):
        if OmegaConf.get_type(composed, group) not in SCHEMAS.values():
            raise TypeError(f"{group}: no schema")
    return composed, {key: one for key, one in choices.items() if not key.startswith("hydra")}


def _wrong_value(
    override: Override, chosen: list[Override], known: set[str], groups: set[str]
) -> str | None:
    """Return the error in an override's key, or in its value with the chosen options."""
    key, line = override.key_or_group, line_of(override)
    mapping = mapping_of(key)
    if mapping is not None:
        line = f"++{line.lstrip('+')}"
    if (mapping or key) not in known:
        if key in trust.FACTORY_KEYS or mapping not in (None, MAPPING):
            return f"{printable(key)}: unknown key; {key.partition('.')[0]}=custom has it"
        called = key_called(key, known | groups)
        hint = f"; {did_you_mean([called])}" if called else nearest(key, known | groups)
        return f"{printable(key)}: unknown key{hint}"
    try:
        OmegaConf.to_object(_composed([*chosen, override])[0])
    except COMPOSITION_ERRORS:
        if key == MAPPING:
            return f"{printable(line.lstrip('+'))}: must map module-name patterns to dtypes"
        if mapping is not None:
            return f"{printable(line.lstrip('+'))}: must be {mapping}.NAME=VALUE"
        return f"{printable(line)}: {f'must be {wanted(key)}' if key in FIELDS else _DO_NOT_FIT}"
    return None


def _keys(tree: Any, prefix: str = "") -> set[str]:
    if not isinstance(tree, dict):
        return set()
    below = [_keys(value, f"{prefix}{key}.") for key, value in tree.items()]
    return {prefix + key for key in tree}.union(*below)


_DO_NOT_FIT = "the keys of the chosen option files do not take it"


def _in_file(error: Exception, chosen: list[Override], groups: set[str], places: list[str]) -> str:
    """Return an error in an option file as a line with the file and what is allowed."""
    files = files_of(chosen, places)
    if isinstance(error, RecursionError):
        given = " ".join(map(line_of, chosen))
        return f"{given}: the defaults of an option's file lead back to it"
    if isinstance(error, InterpolationResolutionError | GrammarParseError):
        key = error.full_key or "an option file"
        return f"{key}: its ${{...}} has no value; write the key of one, or the value"
    line = " ".join(str(error).split())
    found = re.match(r"In '(.+?)': (?:\w+ raised while composing config: )?(.+)", line)
    if found is None:
        if twice := re.match(r"Multiple values for (\S+?)\.", line):
            again = f"the later one has to say 'override /{twice[1]}: OPTION'"
            return f"{twice[1]}: chosen in two option files; {again}"
        if unknown := re.match("Key '(.+?)' not in", line):
            return f"{unknown[1]}: unknown key in an option file{nearest(unknown[1], groups)}"
        return "the chosen option files do not fit together; try them one by one"
    option, what = found[1], found[2].rstrip(".")
    if override := re.match("Could not override '(.+?)'", what):
        what = f"override {override[1]}: no such group{nearest(override[1], groups)}"
    elif unknown := re.match("Could not (?:find|load) '(.+)/(.+?)'", what):
        group, name = unknown.groups()
        what = f"{group}: {name}: {must_be(name, group_options(group), group)}"
        # Hydra blames its own file where the option of another one overrides this group.
        option = next((o for o, file in files.items() if f"{group}/{name}" in file.named), option)
    else:  # of OmegaConf's, whose own error names the key
        what = "its keys or its defaults do not fit"
        what = files[option].wrong_key(error.__context__) if option in files else what
    return f"{files[option].path if option in files else option}: {what}"


@dataclass(frozen=True, slots=True)
class Composed:
    """A checked configuration, the chosen options and the given overrides.

    mode: the mode as the record names it (`Mode.label`). usual_scaler: the mode's default one.
    """

    config: RunConfig
    choices: dict[str, str | None]
    overrides: tuple[str, ...]
    mode: str
    usual_scaler: str

    def as_dict(self) -> dict[str, Any]:
        """Return the resolved configuration as plain values (the content of config.yaml)."""
        return asdict(self.config)

    def place(self, swept: Iterable[str] = (), named: tuple[str, ...] | None = None) -> Path:
        """Return the directory that a run of it has by default, without a number.

        named: the overrides that its name tells; None: all that were given. swept: see `run_name`.
        """
        from mprun.record.run_directory import run_name  # here: --cfg names no run

        told = self.overrides if named is None else named
        words = run_name(self.as_dict(), self.choices, told, swept, told=lambda k: role_of(k).told)
        return Path(self.config.output_root, *words)


def compose_config(
    overrides: Iterable[str],
    config_dir: str | None = None,
    *,
    files: bool = True,
    kept: Kept | None = None,
) -> Composed:
    """Compose and check one run's configuration.

    `config_dir`: another folder, with the user's options (Hydra's `--config-dir`). files: also
    check that the folder of the data exists. kept: {} for the runs of a sweep, which then compose
    equal options once. It raises BadInput; it touches no file.
    """
    overrides = tuple(overrides)
    parsed = parse_overrides(overrides)
    for override in parsed:
        if override.is_sweep_override():
            raise BadInput(f"{override.input_line}: several values; add -m to sweep over them")
    with _session(parsed, config_dir):
        composed, choices = _composed(parsed, kept)
        config = _built(composed, choices)
    given = {override.key_or_group for override in parsed} & {"train.steps", "train.epochs"}
    if given == {"train.epochs"}:  # a length on the line replaces the other kind from a file
        config.train.steps = None
    elif given == {"train.steps"}:
        config.train.epochs = None
    _fill_compare(config)
    switches.resolve(config, modes(config_dir))
    check(config, files=files)
    if (baseline := config.compare.baseline) not in (known := modes(config_dir)):
        raise BadInput(f"compare.baseline={baseline}: {must_be(baseline, known, 'precision')}")
    mode = known[config.precision.name]
    later = map(" ".join, switches.told(config.precision))
    label = ", ".join([mode.label(config.precision), *later])
    return Composed(config, choices, overrides, label, mode.scaler)


def option_values(group: str, option: str, config_dir: str | None = None) -> dict[str, Any]:
    """Return key -> value of a group with one of its options, by dotted key below the group.

    Nothing is checked or interpolated; a value that the user must set is "???".
    """
    chosen = parse_overrides([f"{group}={option}"])
    with _session(chosen, config_dir):
        values: Any = OmegaConf.to_container(_composed(chosen)[0])
    return flat(values[group]) if group in values else {}


@contextmanager
def _session(parsed: list[Override], config_dir: str | None) -> Iterator[None]:
    """Enter Hydra's compose API for some overrides; BadInput has what is wrong with them."""
    places = [os.path.abspath(folder) for folder in folders(config_dir)]
    with hydra_session(config_dir):
        try:
            yield
        except COMPOSITION_ERRORS as error:
            raise BadInput(diagnose(parsed, error, places)) from None


def _built(composed: DictConfig, choices: dict[str, Any]) -> RunConfig:
    """Return the configuration as the schema's classes. Raises BadInput, or COMPOSITION_ERRORS."""
    _factories_given(composed)
    for group in ("precision", "scaler"):
        composed[group].name = choices[group]  # an option has the name of its file
    config: Any = OmegaConf.to_object(composed)
    return config


def _factories_given(composed: DictConfig) -> None:
    model, data = composed.model, composed.data
    nodes = {key: composed[key.partition(".")[0]] for key in trust.FACTORY_KEYS}
    if missing := [
        key
        for key, node in nodes.items()
        if isinstance(node, DictConfig) and OmegaConf.is_missing(node, "factory")
    ]:
        wanted = " ".join(f"{key}=package.module:function" for key in missing)
        chosen = " ".join(f"{key.partition('.')[0]}=custom" for key in missing)
        raise BadInput(f"{chosen}: needs {wanted} (mprun --help data.factory)")
    if not (isinstance(model, DictConfig) and isinstance(data, DictConfig)):
        return
    plain: Any = OmegaConf.to_container(model)
    of_data = plain.get("image_size") == "${data.image_size}"
    if of_data and "factory" in data and data.image_size is None:
        raise BadInput(f"data.image_size=null: model={model.name} needs the size of the images")


def _fill_compare(config: RunConfig) -> None:
    """Put metric and margin into the record: a later default must not move a verdict.

    The margin of a metric that a user's class alone declares is recorded with it (`as_record`).
    """
    kind = kind_of(config.model)
    if config.compare.metric is None:
        config.compare.metric = kind.judged
    if config.compare.margin is None and (metric := kind.metric(config.compare.metric)):
        config.compare.margin = metric.margin_on(config.data.name)


def only_in_script(record: Mapping[str, Any]) -> str:
    """Say who can take the steps of a script's run, and how."""
    return (
        f"from a script ({record['script'].get('file')}), and only that can take its steps; "
        "there: mprun.probe(step, optimizer), mprun.explain(step, optimizer)"
    )


def config_from_record(record: dict, given: trust.Vouched = trust.NOTHING) -> RunConfig:
    """Rebuild a RunConfig from the plain values of a run directory's config.yaml.

    The checks are those of the command line. It raises BadInput for code and paths of the record
    that `given`, from this command's line, does not name.
    """
    if "script" in record:
        raise BadInput(f"config.yaml: {only_in_script(record)}")
    record = trust.with_typed(current(record), given)
    trust.check_vouched(trust.outside(record), given)
    _no_interpolation(record)
    try:
        root = OmegaConf.structured(RunConfig)
        for group, (components, key) in COMPONENTS.items():
            name = record[group][key]
            if group != "precision" or name in components:  # most modes are files alone
                root[group] = OmegaConf.structured(components[name].config)
        config: Any = OmegaConf.to_object(OmegaConf.merge(root, record))
    except (KeyError, TypeError, AttributeError, ValueError, OmegaConfBaseException) as error:
        key = str(getattr(error, "full_key", None) or "")
        if isinstance(error, ConfigKeyError):
            raise BadInput(f"config.yaml: {key}: this version of mprun has no such key") from None
        where, reason = f"config.yaml: {key}".rstrip(": "), str(error).splitlines()[0]
        raise BadInput(f"{where} does not fit this version of mprun: {reason}") from None
    check(config)
    trust.say_own(record, given)
    return config


def _no_interpolation(value: object, key: str = "config.yaml") -> None:
    """Refuse `${...}` in a record: it could bring in this machine's environment."""
    if isinstance(value, str) and "${" in value:
        raise BadInput(f"{key}={printable(value)}: the record of a run must not contain ${{...}}")
    items = enumerate(value) if isinstance(value, list) else ()
    for name, item in value.items() if isinstance(value, dict) else items:
        _no_interpolation(name)
        _no_interpolation(item, printable(name))


def prepare_hydra() -> None:
    """Let Hydra know the schemas, and all folders of option files."""
    Plugins.instance().register(_Folders)
    Plugins.instance().register(_Schemas)


class _Schemas(ConfigSource):
    """A plugin with the schemas as Hydra's configs, each built when a defaults list names it.

    In Hydra's ConfigStore all would be built and copied for each composition, which takes as long
    as the rest. Nothing is listed: they stay out of the options that a user sees.
    """

    @staticmethod
    def scheme() -> str:
        return "schemas"

    def load_config(self, config_path: str) -> ConfigResult:
        schema = OmegaConf.structured(SCHEMAS[config_path])
        return ConfigResult(self.provider, self.path, schema, {"package": None})

    def is_config(self, config_path: str) -> bool:
        return config_path in SCHEMAS

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class _Folders(SearchPathPlugin):
    """A plugin that adds the folders of other packages and the user; Hydra reads them at start."""

    folders: Sequence[Path] = FOLDERS

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.folders:
            search_path.append("command-line", f"file://{folder.resolve()}")
        search_path.append("mprun", "schemas://")


@contextmanager
def hydra_session(config_dir: str | None) -> Iterator[None]:
    """Enter Hydra's compose API with the schemas registered; leave nothing behind."""
    _Folders.folders = folders(config_dir)[1:]
    logger = logging.getLogger("hydra")
    level = logger.level
    logger.setLevel(logging.ERROR)
    GlobalHydra.instance().clear()
    prepare_hydra()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().clear()
        _Folders.folders = FOLDERS
        logger.setLevel(level)

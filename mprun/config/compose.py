"""From command-line overrides to a checked `RunConfig`, or one line that says what is wrong.

Hydra composes; this module turns each of its (multi-line, exit 1) errors into a `BadInput`
that names the key, the value and what is allowed. Imports no torch.
"""

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config.check import check
from mprun.config.field_rules import nearest
from mprun.config.schema import RunConfig, register_schemas
from mprun.errors import BadInput

# Keys that hold free-form mappings: an entry is added without Hydra's `+`.
_MAPPINGS = ("precision.overrides",)


@dataclass(frozen=True, slots=True)
class Composed:
    """A checked configuration with the names of the chosen options and the overrides given."""

    config: RunConfig
    choices: dict[str, str | None]
    overrides: tuple[str, ...]

    def as_dict(self) -> dict:
        """The resolved configuration as plain values (what config.yaml holds)."""
        return asdict(self.config)


def conf_dir() -> Path:
    """The folder of the YAML files: inside an installed package, or of the checkout."""
    inside = Path(__file__).resolve().parents[1] / "conf"
    return inside if inside.is_dir() else inside.parents[1] / "conf"


def compose_config(overrides: Iterable[str], config_dir: str | None = None) -> Composed:
    """Compose and check one run's configuration.

    `config_dir`: a further folder of the user's own options (Hydra's `--config-dir`).
    Raises BadInput with a one-line message; touches no file.
    """
    overrides = tuple(overrides)
    parsed = parse_overrides(overrides)
    for override in parsed:
        _refuse_hydra_keys(override)
        if override.is_sweep_override():
            raise BadInput(f"{override.input_line}: several values; add -m to sweep over them")
    with hydra_session(config_dir):
        try:
            composed = compose("config", overrides=_free_mappings(overrides),
                               return_hydra_config=True)  # fmt: skip
            choices = dict(OmegaConf.to_container(composed.hydra.runtime.choices))
            OmegaConf.set_struct(composed, False)
            del composed["hydra"]
            config = OmegaConf.to_object(composed)
        except (HydraException, OmegaConfBaseException, AttributeError) as error:
            raise BadInput(_diagnose(parsed, error)) from None
    choices = {key: value for key, value in choices.items() if not key.startswith("hydra")}
    check(config)
    return Composed(config, choices, overrides)


def config_from_record(record: dict) -> RunConfig:
    """Rebuild a RunConfig from the plain values of a run directory's config.yaml.

    Reads data, never code: the same schema and the same checks as for the command line.
    """
    from mprun.config.schema import DATA, MODELS

    try:
        root = OmegaConf.structured(RunConfig)
        root.model = OmegaConf.structured(MODELS[record["model"]["name"]])
        root.data = OmegaConf.structured(DATA[record["data"]["name"]])
        config = OmegaConf.to_object(OmegaConf.merge(root, record))
    except (KeyError, TypeError, AttributeError, ValueError, OmegaConfBaseException) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"config.yaml does not fit this version of mprun: {reason}") from None
    check(config)
    return config


def parse_overrides(overrides: Iterable[str]) -> list[Override]:
    """Hydra's parse of each override; BadInput names the one that is not `key=value`."""
    parser, parsed = OverridesParser.create(), []
    for text in overrides:
        try:
            parsed.extend(parser.parse_overrides([text]))
        except OverrideParseException as error:
            reason = [line for line in str(error).splitlines() if line.strip()][1:2]
            detail = f" ({reason[0].strip()})" if reason else ""
            raise BadInput(f"'{_printable(text)}': not of the form key=value{detail}") from None
    return parsed


class hydra_session:
    """Hydra's compose API with the schemas registered, and nothing left behind."""

    def __init__(self, config_dir: str | None):
        self.config_dir = config_dir

    def __enter__(self):
        logging.getLogger("hydra").setLevel(logging.ERROR)
        register_schemas(ConfigStore.instance())
        GlobalHydra.instance().clear()
        self.context = initialize_config_dir(str(conf_dir()), version_base="1.3")
        self.context.__enter__()
        if self.config_dir is not None:
            path = Path(self.config_dir)
            if not path.is_dir():
                raise BadInput(f"--config-dir {self.config_dir}: no such folder")
            search_path = loader().get_search_path()
            search_path.append("command-line", f"file://{path.resolve()}")
        return self

    def __exit__(self, *exception):
        self.context.__exit__(*exception)
        GlobalHydra.instance().clear()


def loader() -> ConfigLoader:
    """The configuration loader of the Hydra instance in use."""
    return GlobalHydra.instance().config_loader()


def _refuse_hydra_keys(override: Override) -> None:
    key = override.key_or_group
    if key.split(".")[0].split("/")[0] == "hydra":
        raise BadInput(
            f"{key}: mprun places its own output; use name=, output_root= or output_dir="
        )


def _free_mappings(overrides: Iterable[str]) -> list[str]:
    """`precision.overrides.fc=fp32` needs no `+`: the mapping is free-form."""
    return ["++" + text if text.startswith(_MAPPINGS) else text for text in overrides]


def _diagnose(parsed: list[Override], error: Exception) -> str:
    """One line for the override that made the composition fail."""
    groups = set(loader().list_groups("")) - {"hydra", "schema"}
    group_overrides = []
    for override in parsed:
        key = override.key_or_group
        if key not in groups:
            continue
        options = [o for o in loader().get_group_options(key)]
        value = override.value()
        if not isinstance(value, str | None) or (value is not None and value not in options):
            allowed = ", ".join(options) or "(none yet)"
            hint = nearest(str(value), options)
            return f"{key}={_printable(value)}: must be one of {allowed}{hint}"
        group_overrides.append(override.input_line)
    try:
        known = _keys(OmegaConf.to_container(compose("config", overrides=group_overrides)))
    except (HydraException, OmegaConfBaseException, AttributeError) as group_error:
        return _first_line(group_error)
    for override in parsed:
        key = override.key_or_group
        if key in groups or key.startswith(_MAPPINGS):
            continue
        if key not in known:
            return f"{_printable(key)}: unknown key{nearest(key, known | groups)}"
        try:
            OmegaConf.to_object(compose("config", overrides=[*group_overrides,
                                                            override.input_line]))  # fmt: skip
        except (HydraException, OmegaConfBaseException, AttributeError) as own:
            return f"{_printable(override.input_line)}: {_first_line(own.__cause__ or own)}"
    return _first_line(error)


def _keys(tree: dict, prefix: str = "") -> set[str]:
    found = set()
    for key, value in tree.items():
        found.add(prefix + key)
        if isinstance(value, dict):
            found |= _keys(value, f"{prefix}{key}.")
    return found


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def _printable(value) -> str:
    """On one line whatever the value holds, and short."""
    text = "".join(c if c.isprintable() else "?" for c in str(value))
    return text if len(text) <= 80 else text[:77] + "..."

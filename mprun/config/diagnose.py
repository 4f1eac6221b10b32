"""Which override made a composition fail, said in one line."""

from collections.abc import Iterable

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config.overrides import MAPPING, mapping_of, printable
from mprun.config.rules import nearest
from mprun.config.user_code import FACTORY_KEYS

# What Hydra and OmegaConf raise for overrides that do not compose (OSError: names too long).
COMPOSITION_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    AttributeError,
    ValueError,
    TypeError,
    OSError,
    RecursionError,
)


def loader() -> ConfigLoader:
    """The configuration loader of the Hydra instance in use."""
    return GlobalHydra.instance().config_loader()


def group_options(group: str) -> list[str]:
    """The options of a group, in alphabetical order."""
    return loader().get_group_options(group, ObjectType.CONFIG)


def diagnose(parsed: list[Override], error: Exception) -> str:
    """One line that names the key, the value and what is allowed; needs a Hydra instance."""
    groups = set(loader().list_groups("")) - {"hydra", "schema"}
    chosen = []
    for override in parsed:
        key, value = override.key_or_group, override.value()
        if key not in groups:
            continue
        options = group_options(key)
        if value not in options:
            allowed = ", ".join(options) or "(none yet)"
            hint = nearest(str(value), options)
            return f"{key}={_shown(value)}: must be one of {allowed}{hint}"
        chosen.append(override.input_line)
    try:
        known = _keys(OmegaConf.to_container(compose("config", overrides=chosen)))
    except COMPOSITION_ERRORS as group_error:
        return _first_line(group_error)
    # Mandatory ones, so that what is found wrong is the line that is looked at.
    chosen += [f"{key}=package.module:function" for key in FACTORY_KEYS if key in known]
    for override in parsed:
        key, line = override.key_or_group, override.input_line
        if key in groups:
            continue
        mapping = mapping_of(key)
        if mapping is not None:
            line = f"++{line.lstrip('+')}"
        if (mapping or key) not in known:
            own = key in FACTORY_KEYS or mapping not in (None, MAPPING)
            hint = f"; {key.partition('.')[0]}=custom has it" if own else ""
            return f"{printable(key)}: unknown key{hint or _nearest_key(key, known | groups)}"
        try:
            OmegaConf.to_object(compose("config", overrides=[*chosen, line]))
        except COMPOSITION_ERRORS as own:
            if key == MAPPING:
                return f"{printable(line.lstrip('+'))}: must map module-name patterns to dtypes"
            if mapping is not None:
                return f"{printable(line.lstrip('+'))}: must be {mapping}.NAME=VALUE"
            return f"{printable(line)}: {_first_line(own.__cause__ or own)}"
    return _first_line(error)


def _shown(value: object) -> str:
    return "null" if value is None else printable(value)


def _nearest_key(key: str, known: Iterable[str]) -> str:
    """The known key with the same last part, or else the closest spelling."""
    known = sorted(known)
    same_end = [k for k in known if "." in k and k.rpartition(".")[2] == key]
    return f"; did you mean '{same_end[0]}'?" if same_end else nearest(key, known)


def _keys(tree: dict, prefix: str = "") -> set[str]:
    found = set()
    for key, value in tree.items():
        found.add(prefix + key)
        if isinstance(value, dict):
            found |= _keys(value, f"{prefix}{key}.")
    return found


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return repr(error)
    # "In 'train/mine': ConfigKeyError raised while composing config:" says what in the next line.
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]

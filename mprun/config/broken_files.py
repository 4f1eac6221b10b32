"""What is wrong with an option file that Hydra does not take: the file, the key and the reason."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from mprun.config.keys import FIELDS, wanted
from mprun.config.overrides import FREE_MAPPINGS
from mprun.errors import BadInput
from mprun.record.keys import flat
from mprun.spelling import became, nearest


@dataclass(frozen=True, slots=True)
class OptionFile:
    """A file that Hydra would read: the path, the option ("optim/sgd"), its values by key.

    named: the options of its defaults list.
    """

    path: str
    option: str
    values: dict[str, Any]
    named: tuple[str, ...]

    def wrong_key(self, error: BaseException | None) -> str:
        """Return the key that the schema does not take, by OmegaConf's error, and what it takes."""
        key = str(getattr(error, "full_key", None) or "").partition("[")[0]
        if isinstance(error, ConfigKeyError) and key == self.option.partition("/")[0]:
            # experiment: all of its keys are elsewhere
            return f"{key}: its keys have no place; begin the file with '# @package _global_'"
        if isinstance(error, ConfigKeyError):
            group, dot, name = key.rpartition(".")
            beside = (k.removeprefix(group + dot) for k in FIELDS if k.startswith(group + dot))
            hint = f"; {now}" if (now := became(key)) else nearest(name, beside)
            return f"{key}: unknown key{hint}"
        if group := self._in_place_of_a_group():
            return f"{group}: must be {wanted(group)}"
        if key in FIELDS:
            return f"{key}: must be {wanted(key)}"
        return f"{key}: its value does not fit" if key else "its keys or its defaults do not fit"

    def _in_place_of_a_group(self) -> str:
        """Return the first key whose value stands in place of a group of keys."""
        groups = {*FREE_MAPPINGS, *(key.rpartition(".")[0] for key in FIELDS)}
        below = flat(self.values, f"{self.option.rpartition('/')[0]}.").items()
        keys = (key for key, one in (*below, *flat(self.values).items()) if one != {})
        return next((key for key in keys if key in groups), "")


def files_of(chosen: Iterable[Override], folders: list[str]) -> dict[str, OptionFile]:
    """Read the files of chosen options and of those that these name, by option.

    Raises BadInput for one that no choice and no value could mend.
    """
    found: dict[str, OptionFile] = {}
    left = [f"{override.key_or_group}/{override.value()}" for override in chosen]
    while left:
        option = left.pop(0)
        paths = (os.path.join(folder, f"{option}.yaml") for folder in folders)
        path = next(filter(os.path.isfile, paths), None)
        if path is not None and option not in found:
            found[option] = _read(path, option)
            left += found[option].named
    return found


def _read(path: str, option: str) -> OptionFile:
    values: Any = None
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        if error.strerror:  # else the file holds a single value
            raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise BadInput(f"{path}: {where}{reason}") from None
    except OmegaConfBaseException:
        pass  # a key that is no text
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise BadInput(f"{path}: must be a mapping from keys (text) to values")
    group = option.rpartition("/")[0]
    try:
        named = tuple(_named(values.pop("defaults", []), group))
    except (AttributeError, TypeError, ValueError):
        reason = "must be a list of OPTION and GROUP: OPTION"
        raise BadInput(f"{path}: defaults: {reason}") from None
    own = (f"schema/{group}/", f"{group}/")
    if group in ("model", "data") and not any(one.startswith(own) for one in named):
        needs = f"its defaults need /schema/{group}/NAME@_here_"
        raise BadInput(f"{path}: does not name what to build; {needs}")
    return OptionFile(path, option, values, named)


def _named(entries: Any, group: str) -> Iterator[str]:
    """Yield the options of a defaults list that stands in a file of `group`."""
    if not isinstance(entries, list):
        raise TypeError
    for entry in entries:
        [(key, option)] = entry.items() if isinstance(entry, dict) else [("", entry)]
        if option not in (None, "_self_"):
            folder = key.removeprefix("override ").partition("@")[0] or group
            yield option.lstrip("/") if option.startswith("/") else f"{folder.lstrip('/')}/{option}"

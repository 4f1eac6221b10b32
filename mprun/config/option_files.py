"""The option files: a list of them, and the content of the files of precision modes.

They are the only list of modes and loss scalers; those of a user's `--config-dir` count like
mprun's. They are read without Hydra, so that a command that only compares runs need not import it.
"""

import os
import re
from dataclasses import asdict, dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from mprun.config.registry import FOLDERS, MODES
from mprun.config.schema import DTYPES, PrecisionConfig
from mprun.errors import BadInput, no_folder
from mprun.record.keys import flat

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time


def conf_dir() -> Path:
    """Return the folder of the YAML files: inside an installed package, or of the checkout."""
    inside = Path(__file__).resolve().parents[1] / "conf"
    return inside if inside.is_dir() else inside.parents[1] / "conf"


def folders(config_dir: str | None = None) -> list[Path]:
    """List the folders of option files: mprun's, those of other packages, the user's.

    Raises:
        BadInput: The user's is no folder.
    """
    if config_dir is None:
        return [conf_dir(), *FOLDERS]
    if not os.path.isdir(config_dir):  # Path.is_dir raises for a name that is too long
        raise BadInput(f"--config-dir {config_dir}: {no_folder(config_dir)}")
    return [conf_dir(), *FOLDERS, Path(config_dir)]


def option_files(group: str, config_dir: str | None = None) -> dict[str, Path]:
    """Return option -> file, in alphabetical order, including the user's `config_dir`."""
    found: dict[str, Path] = {}
    for folder in folders(config_dir):
        for path in (folder / group).glob("*.yaml"):
            found.setdefault(path.stem, path)  # Hydra also takes the first that it finds
    return dict(sorted(found.items()))


def named(group: str, config_dir: str | None = None) -> dict[str, str]:
    """Return option -> what it builds: its schema or the `name` set ("digits_32": "digits")."""
    found = {}
    for option, path in option_files(group, config_dir).items():
        schema = re.search(rf"/schema/{group}/(\w+)", _text_of(path))
        built: str = schema[1] if schema else option
        found[option] = mapping_in(path).get("name", built)
    return found


def values_in_files(group: str, field: str, config_dir: str | None = None) -> dict[str, Any]:
    """Return option -> the value of `field` in its file, for files that set one."""
    contents = {name: mapping_in(path) for name, path in option_files(group, config_dir).items()}
    return {name: content[field] for name, content in contents.items() if field in content}


def what_it_is(path: Path) -> str:
    """Return the first sentence of an option file's comment, which describes the option."""
    lines = [line for line in _text_of(path).splitlines() if not line.startswith("# @package")]
    comment = " ".join(line[2:] for line in takewhile(lambda line: line.startswith("# "), lines))
    # A stop within a sentence ("et al. in small") has no capital behind it.
    return re.split(r"(?<=\.)\s+(?=[A-Z\d])", comment, maxsplit=1)[0]


def mode_values(config: PrecisionConfig) -> dict[str, Any]:
    """Return the values that make a mode, by dotted key: all but those that a single run adds."""
    values = asdict(config)
    del values["name"], values["overrides"], values["switch"]
    return flat(values)


_OF_LAYERS = ("matmul.modules", "matmul.high_precision")


@dataclass(frozen=True, slots=True)
class Mode:
    """A precision mode as its file defines it; `scaler`: its default loss scaler."""

    name: str
    values: dict[str, str | None]
    scaler: str

    def label(self, config: PrecisionConfig) -> str:
        """Return the mode's name, with every override and every value that the mode does not have.

        "fp32" is a baseline; "fp32+param_dtype=fp16" is not. Layers that are chosen for products of
        which there are none, as a sweep may do for all of its arms, change nothing.
        """
        own = mode_values(config)
        changed = {k: own[k] for k, value in self.values.items() if own[k] != value}
        if own["matmul.input"] is None:
            changed = {k: v for k, v in changed.items() if k not in _OF_LAYERS}
        changed |= config.overrides
        return "+".join([self.name, *(f"{k}={value}" for k, value in changed.items())])


@cache
def modes(config_dir: str | None = None) -> dict[str, Mode]:
    """List all precision modes: FP32 first, then FP16 and BF16; less of FP32 comes first."""

    def rank(mode: Mode) -> tuple:
        half = mode.values["autocast_dtype"] or mode.values["param_dtype"]
        autocast, masters = mode.values["autocast_dtype"], mode.values["master_dtype"]
        place = DTYPES.index(half) if half in DTYPES else len(DTYPES)
        in_8_bits = any(mode.values[key] for key in ("matmul.input", "attention.format"))
        rest = autocast is not None, masters is not None, mode.values["fp32_math"], mode.name
        return in_8_bits, place, *rest

    files = option_files("precision", config_dir)
    found = sorted((_mode(name, files) for name in files), key=rank)
    return {mode.name: mode for mode in found}


def _mode(name: str, files: dict[str, Path]) -> Mode:
    """Read a mode, which may build on another one in its defaults list."""
    registered = MODES[name].config if name in MODES else PrecisionConfig
    values, scaler = mode_values(registered()), "none"
    content = mapping_in(files[name])
    for entry in content.get("defaults") or ():
        if isinstance(entry, dict):
            chosen = [str(o) for key, o in entry.items() if key.startswith("override /scaler")]
            scaler = chosen[-1] if chosen else scaler
        elif entry in files and entry != name:
            base = _mode(entry, files)
            values, scaler = base.values, base.scaler
    own = {key: value for key, value in flat(content).items() if key in values}
    return Mode(name, values | own, scaler)


def mapping_in(path: Path) -> dict[str, Any]:
    """Return the mapping in an option's file; {} for a file that composition will refuse."""
    try:
        content = yaml.load(_text_of(path), Loader=_LOADER)
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")

"""`--cfg`, `--info` and shell completion: a configuration is shown, nothing runs."""

import sys

import hydra
import yaml
from hydra.core.config_store import ConfigStore

from mprun.config.compose import Composed, compose_config, conf_dir, hydra_overrides
from mprun.config.schema import register_schemas
from mprun.errors import DONE, BadInput

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_COMPLETION = ("install=", "uninstall=", "query=")


def show_config(what: str, overrides: list[str], config_dir: str | None, package: str) -> int:
    """`--cfg job`: the resolved configuration as YAML, as config.yaml of a run would hold it.

    package: dotted key of the part to print, "" for all. `--cfg hydra` and `all` are Hydra's.
    """
    composed = compose_config(overrides, config_dir, files=False)
    if what == "job":
        print(yaml.safe_dump(_part(composed, package), sort_keys=False), end="")
        return DONE
    if what not in ("hydra", "all"):
        raise BadInput(f"--cfg {what}: must be one of job, hydra, all")
    return _by_hydra(["--cfg", what, *_source(config_dir), *hydra_overrides(overrides)])


def show_info(what: str, overrides: list[str], config_dir: str | None) -> int:
    """`--info WHAT`: Hydra's account of files, defaults lists and search path."""
    if what not in _INFO:
        raise BadInput(f"--info {what}: must be one of {', '.join(_INFO)}")
    compose_config(overrides, config_dir, files=False)
    return _by_hydra(["--info", what, *_source(config_dir), *hydra_overrides(overrides)])


def complete(request: str) -> int:
    """`-sc install=bash|zsh|fish`, `uninstall=` or `query=`: shell completion."""
    if not request.startswith(_COMPLETION) or request.endswith("="):
        raise BadInput(f"-sc {request}: must be install=SHELL, uninstall=SHELL or query=SHELL")
    if request.partition("=")[2] not in ("bash", "zsh", "fish"):
        raise BadInput(f"-sc {request}: the shell must be one of bash, zsh, fish")
    return _by_hydra(["-sc", request])


def _part(composed: Composed, package: str):
    tree = composed.as_dict()
    for key in package.split(".") if package else ():
        if not isinstance(tree, dict) or key not in tree:
            raise BadInput(f"--package {package}: no such part of the configuration")
        tree = tree[key]
    return tree


def _source(config_dir: str | None) -> list[str]:
    return [] if config_dir is None else ["--config-dir", config_dir]


def _by_hydra(arguments: list[str]) -> int:
    register_schemas(ConfigStore.instance())
    before, sys.argv = sys.argv, ["mprun", *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(
            _not_a_run
        )()
    finally:
        sys.argv = before
    return DONE


def _not_a_run(config) -> None:
    raise AssertionError("a flag that shows a configuration would have started a run")

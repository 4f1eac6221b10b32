"""`mprun --help`, `--cfg`, `--info` and shell completion: what there is is shown, nothing runs.

The page lists what the option files, the schema and the parser know; only examples are typed here.
"""

import argparse
import sys
import textwrap
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore

from mprun.config.compose import Composed, compose_config, hydra_overrides
from mprun.config.option_files import conf_dir, option_files, what_it_is
from mprun.config.roles import FIELDS
from mprun.config.schema import register_schemas
from mprun.errors import DONE, BadInput

_EXAMPLES = """\
mprun: what does lower precision do to a training run, compared with FP32?

Use
  mprun                                     one short run on embedded data
  mprun model=resnet50 precision=amp        choose group=option, set key=value
  mprun -m precision=fp32,amp seed=0,1,2    sweep: one process per run; again:
                                            what is missing
    hydra/launcher=joblib|submitit_local|submitit_slurm
                                            Hydra's launcher instead of -j
    hydra.launcher.KEY=VALUE                n_jobs (joblib), timeout_min,
                                            partition, ... (submitit)
  mprun experiment=resnet50_cifar10 data.root=DIR
                                            a recipe on data on disk
                                            (docs/recipes.md)
  mprun data=custom data.factory=module:function
                                            own data, own models
                                            (docs/own_data.md)
  mprun resume=outputs/RUN                  continue from the last checkpoint
  mprun --config-dir DIR precision=mine     modes, scalers, ... of your own,
                                            each from DIR/GROUP/OPTION.yaml
  mprun --cfg job model=dcgan               print the whole configuration
  mprun --info defaults model=dcgan         print which files it is made of
  eval "$(mprun -sc install=bash)"          shell completion (bash, zsh, fish)
"""
_END = """\
Exit codes: 0 done, 1 a bug, 2 bad input, 3 diverged, 4 damaged data or
checkpoint, 5 resource, 75 preempted (resumable), 130 interrupted.
Results: tensorboard --logdir outputs
"""
GROUPS = ("model", "data", "optim", "precision", "scaler", "train", "numerics", "experiment")
_WIDTH = 80
# What a group sets by its option; mappings take an entry of one's own behind the key.
_BY_OPTION = ("name", "kind")


def help_text(
    verbs: dict[str, str], parser: argparse.ArgumentParser, config_dir: str | None = None
) -> str:
    """The help page.

    Args:
        verbs: verb -> what it does.
        parser: knows the options.
        config_dir: of the user's own; its options are listed too.
    """
    parts = [
        _EXAMPLES,
        "\n".join(["Verbs", *(f"  mprun {verb:<14} {what}" for verb, what in verbs.items()), ""]),
        "Options\n" + parser.format_help().partition("options:\n")[2],
        "\n".join(["Groups (group=option)", *(_group(name, config_dir) for name in GROUPS), ""]),
        "\n".join(["Keys (key=value; --cfg job prints all of them)", *_keys(), ""]),
        _END,
    ]
    return "\n".join(parts)


def _group(name: str, config_dir: str | None) -> str:
    options = option_files(name, config_dir).items()
    lines = [f"    {option:<24}{what_it_is(path)}" for option, path in options]
    return "\n".join([f"  {name}", *lines])


def _keys() -> list[str]:
    """Every key of the schema with its choices; those of a group begin a line of their own."""
    groups: dict[str, list[str]] = {}
    for key, fields in FIELDS.items():
        group, _, name = key.rpartition(".")
        if key in GROUPS or key == "compare" or (group and name in _BY_OPTION):
            continue
        choices = dict.fromkeys(str(c) for f in fields for c in f.metadata.get("choices", ()))
        text = f"{key}={'|'.join(choices)}" if 1 < len(choices) < 6 else key
        groups.setdefault(group, []).append(text)
    lines = textwrap.TextWrapper(
        _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
    return [lines.fill("  ".join(keys)) for keys in groups.values()]


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
    return _by_hydra(["--cfg", what], overrides, config_dir)


def show_info(what: str, overrides: list[str], config_dir: str | None) -> int:
    """`--info WHAT`: Hydra's account of files, defaults lists and search path."""
    if what not in _INFO:
        raise BadInput(f"--info {what}: must be one of {', '.join(_INFO)}")
    compose_config(overrides, config_dir, files=False)
    return _by_hydra(["--info", what], overrides, config_dir)


def complete(request: str) -> int:
    """`-sc install=bash|zsh|fish`, `uninstall=` or `query=`: shell completion."""
    if not request.startswith(_COMPLETION) or request.endswith("="):
        raise BadInput(f"-sc {request}: must be install=SHELL, uninstall=SHELL or query=SHELL")
    if request.partition("=")[2] not in ("bash", "zsh", "fish"):
        raise BadInput(f"-sc {request}: the shell must be one of bash, zsh, fish")
    return _by_hydra(["-sc", request], [], None)


def _part(composed: Composed, package: str) -> Any:
    tree: Any = composed.as_dict()
    for key in package.split(".") if package else ():
        if not isinstance(tree, dict) or key not in tree:
            raise BadInput(f"--package {package}: no such part of the configuration")
        tree = tree[key]
    return tree


def _by_hydra(flag: list[str], overrides: list[str], config_dir: str | None) -> int:
    register_schemas(ConfigStore.instance())
    source = [] if config_dir is None else ["--config-dir", config_dir]
    before, sys.argv = sys.argv, ["mprun", *flag, *source, *hydra_overrides(overrides)]
    shown_by = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    try:
        shown_by(_not_a_run)()
    finally:
        sys.argv = before
    return DONE


def _not_a_run(config: object) -> None:
    raise AssertionError("a flag that shows a configuration would have started a run")

"""`mprun --help`: verbs, groups with their options, and the keys that every configuration has.

`--cfg`, `--info` and shell completion: a configuration is shown, nothing runs.
"""

import sys

import hydra
import yaml
from hydra.core.config_store import ConfigStore

from mprun.config.compose import (
    Composed,
    compose_config,
    conf_dir,
    group_options,
    hydra_overrides,
    hydra_session,
)
from mprun.config.schema import register_schemas
from mprun.errors import DONE, BadInput

_USE = """\
mprun: what does lower precision do to a training run, compared with FP32?

Use
  mprun                                     one short run on embedded data
  mprun model=resnet50 precision=amp        choose group=option, set key=value
  mprun -m precision=fp32,amp seed=0,1,2    sweep: one process per run; again: what is missing
    -j N                                    N runs at a time (1)
    --stall-after SECONDS                   kill a run without progress (1800; 0: never)
    hydra/launcher=joblib|submitit_local|submitit_slurm   Hydra's launcher instead of -j
    hydra.launcher.KEY=VALUE                n_jobs (joblib), timeout_min, partition, ... (submitit)
  mprun experiment=resnet50_cifar10 data.root=DIR     a recipe on data on disk (docs/recipes.md)
  mprun data=custom data.factory=module:function      own data, own models (docs/own_data.md)
  mprun resume=outputs/RUN                  continue a run from its last checkpoint
  mprun --config-dir DIR model=mine         options of your own from DIR/model/mine.yaml
  mprun --cfg job model=dcgan               print the whole configuration, run nothing
  mprun --info defaults model=dcgan         print which files it is made of
  eval "$(mprun -sc install=bash)"          shell completion (bash, zsh, fish)
  mprun --version

Verbs
{verbs}

Groups (group=option)
{groups}

Keys (key=value; --cfg job prints all of them)
  seed  device=auto|cuda|cpu  cpu_half=emulated|native  threads  deterministic  name
  output_root  output_dir  resume
  train.steps  train.epochs  train.log_every  train.eval_every  train.checkpoint_every
  train.clip_norm  train.clip_modules  train.accumulate  train.eval_arithmetic=fp32|mode
  train.cuda_graph=auto|on|off      replay whole steps: where the host is the limit
  train.compile=off|default|max-autotune-no-cudagraphs     torch.compile for image models
  train.channels_last=auto|on|off   NHWC in memory     train.autotune=auto|on|off   cuDNN's choice
  data.batch_size  data.root  data.workers  data.on_corrupt=stop|skip  data.eval_split
  data.factory=MODULE:FUNCTION  data.options.KEY  model.factory  model.task  model.options.KEY
  optim.lr  optim.schedule  optim.warmup_epochs  optim.constant_epochs
  optim.implementation=auto|single_pass|fused|foreach|loop
  optim.bias_lr_factor  optim.decay_bias  optim.decay_norm  optim.average_decay
  precision.overrides.PATTERN=fp32|fp16|bf16   modules kept in another dtype, by name pattern
  scaler.scale  scaler.init_scale  scaler.growth_factor  scaler.backoff_factor
  scaler.growth_interval  scaler.hysteresis  scaler.min_scale  scaler.max_scale
  scaler.max_consecutive_skips  scaler.per=shared|optimizer|loss
  compare.metric  compare.margin  compare.window
  numerics.every  numerics.modules  numerics.shadow_every  numerics.keep_failure

Exit codes: 0 done, 1 a bug, 2 bad input, 3 diverged, 4 damaged data or checkpoint,
5 resource, 75 preempted (resumable), 130 interrupted. Results: tensorboard --logdir outputs
"""
GROUPS = ("model", "data", "optim", "precision", "scaler", "train", "numerics", "experiment")


def help_text(verbs: dict[str, str]) -> str:
    """The help page; `verbs`: verb -> what it does."""
    return _USE.format(
        verbs="\n".join(f"  mprun {verb:<14} {what}" for verb, what in verbs.items()),
        groups="\n".join(_group(name) for name in GROUPS),
    )


def _group(name: str) -> str:
    with hydra_session(None):
        options = group_options(name)
    lines = [f"  {name}"]
    lines += [f"    {option:<24}{_first_comment(name, option)}" for option in options]
    return "\n".join(lines)


def _first_comment(group: str, option: str) -> str:
    """The first comment line of the option's file says what it is."""
    path = conf_dir() / group / f"{option}.yaml"
    if not path.is_file():
        return ""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = lines[0] if lines else ""
    if first.startswith("# @package") and len(lines) > 1:
        first = lines[1]
    return first.removeprefix("# ") if first.startswith("# ") else ""


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

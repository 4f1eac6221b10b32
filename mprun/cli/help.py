"""`mprun --help`: verbs, groups with their options, and the keys that every configuration has."""

from mprun.config.compose import conf_dir, hydra_session
from mprun.config.diagnose import group_options

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

"""What a verdict judges, and the margin of "matches", where the configuration says neither.

A margin is relative to the mean of the FP32 runs (0.01 is 1 %) for losses and distances, and in
percentage points for accuracies.

Rules across fields, and the range rules of every field; raises BadInput, imports no torch.

How a step is executed: the settings that exclude each other, and what `auto` means then.
"""

from mprun.config import schema
from mprun.config.check_data import (
    data_fits_model,
    data_folder,
    embedded_data,
    images_on_disk,
    sampled_softmax,
)
from mprun.config.rules import violations
from mprun.config.schema import DTYPES, CustomModelConfig, LSTMConfig, RunConfig
from mprun.config.schema_models import task_of
from mprun.config.user_code import check_own_code
from mprun.errors import BadInput

ACCURACIES = ("top1", "top5")


def default_metric(task: str) -> str:
    """Top-1 accuracy for classifiers, as in table 1 of the paper; else the loss.

    A held-out loss of a small classifier varies by a quarter from seed to seed, so that no
    affordable number of seeds decides about 1 % of it.
    """
    return "top1" if task == "classification" else "loss"


def default_margin(metric: str, data: str | None) -> float:
    """The margin of a metric of the evaluation on the data source named `data`.

    Judgement, not derivation. Half a point of top-1 is above the seed noise of published ResNet-50
    runs (0.15 points); of 360 held-out digits one image is 0.28 points already. A perplexity is
    judged as its logarithm, which is a loss. The margin of the sliced Wasserstein distance is
    weighed against measured seed noise in docs/sample_metric.md.
    """
    if metric in ACCURACIES:
        return 1.0 if data == "digits" else 0.5
    return 0.1 if metric == "sliced_wasserstein" else 0.01


# Which fields each optimizer reads; another one that is set would have no effect.
_OPTIM_FIELDS = {
    "sgd": {"momentum", "nesterov"},
    "adam": {"betas", "eps"},
    "adamw": {"betas", "eps"},
    "adagrad": {"eps", "initial_accumulator"},
}
_BOUNDS = {"init_scale", "min_scale", "max_scale", "max_consecutive_skips"}
SCALER_FIELDS = {
    "none": set(),
    "static": {"scale", "max_consecutive_skips"},
    "dynamic": {
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "hysteresis",
        "growth_delay",
        "refill_on_clean_step",
        "tolerance",
        "hold_at_floor",
    }
    | _BOUNDS,
    "logmax": {"log_max", "beta1", "beta2", "overflow_std_dev"} | _BOUNDS,
}
# Settings of a scaler that only single presets need; without them the rule is torch's.
_OPTIONAL_SCALER_FIELDS = {"growth_delay", "refill_on_clean_step", "tolerance", "hold_at_floor"}
_METRICS = {
    "classification": ("loss", "top1", "top5"),
    "language_model": ("loss", "perplexity"),
    "gan": ("loss", "d_loss", "g_loss", "sliced_wasserstein"),
    "reconstruction": ("loss",),
}


def check(config: RunConfig, *, files: bool = True) -> None:
    """Raise BadInput, with one line, for the first thing that cannot be run.

    files: look for the folder of the data too.
    """
    _containers(config)
    for line in violations(config):
        raise BadInput(line)
    for rule in (
        _names,
        data_fits_model,
        _optim,
        _scaler,
        _precision,
        _train,
        _compare,
        _numerics,
        check_execution,
        images_on_disk,
        sampled_softmax,
        check_own_code,
        embedded_data,
    ):
        rule(config)
    if files:
        data_folder(config)


def _containers(config: RunConfig) -> None:
    # OmegaConf does not check the type of what an interpolation puts in place of a container.
    for key, value, kind in (
        ("precision.overrides", config.precision.overrides, dict),
        ("optim.betas", config.optim.betas, list | None),
        ("optim.milestones", config.optim.milestones, list),
        ("optim.average_modules", config.optim.average_modules, list),
        ("train.clip_modules", config.train.clip_modules, list),
        ("numerics.modules", config.numerics.modules, list),
        ("data.options", getattr(config.data, "options", {}), dict),
        ("model.options", getattr(config.model, "options", {}), dict),
    ):
        if not isinstance(value, kind):
            raise BadInput(f"{key}={value}: must be a {'mapping' if kind is dict else 'list'}")


def _names(config: RunConfig) -> None:
    for group, table in (("model", schema.MODELS), ("data", schema.DATA)):
        node = getattr(config, group)
        if table.get(node.name) is not type(node):
            raise BadInput(f"{group}.name={node.name}: not a value to set; choose {group}=OPTION")
    if config.name is not None and not _is_label(config.name):
        raise BadInput(f"name={config.name[:70]!r}: must be 1 to 64 of letters, digits, . _ and -")


def _is_label(text: str) -> bool:
    plain = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    return 0 < len(text) <= 64 and set(text) <= plain and not text.startswith((".", "-"))


def _optim(config: RunConfig) -> None:
    optim = config.optim
    for name in sorted(set().union(*_OPTIM_FIELDS.values()) - _OPTIM_FIELDS[optim.name]):
        if getattr(optim, name) is not None:
            raise BadInput(f"optim.{name}={getattr(optim, name)}: {optim.name} has no such setting")
    for name in sorted(_OPTIM_FIELDS[optim.name] - {"nesterov"}):
        if getattr(optim, name) is None:
            raise BadInput(f"optim.{name}=null: {optim.name} needs a value")
    if optim.betas is not None and len(optim.betas) != 2:
        raise BadInput(f"optim.betas={list(optim.betas)}: must be two numbers")
    if optim.nesterov and not optim.momentum:
        raise BadInput("optim.nesterov=true: needs optim.momentum > 0")
    if optim.milestones and optim.schedule != "step":
        raise BadInput(f"optim.milestones={list(optim.milestones)}: only schedule=step reads them")
    if optim.schedule == "step" and not optim.milestones:
        raise BadInput("optim.milestones=[]: optim.schedule=step needs at least one")
    if (optim.constant_epochs is None) == (optim.schedule == "epoch_decay"):
        raise BadInput(
            f"optim.constant_epochs={_word(optim.constant_epochs)}: schedule=epoch_decay needs it, "
            "no other schedule reads it"
        )
    if optim.warmup_epochs and optim.warmup_updates:
        raise BadInput(
            f"optim.warmup_epochs={optim.warmup_epochs:g} "
            f"optim.warmup_updates={optim.warmup_updates}: give one of the two"
        )
    if optim.average_modules and optim.average_decay is None:
        raise BadInput(
            f"optim.average_modules={list(optim.average_modules)}: needs optim.average_decay"
        )
    if config.train.clip_modules and config.train.clip_norm is None:
        raise BadInput(
            f"train.clip_modules={list(config.train.clip_modules)}: needs train.clip_norm"
        )
    precision = config.precision
    in_16_bits = precision.master_dtype is None and precision.param_dtype != "fp32"
    if optim.implementation == "fused" and in_16_bits:
        raise BadInput(
            f"optim.implementation=fused: {config.precision.name} updates in 16 bits operation by "
            "operation; a fused kernel would compute in FP32 (allowed: auto, foreach, loop)"
        )
    if optim.implementation == "single_pass" and in_16_bits:
        raise BadInput(
            f"optim.implementation=single_pass: {config.precision.name} has no master weights and "
            "updates in 16 bits operation by operation; a single pass computes in FP32 (allowed: "
            "auto, foreach, loop)"
        )
    if optim.implementation == "single_pass" and precision.grad_dtype != "fp32":
        raise BadInput(
            f"optim.implementation=single_pass: with precision.grad_dtype={precision.grad_dtype} "
            "gradients are unscaled in 16 bits, in a single pass in FP32 (allowed: auto, fused, "
            "foreach, loop)"
        )


def _word(value: object) -> str:
    return "null" if value is None else str(value)


def _scaler(config: RunConfig) -> None:
    scaler = config.scaler
    for name in sorted(set().union(*SCALER_FIELDS.values()) - SCALER_FIELDS[scaler.kind]):
        if getattr(scaler, name) is not None:
            raise BadInput(
                f"scaler.{name}={getattr(scaler, name)}: scaler={scaler.name} has no such setting"
            )
    for name in sorted(SCALER_FIELDS[scaler.kind] - _OPTIONAL_SCALER_FIELDS):
        if getattr(scaler, name) is None:
            raise BadInput(f"scaler.{name}=null: scaler={scaler.name} needs a number")
    low, high = scaler.min_scale, scaler.max_scale
    if low is not None and high is not None and low > high:
        raise BadInput(f"scaler.min_scale={low:g}: must be <= scaler.max_scale ({high:g})")
    start = scaler.init_scale
    if start is not None and low is not None and start < low:
        raise BadInput(f"scaler.init_scale={start:g}: must be >= scaler.min_scale ({low:g})")
    if start is not None and high is not None and start > high:
        raise BadInput(f"scaler.init_scale={start:g}: must be <= scaler.max_scale ({high:g})")
    for name in ("scale", "init_scale", "min_scale", "max_scale"):
        value = getattr(scaler, name)
        if value is not None and not 2.0**-126 <= value <= 2.0**126:
            raise BadInput(
                f"scaler.{name}={value:g}: must be between 2^-126 and 2^126, so that "
                "it and its reciprocal are normal FP32 numbers"
            )
    if scaler.tolerance and (scaler.hysteresis or 1) > 1:
        raise BadInput(f"scaler.tolerance={scaler.tolerance}: must be 0 with scaler.hysteresis > 1")
    if scaler.per != "shared" and task_of(config.model) != "gan":
        raise BadInput(
            f"scaler.per={scaler.per}: {config.model.name} has one optimizer and one "
            "loss (allowed: shared)"
        )
    if scaler.per != "shared" and scaler.kind == "none":
        raise BadInput(f"scaler.per={scaler.per}: scaler=none has no scale")


def _precision(config: RunConfig) -> None:
    precision = config.precision
    if precision.name not in schema.MODES:
        raise BadInput(
            f"precision.name={precision.name}: not a value to set; choose one of "
            f"precision={','.join(schema.MODES)}"
        )
    for pattern, dtype in precision.overrides.items():
        if dtype not in DTYPES:
            allowed = ", ".join(DTYPES)
            raise BadInput(f"precision.overrides.{pattern}={dtype}: must be one of {allowed}")
    if precision.autocast_dtype is not None and precision.param_dtype != "fp32":
        raise BadInput(
            f"precision.param_dtype={precision.param_dtype}: must be fp32 under autocast"
        )
    if precision.master_dtype is None and precision.grad_dtype != precision.param_dtype:
        raise BadInput(
            f"precision.grad_dtype={precision.grad_dtype}: must equal param_dtype "
            f"({precision.param_dtype}) without master weights"
        )
    norm_dtypes = ("fp32",) if precision.autocast_dtype else ("fp32", precision.param_dtype)
    if precision.norm_dtype not in norm_dtypes:
        raise BadInput(
            f"precision.norm_dtype={precision.norm_dtype}: norm layers compute in one of "
            f"{', '.join(dict.fromkeys(norm_dtypes))} here"
        )
    if precision.fp32_math == "tf32" and config.device == "cpu":
        raise BadInput(
            f"precision={precision.name}: TF32 needs a GPU of the Ampere generation or "
            "later, a CPU has none; use precision=fp32 or device=cuda"
        )


def _train(config: RunConfig) -> None:
    train = config.train
    if (train.steps is None) == (train.epochs is None):
        values = " ".join(
            f"train.{name}={'null' if value is None else value}"
            for name, value in (("steps", train.steps), ("epochs", train.epochs))
        )
        raise BadInput(f"{values}: give one of the two and set the other to null")


def _compare(config: RunConfig) -> None:
    allowed = _METRICS[task_of(config.model)]
    if config.compare.metric not in allowed:
        raise BadInput(
            f"compare.metric={config.compare.metric}: must be one of "
            f"{', '.join(allowed)} for {config.model.name}"
        )
    margin, accuracy = config.compare.margin, config.compare.metric in ACCURACIES
    if margin is not None and margin >= 0.5 and not accuracy:
        raise BadInput(
            f"compare.margin={margin:g}: is relative to the FP32 mean, 0.01 means 1 %; must be "
            "below 0.5"
        )
    train, window = config.train, config.compare.window
    if train.steps is not None and window > 1:
        # The last step is always evaluated.
        evaluations = -(-train.steps // train.eval_every) if train.eval_every else 1
        if window > evaluations:
            raise BadInput(
                f"compare.window={window}: a run of {train.steps} steps with train.eval_every="
                f"{train.eval_every} has {evaluations} (allowed: 1 to {evaluations})"
            )


def _numerics(config: RunConfig) -> None:
    numerics = config.numerics
    if numerics.shadow_every and not numerics.enabled:
        raise BadInput(f"numerics.shadow_every={numerics.shadow_every}: needs numerics=on")


_HOOKS = "numerics=on watches tensors with hooks"


def check_execution(config: RunConfig) -> None:
    """BadInput for a setting that cannot work; what depends on the machine is checked later.

    With device=auto the device is known only when the run is built, and this is called again by
    `refuse_on` with it.
    """
    refuse_on(config, config.device)


def refuse_on(config: RunConfig, device: str) -> None:
    """BadInput for the first setting that cannot work on `device` (auto: not known yet)."""
    train = config.train
    for key, value, reason, allowed in (
        ("cuda_graph", train.cuda_graph, why_no_graph(config, device), "auto, off"),
        ("compile", train.compile, why_not_compiled(config, device), "off"),
        ("channels_last", train.channels_last, why_no_channels_last(config), "auto, off"),
        ("autotune", train.autotune, why_no_autotune(config, device), "auto, off"),
    ):
        asked = value not in ("auto", "off")
        if asked and reason is not None:
            raise BadInput(f"train.{key}={value}: {reason} (allowed: {allowed})")


def why_no_graph(config: RunConfig, device: str) -> str | None:
    """Why steps cannot be replayed as a CUDA graph, as far as the configuration tells; or None."""
    if device == "cpu":
        return "a CUDA graph needs device=cuda"
    if config.numerics.enabled:
        return f"{_HOOKS}, which a replay does not call"
    if isinstance(config.model, CustomModelConfig) and config.train.cuda_graph == "auto":
        return "a network of one's own may change with a number that a replay would keep"
    if task_of(config.model) == "language_model" and config.train.accumulate > 1:
        return (
            f"train.accumulate={config.train.accumulate} with a language model, whose state is "
            "carried on inside of the step"
        )
    return None


def why_not_compiled(config: RunConfig, device: str) -> str | None:
    """Why torch.compile cannot or would not compile the network; or None."""
    if isinstance(config.model, LSTMConfig):
        return "torch.compile passes over nn.LSTM and the function around it: nothing is compiled"
    if config.numerics.enabled:
        return f"{_HOOKS}, which compiled code does not call"
    if device == "cpu" and config.cpu_half == "emulated" and _has_16_bits(config):
        return (
            f"precision={config.precision.name} is emulated on a CPU, operation by operation, "
            "which compiled code does not pass through"
        )
    return None


def why_no_channels_last(config: RunConfig) -> str | None:
    """Why the network has no channels to put last; or None."""
    if task_of(config.model) == "language_model":
        return "a language model has no images"
    return None


def why_no_autotune(config: RunConfig, device: str) -> str | None:
    """Why cuDNN may not choose its kernels by trying them; or None."""
    if device == "cpu":
        return "cuDNN needs device=cuda"
    if config.deterministic:
        return "it may choose another kernel in another run, deterministic=true forbids that"
    return None


def auto_channels_last(config: RunConfig, device: str) -> tuple[bool, str]:
    """What train.channels_last=auto is on `device`, and why it is off.

    On where Tensor Cores multiply, which read NHWC (1.47 to 1.56 times the speed for ResNet-50;
    slower for FP32 products).
    """
    reason = why_no_channels_last(config)
    if reason is None and device != "cuda":
        reason = f"device={device}"
    if reason is None and not _has_16_bits(config) and config.precision.fp32_math != "tf32":
        reason = "FP32 products"
    if reason is None and isinstance(config.model, CustomModelConfig):
        reason = "a network of one's own may rely on NCHW; train.channels_last=on if it does not"
    return reason is None, reason or ""


def _has_16_bits(config: RunConfig) -> bool:
    precision = config.precision
    dtypes = {precision.autocast_dtype, precision.param_dtype, *precision.overrides.values()}
    return bool(dtypes & {"fp16", "bf16"})

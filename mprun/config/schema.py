"""Every option of mprun as typed data; imports neither torch nor a model.

The classes are `slots=True` so that `+group.unknown=1` is an error too (OmegaConf sets
attributes, and a slotted class refuses unknown ones). A value of `null` means "does not apply"
or "take it from the model, the data or the mode"; `mprun.config.check` holds the rules across
fields.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from mprun.config.rules import one_of, ranged
from mprun.config.schema_data import (
    DATA,
    Cifar10Config,
    CustomDataConfig,
    DataConfig,
    DigitsConfig,
    DocsTextConfig,
    ImageFolderConfig,
    ImageNetConfig,
    Lm1bConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
    TextConfig,
)
from mprun.config.schema_models import (
    MODELS,
    AlexNetConfig,
    ConvAutoencoderConfig,
    CustomModelConfig,
    DCGANConfig,
    LSTMConfig,
    ModelConfig,
    ResNet50Config,
)

__all__ = [
    "AlexNetConfig",
    "Cifar10Config",
    "CompareConfig",
    "ConvAutoencoderConfig",
    "CustomDataConfig",
    "CustomModelConfig",
    "DATA",
    "DCGANConfig",
    "DTYPES",
    "DataConfig",
    "DigitsConfig",
    "DocsTextConfig",
    "ImageFolderConfig",
    "ImageNetConfig",
    "LSTMConfig",
    "Lm1bConfig",
    "MAX_STEPS",
    "MODELS",
    "MODES",
    "ModelConfig",
    "NumericsConfig",
    "OptimConfig",
    "PrecisionConfig",
    "ResNet50Config",
    "RunConfig",
    "ScalerConfig",
    "SyntheticImagesConfig",
    "SyntheticTokensConfig",
    "TextConfig",
    "TrainConfig",
    "register_schemas",
]

DTYPES = ("fp32", "fp16", "bf16")
MAX_STEPS = 10_000_000


@dataclass(slots=True)
class OptimConfig:
    """Optimizer and learning-rate schedule; the schedule counts applied updates."""

    name: str = one_of("sgd", "sgd", "adam", "adamw", "adagrad")
    lr: float = ranged(0.1, above=0.0)
    weight_decay: float = ranged(0.0, at_least=0.0)
    momentum: float | None = ranged(None, at_least=0.0, below=1.0)  # sgd
    nesterov: bool | None = None  # sgd
    betas: list[float] | None = field(  # adam, adamw
        default=None, metadata={"bounds": {"at_least": 0.0, "below": 1.0}}
    )
    eps: float | None = ranged(None, at_least=0.0)  # adam, adamw, adagrad
    initial_accumulator: float | None = ranged(None, at_least=0.0)  # adagrad
    # single_pass: casts, unscaling, update and copy back in one pass over the weights.
    implementation: str = one_of("auto", "auto", "single_pass", "fused", "foreach", "loop")
    schedule: str = one_of(
        "constant", "constant", "cosine", "linear", "polynomial", "step", "epoch_decay"
    )
    warmup_updates: int = ranged(0, at_least=0)
    warmup_epochs: float = ranged(0.0, at_least=0.0)  # instead of warmup_updates
    final_factor: float = ranged(0.0, at_least=0.0, at_most=1.0)  # share of lr at the end
    power: float = ranged(1.0, above=0.0)  # polynomial
    milestones: list[float] = field(  # step: shares of the run at which the rate drops
        default_factory=list, metadata={"bounds": {"above": 0.0, "below": 1.0}}
    )
    gamma: float = ranged(0.1, above=0.0, below=1.0)  # step, epoch_decay: factor of each drop
    constant_epochs: float | None = ranged(None, at_least=0.0)  # epoch_decay: before the first drop
    bias_lr_factor: float = ranged(1.0, above=0.0)  # rate of biases over that of weights
    decay_bias: bool = True  # weight decay on biases
    decay_norm: bool = True  # weight decay on the parameters of norm layers
    # Evaluate an exponential moving average of the weights, per applied update; null: none.
    average_decay: float | None = ranged(None, above=0.0, below=1.0)
    average_modules: list[str] = field(default_factory=list)  # module-name patterns; none: all


@dataclass(slots=True)
class PrecisionConfig:
    """One precision mode as plain values; conf/precision holds the nine named ones."""

    name: str = MISSING
    param_dtype: str = one_of("fp32", *DTYPES)  # weights, activations and their gradients
    norm_dtype: str = one_of("fp32", *DTYPES)  # parameters and statistics of norm layers
    master_dtype: str | None = one_of("fp32", "fp32")  # null: parameters are updated in place
    grad_dtype: str = one_of("fp32", *DTYPES)  # unscaling, clipping and accumulation
    loss_dtype: str = one_of("fp32", *DTYPES)  # softmax and loss
    autocast_dtype: str | None = one_of(None, "fp16", "bf16")  # torch.autocast's op lists
    fp32_math: str = one_of("ieee", "ieee", "tf32")  # FP32 products: full or TF32
    overrides: dict[str, str] = field(default_factory=dict)  # module-name pattern -> dtype


@dataclass(slots=True)
class ScalerConfig:
    """Loss scaler; `kind` says which rule, a field that the rule does not use stays null."""

    name: str = MISSING
    kind: str = one_of("none", "none", "static", "dynamic", "logmax")
    per: str = one_of("shared", "shared", "optimizer", "loss")  # one scale for what
    scale: float | None = ranged(None, above=0.0)
    init_scale: float | None = ranged(None, above=0.0)
    growth_factor: float | None = ranged(None, above=1.0)
    backoff_factor: float | None = ranged(None, above=0.0, below=1.0)
    growth_interval: int | None = ranged(None, at_least=1, below=2**31)
    hysteresis: int | None = ranged(None, at_least=1, below=2**31)
    min_scale: float | None = ranged(None, above=0.0)
    max_scale: float | None = ranged(None, above=0.0)
    max_consecutive_skips: int | None = ranged(None, at_least=1, below=2**31)
    # What single presets need (mprun.precision.loss_scale says what they mean).
    growth_delay: int | None = ranged(None, at_least=0, below=2**31)
    refill_on_clean_step: bool | None = None
    tolerance: float | None = ranged(None, at_least=0.0, at_most=1.0)
    hold_at_floor: bool | None = None
    # logmax
    log_max: float | None = ranged(None)
    beta1: float | None = ranged(None, above=0.0, below=1.0)
    beta2: float | None = ranged(None, above=0.0, below=1.0)
    overflow_std_dev: float | None = ranged(None, at_least=0.0, at_most=100.0)


@dataclass(slots=True)
class TrainConfig:
    """Length and rhythm of a run; all counts are in steps (batches), not updates."""

    steps: int | None = ranged(100, at_least=1, at_most=MAX_STEPS)  # null: use epochs
    epochs: float | None = ranged(None, above=0.0, at_most=10_000.0)  # null: use steps
    log_every: int = ranged(10, at_least=1)
    eval_every: int = ranged(0, at_least=0)  # 0: only at the end
    checkpoint_every: int = ranged(0, at_least=0)  # 0: only when a signal stops the run
    keep_checkpoints: int = ranged(2, at_least=2)
    clip_norm: float | None = ranged(None, above=0.0)  # global norm of unscaled gradients
    clip_modules: list[str] = field(default_factory=list)  # module-name patterns; none: all
    accumulate: int = ranged(1, at_least=1)  # micro-batches per step
    eval_arithmetic: str = one_of("fp32", "fp32", "mode")
    # How a step is executed; none of these changes what is computed, beyond rounding.
    cuda_graph: str = one_of("auto", "auto", "on", "off")  # replay the whole step; CUDA only
    compile: str = one_of("off", "off", "default", "max-autotune-no-cudagraphs")  # torch.compile
    channels_last: str = one_of("auto", "auto", "on", "off")  # NHWC weights and activations
    autotune: str = one_of("auto", "auto", "on", "off")  # cudnn.benchmark; auto: not deterministic


@dataclass(slots=True)
class CompareConfig:
    """What a verdict is about; fixed before the runs."""

    # Of the evaluation: loss, top1, perplexity, sliced_wasserstein (dcgan). null: top1 for
    # classifiers, else loss. This and the margin are filled in when the configuration is composed.
    metric: str | None = None
    # Relative to the FP32 mean (0.01: 1 %); top1 and top5: percentage points. null: the default
    # of the metric (mprun.config.check).
    margin: float | None = ranged(None, above=0.0)
    window: int = ranged(1, at_least=1)  # last evaluations, averaged into the outcome of a run


@dataclass(slots=True)
class NumericsConfig:
    """What is measured beside the training; none of it changes a number of the run."""

    enabled: bool = False
    every: int = ranged(100, at_least=1)  # probe the steps divisible by this
    # Module-name patterns, as in precision.overrides; none: all modules without modules inside.
    modules: list[str] = field(default_factory=list)
    # Also compute the steps divisible by this in FP32, from the same weights; 0: never.
    shadow_every: int = ranged(0, at_least=0)
    keep_failure: bool = True  # keep what a replay of the failing step needs


@dataclass(slots=True)
class RunConfig:
    """The whole configuration of one run."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    seed: int = ranged(0, at_least=0, below=2**63)
    device: str = one_of("auto", "auto", "cuda", "cpu")
    cpu_half: str = one_of("emulated", "emulated", "native")  # 16-bit products on a CPU
    threads: int | None = ranged(None, at_least=1, at_most=1024)  # of the CPU; null: torch's
    deterministic: bool = False  # deterministic kernels, cudnn.benchmark off
    name: str | None = None  # free label in the path
    output_root: str = "outputs"
    output_dir: str | None = None  # exact run directory; null: named from the configuration
    resume: str | None = None  # run directory to continue


MODES = (
    "fp32",
    "tf32",
    "fp16_naive",
    "fp16_master",
    "fp16_master_scaled",
    "amp",
    "bf16_naive",
    "bf16_master",
    "amp_bf16",
)


def register_schemas(store: Any) -> None:
    """Put the root schema and the model and data schemas into Hydra's ConfigStore.

    Under `schema/` they stay out of the list of options that a user sees.
    """
    store.store(name="run_schema", node=RunConfig)
    for name, schema in MODELS.items():
        store.store(group="schema/model", name=name, node=schema)
    for name, schema in DATA.items():
        store.store(group="schema/data", name=name, node=schema)

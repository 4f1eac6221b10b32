"""The options of a run as typed data, and their meaning; imports neither torch nor a model.

A field declares its meaning (`doc`, printed by `mprun --help KEY` and the page of keys), default,
allowed values and role. The classes are `slots=True` so that `+group.unknown=1` is an error too
(OmegaConf sets attributes). A value of `null` means "does not apply" or "take it from the model,
the data or the mode". `mprun.config.rules` has the rules across fields, `mprun.config.components`
the options of networks and data. Modes and loss scalers are the files of conf/precision and
conf/scaler, and those of the user's `--config-dir`.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from omegaconf import MISSING

from mprun.config.beside import DistConfig, NumericsConfig, SwitchConfig
from mprun.config.fields import (
    count,
    fraction,
    from_zero,
    one_of,
    part,
    positive,
    ranged,
    setting,
    share,
)
from mprun.config.products import AttentionConfig, MatmulConfig
from mprun.config.registry import (
    OPTIMIZERS,
    SCALERS,
    Component,
    DataConfig,
    ModelConfig,
    UpdateRule,
    optimizer,
    scaler,
)
from mprun.record.keys import INTERVAL, JUDGED, LABEL, LENGTH, MACHINE, READING, SEED

DTYPES = ("fp32", "fp16", "bf16")
MAX_STEPS = 10_000_000


@dataclass(slots=True)
class OptimConfig:
    """Optimizer and learning-rate schedule; the schedule counts applied updates."""

    name: str = one_of(OPTIMIZERS.keys(), "Optimizer; optim=OPTION sets it", default="sgd")
    lr: float = positive(0.1, "Learning rate; with a schedule, the highest value")
    weight_decay: float = from_zero(
        0.0, "Weight decay, added to the gradient as L2 decay; adamw and muon use decoupled decay"
    )
    momentum: float | None = share(None, "Momentum; 0: plain SGD")
    nesterov: bool | None = setting(None, "Whether to use Nesterov momentum")
    betas: list[float] | None = share(None, "Decays of the averages of the gradient and its square")
    alpha: float | None = share(None, "Decay factor of the average of squared gradients")
    eps: float | None = from_zero(
        None, "Number added to the denominator; 2^-25 and below becomes 0 in FP16"
    )
    initial_accumulator: float | None = from_zero(
        None, "Initial value of the sum of squared gradients"
    )
    newton_schulz_dtype: str | None = one_of(
        "bf16 fp16 fp32", "Dtype in which Muon orthogonalises a momentum", default=None
    )
    adjust_lr: str | None = one_of(
        "original match_rms_adamw spectral_unclamped",
        "How Muon's learning rate depends on a matrix's shape; match_rms_adamw: use AdamW's rates",
        default=None,
    )
    adamw_lr_factor: float | None = positive(
        None, "Learning rate of the parameters that AdamW updates, relative to that of Muon"
    )
    implementation: str = one_of("auto fused foreach loop", "torch's implementation of the update")
    schedule: str = one_of(
        "constant cosine linear polynomial step epoch_decay",
        "Learning-rate schedule; a skipped update does not advance the schedule",
    )
    warmup_updates: int = from_zero(
        0, "Number of updates during which the learning rate rises linearly to lr; 0: no warmup"
    )
    warmup_epochs: float = from_zero(
        0.0, "Number of epochs in which the learning rate rises to lr, instead of warmup_updates"
    )
    final_factor: float = part(
        0.0, "schedule=linear, cosine, polynomial: learning rate at the end as a share of lr"
    )
    power: float = positive(1.0, "schedule=polynomial: exponent of the remaining share of the run")
    milestones: list[float] = fraction(list, "schedule=step: shares of the run at which lr drops")
    gamma: float = fraction(0.1, "schedule=step, epoch_decay: factor on lr at each drop")
    constant_epochs: float | None = from_zero(None, "schedule=epoch_decay: epochs before lr drops")
    bias_lr_factor: float = positive(1.0, "Learning rate of biases relative to weights; Caffe: 2")
    decay_bias: bool = setting(True, "Apply weight decay to biases outside of norm layers")
    decay_norm: bool = setting(True, "Apply weight decay to gain and shift of norm layers")
    average_decay: float | None = fraction(
        None, "Decay of a moving average of the weights; evaluations use this average; null: none"
    )
    average_modules: list[str] = setting(list, "Module-name patterns for average_decay; empty: all")

    @property
    def component(self) -> UpdateRule:
        return OPTIMIZERS[self.name]


optimizer("sgd", builder="torch.optim:SGD", needs=("momentum",), takes=("nesterov",))(OptimConfig)
optimizer("adam", builder="torch.optim:Adam", needs=("betas", "eps"))(OptimConfig)
optimizer("adamw", builder="torch.optim:AdamW", needs=("betas", "eps"))(OptimConfig)
_ADAGRAD = "mprun.assembly.precision:adagrad"
optimizer("adagrad", builder=_ADAGRAD, needs=("eps", "initial_accumulator"))(OptimConfig)
_RMSPROP = ("alpha", "eps", "momentum")
optimizer("rmsprop", builder="torch.optim:RMSprop", needs=_RMSPROP)(OptimConfig)
# Its eps is inside the root, and its average starts elsewhere than at 0.
_TENSORFLOW = "mprun.precision.torch_update:TensorFlowRMSprop"
_STARTS = (*_RMSPROP, "initial_accumulator")
optimizer("rmsprop_tensorflow", builder=_TENSORFLOW, needs=_STARTS)(OptimConfig)
_MUON = ("momentum", "nesterov", "betas", "eps", "newton_schulz_dtype", "adjust_lr")
_MUON_AT = "mprun.precision.muon:Muon"
_OF_MUON = (*_MUON, "adamw_lr_factor")
optimizer("muon", builder=_MUON_AT, needs=_OF_MUON, of_matrices=True)(OptimConfig)


_STATES = "fp32 bf16 fp16 dynamic8 fp8"


@dataclass(slots=True)
class UpdateConfig:
    """Storage of weights without a master copy, and of the optimizer's state."""

    rounding: str = one_of(
        "nearest stochastic kahan",
        "Rounding of 16-bit weights without master weights; stochastic, kahan: updated in FP32",
    )
    state_dtype: str | None = one_of(
        _STATES,
        "Format of the optimizer state; 8 bits: in blocks of 256; null: the dtype of the update",
        default=None,
    )
    square_dtype: str | None = one_of(
        _STATES, "Format of averages and sums of squares; null: state_dtype", default=None
    )
    state_rounding: str = one_of(
        "nearest stochastic", "Rounding of BF16 optimizer state; stochastic: without bias"
    )

    @property
    def keeps_state(self) -> bool:
        """Return whether state has a format of its own, so that the update is in FP32."""
        return self.state_dtype is not None or self.square_dtype is not None


@dataclass(slots=True)
class PrecisionConfig:
    """One precision mode as plain values; its name is that of its file."""

    component: ClassVar[Component] = Component(
        name="", config=object, builder="mprun.precision:build_policy"
    )
    name: str = setting(MISSING, "Name of the precision mode and of its file")
    # Every record has these dtypes: one without them does not count as FP32.
    param_dtype: str = one_of(
        DTYPES, "Dtype of weights, activations and their gradients", restates=False
    )
    norm_dtype: str = one_of(
        DTYPES, "Dtype of parameters and statistics of norm layers", restates=False
    )
    master_dtype: str | None = one_of(
        DTYPES, "Dtype of the master weights; null: none, parameters are updated in place"
    )
    grad_dtype: str = one_of(
        DTYPES,
        "Dtype of unscaled gradients; without master weights, gradients also accumulate in it",
        restates=False,
    )
    loss_dtype: str = one_of(DTYPES, "Dtype of softmax and loss", restates=False)
    autocast_dtype: str | None = one_of(
        "fp16 bf16", "Dtype to which torch.autocast casts; null: no autocast", default=None
    )
    fp32_math: str = one_of(
        "ieee tf32", "FP32 products: ieee in full precision, tf32 with TF32 inputs"
    )
    reduce_dtype: str | None = one_of(
        DTYPES,
        "Dtype of sums of scaled gradients over ranks, micro-batches; null: unscaled, in their own",
        default=None,
    )
    reduce_divide: str = one_of(
        "after before split",
        "When to divide by the number of ranks; split: by about its square root before and after "
        "the sum",
    )
    reduce_order: str = one_of(
        "rank ring tree fp32",
        "Sum over ranks; rank: in order; ring: as gloo; tree: pairs; fp32: in FP32, rounded once",
    )
    matmul: MatmulConfig = setting(MatmulConfig, "Linear layers in 8 or 4 bits")
    attention: AttentionConfig = setting(AttentionConfig, "Attention in FP8")
    update: UpdateConfig = setting(UpdateConfig, "Storage of weights and optimizer state")
    overrides: dict[str, str] = setting(
        dict, "Dtype of modules by name pattern, such as precision.overrides.fc=fp32"
    )
    switch: list[SwitchConfig] = setting(
        list, "Later modes, [{at: 0.85, to: MODE}]; at: share of the run, or a step; []: none"
    )


# A loss scale and its reciprocal are normal FP32 numbers.
_scale = partial(ranged, None, at_least=2.0**-126, at_most=2.0**126)


@dataclass(slots=True)
class ScalerConfig:
    """Loss scaler; `kind` is its rule, and fields that the rule does not use stay null."""

    name: str = setting(MISSING, "Name of the loss scaler and of its file")
    kind: str = one_of(SCALERS.keys(), "Rule of the loss scale; none: no scaling", default="none")
    per: str = one_of(
        "shared optimizer", "In a GAN: one loss scale for all optimizers, or one for each"
    )
    scale: float | None = _scale("Constant loss scale")
    init_scale: float | None = _scale("Loss scale at the start")
    growth_factor: float | None = ranged(None, "Factor on the loss scale when it grows", above=1.0)
    backoff_factor: float | None = fraction(None, "Factor on the loss scale after an overflow")
    growth_interval: int | None = count(
        None, "Number of steps without overflow after which the loss scale grows", below=2**31
    )
    hysteresis: int | None = count(
        None,
        "Number of overflows since the last growth needed to lower the scale; 1: each one does",
        below=2**31,
    )
    min_scale: float | None = _scale("Smallest loss scale")
    max_scale: float | None = _scale("Largest loss scale")
    max_consecutive_skips: int | None = count(
        None, "Skips in a row, at the smallest scale, that end a run as diverged", below=2**31
    )
    # Settings of single rules; null: as in torch.amp.
    growth_delay: int | None = from_zero(
        None, "Extra steps before the first growth after start or overflow; null: 0", below=2**31
    )
    refill_on_clean_step: bool | None = setting(
        None,
        "Whether each step without overflow restores the hysteresis; null, false: only growth does",
    )
    tolerance: float | None = part(
        None, "Smallest share of overflow steps that lowers the scale; null: 0 (every overflow)"
    )
    hold_at_floor: bool | None = setting(
        None, "Keep a scale that would fall to min_scale or below; null, false: use min_scale"
    )
    log_max: float | None = ranged(
        None, "Value overflow_std_dev deviations above the mean of log2(largest scaled gradient)"
    )
    beta1: float | None = fraction(None, "Decay of the moving average of log2(max gradient)")
    beta2: float | None = fraction(None, "Decay for the standard deviation of log2(max gradient)")
    overflow_std_dev: float | None = from_zero(
        None,
        "Headroom below log_max in standard deviations; 3.09: 1 step in 1,000 overflows",
        at_most=100.0,
    )

    @property
    def component(self) -> UpdateRule:
        return SCALERS[self.kind]


_RANGE = ("init_scale", "min_scale", "max_scale", "max_consecutive_skips")
scaler("none", builder="mprun.precision.loss_scale:NoLossScale")(ScalerConfig)
scaler(
    "static",
    builder="mprun.precision.loss_scale:StaticLossScale",
    needs=("scale", "max_consecutive_skips"),
)(ScalerConfig)
scaler(
    "dynamic",
    builder="mprun.precision.loss_scale:DynamicLossScale",
    needs=("growth_factor", "backoff_factor", "growth_interval", "hysteresis", *_RANGE),
    takes=("growth_delay", "refill_on_clean_step", "tolerance", "hold_at_floor"),
)(ScalerConfig)
scaler(
    "logmax",
    builder="mprun.precision.loss_scale:LogMaxLossScale",
    needs=("log_max", "beta1", "beta2", "overflow_std_dev", *_RANGE),
)(ScalerConfig)


@dataclass(slots=True)
class TrainConfig:
    """Length and intervals of a run; all counts are in steps (batches), not updates."""

    steps: int | None = count(
        100, "Run length in steps; null if train.epochs is set", at_most=MAX_STEPS, role=LENGTH
    )
    epochs: float | None = positive(
        None, "Run length in epochs; needs train.steps=null", at_most=10_000.0, role=LENGTH
    )
    log_every: int = count(10, "Steps from one record and progress line to the next", role=READING)
    eval_every: int | None = from_zero(
        0,
        "Number of steps between two evaluations; null: a fifth of the run; 0: only at the end",
        role=INTERVAL,
    )
    checkpoint_every: int = from_zero(
        0, "Steps between two checkpoints; 0: only when a signal stops the run", role=READING
    )
    keep_checkpoints: int = ranged(
        2, "Number of checkpoints to keep, the newest ones", at_least=2, role=READING
    )
    clip_norm: float | None = positive(
        None, "Largest global norm of unscaled gradients; null: no clipping"
    )
    clip_modules: list[str] = setting(
        list, "Module-name patterns for clip_norm; empty: all modules"
    )
    accumulate: int = count(1, "Number of micro-batches of data.batch_size samples in a step")
    activation_checkpointing: bool = setting(
        False, "Whether the backward pass recomputes each block's activations", role=READING
    )
    eval_arithmetic: str = one_of(
        "fp32 mode",
        "Evaluate the master weights in FP32, or in the arithmetic of the precision mode",
    )
    # Execution of a step; none of these changes the result, beyond rounding.
    cuda_graph: str = one_of(
        "auto on off",
        "Whether steps are replayed as a CUDA graph; auto: if the host limits the speed",
        role=READING,
    )
    compile: str = one_of(
        "auto off default max-autotune-no-cudagraphs",
        "Mode of torch.compile for the network; auto: on CUDA, if measured to be faster",
        restates=False,
    )
    channels_last: str = one_of(
        "auto on off",
        "Whether weights and activations are NHWC; auto: on CUDA for 16-bit and TF32 products",
    )
    autotune: str = one_of(
        "auto on off", "Whether cudnn.benchmark is on; auto: on unless deterministic=true"
    )

    def evaluates_every(self, steps: int) -> int:
        """Return the steps between two evaluations in a run of `steps`; 0: only at its end."""
        return -(-steps // 5) if self.eval_every is None else self.eval_every


@dataclass(slots=True)
class CompareConfig:
    """The subject of a verdict; fixed before the runs."""

    # Composing the configuration fills in this and the margin.
    metric: str | None = setting(
        None, "Metric of the final evaluation to judge; null: top1 for classifiers, otherwise loss"
    )
    margin: float | None = positive(
        None,
        "Largest difference that is a match, as a share of the baseline's mean or in metric units",
    )
    higher_is_better: bool | None = setting(
        None, "Whether higher values are better; null: as the task declares", role=JUDGED
    )
    baseline: str = setting("fp32", "Precision mode with which the other modes are compared")
    window: int = count(1, "Number of evaluations to average, counted from the last")
    plan: list[int] | None = setting(
        None,
        "-m until=decided: [first seed, seed count at first verdict, maximum count]; null: no plan",
        role=LABEL,
    )
    pair_sd: float | None = positive(
        None,
        "Standard deviation of the difference of two runs, in the margin's unit; null: unknown",
        role=LABEL,
    )
    pair_sd_source: str | None = setting(
        None, "Runs from which pair_sd was computed; null only with pair_sd=null", role=LABEL
    )


@dataclass(slots=True)
class RunConfig:
    """The whole configuration of one run."""

    model: ModelConfig = setting(MISSING, "The network and its task")
    data: DataConfig = setting(MISSING, "Data for training and evaluation")
    optim: OptimConfig = setting(OptimConfig, "Optimizer and learning-rate schedule")
    precision: PrecisionConfig = setting(PrecisionConfig, "The precision mode")
    scaler: ScalerConfig = setting(ScalerConfig, "The loss scaler")
    train: TrainConfig = setting(TrainConfig, "Length, intervals and execution of a run")
    compare: CompareConfig = setting(
        CompareConfig, "Metric, margin and baseline of a verdict, fixed before the runs"
    )
    numerics: NumericsConfig = setting(NumericsConfig, "Measurements during training", role=LABEL)
    seed: int = from_zero(
        0,
        "Seed of the initial weights, data order, augmentation and dropout",
        below=2**63,
        role=SEED,
    )
    device: str = one_of(
        "auto cuda cpu", "Device of the run; auto: CUDA if there is one", role=MACHINE
    )
    devices: str = setting(
        "1", "Number of ranks on this machine, one GPU each; auto: all GPUs", role=READING
    )
    nodes: int = count(
        1,
        "Number of machines; the key devices sets the number of ranks on each machine",
        at_most=65_536,
        role=READING,
    )
    restarts: int = from_zero(
        0,
        "Number of restarts from the last checkpoint after a lost rank",
        at_most=1000,
        role=READING,
    )
    dist: DistConfig = setting(
        DistConfig,
        "Settings for several ranks: how they sum gradients and wait for each other",
        role=READING,
    )
    cpu_half: str = one_of(
        "emulated native",
        "16-bit operations on a CPU: emulated in FP32 and rounded once, or by torch's kernels",
    )
    threads: int | None = count(
        None,
        "Number of CPU threads; null: torch's default, or a share of the cores with -j",
        at_most=1024,
        role=MACHINE,
    )
    verbose: bool = setting(
        False, "Whether to print the whole table of step 1; -v sets it", role=READING
    )
    deterministic: bool = setting(False, "Whether to use deterministic kernels only")
    name: str | None = setting(None, "Label in the path of the run; null: no label", role=LABEL)
    output_root: str = setting(
        "outputs", "Folder in which run directories are created", role=LABEL, path=True
    )
    output_dir: str | None = setting(
        None, "Directory of the run; null: named after the configuration", role=LABEL, path=True
    )
    resume: str | None = setting(
        None, "Run directory to continue; null: a new run", role=LABEL, path=True
    )
    basis: str | None = setting(
        None, "Origin of the settings, such as the hash of a file; null: not stated", role=LABEL
    )

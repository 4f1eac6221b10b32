"""Every option of mprun as typed data, and what each one means; imports neither torch nor a model.

A field says its default, what is allowed, which rule or optimizer reads it (`of`) and its role:
what another value means for hash, resume, comparison and tables (`mprun.config.rules.Role`). The
classes are `slots=True` so that `+group.unknown=1` is an error too (OmegaConf sets attributes, and
a slotted class refuses unknown ones). A value of `null` means "does not apply" or "take it from the
model, the data or the mode"; `mprun.config.check` holds the rules across fields.

Precision modes and loss scalers are no list here: they are the files of conf/precision and
conf/scaler, and those of the user's own `--config-dir`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from mprun.config.rules import LABEL, LENGTH, MACHINE, READING, SEED, one_of, ranged, setting

DTYPES = ("fp32", "fp16", "bf16")
MAX_STEPS = 10_000_000


@dataclass(slots=True)
class ModelConfig:
    """Base of the model schemas; `name` selects the builder, `learns` says what kind of task."""

    learns: ClassVar[str] = "classification"
    name: str = MISSING


@dataclass(slots=True)
class AlexNetConfig(ModelConfig):
    """`variant` torchvision: one tower, no LRN; 2012: two groups and local response norm."""

    name: str = "alexnet"
    variant: str = one_of("torchvision", "torchvision", "2012")
    dropout: float = ranged(0.5, at_least=0.0, below=1.0)
    num_classes: int | None = ranged(None, at_least=2)  # null: as many as the data has
    label_smoothing: float = ranged(0.0, at_least=0.0, below=1.0)


@dataclass(slots=True)
class ResNet50Config(ModelConfig):
    """ResNet-50 v1.5 (stride 2 in the 3x3 convolution)."""

    name: str = "resnet50"
    num_classes: int | None = ranged(None, at_least=2)  # null: as many as the data has
    label_smoothing: float = ranged(0.0, at_least=0.0, below=1.0)


@dataclass(slots=True)
class LSTMConfig(ModelConfig):
    """Word or character language model; sizes in units, `projection_size` 0 means none."""

    learns: ClassVar[str] = "language_model"
    name: str = "lstm_lm"
    vocab_size: int | None = ranged(None, at_least=2)  # null: as large as the data's
    embedding_size: int = ranged(200, at_least=1)
    hidden_size: int = ranged(200, at_least=1)
    num_layers: int = ranged(2, at_least=1, at_most=1000)
    projection_size: int = ranged(0, at_least=0)
    dropout: float = ranged(0.0, at_least=0.0, below=1.0)
    init_range: float = ranged(0.1, above=0.0)
    forget_bias: float = ranged(0.0)
    pad_to_multiple: int = ranged(1, at_least=1)  # 8 keeps Tensor Cores busy in FP16
    # The gradient is that of the mean over tokens, or of the sum over time averaged over streams,
    # as in the published recipes. The loss that is reported is always the mean.
    time_reduction: str = one_of("mean", "mean", "sum")
    # Words drawn per step for a sampled softmax (training only); null: the full softmax.
    sampled_softmax: int | None = ranged(None, at_least=1)
    # With sampled_softmax: multiplies the embedding's gradient, as the code behind bigLSTM does.
    embedding_gradient_factor: float = ranged(1.0, above=0.0)


@dataclass(slots=True)
class DCGANConfig(ModelConfig):
    """Generator and discriminator of Radford et al.; widths in channels."""

    learns: ClassVar[str] = "gan"
    name: str = "dcgan"
    image_size: int = one_of(64, 32, 64, 128)
    latent_size: int = ranged(100, at_least=1)
    generator_width: int = ranged(64, at_least=1)
    discriminator_width: int = ranged(64, at_least=1)


@dataclass(slots=True)
class ConvAutoencoderConfig(ModelConfig):
    """DCGAN's discriminator trunk as encoder and its generator as decoder, without BatchNorm."""

    learns: ClassVar[str] = "reconstruction"
    name: str = "conv_autoencoder"
    image_size: int = one_of(64, 32, 64, 128)
    code_size: int = ranged(32, at_least=2)
    width: int = ranged(8, at_least=1)


@dataclass(slots=True)
class CustomModelConfig(ModelConfig):
    """The user's own network: `factory` is package.module:function (docs/own_data.md)."""

    name: str = "custom"
    factory: str = MISSING  # only from the command line or the user's own --config-dir
    # classification, language_model, gan, or package.module:Class of a task of one's own
    task: str = "classification"
    options: dict[str, Any] = setting(dict)  # keyword arguments of the factory
    label_smoothing: float = ranged(0.0, at_least=0.0, below=1.0)  # classification
    latent_size: int = ranged(100, at_least=1)  # gan: length of the generator's codes
    time_reduction: str = one_of("mean", "mean", "sum")  # language_model


MODELS: dict[str, type[ModelConfig]] = {
    "alexnet": AlexNetConfig,
    "resnet50": ResNet50Config,
    "lstm_lm": LSTMConfig,
    "dcgan": DCGANConfig,
    "conv_autoencoder": ConvAutoencoderConfig,
    "custom": CustomModelConfig,
}


def task_of(model: ModelConfig) -> str:
    """classification, language_model, gan or reconstruction."""
    return model.task if isinstance(model, CustomModelConfig) else model.learns


@dataclass(slots=True)
class DataConfig:
    """Base of the data schemas; `name` selects the builder.

    family: what a source holds. on_disk: whether its files lie below `root`. decodes: whether files
    are decoded on the way, by loader processes.
    """

    family: ClassVar[str] = "images"
    on_disk: ClassVar[bool] = False
    decodes: ClassVar[bool] = False

    name: str = MISSING
    root: str | None = setting(None, role=READING)  # folder; null: embedded or synthetic data
    batch_size: int = ranged(32, at_least=1)  # samples per micro-batch
    # Loader processes; null: as many as pay for files that are decoded on the way, else none.
    workers: int | None = ranged(None, at_least=0, at_most=256, role=READING)


@dataclass(slots=True)
class ImagesConfig(DataConfig):
    """What every source of images has."""

    image_size: int = ranged(32, at_least=8, at_most=512)
    channels: int = one_of(3, 1, 3)
    # standardised: minus the channel means, over the deviations (image files: ImageNet's);
    # mean_subtracted: 0-255 minus the means (Caffe); tanh: [-1, 1].
    value_range: str = one_of("standardised", "standardised", "mean_subtracted", "tanh")


@dataclass(slots=True)
class DigitsConfig(ImagesConfig):
    """scikit-learn's 1,797 handwritten digits, enlarged from 8x8."""

    name: str = "digits"


@dataclass(slots=True)
class DocsTextConfig(DataConfig):
    """The text of CPython's own documentation (`pydoc_data.topics`)."""

    family: ClassVar[str] = "text"
    name: str = "docs_text"
    level: str = one_of("word", "word", "char")
    sequence_length: int = ranged(20, at_least=1)  # tokens per step and stream
    # Most frequent words; null: all.
    vocab_limit: int | None = ranged(None, at_least=3, at_most=1_000_000)
    vocab_multiple: int = ranged(8, at_least=1)  # the vocabulary is padded to a multiple


@dataclass(slots=True)
class SyntheticImagesConfig(ImagesConfig):
    """Random images with random labels: plumbing and speed, nothing to learn."""

    name: str = "synthetic_images"
    num_classes: int = ranged(10, at_least=2)
    train_size: int = ranged(1024, at_least=1)
    eval_size: int = ranged(256, at_least=1)


@dataclass(slots=True)
class SyntheticTokensConfig(DataConfig):
    """Random tokens: plumbing and speed, nothing to learn."""

    family: ClassVar[str] = "text"
    name: str = "synthetic_tokens"
    vocab_size: int = ranged(1000, at_least=2)
    sequence_length: int = ranged(20, at_least=1)
    train_tokens: int = ranged(100_000, at_least=2)
    eval_tokens: int = ranged(10_000, at_least=2)


@dataclass(slots=True)
class ImageFolderConfig(ImagesConfig):
    """Image files below `root`, decoded on the way by loader processes.

    root/train and root/val (or valid, validation, test) with one folder per class, or root alone
    with one folder per class, of which `eval_share` of the files are held out. `layout: flat`
    takes every image below root, at any depth, without labels (DCGAN).
    """

    on_disk: ClassVar[bool] = True
    decodes: ClassVar[bool] = True
    name: str = "image_folder"
    image_size: int = ranged(224, at_least=8, at_most=1024)
    layout: str = one_of("classes", "classes", "flat")
    eval_share: float = ranged(0.1, above=0.0, below=1.0)  # where there is one folder only
    # resized_crop: RandomResizedCrop, evaluation resize and centre crop (PyTorch's ImageNet
    # script); crop: resize to resize_to x resize_to, random crop (Caffe); centre: the middle of
    # the image, no random crop.
    augmentation: str = one_of("resized_crop", "resized_crop", "crop", "centre")
    flip: bool = True  # mirror half of the training images
    # Pixels before the crop: of the shorter side (resized_crop), of both (crop). null: 8/7 of
    # image_size, which is 256 for 224.
    resize_to: int | None = ranged(None, at_least=8, at_most=2048)
    centre_crop: int | None = ranged(None, at_least=8, at_most=8192)  # centre: before resizing
    on_corrupt: str = one_of("stop", "stop", "skip")  # skip: the next readable image, counted
    # Batches in flight per loader process.
    prefetch: int = ranged(2, at_least=1, at_most=64, role=READING)


@dataclass(slots=True)
class ImageNetConfig(ImageFolderConfig):
    """ILSVRC12: 1,000 class folders below root/train and root/val, or the original archives."""

    name: str = "imagenet"


@dataclass(slots=True)
class Cifar10Config(ImagesConfig):
    """CIFAR-10 in torchvision's files, the binary ones, or class folders of JPEG or PNG.

    Decoded once and held in memory on the device; other sizes than 32 are resized there.
    """

    on_disk: ClassVar[bool] = True
    name: str = "cifar10"
    channels: int = one_of(3, 3)
    augmentation: str = one_of("padded_crop", "padded_crop", "none")  # 4 pixels, random crop
    flip: bool = True  # mirror half of the training images
    train_size: int | None = ranged(None, at_least=1)  # the first of a fixed order; null: all
    eval_size: int | None = ranged(None, at_least=1)


@dataclass(slots=True)
class TextConfig(DataConfig):
    """Text files below `root` (train, valid, test), blank-separated words, one vocabulary."""

    family: ClassVar[str] = "text"
    on_disk: ClassVar[bool] = True
    name: str = "text"
    sequence_length: int = ranged(35, at_least=1)  # tokens per step and stream
    # Most frequent words; null: all.
    vocab_limit: int | None = ranged(None, at_least=3, at_most=1_000_000)
    vocab_multiple: int = ranged(8, at_least=1)  # the vocabulary is padded to a multiple
    lower: bool = False  # lower-case everything
    eval_split: str = one_of("valid", "valid", "test")
    rotate: bool = True  # each epoch starts elsewhere in the text; false: always at its start
    eval_tokens: int | None = ranged(None, at_least=32)  # first tokens of eval_split; null: all
    # Folder of the encoded text; null: mprun in the user's cache.
    cache: str | None = setting(None, role=READING)


@dataclass(slots=True)
class Lm1bConfig(DataConfig):
    """One Billion Word: shards of shuffled sentences and the conventional vocabulary file."""

    family: ClassVar[str] = "text"
    on_disk: ClassVar[bool] = True
    name: str = "lm1b"
    sequence_length: int = ranged(20, at_least=1)
    # File, one word a line; null: the one below root.
    vocabulary: str | None = setting(None, role=READING)
    vocab_multiple: int = ranged(8, at_least=1)
    eval_split: str = one_of("valid", "valid", "test")
    eval_tokens: int | None = ranged(None, at_least=32)  # first tokens of eval_split; null: all
    cache: str | None = setting(None, role=READING)


@dataclass(slots=True)
class CustomDataConfig(DataConfig):
    """The user's own data: `factory` is package.module:function (docs/own_data.md)."""

    decodes: ClassVar[bool] = True
    name: str = "custom"
    factory: str = MISSING  # only from the command line or the user's own --config-dir
    options: dict[str, Any] = setting(dict)  # keyword arguments of the factory
    image_size: int | None = ranged(None, at_least=8)  # where the model asks for it (dcgan)


DATA: dict[str, type[DataConfig]] = {
    "digits": DigitsConfig,
    "docs_text": DocsTextConfig,
    "synthetic_images": SyntheticImagesConfig,
    "synthetic_tokens": SyntheticTokensConfig,
    "image_folder": ImageFolderConfig,
    "imagenet": ImageNetConfig,
    "cifar10": Cifar10Config,
    "text": TextConfig,
    "lm1b": Lm1bConfig,
    "custom": CustomDataConfig,
}


@dataclass(slots=True)
class OptimConfig:
    """Optimizer and learning-rate schedule; the schedule counts applied updates."""

    name: str = one_of("sgd", "sgd", "adam", "adamw", "adagrad")
    lr: float = ranged(0.1, above=0.0)
    weight_decay: float = ranged(0.0, at_least=0.0)
    momentum: float | None = ranged(None, at_least=0.0, below=1.0, of=("sgd",))
    nesterov: bool | None = setting(None, of=("sgd",), optional=True)
    betas: list[float] | None = ranged(None, at_least=0.0, below=1.0, of=("adam", "adamw"))
    eps: float | None = ranged(None, at_least=0.0, of=("adam", "adamw", "adagrad"))
    initial_accumulator: float | None = ranged(None, at_least=0.0, of=("adagrad",))
    # single_pass: casts, unscaling, update and copy back in one pass over the weights.
    implementation: str = one_of("auto", "auto", "single_pass", "fused", "foreach", "loop")
    schedule: str = one_of(
        "constant", "constant", "cosine", "linear", "polynomial", "step", "epoch_decay"
    )
    warmup_updates: int = ranged(0, at_least=0)
    warmup_epochs: float = ranged(0.0, at_least=0.0)  # instead of warmup_updates
    final_factor: float = ranged(0.0, at_least=0.0, at_most=1.0)  # share of lr at the end
    power: float = ranged(1.0, above=0.0)  # polynomial
    # step: shares of the run at which the rate drops.
    milestones: list[float] = ranged(list, above=0.0, below=1.0)
    gamma: float = ranged(0.1, above=0.0, below=1.0)  # step, epoch_decay: factor of each drop
    constant_epochs: float | None = ranged(None, at_least=0.0)  # epoch_decay: before the first drop
    bias_lr_factor: float = ranged(1.0, above=0.0)  # rate of biases over that of weights
    decay_bias: bool = True  # weight decay on biases
    decay_norm: bool = True  # weight decay on the parameters of norm layers
    # Evaluate an exponential moving average of the weights, per applied update; null: none.
    average_decay: float | None = ranged(None, above=0.0, below=1.0)
    average_modules: list[str] = setting(list)  # module-name patterns; none: all


@dataclass(slots=True)
class PrecisionConfig:
    """One precision mode as plain values; its name is that of its file."""

    name: str = MISSING
    param_dtype: str = one_of("fp32", *DTYPES)  # weights, activations and their gradients
    norm_dtype: str = one_of("fp32", *DTYPES)  # parameters and statistics of norm layers
    master_dtype: str | None = one_of("fp32", "fp32")  # null: parameters are updated in place
    grad_dtype: str = one_of("fp32", *DTYPES)  # unscaling, clipping and accumulation
    loss_dtype: str = one_of("fp32", *DTYPES)  # softmax and loss
    autocast_dtype: str | None = one_of(None, "fp16", "bf16")  # torch.autocast's op lists
    fp32_math: str = one_of("ieee", "ieee", "tf32")  # FP32 products: full or TF32
    overrides: dict[str, str] = setting(dict)  # module-name pattern -> dtype


_DYNAMIC, _LOGMAX = ("dynamic",), ("logmax",)
_MOVING = (*_DYNAMIC, *_LOGMAX)


@dataclass(slots=True)
class ScalerConfig:
    """Loss scaler; `kind` says which rule, a field that the rule does not use stays null."""

    name: str = MISSING
    kind: str = one_of("none", "none", "static", "dynamic", "logmax")
    per: str = one_of("shared", "shared", "optimizer", "loss")  # one scale for what
    scale: float | None = ranged(None, above=0.0, of=("static",))
    init_scale: float | None = ranged(None, above=0.0, of=_MOVING)
    growth_factor: float | None = ranged(None, above=1.0, of=_DYNAMIC)
    backoff_factor: float | None = ranged(None, above=0.0, below=1.0, of=_DYNAMIC)
    growth_interval: int | None = ranged(None, at_least=1, below=2**31, of=_DYNAMIC)
    hysteresis: int | None = ranged(None, at_least=1, below=2**31, of=_DYNAMIC)
    min_scale: float | None = ranged(None, above=0.0, of=_MOVING)
    max_scale: float | None = ranged(None, above=0.0, of=_MOVING)
    max_consecutive_skips: int | None = ranged(
        None, at_least=1, below=2**31, of=("static", *_MOVING)
    )
    # What single rules need (mprun.precision.loss_scale says what they mean); null: as torch.amp.
    growth_delay: int | None = ranged(None, at_least=0, below=2**31, of=_DYNAMIC, optional=True)
    refill_on_clean_step: bool | None = setting(None, of=_DYNAMIC, optional=True)
    tolerance: float | None = ranged(None, at_least=0.0, at_most=1.0, of=_DYNAMIC, optional=True)
    hold_at_floor: bool | None = setting(None, of=_DYNAMIC, optional=True)
    log_max: float | None = ranged(None, of=_LOGMAX)
    beta1: float | None = ranged(None, above=0.0, below=1.0, of=_LOGMAX)
    beta2: float | None = ranged(None, above=0.0, below=1.0, of=_LOGMAX)
    overflow_std_dev: float | None = ranged(None, at_least=0.0, at_most=100.0, of=_LOGMAX)


@dataclass(slots=True)
class TrainConfig:
    """Length and rhythm of a run; all counts are in steps (batches), not updates."""

    # One of the two, the other is null.
    steps: int | None = ranged(100, at_least=1, at_most=MAX_STEPS, role=LENGTH)
    epochs: float | None = ranged(None, above=0.0, at_most=10_000.0, role=LENGTH)
    log_every: int = ranged(10, at_least=1, role=READING)
    eval_every: int = ranged(0, at_least=0, role=LENGTH)  # 0: only at the end
    # 0: only when a signal stops the run.
    checkpoint_every: int = ranged(0, at_least=0, role=READING)
    keep_checkpoints: int = ranged(2, at_least=2, role=READING)
    clip_norm: float | None = ranged(None, above=0.0)  # global norm of unscaled gradients
    clip_modules: list[str] = setting(list)  # module-name patterns; none: all
    accumulate: int = ranged(1, at_least=1)  # micro-batches per step
    eval_arithmetic: str = one_of("fp32", "fp32", "mode")
    # How a step is executed; none of these changes what is computed, beyond rounding.
    # Replay the whole step, by the kernels of the eager one; CUDA only.
    cuda_graph: str = one_of("auto", "auto", "on", "off", role=READING)
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
    modules: list[str] = setting(list)
    # Also compute the steps divisible by this in FP32, from the same weights; 0: never.
    shadow_every: int = ranged(0, at_least=0)
    keep_failure: bool = True  # keep what a replay of the failing step needs


@dataclass(slots=True)
class RunConfig:
    """The whole configuration of one run."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    optim: OptimConfig = setting(OptimConfig)
    precision: PrecisionConfig = setting(PrecisionConfig)
    scaler: ScalerConfig = setting(ScalerConfig)
    train: TrainConfig = setting(TrainConfig)
    compare: CompareConfig = setting(CompareConfig)
    numerics: NumericsConfig = setting(NumericsConfig, role=LABEL)
    seed: int = ranged(0, at_least=0, below=2**63, role=SEED)
    device: str = one_of("auto", "auto", "cuda", "cpu", role=MACHINE)
    cpu_half: str = one_of("emulated", "emulated", "native")  # 16-bit products on a CPU
    # Of the CPU; null: torch's.
    threads: int | None = ranged(None, at_least=1, at_most=1024, role=MACHINE)
    deterministic: bool = False  # deterministic kernels, cudnn.benchmark off
    name: str | None = setting(None, role=LABEL)  # free label in the path
    output_root: str = setting("outputs", role=LABEL)
    # Exact run directory; null: named from the configuration.
    output_dir: str | None = setting(None, role=LABEL)
    resume: str | None = setting(None, role=LABEL)  # run directory to continue


def register_schemas(store: Any) -> None:
    """Put the root schema and the model and data schemas into Hydra's ConfigStore, once.

    Under `schema/` they stay out of the list of options that a user sees.
    """
    if "run_schema.yaml" in store.repo:  # a sixth of a composition's time
        return
    store.store(name="run_schema", node=RunConfig)
    for name, model in MODELS.items():
        store.store(group="schema/model", name=name, node=model)
    for name, data in DATA.items():
        store.store(group="schema/data", name=name, node=data)

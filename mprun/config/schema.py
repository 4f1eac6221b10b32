"""Every option of mprun as typed data, and what each one means; imports neither torch nor a model.

A field says its meaning (`doc`, which `mprun --help KEY` and the page of keys print), its default,
what is allowed, which rule or optimizer reads it (`of`) and its role: what another value means for
hash, resume, comparison and tables (`mprun.config.rules.Role`). The classes are `slots=True` so
that `+group.unknown=1` is an error too (OmegaConf sets attributes, and a slotted class refuses
unknown ones). A value of `null` means "does not apply" or "take it from the model, the data or the
mode"; `mprun.config.check` holds the rules across fields.

Precision modes and loss scalers are no list here: they are the files of conf/precision and
conf/scaler, and those of the user's own `--config-dir`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from mprun.config.rules import LABEL, LENGTH, MACHINE, READING, SEED, one_of, ranged, setting

DTYPES = ("fp32", "fp16", "bf16")
MAX_STEPS = 10_000_000

# Meanings that several classes share.
_NETWORK = "Which network is built; model=OPTION sets it"
_CLASSES = "Outputs of the last layer; null: as many as the data has classes"
_SMOOTHING = "Label smoothing of the cross-entropy, in classification; 0: none"
_WIDTH = "Share of the published network's channels and hidden units that is built"
_DROPOUT = "Dropout probability before the last layer"
_AUXILIARY = (
    "Factor on each auxiliary head's loss in training; 0: mprun's networks have no such heads"
)
_FREEZE = "Only the convolutions for boxes and classes learn, those that find features do not"
_WEIGHTS = "File of initial weights (torch.save), of a VGG-16 or of the whole; null: random ones"
_LATENT = "Length of the generator's random codes"
_TIME_REDUCTION = "Gradient of the mean over tokens, or of the sum over time and mean over streams"
_SOURCE = "Which source of data is built; data=OPTION sets it"
_SIDE = "Side of an image in pixels"
_FLIP = "Mirror half of the training images"
_TRAIN_FIRST = "Training images, the first of a fixed order; null: all"
_EVAL_FIRST = "Held-out images, the first of a fixed order; null: all"
_PREFETCH = "Batches in flight per loader process"
_SEQUENCE = "Tokens per step and stream"
_VOCAB_LIMIT = "Most frequent words that are kept; null: all"
_VOCAB_MULTIPLE = "The vocabulary is padded to a multiple of this"
_EVAL_SPLIT = "Split that is evaluated"
_EVAL_TOKENS = "First tokens of eval_split that are evaluated; null: all"
_CACHE = "Folder of the encoded text; null: mprun in the user's cache folder"


@dataclass(slots=True)
class ModelConfig:
    """Base of the model schemas; `name` selects the builder, `learns` says what kind of task.

    recurrent: whether the network has LSTM or GRU layers.
    """

    learns: ClassVar[str] = "classification"
    recurrent: ClassVar[bool] = False
    name: str = setting(MISSING, doc=_NETWORK)


@dataclass(slots=True)
class AlexNetConfig(ModelConfig):
    """`variant` torchvision: one tower, no LRN; 2012: two groups and local response norm.

    torchvision's has no other `width` than 1.
    """

    name: str = setting("alexnet", doc=_NETWORK)
    variant: str = one_of(
        "torchvision",
        "torchvision",
        "2012",
        doc="torchvision: one tower, no LRN; 2012: two groups and local response normalisation",
    )
    dropout: float = ranged(
        0.5, at_least=0.0, below=1.0, doc="Dropout probability before the fully connected layers"
    )
    width: float = ranged(1.0, above=0.0, at_most=4.0, doc=_WIDTH)
    num_classes: int | None = ranged(None, at_least=2, doc=_CLASSES)
    label_smoothing: float = ranged(0.0, at_least=0.0, below=1.0, doc=_SMOOTHING)


@dataclass(slots=True)
class ResNet50Config(ModelConfig):
    """`variant` v1.5: torchvision's, stride 2 in the 3x3 convolution, no other `width` than 1."""

    name: str = setting("resnet50", doc=_NETWORK)
    variant: str = one_of(
        "v1.5",
        "v1.5",
        "preactivation",
        doc="v1.5: torchvision's; preactivation: BatchNorm and ReLU before each convolution",
    )
    width: float = ranged(1.0, above=0.0, at_most=4.0, doc=_WIDTH)
    num_classes: int | None = ranged(None, at_least=2, doc=_CLASSES)
    label_smoothing: float = ranged(0.0, at_least=0.0, below=1.0, doc=_SMOOTHING)


@dataclass(slots=True)
class VGG16Config(ModelConfig):
    """VGG-D, 16 layers with weights, without BatchNorm."""

    name: str = setting("vgg16", doc=_NETWORK)
    dropout: float = ranged(
        0.5, at_least=0.0, below=1.0, doc="Dropout probability behind the hidden linear layers"
    )
    width: float = ranged(1.0, above=0.0, at_most=4.0, doc=_WIDTH)
    num_classes: int | None = ranged(None, at_least=2, doc=_CLASSES)
    label_smoothing: float = ranged(0.0, at_least=0.0, below=1.0, doc=_SMOOTHING)


@dataclass(slots=True)
class InceptionV2Config(ModelConfig):
    """BN-Inception, which has no auxiliary heads."""

    name: str = setting("inception_v2", doc=_NETWORK)
    dropout: float = ranged(0.0, at_least=0.0, below=1.0, doc=_DROPOUT)
    width: float = ranged(1.0, above=0.0, at_most=4.0, doc=_WIDTH)
    num_classes: int | None = ranged(None, at_least=2, doc=_CLASSES)
    label_smoothing: float = ranged(0.0, at_least=0.0, below=1.0, doc=_SMOOTHING)


@dataclass(slots=True)
class GoogLeNetConfig(InceptionV2Config):
    """Inception v1 as Caffe has it: local response normalisation, two auxiliary heads."""

    name: str = setting("googlenet", doc=_NETWORK)
    dropout: float = ranged(0.4, at_least=0.0, below=1.0, doc=_DROPOUT)
    aux_weight: float = ranged(0.3, at_least=0.0, at_most=1.0, doc=_AUXILIARY)


@dataclass(slots=True)
class InceptionV3Config(GoogLeNetConfig):
    """Inception v3 as torchvision has it: one auxiliary head."""

    name: str = setting("inception_v3", doc=_NETWORK)
    dropout: float = ranged(0.5, at_least=0.0, below=1.0, doc=_DROPOUT)
    aux_weight: float = ranged(0.4, at_least=0.0, at_most=1.0, doc=_AUXILIARY)


@dataclass(slots=True)
class LSTMConfig(ModelConfig):
    """Word or character language model; sizes in units, `projection_size` 0 means none."""

    learns: ClassVar[str] = "language_model"
    recurrent: ClassVar[bool] = True
    name: str = setting("lstm_lm", doc=_NETWORK)
    vocab_size: int | None = ranged(
        None, at_least=2, doc="Words in embedding and softmax; null: as many as the data has"
    )
    embedding_size: int = ranged(200, at_least=1, doc="Units of the embedding of a word")
    hidden_size: int = ranged(200, at_least=1, doc="Units of each LSTM layer")
    num_layers: int = ranged(2, at_least=1, at_most=1000, doc="LSTM layers, one above the other")
    projection_size: int = ranged(
        0, at_least=0, doc="Units to which each LSTM layer's output is projected; 0: no projection"
    )
    dropout: float = ranged(
        0.0,
        at_least=0.0,
        below=1.0,
        doc="Dropout probability on embedding, between layers and on outputs; none over time",
    )
    init_range: float = ranged(
        0.1, above=0.0, doc="Every parameter starts uniform between minus and plus this"
    )
    forget_bias: float = ranged(0.0, doc="Added to the forget gates' input bias at the start")
    pad_to_multiple: int = ranged(
        1,
        at_least=1,
        doc="Sizes are rounded up to a multiple of this; 8 suits Tensor Cores in FP16",
    )
    time_reduction: str = one_of("mean", "mean", "sum", doc=_TIME_REDUCTION)
    sampled_softmax: int | None = ranged(
        None,
        at_least=1,
        doc="Words drawn per step for a sampled softmax, in training only; null: the full softmax",
    )
    embedding_gradient_factor: float = ranged(
        1.0, above=0.0, doc="With sampled_softmax: factor on the embedding's gradient (bigLSTM)"
    )


@dataclass(slots=True)
class GPTConfig(ModelConfig):
    """Decoder-only transformer: GPT-2 as in nanoGPT, Llama's parts as values; without dropout."""

    learns: ClassVar[str] = "language_model"
    name: str = setting("gpt", doc=_NETWORK)
    vocab_size: int | None = ranged(
        None, at_least=2, doc="Words in embedding and softmax; null: as many as the data has"
    )
    context_length: int | None = ranged(
        None, at_least=1, doc="Most tokens of a window; null: data.sequence_length"
    )
    hidden_size: int = ranged(128, at_least=2, doc="Units of the residual stream")
    num_layers: int = ranged(2, at_least=1, at_most=1000, doc="Blocks, one above the other")
    num_heads: int = ranged(4, at_least=1, doc="Heads of attention, which share hidden_size out")
    kv_heads: int | None = ranged(
        None, at_least=1, doc="Heads of keys and values; null: as many as num_heads"
    )
    norm: str = one_of("layer", "layer", "rms", doc="LayerNorm, or RMSNorm as in Llama")
    positions: str = one_of(
        "learned", "learned", "rotary", doc="Added to the embeddings, or queries and keys turned"
    )
    mlp: str = one_of(
        "gelu",
        "gelu",
        "swiglu",
        doc="gelu: 4 hidden units a unit; swiglu: gated, 8/3, to a multiple of 64",
    )
    qk_norm: bool = setting(False, doc="Norm queries and keys of each head before their product")
    attention: str = one_of(
        "fused",
        "fused",
        "manual",
        doc="fused: torch's kernel; manual: its parts, whose scores overflow FP16 beyond 65,504",
    )
    bias: bool = setting(False, doc="Linear layers and LayerNorm have biases, as OpenAI's GPT-2")
    time_reduction: str = one_of("mean", "mean", "sum", doc=_TIME_REDUCTION)


@dataclass(slots=True)
class Seq2SeqConfig(ModelConfig):
    """LSTM encoder, its first layer bidirectional, attention and LSTM decoder; sizes in units."""

    learns: ClassVar[str] = "translation"
    recurrent: ClassVar[bool] = True
    name: str = setting("seq2seq", doc=_NETWORK)
    source_vocab_size: int | None = ranged(
        None, at_least=4, doc="Words of the sources' embedding; null: as many as the data has"
    )
    target_vocab_size: int | None = ranged(
        None, at_least=4, doc="Words of the targets' embedding and softmax; null: as the data has"
    )
    embedding_size: int = ranged(1024, at_least=1, doc="Units of the embedding of a word")
    hidden_size: int = ranged(1024, at_least=1, doc="Units of each LSTM layer and direction")
    num_layers: int = ranged(
        3, at_least=1, at_most=1000, doc="Layers of the encoder, and as many of the decoder"
    )
    dropout: float = ranged(
        0.0,
        at_least=0.0,
        below=1.0,
        doc="Dropout probability on embeddings, between layers and before the softmax",
    )
    init_range: float = ranged(
        0.1, above=0.0, doc="Every parameter starts uniform between minus and plus this"
    )


@dataclass(slots=True)
class DCGANConfig(ModelConfig):
    """Generator and discriminator of Radford et al.; widths in channels."""

    learns: ClassVar[str] = "gan"
    name: str = setting("dcgan", doc=_NETWORK)
    image_size: int = one_of(64, 32, 64, 128, doc=_SIDE)
    latent_size: int = ranged(100, at_least=1, doc=_LATENT)
    generator_width: int = ranged(
        64, at_least=1, doc="Channels of the generator's last hidden layer; earlier ones double"
    )
    discriminator_width: int = ranged(
        64, at_least=1, doc="Channels of the discriminator's first layer; later ones double"
    )


@dataclass(slots=True)
class ConvAutoencoderConfig(ModelConfig):
    """DCGAN's discriminator trunk as encoder and its generator as decoder, without BatchNorm."""

    learns: ClassVar[str] = "reconstruction"
    name: str = setting("conv_autoencoder", doc=_NETWORK)
    image_size: int = one_of(64, 32, 64, 128, doc=_SIDE)
    code_size: int = ranged(32, at_least=2, doc="Units of the code between encoder and decoder")
    width: int = ranged(
        8, at_least=1, doc="Channels of the encoder's first layer; each further one doubles them"
    )


@dataclass(slots=True)
class DeepSpeech2Config(ModelConfig):
    """Convolutions, recurrent layers and CTC of Amodei et al., in one or both directions."""

    recurrent: ClassVar[bool] = True
    learns: ClassVar[str] = "speech"
    name: str = setting("deep_speech2", doc=_NETWORK)
    channels: int = ranged(32, at_least=1, doc="Channels of each convolution")
    frequency_kernels: list[int] = ranged(
        lambda: [41, 21],
        at_least=1,
        doc="Rows of the kernel of each convolution, one after another",
    )
    time_kernel: int = ranged(11, at_least=1, doc="Frames of each convolution's kernel")
    frequency_stride: int = ranged(2, at_least=1, doc="Rows by which each convolution steps")
    time_stride: int = ranged(
        2, at_least=1, doc="Frames by which the first convolution steps; the others step by one"
    )
    hidden_size: int = ranged(2560, at_least=1, doc="Units of a recurrent layer in each direction")
    num_layers: int = ranged(3, at_least=1, at_most=1000, doc="GRU layers, one above the other")
    bidirectional: bool = setting(
        False, doc="Recurrent layers read in both directions, whose outputs are added"
    )
    row_convolution: int = ranged(
        20,
        at_least=0,
        doc="Frames, this one and the next, of the row convolution behind forward layers; 0: none",
    )
    fully_connected: int = ranged(
        2560, at_least=0, doc="Units of the layer in front of the output layer; 0: none"
    )
    init_range: float | None = ranged(
        None,
        above=0.0,
        doc="Weights and biases start uniform between minus and plus this; null: as torch's layers",
    )


@dataclass(slots=True)
class SSDMiniConfig(ModelConfig):
    """A small single-shot detector for canvases of digits."""

    learns: ClassVar[str] = "detection"
    name: str = setting("ssd_mini", doc=_NETWORK)
    freeze_backbone: bool = setting(False, doc=_FREEZE)


@dataclass(slots=True)
class SSD300Config(ModelConfig):
    """SSD300 on VGG-16, as its authors' for VOC."""

    learns: ClassVar[str] = "detection"
    name: str = setting("ssd300", doc=_NETWORK)
    weights: str | None = setting(None, doc=_WEIGHTS)
    freeze_backbone: bool = setting(False, doc=_FREEZE)


@dataclass(slots=True)
class FasterRCNNConfig(ModelConfig):
    """`variant` small: for canvases of digits; vgg16: the published network."""

    learns: ClassVar[str] = "detection"
    name: str = setting("faster_rcnn", doc=_NETWORK)
    variant: str = one_of(
        "small", "small", "vgg16", doc="small: for canvases of digits; vgg16: the published one"
    )
    dropout: float = ranged(
        0.0, at_least=0.0, below=1.0, doc="Dropout probability behind the fully connected layers"
    )
    frozen: int = ranged(
        0, at_least=0, at_most=13, doc="First convolutions, which keep their initial weights"
    )
    weights: str | None = setting(None, doc=_WEIGHTS)


@dataclass(slots=True)
class CustomModelConfig(ModelConfig):
    """The user's own network: `factory` is package.module:function (docs/own_data.md)."""

    name: str = setting("custom", doc=_NETWORK)
    factory: str = setting(
        MISSING,
        doc="package.module:function that builds the network; named by command or --config-dir",
    )
    task: str = setting(
        "classification",
        doc="classification, language_model, gan, or package.module:Class of a task of one's own",
    )
    options: dict[str, Any] = setting(dict, doc="Keyword arguments of model.factory")
    label_smoothing: float = ranged(0.0, at_least=0.0, below=1.0, doc=_SMOOTHING)
    aux_weight: float = ranged(0.0, at_least=0.0, at_most=1.0, doc=_AUXILIARY)
    latent_size: int = ranged(
        100, at_least=1, doc=f"With task=gan: {_LATENT[0].lower()}{_LATENT[1:]}"
    )
    time_reduction: str = one_of("mean", "mean", "sum", doc=_TIME_REDUCTION)


MODELS: dict[str, type[ModelConfig]] = {
    "alexnet": AlexNetConfig,
    "resnet50": ResNet50Config,
    "vgg16": VGG16Config,
    "googlenet": GoogLeNetConfig,
    "inception_v2": InceptionV2Config,
    "inception_v3": InceptionV3Config,
    "lstm_lm": LSTMConfig,
    "gpt": GPTConfig,
    "seq2seq": Seq2SeqConfig,
    "dcgan": DCGANConfig,
    "conv_autoencoder": ConvAutoencoderConfig,
    "deep_speech2": DeepSpeech2Config,
    "ssd_mini": SSDMiniConfig,
    "ssd300": SSD300Config,
    "faster_rcnn": FasterRCNNConfig,
    "custom": CustomModelConfig,
}


def task_of(model: ModelConfig) -> str:
    """What kind of task a model learns: a name of `mprun.config.metrics`, or one's own class."""
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

    name: str = setting(MISSING, doc=_SOURCE)
    root: str | None = setting(
        None, role=READING, doc="Folder that holds the files; null: embedded or synthetic data"
    )
    batch_size: int = ranged(
        32, at_least=1, doc="Samples (text: streams) of a micro-batch, on one device"
    )
    workers: int | None = ranged(
        None,
        at_least=0,
        at_most=256,
        role=READING,
        doc="Loader processes; null: as many as pay where files are decoded on the way, else none",
    )


@dataclass(slots=True)
class ImagesConfig(DataConfig):
    """What every source of images has."""

    image_size: int = ranged(32, at_least=8, at_most=512, doc=_SIDE)
    channels: int = one_of(3, 1, 3, doc="Channels of an image: 1 grey, 3 colour")
    value_range: str = one_of(
        "standardised",
        "standardised",
        "mean_subtracted",
        "tanh",
        doc="standardised: mean 0, deviation 1; mean_subtracted: 0-255 less means; tanh: -1 to 1",
    )


@dataclass(slots=True)
class DigitsConfig(ImagesConfig):
    """scikit-learn's 1,797 handwritten digits, enlarged from 8x8."""

    name: str = setting("digits", doc=_SOURCE)


@dataclass(slots=True)
class DigitCanvasesConfig(ImagesConfig):
    """1 to 3 of these digits on a canvas of noise, to be found and named."""

    family: ClassVar[str] = "boxes"
    name: str = setting("digit_canvases", doc=_SOURCE)
    train_size: int | None = ranged(None, at_least=1, at_most=1000, doc=_TRAIN_FIRST)
    eval_size: int | None = ranged(None, at_least=1, at_most=300, doc=_EVAL_FIRST)


@dataclass(slots=True)
class DocsTextConfig(DataConfig):
    """The text of CPython's own documentation (`pydoc_data.topics`)."""

    family: ClassVar[str] = "text"
    name: str = setting("docs_text", doc=_SOURCE)
    level: str = one_of("word", "word", "char", doc="What a token is: a word or a character")
    sequence_length: int = ranged(20, at_least=1, doc=_SEQUENCE)
    vocab_limit: int | None = ranged(None, at_least=3, at_most=1_000_000, doc=_VOCAB_LIMIT)
    vocab_multiple: int = ranged(8, at_least=1, doc=_VOCAB_MULTIPLE)


@dataclass(slots=True)
class SyntheticImagesConfig(ImagesConfig):
    """Random images with random labels: plumbing and speed, nothing to learn."""

    name: str = setting("synthetic_images", doc=_SOURCE)
    num_classes: int = ranged(10, at_least=2, doc="Classes of the random labels")
    train_size: int = ranged(1024, at_least=1, doc="Training images that are made")
    eval_size: int = ranged(256, at_least=1, doc="Held-out images that are made")


@dataclass(slots=True)
class SyntheticTokensConfig(DataConfig):
    """Random tokens: plumbing and speed, nothing to learn."""

    family: ClassVar[str] = "text"
    name: str = setting("synthetic_tokens", doc=_SOURCE)
    vocab_size: int = ranged(1000, at_least=2, doc="Different tokens")
    sequence_length: int = ranged(20, at_least=1, doc=_SEQUENCE)
    train_tokens: int = ranged(100_000, at_least=2, doc="Training tokens that are made")
    eval_tokens: int = ranged(10_000, at_least=2, doc="Held-out tokens that are made")


@dataclass(slots=True)
class ImageFolderConfig(ImagesConfig):
    """Image files below `root`, decoded on the way by loader processes.

    root/train and root/val (or valid, validation, test) with one folder per class, or root alone
    with one folder per class, of which `eval_share` of the files are held out. `layout: flat`
    takes every image below root, at any depth, without labels (DCGAN).
    """

    on_disk: ClassVar[bool] = True
    decodes: ClassVar[bool] = True
    name: str = setting("image_folder", doc=_SOURCE)
    image_size: int = ranged(224, at_least=8, at_most=1024, doc=_SIDE)
    layout: str = one_of(
        "classes",
        "classes",
        "flat",
        doc="classes: one folder per class; flat: all images below root, without labels (DCGAN)",
    )
    eval_share: float = ranged(
        0.1, above=0.0, below=1.0, doc="Share of the files held out where there is one folder only"
    )
    augmentation: str = one_of(
        "resized_crop",
        "resized_crop",
        "crop",
        "centre",
        doc="resized_crop: RandomResizedCrop; crop: resize, crop at random; centre: the middle",
    )
    flip: bool = setting(True, doc=_FLIP)
    resize_to: int | None = ranged(
        None,
        at_least=8,
        at_most=2048,
        doc="Pixels before the crop, of the shorter side (crop: both); null: 8/7 of image_size",
    )
    centre_crop: int | None = ranged(
        None,
        at_least=8,
        at_most=8192,
        doc="augmentation=centre: pixels of the square cut out before resizing; null: the largest",
    )
    on_corrupt: str = one_of(
        "stop",
        "stop",
        "skip",
        doc="An unreadable file: stop the run, or skip to the next readable image and count it",
    )
    prefetch: int = ranged(2, at_least=1, at_most=64, role=READING, doc=_PREFETCH)


@dataclass(slots=True)
class ImageNetConfig(ImageFolderConfig):
    """ILSVRC12: 1,000 class folders below root/train and root/val, or the original archives."""

    name: str = setting("imagenet", doc=_SOURCE)


@dataclass(slots=True)
class Cifar10Config(ImagesConfig):
    """CIFAR-10 in torchvision's files, the binary ones, or class folders of JPEG or PNG.

    Decoded once and held in memory on the device; other sizes than 32 are resized there.
    """

    on_disk: ClassVar[bool] = True
    name: str = setting("cifar10", doc=_SOURCE)
    channels: int = one_of(3, 3, doc="Channels of an image: CIFAR-10 is in colour")
    augmentation: str = one_of(
        "padded_crop", "padded_crop", "none", doc="padded_crop: 4 pixels around, then a random crop"
    )
    flip: bool = setting(True, doc=_FLIP)
    train_size: int | None = ranged(None, at_least=1, doc=_TRAIN_FIRST)
    eval_size: int | None = ranged(None, at_least=1, doc=_EVAL_FIRST)


@dataclass(slots=True)
class VocConfig(ImagesConfig):
    """PASCAL VOC: trainval of 2007, or of 2007 and 2012, test of 2007 held out."""

    family: ClassVar[str] = "boxes"
    on_disk: ClassVar[bool] = True
    decodes: ClassVar[bool] = True
    name: str = setting("voc", doc=_SOURCE)
    image_size: int = ranged(300, at_least=8, at_most=1024, doc=_SIDE)
    channels: int = one_of(3, 3, doc="Channels of an image: VOC is in colour")
    years: str = one_of(
        "2007+2012", "2007", "2007+2012", doc="Whose trainval images are trained on"
    )
    difficult: bool = setting(
        False, doc="Learn from objects that are marked as difficult, too; none is asked for in map"
    )
    augmentation: str = one_of(
        "ssd", "ssd", "flip", doc="ssd: colours, zoom, crops, mirrored; flip: half are mirrored"
    )
    prefetch: int = ranged(2, at_least=1, at_most=64, role=READING, doc=_PREFETCH)


@dataclass(slots=True)
class TextConfig(DataConfig):
    """Text files below `root` (train, valid, test), blank-separated words, one vocabulary."""

    family: ClassVar[str] = "text"
    on_disk: ClassVar[bool] = True
    name: str = setting("text", doc=_SOURCE)
    sequence_length: int = ranged(35, at_least=1, doc=_SEQUENCE)
    vocab_limit: int | None = ranged(None, at_least=3, at_most=1_000_000, doc=_VOCAB_LIMIT)
    vocab_multiple: int = ranged(8, at_least=1, doc=_VOCAB_MULTIPLE)
    lower: bool = setting(False, doc="Lower-case all words")
    eval_split: str = one_of("valid", "valid", "test", doc=_EVAL_SPLIT)
    rotate: bool = setting(
        True, doc="Each epoch starts elsewhere in the text; false: always at its start"
    )
    eval_tokens: int | None = ranged(None, at_least=32, doc=_EVAL_TOKENS)
    cache: str | None = setting(None, role=READING, doc=_CACHE)


@dataclass(slots=True)
class Lm1bConfig(DataConfig):
    """One Billion Word: shards of shuffled sentences and the conventional vocabulary file."""

    family: ClassVar[str] = "text"
    on_disk: ClassVar[bool] = True
    name: str = setting("lm1b", doc=_SOURCE)
    sequence_length: int = ranged(20, at_least=1, doc=_SEQUENCE)
    vocabulary: str | None = setting(
        None, role=READING, doc="File of the vocabulary, one word a line; null: the one below root"
    )
    vocab_multiple: int = ranged(8, at_least=1, doc=_VOCAB_MULTIPLE)
    eval_split: str = one_of("valid", "valid", "test", doc=_EVAL_SPLIT)
    eval_tokens: int | None = ranged(None, at_least=32, doc=_EVAL_TOKENS)
    cache: str | None = setting(None, role=READING, doc=_CACHE)


@dataclass(slots=True)
class TokenFilesConfig(DataConfig):
    """Files of uint16 tokens below `root`, encoded before: nanoGPT's or llm.c's."""

    family: ClassVar[str] = "text"
    on_disk: ClassVar[bool] = True
    name: str = setting("token_files", doc=_SOURCE)
    sequence_length: int = ranged(1024, at_least=1, doc=_SEQUENCE)
    vocab_size: int = ranged(
        50_257, at_least=2, at_most=65_536, doc="Different tokens; one beyond them is refused"
    )
    vocab_multiple: int = ranged(64, at_least=1, doc=_VOCAB_MULTIPLE)
    rotate: bool = setting(
        True, doc="Each epoch starts elsewhere in the tokens; false: always at their start"
    )
    eval_tokens: int | None = ranged(
        None, at_least=32, doc="First held-out tokens that are evaluated; null: all"
    )
    cache: str | None = setting(
        None,
        role=READING,
        doc="Folder of remembered hashes of files; null: mprun in the user's cache folder",
    )


@dataclass(slots=True)
class SentencePairsConfig(DataConfig):
    """What every source of sentence pairs has."""

    family: ClassVar[str] = "sentence_pairs"
    max_length: int = ranged(
        50,
        at_least=2,
        at_most=1000,
        doc="Words of a side, its end included, to which all are padded; longer pairs are left out",
    )
    vocab_multiple: int = ranged(8, at_least=1, doc=_VOCAB_MULTIPLE)


@dataclass(slots=True)
class UnicodeNamesConfig(SentencePairsConfig):
    """Names of Unicode's characters and of what they are composed of (`unicodedata`)."""

    name: str = setting("unicode_names", doc=_SOURCE)


@dataclass(slots=True)
class ParallelTextConfig(SentencePairsConfig):
    """Two aligned text files below `root` a split, or one of two columns; a vocabulary a side."""

    on_disk: ClassVar[bool] = True
    name: str = setting("parallel_text", doc=_SOURCE)
    source_language: str = setting("en", doc="Ending of the files that are translated from")
    target_language: str = setting("fr", doc="Ending of the files that are translated to")
    source_vocab_limit: int | None = ranged(
        None,
        at_least=5,
        at_most=1_000_000,
        doc=f"Sources: {_VOCAB_LIMIT[0].lower()}{_VOCAB_LIMIT[1:]}",
    )
    target_vocab_limit: int | None = ranged(
        None,
        at_least=5,
        at_most=1_000_000,
        doc=f"Targets: {_VOCAB_LIMIT[0].lower()}{_VOCAB_LIMIT[1:]}",
    )
    lower: bool = setting(False, doc="Lower-case all words")
    eval_split: str = one_of("valid", "valid", "test", doc=_EVAL_SPLIT)
    cache: str | None = setting(None, role=READING, doc=_CACHE)


class DigitStripsConfig(DataConfig):
    """Strips of three to five handwritten digits, read column by column in place of audio."""

    family: ClassVar[str] = "utterances"
    name: str = setting("digit_strips", doc=_SOURCE)


@dataclass(slots=True)
class SpeechManifestConfig(DataConfig):
    """WAV files and their texts, listed by a manifest for training and one for evaluation.

    A manifest is JSON lines, {"audio_filepath": ..., "text": ..., "duration": ...}, or CSV with
    such a header; names of files are relative to its folder. Features are the logarithm of a
    spectrogram, standardised over each utterance.
    """

    family: ClassVar[str] = "utterances"
    on_disk: ClassVar[bool] = True
    decodes: ClassVar[bool] = True
    name: str = setting("speech_manifest", doc=_SOURCE)
    train_manifest: str | None = setting(
        None, doc="Manifest below root that is trained on; null: train.json, .jsonl or .csv"
    )
    eval_manifest: str | None = setting(
        None, doc="Manifest below root that is evaluated; null: dev, val or valid, likewise"
    )
    sample_rate: int = ranged(
        16000, at_least=1000, at_most=192_000, doc="Samples per second of every WAV file"
    )
    window_ms: float = ranged(
        20.0, above=0.0, at_most=1000.0, doc="Length of a frame of the spectrogram in milliseconds"
    )
    hop_ms: float = ranged(
        10.0, above=0.0, at_most=1000.0, doc="Milliseconds from one frame to the next"
    )
    alphabet: str = setting(
        "'abcdefghijklmnopqrstuvwxyz ", doc="Characters of the texts; CTC's blank is not one"
    )
    alphabet_file: str | None = setting(
        None,
        doc="File below root with the characters, one a line, in place of alphabet; null: none",
    )
    lower: bool = setting(True, doc="Lower-case all texts")
    max_seconds: float | None = ranged(
        None, above=0.0, doc="Longer utterances are left out of training; null: all are taken"
    )
    prefetch: int = ranged(
        2, at_least=1, at_most=64, role=READING, doc="Batches in flight per loader process"
    )


@dataclass(slots=True)
class CustomDataConfig(DataConfig):
    """The user's own data: `factory` is package.module:function (docs/own_data.md)."""

    decodes: ClassVar[bool] = True
    name: str = setting("custom", doc=_SOURCE)
    factory: str = setting(
        MISSING,
        doc="package.module:function that makes the data; named by command or --config-dir",
    )
    options: dict[str, Any] = setting(dict, doc="Keyword arguments of data.factory")
    image_size: int | None = ranged(
        None, at_least=8, doc="Side of an image in pixels, where the model asks for it (dcgan)"
    )


DATA: dict[str, type[DataConfig]] = {
    "digits": DigitsConfig,
    "digit_canvases": DigitCanvasesConfig,
    "docs_text": DocsTextConfig,
    "synthetic_images": SyntheticImagesConfig,
    "synthetic_tokens": SyntheticTokensConfig,
    "image_folder": ImageFolderConfig,
    "imagenet": ImageNetConfig,
    "cifar10": Cifar10Config,
    "voc": VocConfig,
    "text": TextConfig,
    "lm1b": Lm1bConfig,
    "token_files": TokenFilesConfig,
    "unicode_names": UnicodeNamesConfig,
    "parallel_text": ParallelTextConfig,
    "digit_strips": DigitStripsConfig,
    "speech_manifest": SpeechManifestConfig,
    "custom": CustomDataConfig,
}


@dataclass(slots=True)
class OptimConfig:
    """Optimizer and learning-rate schedule; the schedule counts applied updates."""

    name: str = one_of(
        "sgd", "sgd", "adam", "adamw", "adagrad", doc="Which optimizer; optim=OPTION sets it"
    )
    lr: float = ranged(0.1, above=0.0, doc="Learning rate, the highest of its schedule")
    weight_decay: float = ranged(
        0.0, at_least=0.0, doc="Weight decay: added to the gradient as L2; of adamw decoupled"
    )
    momentum: float | None = ranged(
        None, at_least=0.0, below=1.0, of=("sgd",), doc="Momentum; 0: plain SGD"
    )
    nesterov: bool | None = setting(
        None, of=("sgd",), optional=True, doc="Nesterov's form of momentum"
    )
    betas: list[float] | None = ranged(
        None,
        at_least=0.0,
        below=1.0,
        of=("adam", "adamw"),
        doc="Decay of the moving averages of the gradient and of its square",
    )
    eps: float | None = ranged(
        None,
        at_least=0.0,
        of=("adam", "adamw", "adagrad"),
        doc="Added to the denominator; 2^-25 and below is 0 where the update is in FP16",
    )
    initial_accumulator: float | None = ranged(
        None, at_least=0.0, of=("adagrad",), doc="Start value of the sum of squared gradients"
    )
    implementation: str = one_of(
        "auto",
        "auto",
        "single_pass",
        "fused",
        "foreach",
        "loop",
        doc="How the update is computed; single_pass: cast, unscale, update, copy in one pass",
    )
    schedule: str = one_of(
        "constant",
        "constant",
        "cosine",
        "linear",
        "polynomial",
        "step",
        "epoch_decay",
        doc="Learning rate over applied updates; a skipped update does not advance it",
    )
    warmup_updates: int = ranged(
        0, at_least=0, doc="Updates in which the rate rises linearly to lr; 0: none"
    )
    warmup_epochs: float = ranged(
        0.0, at_least=0.0, doc="The same in epochs, instead of warmup_updates"
    )
    final_factor: float = ranged(
        0.0,
        at_least=0.0,
        at_most=1.0,
        doc="schedule=linear, cosine, polynomial: rate at the end as a share of lr",
    )
    power: float = ranged(
        1.0, above=0.0, doc="schedule=polynomial: exponent of the remaining share of the run"
    )
    milestones: list[float] = ranged(
        list, above=0.0, below=1.0, doc="schedule=step: shares of the run at which the rate drops"
    )
    gamma: float = ranged(
        0.1, above=0.0, below=1.0, doc="schedule=step, epoch_decay: factor of each drop"
    )
    constant_epochs: float | None = ranged(
        None, at_least=0.0, doc="schedule=epoch_decay: epochs before the first drop"
    )
    bias_lr_factor: float = ranged(
        1.0, above=0.0, doc="Learning rate of biases over that of weights; Caffe has 2"
    )
    decay_bias: bool = setting(True, doc="Weight decay on biases outside of norm layers")
    decay_norm: bool = setting(True, doc="Weight decay on gain and shift of norm layers")
    average_decay: float | None = ranged(
        None,
        above=0.0,
        below=1.0,
        doc="Evaluate an exponential moving average of the weights, per applied update; null: none",
    )
    average_modules: list[str] = setting(
        list, doc="With average_decay: module-name patterns to average; none given: all"
    )


def _format(of: str) -> Any:
    return one_of(None, "e4m3", "e5m2", doc=f"FP8 format of {of} in linear layers; null: not cast")


@dataclass(slots=True)
class ProductsConfig:
    """In which format the products of linear layers take their operands."""

    input: str | None = _format("the input")
    weight: str | None = _format("the weight")
    grad_output: str | None = _format("the gradient of the output")
    granularity: str = one_of(
        "tensor",
        "none",
        "tensor",
        "row",
        doc="What has an FP8 scale of its own; none: the scale is 1",
    )
    power_of_two: bool = setting(False, doc="Round FP8 scales down to powers of two")
    high_precision: list[str] = setting(
        list, doc="Of output, grad_input, grad_weight: products that stay as without FP8"
    )
    modules: list[str] = setting(
        lambda: ["*"],
        doc="Name patterns of the linear layers in FP8; the output layer only by its full name",
    )


@dataclass(slots=True)
class UpdateConfig:
    """How weights are stored that have no master copy, and the optimizer's state."""

    rounding: str = one_of(
        "nearest",
        "nearest",
        "stochastic",
        "kahan",
        doc="Store of BF16 weights without masters; but for nearest they are updated in FP32",
    )
    state_dtype: str | None = one_of(
        None, "fp32", "bf16", doc="Dtype that the optimizer's state is kept in; null: the update's"
    )


@dataclass(slots=True)
class PrecisionConfig:
    """One precision mode as plain values; its name is that of its file."""

    name: str = setting(MISSING, doc="Name of the precision mode, that of its file")
    param_dtype: str = one_of(
        "fp32", *DTYPES, doc="Dtype of weights, activations and their gradients"
    )
    norm_dtype: str = one_of(
        "fp32", *DTYPES, doc="Dtype of parameters and statistics of norm layers"
    )
    master_dtype: str | None = one_of(
        "fp32",
        "fp32",
        doc="Dtype of the master weights; null: none, parameters are updated in place",
    )
    grad_dtype: str = one_of(
        "fp32", *DTYPES, doc="Dtype in which gradients accumulate, are unscaled and clipped"
    )
    loss_dtype: str = one_of("fp32", *DTYPES, doc="Dtype of softmax and loss")
    autocast_dtype: str | None = one_of(
        None, "fp16", "bf16", doc="Dtype of torch.autocast's op lists; null: no autocast"
    )
    fp32_math: str = one_of(
        "ieee", "ieee", "tf32", doc="FP32 products: ieee in full, or with TF32 inputs"
    )
    reduce_dtype: str | None = one_of(
        None,
        *DTYPES,
        doc="Dtype in which scaled gradients of ranks (micro-batches) are summed; null: unscaled",
    )
    reduce_divide: str = one_of(
        "after",
        "after",
        "before",
        "split",
        doc="Where that sum is divided by the number of ranks; split: by its root before",
    )
    products: ProductsConfig = setting(ProductsConfig, doc="Linear layers in FP8")
    update: UpdateConfig = setting(UpdateConfig, doc="Store of weights and optimizer state")
    overrides: dict[str, str] = setting(
        dict, doc="Module-name pattern: dtype of these modules, as precision.overrides.fc=fp32"
    )


_DYNAMIC, _LOGMAX = ("dynamic",), ("logmax",)
_MOVING = (*_DYNAMIC, *_LOGMAX)


@dataclass(slots=True)
class ScalerConfig:
    """Loss scaler; `kind` says which rule, a field that the rule does not use stays null."""

    name: str = setting(MISSING, doc="Name of the loss scaler, that of its file")
    kind: str = one_of(
        "none",
        "none",
        "static",
        "dynamic",
        "logmax",
        doc="Rule of the loss scale; none: no scaling",
    )
    per: str = one_of(
        "shared",
        "shared",
        "optimizer",
        "loss",
        doc="What has a loss scale of its own: nothing, each optimizer or each loss (GANs)",
    )
    scale: float | None = ranged(None, above=0.0, of=("static",), doc="The loss scale, constant")
    init_scale: float | None = ranged(None, above=0.0, of=_MOVING, doc="Loss scale at the start")
    growth_factor: float | None = ranged(
        None, above=1.0, of=_DYNAMIC, doc="Factor on the loss scale when it grows"
    )
    backoff_factor: float | None = ranged(
        None, above=0.0, below=1.0, of=_DYNAMIC, doc="Factor on the loss scale when it backs off"
    )
    growth_interval: int | None = ranged(
        None,
        at_least=1,
        below=2**31,
        of=_DYNAMIC,
        doc="Clean steps since the start, the last growth or overflow, after which the scale grows",
    )
    hysteresis: int | None = ranged(
        None,
        at_least=1,
        below=2**31,
        of=_DYNAMIC,
        doc="Overflows since the last growth until one backs the scale off; 1: the first does",
    )
    min_scale: float | None = ranged(
        None, above=0.0, of=_MOVING, doc="Floor of the loss scale, at least 2^-126"
    )
    max_scale: float | None = ranged(
        None, above=0.0, of=_MOVING, doc="Ceiling of the loss scale, at most 2^126"
    )
    max_consecutive_skips: int | None = ranged(
        None,
        at_least=1,
        below=2**31,
        of=("static", *_MOVING),
        doc="Skipped updates in a row, with the scale at its floor, that end the run as diverged",
    )
    # What single rules need; null: as torch.amp.
    growth_delay: int | None = ranged(
        None,
        at_least=0,
        below=2**31,
        of=_DYNAMIC,
        optional=True,
        doc="Further clean steps before the first growth after the start or an overflow; null: 0",
    )
    refill_on_clean_step: bool | None = setting(
        None,
        of=_DYNAMIC,
        optional=True,
        doc="Every clean step restores the hysteresis; null and false: only growth does",
    )
    tolerance: float | None = ranged(
        None,
        at_least=0.0,
        at_most=1.0,
        of=_DYNAMIC,
        optional=True,
        doc="Share of overflows among steps from which on the scale backs off; null: 0, at each",
    )
    hold_at_floor: bool | None = setting(
        None,
        of=_DYNAMIC,
        optional=True,
        doc="A backoff to min_scale or below is not done; null and false: it stops at min_scale",
    )
    log_max: float | None = ranged(
        None, of=_LOGMAX, doc="Target of log2 of the largest scaled gradient, deviations included"
    )
    beta1: float | None = ranged(
        None,
        above=0.0,
        below=1.0,
        of=_LOGMAX,
        doc="Decay of the moving average of log2 of the largest gradient",
    )
    beta2: float | None = ranged(
        None,
        above=0.0,
        below=1.0,
        of=_LOGMAX,
        doc="Decay of the moving averages from which its standard deviation is taken",
    )
    overflow_std_dev: float | None = ranged(
        None,
        at_least=0.0,
        at_most=100.0,
        of=_LOGMAX,
        doc="Standard deviations kept free below log_max; 3.09: an overflow in 1,000 steps",
    )


@dataclass(slots=True)
class TrainConfig:
    """Length and rhythm of a run; all counts are in steps (batches), not updates."""

    steps: int | None = ranged(
        100,
        at_least=1,
        at_most=MAX_STEPS,
        role=LENGTH,
        doc="Length of the run in steps; null where train.epochs is given",
    )
    epochs: float | None = ranged(
        None,
        above=0.0,
        at_most=10_000.0,
        role=LENGTH,
        doc="Length of the run in epochs, with train.steps=null; null: train.steps counts",
    )
    log_every: int = ranged(
        10, at_least=1, role=READING, doc="Steps between two logged records and lines of progress"
    )
    eval_every: int = ranged(
        0, at_least=0, role=LENGTH, doc="Steps between two evaluations; 0: only at the end"
    )
    checkpoint_every: int = ranged(
        0,
        at_least=0,
        role=READING,
        doc="Steps between two checkpoints; 0: only when a signal stops the run",
    )
    keep_checkpoints: int = ranged(
        2, at_least=2, role=READING, doc="Checkpoints that are kept, the newest ones"
    )
    clip_norm: float | None = ranged(
        None, above=0.0, doc="Largest global norm of the unscaled gradients; null: no clipping"
    )
    clip_modules: list[str] = setting(
        list, doc="With clip_norm: module-name patterns to clip; none given: all"
    )
    accumulate: int = ranged(
        1, at_least=1, doc="Micro-batches of data.batch_size samples in a step"
    )
    eval_arithmetic: str = one_of(
        "fp32",
        "fp32",
        "mode",
        doc="Evaluate the master weights in FP32, or in the precision mode's own arithmetic",
    )
    # How a step is executed; none of these changes what is computed, beyond rounding.
    cuda_graph: str = one_of(
        "auto",
        "auto",
        "on",
        "off",
        role=READING,
        doc="Replay whole steps as a CUDA graph; auto: on CUDA where the host is the limit",
    )
    compile: str = one_of(
        "off",
        "off",
        "default",
        "max-autotune-no-cudagraphs",
        doc="torch.compile of image models, by its mode",
    )
    channels_last: str = one_of(
        "auto",
        "auto",
        "on",
        "off",
        doc="NHWC weights and activations; auto: on CUDA for 16-bit and TF32 products",
    )
    autotune: str = one_of(
        "auto", "auto", "on", "off", doc="cudnn.benchmark; auto: on unless deterministic=true"
    )


@dataclass(slots=True)
class CompareConfig:
    """What a verdict is about; fixed before the runs."""

    # This and the margin are filled in when the configuration is composed.
    metric: str | None = setting(
        None,
        doc="Metric of the final evaluation that is judged; null: top1 of classifiers, else loss",
    )
    margin: float | None = ranged(
        None,
        above=0.0,
        doc="Difference that still matches: share of baseline's mean, top1: points; null: default",
    )
    baseline: str = setting("fp32", doc="Precision mode that the others are judged against")
    window: int = ranged(1, at_least=1, doc="Last evaluations, averaged into the outcome of a run")


@dataclass(slots=True)
class NumericsConfig:
    """What is measured beside the training; none of it changes a number of the run."""

    enabled: bool = setting(False, doc="Probe exponents, underflow and lost updates; numerics=on")
    every: int = ranged(100, at_least=1, doc="Probe the steps divisible by this")
    modules: list[str] = setting(
        list, doc="Module-name patterns to probe; none given: all modules without modules inside"
    )
    shadow_every: int = ranged(
        0,
        at_least=0,
        doc="Also compute the steps divisible by this in FP32, from the same weights; 0: never",
    )
    keep_failure: bool = setting(
        True, doc="Keep the state before a failing step, which mprun explain replays"
    )


@dataclass(slots=True)
class DistConfig:
    """How the ranks of a run on several devices sum gradients and wait for each other."""

    engine: str = one_of(
        "auto",
        "auto",
        "ddp",
        "flat",
        doc="Gradients are summed during backward (ddp) or after it (flat); auto: ddp on a GPU",
    )
    order: str = one_of(
        "fast",
        "fast",
        "fixed",
        doc="Micro-batches are added in their order, as on one rank (fixed), or as is fastest",
    )
    bucket_mb: float = ranged(
        25.0, above=0.0, at_most=4096.0, doc="Gradients that are summed at a time, in MiB"
    )
    timeout_s: float = ranged(
        100.0, above=0.0, at_most=86_400.0, doc="Seconds that a rank waits for the others"
    )


@dataclass(slots=True)
class RunConfig:
    """The whole configuration of one run."""

    model: ModelConfig = setting(MISSING, doc="The network and its task")
    data: DataConfig = setting(MISSING, doc="What is trained and evaluated on")
    optim: OptimConfig = setting(OptimConfig, doc="Optimizer and learning-rate schedule")
    precision: PrecisionConfig = setting(PrecisionConfig, doc="The precision mode")
    scaler: ScalerConfig = setting(ScalerConfig, doc="The loss scaler")
    train: TrainConfig = setting(TrainConfig, doc="Length, rhythm and execution of a run")
    compare: CompareConfig = setting(
        CompareConfig, doc="What the verdict is about, fixed before the runs"
    )
    numerics: NumericsConfig = setting(
        NumericsConfig, role=LABEL, doc="What is measured beside the training"
    )
    seed: int = ranged(
        0,
        at_least=0,
        below=2**63,
        role=SEED,
        doc="Seed of initial weights, order of the data, augmentation and dropout",
    )
    device: str = one_of(
        "auto", "auto", "cuda", "cpu", role=MACHINE, doc="Where it runs; auto: CUDA if there is one"
    )
    devices: str = setting(
        "1", role=READING, doc="Ranks on this machine, a GPU each; auto: all GPUs that there are"
    )
    nodes: int = ranged(
        1, at_least=1, at_most=65_536, role=READING, doc="Machines with so many devices each"
    )
    restarts: int = ranged(
        0,
        at_least=0,
        at_most=1000,
        role=READING,
        doc="Times that lost ranks are started again from the last checkpoint",
    )
    dist: DistConfig = setting(
        DistConfig, role=READING, doc="How several ranks sum gradients and wait for each other"
    )
    cpu_half: str = one_of(
        "emulated",
        "emulated",
        "native",
        doc="16-bit operations on a CPU: in FP32 and rounded once, or torch's own kernels",
    )
    threads: int | None = ranged(
        None,
        at_least=1,
        at_most=1024,
        role=MACHINE,
        doc="Threads of the CPU; null: torch's default, under -j its share of the cores",
    )
    deterministic: bool = setting(False, doc="Deterministic kernels, cudnn.benchmark off")
    name: str | None = setting(
        None, role=LABEL, doc="Free label in the path of the run; null: none"
    )
    output_root: str = setting(
        "outputs", role=LABEL, doc="Folder below which directories of runs are made"
    )
    output_dir: str | None = setting(
        None, role=LABEL, doc="Exact directory of the run; null: named from the configuration"
    )
    resume: str | None = setting(
        None, role=LABEL, doc="Directory of a run to continue from its last checkpoint; null: none"
    )


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

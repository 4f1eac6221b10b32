"""The options of each data source as typed data; imports neither torch nor a source."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from mprun.config.rules import one_of, ranged


@dataclass(slots=True)
class DataConfig:
    """Base of the data schemas; `name` selects the builder."""

    name: str = MISSING
    root: str | None = None  # folder of the data; null for embedded and synthetic sources
    batch_size: int = ranged(32, at_least=1)  # samples per micro-batch
    # Loader processes; null: as many as pay for files that are decoded on the way, else none.
    workers: int | None = ranged(None, at_least=0, at_most=256)


@dataclass(slots=True)
class DigitsConfig(DataConfig):
    """scikit-learn's 1,797 handwritten digits, enlarged from 8x8."""

    name: str = "digits"
    image_size: int = ranged(32, at_least=8, at_most=512)
    channels: int = one_of(3, 1, 3)
    value_range: str = one_of("standardised", "standardised", "tanh")


@dataclass(slots=True)
class DocsTextConfig(DataConfig):
    """The text of CPython's own documentation (`pydoc_data.topics`)."""

    name: str = "docs_text"
    level: str = one_of("word", "word", "char")
    sequence_length: int = ranged(20, at_least=1)  # tokens per step and stream
    # Most frequent words; null: all.
    vocab_limit: int | None = ranged(None, at_least=3, at_most=1_000_000)
    vocab_multiple: int = ranged(8, at_least=1)  # the vocabulary is padded to a multiple


@dataclass(slots=True)
class SyntheticImagesConfig(DataConfig):
    """Random images with random labels: plumbing and speed, nothing to learn."""

    name: str = "synthetic_images"
    image_size: int = ranged(32, at_least=8, at_most=512)
    channels: int = one_of(3, 1, 3)
    num_classes: int = ranged(10, at_least=2)
    train_size: int = ranged(1024, at_least=1)
    eval_size: int = ranged(256, at_least=1)
    value_range: str = one_of("standardised", "standardised", "tanh")


@dataclass(slots=True)
class SyntheticTokensConfig(DataConfig):
    """Random tokens: plumbing and speed, nothing to learn."""

    name: str = "synthetic_tokens"
    vocab_size: int = ranged(1000, at_least=2)
    sequence_length: int = ranged(20, at_least=1)
    train_tokens: int = ranged(100_000, at_least=2)
    eval_tokens: int = ranged(10_000, at_least=2)


@dataclass(slots=True)
class ImageFolderConfig(DataConfig):
    """Image files below `root`, decoded on the way by loader processes.

    root/train and root/val (or valid, validation, test) with one folder per class, or root alone
    with one folder per class, of which `eval_share` of the files are held out. `layout: flat`
    takes every image below root, at any depth, without labels (DCGAN).
    """

    name: str = "image_folder"
    image_size: int = ranged(224, at_least=8, at_most=1024)
    channels: int = one_of(3, 1, 3)
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
    # standardised: minus the channel means, over the deviations (ImageNet's); mean_subtracted:
    # 0-255 minus the means (Caffe); tanh: [-1, 1].
    value_range: str = one_of("standardised", "standardised", "mean_subtracted", "tanh")
    on_corrupt: str = one_of("stop", "stop", "skip")  # skip: the next readable image, counted
    prefetch: int = ranged(2, at_least=1, at_most=64)  # batches in flight per loader process


@dataclass(slots=True)
class ImageNetConfig(ImageFolderConfig):
    """ILSVRC12: 1,000 class folders below root/train and root/val, or the original archives."""

    name: str = "imagenet"


@dataclass(slots=True)
class Cifar10Config(DataConfig):
    """CIFAR-10 in torchvision's files, the binary ones, or class folders of JPEG or PNG.

    Decoded once and held in memory on the device; other sizes than 32 are resized there.
    """

    name: str = "cifar10"
    image_size: int = ranged(32, at_least=8, at_most=512)
    channels: int = one_of(3, 3)
    augmentation: str = one_of("padded_crop", "padded_crop", "none")  # 4 pixels, random crop
    flip: bool = True  # mirror half of the training images
    value_range: str = one_of("standardised", "standardised", "mean_subtracted", "tanh")
    train_size: int | None = ranged(None, at_least=1)  # the first of a fixed order; null: all
    eval_size: int | None = ranged(None, at_least=1)


@dataclass(slots=True)
class TextConfig(DataConfig):
    """Text files below `root` (train, valid, test), blank-separated words, one vocabulary."""

    name: str = "text"
    sequence_length: int = ranged(35, at_least=1)  # tokens per step and stream
    # Most frequent words; null: all.
    vocab_limit: int | None = ranged(None, at_least=3, at_most=1_000_000)
    vocab_multiple: int = ranged(8, at_least=1)  # the vocabulary is padded to a multiple
    lower: bool = False  # lower-case everything
    eval_split: str = one_of("valid", "valid", "test")
    rotate: bool = True  # each epoch starts elsewhere in the text; false: always at its start
    eval_tokens: int | None = ranged(None, at_least=32)  # first tokens of eval_split; null: all
    cache: str | None = None  # folder of the encoded text; null: mprun in the user's cache


@dataclass(slots=True)
class Lm1bConfig(DataConfig):
    """One Billion Word: shards of shuffled sentences and the conventional vocabulary file."""

    name: str = "lm1b"
    sequence_length: int = ranged(20, at_least=1)
    vocabulary: str | None = None  # file, one word a line; null: the one below root
    vocab_multiple: int = ranged(8, at_least=1)
    eval_split: str = one_of("valid", "valid", "test")
    eval_tokens: int | None = ranged(None, at_least=32)  # first tokens of eval_split; null: all
    cache: str | None = None


@dataclass(slots=True)
class CustomDataConfig(DataConfig):
    """The user's own data: `factory` is package.module:function (docs/own_data.md)."""

    name: str = "custom"
    factory: str = MISSING  # only from the command line or the user's own --config-dir
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the factory
    image_size: int | None = ranged(None, at_least=8)  # where the model asks for it (dcgan)


DATA: dict[str, type] = {
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

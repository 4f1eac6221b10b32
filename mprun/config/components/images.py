"""Image classifiers, and their sources of images."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mprun.config.fields import count, fraction, one_of, part, positive, ranged, setting, share
from mprun.config.registry import DataConfig, ModelConfig, Rule, network, source, task, task_of
from mprun.config.schema import RunConfig
from mprun.record.keys import READING
from mprun.record.metric_facts import LOSS, Metric

_accuracy = partial(Metric, higher_is_better=True, unit="points", counts_samples=True)

task(
    "classification",
    builder="mprun.tasks.supervised:Classification",
    metrics=(LOSS, *map(_accuracy, ("top1", "top5"))),
    # Table 1 of the paper. The held-out loss of a small classifier varies by a quarter from seed to
    # seed, so no affordable number of seeds decides about 1 % of it.
    judged="top1",
    network_kind="classifier",
    sizes=("num_classes",),
    overlaps=True,
    of_own_networks=True,
)

SIDE = "Side length of an image in pixels"
AUXILIARY = (
    "Factor on each auxiliary head's training loss; 0: mprun builds its networks without heads"
)
_FLIP = "Whether half of the training images are mirrored"
TRAIN_FIRST = "Number of training images, the first of a fixed order; null: all"
EVAL_FIRST = "Number of held-out images, the first of a fixed order; null: all"

# Fields that several classes share.
_pixels = partial(ranged, at_least=8)
_dropout = partial(share, doc="Dropout probability before the last layer")
smoothing = partial(
    share, 0.0, "Label smoothing of the cross-entropy in classification; 0: no smoothing"
)
prefetch = partial(
    ranged,
    2,
    "Number of batches that each loader process prepares in advance",
    at_least=1,
    at_most=64,
    role=READING,
)


@dataclass(slots=True)
class ImagesConfig(DataConfig):
    """The fields of every source of images."""

    image_size: int = _pixels(32, SIDE, at_most=512)
    channels: int = one_of((1, 3), "Number of channels of an image: 1 grey, 3 colour", default=3)
    value_range: str = one_of(
        "standardised mean_subtracted tanh",
        "standardised: mean 0, deviation 1; mean_subtracted: 0 to 255, minus means; tanh: -1 to 1",
    )


def in_colour(model: ModelConfig, config: RunConfig) -> Iterator[str]:
    """Refuse grey images."""
    if isinstance(data := config.data, ImagesConfig) and data.channels != 3:
        yield f"data.channels={data.channels}: must be 3 for {model.name}"


def in_tanh(model: Any, config: RunConfig) -> Iterator[str]:
    """Refuse images of another size or range than the network generates."""
    if isinstance(data := config.data, ImagesConfig):
        if data.image_size != model.image_size:
            size = model.image_size
            yield f"model.image_size={size}: must equal data.image_size ({data.image_size})"
        if data.value_range != "tanh":
            must = f"must be tanh for {model.name}, whose generator ends in tanh"
            yield f"data.value_range={data.value_range}: {must}"


def _from(pixels: int, called: str) -> tuple[Rule, ...]:
    """Return the rules of a network that takes colour images of so many pixels or more."""

    def smallest(model: ModelConfig, config: RunConfig) -> Iterator[str]:
        if isinstance(data := config.data, ImagesConfig) and data.image_size < pixels:
            yield f"data.image_size={data.image_size}: {called} needs at least {pixels} pixels"

    return smallest, in_colour


def _of_one_width(other: str) -> Rule:
    """Let only the variant `other` have another width than 1."""

    def one_width(model: Any, config: RunConfig) -> Iterator[str]:
        if model.width != 1 and model.variant != other:
            variant = f"model.variant={model.variant} is torchvision's, of one width"
            yield f"model.width={model.width:g}: {variant} (allowed: 1; others with {other})"

    return one_width


@dataclass(slots=True)
class ClassifierConfig(ModelConfig):
    """The fields of every classifier."""

    width: float = positive(
        1.0,
        "Factor on the number of channels and hidden units of the published network",
        at_most=4.0,
    )
    num_classes: int | None = ranged(
        None,
        "Number of outputs of the last layer; null: the number of classes in the data",
        at_least=2,
    )
    label_smoothing: float = smoothing()


_classifier = partial(network, task="classification", needs=("num_classes",))


@_classifier(
    "alexnet",
    builder={
        "torchvision": "mprun.models.classifiers:alexnet",
        "2012": "mprun.models.classifiers:AlexNet2012",
    },
    rules=(*_from(63, "AlexNet"), _of_one_width("2012")),
)
class AlexNetConfig(ClassifierConfig):
    """`variant` torchvision: one tower, no LRN; 2012: two groups and local response norm."""

    variant: str = one_of(
        "torchvision 2012",
        "torchvision: one tower, no LRN; 2012: two groups and local response normalisation",
    )
    dropout: float = share(0.5, "Dropout probability before the fully connected layers")


@_classifier(
    "resnet50",
    builder={
        "v1.5": "mprun.models.classifiers:resnet50",
        "preactivation": "mprun.models.classifiers:PreActivationResNet50",
    },
    rules=(*_from(32, "ResNet-50"), _of_one_width("preactivation")),
)
class ResNet50Config(ClassifierConfig):
    """`variant` v1.5: torchvision's, stride 2 in the 3x3 convolution."""

    variant: str = one_of(
        "v1.5 preactivation",
        "v1.5: as in torchvision; preactivation: BatchNorm and ReLU before each convolution",
    )


@_classifier("vgg16", builder="mprun.models.classifiers:VGG16", rules=_from(32, "VGG-16"))
class VGG16Config(ClassifierConfig):
    """VGG-D, 16 layers with weights, without BatchNorm."""

    dropout: float = share(0.5, "Dropout probability after the hidden linear layers")


@_classifier("googlenet", builder="mprun.models.inception:googlenet", rules=_from(32, "GoogLeNet"))
class GoogLeNetConfig(ClassifierConfig):
    """Inception v1 as in Caffe: local response normalisation, two auxiliary heads."""

    dropout: float = _dropout(0.4)
    aux_weight: float = part(0.3, AUXILIARY)


@_classifier(
    "inception_v2", builder="mprun.models.inception:inception_v2", rules=_from(32, "Inception v2")
)
class InceptionV2Config(ClassifierConfig):
    """BN-Inception, which has no auxiliary heads."""

    dropout: float = _dropout(0.0)


@_classifier(
    "inception_v3", builder="mprun.models.inception:inception_v3", rules=_from(75, "Inception v3")
)
class InceptionV3Config(ClassifierConfig):
    """Inception v3 as in torchvision: one auxiliary head."""

    dropout: float = _dropout(0.5)
    aux_weight: float = part(0.4, AUXILIARY)


@source("digits", builder="mprun.data.image_store:DigitsImages", family="images", num_classes=10)
class DigitsConfig(ImagesConfig):
    """scikit-learn's 1,797 handwritten digits, enlarged from 8x8."""


@source("synthetic_images", builder="mprun.data.image_store:SyntheticImages", family="images")
class SyntheticImagesConfig(ImagesConfig):
    """Random images with random labels: plumbing and speed, nothing to learn."""

    num_classes: int = ranged(10, "Number of classes of the random labels", at_least=2)
    train_size: int = count(1024, "Number of training images to generate")
    eval_size: int = count(256, "Number of held-out images to generate")


def _crops(data: "ImageFolderConfig", config: RunConfig) -> Iterator[str]:
    model, kind = config.model.component, task_of(config.model)
    if data.layout == "flat" and (model.own or kind == "classification"):
        yield f"data.layout=flat: images without labels; a {kind} model needs data.layout=classes"
    if data.centre_crop is not None and data.augmentation != "centre":
        yield f"data.centre_crop={data.centre_crop}: only data.augmentation=centre reads it"
    if data.resize_to is not None and data.augmentation == "centre":
        use = "data.augmentation=centre resizes to data.image_size; use data.centre_crop"
        yield f"data.resize_to={data.resize_to}: {use}"
    if data.resize_to is not None and data.resize_to < data.image_size:
        yield f"data.resize_to={data.resize_to}: must be >= data.image_size ({data.image_size})"


_BUILDER = "mprun.data.image_folder:ImageFolder"
_of_files = partial(source, builder=_BUILDER, family="images", on_disk=True, decodes=True)


@_of_files("image_folder", rules=(_crops,))
class ImageFolderConfig(ImagesConfig):
    """Image files below `root`, decoded by loader processes during training.

    root/train and root/val (or valid, validation, test) have one folder per class. If root alone
    has one folder per class, `eval_share` of its files are held out. `layout: flat` takes every
    image below root, at any depth, without labels (DCGAN).
    """

    image_size: int = _pixels(224, SIDE, at_most=1024)
    layout: str = one_of(
        "classes flat",
        "classes: one folder per class; flat: all images below root, without labels (DCGAN)",
    )
    eval_share: float = fraction(
        0.1, "Share of the files to hold out for evaluation if there is only one folder"
    )
    augmentation: str = one_of(
        "resized_crop crop centre",
        "resized_crop: RandomResizedCrop; crop: resize, then a random crop; centre: the middle",
    )
    flip: bool = setting(True, _FLIP)
    resize_to: int | None = _pixels(
        None,
        "Shorter side of the resized image (augmentation=crop: each side); null: 8/7 of image_size",
        at_most=2048,
    )
    centre_crop: int | None = _pixels(
        None,
        "augmentation=centre: side length of the square crop; null: the largest possible",
        at_most=8192,
    )
    on_corrupt: str = one_of(
        "stop skip",
        "For an unreadable file: stop the run, or skip to the next image and count the file",
    )
    prefetch: int = prefetch()


@_of_files("imagenet", rules=(_crops,), num_classes=1000)
class ImageNetConfig(ImageFolderConfig):
    """ILSVRC12: 1,000 class folders below root/train and root/val."""

    imagenet = True  # an argument of the builder


@source(
    "cifar10", builder="mprun.data.cifar10:Cifar10", family="images", on_disk=True, num_classes=10
)
class Cifar10Config(ImagesConfig):
    """CIFAR-10 in torchvision's files, or class folders of JPEG or PNG.

    It is decoded once and kept in memory on the device, which resizes other sizes than 32.
    """

    channels: int = one_of((3,), "Number of channels of an image; 3, because CIFAR-10 is in colour")
    augmentation: str = one_of(
        "padded_crop none", "padded_crop: pad by 4 pixels on each side, then take a random crop"
    )
    flip: bool = setting(True, _FLIP)
    train_size: int | None = count(None, TRAIN_FIRST)
    eval_size: int | None = count(None, EVAL_FIRST)

"""Detection: images with boxes around their objects, and networks that find the boxes."""

from collections.abc import Iterator
from functools import partial

from mprun.config.components.images import (
    EVAL_FIRST,
    SIDE,
    TRAIN_FIRST,
    ImagesConfig,
    in_colour,
    prefetch,
)
from mprun.config.fields import one_of, place, ranged, setting, share
from mprun.config.registry import ModelConfig, network, source, task
from mprun.config.schema import RunConfig
from mprun.record.keys import RESULT
from mprun.record.metric_facts import LOSS, Metric

task(
    "detection",
    builder="mprun.extensions.detection.task:Detection",
    metrics=(LOSS, Metric("map", higher_is_better=True, unit="points")),
    family="boxes",
    overlaps=True,
)

# Fields that several classes share.
_augmentation = partial(
    one_of, "ssd flip", "ssd: colours, zoom, crops, mirroring; flip: mirror half of the images"
)
_freeze = partial(setting, False, "Whether only the convolutions for boxes and classes are trained")
_weights = partial(
    place,
    "File of initial weights (torch.save): a VGG-16 or the whole network; null: random weights",
    role=RESULT,
)


def _in_cells(model: ModelConfig, config: RunConfig) -> Iterator[str]:
    if isinstance(data := config.data, ImagesConfig) and data.image_size % 8:
        yield f"data.image_size={data.image_size}: must be a multiple of 8 for {model.name}"


@network(
    "ssd_mini",
    task="detection",
    builder="mprun.extensions.detection.ssd:ssd_mini",
    rules=(_in_cells, in_colour),
    needs=("num_classes", "image_size"),
)
class SSDMiniConfig(ModelConfig):
    """A small single-shot detector for canvases of digits."""

    freeze_backbone: bool = _freeze()


def _of_300_pixels(model: ModelConfig, config: RunConfig) -> Iterator[str]:
    if isinstance(data := config.data, ImagesConfig) and data.image_size != 300:
        yield f"data.image_size={data.image_size}: the default boxes of SSD300 are for 300 pixels"


@network(
    "ssd300",
    task="detection",
    builder="mprun.extensions.detection.ssd:ssd300",
    rules=(_of_300_pixels, in_colour),
    needs=("num_classes",),
)
class SSD300Config(ModelConfig):
    """SSD300 on VGG-16, as its authors published it for VOC."""

    weights: str | None = _weights()
    freeze_backbone: bool = _freeze()


def _anchors(model: "FasterRCNNConfig", config: RunConfig) -> Iterator[str]:
    if not isinstance(data := config.data, ImagesConfig):
        return
    size, convolutions = data.image_size, 4
    if model.variant == "small" and size % 4:
        yield f"data.image_size={size}: must be a multiple of 4 for {model.name}"
    if model.variant == "vgg16":
        convolutions = 13
        if size < 128:
            yield f"data.image_size={size}: the smallest anchors of VGG-16 need 128 pixels"
    if model.frozen > convolutions:
        yield f"model.frozen={model.frozen}: the backbone has {convolutions} convolutions"
    if model.weights is not None and model.variant != "vgg16":
        yield f"model.weights={model.weights}: only model.variant=vgg16 can load them"


@network(
    "faster_rcnn",
    task="detection",
    builder={
        "small": "mprun.extensions.detection.faster_rcnn:faster_rcnn_small",
        "vgg16": "mprun.extensions.detection.faster_rcnn:faster_rcnn_vgg16",
    },
    rules=(in_colour, _anchors),
    needs=("num_classes", "image_size"),
    why_no_graph=("only the device knows how many of Faster R-CNN's proposed regions are left"),
)
class FasterRCNNConfig(ModelConfig):
    """`variant` small: for canvases of digits; vgg16: the published network."""

    variant: str = one_of(
        "small vgg16", "small: for canvases of digits; vgg16: the published network"
    )
    dropout: float = share(0.0, "Dropout probability after the fully connected layers")
    frozen: int = ranged(
        0, "How many of the first convolutions keep their initial weights", at_least=0, at_most=13
    )
    weights: str | None = _weights()


@source(
    "digit_canvases",
    builder="mprun.extensions.detection.canvases:DigitCanvases",
    family="boxes",
    num_classes=10,
    most_boxes=3,
)
class DigitCanvasesConfig(ImagesConfig):
    """Canvases of noise with 1 to 3 digits to be found and named."""

    train_size: int | None = ranged(None, TRAIN_FIRST, at_least=1, at_most=1000)
    eval_size: int | None = ranged(None, EVAL_FIRST, at_least=1, at_most=300)


@source(
    "voc",
    builder="mprun.extensions.detection.annotations:voc",
    family="boxes",
    on_disk=True,
    decodes=True,
    num_classes=20,
    most_boxes=56,  # the most of an image of 2007 or 2012
)
class VocConfig(ImagesConfig):
    """PASCAL VOC: trainval of 2007, or of 2007 and 2012, test of 2007 held out."""

    image_size: int = ranged(300, SIDE, at_least=8, at_most=1024)
    channels: int = one_of((3,), "Number of channels of an image; 3, because VOC is in colour")
    years: str = one_of(
        "2007 2007+2012", "Years whose trainval images are used for training", default="2007+2012"
    )
    difficult: bool = setting(
        False,
        "Whether to train on objects marked as difficult; the metric named map ignores them",
    )
    augmentation: str = _augmentation()
    prefetch: int = prefetch()


@source(
    "coco",
    builder="mprun.extensions.detection.annotations:coco",
    family="boxes",
    on_disk=True,
    decodes=True,
    num_classes=80,
    most_boxes=93,  # the most of an image of train2017
)
class CocoConfig(ImagesConfig):
    """COCO, or data of one's own in its format: annotations/instances_NAME.json and NAME/."""

    image_size: int = ranged(300, SIDE, at_least=8, at_most=1024)
    channels: int = one_of((3,), "Number of channels of an image; 3, because COCO is in colour")
    train_folder: str = setting(
        "train2017",
        "Folder NAME of the training images; their annotations are in instances_NAME.json",
        below_root=True,
    )
    eval_folder: str = setting(
        "val2017",
        "Folder NAME of the held-out images; their annotations are in instances_NAME.json",
        below_root=True,
    )
    augmentation: str = _augmentation()
    prefetch: int = prefetch()

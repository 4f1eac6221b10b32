"""Rules about data and about what model and data must agree on; raises BadInput."""

import os

from mprun.config import schema
from mprun.config.schema import RunConfig
from mprun.config.schema_models import task_of
from mprun.errors import BadInput

_FAMILY = {
    "classification": "images",
    "reconstruction": "images",
    "gan": "images",
    "language_model": "text",
}
_DATA_FAMILY = {
    "digits": "images",
    "synthetic_images": "images",
    "image_folder": "images",
    "imagenet": "images",
    "cifar10": "images",
    "docs_text": "text",
    "synthetic_tokens": "text",
    "text": "text",
    "lm1b": "text",
}
# Sources that read files below data.root, and sources whose files are decoded on the way.
_ON_DISK = ("image_folder", "imagenet", "cifar10", "text", "lm1b")
_WITH_WORKERS = ("image_folder", "imagenet", "custom")


def data_fits_model(config: RunConfig) -> None:
    model, data = config.model, config.data
    if data.name == "custom":
        return  # its factory is asked when it is built
    wanted, got = _FAMILY[task_of(model)], _DATA_FAMILY[data.name]
    if wanted != got:
        options = ", ".join(name for name, family in _DATA_FAMILY.items() if family == wanted)
        raise BadInput(f"data={data.name}: model {model.name} learns from {wanted}: {options}")
    if model.name == "custom":
        return
    if model.name in ("dcgan", "conv_autoencoder"):
        if data.image_size != model.image_size:
            raise BadInput(
                f"model.image_size={model.image_size}: must equal data.image_size "
                f"({data.image_size})"
            )
        if data.value_range != "tanh":
            raise BadInput(
                f"data.value_range={data.value_range}: must be tanh for {model.name}, "
                "whose generator ends in tanh"
            )
    if model.name == "alexnet" and model.variant == "2012" and data.image_size not in (224, 227):
        raise BadInput(
            f"data.image_size={data.image_size}: the 2012 AlexNet takes 224 or 227 pixels"
        )
    if model.name == "alexnet" and data.image_size < 63:
        raise BadInput(f"data.image_size={data.image_size}: AlexNet needs at least 63 pixels")
    if model.name == "resnet50" and data.image_size < 32:
        raise BadInput(f"data.image_size={data.image_size}: ResNet-50 needs at least 32 pixels")
    if model.name in ("alexnet", "resnet50") and data.channels != 3:
        raise BadInput(f"data.channels={data.channels}: must be 3 for {model.name}")


def data_folder(config: RunConfig) -> None:
    data = config.data
    if data.name in _ON_DISK:
        if data.root is None:
            raise BadInput(
                f"data.root=null: data={data.name} needs the folder of its files (which, says "
                "docs/recipes.md)"
            )
        if not os.path.isdir(data.root):
            raise BadInput(f"data.root={data.root}: no such folder")


def embedded_data(config: RunConfig) -> None:
    data = config.data
    if data.root is not None and data.name not in (*_ON_DISK, "custom"):
        # Not Path.exists, which raises for a name that is too long.
        if not os.path.exists(data.root):
            raise BadInput(f"data.root={data.root}: no such folder")
        raise BadInput(
            f"data.root={data.root}: data={data.name} is embedded and "
            "reads no folder (allowed: null)"
        )
    if data.workers and data.name not in _WITH_WORKERS:
        raise BadInput(
            f"data.workers={data.workers}: data={data.name} needs no loader process "
            "(allowed: 0 or null)"
        )


def images_on_disk(config: RunConfig) -> None:
    data = config.data
    if not isinstance(data, schema.ImageFolderConfig):
        return
    if data.layout == "flat":
        if config.model.name == "custom" or task_of(config.model) == "classification":
            raise BadInput(
                f"data.layout=flat: images without labels; a {task_of(config.model)} model "
                "needs data.layout=classes"
            )
    if data.centre_crop is not None and data.augmentation != "centre":
        raise BadInput(
            f"data.centre_crop={data.centre_crop}: only data.augmentation=centre reads it"
        )
    if data.resize_to is not None and data.augmentation == "centre":
        raise BadInput(
            f"data.resize_to={data.resize_to}: data.augmentation=centre resizes to "
            "data.image_size; use data.centre_crop"
        )
    if data.resize_to is not None and data.resize_to < data.image_size:
        raise BadInput(
            f"data.resize_to={data.resize_to}: must be >= data.image_size ({data.image_size})"
        )


def sampled_softmax(config: RunConfig) -> None:
    model = config.model
    if not isinstance(model, schema.LSTMConfig):
        return
    if model.sampled_softmax is None:
        if model.embedding_gradient_factor != 1.0:
            raise BadInput(
                f"model.embedding_gradient_factor={model.embedding_gradient_factor:g}: only with "
                "model.sampled_softmax"
            )
        return
    optim = config.optim
    plain_sgd = optim.name == "sgd" and not optim.momentum and not optim.weight_decay
    if not plain_sgd and not (optim.name == "adagrad" and not optim.weight_decay):
        raise BadInput(
            f"optim={optim.name} model.sampled_softmax={model.sampled_softmax}: rows are updated "
            "only where used (allowed: adagrad or sgd without momentum, no weight decay)"
        )
    if config.train.accumulate != 1:
        raise BadInput(
            f"train.accumulate={config.train.accumulate}: must be 1 with model.sampled_softmax"
        )

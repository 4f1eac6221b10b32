"""`data=custom`: the user's factory called, and its source held to what a source must be.

Data sources from configurations.
"""

import torch
from torch import Tensor

from mprun.build.user_code import Factory, is_out_of_memory
from mprun.config import schema
from mprun.config.schema import CustomDataConfig
from mprun.data import DigitsImages, DocsText, SyntheticImages, SyntheticTokens
from mprun.data.cifar10 import Cifar10
from mprun.data.image_folder import ImageFolder
from mprun.data.lm1b import Lm1b
from mprun.data.source import Source, completed, kept_random_state
from mprun.data.text import Text
from mprun.errors import BadInput, MprunError, raised

_ATTRIBUTES = (
    "train_batch",
    "eval_batches",
    "batches_per_epoch",
    "samples_per_batch",
    "sha256",
    "description",
)
# What the source must know of itself, by what is learned from it.
_SIZE_OF = {"classification": "num_classes", "language_model": "vocab_size"}
_KIND = {"classification": "classifier", "language_model": "language model"}
_RANGE_TOLERANCE = 1e-3  # of [-1, 1]: interpolation may overshoot by a rounding


def own_source(config: CustomDataConfig, seed: int, device: torch.device) -> Source:
    """factory(batch_size=, seed=, device=, **options), with root, image_size, workers where set.

    The global random state is left as it was, so that initial weights do not depend on the data.
    """
    own = {"batch_size": config.batch_size, "seed": seed, "device": device}
    for key in ("root", "image_size", "workers"):
        if getattr(config, key) is not None:
            own[key] = getattr(config, key)
    for name in config.options:
        if name in ("batch_size", "seed", "device", "root", "image_size", "workers"):
            proper = name if name in ("seed", "device") else f"data.{name}"
            raise BadInput(f"data.options.{name}: is handed over anyway; set {proper}")
    with kept_random_state():
        factory = Factory("data.factory", config.factory)
        source = factory(**own, **config.options)
    _check_attributes(factory, source)
    return completed(source)


def _check_attributes(factory: Factory, source: object) -> None:
    missing = [name for name in _ATTRIBUTES if not hasattr(source, name)]
    if missing:
        raise BadInput(
            f"{factory}: returned a {type(source).__name__} without {', '.join(missing)}; "
            "DatasetSource or TokenSource makes a source (docs/own_data.md)"
        )
    for name, least in {"batches_per_epoch": 0, "samples_per_batch": 1}.items():
        value = getattr(source, name)
        if type(value) is not int or value < least:
            raise BadInput(f"{factory}: {name} of its source is {value!r}, must be >= {least}")
    if not isinstance(source.sha256, str) or not source.sha256:
        raise BadInput(f"{factory}: sha256 of its source is {source.sha256!r}, must be text")
    description = source.description
    plain = isinstance(description, dict) and all(
        isinstance(key, str) and isinstance(value, str | int | float)
        for key, value in description.items()
    )
    if not plain or not {"name", "train_samples", "eval_samples"} <= description.keys():
        raise BadInput(
            f"{factory}: description of its source must map names to plain values, with name, "
            "train_samples and eval_samples"
        )


def check_batches(config: CustomDataConfig, task: str, source: Source, device) -> None:
    """Hold the first batch of each split to what `task` learns from; BadInput says what is wrong.

    Asks for training batch 0 twice: it must be the same. Puts channels and image_size, where the
    description lacks them, into it.
    """
    name = f"data.factory={config.factory}"
    size = _SIZE_OF.get(task)
    if size is not None and type(getattr(source, size, None)) is not int:
        raise BadInput(f"{name}: its source has no {size}, which a {_KIND[task]} needs")
    if source.batches_per_epoch < 1:
        return  # said with the batch size, once the model is known
    with kept_random_state():
        first = _asked(name, "train_batch(0)", lambda: source.train_batch(0))
        again = _asked(name, "train_batch(0)", lambda: source.train_batch(0))
        held_out = _asked(name, "eval_batches()", lambda: next(iter(source.eval_batches()), None))
    if held_out is None:
        raise BadInput(f"{name}: eval_batches() of its source yields nothing")
    for what, batch in {"train_batch(0)": first, "eval_batches()": held_out}.items():
        wrong = _wrong(batch, task, source, device)
        if wrong:
            raise BadInput(f"{name}: {what} of its source {wrong}")
    if not all(map(torch.equal, first[: 1 if task == "gan" else 2], again)):
        raise BadInput(
            f"{name}: train_batch(0) of its source differs when it is asked again; it must depend "
            "on seed and index alone"
        )
    if task != "language_model":
        channels, height, width = first[0].shape[1:]
        source.description.setdefault("channels", channels)
        if height == width:
            source.description.setdefault("image_size", height)


def check_tanh_images(config: CustomDataConfig, image_size: int, source: Source) -> None:
    """What a generator or decoder that ends in tanh needs: square images in [-1, 1]."""
    images = source.train_batch(0)[0]
    name = f"data.factory={config.factory}"
    if images.shape[2:] != (image_size, image_size):
        raise BadInput(
            f"{name}: images of {images.shape[2]}x{images.shape[3]} pixels, model.image_size is "
            f"{image_size}"
        )
    low, high = images.min().item(), images.max().item()
    if not -1 - _RANGE_TOLERANCE <= low <= high <= 1 + _RANGE_TOLERANCE:
        raise BadInput(
            f"{name}: values from {low:g} to {high:g}, must be in [-1, 1] for a generator that "
            "ends in tanh"
        )


def _asked(name: str, what: str, ask):
    try:
        return ask()
    except MprunError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise BadInput(f"{name}: {what} of its source: {raised(error)}") from error


def _wrong(batch: object, task: str, source: Source, device: torch.device) -> str | None:
    """What is wrong with a batch, behind "the batch"; None if nothing is."""
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not pair or not all(isinstance(part, Tensor) for part in batch):
        return "must be a pair of tensors"
    for part in batch:
        if part.device.type != torch.device(device).type:
            return f"lies on {part.device}, must be on {device}"
    first, second = batch
    if task == "language_model":
        alike = first.dtype is second.dtype is torch.int64 and first.shape == second.shape
        if not alike or first.dim() != 2:
            return f"is {_text(first)} and {_text(second)}, must be int64 [time, batch] twice"
        return _outside("token", torch.cat([first, second]), source.vocab_size, "vocab_size")
    if first.dtype is not torch.float32 or first.dim() != 4:
        return f"has images {_text(first)}, must be float32 [batch, channels, height, width]"
    if task == "classification":
        if second.dtype is not torch.int64 or second.shape != first.shape[:1]:
            return f"has labels {_text(second)}, must be int64 [batch]"
        return _outside("label", second, source.num_classes, "num_classes")
    return None


def _outside(what: str, values: Tensor, size: int, name: str) -> str | None:
    low, high = values.min().item(), values.max().item()
    if 0 <= low and high < size:
        return None
    return f"has {what}s from {low} to {high}, must be from 0 to {size - 1} ({name}={size})"


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def build_data(config: schema.DataConfig, seed: int, device: torch.device) -> Source:
    """The data source of a configuration."""
    common = {"batch_size": config.batch_size, "seed": seed, "device": device}
    match config:
        case schema.DigitsConfig():
            return DigitsImages(
                config.image_size,
                **common,
                channels=config.channels,
                value_range=config.value_range,
            )
        case schema.DocsTextConfig():
            return DocsText(
                config.level,
                sequence_length=config.sequence_length,
                vocab_limit=config.vocab_limit,
                vocab_multiple=config.vocab_multiple,
                **common,
            )
        case schema.SyntheticImagesConfig():
            return SyntheticImages(
                config.num_classes,
                config.image_size,
                **common,
                channels=config.channels,
                train_size=config.train_size,
                eval_size=config.eval_size,
                value_range=config.value_range,
            )
        case schema.SyntheticTokensConfig():
            return SyntheticTokens(
                config.vocab_size,
                sequence_length=config.sequence_length,
                train_tokens=config.train_tokens,
                eval_tokens=config.eval_tokens,
                **common,
            )
        case schema.ImageFolderConfig():  # imagenet too
            return ImageFolder(
                config.root,
                imagenet=isinstance(config, schema.ImageNetConfig),
                layout=config.layout,
                eval_share=config.eval_share,
                image_size=config.image_size,
                channels=config.channels,
                augmentation=config.augmentation,
                flip=config.flip,
                resize_to=config.resize_to,
                centre_crop=config.centre_crop,
                value_range=config.value_range,
                on_corrupt=config.on_corrupt,
                workers=config.workers,
                prefetch=config.prefetch,
                **common,
            )
        case schema.Cifar10Config():
            return Cifar10(
                config.root,
                image_size=config.image_size,
                augmentation=config.augmentation,
                flip=config.flip,
                value_range=config.value_range,
                train_size=config.train_size,
                eval_size=config.eval_size,
                **common,
            )
        case schema.TextConfig():
            return Text(
                config.root,
                sequence_length=config.sequence_length,
                vocab_limit=config.vocab_limit,
                vocab_multiple=config.vocab_multiple,
                lower=config.lower,
                eval_split=config.eval_split,
                rotate=config.rotate,
                eval_tokens=config.eval_tokens,
                cache=config.cache,
                **common,
            )
        case schema.Lm1bConfig():
            return Lm1b(
                config.root,
                vocabulary=config.vocabulary,
                sequence_length=config.sequence_length,
                vocab_multiple=config.vocab_multiple,
                eval_split=config.eval_split,
                eval_tokens=config.eval_tokens,
                cache=config.cache,
                **common,
            )
        case schema.CustomDataConfig():
            return own_source(config, seed, device)
    raise BadInput(f"data={config.name}: no builder")

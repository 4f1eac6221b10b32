"""Data sources from configurations; the user's own sources are checked against the interface."""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from mprun.assembly.user_code import Factory, blaming, shape_of
from mprun.config.components.custom import CustomDataConfig
from mprun.config.registry import DataConfig, TaskKind, kind_called
from mprun.data.source import Source, completed, kept_random_state
from mprun.entry_points import loaded
from mprun.errors import BadInput


def build_data(config: DataConfig, seed: int, device: torch.device) -> Source:
    if isinstance(config, CustomDataConfig):
        return own_source(config, seed, device)
    make = loaded(config.component.builder)
    return make(**arguments_of(make, config, seed=seed, device=device))


def arguments_of(make: Callable, config: object, **more: Any) -> dict[str, Any]:
    """Return the arguments of `make` that a configuration has under their names, or `more` has.

    An argument whose type is a dataclass, an options object, is made of fields in the same way.
    """
    arguments: dict[str, Any] = {}
    for name, parameter in signature(make).parameters.items():
        kind: Any = parameter.annotation
        if name in more:
            arguments[name] = more[name]
        elif hasattr(kind, "__dataclass_fields__"):
            own = arguments_of(kind, config, **more)
            if own and own.keys() >= _required(kind):  # else it is no matter of a configuration
                arguments[name] = kind(**own)
        elif hasattr(config, name):
            arguments[name] = getattr(config, name)
    return arguments


def _required(make: Callable) -> set[str]:
    known = signature(make).parameters.items()
    return {name for name, parameter in known if parameter.default is Parameter.empty}


_ATTRIBUTES = (
    *("train_batch", "eval_batches", "batches_per_epoch", "samples_per_batch"),
    *("sha256", "description"),
)
_RANGE_TOLERANCE = 1e-3  # of [-1, 1]: interpolation may overshoot by a rounding


def own_source(config: CustomDataConfig, seed: int, device: torch.device) -> Source:
    """Call factory(batch_size=, seed=, device=, **options), with root, image_size, workers if set.

    The global random state is restored, so that initial weights do not depend on the data.
    """
    own = {name: getattr(config, name) for name in ("batch_size", "root", "image_size", "workers")}
    for name in config.options:
        if name in own or name in ("seed", "device"):
            proper = f"data.{name}" if name in own else name
            raise BadInput(f"data.options.{name}: mprun passes this argument itself; set {proper}")
    own = {name: value for name, value in own.items() if value is not None}
    with kept_random_state():
        factory = Factory("data.factory", config.factory)
        source = factory(**own, seed=seed, device=device, **config.options)
    _check_attributes(factory, source)
    return completed(source)


def _check_attributes(factory: Factory, source: Any) -> None:
    if missing := ", ".join(name for name in _ATTRIBUTES if not hasattr(source, name)):
        use = "DatasetSource or TokenSource makes a source (mprun --help data.factory)"
        raise BadInput(f"{factory}: returned a {type(source).__name__} without {missing}; {use}")
    for name, least in {"batches_per_epoch": 0, "samples_per_batch": 1}.items():
        value = getattr(source, name)
        if type(value) is not int or value < least:
            raise BadInput(f"{factory}: {name} of its source is {value!r}, must be >= {least}")
    if not isinstance(source.sha256, str) or not source.sha256:
        raise BadInput(f"{factory}: the sha256 of its source is {source.sha256!r}, must be text")
    description = source.description
    plain = isinstance(description, dict) and all(
        isinstance(name, str) and isinstance(value, str | int | float)
        for name, value in description.items()
    )
    if not plain or not {"name", "train_samples", "eval_samples"} <= description.keys():
        raise BadInput(
            f"{factory}: the description of the returned source must map names to plain values, "
            "with name, train_samples and eval_samples"
        )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal; a NaN, which the run is to tell of, is as another."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def check_batches(config: CustomDataConfig, task: str, source: Source, device) -> None:
    """Check the first batch of each split against the needs of `task`; BadInput says what is wrong.

    It reads training batch 0 twice: both must be the same. It adds channels and image_size to the
    description if they are missing.
    """
    name = f"data.factory={config.factory}"
    kind = kind_called(task)
    for size in kind.sizes:
        if type(getattr(source, size, None)) is not int:
            raise BadInput(f"{name}: its source has no {size}, which a {kind.network_kind} needs")
    if source.batches_per_epoch < 1:
        return  # reported with the batch size, once the model is known
    with kept_random_state():
        with blaming(f"{name}: train_batch(0) of its source"):
            first, again = source.train_batch(0), source.train_batch(0)
        with blaming(f"{name}: eval_batches() of its source"):
            held_out = next(iter(source.eval_batches()), None)
    if held_out is None:
        raise BadInput(
            f"{name}: eval_batches() of its source must yield at least one batch, got none"
        )
    for what, batch in {"train_batch(0)": first, "eval_batches()": held_out}.items():
        if wrong := _wrong(batch, kind, source, device):
            raise BadInput(f"{name}: a batch from {what} of the source is wrong: it {wrong}")
    if not all(map(_alike, first[: 1 if kind.networks > 1 else 2], again)):
        must = "it must depend on seed and index alone"
        raise BadInput(f"{name}: train_batch(0) of its source differs when read again; {must}")
    if kind.family == "utterances":
        source.description.setdefault("frequencies", first[0].shape[2])
    elif kind.family in ("images", "boxes"):
        channels, height, width = first[0].shape[1:]
        source.description.setdefault("channels", channels)
        if height == width:
            source.description.setdefault("image_size", height)


def check_tanh_images(config: CustomDataConfig, image_size: int, source: Source) -> None:
    """Check that images suit a generator or decoder that ends in tanh: square, in [-1, 1]."""
    images = source.train_batch(0)[0]
    name = f"data.factory={config.factory}"
    height, width = images.shape[2:]
    if (height, width) != (image_size, image_size):
        size = f"{height}x{width} pixels"
        raise BadInput(f"{name}: has images of {size}, but model.image_size is {image_size}")
    low, high = images.min().item(), images.max().item()
    if not -1 - _RANGE_TOLERANCE <= low <= high <= 1 + _RANGE_TOLERANCE:
        must = "must be in [-1, 1] for a generator that ends in tanh"
        raise BadInput(f"{name}: has values from {low:g} to {high:g}, {must}")


def _wrong(batch: Any, kind: TaskKind, source: Source, device: torch.device) -> str | None:
    """Return the error in a batch, as a phrase after "the batch"; None if there is none."""
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not pair or not all(isinstance(part, Tensor) for part in batch):
        return "must be a pair of tensors"
    for part in batch:
        if part.device.type != torch.device(device).type:
            return f"lies on {part.device}, must be on {device}"
    first, second = batch
    return _WRONG.get(kind.family, _wrong_images)(first, second, source, kind.sizes)


_Sizes = tuple[str, ...]


def _wrong_tokens(tokens: Tensor, targets: Tensor, source: Source, sizes: _Sizes) -> str | None:
    alike = tokens.dtype is targets.dtype is torch.int64 and tokens.shape == targets.shape
    if not alike or tokens.dim() != 2:
        return f"is {shape_of(tokens)} and {shape_of(targets)}, must be int64 [time, batch] twice"
    return _outside("token", torch.cat([tokens, targets]), source, *sizes)


def _wrong_pairs(sources: Tensor, targets: Tensor, source: Source, sizes: _Sizes) -> str | None:
    for tokens in (sources, targets):
        if tokens.dtype is not torch.int64 or tokens.dim() != 2 or len(tokens) != len(sources):
            both = f"{shape_of(sources)} and {shape_of(targets)}"
            return f"is {both}, must be int64 [batch, words] twice"
    found = zip((sources, targets), sizes, strict=True)
    wrong = [_outside("token", tokens, source, size) for tokens, size in found]
    if not bool((sources != 0).any(1).all()):
        wrong.append("has a source of padding (0) alone")
    return next(filter(None, wrong), None)


def _wrong_utterances(
    features: Tensor, targets: Tensor, source: Source, sizes: _Sizes
) -> str | None:
    if features.dtype is not torch.float32 or features.dim() != 4 or features.shape[1] != 1:
        return f"has features {shape_of(features)}, must be float32 [batch, 1, frequencies, time]"
    if targets.dtype is not torch.int64 or targets.dim() != 2 or targets.shape[1] < 2:
        return f"has targets {shape_of(targets)}, must be int64 [batch, 2 + most symbols]"
    frames, lengths, symbols = targets[:, 0], targets[:, 1], targets[:, 2:]
    inside = torch.arange(symbols.shape[1]) < lengths[:, None].cpu()
    for what, values, least, most in (
        ("frames", frames, 1, features.shape[3]),
        ("lengths of texts", lengths, 0, symbols.shape[1]),
        ("symbols", symbols[inside], 1, getattr(source, sizes[0]) - 1),
    ):
        if len(values) and not least <= values.min().item() <= values.max().item() <= most:
            low, high = values.min().item(), values.max().item()
            return f"has {what} from {low} to {high}, must be from {least} to {most}"
    return None


def _wrong_images(images: Tensor, labels: Tensor, source: Source, sizes: _Sizes) -> str | None:
    """Check images and labels; sizes: number of classes, if labels are learned."""
    if images.dtype is not torch.float32 or images.dim() != 4:
        return f"has images {shape_of(images)}, must be float32 [batch, channels, height, width]"
    if not sizes:
        return None
    if labels.dtype is not torch.int64 or labels.shape != images.shape[:1]:
        return f"has labels {shape_of(labels)}, must be int64 [batch]"
    return _outside("label", labels, source, *sizes)


# Family of data -> check of a batch; all others are images.
_WRONG: dict[str, Callable[[Tensor, Tensor, Source, _Sizes], str | None]] = {
    "text": _wrong_tokens,
    "sentence_pairs": _wrong_pairs,
    "utterances": _wrong_utterances,
}


def _outside(what: str, values: Tensor, source: Source, name: str) -> str | None:
    size, low, high = getattr(source, name), values.min().item(), values.max().item()
    if 0 <= low and high < size:
        return None
    return f"has {what}s from {low} to {high}, must be from 0 to {size - 1} ({name}={size})"

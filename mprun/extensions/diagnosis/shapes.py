"""Find the sizes of a model that leave Tensor Cores idle, and the order of its modules.

Tensor Cores take FP16 operands in multiples of 8 (NVIDIA, "Training With Mixed Precision"; cuBLAS
from 11 and cuDNN from 7.6.3 pad odd sizes themselves, at a cost).
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from mprun.config.schema import RunConfig
from mprun.precision.module_dtypes import NORM_LAYERS
from mprun.precision.scaled_linear import chosen_layers
from mprun.precision.scaled_products import ScaledProducts

MULTIPLE = 8
Key = tuple[str, str]  # learner, module
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PRODUCTS = (nn.Linear, nn.RNNBase, *_CONVOLUTIONS, *_TRANSPOSED)


@dataclass(frozen=True, slots=True)
class IdleShape:
    """One size that is not a multiple of 8.

    module: its name, "" for the batch. usual: as in every network of this kind (image channels).
    remedy: an override that makes it a multiple, None if no key does.
    """

    module: str
    dimension: str
    size: int
    usual: bool = False
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The modules without modules inside, by learner, in the order of the model's definition.

    products: linear, recurrent and convolution layers. scaled: layers whose products can be in FP8.
    """

    leaves: dict[str, tuple[str, ...]]
    norms: frozenset[Key]
    products: frozenset[Key]
    scaled: tuple[Key, ...] = ()

    def named(self, key: Key) -> str:
        """Return the module's name, with the learner if there are several."""
        return ": ".join(key if len(self.leaves) > 1 else key[1:])


def layout(task) -> Layout:
    """Return the layout of all models of a task."""
    leaves = {
        (label, name): module
        for label, learner in task.learners.items()
        for name, module in learner.model.named_modules()
        if name and not any(module.children())
    }
    scaled: list[Key] = []
    for label, learner in task.learners.items():
        with suppress(ValueError):  # no linear layer except the output's
            names = chosen_layers(learner.model, ScaledProducts(), {})
            scaled += [(label, name) for name in names]
    return Layout(
        {label: tuple(name for own, name in leaves if own == label) for label in task.learners},
        frozenset(key for key, module in leaves.items() if isinstance(module, NORM_LAYERS)),
        frozenset(key for key, module in leaves.items() if isinstance(module, _PRODUCTS)),
        tuple(scaled),
    )


def idle_shapes(task, config: RunConfig) -> list[IdleShape]:
    """Return every size of `task` that is not a multiple of 8; `config`: for the remedies."""
    found: list[IdleShape] = []
    readers: list[str] = []
    for label, learner in task.learners.items():
        prefix = f"{label}: " if len(task.learners) > 1 else ""
        found += _of_model(learner.model, prefix, config.model)
        rows = (m for m in learner.model.modules() if isinstance(m, (nn.Linear, nn.RNNBase)))
        readers += [type(module).__name__ for module in rows]
    batch = config.data.batch_size
    if readers and batch % MULTIPLE:
        kinds = " and ".join(dict.fromkeys(readers))
        remedy = f"data.batch_size={_padded(batch)}"
        found.append(IdleShape("", f"batch size of {kinds}", batch, remedy=remedy))
    return found


def _of_model(model: nn.Module, prefix: str, config: Any) -> Iterator[IdleShape]:
    modules = [(name, module) for name, module in model.named_modules() if name]
    convolutions = [m for _, m in modules if isinstance(m, _CONVOLUTIONS + _TRANSPOSED)]
    last = next((m for _, m in reversed(modules) if isinstance(m, _PRODUCTS)), None)
    for name, module in modules:
        for dimension, size in _sizes(module).items():
            if size % MULTIPLE:
                usual = _of_images(module, dimension, size, convolutions, last)
                remedy = None if usual else _remedy(config, size, module is last)
                yield IdleShape(prefix + name, dimension, size, usual, remedy)


def _sizes(module: nn.Module) -> dict[str, int]:
    match module:
        case nn.Linear():
            return {"input features": module.in_features, "output features": module.out_features}
        case nn.RNNBase():
            sizes = {"input size": module.input_size, "hidden size": module.hidden_size}
            return sizes | {"projection size": module.proj_size}  # 0 without one
    if isinstance(module, _CONVOLUTIONS + _TRANSPOSED):
        per_group = "" if module.groups == 1 else " per group"  # each a separate product
        sizes = {"input": module.in_channels, "output": module.out_channels}
        return {f"{end} channels{per_group}": n // module.groups for end, n in sizes.items()}
    return {}


def _of_images(module, dimension: str, size: int, convolutions: list, last) -> bool:
    """Return whether the size is of image channels, or of a discriminator's single logit."""
    if size not in (1, 3) or module not in convolutions:
        return False
    first_input = dimension == "input channels" and module is convolutions[0]
    return first_input or (dimension == "output channels" and module is last)


def _remedy(model: Any, size: int, is_last: bool) -> str | None:
    """Return the override that pads this size, if the configuration has one."""
    if hasattr(model, "pad_to_multiple"):
        return f"model.pad_to_multiple={MULTIPLE}"
    if hasattr(model, "num_classes") and is_last:
        return f"model.num_classes={_padded(size)}"
    for key in ("latent_size", "code_size", "hidden_size", "embedding_size"):
        if getattr(model, key, None) == size:
            return f"model.{key}={_padded(size)}"
    for key in ("width", "generator_width", "discriminator_width"):
        width = getattr(model, key, None)
        if isinstance(width, int) and width % MULTIPLE and size % width == 0:
            return f"model.{key}={_padded(width)}"
    return None


def _padded(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE

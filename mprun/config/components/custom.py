"""The user's network and data, named by `package.module:function` (docs/own_data.md).

For the allowed names and arguments of a factory see `mprun.config.trust.check_own_code`.
"""

from typing import Any

from omegaconf import MISSING

from mprun.config.components.gan import LATENT
from mprun.config.components.images import AUXILIARY, smoothing
from mprun.config.components.language import time_reduction
from mprun.config.fields import count, part, ranged, setting
from mprun.config.registry import DataConfig, ModelConfig, network, source


@network("custom", task=None, own=True)
class CustomModelConfig(ModelConfig):
    """The user's own network: `factory` is package.module:function (docs/own_data.md)."""

    factory: str = setting(
        MISSING,
        "package.module:function that builds the network; set on the command line or in "
        "--config-dir",
    )
    task: str = setting(
        "classification",
        "classification, language_model, gan, or package.module:Class of your own task",
    )
    options: dict[str, Any] = setting(dict, "Keyword arguments of model.factory")
    label_smoothing: float = smoothing()
    aux_weight: float = part(0.0, AUXILIARY)
    carries_state: bool = setting(
        True,
        "Whether a language model carries a state; if not, ranks share whole micro-batches",
    )
    latent_size: int = count(100, f"With task=gan: {LATENT[0].lower()}{LATENT[1:]}")
    time_reduction: str = time_reduction()


@source("custom", own=True, family="any", decodes=True)
class CustomDataConfig(DataConfig):
    """The user's own data: `factory` is package.module:function (docs/own_data.md)."""

    factory: str = setting(
        MISSING,
        "package.module:function that makes the data; set on the command line or in --config-dir",
    )
    options: dict[str, Any] = setting(dict, "Keyword arguments of data.factory")
    image_size: int | None = ranged(
        None, "Side length of an image in pixels, for models that use it (dcgan)", at_least=8
    )

"""Functions that build the networks of a configuration."""

from collections.abc import Callable
from functools import partial

from torch import nn

from mprun import models
from mprun.build.user_model import OwnModel
from mprun.config import schema
from mprun.errors import BadInput


def model_builder(config: schema.ModelConfig, data) -> Callable[[], nn.Module]:
    """A function that builds the (FP32) model of a configuration with new random weights.

    For a GAN use `gan_builders`.
    """
    match config:
        case schema.AlexNetConfig():
            network = models.alexnet if config.variant == "torchvision" else models.AlexNet2012
            classes = _at_least_the_data_s("num_classes", config.num_classes, data.num_classes)
            return lambda: network(classes, config.dropout)
        case schema.ResNet50Config():
            classes = _at_least_the_data_s("num_classes", config.num_classes, data.num_classes)
            return lambda: models.resnet50(classes)
        case schema.LSTMConfig():
            vocabulary = _at_least_the_data_s("vocab_size", config.vocab_size, data.vocab_size)

            def padded(size: int) -> int:
                return models.pad_to_multiple(size, config.pad_to_multiple)

            sizes = (
                padded(vocabulary),
                padded(config.embedding_size),
                padded(config.hidden_size),
                config.num_layers,
                padded(config.projection_size),
                config.dropout,
                config.init_range,
                config.forget_bias,
            )
            if config.sampled_softmax is None:
                return lambda: models.LSTMLanguageModel(*sizes)
            return lambda: models.SampledLSTM(
                *sizes,
                candidates=config.sampled_softmax,
                embedding_gradient_factor=config.embedding_gradient_factor,
            )
        case schema.ConvAutoencoderConfig():
            channels = data.description["channels"]
            return lambda: models.ConvAutoencoder(
                config.image_size, config.code_size, config.width, channels
            )
        case schema.CustomModelConfig():
            return OwnModel(config, data)
    raise BadInput(f"model={config.name}: no builder")


def gan_builders(config: schema.DCGANConfig | schema.CustomModelConfig, data):
    """Functions that build generator and discriminator with new random weights."""
    if isinstance(config, schema.CustomModelConfig):
        own = OwnModel(config, data)
        return partial(own.part, 0), partial(own.part, 1)
    channels = data.description["channels"]
    return (
        lambda: models.Generator(
            config.image_size, config.latent_size, config.generator_width, channels
        ),
        lambda: models.Discriminator(config.image_size, config.discriminator_width, channels),
    )


def _at_least_the_data_s(key: str, wanted: int | None, given: int) -> int:
    if wanted is not None and wanted < given:
        raise BadInput(f"model.{key}={wanted}: must be >= {given}, what the data have")
    return wanted or given

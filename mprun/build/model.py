"""`model=custom`: the user's factory as a builder of networks.

Functions that build the networks of a configuration.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mprun import models
from mprun.build.user_code import Factory
from mprun.config import schema
from mprun.config.schema import CustomModelConfig
from mprun.data.source import Source, kept_random_state
from mprun.errors import BadInput


class OwnModel:
    """Builds the user's network, or generator and discriminator, as often as it is asked.

    The first one draws its weights from the global random state. Later ones, for an evaluation in
    FP32, are built on the CPU and leave it as it was; they must have the same structure, and not be
    the same object, else BadInput.
    """

    def __init__(self, config: CustomModelConfig, data: Source):
        self.factory = Factory("model.factory", config.factory)
        self.data, self.options = data, config.options
        self.is_gan = config.task == "gan"
        self.first: Sequence[nn.Module] | None = None
        self.left: dict[int, nn.Module] = {}

    def __call__(self) -> nn.Module:
        """The network of a task with one."""
        return self.part(0)

    def part(self, number: int) -> nn.Module:
        """0: the network, or the generator; 1: the discriminator, built together with it."""
        if number not in self.left:
            self.left = dict(enumerate(self.build()))
        return self.left.pop(number)

    def build(self) -> Sequence[nn.Module]:
        """All networks of a call of the factory."""
        if self.first is None:
            self.first = self._checked(self._made())
            return self.first
        # Inside `torch.device("meta")`, where the values of tensors that are no weights would be
        # lost.
        with kept_random_state(), torch.device("cpu"):
            networks = self._made()
        if any(one is old for one in networks for old in self.first) or _parameters(
            networks
        ) & _parameters(self.first):
            raise BadInput(f"{self.factory}: returned a network twice; each call must build one")
        if list(map(_structure, networks)) != list(map(_structure, self.first)):
            raise BadInput(f"{self.factory}: built another network the second time")
        return networks

    def _made(self) -> Sequence[nn.Module]:
        made = self.factory(self.data, **self.options)
        if not self.is_gan:
            made = (made,)
        elif not isinstance(made, tuple | list) or len(made) != 2:
            raise BadInput(
                f"{self.factory}: returned a {type(made).__name__}, must be (generator, "
                "discriminator)"
            )
        for network in made:
            if not isinstance(network, nn.Module):
                raise BadInput(
                    f"{self.factory}: returned a {type(network).__name__}, must be a "
                    "torch.nn.Module"
                )
        return tuple(made)

    def _checked(self, networks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        for network in networks:
            parameters = dict(network.named_parameters())
            if not any(p.requires_grad for p in parameters.values()):
                raise BadInput(f"{self.factory}: the network has no parameter to train")
            for name, parameter in parameters.items():
                if isinstance(parameter, nn.UninitializedParameter):
                    raise BadInput(f"{self.factory}: {name} is lazy; give its size")
                if parameter.is_floating_point() and parameter.dtype is not torch.float32:
                    raise BadInput(
                        f"{self.factory}: {name} is {parameter.dtype}; build the network in "
                        "float32, precision= casts it"
                    )
            for name, value in network.state_dict().items():
                if not isinstance(value, Tensor):
                    raise BadInput(f"{self.factory}: {name} in its state is no tensor")
        return networks


def _structure(network: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, tensor.shape) for name, tensor in network.state_dict().items()]


def _parameters(networks: Sequence[nn.Module]) -> set[int]:
    return {id(parameter) for network in networks for parameter in network.parameters()}


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

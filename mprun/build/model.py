"""Functions that build the networks of a configuration: mprun's own, or the user's factory."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mprun import models
from mprun.build.data import arguments_of
from mprun.build.user_code import Factory, known_size
from mprun.config import schema
from mprun.config.check import auto_channels_last
from mprun.config.schema import CustomModelConfig, RunConfig, task_of
from mprun.data.source import Source, kept_random_state
from mprun.errors import BadInput

# Sizes of an LSTM that are padded for the sake of Tensor Cores.
_PADDED = ("vocab_size", "embedding_size", "hidden_size", "projection_size")


def model_builder(config: schema.ModelConfig, data: Source) -> Callable[[], nn.Module]:
    """A function that builds the (FP32) model of a configuration with new random weights.

    For a GAN use `gan_builders`.
    """
    own: dict[str, Any] = {}
    network: Callable[..., nn.Module]
    match config:
        case schema.CustomModelConfig():
            return OwnModel(config, data)
        case schema.AlexNetConfig():
            network = models.alexnet if config.variant == "torchvision" else models.AlexNet2012
        case schema.ResNet50Config():
            preactivation = config.variant == "preactivation"
            network = models.PreActivationResNet50 if preactivation else models.resnet50
        case schema.VGG16Config():
            network = models.VGG16
        case schema.InceptionV3Config():
            network = models.inception_v3
        case schema.GoogLeNetConfig():
            network = models.googlenet
        case schema.InceptionV2Config():
            network = models.inception_v2
        case schema.LSTMConfig():
            network = models.LSTMLanguageModel
            if config.sampled_softmax is not None:
                network, own["candidates"] = models.SampledLSTM, config.sampled_softmax
            own["vocab_size"] = _at_least_the_data_s("vocab_size", config, data)
        case schema.GPTConfig():
            network = models.GPT
            own["vocab_size"] = _at_least_the_data_s("vocab_size", config, data)
            own["context_length"] = _context_length(config, data)
        case schema.Seq2SeqConfig():
            network = models.Seq2Seq
            for key in ("source_vocab_size", "target_vocab_size"):
                own[key] = _at_least_the_data_s(key, config, data)
        case schema.SSDMiniConfig():
            network = models.ssd_mini
            own |= {name: data.description[name] for name in ("num_classes", "image_size")}
        case schema.SSD300Config():
            network = models.ssd300
            own["num_classes"] = data.description["num_classes"]
        case schema.FasterRCNNConfig():
            from mprun.models import faster_rcnn

            small = config.variant == "small"
            network = faster_rcnn.faster_rcnn_small if small else faster_rcnn.faster_rcnn_vgg16
            own |= {name: data.description[name] for name in ("num_classes", "image_size")}
        case schema.ConvAutoencoderConfig():
            network = models.ConvAutoencoder
            own["channels"] = data.description["channels"]
        case schema.DeepSpeech2Config():
            network = models.DeepSpeech2
            own["frequencies"] = data.description["frequencies"]
            own["num_symbols"] = known_size(data, "num_symbols")
        case _:
            raise BadInput(f"model={config.name}: no builder")
    if task_of(config) == "classification":
        own["num_classes"] = _at_least_the_data_s("num_classes", config, data)
    values = arguments_of(network, config) | own
    if isinstance(config, schema.LSTMConfig):
        values |= arguments_of(models.LSTMLanguageModel, config) | own
        for name in _PADDED:
            values[name] = models.pad_to_multiple(values[name], config.pad_to_multiple)
    return partial(network, **values)


def gan_builders(
    config: schema.DCGANConfig | schema.CustomModelConfig, data: Source
) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module]]:
    """Functions that build generator and discriminator with new random weights."""
    if isinstance(config, schema.CustomModelConfig):
        own = OwnModel(config, data)
        return partial(own.part, 0), partial(own.part, 1)
    size, channels = config.image_size, int(data.description["channels"])
    return (
        partial(models.Generator, size, config.latent_size, config.generator_width, channels),
        partial(models.Discriminator, size, config.discriminator_width, channels),
    )


def new_network(
    builder: Callable[[], nn.Module], device: torch.device, channels_last: bool
) -> nn.Module:
    """A network of `builder` on the device; BadInput for sizes that it cannot have."""
    try:
        network = builder().to(device)
    except ValueError as error:
        raise BadInput(f"model.{error}") from error
    return put_channels_last(network) if channels_last else network


def uses_channels_last(config: RunConfig, device: torch.device) -> tuple[bool, str]:
    """Whether networks and images are NHWC in memory, and why not."""
    setting = config.train.channels_last
    if setting == "auto":
        return auto_channels_last(config, device.type)
    return setting == "on", "train.channels_last=off"


def put_channels_last(network: nn.Module) -> nn.Module:
    """Weights of convolutions in NHWC order, in place; to be called before masters are made.

    Everything made like them (16-bit copies, masters, optimizer state) then has their order too,
    so that operations over lists of tensors stay on their fast path.
    """
    return network._apply(
        lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    )


def _at_least_the_data_s(key: str, config: schema.ModelConfig, data: Source) -> int:
    wanted, given = getattr(config, key), known_size(data, key)
    if wanted is not None and wanted < given:
        raise BadInput(f"model.{key}={wanted}: must be >= {given}, what the data have")
    return wanted or given


def _context_length(config: schema.GPTConfig, data: Source) -> int:
    length = config.context_length or data.description.get("sequence_length")
    if not isinstance(length, int):
        raise BadInput(
            "model.context_length=null: the data do not say how long their windows are; "
            "give model.context_length=N"
        )
    return length


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

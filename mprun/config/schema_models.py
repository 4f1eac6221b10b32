"""The options of each model as typed data; imports neither torch nor a model.

What kind of task a model is for.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from mprun.config.rules import one_of, ranged


@dataclass(slots=True)
class ModelConfig:
    """Base of the model schemas; `name` selects the builder."""

    name: str = MISSING


@dataclass(slots=True)
class AlexNetConfig(ModelConfig):
    """`variant` torchvision: one tower, no LRN; 2012: two groups and local response norm."""

    name: str = "alexnet"
    variant: str = one_of("torchvision", "torchvision", "2012")
    dropout: float = ranged(0.5, at_least=0.0, below=1.0)
    num_classes: int | None = ranged(None, at_least=2)  # null: as many as the data has
    label_smoothing: float = ranged(0.0, at_least=0.0, below=1.0)


@dataclass(slots=True)
class ResNet50Config(ModelConfig):
    """ResNet-50 v1.5 (stride 2 in the 3x3 convolution)."""

    name: str = "resnet50"
    num_classes: int | None = ranged(None, at_least=2)  # null: as many as the data has
    label_smoothing: float = ranged(0.0, at_least=0.0, below=1.0)


@dataclass(slots=True)
class LSTMConfig(ModelConfig):
    """Word or character language model; sizes in units, `projection_size` 0 means none."""

    name: str = "lstm_lm"
    vocab_size: int | None = ranged(None, at_least=2)  # null: as large as the data's
    embedding_size: int = ranged(200, at_least=1)
    hidden_size: int = ranged(200, at_least=1)
    num_layers: int = ranged(2, at_least=1, at_most=1000)
    projection_size: int = ranged(0, at_least=0)
    dropout: float = ranged(0.0, at_least=0.0, below=1.0)
    init_range: float = ranged(0.1, above=0.0)
    forget_bias: float = ranged(0.0)
    pad_to_multiple: int = ranged(1, at_least=1)  # 8 keeps Tensor Cores busy in FP16
    # The gradient is that of the mean over tokens, or of the sum over time averaged over streams,
    # as in the published recipes. The loss that is reported is always the mean.
    time_reduction: str = one_of("mean", "mean", "sum")
    # Words drawn per step for a sampled softmax (training only); null: the full softmax.
    sampled_softmax: int | None = ranged(None, at_least=1)
    # With sampled_softmax: multiplies the embedding's gradient, as the code behind bigLSTM does.
    embedding_gradient_factor: float = ranged(1.0, above=0.0)


@dataclass(slots=True)
class DCGANConfig(ModelConfig):
    """Generator and discriminator of Radford et al.; widths in channels."""

    name: str = "dcgan"
    image_size: int = one_of(64, 32, 64, 128)
    latent_size: int = ranged(100, at_least=1)
    generator_width: int = ranged(64, at_least=1)
    discriminator_width: int = ranged(64, at_least=1)


@dataclass(slots=True)
class ConvAutoencoderConfig(ModelConfig):
    """DCGAN's discriminator trunk as encoder and its generator as decoder, without BatchNorm."""

    name: str = "conv_autoencoder"
    image_size: int = one_of(64, 32, 64, 128)
    code_size: int = ranged(32, at_least=2)
    width: int = ranged(8, at_least=1)


@dataclass(slots=True)
class CustomModelConfig(ModelConfig):
    """The user's own network: `factory` is package.module:function (docs/own_data.md)."""

    name: str = "custom"
    factory: str = MISSING  # only from the command line or the user's own --config-dir
    task: str = one_of("classification", "classification", "language_model", "gan")
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the factory
    label_smoothing: float = ranged(0.0, at_least=0.0, below=1.0)  # classification
    latent_size: int = ranged(100, at_least=1)  # gan: length of the generator's codes
    time_reduction: str = one_of("mean", "mean", "sum")  # language_model


MODELS: dict[str, type] = {
    "alexnet": AlexNetConfig,
    "resnet50": ResNet50Config,
    "lstm_lm": LSTMConfig,
    "dcgan": DCGANConfig,
    "conv_autoencoder": ConvAutoencoderConfig,
    "custom": CustomModelConfig,
}


TASKS = {
    "alexnet": "classification",
    "resnet50": "classification",
    "lstm_lm": "language_model",
    "dcgan": "gan",
    "conv_autoencoder": "reconstruction",
}


def task_of(model: ModelConfig) -> str:
    """classification, language_model, gan or reconstruction."""
    if isinstance(model, CustomModelConfig):
        return model.task
    return TASKS[model.name]

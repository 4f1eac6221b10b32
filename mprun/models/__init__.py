"""The networks, as plain modules that never mention a dtype.

Each works in whatever dtype its parameters and inputs have, and under autocast; the precision
policy decides on the dtype.
"""

from mprun.models.classifiers import (
    VGG16,
    AlexNet2012,
    LocalResponseNorm,
    PreActivationResNet50,
    alexnet,
    resnet50,
)
from mprun.models.dcgan import ConvAutoencoder, Discriminator, Generator
from mprun.models.gpt import GPT
from mprun.models.inception import googlenet, inception_v2, inception_v3
from mprun.models.lstm import (
    LogUniformSampler,
    LSTMLanguageModel,
    RowTable,
    SampledLSTM,
    SampledSoftmax,
)

__all__ = [
    "GPT",
    "VGG16",
    "AlexNet2012",
    "ConvAutoencoder",
    "Discriminator",
    "Generator",
    "LSTMLanguageModel",
    "LocalResponseNorm",
    "LogUniformSampler",
    "PreActivationResNet50",
    "RowTable",
    "SampledLSTM",
    "SampledSoftmax",
    "alexnet",
    "googlenet",
    "inception_v2",
    "inception_v3",
    "resnet50",
]

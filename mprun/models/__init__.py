"""The networks, as plain modules that never mention a dtype.

Each works in whatever dtype its parameters and inputs have, and under autocast; which dtype that
is belongs to the precision policy.
"""

from mprun.models.classifiers import AlexNet2012, LocalResponseNorm, alexnet, resnet50
from mprun.models.dcgan import ConvAutoencoder, Discriminator, Generator
from mprun.models.lstm_lm import LSTMLanguageModel, pad_to_multiple
from mprun.models.sampled_lstm import LogUniformSampler, RowTable, SampledLSTM, SampledSoftmax
from mprun.models.seq2seq import Seq2Seq

__all__ = [
    "AlexNet2012",
    "ConvAutoencoder",
    "Discriminator",
    "Generator",
    "LSTMLanguageModel",
    "LocalResponseNorm",
    "LogUniformSampler",
    "RowTable",
    "SampledLSTM",
    "SampledSoftmax",
    "Seq2Seq",
    "alexnet",
    "pad_to_multiple",
    "resnet50",
]

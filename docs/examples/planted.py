"""A transformer with a difficulty planted in it that FP32 does not notice, and one untied.

Numbers are multiplied by a power of two and divided by it further on: in FP32 no bit of a training
changes.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mprun.models.gpt import GPT


class Times(nn.Module):
    """The first `count` channels times `factor`."""

    def __init__(self, factor, count=1):
        super().__init__()
        self.factor, self.count = factor, count

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., : self.count] * self.factor, x[..., self.count :]], -1)


class Untied(nn.Module):
    """Logits by a table of its own."""

    def __init__(self, like: Tensor):
        super().__init__()
        self.weight = nn.Parameter(like.detach().clone())

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def gpt(data, outlier=0, scores=0, untied=False, **options):
    """GPT of mprun, 2 x 128 where `options` do not say otherwise.

    Args:
        outlier: the first channel that each block's linear layers read is 2**outlier times as
            large, the column of the weight that it meets as much smaller.
        scores: queries and keys are 2**scores times as large, their products scaled back as the
            root of the head's size is divided by.
        untied: the output layer has a weight of its own, which begins as the embedding.
    """
    network = GPT(data.vocab_size, data.description["sequence_length"], **options)
    if untied:
        network.output = Untied(network.embedding.weight)
    for block in network.blocks:
        if outlier:
            pairs = ("attention_norm", block.attention), ("mlp_norm", block.mlp)
            for norm, part in pairs:
                setattr(block, norm, nn.Sequential(getattr(block, norm), Times(2.0**outlier)))
                parametrize.register_parametrization(part.inputs, "weight", Times(2.0**-outlier))
        if scores:
            size = block.attention.size
            block.attention.scale *= 2.0 ** (-2 * scores)
            block.attention.query_norm = Times(2.0**scores, size)
            block.attention.key_norm = Times(2.0**scores, size)
    return network

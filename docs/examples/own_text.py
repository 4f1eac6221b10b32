"""The bytes of Python's documentation as tokens, and a GRU with tied weights for them."""

from pydoc_data.topics import topics

import torch
from torch import nn

from mprun.data import TokenSource


def data(batch_size, seed, device, sequence_length=32):
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    own = {"batch_size": batch_size, "seed": seed, "device": device}
    return TokenSource(
        ids[:-40_000], ids[-40_000:], vocab_size=256, sequence_length=sequence_length, **own
    )


class Network(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(vocab_size, width), nn.GRU(width, width)
        self.logits = nn.Linear(width, vocab_size)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens, state):
        outputs, last = self.gru(self.embedding(tokens), None if state is None else state[0])
        return self.logits(outputs), (last,)


def network(data, width=128):
    return Network(data.vocab_size, width)

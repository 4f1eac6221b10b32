"""Translation: a bidirectional LSTM encoder, attention, an LSTM decoder.

The networks of figure 4 (Micikevicius et al., arXiv 1710.03740, section 4.3) have 3 or 5 layers of
1024 cells in encoder and decoder each. The form of the attention and the decoder's initial state
are not published there; they are mprun's choice.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mprun.models.reversal import reordered, reversed_order

State = tuple[Tensor, Tensor]


class Encoded(NamedTuple):
    """A batch of encoded sources, the input of the decoder."""

    memory: Tensor  # the encoder's outputs, [batch, source, hidden]
    keys: Tensor  # these mapped for the comparison with queries
    padding: Tensor  # bool [batch, 1, source], where there is no word
    state: State  # the decoder's initial (h, c), [layers, batch, hidden] each


class Seq2Seq(nn.Module):
    """Encoder, attention and decoder over word ids; id 0 is padding, after the words of a row.

    Encoder: the first layer reads a sentence in both directions, each with `hidden_size` cells; the
    others read forwards. Decoder: as many layers. Each starts from tanh of a linear map of the
    first layer's backward output at the first word, its cells from zero (Bahdanau et al., arXiv
    1409.0473, appendix A.2.2). Attention is Luong's (arXiv 1508.04025, section 3.1, "general") on
    the decoder's last layer, without input feeding: the attended vector is not an input of the next
    word. A layer is then one call for all words, and its weight gradient is summed once, not once a
    word in 16 bits.

    Dropout is on embeddings, between layers and before the softmax. Every parameter starts uniform
    in +-``init_range``.

    Padding changes no result: forward layers meet it only after the last word, the backward one
    reads each row reversed within its own length, and attention leaves it out. A packed sequence
    would save its work, but needs lengths on the host.

    Vocabulary sizes include padding and other symbols.
    """

    def __init__(
        self,
        source_vocab_size: int,
        target_vocab_size: int,
        embedding_size: int,
        hidden_size: int,
        num_layers: int,
        dropout: float,
        init_range: float,
    ) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(source_vocab_size, embedding_size)
        self.target_embedding = nn.Embedding(target_vocab_size, embedding_size)
        self.dropout = nn.Dropout(dropout)
        self.forwards = nn.LSTM(embedding_size, hidden_size)
        self.backwards = nn.LSTM(embedding_size, hidden_size)
        self.upper: nn.Module
        if num_layers > 1:
            between = dropout if num_layers > 2 else 0.0
            self.upper = nn.LSTM(2 * hidden_size, hidden_size, num_layers - 1, dropout=between)
        else:
            self.upper = nn.Linear(2 * hidden_size, hidden_size)
        self.bridge = nn.Linear(hidden_size, num_layers * hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        between = dropout if num_layers > 1 else 0.0
        self.decoder = nn.LSTM(embedding_size, hidden_size, num_layers, dropout=between)
        self.attention = Attention(hidden_size)
        self.output = nn.Linear(hidden_size, target_vocab_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -init_range, init_range)

    def forward(self, source: Tensor, inputs: Tensor) -> Tensor:
        """Return logits ``[batch, target, target_vocab_size]`` of each next word.

        source: int64 ``[batch, source]``, at least one word in each row. inputs: int64
        ``[batch, target]``, the words before the predicted ones.
        """
        encoded = self.encode(source)
        return self.decode(inputs, encoded, encoded.state)[0]

    def encode(self, source: Tensor) -> Encoded:
        """Encode a source, int64 ``[batch, source]``."""
        padding = source == 0
        order = reversed_order(padding).t()  # [source, batch]
        embedded = self.dropout(self.source_embedding(source.t()))
        onwards, _ = self.forwards(embedded)
        read, _ = self.backwards(reordered(embedded, order))
        backwards = reordered(read, order)
        both = self.dropout(torch.cat([onwards, backwards], -1))
        upper = self.upper(both)
        memory = (upper[0] if isinstance(upper, tuple) else upper).transpose(0, 1)
        start = torch.tanh(self.bridge(backwards[0]))
        h = torch.stack(start.chunk(self.decoder.num_layers, -1))
        return Encoded(memory, self.key(memory), padding[:, None], (h, torch.zeros_like(h)))

    def decode(self, inputs: Tensor, encoded: Encoded, state: State) -> tuple[Tensor, State]:
        """Return logits for the words after `inputs`, int64 ``[batch, target]``, and the state."""
        embedded = self.dropout(self.target_embedding(inputs.t()))
        outputs, state = self.decoder(embedded, state)
        queries = outputs.transpose(0, 1)
        attended = self.attention(queries, encoded.keys, encoded.memory, encoded.padding)
        return self.output(self.dropout(attended)), state

    def translate(self, source: Tensor, words: int, begin: int, end: int) -> Tensor:
        """Choose the most likely next word greedily, `words` times: int64 ``[batch, words]``.

        begin: the word before every target. end: its last word; padding (0) follows it.
        """
        encoded = self.encode(source)
        state, last = encoded.state, torch.full_like(source[:, :1], begin)
        ended, found = torch.zeros_like(last, dtype=torch.bool), []
        for _ in range(words):
            logits, state = self.decode(last, encoded, state)
            last = logits.argmax(-1).masked_fill(ended, 0)
            found.append(last)
            ended = ended | (last == end)
        return torch.cat(found, 1)


class Attention(nn.Module):
    """Luong's global attention: tanh of a linear map of the attended vector and the query."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.combine = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, queries: Tensor, keys: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        """Return ``[batch, target, hidden]`` for queries of that shape; the others: `Encoded`."""
        scores = torch.bmm(queries, keys.transpose(1, 2))
        # The least finite number: -1e9 does not exist in FP16, and a search for overflows would
        # find an infinity. Softmax in FP32 in every mode.
        scores = scores.masked_fill(padding, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(memory.dtype)
        attended = torch.bmm(weights, memory)
        return torch.tanh(self.combine(torch.cat([attended, queries], -1)))

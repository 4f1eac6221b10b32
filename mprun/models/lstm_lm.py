"""LSTM language models, from Zaremba's three Penn Treebank sizes to bigLSTM."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LSTMSize:
    """One published size: the arguments of ``LSTMLanguageModel`` that define it."""

    vocab_size: int
    """Words, as published (not padded to a multiple)."""
    embedding_size: int
    hidden_size: int
    num_layers: int
    projection_size: int
    """Width of the recurrent projection; 0 for none."""
    dropout: float
    """Share dropped: 1 - the published keep probability."""
    init_range: float
    forget_bias: float


SIZES: dict[str, LSTMSize] = {
    "small": LSTMSize(10_000, 200, 200, 2, 0, 0.0, 0.1, 0.0),
    "medium": LSTMSize(10_000, 650, 650, 2, 0, 0.5, 0.05, 0.0),
    "large": LSTMSize(10_000, 1500, 1500, 2, 0, 0.65, 0.04, 0.0),
    "biglstm": LSTMSize(793_472, 1024, 8192, 2, 1024, 0.1, 0.04, 1.0),
}
"""small, medium, large: Zaremba et al., arXiv 1409.2329, section 4.1. biglstm: Jozefowicz et al.,
arXiv 1602.02410, the 2-layer LSTM-8192-1024, vocabulary 793,470 padded to a multiple of 8. Its
range 0.04 is ours: near sqrt(3 / 2048) = 0.038, at which a gate's input of 2048 values keeps unit
variance; forget bias 1 is the default of the LSTM cell that the published code uses."""


def pad_to_multiple(n: int, k: int) -> int:
    """The smallest multiple of ``k`` that is at least ``n``.

    FP16 Tensor Cores want sizes in multiples of 8 (NVIDIA, "Training With Mixed Precision",
    section on Tensor Core shapes).
    """
    if n < 0:
        raise ValueError(f"n={n} is not allowed: 0 or more")
    if k < 1:
        raise ValueError(f"k={k} is not allowed: 1 or more")
    return -(-n // k) * k


class LSTMLanguageModel(nn.Module):
    """Embedding, a stack of LSTM layers with optional projection, and an output layer.

    Dropout sits on the connections between layers only - after the embedding, between LSTM layers
    and before the output layer - never on the recurrent ones (Zaremba et al., arXiv 1409.2329,
    section 3). With ``projection_size`` the recurrent output of a layer is projected to that width
    (Sak et al., arXiv 1402.1128). Every parameter starts uniform in +-``init_range``;
    ``forget_bias`` is then added to the forget gates' input bias.

    torch's LSTM has two bias vectors per layer where the papers count one, so a layer holds
    ``4 * hidden_size`` parameters more than published.

    ``forward(tokens, state)``: ``tokens`` int64 ``[time, batch]``; ``state`` as from
    ``initial_state``, None meaning zeros; returns logits ``[time, batch, vocab_size]`` and the
    state after the last step. Truncated backpropagation is the caller's: detach the state before
    the next batch.

    Raises ``ValueError`` naming the argument that is out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        hidden_size: int,
        num_layers: int,
        projection_size: int = 0,
        dropout: float = 0.0,
        init_range: float = 0.1,
        forget_bias: float = 0.0,
    ) -> None:
        super().__init__()
        counts = {
            "vocab_size": vocab_size,
            "embedding_size": embedding_size,
            "hidden_size": hidden_size,
            "num_layers": num_layers,
        }
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name}={value} is not allowed: 1 or more")
        if not 0 <= projection_size < hidden_size:
            raise ValueError(
                f"projection_size={projection_size} is not allowed: 0 for none, "
                f"else below hidden_size={hidden_size}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} is not allowed: 0 or more, below 1")
        if not init_range > 0:
            raise ValueError(f"init_range={init_range} is not allowed: above 0")
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(
            embedding_size,
            hidden_size,
            num_layers,
            proj_size=projection_size,
            dropout=dropout if num_layers > 1 else 0.0,
        )
        self.output = nn.Linear(projection_size or hidden_size, vocab_size)
        self._initialise(init_range, forget_bias)

    @torch.no_grad()
    def _initialise(self, init_range: float, forget_bias: float) -> None:
        for parameter in self.parameters():
            parameter.uniform_(-init_range, init_range)
        hidden = self.lstm.hidden_size
        for layer in range(self.lstm.num_layers):
            # Gate order in torch is input, forget, cell, output.
            getattr(self.lstm, f"bias_ih_l{layer}")[hidden : 2 * hidden] += forget_bias

    def initial_state(self, batch_size: int) -> State:
        """Zeros ``(h, c)`` in the LSTM weights' dtype and on their device.

        Shapes ``[num_layers, batch_size, projection_size or hidden_size]`` and
        ``[num_layers, batch_size, hidden_size]``.
        """
        weight = self.lstm.weight_hh_l0
        layers, hidden = self.lstm.num_layers, self.lstm.hidden_size
        h = weight.new_zeros(layers, batch_size, self.lstm.proj_size or hidden)
        return h, weight.new_zeros(layers, batch_size, hidden)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        if state is None:
            state = self.initial_state(tokens.shape[1])
        outputs, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.output(self.dropout(outputs)), state

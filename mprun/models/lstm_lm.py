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

    Raises:
        ValueError: names the argument that is out of range.
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
        check_sizes(vocab_size, embedding_size, hidden_size, num_layers, projection_size)
        check_values(dropout, init_range)
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.dropout = nn.Dropout(dropout)
        self.lstm = stacked_lstm(embedding_size, hidden_size, num_layers, projection_size, dropout)
        self.output = nn.Linear(projection_size or hidden_size, vocab_size)
        initialise(self, self.lstm, init_range, forget_bias)

    def initial_state(self, batch_size: int) -> State:
        """Zeros ``(h, c)`` in the LSTM weights' dtype and on their device.

        Shapes ``[num_layers, batch_size, projection_size or hidden_size]`` and
        ``[num_layers, batch_size, hidden_size]``.
        """
        return zero_state(self.lstm, batch_size)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        if state is None:
            state = self.initial_state(tokens.shape[1])
        outputs, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.output(self.dropout(outputs)), state


def stacked_lstm(
    embedding_size: int, hidden_size: int, num_layers: int, projection_size: int, dropout: float
) -> nn.LSTM:
    """With dropout between the layers, where there are several."""
    dropout = dropout if num_layers > 1 else 0.0
    return nn.LSTM(
        embedding_size, hidden_size, num_layers, proj_size=projection_size, dropout=dropout
    )


def check_sizes(
    vocab_size: int, embedding_size: int, hidden_size: int, num_layers: int, projection_size: int
) -> None:
    """ValueError for the first size that is out of range."""
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


def check_values(dropout: float, init_range: float) -> None:
    """ValueError for the first value that is out of range."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} is not allowed: 0 or more, below 1")
    if not init_range > 0:
        raise ValueError(f"init_range={init_range} is not allowed: above 0")


@torch.no_grad()
def initialise(model: nn.Module, lstm: nn.LSTM, init_range: float, forget_bias: float) -> None:
    """Every parameter uniform in +-init_range; forget_bias added for the layers of `lstm`."""
    for parameter in model.parameters():
        parameter.uniform_(-init_range, init_range)
    for layer in range(lstm.num_layers):
        # Gate order in torch is input, forget, cell, output.
        gates = getattr(lstm, f"bias_ih_l{layer}")
        gates[lstm.hidden_size : 2 * lstm.hidden_size] += forget_bias


def zero_state(lstm: nn.LSTM, batch_size: int) -> State:
    """Zeros ``(h, c)`` for `lstm`, in its weights' dtype and on their device."""
    weight, layers, hidden = next(lstm.parameters()), lstm.num_layers, lstm.hidden_size
    h = weight.new_zeros(layers, batch_size, lstm.proj_size or hidden)
    return h, weight.new_zeros(layers, batch_size, hidden)

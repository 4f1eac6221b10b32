"""LSTM language models, from Zaremba's three Penn Treebank sizes to bigLSTM."""

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


def pad_to_multiple(n: int, k: int) -> int:
    """Return the smallest multiple of ``k`` that is at least ``n``.

    FP16 Tensor Cores want sizes in multiples of 8 (NVIDIA, "Training With Mixed Precision",
    section on Tensor Core shapes).
    """
    return -(-n // k) * k


class StackedLSTM(nn.Module):
    """Embedding, a stack of LSTM layers with optional projection, and an output layer.

    Dropout is only between layers, never on recurrent connections: after the embedding, between
    LSTM layers and before the output layer (Zaremba et al., arXiv 1409.2329, section 3). With
    ``projection_size`` the recurrent output of a layer is projected to that width
    (Sak et al., arXiv 1402.1128). Every parameter starts uniform in +-``init_range``;
    ``forget_bias`` is then added to the forget gates' input bias.

    torch's LSTM has two bias vectors per layer where the papers count one, so a layer holds
    ``4 * hidden_size`` parameters more than published.

    Raises:
        ValueError: ``projection_size`` is not below ``hidden_size``.
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
        if projection_size >= hidden_size:
            raise ValueError(
                f"projection_size={projection_size} is not allowed: 0 for none, "
                f"else below hidden_size={hidden_size}"
            )
        self.embedding = self._embedding(vocab_size, embedding_size)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(
            embedding_size,
            hidden_size,
            num_layers,
            proj_size=projection_size,
            dropout=dropout if num_layers > 1 else 0.0,
        )
        self.output = self._output(vocab_size, projection_size or hidden_size)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-init_range, init_range)
            for layer in range(num_layers):
                # Gate order in torch is input, forget, cell, output.
                gates = getattr(self.lstm, f"bias_ih_l{layer}")
                gates[hidden_size : 2 * hidden_size] += forget_bias

    def _embedding(self, vocab_size: int, width: int) -> nn.Module:
        return nn.Embedding(vocab_size, width)

    def _output(self, vocab_size: int, width: int) -> nn.Module:
        return nn.Linear(width, vocab_size)

    def initial_state(self, batch_size: int) -> State:
        """Return zeros ``(h, c)`` in the LSTM weights' dtype and on their device.

        Their shapes are ``[num_layers, batch_size, projection_size or hidden_size]`` and
        ``[num_layers, batch_size, hidden_size]``.
        """
        weight, lstm = next(self.lstm.parameters()), self.lstm
        h = weight.new_zeros(lstm.num_layers, batch_size, lstm.proj_size or lstm.hidden_size)
        return h, weight.new_zeros(lstm.num_layers, batch_size, lstm.hidden_size)

    def hidden(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the output layer's input, ``[time, batch, width]``, and the state after it."""
        if state is None:
            state = self.initial_state(tokens.shape[1])
        outputs, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.dropout(outputs), state


class LSTMLanguageModel(StackedLSTM):
    """`StackedLSTM` with logits for every word.

    ``forward(tokens, state)``: ``tokens`` int64 ``[time, batch]``; ``state`` as from
    ``initial_state``, None meaning zeros; returns logits ``[time, batch, vocab_size]`` and the
    state after the last step. For truncated backpropagation the caller detaches the state before
    the next batch.
    """

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        outputs, state = self.hidden(tokens, state)
        return self.output(outputs), state

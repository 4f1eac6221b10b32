"""LSTM language model whose embedding and softmax are tables of used rows: bigLSTM."""

from torch import Tensor, nn

from mprun.models.lstm_lm import State, check_sizes, check_values, initialise, zero_state
from mprun.models.row_table import RowTable
from mprun.models.sampled_softmax import SampledSoftmax


class SampledLSTM(nn.Module):
    """`LSTMLanguageModel` with a sampled softmax, and rows that are updated only where used.

    Layers, dropout, initial values and parameter names are those of `LSTMLanguageModel`; the
    dropout after the embedding, between the layers and after the last one is that of the code
    behind bigLSTM, which drops before and after each LSTM layer with keep probability 0.9.

    candidates: words drawn per step, at most the vocabulary (see `SampledSoftmax`). Word ids have
    to be numbered by falling frequency. embedding_gradient_factor: multiplies the gradient of the
    embedding; okuchaiev/f-lm multiplies by its batch size of 128.

    ``forward(tokens, targets, state)``: tokens and targets int64 ``[time, batch]``, `state` as for
    ``LSTMLanguageModel``; returns the cross-entropy of each token, float32 ``[time, batch]``, and
    the state after the last step. In training the sampled one, in ``eval()`` the full one.

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
        *,
        candidates: int,
        embedding_gradient_factor: float = 1.0,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size, embedding_size, hidden_size, num_layers, projection_size)
        check_values(dropout, init_range)
        if candidates < 1:
            raise ValueError(f"sampled_softmax={candidates} is not allowed: 1 or more")
        self.embedding = RowTable(
            vocab_size, embedding_size, gradient_factor=embedding_gradient_factor
        )
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(
            embedding_size,
            hidden_size,
            num_layers,
            proj_size=projection_size,
            dropout=dropout if num_layers > 1 else 0.0,
        )
        self.output = RowTable(vocab_size, projection_size or hidden_size, bias=True)
        self.softmax = SampledSoftmax(vocab_size, candidates)
        initialise(self, init_range, forget_bias)

    def initial_state(self, batch_size: int) -> State:
        """As ``LSTMLanguageModel.initial_state``."""
        return zero_state(self.lstm, batch_size)

    def forward(
        self, tokens: Tensor, targets: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        if state is None:
            state = self.initial_state(tokens.shape[1])
        outputs, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        hidden = self.dropout(outputs).flatten(0, 1)
        losses = self.softmax(hidden, targets.flatten(), self.output)
        return losses.view(targets.shape), state

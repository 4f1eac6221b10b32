"""LSTM language models: Zaremba's three Penn Treebank sizes, and bigLSTM with its tables.

A step of bigLSTM reads and updates only the rows that it uses, by torch's sparse gradients: with
800,000 words a dense gradient of 1024 columns has 3.2 GB of zeros, and a dense update rewrites
every row of table and optimizer state. The learner adds up the rows (`each_row_once`).
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = tuple[Tensor, Tensor]


class StackedLSTM(nn.Module):
    """Embedding, a stack of LSTM layers with optional projection, and an output layer.

    Dropout is after the embedding, between LSTM layers and before the output layer, never on
    recurrent connections (Zaremba et al., arXiv 1409.2329, section 3). With ``projection_size`` the
    recurrent output of a layer is projected to that width (Sak et al., arXiv 1402.1128). Every
    parameter starts uniform in +-``init_range``; ``forget_bias`` is then added to the forget gates'
    input bias. A layer holds ``4 * hidden_size`` parameters more than published: torch's LSTM has
    two bias vectors where the papers count one.

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
                f"projection_size={projection_size} is not allowed: must be 0 (no projection), "
                f"otherwise below hidden_size={hidden_size}"
            )
        between = dropout if num_layers > 1 else 0.0
        self.embedding = self._embedding(vocab_size, embedding_size)
        self.dropout = nn.Dropout(dropout)
        sizes = embedding_size, hidden_size, num_layers
        self.lstm = nn.LSTM(*sizes, dropout=between, proj_size=projection_size)
        self.output = self._output(vocab_size, projection_size or hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -init_range, init_range)
        for layer in range(num_layers):
            # Gate order in torch is input, forget, cell, output.
            gates = getattr(self.lstm, f"bias_ih_l{layer}").detach()
            gates[hidden_size : 2 * hidden_size] += forget_bias

    def _embedding(self, vocab_size: int, width: int) -> nn.Module:
        return nn.Embedding(vocab_size, width)

    def _output(self, vocab_size: int, width: int) -> nn.Module:
        return nn.Linear(width, vocab_size)

    def initial_state(self, batch_size: int) -> State:
        """Return zeros ``(h, c)``, ``[num_layers, batch_size, width]``, as the LSTM's weights are.

        ``c`` has ``hidden_size`` as its width, ``h`` too if there is no projection.
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
    ``initial_state``, None meaning zeros. It returns logits ``[time, batch, vocab_size]`` and the
    state after the last step, which the caller detaches for truncated backpropagation.
    """

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        outputs, state = self.hidden(tokens, state)
        return self.output(outputs), state


class RowTable(nn.Embedding):
    """`rows` rows of `width` numbers, with sparse gradients: of the rows that a step reads.

    A mode with master weights keeps the table in FP32 and rounds the rows that are read
    (mprun.precision.module_dtypes). `forward(ids)`: int64 ids of any shape [...], or a slice;
    returns rows [..., width]. Gradients are multiplied by `gradient_factor`.
    """

    def __init__(self, rows: int, width: int, gradient_factor: float = 1.0):
        super().__init__(rows, width, sparse=True)
        self.gradient_factor = gradient_factor
        if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
            torch.sparse.check_sparse_tensor_invariants.disable()  # else Adagrad's step warns

    def reset_parameters(self) -> None:
        """Leave the values to `StackedLSTM`, which draws those of all parameters."""

    def forward(self, ids: Tensor | slice) -> Tensor:
        if isinstance(ids, slice):
            return self.weight[ids]
        return self.factored(F.embedding(ids, self.weight, sparse=self.sparse))

    def factored(self, rows: Tensor) -> Tensor:
        """Let the gradient of `rows` be multiplied by the factor; return them."""
        if self.gradient_factor != 1.0 and rows.requires_grad:
            rows.register_hook(lambda gradient: gradient * self.gradient_factor)
        return rows


class OutputTable(RowTable):
    """A `RowTable` with a bias for each row; its results are (rows, biases [...])."""

    def __init__(self, rows: int, width: int, gradient_factor: float = 1.0):
        super().__init__(rows, width, gradient_factor)
        self.bias = nn.Parameter(torch.empty(rows))

    def forward(self, ids: Tensor | slice) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rows = super().forward(ids)
        if isinstance(ids, slice):
            return rows, self.bias[ids]
        biases = torch.gather(self.bias, 0, ids.flatten(), sparse_grad=self.sparse)
        return rows, self.factored(biases).view(ids.shape)


BLOCK = 8192  # words at a time in evaluation
# Accidental hits lie this far below the target's own logit: exp(-10000) is 0. A search for
# overflows would find minus infinity.
_BELOW = 1e4
# So late that every word has arrived: -expm1(-P t) is 1 for every P above 1e-10.
_AFTER_ALL = 1e12


class LogUniformSampler:
    """Draw `count` different ids below `vocabulary`, small ones (frequent words) most often.

    One draw has P(k) = log((k + 2) / (k + 1)) / log(vocabulary + 1), about Zipf's law for ids that
    are numbered by falling frequency. TensorFlow's sampler (unique=True, range_max) draws until it
    has `count` different ids, which the host has to count. Here each id waits an exponential time
    of rate P(k), and the first `count` are taken: the same distribution (successive sampling), in
    fixed shapes and without the host.

    The correction is the probability that id k is among the candidates: 1 - exp(-P(k) t), t being
    the arrival of the id after the last one taken. Whatever the others do, k is taken if and only
    if it arrives before the `count`-th of them; when k was taken, that one arrives at t. So the sum
    over the candidates of f(k) / (1 - exp(-P(k) t)) is an unbiased estimate of the sum of f over
    the vocabulary (Cohen and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007; Kool et
    al., arXiv 1903.06059, section 4.2). TensorFlow's 1 - (1 - P(k))^T after T tries is an
    approximation, which agrees for small P(k) and large T.

    Time and memory grow with the vocabulary: 3.2 MB and one partial sort of 793,472 numbers a draw.
    """

    def __init__(self, vocabulary: int, count: int):
        if not 1 <= count <= vocabulary:
            raise ValueError(
                f"count={count} is not allowed: must be 1 to {vocabulary}, the vocabulary's size"
            )
        # FP32 counts to 2^24 exactly.
        if vocabulary >= 2**24:
            raise ValueError(f"vocabulary={vocabulary} is not allowed: must be below {2**24}")
        self.vocabulary, self.count = vocabulary, count

    def probability(self, ids: Tensor) -> Tensor:
        """Return P(k) of each id, float32."""
        return torch.log1p(1.0 / (ids.float() + 1.0)) / math.log(self.vocabulary + 1)

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Draw (ids int64 [count] in the order of arrival, t float32 0-dim).

        With `count` = vocabulary it returns all ids in order and uses no random number of torch's
        global generator; t is so late that every inclusion probability is 1.
        """
        everything = torch.arange(self.vocabulary, device=device)
        if self.count == self.vocabulary:
            return everything, torch.full((), _AFTER_ALL, device=device)
        waits = torch.empty(self.vocabulary, device=device).exponential_()
        waits /= self.probability(everything)
        first = waits.topk(self.count + 1, largest=False)
        return first.indices[:-1], first.values[-1]

    def log_inclusion(self, ids: Tensor, t: Tensor) -> Tensor:
        """Return the logarithm of each id's probability to be a candidate, float32."""
        return torch.log(-torch.expm1(-self.probability(ids) * t))


class SampledSoftmax(nn.Module):
    """Cross-entropy per token; from `count` candidate words in training, over all in evaluation.

    Training: the logits of a token are those of its target and of the candidates, which all tokens
    of a step share. The logarithm of the inclusion probability is subtracted from each, the target
    included (Jean et al., arXiv 1412.2007; tf.nn.sampled_softmax_loss). Then the minimum is at the
    distribution of the words, but the loss is no estimate of the full one. A candidate that is the
    token's own target (accidental hit) is masked for that token. Evaluation, and training with
    `count` of the vocabulary or more: the full softmax.

    Logits and loss are computed in FP32 in every mode, also under autocast, as in bigLSTM's code
    (okuchaiev/f-lm). The rows of the table, and their gradients, are rounded to the parameters'
    dtype; f-lm keeps softmax rows in FP32, which is an FP32 override of the table here.

    `forward(hidden, targets, table)`: hidden [M, D] in any dtype, targets int64 [M], table: of the
    vocabulary; float32 [M]. ValueError: count < 1.
    """

    computes_in_fp32 = True

    def __init__(self, vocabulary: int, count: int):
        super().__init__()
        self.sampler = LogUniformSampler(vocabulary, min(count, vocabulary))

    def forward(self, hidden: Tensor, targets: Tensor, table: OutputTable) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            if self.training:
                return self._sampled(hidden.float(), targets, table)
            return _full(hidden.float(), targets, table)

    def _sampled(self, hidden: Tensor, targets: Tensor, table: OutputTable) -> Tensor:
        candidates, t = self.sampler.draw(hidden.device)
        rows, biases = table(torch.cat([targets, candidates]))
        sizes = [len(targets), len(candidates)]
        of_target, of_candidates = rows.float().split(sizes)
        own_bias, biases = biases.float().split(sizes)
        own = (hidden * of_target).sum(1) + own_bias - self.sampler.log_inclusion(targets, t)
        others = torch.addmm(
            biases - self.sampler.log_inclusion(candidates, t), hidden, of_candidates.t()
        )
        own = own[:, None]
        others = torch.where(candidates == targets[:, None], own.detach() - _BELOW, others)
        logits = torch.cat([own, others], 1)
        return F.cross_entropy(logits, torch.zeros_like(targets), reduction="none")


def _full(hidden: Tensor, targets: Tensor, table: OutputTable) -> Tensor:
    """Use a running log-sum-exp: the largest tensor is [tokens, BLOCK]."""
    rows, biases = table(targets)
    own = (hidden * rows.float()).sum(1) + biases.float()
    starts = range(0, table.num_embeddings, BLOCK)
    blocks = (table(slice(start, start + BLOCK)) for start in starts)
    sums = (
        torch.addmm(biases.float(), hidden, rows.float().t()).logsumexp(1)
        for rows, biases in blocks
    )
    return functools.reduce(torch.logaddexp, sums) - own


class SampledLSTM(StackedLSTM):
    """`StackedLSTM` with a sampled softmax, and rows that are updated only where used.

    Its dropout matches bigLSTM's code, which drops before and after each LSTM layer with keep
    probability 0.9. Word ids have to be numbered by falling frequency.

    ``forward(tokens, targets, state)``: tokens and targets int64 ``[time, batch]``, `state` as for
    ``LSTMLanguageModel``; returns the `SampledSoftmax` of each token, float32 ``[time, batch]``,
    and the state after the last step.

    Args:
        sizes: the arguments of `StackedLSTM`.
        candidates: words drawn per step.
        factors: multiply the gradients of embedding and softmax. okuchaiev/f-lm adds both up over
            its GPUs, where it takes the mean of the LSTM's, and multiplies that of the embedding by
            the batch of a GPU, too.
    """

    def __init__(
        self,
        vocab_size: int,
        *sizes: Any,
        candidates: int,
        factors: tuple[float, float] = (1.0, 1.0),
        **more: Any,
    ) -> None:
        self._factors = factors
        super().__init__(vocab_size, *sizes, **more)
        self.softmax = SampledSoftmax(vocab_size, candidates)

    def _embedding(self, vocab_size: int, width: int) -> nn.Module:
        return RowTable(vocab_size, width, self._factors[0])

    def _output(self, vocab_size: int, width: int) -> nn.Module:
        return OutputTable(vocab_size, width, self._factors[1])

    def forward(
        self, tokens: Tensor, targets: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        outputs, state = self.hidden(tokens, state)
        losses = self.softmax(outputs.flatten(0, 1), targets.flatten(), self.output)
        return losses.view(targets.shape), state


def lstm(
    *,
    vocab_size: int,
    embedding_size: int,
    hidden_size: int,
    projection_size: int,
    pad_to_multiple: int,
    num_layers: int,
    dropout: float,
    init_range: float,
    forget_bias: float,
    sampled_softmax: int | None,
    embedding_gradient_factor: float,
    output_gradient_factor: float,
) -> StackedLSTM:
    """Build a `SampledLSTM` of `sampled_softmax` candidates; None: an `LSTMLanguageModel`.

    Every size is rounded up to a multiple of `pad_to_multiple`: FP16 Tensor Cores want multiples of
    8 (NVIDIA, "Training With Mixed Precision", section on Tensor Core shapes).
    """
    vocabulary, embedding, hidden, projection = (
        -(-size // pad_to_multiple) * pad_to_multiple
        for size in (vocab_size, embedding_size, hidden_size, projection_size)
    )
    sizes = vocabulary, embedding, hidden, num_layers, projection, dropout, init_range, forget_bias
    if sampled_softmax is None:
        return LSTMLanguageModel(*sizes)
    factors = embedding_gradient_factor, output_gradient_factor
    return SampledLSTM(*sizes, candidates=sampled_softmax, factors=factors)

"""bigLSTM: an LSTM language model whose embedding and softmax are tables of used rows.

The softmax over the huge vocabulary is taken from a sample of the words in training, and over all
of them to evaluate.
"""

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mprun.models.lstm_lm import (
    State,
    check_sizes,
    check_values,
    initialise,
    stacked_lstm,
    zero_state,
)
from mprun.models.row_table import RowTable

BLOCK = 8192  # words at a time in evaluation
# Accidental hits lie this far below the target's own logit: exp(-10000) is 0. Not at minus
# infinity, so that whoever looks for overflows finds none.
_BELOW = 1e4
# So late that every word has arrived: -expm1(-P t) is 1 for every P above 1e-10.
_AFTER_ALL = 1e12


class LogUniformSampler:
    """Draws `count` different ids below `vocabulary`, small ones (frequent words) most often.

    One draw has P(k) = log((k + 2) / (k + 1)) / log(vocabulary + 1), about Zipf's law for ids that
    are numbered by falling frequency. TensorFlow's sampler (unique=True, range_max) draws until it
    has `count` different ids, which the host has to count. Here each id waits an exponential time
    of rate P(k), and the first `count` are taken: the order of arrivals without repetition has the
    same distribution (successive sampling), in fixed shapes and without the host.

    The correction is the probability that id k is among the candidates. TensorFlow takes
    1 - (1 - P(k))^T after T tries. Here it is 1 - exp(-P(k) t), t being the arrival of the
    id after the last one taken: whatever the others do, k is taken if and only if it arrives
    before the `count`-th of them, and that is at t when k was taken. So the sum over the
    candidates of f(k) / (1 - exp(-P(k) t)) is an unbiased estimate of the sum of f over the
    vocabulary (Cohen and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007; Kool et
    al., arXiv 1903.06059, section 4.2); with the tries up to the last arrival it is an
    approximation. Both agree for small P(k) and large T.

    Time and memory grow with the vocabulary: 3.2 MB and one partial sort of 793,472 numbers a draw.
    """

    def __init__(self, vocabulary: int, count: int):
        if not 1 <= count <= vocabulary:
            raise ValueError(f"count={count} is not allowed: 1 to {vocabulary}, the vocabulary")
        # FP32 counts to 2^24 exactly.
        if vocabulary >= 2**24:
            raise ValueError(f"vocabulary={vocabulary} is not allowed: below {2**24}")
        self.vocabulary, self.count = vocabulary, count

    def probability(self, ids: Tensor) -> Tensor:
        """P(k) of each id, float32."""
        return torch.log1p(1.0 / (ids.float() + 1.0)) / math.log(self.vocabulary + 1)

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(ids int64 [count] in the order of arrival, t float32 0-dim).

        From torch's global generator on `device`. With `count` = vocabulary: all ids in order, t so
        late that every inclusion probability is 1, and no random number is used.
        """
        everything = torch.arange(self.vocabulary, device=device)
        if self.count == self.vocabulary:
            return everything, torch.full((), _AFTER_ALL, device=device)
        waits = torch.empty(self.vocabulary, device=device).exponential_()
        waits /= self.probability(everything)
        first = waits.topk(self.count + 1, largest=False)
        return first.indices[:-1], first.values[-1]

    def log_inclusion(self, ids: Tensor, t: Tensor) -> Tensor:
        """Logarithm of the probability that each id is among the candidates, float32."""
        return torch.log(-torch.expm1(-self.probability(ids) * t))


class SampledSoftmax(nn.Module):
    """Cross-entropy per token; from `count` candidate words in training, over all in evaluation.

    Training: the logits of a token are those of its target and of the candidates, which all tokens
    of a step share, each minus the logarithm of its inclusion probability (Jean et al., arXiv
    1412.2007; tf.nn.sampled_softmax_loss). A candidate that is the token's own target (accidental
    hit) is masked for that token. The target is corrected in the same way, as published: then the
    minimum is at the distribution of the words, but the loss is no estimate of the full one.
    Evaluation (`eval()`): the full softmax, block by block with a running log-sum-exp; the largest
    tensor is [tokens, BLOCK].

    Logits and loss are computed in FP32 in every mode, also under autocast, as in the code behind
    bigLSTM (okuchaiev/f-lm casts the inputs up). The rows of the table come in the parameters' own
    dtype and their gradients are rounded to it; f-lm keeps softmax rows in FP32, which is an FP32
    override of the table here.

    `forward(hidden, targets, table)`: hidden [M, D] in any dtype, targets int64 [M], table: a
    RowTable of the vocabulary with bias; float32 [M].

    Args:
        count: more than the vocabulary means the vocabulary, and the full softmax in training too.

    Raises:
        ValueError: count < 1.
    """

    computes_in_fp32 = True

    def __init__(self, vocabulary: int, count: int):
        super().__init__()
        self.sampler = LogUniformSampler(vocabulary, min(count, vocabulary))

    def forward(self, hidden: Tensor, targets: Tensor, table: RowTable) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            if self.training:
                return self._sampled(hidden.float(), targets, table)
            return _full(hidden.float(), targets, table)

    def _sampled(self, hidden: Tensor, targets: Tensor, table: RowTable) -> Tensor:
        candidates, t = self.sampler.draw(hidden.device)
        rows = table.gather(torch.cat([targets, candidates]))
        weight = rows.leaves["weight"].float()
        bias = rows.leaves["bias"].float()[:, None]
        sizes = [len(targets), len(candidates)]
        of_target, of_candidates = F.embedding(rows.place, weight).split(sizes)
        own_bias, biases = F.embedding(rows.place, bias).squeeze(1).split(sizes)
        own = (hidden * of_target).sum(1) + own_bias - self.sampler.log_inclusion(targets, t)
        others = torch.addmm(
            biases - self.sampler.log_inclusion(candidates, t), hidden, of_candidates.t()
        )
        own = own[:, None]
        others = torch.where(candidates == targets[:, None], own.detach() - _BELOW, others)
        logits = torch.cat([own, others], 1)
        return F.cross_entropy(logits, torch.zeros_like(targets), reduction="none")


def _full(hidden: Tensor, targets: Tensor, table: RowTable) -> Tensor:
    rows = {
        name: table.rounded(tensor.index_select(0, targets)).float()
        for name, tensor in table.tensors().items()
    }
    own = (hidden * rows["weight"]).sum(1) + rows["bias"]
    blocks = (
        torch.addmm(block["bias"], hidden, block["weight"].t()).logsumexp(1)
        for block in table.blocks(BLOCK)
    )
    return functools.reduce(torch.logaddexp, blocks) - own


class SampledLSTM(nn.Module):
    """`LSTMLanguageModel` with a sampled softmax, and rows that are updated only where used.

    Layers, dropout, initial values and parameter names are those of `LSTMLanguageModel`; the
    dropout after the embedding, between the layers and after the last one is that of the code
    behind bigLSTM, which drops before and after each LSTM layer with keep probability 0.9.

    ``forward(tokens, targets, state)``: tokens and targets int64 ``[time, batch]``, `state` as for
    ``LSTMLanguageModel``; returns the cross-entropy of each token, float32 ``[time, batch]``, and
    the state after the last step. In training the sampled one, in ``eval()`` the full one.

    Args:
        candidates: words drawn per step, at most the vocabulary (see `SampledSoftmax`). Word ids
            have to be numbered by falling frequency.
        embedding_gradient_factor: multiplies the gradient of the embedding; okuchaiev/f-lm
            multiplies by its batch size of 128.

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
        self.lstm = stacked_lstm(embedding_size, hidden_size, num_layers, projection_size, dropout)
        self.output = RowTable(vocab_size, projection_size or hidden_size, bias=True)
        self.softmax = SampledSoftmax(vocab_size, candidates)
        initialise(self, self.lstm, init_range, forget_bias)

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

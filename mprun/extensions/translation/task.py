"""Translation: the supervised step on sentence pairs, and BLEU of greedy translations."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.config.components import TASKS
from mprun.data.source import Batch
from mprun.extensions.translation.sentence_pairs import BEGIN_ID, END_ID, PADDING_ID, UNKNOWN_ID
from mprun.tasks.supervised import Supervised, cross_entropy
from mprun.tasks.task import as_row, shared

ORDERS = 4  # longest n-gram of BLEU


class Translation(Supervised):
    """Cross-entropy in nats per target word, with the end and without padding.

    The model gets the words before each (teacher forcing). The metrics are loss, perplexity and
    bleu (`corpus_bleu`) of greedy translations up to `data.max_length`. The loss of an update with
    several micro-batches is the mean of their losses, not weighted by words.
    """

    metrics = TASKS["translation"].metrics
    sample = "token"

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        source, target = batch
        logits = self.learner.inside(source, words_before(target))
        dtype = self.policy.loss_dtype
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), dtype, ignored=PADDING_ID)
        loss = self.learner.outside(loss)
        return loss, loss

    def samples_of(self, batch: Batch) -> int:
        return int((batch[1] != PADDING_ID).sum())

    @shared
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss per held-out word, its exponential, and BLEU in percent."""
        rows, count = [], 0
        model: Any  # it also has `translate`
        with self.learner.evaluating(self.eval_in_mode) as model:
            for source, target in self.held_out():
                logits = model(source, words_before(target)).flatten(0, 1).float()
                labels = target.flatten()
                loss = F.cross_entropy(logits, labels, ignore_index=PADDING_ID, reduction="sum")
                found = _sentences(model.translate(source, target.shape[1], BEGIN_ID, END_ID))
                wanted = _sentences(target)
                counts = torch.tensor([*map(matches, found, wanted)]).sum(0)
                rows.append(torch.cat([as_row(loss), counts.to(loss.device, torch.float64)]))
                count += sum(len(sentence) + 1 for sentence in wanted)
        nats, *sums = self.ranks.mean(rows, count)
        perplexity = math.exp(nats) if nats < 700 else math.inf
        return {"loss": nats, "perplexity": perplexity, "bleu": corpus_bleu(sums)}


def words_before(target: Tensor) -> Tensor:
    """Return the decoder's input for each word of `target`, int64 of the same shape."""
    begin = torch.full_like(target[:, :1], BEGIN_ID)
    return torch.cat([begin, target[:, :-1]], 1)


def _sentences(rows: Tensor) -> list[list[int]]:
    """Return the words of each row, without its end."""
    stops = (PADDING_ID, END_ID)
    return [[*takewhile(lambda word: word not in stops, row)] for row in rows.tolist()]


def matches(hypothesis: Sequence[int], reference: Sequence[int]) -> list[int]:
    """Return the ten numbers of one sentence that `corpus_bleu` sums.

    These are matching n-grams of 1 to 4 words, each at most as often as in the reference; n-grams
    of the hypothesis; words of both. An unknown word of the reference matches nothing, because the
    real word is not known.
    """
    found, there = [], []
    wanted = [-1 if word == UNKNOWN_ID else word for word in reference]
    for order in range(1, ORDERS + 1):
        own = _ngrams(hypothesis, order)
        found.append((own & _ngrams(wanted, order)).total())
        there.append(own.total())
    return [*found, *there, len(hypothesis), len(reference)]


def _ngrams(words: Sequence[int], order: int) -> Counter[tuple[int, ...]]:
    return Counter(zip(*(words[start:] for start in range(order)), strict=False))


def corpus_bleu(counts: Sequence[float]) -> float:
    """Compute BLEU-4 in percent (Papineni et al., ACL 2002) from sums or means of `matches`.

    It is not smoothed: 0 if no 4-gram matches or exists. Each sentence has one reference.
    """
    sizes = [ORDERS, ORDERS, 2]
    found, there, (own, wanted) = torch.tensor(counts, dtype=torch.float64).split(sizes)
    precision = (found / there).log().mean()
    brevity = (1 - wanted / own).clamp(max=0)
    return 100 * (precision + brevity).exp().nan_to_num(0).item()

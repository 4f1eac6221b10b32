"""Speech recognition: utterances to texts by connectionist temporal classification."""

from typing import NamedTuple

from torch import Tensor

from mprun.data.source import Batch
from mprun.extensions.speech.ctc import ctc_losses, edit_distances, greedy
from mprun.tasks.supervised import Supervised
from mprun.tasks.task import as_row, shared


class Transcripts(NamedTuple):
    """The targets of a batch of utterances, from one int64 `[n, 2 + most symbols]`.

    Attributes:
        frames: number of frames of each utterance, `[n]`; the rest of its features is padding.
        lengths: length of each text, `[n]`.
        symbols: `[n, most symbols]`, 1 and above.
    """

    frames: Tensor
    lengths: Tensor
    symbols: Tensor

    @classmethod
    def of(cls, targets: Tensor) -> "Transcripts":
        """Split a batch's targets."""
        return cls(targets[:, 0], targets[:, 1], targets[:, 2:])


class Speech(Supervised):
    """CTC on spectrograms; metrics loss (nats per utterance) and cer (percent).

    The loss is computed in FP32 in every mode: no 16-bit kernel of it exists, and probabilities of
    whole texts exceed any 16-bit range. cer: edits from the greedily decoded texts to the true
    ones, over the symbols of the true ones, all held-out utterances together; over 1 if these have
    no symbol at all.
    """

    sample = "utterance"

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features, targets = batch
        text = Transcripts.of(targets)
        with self.forward_context.autocast():
            logits, frames = self.learner.network(features, text.frames)
        loss = ctc_losses(logits, frames, text.symbols, text.lengths).mean()
        return loss, loss

    @shared
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss and the character error rate over the whole held-out split."""
        rows, count = [], 0
        with self.learner.evaluating(self.forward_context, self.eval_in_mode) as model:
            for features, targets in self.held_out():
                text = Transcripts.of(targets)
                logits, frames = model(self._eval_inputs(features), text.frames)
                losses = ctc_losses(logits, frames, text.symbols, text.lengths)
                heard = greedy(logits, frames)
                edits = edit_distances(text.symbols, text.lengths, *heard)
                rows.append(as_row(losses.sum(), edits.sum(), text.lengths.sum()))
                count += len(targets)
        loss, edits_each, symbols_each = self.ranks.mean(rows, count)
        return {"loss": loss, "cer": 100 * edits_each / (symbols_each or 1 / count)}

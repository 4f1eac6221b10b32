"""Speech recognition: utterances to texts by connectionist temporal classification."""

from torch import Tensor

from mprun.config.components import TASKS
from mprun.data.source import Batch
from mprun.extensions.speech.ctc import ctc_losses, edit_distances, greedy
from mprun.tasks.supervised import Supervised
from mprun.tasks.task import as_row, shared


def frames_and_texts(targets: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Split targets, int64 `[n, 2 + most symbols]`.

    Returns the number of frames of each utterance, `[n]`; and the texts: symbols `[n, most
    symbols]`, 1 and above, and how many of them count, `[n]`.
    """
    return targets[:, 0], (targets[:, 2:], targets[:, 1])


class Speech(Supervised):
    """CTC on spectrograms; metrics loss (nats per utterance) and cer (percent).

    The loss is computed in FP32 in every mode: no 16-bit kernel of it exists, and probabilities of
    whole texts exceed any 16-bit range. cer: edits from the greedily decoded texts to the true
    ones, over the symbols of the true ones, all held-out utterances together; over 1 if these have
    no symbol at all.
    """

    metrics = TASKS["speech"].metrics
    sample = "utterance"

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features, targets = batch
        frames, texts = frames_and_texts(targets)
        logits, frames = self.learner.inside(features, frames)
        loss = self.learner.outside(ctc_losses(logits, frames, *texts).mean())
        return loss, loss

    @shared
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss and the character error rate over the whole held-out split."""
        rows, count = [], 0
        with self.learner.evaluating(self.eval_in_mode) as model:
            for features, targets in self.held_out():
                frames, texts = frames_and_texts(targets)
                logits, frames = model(features, frames)
                losses = ctc_losses(logits, frames, *texts)
                edits = edit_distances(*texts, *greedy(logits, frames))
                rows.append(as_row(losses.sum(), edits.sum(), texts[1].sum()))
                count += len(targets)
        loss, edits_each, symbols_each = self.ranks.mean(rows, count)
        return {"loss": loss, "cer": 100 * edits_each / (symbols_each or 1 / count)}

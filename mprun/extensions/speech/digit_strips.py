"""Utterances without audio: strips of handwritten digits, read column by column.

They are real measurements with the shape of a spectrogram and a text of unknown alignment, without
a download.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mprun.data.image_store import split_digits
from mprun.data.source import Batch, EpochOrder, Serving, Source

TRAIN_STRIPS, EVAL_STRIPS = 1200, 300
FEWEST, MOST = 3, 5  # digits of a strip
FREQUENCIES = 8
COLUMNS = 48  # five digits of 8 columns with gaps take 44 at most
# One set of strips for every seed: all runs must be judged on the same ones.
CONTENT_SEED = 20171010


def shapes(data: Any) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]:
    """Return the shapes of a configuration's batches, features and targets, and its sizes."""
    first, second = (data.batch_size, 1, FREQUENCIES, COLUMNS), (data.batch_size, 2 + MOST)
    return first, second, {"frequencies": FREQUENCIES, "num_symbols": DigitStrips.num_symbols}


class DigitStrips(Source):
    """Strips of three to five digits, at most one empty column apart; the digits are the text.

    They hold ``DigitsImages``' training and held-out digits. A batch is ``(features float32
    [batch, 1, 8, 48], targets int64 [batch, 7])``. Rows are frequencies and columns frames,
    standardised over the training strips and zero after a strip's end. Targets are the number of
    frames, the number of digits, and as many symbols (digit + 1; 0 is CTC's blank).
    """

    num_symbols = 11

    def __init__(self, serving: Serving) -> None:
        batch_size, device = serving.batch_size, serving.device
        self._order = EpochOrder(serving.seed, TRAIN_STRIPS, batch_size, device)
        self.batches_per_epoch, self.samples_per_batch = self._order.batches_per_epoch, batch_size
        own, held_out = split_digits()
        train, evaluated = _strips(*own, TRAIN_STRIPS, 0), _strips(*held_out, EVAL_STRIPS, 1)
        content = b"".join(part.numpy().data for part in (*train, *evaluated))
        self.sha256 = hashlib.sha256(content).hexdigest()
        std, mean = torch.std_mean(train[0].double()[_inside(train[1])], correction=0)
        self._train, self._held_out = (
            (_standardised(*strips, float(mean), float(std)).to(device), strips[1].to(device))
            for strips in (train, evaluated)
        )
        self.description = {
            "name": "digit_strips",
            "train_samples": TRAIN_STRIPS,
            "eval_samples": EVAL_STRIPS,
            "frequencies": FREQUENCIES,
            "frames": COLUMNS,
            "num_symbols": self.num_symbols,
            "origin": "sklearn.datasets.load_digits",
        }

    def train_batch(self, index: int) -> Batch:
        picked = self._order.indices(index)
        features, targets = self._train
        return features.index_select(0, picked), targets.index_select(0, picked)

    def eval_batches(self) -> Iterator[Batch]:
        yield from zip(*(t.split(self.samples_per_batch) for t in self._held_out), strict=True)


def _strips(images: Tensor, labels: Tensor, count: int, split: int) -> Batch:
    """Make uint8 ``[count, 1, 8, 48]`` with values 0 ... 16, and targets int64 ``[count, 7]``."""
    # NumPy guarantees this stream across releases (NEP 19).
    stream = np.random.PCG64(np.random.SeedSequence([CONTENT_SEED, split]))
    drawn = stream.random_raw(2 * MOST * count).reshape(count, 2 * MOST)
    strips = torch.zeros(count, 1, FREQUENCIES, COLUMNS, dtype=torch.uint8)
    targets = torch.zeros(count, 2 + MOST, dtype=torch.int64)
    for strip, target, (first, *others) in zip(strips, targets, drawn.tolist(), strict=True):
        digits, start = FEWEST + first % (MOST - FEWEST + 1), 0
        for place in range(digits):
            chosen = others[place] % len(images)
            start += others[MOST + place - 1] % 2 if place else 0
            strip[:, :, start : start + 8] = images[chosen]
            target[2 + place] = labels[chosen] + 1
            start += 8
        target[0], target[1] = start, digits
    return strips, targets


def _inside(targets: Tensor) -> Tensor:
    """Return which values lie before a strip's end: bool ``[n, 1, 8, 48]``."""
    inside = torch.arange(COLUMNS) < targets[:, :1]
    return inside[:, None, None].expand(-1, 1, FREQUENCIES, -1)


def _standardised(strips: Tensor, targets: Tensor, mean: float, std: float) -> Tensor:
    return ((strips.float() - mean) / std).masked_fill(~_inside(targets), 0.0)

"""Images with boxes: real handwritten digits pasted on canvases, made in memory.

Every source for a detector has these batches: ``(images float32 [batch, channels, image_size,
image_size], targets float32 [batch, most, 6])``. A row of the targets is an object: left, top,
right, bottom in 0 ... 1 of the image's sides, class from 0, and 1 if it is marked as difficult.
Rows without an object have class -1 and zeros.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from mprun.data.augmentation import ImageForm
from mprun.data.image_store import MAXIMUM, SPLIT_SEED, ImageStore, split_digits
from mprun.data.source import Batch, Serving
from mprun.extensions.detection.boxes import CLASS

FIELDS = 6
NOTHING = -1.0  # class of a row without an object

CANVAS, SIDES = 32, (8, 16)  # pixels of a side, of a canvas and of a pasted digit
MOST = 3  # digits on a canvas
NOISE = 64  # background: uniform below this, of 255
TRAIN_CANVASES, EVAL_CANVASES = 1000, 300


class DigitCanvases(ImageStore):
    """1 to 3 real digits on a canvas of noise, to be found and named; 10 classes.

    There are 1,000 canvases of ``DigitsImages``' training digits and 300 of its held-out ones, the
    same for every seed. Each digit is enlarged bilinearly to a square, its box; boxes on one canvas
    never overlap. ``train_size`` and ``eval_size`` take the first ones; None takes all. Other image
    sizes than 32 are resized.
    """

    def __init__(
        self, train_size: int | None, eval_size: int | None, form: ImageForm, serving: Serving
    ) -> None:
        (images, targets), (others, found) = digit_canvases()
        train = images[:train_size], targets[:train_size]
        held_out = others[:eval_size], found[:eval_size]
        super().__init__((train, held_out), "digit_canvases", 10, form, serving)
        self.description |= {"origin": "sklearn.datasets.load_digits", "most_boxes": MOST}


@cache
def digit_canvases() -> tuple[Batch, Batch]:
    """Make training and held-out canvases: uint8 ``[n, 1, 32, 32]``, float32 ``[n, 3, 6]``.

    Pixels come from integer arithmetic alone, so that every machine has the same ones. It takes
    about 0.2 s, once a process; do not write to them.
    """
    train, held_out = split_digits()
    return _canvases(*train, TRAIN_CANVASES, 0), _canvases(*held_out, EVAL_CANVASES, 1)


def _canvases(images: Tensor, labels: Tensor, count: int, split: int) -> Batch:
    """Make ``count`` canvases of the digits; each split has its own stream."""
    digits = images[:, 0].numpy()
    stream = np.random.PCG64(np.random.SeedSequence([SPLIT_SEED, split, CANVAS]))

    def below(bound: int) -> int:
        return int(stream.random_raw() >> np.uint64(32)) * bound >> 32

    noise = stream.random_raw(count * CANVAS * CANVAS) % np.uint64(NOISE)
    canvases = noise.astype(np.uint8).reshape(count, CANVAS, CANVAS)
    targets = np.zeros((count, MOST, FIELDS), np.float32)
    targets[:, :, CLASS] = NOTHING
    for canvas, objects in zip(canvases, targets, strict=True):
        free = np.ones((CANVAS, CANVAS), bool)
        for row in objects[: 1 + below(MOST)]:
            while True:  # a square of 8 px always has room beside two of 16
                side = SIDES[0] + below(SIDES[1] - SIDES[0] + 1)
                left, top = below(CANVAS - side + 1), below(CANVAS - side + 1)
                place = slice(top, top + side), slice(left, left + side)
                if free[place].all():
                    break
            digit = below(len(digits))
            free[place] = False
            canvas[place] = np.maximum(canvas[place], _enlarged(digits[digit], side))
            row[:CLASS] = np.array([left, top, left + side, top + side]) / CANVAS
            row[CLASS] = float(labels[digit])
    return torch.from_numpy(canvases[:, None]), torch.from_numpy(targets)


def _enlarged(digit: np.ndarray, side: int) -> np.ndarray:
    """Enlarge a digit ``[8, 8]`` of 0 ... 16 to uint8 ``[side, side]``, 0 ... 255, bilinearly."""
    weights = _weights(len(digit), side)
    scale = MAXIMUM * (2 * side) ** 2
    parts = 255 * (weights @ digit.astype(np.int64) @ weights.T)
    return ((parts + scale // 2) // scale).astype(np.uint8)


@cache
def _weights(old: int, new: int) -> np.ndarray:
    """Return each new pixel's weights of the ``old`` pixels, in parts of ``2 * new``."""
    weights = np.zeros((new, old), np.int64)
    for i in range(new):
        # The middle of pixel i, in 2 * new parts of an old pixel, from the middle of the first.
        at = min(max((2 * i + 1) * old - new, 0), 2 * new * (old - 1))
        low, part = divmod(at, 2 * new)
        weights[i, low] += 2 * new - part
        weights[i, min(low + 1, old - 1)] += part
    return weights

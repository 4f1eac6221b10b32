"""Data in which a rank meets a fault: `FAULT=kind:phase` of the environment says which.

It is rank 1, unless FAULT_RANK is another. The time stamp of the file `FAULT_AT` says when.
"""

import os
import signal
import time
from itertools import islice
from pathlib import Path

import torch

from mprun.data.augmentation import ImageForm
from mprun.data.image_store import DigitsImages
from mprun.data.source import DamagedData, Serving

STEP = 5  # from 0, of the phase "training"


def fault(kind: str) -> None:
    """Let the given fault happen to the rank in the middle of its work."""
    Path(os.environ["FAULT_AT"]).touch()
    match kind:
        case "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        case "damaged":
            raise DamagedData("images/0001.png: cut short")
        case "exception":
            raise KeyError("nobody expected this")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hung":
            time.sleep(300)
        case "memory":
            torch.empty(2**50, dtype=torch.uint8)


class Faulty:
    """Digits; at its phase the rank meets the fault, once."""

    def __init__(self, source) -> None:
        self._source, self.begun = source, False
        kind, self.phase = os.environ["FAULT"].split(":")
        met = Path(os.environ["FAULT_AT"]).exists()  # in the attempt before
        self.rank = int(os.environ.get("FAULT_RANK", "1"))
        own = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
        self.kind = kind if own == str(self.rank) and not met else None

    def __getattr__(self, name):
        return getattr(self._source, name)

    def _spoilt(self, images):
        kind, self.kind = self.kind, None
        if kind in ("inf", "nan"):
            Path(os.environ["FAULT_AT"]).touch()
            images = images.clone()
            images.view(-1)[0] = float(kind)
        elif kind is not None:
            fault(kind)
        return images

    def train_batch(self, index):
        images, labels = self._source.train_batch(index)
        self.begun = self.begun or index > 1  # before that the source is tried
        if index == {"start": 1, "training": 2 * STEP + self.rank}.get(self.phase):
            images = self._spoilt(images)
        return images, labels

    def eval_batches(self):
        for number, (images, labels) in enumerate(self._source.eval_batches()):
            if number == 1 and self.begun and self.phase == "evaluation":
                images = self._spoilt(images)
            yield images, labels

    def eval_share(self, rank, world):  # not that of the source inside
        return islice(self.eval_batches(), rank, None, world)


def digits(*, batch_size, seed, device):
    """`data.factory` of the tests."""
    serving = Serving(batch_size=batch_size, seed=seed, device=device)
    source = Faulty(DigitsImages(ImageForm(image_size=32), serving))
    if source.phase == "start" and source.kind not in (None, "inf", "nan"):
        kind, source.kind = source.kind, None
        fault(kind)
    return source

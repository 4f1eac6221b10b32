"""What a contender's first 20 steps leave behind, for the equality check."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mprun.bench.contender import EQUALITY_STEPS, Contender

_SAMPLED = 2**20  # elements of a tensor that are watched


class WeightWatch:
    """How far a contender's weights are from where they started, step by step.

    Watches at most 2^20 elements of each tensor, every n-th one, and holds copies of them: 4 bytes
    each. To be made before the first step. A contender shows its weights by `weights()`: those
    that its optimizer updates (master weights where there are some) by name.
    """

    def __init__(self, contender: Contender):
        self._tensors = list(contender.weights().values())
        self._start = [sample.clone() for sample in self._samples()]
        self._length = self._norm(self._start).sqrt()
        self._steps: list[Tensor] = []

    @torch.no_grad()
    def record(self) -> None:
        """Note where the weights are after a step; work for the device alone."""
        moved = [now.float() - then for now, then in zip(self._samples(), self._start, strict=True)]
        distance = self._norm(moved).sqrt()
        pairs = zip(moved, self._start, strict=True)
        along = sum((a.double() * b.double()).sum() for a, b in pairs)
        self._steps.append(torch.stack([distance / self._length, along / self._length / distance]))

    def travel(self) -> list[list[float]]:
        """[distance over the length of the start, cosine to the start] of each step.

        The cosine is 0 where nothing has moved. Waits for the device.
        """
        rows = torch.stack(self._steps).tolist()
        return [[distance, cosine if distance else 0.0] for distance, cosine in rows]

    def _samples(self) -> list[Tensor]:
        # `flatten` numbers the elements alike in NCHW and NHWC.
        return [t.detach().flatten()[:: -(-t.numel() // _SAMPLED)].float() for t in self._tensors]

    @staticmethod
    def _norm(tensors: Iterable[Tensor]) -> Tensor:
        return sum(tensor.double().square().sum() for tensor in tensors)


def first_steps(contender: Contender) -> dict:
    """{"losses", "travel", "skipped"} of the first 20 steps of a fresh contender."""
    watch, losses = WeightWatch(contender), []
    for _ in range(EQUALITY_STEPS):
        losses.append(contender.step())
        watch.record()
    losses = torch.stack(losses).tolist()
    plain = [loss if math.isfinite(loss) else str(loss) for loss in losses]  # JSON has no NaN
    return {"losses": plain, "travel": watch.travel(), "skipped": contender.skipped()}

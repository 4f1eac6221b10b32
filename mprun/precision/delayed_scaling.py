"""Delayed scaling: the scale of a cast comes from the updates before it.

    amax     largest magnitude of a tensor in an update: of all micro-batches, on all ranks
    history  amax of the last `length` updates
    scale    top / 2^margin / largest of the history; it changes after an update

Transformer Engine's DelayedScaling (common/recipe/delayed_scaling.cu), with its limits: the first
scale is 1; if the largest is 0 or infinite the scale is kept, so an infinity keeps it as long as it
is in the history; a NaN does not count; FLT_MAX is the largest scale. What has grown past the scale
saturates until the next update. A value that is not finite makes the product NaN, as everywhere.

The history moves after a skipped update too: Transformer Engine moves it as `autocast` ends, before
anything looks at the gradients. Unlike there, it moves once an update and not in each micro-batch,
and for a tensor of zeros too. A recomputed forward pass records the same again, an evaluation none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mprun.precision.scaled_products import OPERANDS, ScaledProducts

_Largest = Callable[[Tensor], Tensor]
_INFINITE = torch.finfo(torch.float32).max  # stands for an infinity: a checkpoint has to be finite


class DelayedScaling:
    """The scales of a model's layers and their history.

    layers: name -> its scales and the amax of this update, [operands, 2], which casts read and
        write.
    """

    def __init__(self, names: Sequence[str], products: ScaledProducts, device: torch.device):
        tops = [getattr(products, name).top * 2.0**-products.margin for name in OPERANDS]
        first, size = torch.tensor([1.0, 0.0], device=device), (len(names), len(tops))
        self.present = first.repeat(*size, 1)
        self.history = torch.zeros(products.history, *size, device=device)  # newest first
        # `data` has a version of its own: a write of one layer's pass is none to another's.
        self.layers = {name: row.data for name, row in zip(names, self.present, strict=True)}
        self._tops = torch.tensor(tops, device=device)

    @torch.no_grad()
    def roll(self, largest: _Largest | None = None) -> None:
        """End an update, skipped or not: move the history, choose the scales of the next one.

        largest: returns the elementwise maximum over the ranks. Nothing waits for the device.
        """
        scale, amax = self.present.unbind(-1)
        agreed = amax.clone() if largest is None else largest(amax.clone())
        self.history.copy_(torch.cat([agreed[None], self.history[:-1]]))
        most = self.history.amax(0)
        chosen = (self._tops / most).clamp(max=_INFINITE)
        scale.copy_(torch.where((most == 0) | (most == _INFINITE), scale, chosen))
        amax.zero_()

    def is_like(self, other: "DelayedScaling") -> bool:
        """Return whether the scales of another mode are to the same largest numbers."""
        return torch.equal(self._tops, other._tops)

    def state_dict(self, largest: _Largest | None = None) -> dict[str, Any]:
        """Return the state; `largest` as for `roll`, if casts since then may differ by rank."""
        present = self.present if largest is None else largest(self.present)
        return {"layers": [*self.layers], "present": present, "history": self.history}

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Restore bit for bit; ValueError says what does not fit."""
        if saved is None:
            raise ValueError("the state must have a history of scales (products.scale=delayed)")
        if saved["layers"] != [*self.layers] or saved["history"].shape != self.history.shape:
            raise ValueError(
                "the saved history of scales must have the same layers, and as many updates, as "
                "this model's history"
            )
        self.take_over(saved)

    @torch.no_grad()
    def take_over(self, saved: Mapping[str, Any]) -> None:
        """Take the newest numbers of those layers of a state that are here, too."""
        both = [place for place, name in enumerate(saved["layers"]) if name in self.layers]
        own = [[*self.layers].index(saved["layers"][place]) for place in both]
        self.present[own] = saved["present"][both].to(self.present.device)
        newest = saved["history"][: len(self.history), both].to(self.history.device)
        self.history[: len(newest), own] = newest

"""An exponential moving average of the weights, for evaluation."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mprun.precision.casting import matching_parameters
from mprun.precision.row_updates import row_tables


class WeightAverage:
    """average <- decay * average + (1 - decay) * weight, once per applied update.

    weights: by parameter name, what the optimizer updates (the master weights where there are
    some). decay: in (0, 1). The average starts at the weights as they are (tf.train.
    ExponentialMovingAverage without num_updates, as bigLSTM's published code uses it). It is in
    FP32 in every mode, because it only measures: in 16 bits 0.001 times a difference would vanish.
    Costs 4 bytes for each averaged parameter. Running statistics of norm layers are not averaged.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float):
        if not 0 < decay < 1:
            raise ValueError(f"decay={decay} is not allowed: above 0, below 1")
        self.weights, self.decay = dict(weights), decay
        self.values = {
            name: weight.detach().to(torch.float32, copy=True) for name, weight in weights.items()
        }
        device = next(iter(self.values.values())).device
        self._rate = torch.full((), 1.0 - decay, dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, found_inf: Tensor | None) -> None:
        """Move towards the weights, except where `found_inf` (0-dim) says that they did not move.

        Nothing waits for the device.
        """
        rate = self._rate if found_inf is None else self._rate * (found_inf == 0)
        for name, average in self.values.items():
            average.lerp_(self.weights[name].float(), rate)


def choose_averaged(
    model: nn.Module, weights: Mapping[str, Tensor], patterns: Iterable[str]
) -> dict[str, Tensor]:
    """Those of `weights` whose modules match `optim.average_modules`; all without a pattern.

    Raises ValueError for a pattern that matches no module, where nothing is chosen, and for row
    tables: their average would have to move in every row.
    """
    patterns = list(patterns)
    names = matching_parameters(model, patterns, "optim.average_modules")
    tables = [t for t in row_tables(model) if any(name.startswith(f"{t}.") for name in names)]
    if tables:
        raise ValueError(
            f"optim.average_modules={patterns}: {', '.join(tables)} are updated only in the rows "
            "that a step uses and have no average; name the modules to average, e.g. [lstm]"
        )
    chosen = {name: weight for name, weight in weights.items() if name in names}
    if not chosen:
        raise ValueError(f"optim.average_modules={patterns}: these modules have no weights")
    return chosen

"""Set the learning rate by the number of applied updates, without asking the device for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mprun.errors import BadInput
from mprun.precision import MixedPrecisionOptimizer
from mprun.precision.torch_update import is_fused


class LearningRate:
    """Applies a table of rates (one per update) to optimizers.

    The schedule follows applied updates: step number minus skipped updates. On CUDA that count
    exists only on the device, so a varying rate is looked up there and the optimizers read a tensor
    (float32; a fused kernel that reads a number takes it in float64, so it is the same kind in
    every mode, and whether the step is replayed as a graph or not). A constant rate is a plain
    number, and so is every rate on a CPU and of optimizers without a fused kernel.
    """

    def __init__(
        self,
        rates: Sequence[float],
        optimizers: Sequence[MixedPrecisionOptimizer],
        device: torch.device,
    ):
        self.rates, self.optimizers = list(rates), list(optimizers)
        self.constant = min(self.rates) == max(self.rates)
        self.table = None
        varies_on_cuda = not self.constant and device.type == "cuda"
        fused = all(
            optimizer.update_path == "single_pass" or is_fused(optimizer.inner)
            for optimizer in self.optimizers
        )
        if varies_on_cuda and not fused and any(o.skips for o in self.optimizers):
            raise BadInput(
                "optim.schedule: a varying rate with a loss scaler that skips needs fused "
                "optimizers on CUDA; use optim.schedule=constant or scaler=none"
            )
        if varies_on_cuda and fused:
            self.table = torch.tensor(self.rates, dtype=torch.float32, device=device)
            # A tensor for each group: groups of one optimizer differ in their rate.
            for optimizer in self.optimizers:
                for group in optimizer.inner.param_groups:
                    group["lr"] = torch.empty((), dtype=torch.float32, device=device)
        # Here, because a constant rate is not touched again.
        for optimizer in self.optimizers:
            optimizer.set_lr(self.rates[0] if self.table is None else self.table[0])

    def apply(self, step: int, skipped: Tensor) -> None:
        """Set the rate for `step` (from 0); `skipped`: int64, 0-dim, skipped updates so far."""
        if self.constant:
            return
        if self.table is not None:
            # index_select, because indexing with a tensor would read it on the host.
            rate = self.table.index_select(0, (step - skipped).reshape(1)).reshape(())
        else:
            # No skips on CUDA, or a CPU: reading the count waits for nothing.
            rate = self.at(step, int(skipped) if skipped.device.type == "cpu" else 0)
        for optimizer in self.optimizers:
            optimizer.set_lr(rate)

    def at(self, step: int, skipped: int) -> float:
        """The rate used at `step` (from 0) after `skipped` skipped updates."""
        return self.rates[min(step - skipped, len(self.rates) - 1)]

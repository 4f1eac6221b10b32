"""The learning rate by the number of applied updates: schedules, and setting it on the device."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mprun.errors import BadInput
from mprun.precision import MixedPrecisionOptimizer
from mprun.precision.torch_update import is_fused

SCHEDULES = ("constant", "linear", "cosine", "polynomial", "step", "epoch_decay")


def learning_rates(
    lr: float,
    total_updates: int,
    *,
    schedule: str,
    steps_per_epoch: int | None = None,
    warmup_updates: int = 0,
    warmup_epochs: float = 0.0,
    final_factor: float = 0.0,
    power: float = 1.0,
    milestones: tuple[float, ...] = (),
    gamma: float = 0.1,
    constant_epochs: float = 0.0,
) -> list[float]:
    """The learning rate of update 0, 1, ... total_updates - 1.

    warmup_updates: linear rise from lr / warmup_updates to lr; warmup_epochs: the same, in epochs
    of steps_per_epoch updates, where warmup_updates is 0. After it, with t from 0 to 1 over the
    rest of the run and f = final_factor:
    constant: lr; linear: lr * (1 - (1 - f) * t); cosine: lr * (f + (1 - f) * (1 + cos(pi t)) / 2);
    polynomial: lr * (f + (1 - f) * (1 - t)^power); step: lr * gamma per milestone passed, the
    milestones being shares of the whole run; epoch_decay: lr for constant_epochs epochs, then
    times gamma at once and after each further epoch, which is ``lr_decay ** max(epoch + 1 -
    max_epoch, 0)`` of TensorFlow's ptb_word_lm.py (Zaremba et al., arXiv 1409.2329, section 4.1).

    Raises ValueError for another schedule, and where epochs are asked for without
    steps_per_epoch.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: must be one of {', '.join(SCHEDULES)}")
    if steps_per_epoch is None and (warmup_epochs or schedule == "epoch_decay"):
        raise ValueError("steps_per_epoch=None: warmup_epochs and epoch_decay need it")
    if warmup_epochs and not warmup_updates:
        warmup_updates = round(warmup_epochs * steps_per_epoch)

    def factor(update: int) -> float:
        t = (update - warmup_updates) / max(1, total_updates - warmup_updates)
        match schedule:
            case "linear":
                return 1 - (1 - final_factor) * t
            case "cosine":
                return final_factor + (1 - final_factor) * (1 + math.cos(math.pi * t)) / 2
            case "polynomial":
                return final_factor + (1 - final_factor) * (1 - t) ** power
            case "step":
                return gamma ** sum(update >= share * total_updates for share in milestones)
            case "epoch_decay":
                drops = math.floor(update / steps_per_epoch - constant_epochs) + 1
                return gamma ** max(0, drops)
        return 1.0

    warm = min(warmup_updates, total_updates)
    rise = [lr * (update + 1) / warmup_updates for update in range(warm)]
    return rise + [lr * factor(update) for update in range(warm, total_updates)]


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

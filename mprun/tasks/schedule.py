"""Learning-rate schedules as pure functions of the number of applied updates."""

import math

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

"""Learning-rate schedules as pure functions of the number of applied updates."""

import math


def learning_rates(
    lr: float,
    total_updates: int,
    *,
    schedule: str,
    warmup_updates: int = 0,
    final_factor: float = 0.0,
    power: float = 1.0,
    milestones: tuple[float, ...] = (),
    gamma: float = 0.1,
) -> list[float]:
    """The learning rate of update 0, 1, ... total_updates - 1.

    warmup_updates: linear rise from lr / warmup_updates to lr. After it, with t from 0 to 1 over
    the rest of the run and f = final_factor:
    constant: lr; linear: lr * (1 - (1 - f) * t); cosine: lr * (f + (1 - f) * (1 + cos(pi t)) / 2);
    polynomial: lr * (f + (1 - f) * (1 - t)^power); step: lr * gamma per milestone passed, the
    milestones being shares of the whole run.
    """
    rates = []
    for update in range(total_updates):
        if update < warmup_updates:
            rates.append(lr * (update + 1) / warmup_updates)
            continue
        t = (update - warmup_updates) / max(1, total_updates - warmup_updates)
        if schedule == "constant":
            factor = 1.0
        elif schedule == "linear":
            factor = 1 - (1 - final_factor) * t
        elif schedule == "cosine":
            factor = final_factor + (1 - final_factor) * (1 + math.cos(math.pi * t)) / 2
        elif schedule == "polynomial":
            factor = final_factor + (1 - final_factor) * (1 - t) ** power
        elif schedule == "step":
            passed = sum(update >= share * total_updates for share in milestones)
            factor = gamma**passed
        else:
            raise ValueError(
                f"schedule={schedule!r}: must be constant, linear, cosine, polynomial or step"
            )
        rates.append(lr * factor)
    return rates

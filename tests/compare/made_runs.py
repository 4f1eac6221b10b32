"""Runs and arms as plain data, for tests that need no files."""

import numpy as np

from mprun.comparison.findings import Arm, RunData
from mprun.comparison.grouping import ProtoGroup


def made_run(
    seed: int,
    *finals: float,
    mode: str = "fp32",
    metric: str = "loss",
    steps: list[int] | None = None,
    train: list[float] | None = None,
    **fields,
) -> RunData:
    """A run that ended: `finals` are its evaluations of `metric`, every 100 steps.

    `train`: one training loss per step; its first 20 and last tenth become `first_losses` and
    `last_losses`. `fields`: anything else of RunData.
    """
    steps = list(range(100, 100 * len(finals) + 1, 100)) if steps is None else steps
    losses = np.array([] if train is None else train, dtype=np.float64)
    at = np.array(steps, dtype=np.float64)
    evals = {"step": at, "updates": at.copy(), metric: np.array(finals, dtype=np.float64)}
    defaults = {
        "path": f"runs/{mode}/s{seed}",
        "mode": mode,
        "scaler": "none",
        "seed": seed,
        "status": "done",
        "cause": None,
        "last_step": steps[-1] if steps else 0,
        "evals": evals,
        "train": {},
        "first_losses": losses[:20],
        "last_losses": losses[-max(1, len(losses) // 10) :] if len(losses) else losses,
    }
    return RunData(**(defaults | fields))


def made_arm(finals: dict[int, float], mode: str = "fp32", **fields) -> Arm:
    """An arm from seed -> final value."""
    runs = [made_run(seed, value, mode=mode, **fields) for seed, value in finals.items()]
    return Arm(label=mode, mode=mode, runs=runs)


def together(
    base: Arm, *modes: Arm, metric: str = "loss", margin: float = 0.01, window: int = 1, **more
) -> ProtoGroup:
    """The group of a baseline and its modes, before it is judged."""
    keys = {"compare.metric": metric, "compare.margin": margin, "compare.window": window}
    return ProtoGroup("made", "made", base, [*modes], keys | more)

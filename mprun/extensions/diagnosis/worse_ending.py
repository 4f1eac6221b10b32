"""Train a run whose linear layers cast again from its start: what casts lose, which change helps.

One seed gives no verdict. All arms take the same batches from the same weights, so that a gap to
FP32 of a percent, averaged over the last quarter of the steps, is seldom chance.
"""

import math
import time
from dataclasses import dataclass, field
from functools import partial

from mprun.assembly import Built
from mprun.config.schema import PrecisionConfig
from mprun.extensions.diagnosis.casts import CastMeter, cast_changes, sentences
from mprun.extensions.diagnosis.interventions import (
    FP32,
    LONGEST_CONTROL_S,
    Build,
    Options,
    Outcome,
    Tried,
    applied,
    groups_of,
    result_of,
    without_casts,
)
from mprun.numerics.replay import Steps, same_loss

MEASURED = 12  # steps whose casts are measured
SMALLEST_GAP = 0.0025  # of the loss of FP32; a smaller one is not explained
PART = 0.5  # of the gap; a change that takes it away helps
STEPS = 400


@dataclass(frozen=True, slots=True)
class Ending:
    """The first steps of a run, beside FP32.

    first_difference: the first step whose loss is not the recorded one. loss, fp32: mean over the
    last quarter of the steps. casts: see `sentences`, or that none was measured.
    """

    steps: int
    of_steps: int
    first_difference: int | None
    loss: float
    fp32: float
    casts: list[list[str]]
    tried: list[Tried] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """Return the part of FP32's loss by which the run's is higher."""
        return gap(self.loss, self.fp32)

    def in_words(self) -> tuple[str, str]:
        """Return what was replayed, and how it ended."""
        at = self.first_difference
        same = "bit-equal to the run's" if at is None else f"other from step {at} on"
        replay = f"steps 1 to {self.steps} of {self.of_steps}: losses {same}"
        result = f"loss {self.loss:.4g} over the last quarter of steps 1 to {self.steps}, "
        result += f"{self.fp32:.4g} in FP32: {100 * self.gap:+.2f} %"
        if self.gap <= SMALLEST_GAP:
            result += ", nothing to explain; more seeds: mprun compare"
        return replay, result


def gap(loss: float, reference: float) -> float:
    return (loss - reference) / abs(reference) if reference else 0.0


def find_ending(
    build: Build,
    config: dict,
    mode: PrecisionConfig,
    rows: list[dict],
    *,
    steps: int | None,
    options: Options | None,
) -> Ending:
    """Train the first steps as the run did, in FP32, and with each change.

    config: the run's, as plain values; mode: its precision. rows: its recorded steps. steps: how
    many; None: at most 400, and as many as take a minute. options: for the changes to try, None:
    try none.
    """
    built = build(config)
    whole = min(steps or STEPS, built.steps)
    every, seconds = max(1, whole // MEASURED), math.inf if steps else LONGEST_CONTROL_S
    with CastMeter(built.task, mode, every) as meter:
        own = _losses(built, whole, seconds)
    if len(own) < every:  # none was measured; not step 1 either, where delayed scales are 1
        built = build(config)
        with CastMeter(built.task, mode, 2) as meter:
            own = _losses(built, whole, seconds)
    recorded, whole = {row["step"]: row["loss"] for row in rows}, len(own)
    other = (n for n, x in enumerate(own, 1) if n in recorded and not same_loss(x, recorded[n]))
    losses, matmul = meter.read(), mode.matmul
    fp32 = _mean(_losses(build(config | groups_of(*FP32)), whole))
    casts = sentences(losses, matmul) if losses else [["not measured"]]
    found = Ending(whole, built.steps, next(other, None), _mean(own), fp32, casts)
    if options is not None and not found.gap <= SMALLEST_GAP:
        plain = without_casts(config, options)
        arms = applied(config, [*cast_changes(matmul, losses), plain], options)
        for change, changed in arms.items():
            found.tried.append(result_of(change, partial(_trained, build, changed, found)))
    return found


def _losses(built: Built, count: int, seconds: float = math.inf) -> list[float]:
    replay, ends = Steps(built, 0, 0), time.perf_counter() + seconds
    found: list[float] = []
    while len(found) < count and time.perf_counter() < ends:
        found.append(replay.advance().loss)
        if not math.isfinite(found[-1]):
            break
    return found


def _mean(losses: list[float]) -> float:
    last = losses[-max(1, len(losses) // 4) :]
    return sum(last) / len(last)


def _trained(build: Build, config: dict, run: Ending) -> Outcome:
    losses = _losses(build(config), run.steps)
    if len(losses) < run.steps:
        return False, f"loss {losses[-1]:g} at step {len(losses)}", None
    loss = _mean(losses)
    left = gap(loss, run.fp32)
    return left <= (1 - PART) * run.gap, f"{100 * left:+.2f} %", loss

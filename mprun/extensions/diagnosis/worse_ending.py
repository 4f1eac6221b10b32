"""Train a run that ended worse again from its start: which change takes away which part of the gap.

One seed gives no verdict. All arms take the same batches from the same weights, so that a gap to
FP32 of a percent, averaged over the last quarter of the steps, is seldom chance.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mprun.assembly import Built
from mprun.config.schema import PrecisionConfig
from mprun.extensions.diagnosis.casts import (
    CastMeter,
    Losses,
    cast_changes,
    sentences,
    without_layers,
)
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
from mprun.precision.scaled_products import PRODUCTS

MEASURED = 12  # steps whose casts are measured, all over the run
EARLY = 24  # each other one up to here too: gradients of logits lose most at the start
SMALLEST_GAP = 0.0025  # of the loss of FP32; a smaller one is not explained
PART = 0.5  # of the gap; a change that takes it away helps
STEPS = 400
RUNS = 8  # that a budget has to suffice for: the run's own, FP32's, and changes
_FEW = 4  # layers that are left out in turn; of more, half


@dataclass(frozen=True, slots=True)
class Ending:
    """The first steps of a run, beside FP32.

    first_difference: the first step whose loss is not the recorded one. loss, fp32: mean over the
    last quarter of the steps. casts: see `sentences`, or that none was measured; empty for a mode
    without casts.
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

    def part(self, loss: float) -> float:
        """Return the part of the gap that a change to this loss takes away."""
        return (self.loss - loss) / (self.loss - self.fp32)

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
    changes: Iterable[dict[str, Any]] = (),
    seconds: float | None = None,
) -> Ending:
    """Train the first steps as the run did, in FP32, and with each change.

    config: the run's, as plain values; mode: its precision. rows: its recorded steps. steps: how
    many; None: at most 400, and as many as take a minute, or an eighth of `seconds`. options: for
    the changes to try, None: try none. changes: overrides, key -> value, smallest first, beside
    those that the casts of the mode suggest, if it has any. seconds: for all of it; a change that
    would take longer is not tried. None: no limit but that minute.
    """
    ends = math.inf if seconds is None else time.perf_counter() + seconds
    built = build(config)
    whole = min(steps or STEPS, built.steps)
    every, longest = max(1, whole // MEASURED), math.inf
    if not steps:
        longest = LONGEST_CONTROL_S if seconds is None else seconds / RUNS
    began = time.perf_counter()
    with CastMeter(built.task, mode, every, early=EARLY) as meter:
        own = _losses(built, whole, longest)
    took = time.perf_counter() - began
    recorded, whole = {row["step"]: row["loss"] for row in rows}, len(own)
    other = (n for n, x in enumerate(own, 1) if n in recorded and not same_loss(x, recorded[n]))
    fp32 = _mean(_losses(build(config | groups_of(*FP32)), whole))
    losses = meter.read()
    casts = sentences(losses, mode.matmul) if losses else [["not measured"]] * bool(meter.layers)
    found = Ending(whole, built.steps, next(other, None), _mean(own), fp32, casts)
    if options is not None and not found.gap <= SMALLEST_GAP:
        trials = _Trials(build, config, options, found, ends - took)
        if meter.layers:
            layers = [*dict.fromkeys(name for name, _ in meter.layers)]
            trials.of_casts(mode, losses, changes, layers)
        else:
            trials.take(changes)
    return found


class _Trials:
    """Train with changes, as long as there is time.

    last: when the last one has to start. They are added to `ending.tried`.
    """

    def __init__(self, build: Build, config: dict, options: Options, ending: Ending, last: float):
        self.build, self.config, self.options = build, config, options
        self.ending, self.last = ending, last

    def take(self, changes: Iterable[dict[str, Any]]) -> list[Tried]:
        """Return the result of each change; one that was tried before is not trained again."""
        done = {one.overrides: one for one in self.ending.tried}
        found = []
        for change, changed in applied(self.config, changes, self.options).items():
            if change not in done:
                late = time.perf_counter() > self.last
                train = partial(_trained, self.build, changed, self.ending)
                no_time = Tried(change, None, "not tried: no time was left")
                done[change] = no_time if late else result_of(change, train)
                self.ending.tried.append(done[change])
            found.append(done[change])
        return found

    def of_casts(
        self,
        mode: PrecisionConfig,
        losses: Losses,
        changes: Iterable[dict[str, Any]],
        layers: list[str],
    ) -> None:
        """Try changes, and the mode without casts; where only that helps, look for the cause."""
        smaller = self.take([*cast_changes(mode.matmul, losses), *changes])
        whole = self.take([without_casts(self.config, self.options)])
        if not any(one.cures for one in smaller) and any(one.cures for one in whole):
            # As if no layer was suited: no verdict is beyond doubt.
            self.take(cast_changes(mode.matmul, losses, bound=0.0))
            self.by_layer(mode, layers)
            self.by_product(mode)
        # The smallest first, of the searches too: it is the one that is recommended.
        rest = [one for one in self.ending.tried if one not in whole]
        self.ending.tried[:] = [*rest, *whole]

    def by_product(self, mode: PrecisionConfig) -> None:
        """Keep each of the three products in the dtype of the mode, in turn."""
        kept = mode.matmul.high_precision
        products = [name for name in PRODUCTS if name not in kept]
        self.take({"precision.matmul.high_precision": [*kept, name]} for name in products)

    def by_layer(self, mode: PrecisionConfig, layers: list[str]) -> None:
        """Leave out each layer in turn; of many, half, and again half of the better half."""
        names, before, key = layers, len(self.ending.tried), "precision.matmul.modules"
        while len(names) > 1:
            half = -(-len(names) // 2)
            parts = [names[:half], names[half:]]
            if len(names) <= _FEW:
                parts = [[name] for name in names]
            found = [(0.0, [""])]
            for part in parts:
                change = {key: without_layers(mode.matmul.modules, layers, part)}
                for one in self.take([change]):
                    if one.loss is not None:
                        found.append((self.ending.part(one.loss), part))
            share, names = max(found)
            if share < PART:
                break
        self.ending.tried[before:] = self.ending.tried[before:][::-1]


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
    part, left = run.part(loss), f"{100 * gap(loss, run.fp32):+.2f} %"
    return part >= PART, f"{left}, {100 * part:.0f} % of the gap taken away", loss

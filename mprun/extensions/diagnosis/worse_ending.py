"""Train a run that ended worse again from its start: which change takes away which part of the gap.

One seed gives no verdict. All arms take the same batches from the same weights, so that a gap to
FP32 of a percent, averaged over the last quarter of the steps, is seldom chance.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mprun.config.schema import PrecisionConfig
from mprun.extensions.diagnosis.casts import (
    CastMeter,
    Losses,
    cast_changes,
    sentences,
    without_layers,
)
from mprun.extensions.diagnosis.interventions import (
    Build,
    Options,
    applied,
    groups_of,
    without_casts,
)
from mprun.extensions.diagnosis.trials import (
    FEW,
    FP32,
    PART_OF_FP32,
    Budget,
    Tried,
    ending,
    result_of,
    taken,
    train,
)
from mprun.numerics.replay import Steps, same_loss
from mprun.precision.scaled_products import PRODUCTS

MEASURED = 12  # steps whose casts are measured, all over the run
EARLY = 24  # each other one up to here too: gradients of logits lose most at the start
SMALLEST_GAP = 0.0025  # of the loss of FP32; a smaller one is not explained
# Of FP32's loss; a change that leaves no more is the last that is tried. In 16 bits no gap up to
# here is explained, or of what FP32 learnt if that is more.
CLOSED = 0.01
PART = 0.5  # of the gap; a change that takes it away helps
STEPS = 400
OWN = 1 / 8  # of the seconds for trials, for the run as it was
_FEW = 4  # layers that are left out in turn; of more, half


@dataclass(frozen=True, slots=True)
class Ending:
    """The first steps of a run, beside FP32.

    first_difference: the first step whose loss is not the recorded one. loss, fp32: mean over the
    last quarter of the steps. casts: see `sentences`, or that none was measured; empty for a mode
    without casts. smallest: a gap up to here is not explained.
    """

    steps: int
    of_steps: int
    first_difference: int | None
    loss: float
    fp32: float
    casts: list[list[str]]
    tried: list[Tried] = field(default_factory=list)
    smallest: float = SMALLEST_GAP

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
        if self.gap <= self.smallest:
            few = self.steps < min(FEW, self.of_steps)
            told = "too few steps to tell (--seconds S, --steps N)"
            result += f", {told if few else 'nothing to explain; more seeds: mprun compare'}"
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
    budget: Budget,
) -> Ending:
    """Train the first steps as the run did, in FP32, and with each change.

    config: the run's, as plain values; mode: its precision. rows: its recorded steps. steps: how
    many; None: at most 400, and as many as take an eighth of the budget. options: for the changes
    to try, None: try none. changes: overrides, key -> value, of any mode; asked for only if there
    is a gap that none of those takes away which the casts of the mode suggest.
    """
    built = build(config)
    whole = min(steps or STEPS, built.steps)
    every, first = max(1, whole // MEASURED), Budget() if steps else budget.part(OWN)
    with CastMeter(built.task, mode, every, early=EARLY) as meter:
        own = train(Steps(built, 0, 0), whole, first).losses
    recorded, whole = {row["step"]: row["loss"] for row in rows}, len(own)
    other = (n for n, x in enumerate(own, 1) if n in recorded and not same_loss(x, recorded[n]))
    reference = train(Steps(build(config | groups_of(*FP32)), 0, 0), whole)
    losses = meter.read()
    casts = sentences(losses, mode.matmul) if losses else [["not measured"]] * bool(meter.names)
    smallest = SMALLEST_GAP if meter.names else CLOSED * _learnt(reference.losses)
    start = (whole, built.steps, next(other, None), ending(own), reference.ending, casts)
    found = Ending(*start, smallest=smallest)
    if options is not None and not found.gap <= found.smallest:
        trials = _Trials(build, config, options, found, budget)
        if meter.names:
            trials.of_casts(mode, losses, [*dict.fromkeys(meter.names)])
        if not any(one.cures for one in found.tried):
            trials.until_closed(changes)
    return found


def _learnt(losses: list[float]) -> float:
    """Return what was learnt as a part of the loss in the end, at least 1.

    A loss that falls fast differs by much where a single update was skipped.
    """
    last = ending(losses)
    return max(1.0, (losses[0] - last) / abs(last)) if last else 1.0


class _Trials:
    """Train with changes, as long as there is time; they are added to `run.tried`."""

    def __init__(self, build: Build, config: dict, options: Options, run: Ending, budget: Budget):
        self.build, self.config, self.options = build, config, options
        self.run, self.budget = run, budget

    def take(self, changes: Iterable[dict[str, Any]]) -> list[Tried]:
        """Return the result of each change; one that was tried before is not trained again."""
        done = {one.overrides: one for one in self.run.tried}
        found = []
        for change, changed in applied(self.config, changes, self.options).items():
            if change not in done:
                done[change] = self._result(change, changed)
                self.run.tried.append(done[change])
            found.append(done[change])
        return found

    def until_closed(self, changes: Iterable[dict[str, Any]]) -> None:
        """Try changes in order, until one leaves nothing worth a further one."""
        enough = max(CLOSED, self.run.smallest)
        for change, changed in applied(self.config, changes, self.options).items():
            self.run.tried.append(own := self._result(change, changed))
            if own.cures and own.loss is not None and gap(own.loss, self.run.fp32) <= enough:
                break

    def _result(self, change: tuple[str, ...], config: dict) -> Tried:
        return result_of(change, partial(self._train, change, config), self.budget)

    def _train(self, change: tuple[str, ...], config: dict) -> Tried:
        course = train(Steps(self.build(config), 0, 0), self.run.steps, self.budget)
        if course.broken or course.cut:
            return taken(course, change, None, self.budget)
        left, part = gap(course.ending, self.run.fp32), self.run.part(course.ending)
        text = f"{100 * left:+.2f} %, {100 * part:.0f} % of the gap taken away"
        cures = part >= PART and left <= PART_OF_FP32
        return Tried(change, cures, text, course.ending, len(course.losses))

    def of_casts(self, mode: PrecisionConfig, losses: Losses, layers: list[str]) -> None:
        """Try changes, and the mode without casts; where only that helps, look for the cause."""
        smaller = self.take(cast_changes(mode.matmul, losses))
        whole = self.take([without_casts(self.config, self.options)])
        if not any(one.cures for one in smaller) and any(one.cures for one in whole):
            # As if no layer was suited: no verdict is beyond doubt.
            self.take(cast_changes(mode.matmul, losses, bound=0.0))
            self.by_layer(mode, layers)
            self.by_product(mode)
        # The smallest first, of the searches too: it is the one that is recommended.
        rest = [one for one in self.run.tried if one not in whole]
        self.run.tried[:] = [*rest, *whole]

    def by_product(self, mode: PrecisionConfig) -> None:
        """Keep each of the three products in the dtype of the mode, in turn."""
        kept = mode.matmul.high_precision
        products = [name for name in PRODUCTS if name not in kept]
        self.take({"precision.matmul.high_precision": [*kept, name]} for name in products)

    def by_layer(self, mode: PrecisionConfig, layers: list[str]) -> None:
        """Leave out each layer in turn; of many, half, and again half of the better half."""
        names, before, key = layers, len(self.run.tried), "precision.matmul.modules"
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
                        found.append((self.run.part(one.loss), part))
            share, names = max(found)
            if share < PART:
                break
        self.run.tried[before:] = self.run.tried[before:][::-1]

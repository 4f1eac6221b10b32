"""Train a change for some steps and judge it: no verb names one that was not tried like this.

All trials take the same batches from the same weights, beside FP32. A trial says how many steps it
took, and ends when the seconds for trials are used up.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mprun.errors import BadInput, MprunError
from mprun.numerics.post_mortem import power
from mprun.numerics.replay import Steps
from mprun.numerics.state import all_finite, carried, weights

FP32 = ("precision=fp32",)
# A scale that has to settle first may skip so many more steps.
PATIENCE = 40
SETTLED = 3  # updates in a row that show it has
# A change holds if its loss is above FP32's by at most this part of it, or of what FP32 learnt in
# these steps if that is more. Rounding moves a loss of 20 or 100 steps by a hundredth.
PART_OF_FP32 = 0.1
FEW, MANY = 20, 100  # steps of a mode that is tried, and where they are cheap


class Budget:
    """Seconds for trials, from now on."""

    def __init__(self, seconds: float = math.inf):
        self.seconds, self.ends = seconds, time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self.ends - time.perf_counter())

    @property
    def spent(self) -> bool:
        return self.left == 0

    def part(self, share: float) -> "Budget":
        """Return this share of what is left, as a budget of its own."""
        return Budget(share * self.left)


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a change, its overrides as typed.

    cures: None if it could not be tried. loss: mean over the last quarter of its `steps`, if all
    were finite.
    """

    overrides: tuple[str, ...]
    cures: bool | None
    result: str
    loss: float | None = None
    steps: int = 0

    @property
    def change(self) -> str:
        """Return its overrides for a reader; formats that are taken away are said in words."""
        nulls = "precision.matmul.input=null" in self.overrides
        return "linear layers without casts" if nulls else " ".join(self.overrides)

    @property
    def taken(self) -> str:
        """Return its number of steps for a reader."""
        return f"{self.steps} step{'s' * (self.steps > 1)}" if self.steps else ""


@dataclass(frozen=True, slots=True)
class Mixed:
    """The parts of a network that leave a mode; `out` is None if no tried set meets the bound.

    bound, gap: to FP32's loss, as a part. products: share of those of layers that leave the mode.
    name, file, command: of the mode file.
    """

    bound: float
    tried: list[Tried]
    out: list[str] | None = None
    overrides: tuple[str, ...] = ()
    gap: float = 0.0
    products: float = 0.0
    name: str = ""
    file: str = ""
    command: str = ""


@dataclass(slots=True)
class Course:
    """Steps as they were trained, as long as all numbers were finite.

    broken: what was not. skipped: updates, in all. applied: updates in a row at the end. is_static:
    a loss scale cannot move. cut: the budget ended it.
    """

    losses: list[float] = field(default_factory=list)
    broken: str = ""
    skipped: int = 0
    applied: int = 0
    step: int = 0
    scale: float = 1.0
    is_static: bool = False
    cut: bool = False

    @property
    def ending(self) -> float:
        return ending(self.losses)


def ending(losses: list[float]) -> float:
    """Return the mean over the last quarter of the steps; NaN of none."""
    last = losses[-max(1, len(losses) // 4) :]
    return sum(last) / len(last) if last else math.nan


def train(
    steps: Steps,
    end: int,
    budget: Budget | None = None,
    *,
    settled: int = 0,
    course: Course | None = None,
) -> Course:
    """Train to step `end`, at least one step, and on until `settled` updates in a row were applied.

    It gives up PATIENCE steps later, or at `end` if the learning rate follows a schedule. course:
    is continued.
    """
    built, found = steps.built, Course() if course is None else course
    task, last = built.task, end + (PATIENCE if settled and built.rate.constant else 0)
    found.is_static = next(iter(task.loss_scales.values())).kind == "static"
    while not found.losses or found.step < (end if found.applied >= settled else last):
        if found.losses and budget is not None and budget.spent:
            found.cut = True
            break
        row = steps.advance()
        found.losses.append(row.loss)
        found.step, found.scale = row.step, row.loss_scale
        if row.diverged:
            found.broken = f"loss {row.loss:g} at step {row.step}"
            break
        if not all_finite((weights(task) | carried(task)).values()):
            what = "weights or LSTM state" if carried(task) else "weights"
            found.broken = f"{what} not finite after step {row.step}"
            break
        found.skipped += row.found_inf
        found.applied = 0 if row.found_inf else found.applied + 1
    return found


def judged(course: Course, limit: float | None, settled: int = 0) -> tuple[bool, str, float | None]:
    """Return whether a course went well, what happened, and its loss; limit: a larger one is not.

    settled: as for `train`.
    """
    if course.broken:
        return False, course.broken, None
    loss, scale = course.ending, power(course.scale)
    if course.applied < min(settled, len(course.losses)):
        return False, f"{course.skipped} updates skipped, still at loss scale {scale}", loss
    if course.skipped and course.is_static:
        return False, f"{course.skipped} updates skipped at the static loss scale {scale}", loss
    if limit is not None and not loss <= limit:
        return False, f"finite, but the loss is {loss:.4g} at step {course.step}", loss
    note = f", {course.skipped} skipped, loss scale then {scale}" if course.skipped else ""
    return True, f"finite up to step {course.step}{note}; loss {loss:.4g}", loss


def bound(fp32: list[float], steps: int) -> float:
    """Return the largest loss that still is as good as FP32's, of its first `steps` steps."""
    losses = fp32[:steps]
    last = ending(losses)
    return last + PART_OF_FP32 * max(abs(last), losses[0] - last)


def taken(course: Course, overrides: tuple[str, ...], limit: float | None, budget: Budget) -> Tried:
    """Return the result of a change whose steps these are."""
    steps = len(course.losses)
    if course.cut and not course.broken:
        cut = f"cut off after {steps} steps, the {budget.seconds:g} seconds are used up"
        return Tried(overrides, None, cut, None, steps)
    return Tried(overrides, *judged(course, limit, SETTLED), steps)


def result_of(overrides: tuple[str, ...], run: Callable[[], Tried], budget: Budget) -> Tried:
    """Return what `run` does with a change, or why it could not be tried."""
    if budget.spent:
        return Tried(overrides, None, f"not tried, the {budget.seconds:g} seconds are used up")
    try:
        return run()
    except BadInput as error:
        return Tried(overrides, None, f"does not apply: {error}")
    except (MprunError, RuntimeError, ValueError) as error:
        return Tried(overrides, None, f"could not run: {str(error).partition(chr(10))[0]}")


class BesideFp32:
    """Trials of whole modes, from the start of a run, beside FP32.

    build: builds the run in a mode, as typed. Each takes FEW steps, fewer if FP32 takes a third of
    the budget for them, and up to MANY where FP32 takes them in a twelfth of it.
    """

    def __init__(self, build: Callable[[tuple[str, ...]], Any], budget: Budget):
        self.build, self.budget = build, budget
        steps = Steps(build(FP32), 0, 0)
        few, many = (min(count, steps.built.steps) for count in (FEW, MANY))
        own = self.fp32 = train(steps, few, budget.part(1 / 3))
        if not (own.broken or own.cut):
            train(steps, many, budget.part(1 / 12), course=own)

    def until_one_holds(self, modes: Iterable[tuple[str, ...]]) -> list[Tried]:
        """Try modes in order; the last of the results is the one that holds, if one does."""
        found: list[Tried] = []
        for mode in modes:
            found.append(self.result(mode))
            if found[-1].cures:
                break
        return found

    def result(self, mode: tuple[str, ...], limit: float | None = None) -> Tried:
        """Return what a mode does; limit: a larger loss fails, None: FP32's bound."""
        if mode == FP32:
            self.fp32.cut = False  # as many as there are
            return taken(self.fp32, mode, None, self.budget)
        return result_of(mode, partial(self._train, mode, limit), self.budget)

    def _train(self, mode: tuple[str, ...], limit: float | None) -> Tried:
        count, fp32 = len(self.fp32.losses), self.fp32
        course = train(Steps(self.build(mode), 0, 0), count, self.budget, settled=SETTLED)
        if limit is None and not fp32.broken:
            limit = bound(fp32.losses, count)
        return taken(course, mode, limit, self.budget)

"""Decide on one mode against the baseline; `sentence` puts what was found into words.

The steps: divergence, the outcome of each run, the pairing by seed, the margin, and the equivalence
test, at fixed seeds or at planned looks.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from mprun.comparison import equivalence
from mprun.comparison.divergence import (
    baseline_progress,
    outcomes,
    refuse_other_lengths,
)
from mprun.comparison.equivalence import FEWEST_SEEDS, Interval
from mprun.comparison.findings import Arm, Outcome, Question
from mprun.comparison.looks import hopeless, nominal_alpha, spent_alphas
from mprun.comparison.one_pair import pair_facts
from mprun.comparison.planned import more_needed
from mprun.comparison.wording import number_of
from mprun.errors import BadInput

GAN_LOSSES = ("loss", "d_loss", "g_loss")
CONCLUSIVE = ("matches", "worse", "better")


@dataclass(frozen=True, slots=True)
class Values:
    """The judged values of both arms after pairing: seeds ascending, lower is better."""

    question: Question
    arms: tuple[Arm, Arm]  # the mode, the baseline
    method: str  # "paired" or "Welch"
    own_seeds: list[int]
    base_seeds: list[int]
    own: list[float]
    base: list[float]

    @property
    def fewest(self) -> int:
        """Return the number of seeds of the smaller arm."""
        return min(len(self.own), len(self.base))

    def first(self, count: int) -> "Values":
        """Return those of the first seeds of each arm."""
        names = ("own_seeds", "base_seeds", "own", "base")
        return replace(self, **{name: getattr(self, name)[:count] for name in names})


@dataclass(frozen=True, slots=True)
class Margin:
    """A margin in the unit of an interval, and what both are multiples of (1 if absolute)."""

    size: float
    whole: float


@dataclass(frozen=True, slots=True)
class Tested:
    """The result of a test.

    least: half the interval, the smallest margin that so many seeds could show, if they decide
    nothing because of it. unconfirmed: the p of a permutation test that does not confirm the claim.
    """

    name: str
    values: Values
    interval: Interval
    margin: Margin
    alpha: float
    least: float | None = None
    unconfirmed: float | None = None


@dataclass(frozen=True, slots=True)
class TooFew:
    """Fewer seeds than a test needs, with what is known so far."""

    values: Values
    wanted: int
    difference: float | None
    margin: Margin | None


@dataclass(frozen=True, slots=True)
class Look:
    """The look of a plan that decided, or the last one that had enough seeds."""

    at: int
    plan: tuple[int, ...]
    available: int  # seeds
    spending: bool = False  # of a sweep until decided, not of `--looks`
    hopeless: int | None = None  # about so many seeds would decide, so that the sweep stops

    @property
    def following(self) -> int | None:
        """Return the next look; None: it was the last."""
        return next((other for other in self.plan if other > self.at), None)


@dataclass(slots=True, kw_only=True)
class Decision:
    """All that a verdict and its sentence say of one mode.

    unlearned: the numbers that show that the baseline learned nothing. values, result: None if no
    test was needed. unpaired: the test of all runs, where pairing left out some. facts: of one run
    each.
    """

    name: str
    question: Question
    arms: tuple[Arm, Arm]
    ends: tuple[list[Outcome], list[Outcome]]  # of the mode, of the baseline
    unlearned: str | None = None
    values: Values | None = None
    result: Tested | TooFew | None = None
    look: Look | None = None
    unpaired: Tested | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def left_out(self) -> list[str]:
        """Return the parts of the runs that were not judged, in words."""
        mode, baseline = self.arms
        return list(dict.fromkeys(mode.left_out + baseline.left_out))

    @property
    def alone(self) -> tuple[list[int], list[int]]:
        """Return the seeds of both arms that have no partner and were left out."""
        if (values := self.values) is None:
            return [], []
        own, base = self.ends
        pairs = (own, values.own_seeds), (base, values.base_seeds)
        of_own, of_base = ([o.seed for o in arm if o.seed not in seeds] for arm, seeds in pairs)
        return of_own, of_base

    @property
    def needed(self) -> int | None:
        """Return about how many more seeds would decide; None: enough, or not reachable."""
        if isinstance(self.result, TooFew):
            return self.result.wanted - self.result.values.fewest
        if self.result is None or self.name in CONCLUSIVE:
            return None
        if self.look is not None and self.look.spending:
            ends = self.look.plan[0], self.look.plan[-1]
            return more_needed(self.result.interval, self.result.margin.size, *ends)
        if self.look is not None:
            following = self.look.following
            return None if following is None else following - self.look.available
        if self.name != "inconclusive":
            return None
        return equivalence.seeds_needed(self.result.interval, self.result.margin.size)


def decide(arm: Arm, baseline: Arm, question: Question) -> Decision:
    """Compare `arm` with `baseline`.

    Raises BadInput for a metric that a run did not record, for runs of different length, and for a
    relative margin around 0.
    """
    arms = arm, baseline
    ends = outcomes(arm, baseline, question), outcomes(baseline, baseline, question)
    decision = Decision(name="", question=question, arms=arms, ends=ends)
    _decide_beforehand(decision)
    if decision.name:
        return decision
    refuse_other_lengths(arm, baseline, question.window)
    decision.values = values = _values(question, arms, ends, question.by_seed)
    if question.looks:
        _decide_at_looks(decision, values)
    else:
        enough = values.fewest >= FEWEST_SEEDS
        decision.result = tested(values) if enough else _too_few(values, FEWEST_SEEDS)
    result = decision.result
    decision.name = result.name if isinstance(result, Tested) else "inconclusive"
    is_pair = not question.spending and len(values.own) == 1
    if is_pair and [o.seed for o in ends[0]] == [o.seed for o in ends[1]]:
        outcome = values.own[0] - values.base[0], values.base[0]
        decision.facts = pair_facts(arm.runs[0], baseline.runs[0], question, outcome)
        decision.name = "one pair"
    if any(decision.alone) and not question.spending:
        everything = _values(question, arms, ends, by_seed=False)
        with suppress(BadInput):  # the runs that were compared do have a margin
            if everything.fewest >= FEWEST_SEEDS:
                decision.unpaired = tested(everything)
    return decision


def pairing(
    own: Sequence[int], base: Sequence[int], by_seed: bool = True
) -> tuple[str, list[int], list[int]]:
    """Return ("paired" or "Welch", the mode's seeds used, the baseline's), seeds ascending.

    The test is paired if at least 3 seeds are shared or one list contains the other; else, and
    without `by_seed`, it is Welch's, over all seeds. Only the seed lists decide, never which
    interval comes out shorter.
    """
    shared = set(own) & set(base)
    enough = len(shared) >= FEWEST_SEEDS or len(shared) == min(len(set(own)), len(set(base)))
    if by_seed and enough:
        return "paired", sorted(shared), sorted(shared)
    return "Welch", sorted(own), sorted(base)


def _decide_beforehand(decision: Decision) -> None:
    """Set the name of a verdict that needs no test."""
    question, (own, base) = decision.question, decision.ends
    if any(outcome.diverged is not None for outcome in base):
        decision.name = "invalid baseline"
    elif any(outcome.diverged is not None for outcome in own):
        decision.name = "diverged"
    elif question.gan and question.metric in GAN_LOSSES:
        decision.name = "not assessed"
    else:
        of_gan = {"gan": question.gan, "higher_is_better": question.higher_is_better}
        runs = decision.arms[1].runs
        decision.unlearned = baseline_progress(runs, question.metric, **of_gan)
        if decision.unlearned is not None:
            decision.name = "invalid baseline"


def _values(
    question: Question, arms: tuple[Arm, Arm], ends: Sequence[list[Outcome]], by_seed: bool
) -> Values:
    """Return the values to test; `by_seed`: paired if equal seeds allow it, else Welch over all."""

    def judged(value: float) -> float:
        """Convert to the tested unit; lower is better."""
        value = math.log(value) if question.as_logarithm else value
        return -value if question.higher_is_better else value

    of_own, of_base = ({one.seed: judged(one.value) for one in arm} for arm in ends)
    method, own_seeds, base_seeds = pairing(list(of_own), list(of_base), by_seed)
    if question.spending:  # its alphas are those of pairs
        shared = sorted(of_own.keys() & of_base)
        method, own_seeds, base_seeds = "paired", shared, shared
    values = [of_own[seed] for seed in own_seeds], [of_base[seed] for seed in base_seeds]
    return Values(question, arms, method, own_seeds, base_seeds, *values)


def _margin(values: Values) -> Margin:
    """Return the margin.

    Raises BadInput for a relative margin if the mean cannot be told from 0, without one run that
    stands out, and for an absolute margin of half a mean that can, or more.
    """
    question, baseline = values.question, values.arms[1]
    setting = question.margin_setting
    mean = abs(math.fsum(values.base) / len(values.base))
    place = equivalence.outlier(values.base)
    usual = [value for i, value in enumerate(values.base) if i != place]
    zero = mean == 0
    if len(usual) >= FEWEST_SEEDS:
        found = equivalence.paired_interval(usual, [0.0] * len(usual))
        zero = found.low <= 0 <= found.high
    asked = f"{'--margin ' if baseline.foreign else 'compare.margin='}{setting:g}"
    log = "log " if question.as_logarithm else ""
    metric = f"{log}{question.metric}"
    if question.relative:
        if zero:
            raise BadInput(
                f"{asked}: cannot be a share of the mean {metric} of {baseline.reference}, "
                f"{mean:.3g}, which {number_of(len(values.base), question.counted)} cannot "
                "distinguish from 0. Pass --margin X --absolute, in the unit of the metric"
            )
        return Margin(setting, mean)
    if setting >= mean / 2 and not zero:
        raise BadInput(
            f"{asked}: an absolute margin must be below {mean / 2:.3g}, half of the mean {metric} "
            f"of {baseline.reference}. "
            "For a metric from 0 to 1, half a percentage point is 0.005"
        )
    return Margin(setting, 1.0)


def tested(values: Values, alpha: float = equivalence.ALPHA) -> Tested:
    """Test whether the arms differ by less than the margin; BadInput: see `decide`."""
    margin, relative = _margin(values), values.question.relative
    interval = equivalence.estimate(values.own, values.base, values.method, relative, alpha)
    name = equivalence.decide(interval, margin.size)
    if name in CONCLUSIVE:
        p = _unconfirmed(name, values, margin.size, alpha)
        return Tested(name, values, interval, margin, alpha, unconfirmed=p)
    half = (interval.high - interval.low) / 2
    least = half if margin.size < half < math.inf else None
    return Tested(name, values, interval, margin, alpha, least=least)


def _decide_at_looks(decision: Decision, values: Values) -> None:
    """Take the first conclusive look of the plan, else the last one with enough seeds."""
    plan, available = tuple(values.question.looks), values.fewest
    taken = [look for look in plan if look <= available]
    if not taken:
        decision.result = _too_few(values, plan[0])
        return
    if not values.question.by_seed:
        if len(values.own) != len(values.base) or taken[-1] != available:
            raise BadInput(
                f"--looks {','.join(map(str, plan))}: {len(values.own)} and {len(values.base)} "
                "runs record no seeds, so mprun cannot choose the runs for each number of seeds. "
                f"Pass the same number of runs for both labels, {' or '.join(map(str, plan))}, or "
                "name the seeds"
            )
        taken = taken[-1:]  # the earlier looks were taken when there were no more runs
    spending, enough = values.question.spending, None
    alphas = spent_alphas(plan[0], plan[-1]) if spending else [nominal_alpha(plan)] * len(plan)
    for look in taken:
        found = tested(values.first(look), alphas[plan.index(look)])
        if spending:
            enough = hopeless(found.interval, found.margin.size, plan[-1])
        decision.result = found
        decision.look = Look(look, plan, available, spending, enough)
        if found.name in CONCLUSIVE:
            break


def _unconfirmed(name: str, values: Values, margin: float, alpha: float) -> float | None:
    """Return the p of a claim that a test without assumptions on the noise does not confirm."""
    paired, margins = values.method == "paired", [margin] * len(values.base)
    if values.question.relative:  # each value's own share, so that those of both arms scatter alike
        sign = math.copysign(1.0, math.fsum(values.base))
        margins = [sign * margin * value for value in values.base]
    p, least = equivalence.permutation_p(name, values.own, values.base, paired, margins)
    # Six pairs, or 3 and 3 runs, have too few rearrangements: a single one would decide.
    return None if least > alpha / 5 or p <= alpha else p


def _too_few(values: Values, wanted: int) -> TooFew:
    """Return the difference so far, and the margin if it is known."""
    difference = margin = None
    if values.fewest:
        own, base = (math.fsum(arm) / len(arm) for arm in (values.own, values.base))
        difference = own - base
    # A relative margin needs a mean; an arm may have no run.
    if values.base and (any(values.base) or not values.question.relative):
        margin = _margin(values)
    return TooFew(values, wanted, difference, margin)

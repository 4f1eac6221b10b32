"""The rounds of a sweep until decided: which seeds come next, and what is known of each mode.

Round 1 has the first look's seeds of every mode. Each further round has one seed, of the modes that
are still open and of their baselines. `mprun -m` and `mprun.sweep` of a script share it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mprun.comparison.decision import CONCLUSIVE
from mprun.comparison.findings import Arm, Verdict
from mprun.comparison.grouping import ProtoGroup, group_runs
from mprun.comparison.load import load_runs
from mprun.comparison.looks import NEVER
from mprun.comparison.verdict import assess
from mprun.comparison.wording import seeds_text
from mprun.errors import BadInput
from mprun.record.seed_plan import SeedPlan

MOST_MISSING = 3  # runs without an outcome, after which a mode gets no more seeds
OVER_ALL = "(planned looks, 5 % over all)"
REPEATED = "its runs repeat those of an equal configuration"


@dataclass(slots=True)
class SweptArm:
    """A mode of one configuration in a sweep until decided.

    seeds: those whose runs have ended, with an outcome or without.
    baseline: its baseline, itself for a baseline; None until its runs have told which it is.
    """

    name: str  # "amp", "amp optim.lr=0.1"
    plan: SeedPlan
    text: str = "no run yet"
    open: bool = True
    seeds: set[int] = field(default_factory=set)
    baseline: "SweptArm | None" = None

    @property
    def is_baseline(self) -> bool:
        """Return whether others are judged against it."""
        return self.baseline is self


class Rounds:
    """The rounds; `arms` may be of several configurations, which are judged apart."""

    def __init__(self, arms: Sequence[SweptArm]):
        self.arms, self.count = arms, 0
        self.news: list[str] = []  # a line for each mode that the newest judgement is news of

    def following(self) -> list[tuple[int, int]]:
        """Return place in `arms` and seed of each run of the next round; []: all are decided."""
        self.count += 1
        wanted = [(place, seed) for place, seeds in self._wanted() for seed in seeds]
        return sorted(wanted, key=lambda one: one[1])

    def _wanted(self) -> Iterator[tuple[int, Sequence[int]]]:
        for place, arm in enumerate(self.arms):
            plan, before = arm.plan, arm.plan.first + self.count - 2
            if self.count == 1:
                yield place, plan.seeds[: plan.first]
            elif self._goes_on(arm):
                yield place, plan.seeds[before : before + 1]

    def _goes_on(self, arm: SweptArm) -> bool:
        if not arm.is_baseline:
            return arm.open
        return any(one.open for one in self.arms if one.baseline is arm and one is not arm)

    def judge(
        self,
        ended: Mapping[tuple[int, int], Path],
        failed: Collection[tuple[int, int]] = (),
    ) -> None:
        """Judge every mode by its runs, named by place in `arms` and seed.

        ended: The directory of each with an outcome. failed: Those that ended without one.
        """
        before = [arm for arm in self.arms if arm.open]
        known = {place for place, _ in ended}
        for place, arm in enumerate(self.arms):
            arm.open, arm.baseline = False, None
            # Whatever judges its runs says more; a repeat of a run is not judged.
            arm.text = REPEATED if place in known else "no run has an outcome"
            arm.seeds = {seed for own, seed in (*ended, *failed) if own == place}
        if ended:
            try:
                self._judge(ended)
            except BadInput as error:
                for place, _ in ended:
                    self.arms[place].text = f"not judged: {error}"
        for place, arm in enumerate(self.arms):
            if missing := {seed for own, seed in failed if own == place}:
                self._without(arm, missing)
        self.news = [f"{arm.name}: {arm.text}" for arm in before if not arm.is_baseline]

    def _without(self, arm: SweptArm, missing: set[int]) -> None:
        """Say which seeds of an arm have no outcome; without too many of them it gets no more."""
        few = f"no outcome of seed{'s' * (len(missing) > 1)} {seeds_text(missing)}"
        whose = f" of {arm.name}" * arm.is_baseline
        for one in self.arms:
            is_it = one is arm or (arm.is_baseline and one.baseline is arm)
            if is_it and one.open and len(missing) >= MOST_MISSING:
                one.open, one.text = False, f"not decided, {few}{whose}"
            elif one is arm:
                one.text += f"; {few}"

    def _judge(self, ended: Mapping[tuple[int, int], Path]) -> None:
        place_of = {str(path): place for (place, _), path in ended.items()}
        protos, refused = group_runs(load_runs([*ended.values()])[0])
        for place in place_of.values() if refused else ():
            self.arms[place].text = f"not judged: {refused[0]}"
        for proto in protos:
            self._judge_group(proto, place_of)

    def _judge_group(self, proto: ProtoGroup, place_of: Mapping[str, int]) -> None:
        def swept(arm: Arm) -> SweptArm | None:
            places = [place_of[run.path] for run in arm.runs if run.path in place_of]
            return self.arms[places[0]] if places else None

        baseline = swept(proto.baseline)
        if baseline is None:
            return
        baseline.baseline, baseline.text = baseline, "baseline"
        try:
            group = assess(proto)
        except BadInput as error:
            for one in filter(None, map(swept, proto.arms)):
                one.text, one.baseline = f"not judged: {error}", baseline
            return
        for row in group.rows:
            if (own := swept(row.arm)) is not None:
                own.baseline = baseline
                seeds_left = {*own.plan.seeds} - (own.seeds & baseline.seeds)
                own.open, own.text = _state(row.verdict, own.plan, bool(seeds_left))

    def lines(self) -> list[str]:
        """Return "amp: matches after 4 of at most 10 seeds ..." for each mode but baselines."""
        return [f"{arm.name}: {arm.text}" for arm in self.arms if not arm.is_baseline]


def _state(verdict: Verdict, plan: SeedPlan, seeds_left: bool) -> tuple[bool, str]:
    """Return whether a mode needs more seeds, and what is known of it."""
    look, of_most = verdict.look, f"of at most {plan.most} seeds"
    if verdict.name in CONCLUSIVE:
        return False, f"{verdict.name} after {look} {of_most} {OVER_ALL}"
    if verdict.name in ("diverged", "invalid baseline", "not assessed"):
        start = f"{verdict.name}: " * (verdict.name == "invalid baseline")
        return False, start + verdict.sentence.rstrip(".")
    likely = f" ({verdict.name})" * verdict.name.startswith("likely")
    if verdict.hopeless is not None and look != plan.most:
        about = "over" if verdict.hopeless >= NEVER else "about"
        return False, f"stopped after {look}: needs {about} {verdict.hopeless:,} seeds{likely}"
    if not seeds_left:
        return False, f"undecided after {len(verdict.seeds) if look is None else look}{likely}"
    if look is None:
        return True, f"open, {len(verdict.seeds)} {of_most}"
    if verdict.needed is None:
        return True, f"open, look at {look} {of_most}{likely}, which may not be enough"
    return True, f"open, needs about {verdict.needed} more{likely}"

"""Arms of a sweep until decided: their plan, the runs that belong to it, what is still needed.

A mode's word is that of its first conclusive look, at its first so many seeds. So it stays, though
the baseline gets further seeds for other modes, and though runs outside of the plan come later.
"""

from dataclasses import replace

from mprun.comparison.equivalence import Interval, half_width
from mprun.comparison.findings import Arm
from mprun.comparison.looks import spent_alphas
from mprun.comparison.wording import seeds_text
from mprun.errors import BadInput
from mprun.record.seed_plan import SeedPlan


def of_plan(arm: Arm, baseline: Arm) -> tuple[SeedPlan | None, Arm, Arm]:
    """Return the plan in the records of a mode's runs, and both arms with the runs that it judges.

    None: no run has one, and the arms are as given. The mode's runs without it are left out, which
    its arm says. Of the baseline those count whose seeds the mode had; their own plan does not
    matter, since they tell nothing of the mode. BadInput if its runs have several plans.
    """
    plans = [plan for run in arm.runs if (plan := SeedPlan.of_keys(run.keys)) is not None]
    if not plans:
        return None, arm, baseline
    plan = plans[0]
    if other := next((one for one in plans if one != plan), None):
        raise BadInput(
            f"{arm.label}: the runs have two plans, seeds {_span(plan)} and {_span(other)}; pass "
            "only the runs of one plan"
        )
    of_it = [
        run for run in arm.runs if SeedPlan.of_keys(run.keys) == plan and run.seed in plan.seeds
    ]
    outside = [run for run in arm.runs if all(run is not one for one in of_it)]
    last = max(run.seed for run in of_it)
    last = max([last, *(seed for seed in arm.missing if seed in plan.seeds)])
    shared = [run for run in baseline.runs if plan.seed <= run.seed <= last]
    left_out = list(arm.left_out)
    if outside:
        several = "s" * (len(outside) > 1)
        seeds = seeds_text(run.seed for run in outside)
        left_out.append(f"seed{several} {seeds} of {arm.label}, recorded outside of its plan")
    return (
        plan,
        replace(arm, runs=of_it, left_out=left_out),
        replace(baseline, runs=shared or baseline.runs),
    )


def _span(plan: SeedPlan) -> str:
    return f"{plan.seed} to {plan.seeds[-1]} (looks from {plan.first} to {plan.most})"


def more_needed(interval: Interval, margin: float, first: int, most: int) -> int | None:
    """Return about how many more seeds decide at the plan's alphas; None: no look up to `most`.

    As `equivalence.seeds_needed`: difference and scatter stay as they are.
    """
    distance = abs(interval.difference)
    allowed = margin - distance if distance < margin else distance / 2
    count = min(interval.counts)
    for look, alpha in zip(range(first, most + 1), spent_alphas(first, most), strict=True):
        if look > count and half_width(interval, (look, look), alpha) <= allowed:
            return look - count
    return None

"""What the runs are judged by, fixed before them: the group `compare` of the configuration."""

from dataclasses import dataclass

from mprun.config.fields import count, positive, setting
from mprun.record.keys import JUDGED, LABEL


@dataclass(slots=True)
class CompareConfig:
    """The subject of a verdict; fixed before the runs."""

    # Composing the configuration fills in this and the margin.
    metric: str | None = setting(
        None, "Metric of the final evaluation to judge; null: top1 for classifiers, else loss"
    )
    margin: float | None = positive(
        None, "Difference that still matches: share of baseline's mean, or in the metric's unit"
    )
    higher_is_better: bool | None = setting(
        None, "Direction of a metric that its task does not declare; null: as declared", role=JUDGED
    )
    baseline: str = setting("fp32", "Precision mode against which the others are judged")
    window: int = count(1, "Number of last evaluations to average into a run's outcome")
    plan: list[int] | None = setting(
        None,
        "First seed, seeds of the first look, most seeds; -m until=decided sets it; null: no looks",
        role=LABEL,
    )

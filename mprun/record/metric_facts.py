"""Metrics of an evaluation: which way is better, in which unit, and what follows from that.

Whatever orders two values of a metric, or shows a difference, asks a `Metric`. A task declares its
metrics where it is registered (`TaskKind.metrics`), a user's class in its attribute `metrics`. The
record of a run holds them, so that its readers need no code of the task.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from mprun.errors import BadInput
from mprun.spelling import did_you_mean, meant

# Unit -> the margin of "matches" if none is set. Margins are judged, not derived. Half a point of
# top-1 is above the seed noise of published ResNet-50 runs (0.15 points).
_MARGINS = {
    "relative": 0.01,  # differences in percent of the baseline's mean: losses, distances
    "perplexity": 0.01,  # the same of its logarithm, which is a loss
    "points": 0.5,  # in percent; differences in percentage points
    "fraction": 0.005,  # from 0 to 1; differences as they are
    "own": None,  # another unit, with differences in it; there is no usual margin
}
_RELATIVE = ("relative", "perplexity")
_MOST = 0.5  # margins of these units are below it
# Words in a name that tell the direction of a metric that nobody declares.
_LOWER = ("loss losses error err perplexity ppl nll bpb bpc mse mae rmse wer cer fid kl").split()
_HIGHER = ("acc accuracy top score reward return auc precision recall bleu psnr ssim").split()


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with its direction and unit.

    Args:
        name: the key in what `evaluate` returns.
        higher_is_better: False for losses, errors and distances.
        unit: "relative", "perplexity", "points" (a value in percent), "fraction" (from 0 to 1), or
            "own", whose margin a configuration must set.
        margin: of "matches" where a configuration sets none, in that unit; None: the unit's.
        counts_samples: the value is a share of the evaluated samples, so that one of them is the
            smallest difference.

    Raises:
        ValueError: a fact is missing or unknown.
    """

    name: str
    _: KW_ONLY
    higher_is_better: bool
    unit: str
    margin: float | None = None
    counts_samples: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.higher_is_better, bool):
            raise ValueError(f"metric {self.name}: higher_is_better must be True or False")
        if self.unit not in _MARGINS:
            allowed = ", ".join(_MARGINS)
            raise ValueError(f"metric {self.name}: unit={self.unit!r}: must be one of {allowed}")
        if self.margin is not None and not self.margin > 0:
            raise ValueError(f"metric {self.name}: margin={self.margin}: must be above 0")

    @property
    def relative(self) -> bool:
        """True if differences and margins are shares of the baseline's mean."""
        return self.unit in _RELATIVE

    @property
    def direction(self) -> str:
        """The word before the name in "more f1 is better"."""
        return "more" if self.higher_is_better else "less"

    def margin_on(self, data: str | None) -> float | None:
        """Return the margin on the data source `data` where none is set; None: one must be."""
        if self.margin is not None or (usual := _MARGINS[self.unit]) is None:
            return self.margin
        # One of 360 held-out digits is 0.28 points.
        return 2 * usual if self.counts_samples and data == "digits" else usual

    def check_margin(self, margin: float | None, data: str | None) -> None:
        """Raise BadInput for a `compare.margin` that this unit cannot have."""
        if margin is None and self.margin_on(data) is None:
            raise BadInput(
                f"compare.margin=null: {self.name} needs a margin, in the unit of the metric"
            )
        if margin is not None and margin >= _MOST and (self.relative or self.unit == "fraction"):
            of = "relative to the baseline's mean, 0.01 means 1 %"
            of = of if self.relative else "of a fraction half a point is 0.005"
            raise BadInput(f"compare.margin={margin:g}: must be below {_MOST}; {of}")


# Of several tasks.
LOSS = Metric("loss", higher_is_better=False, unit="relative")
PERPLEXITY = Metric("perplexity", higher_is_better=False, unit="perplexity")


def told_by_name(name: str) -> bool | None:
    """Return whether a name says that more is better ("val/acc"); None: it does not say."""
    words = _words(name)
    higher, lower = bool(words & set(_HIGHER)), bool(words & set(_LOWER))
    return None if higher == lower else higher


def stated(name: str, higher_is_better: bool) -> Metric:
    """Return a metric of which only name and direction are known.

    Less is better: differences are relative. More is better: they are in the metric's own unit.
    """
    if higher_is_better:
        return Metric(name, higher_is_better=True, unit="own")
    words = _words(name)
    of_log = words & {"perplexity", "ppl"} and "log" not in words
    return Metric(name, higher_is_better=False, unit="perplexity" if of_log else "relative")


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


def with_judged(
    declared: Sequence[Metric], compare: Any, task: str, data: str | None, *, closed: bool
) -> dict[str, Metric]:
    """Return name -> metric of a run, the judged one among them.

    declared: what the task declares. compare: the `CompareConfig`. closed: the task returns nothing
    but what it declares. BadInput if nobody says which way the judged metric goes, or two
    contradict each other.
    """
    found: dict[str, Metric] = {}
    for metric in declared:
        if (other := found.setdefault(metric.name, metric)) != metric:
            one, two = asdict(other), asdict(metric)
            key = next(key for key in one if one[key] != two[key])
            raise BadInput(
                f"model.task={task}: metrics declares {metric.name} twice, with {key}={one[key]} "
                f"and {two[key]}; must declare it once"
            )
    name, higher = compare.metric, compare.higher_is_better
    if name not in found:
        if closed:
            must = f"must be one of {', '.join(found)} for {task}"
            raise BadInput(f"compare.metric={name}: {must}")
        if higher is None:
            hint = did_you_mean(meant(name, found))
            raise BadInput(
                f"compare.metric={name}: {hint}{(' ' if hint else '')}{task} declares "
                f"{', '.join(found)}; for another metric set compare.higher_is_better=false, or "
                "compare.higher_is_better=true with compare.margin=X"
            )
        found[name] = stated(name, higher)
    elif higher not in (None, found[name].higher_is_better):
        raise BadInput(
            f"compare.higher_is_better={str(higher).lower()}: {task} declares that "
            f"{found[name].direction} {name} is better (allowed: null)"
        )
    found[name].check_margin(compare.margin, data)
    return found


def as_record(metrics: Mapping[str, Metric], data: str | None) -> dict[str, dict[str, Any]]:
    """Return the field `metrics` of run.json, with margins on the data source `data`.

    The margins are recorded because a later default must not move a verdict.
    """
    return {
        name: {
            "higher_is_better": metric.higher_is_better,
            "unit": metric.unit,
            "margin": metric.margin_on(data),
            "counts_samples": metric.counts_samples,
        }
        for name, metric in metrics.items()
    }

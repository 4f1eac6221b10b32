"""Numbers and short answers as text, the same in the console, report.md and report.html."""

import math
from collections.abc import Iterable

from mprun.compare.equivalence import decimals_for
from mprun.compare.findings import Group, Row, Verdict

_PERCENT_METRICS = ("top1", "top5")


def value_text(value: float | None) -> str:
    """Four significant digits; empty for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def mean_text(row: Row) -> str:
    """The mean, and of how many runs if some diverged: "0.5052 (2 of 5)"."""
    text, ended = value_text(row.mean), sum(outcome.diverged is None for outcome in row.outcomes)
    return (
        text
        if not text or ended == len(row.outcomes)
        else f"{text} ({ended} of {len(row.outcomes)})"
    )


def unit(group: Group) -> str:
    """Of the differences that `scaled` gives: "%", "points" or nothing."""
    if group.relative:
        return "%"
    return "points" if group.metric in _PERCENT_METRICS else ""


def scaled(group: Group, verdict: Verdict, value: float | None) -> float | None:
    """A difference of a verdict in the unit that people read: % of the baseline, or as it is.

    The margin in the verdict's unit is margin_setting times the baseline's mean, which gives that
    mean as it was judged (the logarithm, for perplexity).
    """
    if value is None or not group.relative:
        return value
    if verdict.margin and math.isfinite(verdict.margin):
        return 100 * value * group.margin_setting / verdict.margin
    mean = group.baseline.mean
    if mean is None or not math.isfinite(mean) or mean == 0 or group.metric == "perplexity":
        return None
    return 100 * value / abs(mean)


def difference_text(group: Group, verdict: Verdict) -> str:
    """ "+0.04 % (-0.12 to +0.20)"; without an interval the difference alone, else empty."""
    middle, low, high = (
        scaled(group, verdict, value) for value in (verdict.difference, verdict.low, verdict.high)
    )
    if middle is None or not math.isfinite(middle):
        return ""
    suffix = f" {unit(group)}" if unit(group) else ""
    digits = decimals_for((100 if group.relative else 1) * group.margin_setting)
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return f"{_signed(middle, digits)}{suffix}"
    return f"{_signed(middle, digits)}{suffix} ({_signed(low, digits)} to {_signed(high, digits)})"


def margin_text(group: Group) -> str:
    """The margin as it was set: "1 % of FP32's mean", "0.5 points"."""
    if group.relative:
        return f"{100 * group.margin_setting:g} % of {baseline_name(group)}'s mean"
    return f"{group.margin_setting:g} {unit(group)}".rstrip()


def baseline_name(group: Group) -> str:
    """ "FP32" for the usual baseline, otherwise its label."""
    label = group.baseline.arm.label
    return "FP32" if label == "fp32" else label


def answer(group: Group, row: Row) -> str:
    """What a reader wants to know of one mode, in one short sentence."""
    name, label, base = row.verdict.name, row.arm.label, baseline_name(group)
    lost = [outcome for outcome in row.outcomes if outcome.diverged]
    match name:
        case "matches":
            return f"{label} matches {base}."
        case "worse" | "better":
            return f"{label} is {name} than {base}."
        case "likely worse" | "likely better":
            return f"{label} is {name} than {base}."
        case "diverged":
            return f"{label} diverged in {len(lost)} of {len(row.outcomes)} runs."
        case "invalid baseline":
            return f"{label} cannot be judged: {base} itself diverged."
        case "inconclusive" if row.verdict.needed:
            return f"{label} is undecided: it needs about {row.verdict.needed} more seeds."
        case "inconclusive":
            return f"{label} is undecided."
        case _:
            return f"{label}: {name}."


def metric_name(group: Group) -> str:
    """With its window, for headings."""
    if group.window > 1:
        return f"{group.metric} (mean of the last {group.window} evaluations)"
    return group.metric


def level_text(group: Group) -> str:
    """The confidence of the group's intervals: "90 %", or "94 to 97 %" where looks differ."""
    levels = sorted({row.verdict.level for row in group.rows}) or [0.90]
    texts = list(dict.fromkeys(f"{100 * level:.3g}" for level in (levels[0], levels[-1])))
    return " to ".join(texts) + " %"


def seeds_text(seeds: Iterable[int]) -> str:
    """Runs of neighbours joined: [0, 1, 2, 5] -> "0-2, 5"."""
    spans: list[list[int]] = []
    for seed in sorted(seeds):
        if spans and seed == spans[-1][1] + 1:
            spans[-1][1] = seed
        else:
            spans.append([seed, seed])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def ratio_text(ratio: float | None) -> str:
    """ "1.24x"; empty for None."""
    return "" if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}x"


def scale_text(scale_range: tuple[float, float] | None) -> str:
    """A range of loss scales with powers of two written as such: "2^9 to 2^16"."""
    if scale_range is None:
        return ""
    low, high = (_power(value) for value in scale_range)
    return low if low == high else f"{low} to {high}"


def bytes_text(count: float | None) -> str:
    """In MiB, or GiB from 10 GiB on."""
    if count is None:
        return ""
    mib = count / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 10240 else f"{mib:,.0f} MiB"


def count_text(value: float) -> str:
    """Three significant digits below 100, else a whole number with thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _signed(value: float, digits: int) -> str:
    return f"{value:+,.{digits}f}"


def _power(value: float) -> str:
    if value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5:
        exponent = math.frexp(value)[1] - 1
        return f"2^{exponent}" if abs(exponent) > 3 else f"{value:g}"
    return f"{value:g}"

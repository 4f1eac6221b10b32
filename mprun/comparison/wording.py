"""Put numbers and rows of a comparison into words, for every output alike.

Every table is made by `filled`.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprun.comparison.findings import Comparison, Group, Question, Row, Verdict
from mprun.comparison.load import products_text

if TYPE_CHECKING:
    from jinja2 import Environment


def value_text(value: float | None) -> str:
    """Return four significant digits; empty for None."""
    return "" if value is None else f"{value:.4g}"


def mean_text(group: Group, row: Row) -> str:
    """Return the mean, and its seeds if not all: "0.5052 (seeds 1, 3)", "0.5052 (2 of 3 runs)"."""
    text, used = value_text(row.mean), row.verdict.seeds or [o.seed for o in row.outcomes]
    ended = [o.seed for o in row.outcomes if o.diverged is None and o.seed in used]
    if not text or len(ended) == len(row.outcomes):
        return text
    of_all = f"{len(ended)} of {len(row.outcomes)} runs"
    seeds = f"seed{'s' * (len(ended) > 1)} {seeds_text(ended)}"
    return f"{text} ({seeds if group.by_seed else of_all})"


def unit(question: Question) -> str:
    """Return the unit of the differences that are shown: "%", "points" or nothing."""
    if question.relative:
        return "%"
    return "points" if question.unit == "points" else ""


def suffix(question: Question) -> str:
    """Return the unit as it follows a number."""
    return f" {unit(question)}".rstrip()


def size_text(question: Question, value: float, margin: float) -> str:
    """Return a number without a sign, with the margin's digits and the unit: "1.00 %"."""
    digits = decimals_for(margin * question.factor)
    return f"{value * question.factor:.{digits}f}{suffix(question)}"


def scaled(group: Group, verdict: Verdict, value: float | None) -> float | None:
    """Return a verdict's difference in the unit for readers: % of the baseline, or unchanged."""
    if value is None or not group.relative:
        return value
    # The verdict's margin is margin_setting times the mean as judged (the logarithm of perplexity).
    if verdict.margin and math.isfinite(verdict.margin):
        return 100 * value * group.margin_setting / verdict.margin
    mean = group.baseline.mean
    if mean is None or not math.isfinite(mean) or mean == 0 or group.as_logarithm:
        return None
    return 100 * value / abs(mean)


def difference_text(group: Group, verdict: Verdict) -> str:
    """Return "+0.04 % (-0.12 to +0.20)"; without an interval only the difference, else empty.

    It is "0 (identical)" if every run ended with the same value as its counterpart.
    """
    *parts, _ = shown(group, verdict).values()
    if parts == [0, 0, 0]:
        return "0 (identical)"
    known = [part for part in parts if part is not None and math.isfinite(part)]
    margin = group.factor * group.margin_setting
    middle, low, high = ("" if p not in known else signed(p, margin, known) for p in parts)
    text = middle and f"{middle}{suffix(group)}"
    return f"{text} ({low} to {high})" if middle and low and high else text


def signed(value: float, margin: float, beside: Sequence[float], factor: float = 1) -> str:
    """Return `factor` * `value` with its sign and the margin's digits: "+0.12"; 0 has no sign.

    At least one digit of the largest value in `beside` is shown: "0.000", "-0.003".
    """
    largest = factor * max(map(abs, beside), default=0.0)
    digits = decimals_for(factor * margin)
    if 0 < largest < 0.5 * 10.0**-digits:
        digits = min(digits + 4, -math.floor(math.log10(largest)))
    text = f"{factor * value:+,.{digits}f}"
    return text if text.strip("+-0.,") else text[1:]


def shown(group: Group, verdict: Verdict) -> dict[str, float | None]:
    """Return difference, low, high and margin in the unit for readers, converted by `scaled`."""
    names = ("difference", "low", "high", "margin")
    return {name: scaled(group, verdict, getattr(verdict, name)) for name in names}


def margin_text(group: Group) -> str:
    """Return the margin as it was set: "1 % of FP32's mean", "0.5 points"."""
    if not group.relative:
        return f"{group.margin_setting:g}{suffix(group)}"
    of = "mean logarithm" if group.as_logarithm else "mean"
    return f"{100 * group.margin_setting:g} % of {baseline_name(group)}'s {of}"


def baseline_name(group: Group) -> str:
    """Return "FP32" for the usual baseline, otherwise its label."""
    return group.baseline.arm.reference


def question(comparison: Comparison) -> str:
    """Return the question that a page answers, with its baseline."""
    names = {baseline_name(group) for group in comparison.groups if not group.baseline.arm.foreign}
    if names <= {"FP32"}:
        return "does lower precision match FP32?"
    return f"does each mode match {names.pop() if len(names) == 1 else 'its baseline'}?"


def stamped(comparison: Comparison) -> str:
    """Return the heading of the stamps; of foreign logs they only tell what was left out."""
    if any(group.baseline.arm.foreign for group in comparison.groups):
        return "Not everything was compared:"
    return "Not the comparison that the runs were set up for:"


def answer(group: Group, row: Row) -> str:
    """Return the result for one mode in one short sentence."""
    verdict, label, base = row.verdict, row.arm.label, baseline_name(group)
    lost = sum(bool(outcome.diverged) for outcome in row.outcomes)
    rest = " in what was compared, which is not all" if verdict.left_out else ""
    more = f": it needs about {verdict.needed} more {group.counted}s" if verdict.needed else ""
    said = {
        "matches": f"matches {base}{rest}",
        "diverged": f"diverged in {lost} of {len(row.outcomes)} runs",
        "invalid baseline": f"cannot be judged: {base} itself diverged",
        "inconclusive": f"is undecided{more}",
    }
    if verdict.name.endswith(("worse", "better")):
        return f"{label} is {verdict.name} than {base}."
    return f"{label} {said[verdict.name]}." if verdict.name in said else f"{label}: {verdict.name}."


def answers(group: Group) -> list[tuple[str, str]]:
    """Return (verdict, sentence) for each mode; those that simply match share one."""
    plain, alike, told = f" matches {baseline_name(group)}.", [], []
    for row in group.rows:
        text = answer(group, row) + " Its difference grows over steps." * row.grows
        if row.verdict.name == "one pair":  # nothing shorter is as true
            text = f"{row.arm.label}: {row.verdict.sentence}"
        told.append((row.verdict.name, text))
        alike += [row.arm.label] * text.endswith(plain)
    if len(alike) < 2:
        return told
    text = f"{', '.join(alike[:-1])} and {alike[-1]} match {baseline_name(group)}."
    return [one for one in told if not one[1].endswith(plain)] + [("matches", text)]


def metric_name(group: Group) -> str:
    """Return the metric's name with its window, for headings."""
    over = f" (mean of the last {group.window} evaluations)" if group.window > 1 else ""
    return group.metric + over


def level_text(group: Group) -> str:
    """Return the confidence of the group's intervals: "90 %", or "94 to 97 %" if looks differ."""
    levels = sorted({row.verdict.level for row in group.rows}) or [0.90]
    texts = list(dict.fromkeys(f"{100 * level:.3g}" for level in (levels[0], levels[-1])))
    return " to ".join(texts) + " %"


def seeds_text(seeds: Iterable[int]) -> str:
    """Join neighbouring seeds: [0, 1, 2, 5] -> "0-2, 5"."""
    spans: list[list[int]] = []
    for seed in sorted(seeds):
        if not spans or seed != spans[-1][-1] + 1:
            spans.append([])
        spans[-1].append(seed)
    return ", ".join("-".join(map(str, dict.fromkeys((own[0], own[-1])))) for own in spans)


def number_of(count: int, counted: str = "seed") -> str:
    """Return "1 seed", "3 runs"."""
    return f"{count} {counted}{'' if count == 1 else 's'}"


def decimals_for(margin: float) -> int:
    """Return the decimals that show 2 to 3 digits of the margin: 1 -> 2, 0.5 -> 2, 10 -> 1."""
    return min(12, max(0, 2 - math.ceil(math.log10(margin))))


def ratio_text(ratio: float | None) -> str:
    """Return a ratio as "1.24x"; empty for None."""
    return "" if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}x"


def scale_text(scale_range: tuple[float, float] | None) -> str:
    """Return a range of loss scales with powers of two written as such: "2^9 to 2^16"."""
    texts = []
    for value in scale_range or ():
        half, exponent = math.frexp(value)
        is_power = half == 0.5 and abs(exponent - 1) > 3
        texts.append(f"2^{exponent - 1}" if is_power else f"{value:g}")
    return " to ".join(dict.fromkeys(texts))


def bytes_text(count: float | None) -> str:
    """Return the count in MiB, or in GiB from 10 GiB on."""
    if count is None:
        return ""
    mib = count / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 10240 else f"{mib:,.0f} MiB"


def count_text(value: float) -> str:
    """Return three significant digits below 100, else a whole number with separated thousands."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def setting_text(value: Any) -> str:
    """Return a configuration value as it is typed, without a trailing ".0"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


def cells(group: Group) -> list[dict[str, str]]:
    """Return column name -> text for each row, in the order of every table.

    The baseline shows speed and memory themselves, the other rows show ratios.
    """
    costs, watched = costs_shown(group), any(row.audit for row in group.every_row)
    return [_cells(group, row, costs, watched) for row in group.every_row]


def _cells(group: Group, row: Row, costs: bool, watched: bool) -> dict[str, str]:
    """costs, watched: whether the table shows speed and peak memory, and products."""
    own, verdict, speed = row is group.baseline, row.verdict, ratio_text(row.speedup)
    if own:
        speed = f"{count_text(row.samples_per_s)}/s" if row.samples_per_s else ""
    peak = bytes_text(row.peak_bytes) if own else ratio_text(row.memory_ratio)
    speed, peak = (marked(row, text) if costs else "" for text in (speed, peak))
    products, comma, rest = products_text(row.audit).partition(", ")
    return {
        "verdict": "baseline" if own else verdict.name,
        "mode": row.arm.label,
        "mean": mean_text(group, row),
        "difference": "" if own else difference_text(group, verdict),
        "seeds": _counted_text(group, row),
        "products": products + (f" ({rest})" if comma else "") if watched else "",
        "skipped updates": "" if row.skipped is None else count_text(row.skipped),
        "loss scale": scale_text(row.scale_range),
        "speed": speed,
        "peak memory": peak,
        "activation memory": "" if own else ratio_text(row.activation_ratio),
    }


def _counted_text(group: Group, row: Row) -> str:
    """Return "0-2", "0-2 (not 6)" if a seed is left out, or the number of runs without seeds."""
    every = [outcome.seed for outcome in row.outcomes]
    if not group.by_seed:
        return str(len(every))
    used = row.verdict.seeds or every
    rest = set(every) - set(used)
    return seeds_text(used) + (f" (not {seeds_text(rest)})" if rest else "")


def costs_shown(group: Group) -> bool:
    """Return whether speed and peak memory are those of the baseline and of some mode."""
    modes = [row.emulated for row in group.rows if row.arm.runs] or [False]
    return not group.baseline.emulated and not all(modes)


def marked(row: Row, text: str) -> str:
    """Return a speed or a peak memory, "1.24x (emulated)" if it is not the mode's own."""
    return f"{text} (emulated)" if text and row.emulated else text


def costs_text(group: Group) -> str:
    """Return what speed and memory in a table mean, or why they are missing."""
    if not costs_shown(group):
        return (
            "speed and peak memory are left out: 16-bit products were emulated on a CPU, which "
            "makes them the emulation's, not the mode's"
        )
    text = f"speed and memory over {baseline_name(group)}'s"
    emulated = any(row.emulated for row in group.rows)
    return f"{text}; (emulated): the emulation's, not the mode's" if emulated else text


def table(group: Group, heads: dict[str, str]) -> list[list[str]]:
    """Return `filled` of a group's cells; heads: names to show instead, "" hides a column."""
    return filled(cells(group), heads)


def filled(rows: Sequence[dict[str, str]], heads: dict[str, str]) -> list[list[str]]:
    """Return header and rows without empty columns; a row may lack cells."""
    names = dict.fromkeys(name for row in rows for name in row if heads.get(name, name))
    kept = [name for name in names if any(row.get(name) for row in rows)]
    header = [heads.get(name, name) for name in kept]
    return [header, *([row.get(name, "") for name in kept] for row in rows)]


def templates() -> "Environment":
    """Return the templates of all pages; they escape every value."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # most commands show no page

    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def gap_lines(rows: Iterable[Row]) -> list[str]:
    """Return a line for each row that has a gap over steps."""
    return [f"{row.arm.label}, over steps: {row.gap.sentence}" for row in rows if row.gap]


def judged(comparison: Comparison, group: Group) -> str:
    """Return the metric and margin of the verdicts in a sentence."""
    text, steps = f"Judged: {metric_name(group)}, ", group.judged_steps
    if len(steps) > 1:
        text += f"mean of steps {steps[0]:.12g} to {steps[-1]:.12g} ({len(steps)} values), "
    if group.baseline.arm.foreign or group.higher_is_better:
        text += f"{'higher' if group.higher_is_better else 'lower'} is better, "
    if not group.baseline.arm.foreign and baseline_name(group) != "FP32":
        text += f"baseline {baseline_name(group)}, "
    text += "as its logarithm, " if group.as_logarithm else ""
    text += f"margin ±{margin_text(group)}; positive is worse"
    text += "." if group.baseline.arm.foreign else f"; {costs_text(group)}."
    if comparison.looks:
        text += f" Looks planned at {', '.join(map(str, comparison.looks))} seeds."
    planned = [(row.arm.label, row.verdict.most) for row in group.rows if row.verdict.most]
    for most in sorted({most for _, most in planned}):
        labels = [label for label, own in planned if own == most]
        of = f" of {', '.join(labels)}" * (len(labels) < len(group.rows))
        text += f" Seeds{of} added until decided, at most {most}: looks hold 5 % over all."
    return text


def notes_of(group: Group) -> list[str]:
    """Return the notes of every row, then those of the group."""
    rows = group.every_row
    return [f"{row.arm.label}: {note}" for row in rows for note in row.every_note] + group.notes

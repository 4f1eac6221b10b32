"""What the report says of a group in words and tables, as HTML. Every value is escaped here."""

import re
from html import escape
from typing import Any

from mprun.compare.equivalence import ALPHA
from mprun.compare.findings import Comparison, Group, Row
from mprun.compare.formatting import (
    answer,
    baseline_name,
    bytes_text,
    count_text,
    difference_text,
    level_text,
    margin_text,
    mean_text,
    metric_name,
    ratio_text,
    scale_text,
    seeds_text,
    value_text,
)
from mprun.compare.palette import INK, MARKS, Style

_POWER = re.compile(r"(2)\^(-?\d+)")


def answers(group: Group) -> str:
    """One short sentence per mode."""
    items = "".join(
        f"<li>{_mark(row.verdict.name)} {escape(answer(group, row))}</li>" for row in group.rows
    )
    return f'<ul class="answers">{items}</ul>'


def stamps(comparison: Comparison) -> str:
    """What a reader must know before believing the rest; empty if nothing was changed."""
    if not comparison.stamps:
        return ""
    items = "".join(f"<li>{escape(stamp)}</li>" for stamp in comparison.stamps)
    return (
        f'<div class="stamps"><strong>Not the comparison that the runs were set up for:'
        f"</strong><ul>{items}</ul></div>"
    )


def verdict_table(group: Group, styles: dict[str, Style]) -> str:
    """The baseline and every mode; on a narrow screen each row becomes a card."""
    base = escape(baseline_name(group))
    header = [
        ("verdict", "verdict", ""),
        ("mean", f"{escape(group.metric)}, mean", "number"),
        ("difference", f"difference, {level_text(group)} interval<br>positive is worse", "number"),
        ("seeds", "seeds", "number"),
        ("skipped updates", "skipped updates", "number"),
        ("loss scale", "loss scale", ""),
        ("speed", f"speed<br>over {base}", "number"),
        ("peak memory", f"peak memory<br>over {base}", "number"),
        ("kept for backward", f"kept for backward<br>over {base}", "number"),
    ]
    heads = "".join(f'<th scope="col" class="{kind}">{text}</th>' for _, text, kind in header)
    lines = []
    for row in (group.baseline, *group.rows):
        own = row is group.baseline
        cells = _cells(group, row, own)
        columns = "".join(
            f'<td class="{kind}" data-label="{label}">'
            + (f'<span class="value">{cell}</span></td>' if cell else "</td>")
            for (label, _, kind), cell in zip(header, cells, strict=True)
        )
        kind = ' class="baseline"' if own else ""
        lines.append(f'<tr{kind}><th scope="row">{_label(row, styles)}</th>{columns}</tr>')
    return (
        '<table class="verdicts"><thead><tr><th scope="col">mode</th>'
        f"{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def sentences(group: Group) -> str:
    """The full sentence of each verdict, with what was left out."""
    items = []
    for row in group.rows:
        items.append(f"<dt>{_mark(row.verdict.name)} {escape(row.arm.label)}</dt>")
        items.append(f"<dd>{escape(row.verdict.sentence)}</dd>")
        if row.first_steps is not None:
            items.append(
                f'<dd class="faint">First 20 steps, same seed: median relative difference of the '
                f"training loss {100 * row.first_steps:.2g} %.</dd>"
            )
        items += [f'<dd class="faint">{escape(note)}</dd>' for note in _notes(row)]
    own = [
        f"<li>{escape(group.baseline.arm.label)}: {escape(n)}</li>" for n in _notes(group.baseline)
    ]
    own += [f"<li>{escape(note)}</li>" for note in group.notes]
    notes = f'<ul class="faint">{"".join(own)}</ul>' if own else ""
    return f'<dl class="sentences">{"".join(items)}</dl>{notes}'


def seed_table(group: Group, styles: dict[str, Style]) -> str:
    """What each run ended with."""
    rows = (group.baseline, *group.rows)
    by_seed = [{outcome.seed: outcome for outcome in row.outcomes} for row in rows]
    heads = "".join(f'<th scope="col">{_label(row, styles)}</th>' for row in rows)
    lines = []
    for seed in sorted({seed for outcomes in by_seed for seed in outcomes}):
        cells = "".join(f'<td class="number">{_outcome(own.get(seed))}</td>' for own in by_seed)
        lines.append(f'<tr><th scope="row">{seed}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table class="seeds"><thead><tr><th scope="col">seed</th>{heads}'
        f"</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def method(comparison: Comparison, group: Group) -> str:
    """How the verdict is made, with this group's numbers."""
    base, margin = escape(baseline_name(group)), escape(margin_text(group))
    methods = sorted({row.verdict.method for row in group.rows if row.verdict.method})
    how = " and ".join(
        {"paired": "paired by seed", "Welch": "unpaired (Welch)"}.get(name, escape(name))
        for name in methods
    )
    turned = " Differences are turned so that positive is worse." if group.higher_is_better else ""
    log = (
        " Perplexity is judged as its logarithm, the mean loss in nats per token."
        if group.metric == "perplexity"
        else ""
    )
    foreign = any(run.foreign for run in group.baseline.arm.runs)
    outcome = (
        f"the mean of the last tenth of the values of {escape(group.metric)}, at least three."
        if foreign
        else f"{escape(metric_name(group))} of the final evaluation"
        f"{'s' if group.window > 1 else ''}, in FP32 arithmetic in every mode unless its "
        "configuration says otherwise."
    )
    progress = (
        f", or if its smoothed training loss made less than 10 % of {base}'s progress (no GAN)"
    )
    overall = f"{100 * ALPHA:g} %"
    paragraphs = [
        f"<b>Outcome.</b> Of each run: {outcome}{log}{turned}",
        "<b>Divergence first.</b> A run diverged if a loss at an applied step was not finite, if "
        f"more than 50 updates in a row were skipped{'' if foreign else progress}.",
        f"<b>Equivalence test.</b> Two one-sided tests (TOST) at α = {comparison.alpha:.3g} each"
        f"{f', {how}' if how else ''}: a mode matches if the {level_text(group)} confidence "
        f"interval of its difference lies inside ±{margin}, worse if all of it lies above, likely "
        "worse if it lies above zero. Failing to find a difference is never a match. Fewer than "
        "3 seeds give no verdict.",
        f"<b>Margin.</b> ±{margin}, fixed in the configuration before the runs unless a note at "
        "the top says otherwise.",
        f"<b>Several modes.</b> Each row has its own error rate of {overall}; nothing is corrected "
        "for the number of rows. The bands in the figures are no test.",
    ]
    if comparison.looks:
        looks = ", ".join(str(look) for look in comparison.looks)
        paragraphs.append(
            f"<b>Looks.</b> Planned at {looks} seeds; α of each look is lowered so that the error "
            f"rate over all of them stays {overall}, which widens the intervals."
        )
    if any(row.verdict.name == "not assessed" for row in group.rows):
        paragraphs.append(
            "<b>Not assessed.</b> The losses of a GAN say who is winning, not how good the samples "
            "are; without a metric of the samples there is no verdict."
        )
    return "".join(f"<p>{text}</p>" for text in paragraphs)


def configuration(group: Group) -> str:
    """The keys that all runs share, and per mode those that differ."""
    arms = [row.arm for row in (group.baseline, *group.rows)]
    firsts = [_flat(arm.runs[0].keys) if arm.runs else {} for arm in arms]
    shared = _flat(group.keys)
    varying = [
        key
        for key in dict.fromkeys(key for keys in firsts for key in keys)
        if key != "seed" and key not in shared and len({str(k.get(key)) for k in firsts}) > 1
    ]
    lines = []
    for arm, keys in zip(arms, firsts, strict=True):
        texts = [_pair(key, keys[key]) for key in varying if key in keys]
        texts += [
            f"{_pair(key, own)} (baseline: <code>{_text(before)}</code>)"
            for key, (before, own) in arm.differs.items()
            if key not in varying
        ]
        if texts:
            lines.append(f"<li><b>{escape(arm.label)}</b>: {', '.join(texts)}</li>")
    differs = f"<p>Differs between the modes:</p><ul>{''.join(lines)}</ul>" if lines else ""
    same = "".join(f"<li>{_pair(key, value)}</li>" for key, value in shared.items())
    common = f'<p>The same in all runs:</p><ul class="pairs">{same}</ul>' if same else ""
    return differs + common


def environment(group: Group) -> str:
    """Machine, versions and numeric flags: once where all runs agree, else with the modes."""
    runs = [run for row in (group.baseline, *group.rows) for run in row.arm.runs]
    labels = [row.arm.label for row in (group.baseline, *group.rows) for _ in row.arm.runs]
    found = [{**_flat(run.environment), **_flat({"flags": run.flags})} for run in runs]
    items, differing = [], []
    for key in dict.fromkeys(key for values in found for key in values):
        where: dict[str, list[str]] = {}
        for label, values in zip(labels, found, strict=True):
            if key in values:
                where.setdefault(_text(values[key]), []).append(label)
        if len(where) == 1:
            items.append(f"<li><code>{escape(key)}={next(iter(where))}</code></li>")
            continue
        texts = [
            f"<code>{value}</code> ({escape(', '.join(dict.fromkeys(names)))})"
            for value, names in where.items()
        ]
        differing.append(f"<li><code>{escape(key)}</code>: {'; '.join(texts)}</li>")
    text = f'<ul class="pairs">{"".join(items)}</ul>' if items else ""
    if differing:
        text = f"<p>Not the same in all runs:</p><ul>{''.join(differing)}</ul>{text}"
    return text or "<p>Not recorded.</p>"


def _cells(group: Group, row: Row, own: bool) -> list[str]:
    verdict = row.verdict
    if own:
        shown, difference = '<span class="verdict">baseline</span>', ""
        seeds = seeds_text(outcome.seed for outcome in row.outcomes)
    else:
        shown = f'<span class="verdict">{_mark(verdict.name)} {escape(verdict.name)}</span>'
        difference = _two_lines(difference_text(group, verdict))
        seeds = seeds_text(verdict.seeds or [outcome.seed for outcome in row.outcomes])
    return [
        shown,
        _two_lines(mean_text(row)),
        difference,
        seeds,
        count_text(row.skipped),
        _scales(row),
        f"{count_text(row.samples_per_s)}/s"
        if own and row.samples_per_s
        else ratio_text(row.speedup),
        bytes_text(row.peak_bytes) if own else ratio_text(row.memory_ratio),
        "" if own else ratio_text(row.saved_ratio),
    ]


def _speed(row: Row) -> str:
    return f"{count_text(row.samples_per_s)}/s" if row.samples_per_s else ""


def _scales(row: Row) -> str:
    text = _POWER.sub(r"\1<sup>\2</sup>", escape(scale_text(row.scale_range)))
    return f'<span class="nowrap">{text}</span>' if text else ""


def _two_lines(text: str) -> str:
    """What stands in brackets goes below, in a fainter colour."""
    first, bracket, rest = escape(text).partition(" (")
    return f'{first}<br><span class="nowrap faint">({rest}</span>' if bracket else first


def _outcome(outcome) -> str:
    if outcome is None:
        return ""
    if outcome.diverged is None:
        return value_text(outcome.value)
    at = "" if outcome.step is None else f"<br>at step {outcome.step:,}"
    return f'<span title="{escape(outcome.diverged)}">diverged{at}</span>'


def _label(row: Row, styles: dict[str, Style]) -> str:
    colour = styles[row.arm.label].colour.replace(INK, "currentColor")
    swatch = f'<span class="swatch" style="background:{colour}"></span>'
    return swatch + escape(row.arm.label).replace("_", "_<wbr>")


def _mark(verdict: str) -> str:
    mark, tone = MARKS[verdict]
    return f'<span class="mark {tone}" aria-hidden="true">{mark}</span>'


def _notes(row: Row) -> list[str]:
    return list(dict.fromkeys([*row.arm.notes, *row.notes]))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _pair(key: str, value: Any) -> str:
    return f"<code>{escape(str(key))}={_text(value)}</code>"


def _text(value: Any) -> str:
    """As in the configuration files."""
    if value is None:
        return "null"
    return escape(str(value).lower() if isinstance(value, bool) else str(value))

"""What the report says of a group in words and tables, as HTML. Every value is escaped here."""

import re
from html import escape

from mprun.compare.findings import Comparison, Group, Row
from mprun.compare.formatting import (
    answer,
    baseline_name,
    bytes_text,
    count_text,
    difference_text,
    level_text,
    mean_text,
    ratio_text,
    scale_text,
    seeds_text,
    value_text,
)
from mprun.plots.palette import INK, MARKS, Style

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

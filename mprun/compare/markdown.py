"""The comparison as text: report.md, and what `mprun compare` prints."""

import textwrap

from mprun.compare.findings import Comparison, Group, Row
from mprun.compare.formatting import (
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
)
from mprun.record.console import markdown_table

_WIDTH = 120  # of a terminal line where the columns allow it


def markdown(comparison: Comparison) -> str:
    """report.md: per group the verdict table, its sentences and notes; stamps first."""
    parts = ["# Does lower precision match FP32?"]
    if comparison.stamps:
        parts.append("**Not the comparison that the runs were set up for:**")
        parts.append("\n".join(f"- {_plain(stamp)}" for stamp in comparison.stamps))
    for group in comparison.groups:
        parts += [f"## {_plain(group.title)}", group_markdown(comparison, group)]
    if comparison.not_compared:
        parts.append("## Not compared")
        parts.append("\n".join(f"- {_plain(line)}" for line in comparison.not_compared))
    if comparison.notes:
        parts.append("## Notes")
        parts.append("\n".join(f"- {_plain(line)}" for line in comparison.notes))
    parts.append(f"mprun {comparison.version}, compared {comparison.created}.")
    return "\n\n".join(parts)


def group_markdown(comparison: Comparison, group: Group) -> str:
    """The verdict table of one group, what was judged, the sentences and the notes."""
    header = [
        "verdict",
        "mode",
        f"{group.metric}, mean",
        f"difference ({level_text(group)} interval)",
        "seeds",
        "skipped updates",
        "loss scale",
        "speed",
        "peak memory",
        "kept for backward",
    ]
    rows = [[_plain(cell) for cell in _cells(group, row)] for row in (group.baseline, *group.rows)]
    header, *rows = _without_empty_columns(header, rows)
    sentences = [
        f"- **{_plain(row.arm.label)}**: {_plain(row.verdict.sentence)}" for row in group.rows
    ]
    parts = [
        markdown_table(header, rows),
        _plain(_judged(comparison, group)),
        "\n".join(sentences),
        "\n".join(f"- {_plain(note)}" for note in _notes(group)),
    ]
    return "\n\n".join(part for part in parts if part)


def console(comparison: Comparison) -> str:
    """What a terminal shows: per group aligned columns, the verdict first, then the sentences."""
    parts = []
    if comparison.stamps:
        lines = ["NOT the comparison that the runs were set up for:"]
        parts.append("\n".join([*lines, *(_wrapped("  ", stamp) for stamp in comparison.stamps)]))
    for group in comparison.groups:
        header = ["verdict", "mode", group.metric, "difference", "seeds", "skipped"]
        header += ["scale", "speed", "memory"]
        rows = [_cells(group, row)[: len(header)] for row in (group.baseline, *group.rows)]
        for cells in rows:  # the sentence tells how many runs diverged; a line has no room
            cells[2] = cells[2].partition(" (")[0]
        lines = [f"{group.title}", _wrapped("  ", _judged(comparison, group)), ""]
        lines += _aligned(header, rows)
        lines.append("")
        lines += [_wrapped("  ", f"{row.arm.label}: {row.verdict.sentence}") for row in group.rows]
        lines += [_wrapped("  ", f"note: {note}") for note in _notes(group)]
        parts.append("\n".join(lines))
    if comparison.not_compared:
        lines = ["not compared:", *(_wrapped("  ", line) for line in comparison.not_compared)]
        parts.append("\n".join(lines))
    if comparison.notes:
        parts.append("\n".join(_wrapped("", f"note: {line}") for line in comparison.notes))
    return "\n\n".join(parts) if parts else "nothing was compared"


def _judged(comparison: Comparison, group: Group) -> str:
    text = f"Judged: {metric_name(group)}, margin ±{margin_text(group)}; positive is worse; "
    text += f"speed and memory over {baseline_name(group)}'s."
    if comparison.looks:
        text += f" Looks planned at {', '.join(map(str, comparison.looks))} seeds."
    return text


def _cells(group: Group, row: Row) -> list[str]:
    """Text of one row; the baseline shows speed and memory themselves, the others ratios."""
    own = row is group.baseline
    verdict = row.verdict
    seeds = [outcome.seed for outcome in row.outcomes]
    speed = f"{count_text(row.samples_per_s)}/s" if row.samples_per_s else ""
    return [
        "baseline" if own else verdict.name,
        row.arm.label,
        mean_text(row),
        "" if own else difference_text(group, verdict),
        seeds_text(seeds if own else verdict.seeds or seeds),
        count_text(row.skipped),
        scale_text(row.scale_range),
        speed if own else ratio_text(row.speedup),
        bytes_text(row.peak_bytes) if own else ratio_text(row.memory_ratio),
        "" if own else ratio_text(row.saved_ratio),
    ]


def _notes(group: Group) -> list[str]:
    notes = [
        f"{row.arm.label}: {note}"
        for row in (group.baseline, *group.rows)
        for note in dict.fromkeys([*row.arm.notes, *row.notes])
    ]
    return notes + group.notes


def _aligned(header: list[str], rows: list[list[str]]) -> list[str]:
    """Columns as wide as their longest cell, numbers to the right."""
    table = _without_empty_columns(header, rows)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    left = {"verdict", "mode", "difference", "scale"}
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(row, widths, table[0], strict=True)
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _without_empty_columns(header: list[str], rows: list[list[str]]) -> list[list[str]]:
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [[row[i] for i in kept] for row in (header, *rows)]


def _wrapped(indent: str, text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(text: str) -> str:
    """With the characters escaped that Markdown would take for markup in a label or a note."""
    for character in "\\`*<[":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())

"""The outputs of a comparison that are text: report.md, a terminal's, results.json."""

import math
import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from mprun.comparison import wording as text
from mprun.comparison.findings import Comparison, Gap, Group, Row
from mprun.comparison.load import products_text
from mprun.record.console import columns, markdown_table
from mprun.record.layout import aligned, hanging
from mprun.record.run_directory import json_values


def markdown(comparison: Comparison) -> str:
    """Return report.md: stamps first, then per group the verdict table, its sentences and notes."""
    parts = [f"# D{text.question(comparison)[1:]}"]
    if comparison.stamps:
        parts += [f"**{text.stamped(comparison)}**", _list(comparison.stamps)]
    for group in comparison.groups:
        parts += [f"## {_plain(group.title)}", group_markdown(comparison, group)]
    for title, lines in (("Not compared", comparison.not_compared), ("Notes", comparison.notes)):
        parts += [f"## {title}", _list(lines)] if lines else []
    return "\n\n".join([*parts, f"mprun {comparison.version}, compared {comparison.created}."])


def group_markdown(comparison: Comparison, group: Group) -> str:
    """Return the verdict table of one group, what was judged, the sentences and the notes."""
    heads = {"difference": f"difference ({text.level_text(group)} interval)"}
    heads["seeds"] = f"{group.counted}s"
    header, *rows = text.table(group, heads | {"mean": f"{group.metric}, mean"})
    sentences = [
        f"- **{_plain(row.arm.label)}**: {_plain(row.verdict.sentence)}" for row in group.rows
    ]
    parts = [
        markdown_table(header, [[_plain(cell) for cell in row] for row in rows]),
        _plain(text.judged(comparison, group)),
        "\n".join(sentences),
        _list(text.gap_lines(group.rows)),
        _list(text.notes_of(group)),
    ]
    return "\n\n".join(part for part in parts if part)


def console(comparison: Comparison) -> str:
    """Return a terminal's output: per group aligned columns, verdict first, then the sentences."""
    stamps = _wrapped(comparison.stamps)
    parts = [text.stamped(comparison) + stamps] if stamps else []
    for group in comparison.groups:
        said = [f"{row.arm.label}: {row.verdict.sentence}" for row in group.rows]
        said += text.gap_lines(row for row in group.rows if row.grows)
        means = {
            row.arm.label: text.mean_text(group, row).partition(" (")[2] for row in group.every_row
        }
        said += [f"{label}: mean over {seeds[:-1]}" for label, seeds in means.items() if seeds]
        said += [f"note: {note}" for note in text.notes_of(group)]
        how = [text.judged(comparison, group)]
        if any(row.audit for row in group.every_row):
            told = (f"{row.arm.label}: {products_text(row.audit)}" for row in group.every_row)
            how.append(f"Products computed in, by calls: {'; '.join(told)}.")
        parts.append(f"{group.title}{_wrapped(how)}\n\n{_table(group)}\n{_wrapped(said)}")
    if comparison.not_compared:
        parts.append("not compared:" + _wrapped(comparison.not_compared))
    parts.append(_wrapped([f"note: {line}" for line in comparison.notes], indent="")[1:])
    return "\n\n".join(filter(None, parts)) or "nothing was compared"


def _table(group: Group) -> str:
    """Return a terminal's table, numbers to the right."""
    heads = {"mean": group.metric, "skipped updates": "skips", "loss scale": "scale"}
    heads |= {"seeds": f"{group.counted}s", "peak memory": "memory"}
    rows = text.cells(group)
    for row in rows:  # the line is too short for the seeds of a mean; a sentence names them
        row["mean"] = row["mean"].partition(" (")[0]
    found = text.filled(rows, heads | {"activation memory": "", "products": ""})
    left = {"verdict", "mode", "difference", "scale"}
    width = columns(120)
    lines = aligned(found, left, width, found[0].index("mode"))
    indent = "  " if max(map(len, lines)) + 2 <= width else ""
    return "\n".join(f"{indent}{line}" for line in lines)


def _wrapped(lines: Iterable[str], indent: str = "  ") -> str:
    """Put each line on its own line, wrapped with a deeper indent, and so what breaks within it."""
    below, found = len(indent) + 2, []
    for line in lines:
        first, *more = line.split("\n")
        found.append(hanging(first, columns(120), below, indent))
        found += [hanging(part, columns(120), below + 2, " " * below) for part in more]
    return "".join(f"\n{text}" for text in found)


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_plain(line)}" for line in lines)


def _plain(line: str) -> str:
    """Escape the characters in a label or note that Markdown would take for markup."""
    return " ".join(re.sub(r"([\\`*<[])", r"\\\1", line).split())


def results(comparison: Comparison) -> dict[str, Any]:
    """Return results.json as plain values; docs/reference/run_directory.md explains each field.

    Non-finite numbers become "nan", "inf" or "-inf".
    """
    groups = [
        {
            **_fields(group, "title slug metric higher_is_better unit relative"),
            "margin": group.margin_setting,
            "window": len(group.judged_steps) or group.window,
            **_fields(group, "judged_steps notes keys"),
            "baseline": _row_results(group, group.baseline),
            "modes": [_row_results(group, row) for row in group.rows],
        }
        for group in comparison.groups
    ]
    told = _fields(comparison, "version created alpha looks stamps not_compared notes")
    return json_values({"format": 1, **told, "groups": groups})


def _row_results(group: Group, row: Row) -> dict[str, Any]:
    arm, verdict = row.arm, None
    if row is not group.baseline:
        numbers = text.shown(group, row.verdict)
        verdict = {**asdict(row.verdict), "shown": {"unit": text.unit(group), **numbers}}
    return {
        **_fields(arm, "label mode"),
        "scaler": arm.runs[0].scaler if arm.runs else None,
        "verdict": verdict,
        "mean": row.mean,
        "outcomes": [asdict(outcome) for outcome in row.outcomes],
        "runs": [run.path for run in arm.runs],
        "differs": arm.differs,
        **_fields(row, "skipped scale_range samples_per_s speedup peak_bytes memory_ratio"),
        **_fields(row, "activation_ratio emulated first_steps audit"),
        "gap": row.gap and _gap_results(row.gap),
        "notes": row.every_note,
    }


def _gap_results(gap: Gap) -> dict[str, Any]:
    found = asdict(gap)
    del found["of_evals"]
    names = ("step", "mean", "mean_low", "mean_high")
    for name, values in zip(names, found.pop("band").values(), strict=True):
        found[name] = [float(f"{v:.6g}") if math.isfinite(v) else None for v in values]
    return found


def _fields(of: Any, names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names.split()}

"""paper.md, paper.html and paper.json: the paper's tables and figures beside ours."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mprun.comparison.report import render
from mprun.extensions.paper.figures import figure_of, mechanism
from mprun.extensions.paper.outcomes import NOT_RUN, RowOutcome, counted
from mprun.extensions.paper.rows import PaperRow
from mprun.extensions.paper.settled import settings as settled
from mprun.plots.panel import settings
from mprun.record.console import markdown_table
from mprun.record.run_directory import write_json, write_text

SCALE = {
    "small": "Embedded data, networks reduced until a CPU trains them: numbers are not comparable "
    "with the paper's, outcomes are.",
    "full": "The recipes on the paper's data, as far as those are public.",
    "given": "Existing runs: outcomes compare with the paper's, numbers only on the same data.",
}
HEADER = (
    "network",
    "paper: FP32",
    "technique",
    "paper (+ is worse)",
    "ours: FP32",
    "ours",
    "difference (+ is worse)",
    "margin",
    "n",
    "verdict",
    "discriminates?",
    "same outcome?",
)
FULL_HEADER = ("network", "recipe", "data below --data-root", "FP32, h", "AMP, h", "published")


@dataclass(slots=True)
class Table:
    """One table of the page as text."""

    title: str
    lines: list[list[str]] = field(default_factory=list)
    # (network, the differences from the paper and further remarks)
    notes: list[tuple[str, list[str]]] = field(default_factory=list)


def tables(found: Sequence[RowOutcome]) -> list[Table]:
    """Make a table for each table or figure of the paper, in its order."""
    made: dict[str, Table] = {}
    for one in found:
        place = one.row.result.place
        table = made.setdefault(place, Table(place.capitalize()))
        table.lines += _lines(one)
        table.notes.append((one.row.result.network, _notes(one)))
    return list(made.values())


def _lines(found: RowOutcome) -> list[list[str]]:
    result = found.row.result

    def ours(value: str, shown: str) -> str:
        return f"{value} ({found.row.metric} {shown})" if shown else value

    whole_row = [result.network, f"{result.fp32} {result.metric}".rstrip()]
    if not found.lines:
        return [[*whole_row, *[""] * (len(HEADER) - 5), NOT_RUN, "", NOT_RUN]]

    def paper(value: str) -> str:
        difference = result.difference(value)
        return f"{value} ({difference})" if difference else value or "–"

    fp32 = f"{found.metric} {ours(found.fp32, found.fp32_shown)}" if found.fp32 else ""
    lines = [
        [
            *whole_row,
            line.technique,
            paper(line.paper),
            fp32,
            ours(line.mean, line.shown),
            line.difference,
            found.margin,
            str(len(line.seeds or line.values) or ""),
            line.verdict,
            found.discriminates,
            line.same_outcome or "–",
        ]
        for line in found.lines
    ]
    for line in lines[1:]:
        line[0] = line[1] = line[4] = line[7] = line[10] = ""
    return lines


def _notes(found: RowOutcome) -> list[str]:
    result = found.row.result
    notes = [f"paper: {result.data}; {result.scope}"]
    if found.network:
        notes.append(f"ours: {found.network}; {found.data}")
    if found.why_not:
        notes.append(f"not run: {found.why_not}")
    if differs := (*found.row.differs, *found.row.always):
        notes.append(f"differs from the paper: {'; '.join(differs)}")
    if counts := mechanism(found):
        notes.append(f"mechanism: {counts}")
    if found.group is not None and found.row.differs and not found.slug:
        notes.append(settled()[found.row.key].reasons(found.margin))
    if found.row.constructed:
        notes.append(f"constructed setting: {found.row.constructed}")
    if beside := [f"{one.technique}: {one.beside}" for one in found.lines if one.beside]:
        notes.append(f"by {found.row.metric}, margin as mprun's: {'; '.join(beside)}")
    if found.row.tried:
        notes.append(f"tried: {found.row.tried}")
    return notes


def _full_line(row: PaperRow, hours: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the cost of a result at the paper's scale."""
    if row.full is None:
        return [row.result.network, "", row.why_not, "", "", ""]
    own = hours.get(row.full.experiment, {})
    cost = [f"{own[mode]:.3g}" if mode in own else "" for mode in ("fp32", "amp")]
    data = ", ".join(filter(None, (row.full.folder, row.full.missing)))
    return [row.result.network, row.full.experiment, data, *cost, row.full.published]


@dataclass(slots=True)
class Page:
    """The content of the page."""

    scale: str
    found: list[RowOutcome]
    rows: Sequence[PaperRow]
    facts: Mapping[str, str]  # machine, versions, commands: name -> value
    # Recipe -> mode -> hours on one H200, the limit that `mprun bench --roofline` counts.
    hours: Mapping[str, Mapping[str, float]]
    remarks: Sequence[str] = ()  # on the runs as a whole, a line each
    seeds: str = ""  # whether settings were chosen on the judged seeds

    def write(self, folder: Path) -> Path:
        """Write the page; return the path of paper.md."""
        folder.mkdir(parents=True, exist_ok=True)
        every = [(figure, found) for found in self.found for figure in found.row.figures]
        with settings():
            figures = [figure_of(*one, folder) for one in sorted(every, key=lambda one: one[0].key)]
        own, full = tables(self.found), [_full_line(row, self.hours) for row in self.rows]
        given: dict[str, Any] = {
            "scale": f"{SCALE[self.scale]} The paper has one run per number and no interval.",
            "summary": [line for line in (self.seeds, counted(self.found)) if line],
            "tables": own,
            "tables_text": tables_markdown(own),
            "header": HEADER,
            "figures": figures,
            "full_header": FULL_HEADER,
            "full": full,
            "full_text": markdown_table(list(FULL_HEADER), full),
            "facts": self.facts,
            "remarks": self.remarks,
        }
        write_json(folder / "paper.json", json.loads(self.json(folder)), durable=False)
        for ending in ("html", "md"):
            path = folder / f"paper.{ending}"
            write_text(path, render(f"paper_page.{ending}", **given) + "\n")
        return path

    def json(self, folder: Path = Path()) -> str:
        """Return the text of paper.json; folder: what its paths of runs are relative to."""

        def there(*runs: str | Path) -> list[str]:
            return [os.path.relpath(run, folder) for run in runs]

        rows = {
            one.key: {
                "network": one.row.result.network,
                "place": one.row.result.place,
                "paper": msgspec.structs.asdict(one.row.result),
                "ours": {"network": one.network, "data": one.data, "metric": one.metric},
                "differs": (*one.row.differs, *one.row.always),
                "fp32": one.fp32,
                "fp32_values": one.fp32_values,
                "runs": {"FP32": there(*one.fp32_runs)}
                | {line.technique: there(*line.runs) for line in one.lines},
                "probes": None if one.probes is None else there(one.probes)[0],
                "margin": one.margin,
                "mechanism": mechanism(one),
                "not_run": one.why_not,
                "discriminates": one.discriminates,
                "techniques": [
                    {key: value for key, value in asdict(line).items() if key != "runs"}
                    for line in one.lines
                ],
            }
            for one in self.found
        }
        known: dict[str, Any] = {"scale": self.scale, "seeds": self.seeds}
        known |= {"outcomes": counted(self.found), "facts": dict(self.facts), "rows": rows}
        known |= {"remarks": self.remarks} if self.remarks else {}
        return json.dumps(known | {"hours_on_h200": self.hours}, indent=1)


def tables_markdown(made: Sequence[Table]) -> str:
    """Format each table below its heading, with its notes below it."""
    parts = []
    for table in made:
        parts += [f"## {table.title}", markdown_table(list(HEADER), table.lines)]
        parts.append("\n".join(f"- {name}: {note}" for name, own in table.notes for note in own))
    return "\n\n".join(parts)

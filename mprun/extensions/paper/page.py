"""paper.md, paper.html and paper.json: the paper's tables and figures beside ours."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mprun.compare.report import picture, render, samples
from mprun.extensions.paper.figures import FIGURES, PaperFigure, shares_text
from mprun.extensions.paper.outcomes import NOT_RUN, RowOutcome
from mprun.extensions.paper.rows import PaperRow
from mprun.plots.panel import settings
from mprun.record.console import markdown_table
from mprun.record.run_directory import path_safe

SCALE = {
    "small": "Embedded data, networks reduced until a CPU trains them: numbers are not comparable "
    "with the paper's, outcomes are. The paper has one run per number and no interval.",
    "full": "The recipes on the paper's data, as far as those are public. The paper has one run "
    "per number and no interval.",
    "given": "Existing runs: outcomes compare with the paper's, numbers only on the same data. The "
    "paper has one run per number and no interval.",
}
HEADER = (
    "network",
    "paper: FP32",
    "technique",
    "paper",
    "paper: difference",
    "ours: FP32",
    "ours",
    "difference (+ is worse)",
    "verdict",
    "same outcome?",
)
FULL_HEADER = ("network", "recipe", "data below --data-root", "FP32, h", "AMP, h", "published")


@dataclass(slots=True)
class Table:
    """One table of the page as text.

    Attributes:
        notes: by network, the differences from the paper and further remarks.
    """

    title: str
    lines: list[list[str]] = field(default_factory=list)
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
    metric = f" {result.metric}" if result.metric else ""
    lines = []
    for number, line in enumerate(found.lines):
        arm = line.arm
        first = number == 0
        shown = f" ({found.row.metric} {line.shown})" if line.shown else ""
        base = f" ({found.row.metric} {found.fp32_shown})" if found.fp32_shown else ""
        judged = f"{found.metric} {found.fp32}{base}" if found.fp32 else ""
        lines.append(
            [
                result.network if first else "",
                f"{result.fp32}{metric}" if first else "",
                arm.technique,
                arm.value or "–",
                result.difference(arm.value),
                judged if first else "",
                f"{line.value}{shown}",
                line.difference,
                line.verdict or NOT_RUN,
                line.same or "–",
            ]
        )
    return lines or [[result.network, f"{result.fp32}{metric}", *[""] * 6, NOT_RUN, NOT_RUN]]


def _notes(found: RowOutcome) -> list[str]:
    result = found.row.result
    notes = [f"paper: {result.data}; {result.scope}"]
    if found.network:
        notes.append(f"ours: {found.network}; {found.data}")
    if found.why_not:
        notes.append(f"not run: {found.why_not}")
    if differs := (*found.row.differs, *found.row.always):
        notes.append(f"differs from the paper: {'; '.join(differs)}")
    if found.discriminates is False:
        notes.append(
            "does not discriminate: FP16 without master weights matches, too, so this network at "
            "this size needs no technique of the paper"
        )
    if found.row.tried:
        notes.append(f"tried: {found.row.tried}")
    return notes


def full_lines(
    rows: Sequence[PaperRow], hours: Mapping[str, Mapping[str, float]]
) -> list[list[str]]:
    """Return the cost of each result at the paper's scale.

    Args:
        rows: rows of the paper.
        hours: recipe -> mode -> hours on one H200, the limit that `mprun bench --roofline` counts.
    """
    lines = []
    for row in rows:
        if row.full is None:
            lines.append([row.result.network, "", row.why_not, "", "", ""])
            continue
        own = hours.get(row.full.experiment, {})
        cost = [f"{own[mode]:.3g}" if mode in own else "" for mode in ("fp32", "amp")]
        missing = f", {row.full.missing}" if row.full.missing else ""
        data = f"{row.full.folder}{missing}"
        lines.append([row.result.network, row.full.experiment, data, *cost, row.full.published])
    return lines


@dataclass(slots=True)
class Page:
    """The content of the page.

    Attributes:
        facts: machine, versions, commands: name -> value.
        hours: as in `full_lines`.
        remarks: remarks on the runs as a whole, a line each.
    """

    scale: str
    found: list[RowOutcome]
    rows: Sequence[PaperRow]
    facts: Mapping[str, str]
    hours: Mapping[str, Mapping[str, float]]
    remarks: Sequence[str] = ()

    def write(self, folder: Path) -> Path:
        """Write the page; return the path of paper.md."""
        folder.mkdir(parents=True, exist_ok=True)
        with settings():
            figures = [
                self._figure(figure, found, folder)
                for figure in FIGURES
                for found in self.found
                if found.row.key == figure.row
            ]
        given = {
            "scale": SCALE[self.scale],
            "tables": tables(self.found),
            "header": HEADER,
            "figures": figures,
            "full_header": FULL_HEADER,
            "full": full_lines(self.rows, self.hours),
            "facts": self.facts,
            "remarks": self.remarks,
        }
        (folder / "paper.html").write_text(render("paper_page.html", **given), encoding="utf-8")
        (folder / "paper.json").write_text(self.json() + "\n", encoding="utf-8")
        path = folder / "paper.md"
        path.write_text(_markdown(given), encoding="utf-8")
        return path

    def _figure(self, figure: PaperFigure, found: RowOutcome, folder: Path) -> dict[str, Any]:
        """Return a figure's content: title, the message of the paper's, and ours if it exists."""
        drawing = figure.draw(found)
        name = f"{figure.key}-{found.slug}" if found.slug else figure.key
        pictures = [] if drawing is None else [picture(drawing, name, folder)]
        grids = samples(found.group) if figure.key == "fig6" and found.group else []
        for grid in grids:
            grid["file"] = f"{name}-{path_safe(grid['what'])}.png"
            shutil.copyfile(grid["path"], folder / grid["file"])
        ours = shares_text(found.probes, figure.kind) if figure.kind else ""
        return {
            "title": figure.title,
            "network": found.row.result.network,
            "shows": figure.shows,
            "ours": ours,
            "pictures": pictures,
            "grids": grids,
            "none": "" if pictures or grids else found.why_not or "nothing recorded",
        }

    def json(self) -> str:
        """Return the text of paper.json."""
        rows = {
            one.key: {
                "network": one.row.result.network,
                "place": one.row.result.place,
                "paper": one.row.result._asdict(),
                "ours": {"network": one.network, "data": one.data, "metric": one.metric},
                "differs": (*one.row.differs, *one.row.always),
                "fp32": one.fp32,
                "not_run": one.why_not,
                "discriminates": one.discriminates,
                "techniques": [
                    {
                        "technique": line.arm.technique,
                        "overrides": line.arm.overrides,
                        "paper": line.arm.value,
                        "mean": line.value,
                        "difference": line.difference,
                        "verdict": line.verdict or NOT_RUN,
                        "same_outcome": line.same,
                        "seeds": [] if line.found is None else line.found.verdict.seeds,
                        "values": []
                        if line.found is None
                        else [str(outcome.value) for outcome in line.found.outcomes],
                    }
                    for line in one.lines
                ],
            }
            for one in self.found
        }
        known = {"scale": self.scale, "facts": dict(self.facts), "rows": rows}
        known |= {"remarks": self.remarks} if self.remarks else {}
        return json.dumps(known | {"hours_on_h200": self.hours}, indent=1)


def _markdown(given: Mapping[str, Any]) -> str:
    parts = ["# Mixed Precision Training: the paper's results beside ours", given["scale"]]
    parts.append(tables_markdown(given["tables"]))
    if given["remarks"]:
        parts += ["## Remarks", "\n".join(f"- {remark}" for remark in given["remarks"])]
    if given["figures"]:
        parts.append("## Figures")
    for figure in given["figures"]:
        parts.append(f"### {figure['title']}: {figure['network']}")
        said = [f"- The paper's: {figure['shows']}"]
        said += [f"- {figure['ours']}"] if figure["ours"] else []
        said += [f"- Ours: not drawn ({figure['none']})."] if figure["none"] else []
        parts.append("\n".join(said))
        for one in figure["pictures"]:
            parts.append(f"![{figure['title']}]({one['file']})\n\n{one['caption']}")
        for grid in figure["grids"]:
            parts.append(f"![samples]({grid['file']})\n\n{grid['what']}")
    parts += [
        "## At the paper's scale",
        "Hours on one H200: the limit that `mprun bench --roofline` counts for the whole recipe, "
        "without evaluation; a run takes longer.",
        markdown_table(list(FULL_HEADER), given["full"]),
        "## How it was made",
        "\n".join(f"- {name}: {value}" for name, value in given["facts"].items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def tables_markdown(made: Sequence[Table]) -> str:
    """Format each table below its heading, with its notes below it."""
    parts = []
    for table in made:
        parts += [f"## {table.title}", markdown_table(list(HEADER), table.lines)]
        parts.append("\n".join(f"- {name}: {note}" for name, own in table.notes for note in own))
    return "\n\n".join(parts)

"""paper.md, paper.html and paper.json: tables and figures of the paper beside ours."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mprun.comparison.curves import curves
from mprun.comparison.gap_growth import TRAINING, evaluation
from mprun.comparison.numerics import (
    PREFIX,
    ProbedMode,
    exponent_shares,
    histogram,
    numerics_figures,
    probed_run,
    share_text,
)
from mprun.comparison.report import picture, render, samples
from mprun.extensions.paper.outcomes import FAILED, NOT_RUN, RowOutcome, counted
from mprun.extensions.paper.rows import HOURS, PaperFigure, PaperRow
from mprun.extensions.paper.rows import settings as settled
from mprun.numerics.exponent_shares import ratio
from mprun.numerics.probe_record import TensorStats
from mprun.plots.panel import INK, SHIPPED, Drawing, Style, settings, styles
from mprun.record.console import markdown_table
from mprun.record.run_directory import path_safe, write_json, write_text
from mprun.record.run_record import read_record

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
_POINTS = 160  # of a curve
_MANTISSA, _LEAST = 10, -24  # bits of FP16, and the exponent of its smallest number
_UPDATE, _HALF_ULP = "|update|", "half an ulp of the weight in FP16"


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


def _full_line(row: PaperRow) -> list[str]:
    """Return the cost of a result at the paper's scale."""
    if row.full is None:
        return [row.result.network, "", row.why_not, "", "", ""]
    own = row.full.hours
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
    remarks: Sequence[str] = ()  # on the runs as a whole, a line each
    seeds: str = ""  # whether settings were chosen on the judged seeds

    def write(self, folder: Path) -> Path:
        """Write the page; return the path of paper.md."""
        folder.mkdir(parents=True, exist_ok=True)
        every = [(figure, found) for found in self.found for figure in found.row.figures]
        with settings():
            figures = [figure_of(*one, folder) for one in sorted(every, key=lambda one: one[0].key)]
        own, full = tables(self.found), [*map(_full_line, self.rows)]
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
        return json.dumps(known | {"hours_on_h200": HOURS}, indent=1)


def tables_markdown(made: Sequence[Table]) -> str:
    """Format each table below its heading, with its notes below it."""
    parts = []
    for table in made:
        parts += [f"## {table.title}", markdown_table(list(HEADER), table.lines)]
        parts.append("\n".join(f"- {name}: {note}" for name, own in table.notes for note in own))
    return "\n\n".join(parts)


def probes_of(found: RowOutcome) -> ProbedMode | None:
    """Return what was counted in the tensors of an FP32 run; None if nothing was."""
    mode = None if found.probes is None else probed_run(found.probes, "fp32", 0)
    return None if mode is None or mode.damage else mode


def mechanism(found: RowOutcome) -> str:
    """Say how much of an FP32 run FP16 would lose: gradients below 2^-24, and updates."""
    probes = probes_of(found)
    if probes is None:
        return ""
    parts = [_below_text(probes, kind) for kind in probes.known_gradients()]
    if probes.lost.nonzero:
        share = share_text(probes.lost.share("fp16"))
        parts.append(f"{share} of the updates change no FP16 weight (less than half an ulp)")
    count = f"{len(probes.steps)} probe{'s' * (len(probes.steps) > 1)}"
    assert found.probes is not None  # it has probes
    record = read_record(found.probes)
    mode = record["precision"]["mode"]
    run = "an FP32 run" if mode == "fp32" else f"a run in {mode}"
    return f"{run}, seed {record['seed']}, {count}: {'; '.join(parts)}"


def _below_text(probes: ProbedMode, kind: str) -> str:
    shares, zeros = exponent_shares(probes.gradients[kind])
    below = sum(share for exponent, share in shares.items() if exponent < _LEAST)
    not_zero = share_text(below / 100)
    words = kind.replace("_", " ")
    return f"of all {words} {share_text(zeros / 100)} are zero, {not_zero} others below 2^-24"


def figure_of(figure: PaperFigure, found: RowOutcome, folder: Path) -> dict[str, Any]:
    """Draw a figure into `folder`; return its title, the message of the paper's, and ours."""
    probes = probes_of(found) if figure.is_histogram else None
    name = f"{figure.key}-{found.slug}" if found.slug else figure.key
    pictures = []
    for number, drawing in enumerate(_drawings(figure, found, probes)):
        pictures.append(picture(drawing, f"{name}-{drawing.name}" if number else name, folder))
    grids = samples(found.group) if not figure.draws and found.group else []
    for grid in grids:
        grid["file"] = f"{name}-{path_safe(grid['what'])}.png"
        (folder / grid["file"]).unlink(missing_ok=True)  # perhaps a link
        shutil.copyfile(grid["path"], folder / grid["file"])
    return {
        "title": f"Figure {figure.key.removeprefix('fig')}",
        "network": found.row.result.network,
        "shows": figure.shows,
        "ours": _message(figure, found, probes) if pictures or grids else "",
        "pictures": pictures,
        "grids": grids,
        "none": "" if pictures or grids else found.why_not or "nothing recorded",
    }


def _drawings(
    figure: PaperFigure, found: RowOutcome, probes: ProbedMode | None
) -> Iterator[Drawing]:
    if probes is not None:
        name = PREFIX + figure.draws.replace("_", "-")
        drawn = numerics_figures([probes], styles(["fp32"]))
        yield from (drawing for drawing in drawn if drawing.name == name)
        if figure.draws == "weight_gradients" and (updates := _updates(probes)) is not None:
            yield updates
    elif figure.draws and not figure.is_histogram and found.group is not None:
        looks = styles(row.arm.label for row in found.group.every_row)
        metric = found.row.metric or found.metric
        chosen = TRAINING[0] if figure.draws == "training" else evaluation(metric)
        if (drawing := curves(found.group, looks, chosen, _POINTS)) is not None:
            yield drawing


def _updates(probes: ProbedMode) -> Drawing | None:
    """Draw the sizes of the updates beside what FP16 weights of their size can take up."""
    if not {"updates", "weights"} <= probes.tensors.keys():
        return None
    updates, weights = probes.tensors["updates"], probes.tensors["weights"]
    found = {_UPDATE: _shares(updates, dict), _HALF_ULP: _shares(weights, _half_ulps)}
    looks = {_UPDATE: Style(INK), _HALF_ULP: Style(SHIPPED["fp16_naive"], (5.0, 2.0))}
    title = "Updates, and what an FP16 weight takes up"
    drawing = histogram("updates", title, found, looks, "absolute value")
    if drawing is not None:
        lost = share_text(probes.lost.share("fp16"))
        drawing.caption += (
            " An update is what the optimizer adds to a weight, learning rate times gradient in "
            f"the simplest case. Weight by weight, {lost} of those that are not 0 are lost in FP16."
        )
    return drawing


def _shares(stats: TensorStats, of: Any) -> tuple[dict[int, float], float]:
    """Return exponent -> percent of the finite values, `of` them, and the percent of zeros."""
    counts: dict[int, int] = of(stats.counts.by_exponent())
    total = stats.counts.zeros + sum(counts.values())
    shares = {exponent: 100 * count / total for exponent, count in sorted(counts.items())}
    return shares, 100 * ratio(stats.counts.zeros, total)


def _half_ulps(counts: dict[int, int]) -> dict[int, int]:
    """Return the exponents of half the gap above FP16 numbers of these exponents, counted."""
    found: dict[int, int] = {}
    for exponent, count in counts.items():
        half = max(exponent - _MANTISSA, _LEAST) - 1
        found[half] = found.get(half, 0) + count
    return found


def _message(figure: PaperFigure, found: RowOutcome, probes: ProbedMode | None) -> str:
    """Say in numbers what ours shows: shares of a histogram, or the arms that leave FP32."""
    in_small = "" if found.slug else figure.in_small
    if probes is not None:
        told = [mechanism(found)] if figure.draws in probes.gradients else []
        return f"Ours: {told[0]}. {in_small}".rstrip() if told else ""
    if not figure.draws or found.group is None:
        return ""
    ran = [line for line in found.lines if line.verdict != NOT_RUN]
    told = [f"{line.technique}: {line.verdict}, {line.difference or 'no value'}" for line in ran]
    left = any(line.verdict in FAILED for line in ran)
    why = "" if left else " No curve leaves FP32's."
    return f"Ours: {'; '.join(told)}.{why} {in_small}".rstrip()

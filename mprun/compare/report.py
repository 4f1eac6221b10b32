"""report.html: the whole comparison on one page that needs nothing but itself, and PNG files.

No script and no link that leads out: the page works from a mail, offline and on paper. Curves get
fewer points, then figures are left to the PNG files, until the page is below 1 MB. What it says is
in `templates/`, where every value is escaped; here is what they are given.
"""

import base64
import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from mprun.compare import text
from mprun.compare.divergence import MOST_SKIPS_IN_A_ROW
from mprun.compare.equivalence import ALPHA, FEWEST_SEEDS
from mprun.compare.figures import group_figures
from mprun.compare.findings import Comparison, Group, is_gan
from mprun.compare.numerics import PREFIX, ProbedMode, probed_modes
from mprun.compare.paper import HEADER, PaperRow
from mprun.config.roles import flat
from mprun.plots.panel import INK, MARKS, Style, inline_svg, settings, styles

LIMIT = 1_000_000  # bytes of report.html
_DPI = 160
_POINTS = 240  # of a curve, in the PNG files and on a page with room
_GRID_PIXELS = 360  # width of an embedded sample grid
# (points of a curve, figures shown or None for all): the first that fits is taken.
_MAIN = ("intervals", "loss-steps")
_LEVELS: tuple[tuple[int, tuple[str, ...] | None], ...] = (
    (_POINTS, None),
    (120, None),
    (60, None),
    (30, None),
    (60, _MAIN),
    (30, _MAIN),
    (30, _MAIN[:1]),
    (30, ()),
)


def _powers(plain: str) -> Markup:
    """ "2^9" as a power."""
    return Markup(re.sub(r"\b2\^(-?[\d.]+)", r"2<sup>\1</sup>", str(escape(plain))))


def _two_lines(plain: str) -> Markup:
    """What stands in brackets goes below, in a fainter colour."""
    first, bracket, rest = escape(plain).partition(" (")
    below = Markup('<br><span class="nowrap faint">({}</span>')
    return first + (below.format(rest) if bracket else "")


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_TEMPLATES.filters |= {
    "powers": _powers,
    "two_lines": _two_lines,
    # A label may break after an underscore.
    "breakable": lambda label: escape(label).replace("_", Markup("_<wbr>")),
}
_TEMPLATES.globals |= {
    name: getattr(text, name)
    for name in (
        *("answer", "baseline_name", "cells", "level_text", "margin_text", "metric_name"),
        *("setting_text", "value_text"),
    )
} | {
    "marks": MARKS,
    "alpha": ALPHA,
    "fewest_seeds": FEWEST_SEEDS,
    "most_skips": MOST_SKIPS_IN_A_ROW,
}


def write_report(comparison: Comparison, folder: Path, paper: Sequence[PaperRow] = ()) -> Path:
    """Write report.html and `<slug>-<figure>.png` into `folder`; return the page's path.

    paper: what is shown beside the paper, after the groups. The same comparison gives the same
    bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for group in comparison.groups for row in group.every_row]
    report = _Report(comparison, styles(row.arm.label for row in rows), paper_html(paper))
    with settings(), warnings.catch_warnings():
        # A label in a script that the PNG's font lacks; the page itself shows it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        for group in comparison.groups:
            for drawing in group_figures(group, report.looks, _POINTS, report.probes[group.slug]):
                path = folder / f"{group.slug}-{drawing.name}.png"
                # matplotlib would write its own version into it, which says nothing of the runs.
                drawing.figure.savefig(path, dpi=_DPI, metadata={"Software": None})
        page = report.fitting_page()
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def paper_html(rows: Sequence[PaperRow]) -> Markup:
    """The rows beside the paper's as an HTML fragment; empty without rows."""
    return _render("paper.html", rows=rows, header=HEADER) if rows else Markup("")


def numerics_html(modes: Sequence[ProbedMode], looks: dict[str, Style]) -> Markup:
    """The tables of what was probed, with what their words mean; empty without a probe."""
    return _render("numerics.html", probes=modes, colours=_colours(looks))


def _render(template: str, **given: Any) -> Markup:
    return Markup(_TEMPLATES.get_template(template).render(**given).strip())


def _colours(looks: dict[str, Style]) -> dict[str, str]:
    return {label: style.colour.replace(INK, "currentColor") for label, style in looks.items()}


class _Report:
    """The page of a comparison, made with less and less until it fits."""

    def __init__(self, comparison: Comparison, looks: dict[str, Style], paper: Markup):
        self.comparison, self.looks, self.paper = comparison, looks, paper
        self.probes = {group.slug: probed_modes(group) for group in comparison.groups}

    def fitting_page(self) -> Markup:
        """The page with as many points and figures as there is room for."""
        groups = self.comparison.groups
        for points, kept in _LEVELS:
            sections: list[Markup] = []
            for group in groups:
                sections.append(self._section(group, points, kept))
                if len(groups) * len(sections[0]) > LIMIT:  # what one takes tells of all
                    break
            else:
                page = self._page(sections)
                if len(page.encode()) < LIMIT:
                    return page
        return self._page([self._section(group, *_LEVELS[-1], details=False) for group in groups])

    def _page(self, sections: list[Markup]) -> Markup:
        given = {"comparison": self.comparison, "paper": self.paper, "sections": sections}
        return _render("report.html", several=len(sections) > 1, **given)

    def _section(
        self, group: Group, points: int, kept: tuple[str, ...] | None, details: bool = True
    ) -> Markup:
        probes = self.probes[group.slug]
        pictures = []
        for drawing in group_figures(group, self.looks, points, probes):
            name = f"{group.slug}-{drawing.name}"
            has_room = kept is None or drawing.name in kept
            svg = inline_svg(drawing.figure, name, drawing.label) if has_room else ""
            shown = {"file": f"{name}.png", "caption": drawing.caption, "svg": svg}
            pictures.append({**shown, "of_probes": drawing.name.startswith(PREFIX)})
        alike, differing = _environment(group)
        methods = {row.verdict.method for row in group.rows if row.verdict.method}
        how = {"paired": "paired by seed", "Welch": "unpaired (Welch)"}
        return _render(
            "group.html",
            comparison=self.comparison,
            group=group,
            several=len(self.comparison.groups) > 1,
            colours=_colours(self.looks),
            pictures=pictures,
            samples=_samples(group) if kept is None else [],
            probes=probes,
            details=details,
            outcomes_by_seed=_outcomes_by_seed(group),
            methods=" and ".join(how[method] for method in sorted(methods)),
            foreign=any(run.foreign for run in group.baseline.arm.runs),
            gan=is_gan(group.keys),
            shared_keys=_filled(flat(group.keys)),
            one_machine=alike,
            other_machines=differing,
        )


def _filled(keys: dict[str, Any]) -> dict[str, Any]:
    """Without the mappings that hold nothing."""
    return {key: value for key, value in keys.items() if value != {}}


def _outcomes_by_seed(group: Group) -> list[tuple[int, list]]:
    """(seed, the outcome of each row or None), seeds ascending."""
    by_seed = [{outcome.seed: outcome for outcome in row.outcomes} for row in group.every_row]
    seeds = sorted({seed for outcomes in by_seed for seed in outcomes})
    return [(seed, [outcomes.get(seed) for outcomes in by_seed]) for seed in seeds]


def _environment(group: Group) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """Machine, versions and numeric flags: key -> value where all runs agree; else -> labels."""
    where: dict[str, dict[str, list[str]]] = {}
    for row in group.every_row:
        for run in row.arm.runs:
            for key, value in _filled(flat(run.environment | {"flags": run.flags})).items():
                by_value = where.setdefault(key, {})
                by_value.setdefault(text.setting_text(value), []).append(row.arm.label)
    alike = {key: next(iter(values)) for key, values in where.items() if len(values) == 1}
    return alike, {key: values for key, values in where.items() if len(values) > 1}


def _samples(group: Group) -> list[dict[str, Any]]:
    """Per mode the images of the lowest seed that all modes have some of, if there is one."""
    found = [
        (row.arm.label, {run.seed: run.sample_grid for run in row.arm.runs if run.sample_grid})
        for row in group.every_row
    ]
    found = [(label, grids) for label, grids in found if grids]
    shared = set.intersection(*(set(grids) for _, grids in found)) if found else set()
    chosen = [(label, min(shared or grids), grids) for label, grids in found]
    return [
        {"what": f"{label}, seed {seed}", **_jpeg(Path(grids[seed]))}
        for label, seed, grids in chosen
    ]


def _jpeg(path: Path) -> dict[str, Any]:
    """data (base64), width and height of the image, made smaller; no data if it is not readable."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return {"data": None}
    image.thumbnail((_GRID_PIXELS, 4 * _GRID_PIXELS))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=72)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"data": data, "width": image.width, "height": image.height}

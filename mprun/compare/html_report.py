"""report.html: the whole comparison on one page that needs nothing but itself, and PNG files.

No script and no link that leads out: the page works from a mail, offline and on paper. Curves get
fewer points, then figures are left to the PNG files, until the page is below 1 MB.
"""

import base64
import io
import warnings
from collections.abc import Iterator
from html import escape
from pathlib import Path

import matplotlib

from mprun.compare import html_background as background
from mprun.compare import html_sections as sections
from mprun.compare.figures import group_figures
from mprun.compare.figures_numerics import PREFIX
from mprun.compare.findings import Comparison, Group, RunData
from mprun.compare.numerics_section import numerics_tables
from mprun.compare.probed_modes import ProbedMode, probed_modes
from mprun.plots.inline_svg import inline_svg
from mprun.plots.palette import Style
from mprun.plots.palette import styles as styles_of
from mprun.plots.panel import Drawing, settings

LIMIT = 1_000_000  # bytes of report.html
_DPI = 160
_POINTS = 240  # of a curve, in the PNG files and on a page with room
_GRID_PIXELS = 360  # width of an embedded sample grid
# (points of a curve, figures shown or None for all): the first that fits is taken.
_MAIN = ("intervals", "loss-steps")
_LEVELS = (
    (_POINTS, None),
    (120, None),
    (60, None),
    (30, None),
    (60, _MAIN),
    (30, _MAIN),
    (30, _MAIN[:1]),
    (30, ()),
)

Pictures = list[tuple[Drawing, str | None]]  # with its inline SVG, None where there is no room
Probes = dict[str, list[ProbedMode]]  # slug of a group -> what its probes say


def write_report(comparison: Comparison, folder: Path, beside_paper: str = "") -> Path:
    """Write report.html and `<slug>-<figure>.png` into `folder`; return the page's path.

    beside_paper: an HTML fragment that follows the groups, from `paper.paper_html`. The same
    comparison gives the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for group in comparison.groups for row in (group.baseline, *group.rows)]
    styles = styles_of(row.arm.label for row in rows)
    probes = {group.slug: probed_modes(group) for group in comparison.groups}
    with settings(), warnings.catch_warnings():
        # A label in a script that the PNG's font lacks; the page itself shows it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        for group in comparison.groups:
            _write_pngs(group, styles, probes, folder)
        page = _fitting(comparison, styles, probes, beside_paper)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _write_pngs(group: Group, styles: dict[str, Style], probes: Probes, folder: Path) -> None:
    for drawing in group_figures(group, styles, _POINTS, probes[group.slug]):
        path = folder / f"{group.slug}-{drawing.name}.png"
        # matplotlib would write its own version into the file, which says nothing of the runs.
        drawing.figure.savefig(path, dpi=_DPI, metadata={"Software": None})


def _fitting(
    comparison: Comparison, styles: dict[str, Style], probes: Probes, beside_paper: str
) -> str:
    """The page with as many points and figures as there is room for."""
    groups = comparison.groups
    for points, kept in _LEVELS:
        samples = kept is None
        if len(groups) > 1:  # what one group takes tells that all would be too much
            one = _pictures(groups[0], styles, probes, points, kept)
            if (
                len(groups) * len(_group(comparison, groups[0], styles, probes, one, samples))
                > LIMIT
            ):
                continue
        pictures = [_pictures(group, styles, probes, points, kept) for group in groups]
        page = _page(comparison, styles, probes, pictures, beside_paper, samples)
        if len(page.encode()) < LIMIT:
            return page
    pictures = [_pictures(group, styles, probes, *_LEVELS[-1]) for group in groups]
    return _page(comparison, styles, probes, pictures, beside_paper, samples=False, details=False)


def _pictures(
    group: Group,
    styles: dict[str, Style],
    probes: Probes,
    points: int,
    kept: tuple[str, ...] | None,
) -> Pictures:
    found: Pictures = []
    for drawing in group_figures(group, styles, points, probes[group.slug]):
        name, svg = f"{group.slug}-{drawing.name}", None
        if kept is None or drawing.name in kept:
            with matplotlib.rc_context({"svg.hashsalt": name}):
                svg = inline_svg(drawing.figure, name, drawing.label)
        found.append((drawing, svg))
    return found


def _page(
    comparison: Comparison,
    styles: dict[str, Style],
    probes: Probes,
    pictures: list[Pictures],
    beside_paper: str,
    samples: bool,
    details: bool = True,
) -> str:
    groups = comparison.groups
    title = groups[0].title if len(groups) == 1 else f"{len(groups)} configurations"
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    top = [f"<h1>{escape(title)}: does lower precision match FP32?</h1>"]
    if len(groups) == 1:
        top.append(sections.answers(groups[0]))
    else:
        for group in groups:
            top.append(f'<h3><a href="#{escape(group.slug)}">{escape(group.title)}</a></h3>')
            top.append(sections.answers(group))
    if not groups:
        top.append("<p>Nothing was compared.</p>")
    top.append(sections.stamps(comparison))
    body = "".join(
        _group(comparison, group, styles, probes, own, samples, details)
        for group, own in zip(groups, pictures, strict=True)
    )
    left_out = "".join(f"<li>{escape(line)}</li>" for line in comparison.not_compared)
    left_out = f"<h3>Not compared</h3><ul>{left_out}</ul>" if left_out else ""
    notes = "".join(f"<li>{escape(line)}</li>" for line in comparison.notes)
    left_out += f"<h3>Notes</h3><ul>{notes}</ul>" if notes else ""
    paper = f'<section class="group"><h2>Beside the paper</h2>{beside_paper}</section>'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{escape(title)}: mprun compare</title>
<style>
{css}</style>
</head>
<body>
<header>{"".join(top)}</header>
<main>{body}{paper if beside_paper else ""}{left_out}</main>
<footer>mprun {escape(comparison.version)}, compared {escape(comparison.created)}.
This page needs no network and no script; its figures lie beside it as PNG files.</footer>
</body>
</html>
"""


def _group(
    comparison: Comparison,
    group: Group,
    styles: dict[str, Style],
    probes: Probes,
    pictures: Pictures,
    samples: bool,
    details: bool = True,
) -> str:
    heading = f"<h2>{escape(group.title)}</h2>" if len(comparison.groups) > 1 else ""
    numbers = [p for p in pictures if p[0].name.startswith(PREFIX)]
    parts = [
        heading,
        sections.verdict_table(group, styles),
        sections.sentences(group),
        _figures(group, "Figures", [p for p in pictures if p not in numbers]),
        _figures(group, "Numerics: what FP16 can hold", numbers),
        _sample_grids(group) if samples else "",
    ]
    if details:
        parts += [
            numerics_tables(probes[group.slug], styles),
            "<h3>Outcome per seed</h3>",
            sections.seed_table(group, styles),
            "<h3>How the verdict is made</h3>",
            background.method(comparison, group),
            "<h3>Configuration</h3>",
            background.configuration(group),
            "<h3>Environment</h3>",
            background.environment(group),
        ]
    return f'<section class="group" id="{escape(group.slug)}">{"".join(parts)}</section>\n'


def _figures(group: Group, heading: str, pictures: Pictures) -> str:
    shown = "".join(
        f"<figure>{svg}<figcaption>{escape(drawing.caption)}</figcaption></figure>\n"
        for drawing, svg in pictures
        if svg is not None
    )
    only = [f"{group.slug}-{drawing.name}.png" for drawing, svg in pictures if svg is None]
    if only:
        names = ", ".join(f"<code>{escape(name)}</code>" for name in only)
        shown += f'<p class="faint">Left out to keep the page below 1 MB: {names}.</p>'
    return f'<h3>{heading}</h3><div class="figures">{shown}</div>' if shown else ""


def _sample_grids(group: Group) -> str:
    shown = []
    for label, run in _runs_with_samples(group):
        image = _jpeg(Path(run.sample_grid))
        what = f"{label}, seed {run.seed}"
        if image is None:
            shown.append(f"<figure><figcaption>{escape(what)}: not readable</figcaption></figure>")
            continue
        data, width, height = image
        shown.append(
            f'<figure><img width="{width}" height="{height}" alt="Generated images of '
            f'{escape(what)}" src="data:image/jpeg;base64,{data}">'
            f"<figcaption>{escape(what)}</figcaption></figure>"
        )
    if not shown:
        return ""
    return f'<h3>Generated images</h3><div class="samples">{"".join(shown)}</div>'


def _runs_with_samples(group: Group) -> Iterator[tuple[str, RunData]]:
    """(label, run) per mode: of the lowest seed that all modes have samples of, if there is one."""
    arms = [row.arm for row in (group.baseline, *group.rows)]
    found = [(arm.label, {run.seed: run for run in arm.runs if run.sample_grid}) for arm in arms]
    found = [(label, runs) for label, runs in found if runs]
    shared = set.intersection(*(set(runs) for _, runs in found)) if found else set()
    for label, runs in found:
        yield label, runs[min(shared or runs)]


def _jpeg(path: Path) -> tuple[str, int, int] | None:
    """(base64, width, height) of the image, made smaller; None if it cannot be read."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    image.thumbnail((_GRID_PIXELS, 4 * _GRID_PIXELS))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=72)
    return base64.b64encode(buffer.getvalue()).decode(), *image.size

"""Write report.html, the whole comparison on one self-contained page, and PNG files.

The page has no link that leads out and works from a mail, offline, on paper and without its only
script, which makes the figures interactive. To keep it below 1 MB, curves first get fewer points,
then figures are left to the PNG files. The page's text is in `templates/`, which escapes every
value; this module supplies the values.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from mprun.comparison import text_outputs
from mprun.comparison import wording as text
from mprun.comparison.divergence import MOST_SKIPS_IN_A_ROW
from mprun.comparison.equivalence import ALPHA, FEWEST_SEEDS
from mprun.comparison.figures import group_figures
from mprun.comparison.findings import Comparison, Group, RunData, is_gan
from mprun.comparison.numerics import PREFIX, probed_modes
from mprun.errors import BadInput
from mprun.plots.panel import INK, MARKS, Drawing, inline_svg, settings, styles
from mprun.record.console import counted
from mprun.record.keys import flat, recorded_keys
from mprun.record.run_directory import replacing, write_json, write_text
from mprun.record.seal import content_of

LIMIT = 1_000_000  # bytes of report.html
_MOST_FIGURES = 54  # of all groups together; each takes about 0.15 s
_SVG = re.compile("<svg.*?</svg>", re.DOTALL)
_DPI = 160
_POINTS = 240  # points of a curve on a page with room
_GRID_PIXELS = 360  # width of an embedded sample grid
_UNFINISHED = {"format": 1, "figures": list[str]()}  # results.json until all is there
# (points of a curve, figures shown or None for all): the first level that fits is used.
_MAIN = ("intervals", "difference", "loss-steps", "loss-scale")  # not folded
_LEVELS: list[tuple[int, tuple[str, ...] | None]] = [
    *((points, None) for points in (_POINTS, 120, 60, 30)),
    *((60, _MAIN[:3]), (30, _MAIN[:3]), (30, _MAIN[:1]), (30, ())),
]


def _two_lines(plain: str) -> Markup:
    """Put the part in brackets on a second line, in a fainter colour."""
    first, bracket, rest = escape(plain).partition(" (")
    below = Markup('<br><span class="nowrap faint">({}</span>')
    return first + (below.format(rest) if bracket else "")


_TEMPLATES = text.templates()
_TEMPLATES.filters |= {
    "powers": lambda plain: Markup(
        re.sub(r"\b2\^(-?[\d.]+)", r"2<sup>\1</sup>", str(escape(plain)))
    ),
    "two_lines": _two_lines,
    "lines": lambda plain: Markup("<br>").join(plain.split("\n")),
    "zip": lambda some, others: zip(some, others, strict=True),
    "capital": lambda plain: plain[:1].upper() + plain[1:],
    # A label may break after an underscore.
    "breakable": lambda label: escape(label).replace("_", Markup("_<wbr>")),
}
_TEMPLATES.globals |= {
    **vars(text),
    "marks": MARKS,
    "alpha": ALPHA,
    "fewest_seeds": FEWEST_SEEDS,
    "most_skips": MOST_SKIPS_IN_A_ROW,
}


def write_folder(comparison: Comparison, folder: Path) -> Path:
    """Write report.html, report.md, results.json and the figures; return the page's path.

    An earlier comparison in `folder` is replaced. The same comparison gives the same bytes.
    BadInput if the folder holds something else or cannot be created.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {folder}: must be a folder")
    earlier = _earlier_figures(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot be created ({error.strerror})") from None
    for name in earlier:  # perhaps of other groups
        (folder / name).unlink(missing_ok=True)
    # One that ends before its page is replaced by the next one, too.
    write_json(folder / "results.json", _UNFINISHED, durable=False)
    report = folder / "report.html"
    with settings():
        write_text(report, _Report(comparison, folder).fitting_page())
    write_text(folder / "report.md", text_outputs.markdown(comparison) + "\n")
    # The figures of a page that `mprun paper` wrote are not listed.
    own = (folder.glob(f"{group.slug}-*.png") for group in comparison.groups)
    figures = sorted({path.name for found in own for path in found})
    found = text_outputs.results(comparison) | {"figures": figures}
    write_json(folder / "results.json", found, durable=False, allow_nan=False)
    return report


def _earlier_figures(folder: Path) -> list[str]:
    """Return the figures of an earlier comparison in `folder`; BadInput if it holds other files.

    Only files that results.json lists are ever deleted.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return []
    try:
        content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        is_whole = (folder / "report.html").is_file()
        if content["format"] == 1 and (is_whole or content == _UNFINISHED):
            return [name for name in content["figures"] if Path(name).name == name]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BadInput(f"--out {folder}: contains other files; choose an empty or a new folder")


def render(template: str, **given: Any) -> Markup:
    """Render a page, or a part of one, from `templates/`; the arguments are escaped."""
    return Markup(_TEMPLATES.get_template(template).render(**given).strip())


class _Report:
    """The page of a comparison, built with less and less content until it fits."""

    def __init__(self, comparison: Comparison, folder: Path):
        self.comparison, self.folder = comparison, folder
        rows = [row for group in comparison.groups for row in group.every_row]
        self.looks = styles(row.arm.label for row in rows)
        self.colours = {
            label: style.colour.replace(INK, "currentColor") for label, style in self.looks.items()
        }
        self.probes = {group.slug: probed_modes(group) for group in comparison.groups}
        self.most = _MOST_FIGURES // max(1, len(comparison.groups))  # of each group
        self.written: set[str] = set()  # PNG files

    def fitting_page(self) -> Markup:
        """Return the page with as many points and figures as fit; write the PNG files."""
        groups = self.comparison.groups
        for level in _LEVELS:
            sections: list[Markup] = []
            for group in counted(groups, "drawing configurations"):
                sections.append(self._section(group, *level))
                if len(groups) * len(sections[0]) > LIMIT:  # one section tells the size of all
                    break
            else:
                page = self._page(sections)
                if len(page.encode()) < LIMIT:
                    return page
            if len(groups) * len(_SVG.sub("", sections[0])) > LIMIT:
                break  # no level of figures makes the text fit
        return self._page([self._section(group, *_LEVELS[-1], details=False) for group in groups])

    def _page(self, sections: list[Markup]) -> Markup:
        given = {"comparison": self.comparison, "sections": sections}
        script = _TEMPLATES.get_template("report.js").render()
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        given |= {"script": Markup(script), "script_hash": f"sha256-{digest}"}
        given |= {"facts_of": _facts, "purpose_of": _purpose}
        return render("report.html", several=len(sections) > 1, most=self.most, **given)

    def _section(
        self, group: Group, points: int, kept: tuple[str, ...] | None, details: bool = True
    ) -> Markup:
        """Return the part of a group; figures that are not kept have no SVG."""
        pictures, probes = [], self.probes[group.slug]
        for drawing in group_figures(group, self.looks, points, probes, self.most):
            name, has_room = f"{group.slug}-{drawing.name}", kept is None or drawing.name in kept
            folder = None if name in self.written else self.folder
            shown = picture(drawing, name, folder, svg=has_room)
            pictures.append({"name": drawing.name, **shown})
            self.written.add(name)
        alike, differing = _environment(group)
        methods = {row.verdict.method for row in group.rows if row.verdict.method}
        how = {"paired": "paired by seed", "Welch": "unpaired (Welch)"}
        labels = [row.arm.label for row in group.every_row]
        by_seed = [{outcome.seed: outcome for outcome in row.outcomes} for row in group.every_row]
        seeds = sorted({seed for own in by_seed for seed in own})
        return render(
            "group.html",
            comparison=self.comparison,
            group=group,
            several=len(self.comparison.groups) > 1,
            colours=self.colours,
            columns=_columns(group),
            modes=[{"label": label, "colour": self.colours[label]} for label in labels],
            pictures=_placed(pictures),
            samples=samples(group) if kept is None else [],
            probes=probes,
            details=details,
            outcomes_by_seed=[(seed, [own.get(seed) for own in by_seed]) for seed in seeds],
            methods=" and ".join(how[method] for method in sorted(methods)),
            foreign=group.baseline.arm.foreign,
            gan=is_gan(group.keys),
            differing=_differing(group),
            shared_keys=_filled(flat(group.keys)),
            one_machine=alike,
            other_machines=differing,
        )


def _placed(pictures: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Return the pictures at the top, behind a fold, and of the probes, each in its order."""
    probed = [shown for shown in pictures if shown["name"].startswith(PREFIX)]
    rest = [shown for shown in pictures if shown not in probed]
    first = [shown for shown in rest if shown["name"] in _MAIN]
    first += [shown for shown in rest if shown not in first][: len(_MAIN) - len(first)]
    rest = [shown for shown in rest if shown not in first]
    return {"first": first, "rest": rest, "probed": probed}


def picture(drawing: Drawing, name: str, folder: Path | None, svg: bool = True) -> dict[str, str]:
    """Return a figure as a page needs it; with a folder, write its PNG file too."""
    if folder is not None:  # without matplotlib's version, which says nothing of the runs
        options: dict[str, Any] = {"metadata": {"Software": None}, "dpi": _DPI}
        options["pil_kwargs"] = {"compress_level": 3}  # as small as 6, in two thirds of the time
        with replacing(folder / f"{name}.png", durable=False) as file:
            drawing.figure.savefig(file, format="png", **options)
    return {
        "file": f"{name}.png",
        "caption": drawing.caption,
        "svg": inline_svg(drawing.figure, name, drawing.label) if svg else "",
        "live": json.dumps(drawing.values, separators=(",", ":")) if drawing.values else "",
    }


def _columns(group: Group) -> dict[str, str]:
    """Return name -> head for the non-empty columns of the verdict table."""
    base = text.baseline_name(group)
    interval = f"{text.level_text(group)} interval"
    heads = {
        "mode": "mode",
        "verdict": "verdict",
        "mean": f"{group.metric}, mean",
        "seeds": f"{group.counted}s",
        "difference": f"difference, {interval}\npositive is worse",
        "products": "products\ncomputed in,\nby calls",
        **{name: f"{name}\nover {base}" for name in ("speed", "peak memory", "activation memory")},
    }
    header, *_ = text.table(group, {})
    return {name: heads.get(name, name) for name in ("mode", *header)}


def _purpose(group: Group) -> str:
    """Return what the experiment tests, and when a mode matches."""
    chosen = {str(run.choices.get("experiment")) for run in group.every_run}
    told = recorded_keys().experiment(*chosen) if len(chosen) == 1 else None
    told = told or "The same training in each mode, so that only precision differs."
    if all(row.verdict.name == "not assessed" for row in group.rows):
        return told
    of = "" if group.relative else f" of {text.baseline_name(group)}'s"
    within = f"lies within ±{text.margin_text(group)}{of}"
    higher = " (higher is better)" * group.higher_is_better
    return f"{told} A mode matches if the interval of its {group.metric}{higher} {within}."


def _facts(group: Group) -> dict[str, str]:
    """Return the recorded facts, name -> value: what was run, where, with what and when."""
    runs, every = group.every_run, group.every_row

    def told(read: Callable[[RunData], Any]) -> str:
        """Return the different recorded values, at most three of them."""
        known = list(dict.fromkeys(str(value) for run in runs if (value := read(run))))
        more = [f"{len(known) - 3} more"] if len(known) > 3 else []
        return "; ".join([*known[:3], *more])

    def learned(kind: str) -> str:
        return told(lambda run: run.keys.get(f"{kind}.factory", run.choices.get(kind)))

    seeds = text.seeds_text({outcome.seed for row in every for outcome in row.outcomes})
    foreign, base = group.baseline.arm.foreign, text.baseline_name(group)
    dates = sorted({run.created[:10] for run in runs if run.created})
    batches = told(lambda run: run.keys.get("data.batch_size"))
    found = {
        "Baseline": "" if foreign or base == "FP32" else base,
        "Model": learned("model"),
        "Data": learned("data") + (f", batches of {batches}" if batches else ""),
        "Runs": f"{len(runs)}, in {len(every)} modes"
        + (f", seeds {seeds}" if group.by_seed else "")
        + (", logs of another tool" if foreign else ""),
        "Steps": told(lambda run: run.keys.get("train.steps"))
        or f"{max((run.last_step for run in runs), default=0):,}",
        "Hardware": told(lambda run: _hardware(run.environment)),
        "16-bit products": told(
            lambda run: run.half_products.replace("none", "").replace("-", " ")
        ),
        "torch": told(lambda run: (run.environment.get("packages") or {}).get("torch")),
        "Date": " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])),
    }
    return {name: value for name, value in found.items() if value}


def _hardware(environment: dict[str, Any]) -> str:
    """Return the machine in words: "Xeon, CPU, 1 thread"."""
    threads = environment.get("threads")
    counted = f"{threads} thread{'' if threads == 1 else 's'}" if threads else ""
    cpu = ", ".join(filter(None, [str(environment.get("cpu") or ""), counted]))
    return str(environment.get("gpu") or cpu)


def _differing(group: Group) -> dict[str, tuple[Any, dict[str, list[str]]]]:
    """Return key -> (the baseline's value, value -> labels) where a mode differs from it."""
    found: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for row in group.rows:
        for key, (before, own) in row.arm.differs.items():
            if key == "precision.name":  # the label says it
                continue
            _, by_value = found.setdefault(key, (text.setting_text(before), {}))
            by_value.setdefault(text.setting_text(own), []).append(row.arm.label)
    return found


def _filled(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys without empty mappings."""
    return {key: value for key, value in keys.items() if value != {}}


def _environment(group: Group) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """Return machine, versions and flags: key -> value if all runs agree, else value -> labels."""
    where: dict[str, dict[str, list[str]]] = {}
    for row in group.every_row:
        for run in row.arm.runs:
            for key, value in _filled(flat(run.environment | {"flags": run.flags})).items():
                by_value = where.setdefault(key, {})
                by_value.setdefault(text.setting_text(value), []).append(row.arm.label)
    alike = {key: next(iter(values)) for key, values in where.items() if len(values) == 1}
    return alike, {key: values for key, values in where.items() if len(values) > 1}


def samples(group: Group) -> list[dict[str, Any]]:
    """Return per mode the image grid of one seed, with the `path` of its file.

    The seed is the lowest that all modes with images have; without one, the lowest of each mode.
    """
    found = {}
    for row in group.every_row:
        grids = {run.seed: run.sample_grid for run in row.arm.runs if run.sample_grid}
        if grids:
            found[row.arm.label] = grids
    shared = set.intersection(*map(set, found.values())) if found else set()
    shown = []
    for label, grids in found.items():
        seed = min(shared or grids)
        path = grids[seed]
        shown.append({"what": f"{label}, seed {seed}", "path": path, **_jpeg(Path(path))})
    return shown


def _jpeg(path: Path) -> dict[str, Any]:
    """Return data (base64), width and height of the shrunk image; no data if it is unreadable."""
    from PIL import Image

    try:
        content = content_of(path.parent.parent, f"{path.parent.name}/{path.name}")
        with Image.open(io.BytesIO(content)) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return {"data": None}
    image.thumbnail((_GRID_PIXELS, 4 * _GRID_PIXELS))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=72)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"data": data, "width": image.width, "height": image.height}

"""The common style of all figures: colours, line styles, marks, and a panel per figure.

The colours are Okabe and Ito's eight, which colour-blind readers can distinguish, and a grey. A
brown replaces their yellow, which is too pale for a line on white. Labels that are no shipped mode
get further colours, readable on black and on white.

A panel is narrow enough to be read on a phone. Figures are matplotlib's, without pyplot: no window,
no state between two figures. A figure as SVG fits into a page: its ids are unique, it has no size,
no rules for the whole page and no metadata, and its ink is the page's text colour.
"""

import io
import math
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK = "#111111"  # text, axes and FP32: black; inline figures take the page's text colour instead

# The shipped modes, in the order of every table.
SHIPPED = {
    "fp32": INK,
    "tf32": "#808080",
    "fp16_naive": "#d55e00",
    "fp16_master": "#e69f00",
    "fp16_master_scaled": "#0072b2",
    "amp": "#009e73",
    "bf16_naive": "#8c6d1f",
    "bf16_master": "#cc79a7",
    "amp_bf16": "#56b4e9",
}
_FURTHER = ("#7a5cf0", "#d01c9f", "#5aa02c", "#c2253f", "#9a9a1f")
# matplotlib's on and off lengths, in units of the line width.
_DASHES = ((), (5.0, 2.0), (1.5, 1.5), (6.0, 2.0, 1.5, 2.0))

# A mark and a tone per verdict, so that colour is never the only difference.
MARKS = {
    "matches": ("✓", "good"),
    "better": ("▲", "odd"),
    "likely better": ("△", "odd"),
    "worse": ("✗", "bad"),
    "likely worse": ("▽", "doubtful"),
    "diverged": ("✗", "bad"),
    "invalid baseline": ("!", "bad"),
    "inconclusive": ("?", "doubtful"),
    "one pair": ("?", "neutral"),
    "not assessed": ("–", "neutral"),
}


@dataclass(frozen=True, slots=True)
class Style:
    """The style of one mode's lines."""

    colour: str
    dashes: tuple[float, ...] = ()

    @property
    def line(self) -> dict[str, Any]:
        """Return matplotlib's options for a line: colour and dashes."""
        return {"color": self.colour, "linestyle": (0, self.dashes) if self.dashes else "-"}


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """Choose a style per label, the same in every figure.

    A shipped mode has its own style, another label the first free one from a place that its name
    gives: a further colour, then that of a shipped mode that is not among the labels, then another
    line style. More than fifty labels get distinct styles.
    """
    labels = list(dict.fromkeys(labels))
    chosen = {label: Style(SHIPPED[label]) for label in labels if label in SHIPPED}
    for label in (label for label in labels if label not in chosen):
        start = zlib.crc32(label.encode()) % len(_FURTHER)
        colours = [*_FURTHER[start:], *_FURTHER[:start]]
        colours += [colour for colour in SHIPPED.values() if colour != INK]
        every = [Style(colour, dashes) for dashes in _DASHES for colour in colours]
        taken = set(chosen.values())
        chosen[label] = next((style for style in every if style not in taken), every[0])
    return chosen


_WIDTH, _LEFT, _RIGHT = 5.0, 0.62, 0.14  # inches; text of 9 points stays 10 pixels at 400 wide
_TOP, _BOTTOM, _LINE = 0.41, 0.5, 0.168
GREY = "#8a8a8a"

# In force while figures are made and written; the caller's settings return afterwards.
SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    **dict.fromkeys(("font.size", "axes.labelsize"), 9),
    **dict.fromkeys(("axes.titlesize", "axes.titlepad"), 10),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8.5),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor", "grid.color"), GREY),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.unicode_minus": True,
    "figure.facecolor": "white",
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label may hold a dollar sign
}
_LEGEND = {"frameon": False, "borderaxespad": 0, "borderpad": 0, "labelspacing": 0.25}

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
# Parts of the SVG that no setting removes: the text before the figure, rules for the whole page,
# comments, ids of groups (`figure_1`, the same in every figure), rotations by 0, indentation.
_NOT_INLINE = re.compile(
    r"^.*?(?=<svg)|<defs>\s*<style.*?</defs>|<!--.*?-->|(?<=<g) id=\"[^\"]*\"|(?<=\n)\s+"
    r'| transform="rotate\(-?0 [^"]*"',
    re.DOTALL,
)
# Parts that the page's script finds by name: the drawing and the legend of a mode, the ticks.
_NAMED = re.compile(r'(?<=<g) id="(?:(series|legend)-(\d+)|([xy])tick_\d+)"')
_TAG = re.compile(r"<[^>]*>")
_NUMBER = re.compile(r"-?\d+\.\d{2,}")


@dataclass(slots=True)
class Drawing:
    """A figure and its texts."""

    name: str  # end of the file name: "loss-steps"
    caption: str  # below the figure
    label: str  # description for a reader who cannot see the figure
    figure: Figure
    values: dict[str, Any] | None = None  # from `live_values`; None: the figure is static


@contextmanager
def settings() -> Iterator[None]:
    """Apply the settings inside the block, so that matplotlibrc does not change figures."""
    every = {**matplotlib.rcParamsDefault, "backend": "agg", **SETTINGS}
    with matplotlib.rc_context(every), warnings.catch_warnings():
        # A label may use a script that the PNG's font lacks; a page shows it by other fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def panel(title: str, height: float, entries: list | None = None, note: str = "", left=_LEFT):
    """Make (figure, axes) with a plot of `height` inches and room below for legend and note."""
    entries = entries or []
    longest = max((len(entry.get_label()) for entry in entries), default=0)
    columns = 3 if longest <= 16 else 2 if longest <= 30 else 1
    below = _BOTTOM + _LINE * (-(-len(entries) // columns) + bool(note))
    total = _TOP + height + below
    figure = Figure(figsize=(_WIDTH, total))
    FigureCanvasAgg(figure)
    width = _WIDTH - left - _RIGHT
    axes = figure.add_axes((left / _WIDTH, below / total, width / _WIDTH, height / total))
    axes.set_title(title, x=(0.08 - left) / width)
    if entries:
        legend = figure.legend(
            handles=entries,
            loc="upper left",
            bbox_to_anchor=(0.08 / _WIDTH, (below - 0.46) / total),
            ncols=columns,
            columnspacing=1.4,
            handlelength=3.0,
            **_LEGEND,
        )
        shown = zip(entries, legend.legend_handles, legend.get_texts(), strict=True)
        for entry, handle, text in shown:
            for artist in (handle, text):
                artist.set_gid(entry.get_gid())  # type: ignore[union-attr]
    if note:
        figure.text(0.1 / _WIDTH, 0.07 / total, note, fontsize=8, style="italic")
    return figure, axes


def line_entry(label: str, style: Style, **line: Any) -> Line2D:
    """Make a legend entry that looks like the curve; line: options that replace its style's."""
    # matplotlib ignores labels that start with an underscore.
    label = f" {label}" if label.startswith("_") else label
    entry = Line2D([], [], **{**style.line, "linewidth": 2, **line}, label=label)
    entry.set_gid((entry.get_gid() or "").replace("series", "legend") or None)
    return entry


def live_values(
    axes: Axes,
    at: np.ndarray,
    values: dict[int, np.ndarray],
    difference: str | None = None,
    y: bool = True,
) -> dict[str, Any]:
    """Return the values that a page's script shows for a drawing, as plain values for JSON.

    axes: finished; the result holds their frame and scales. at: float64 [points], x ascending.
    values: by the number of a mode, float64 [points], NaN where there is none. difference: the
    unit of differences, which are shown with their sign. y: whether y may be zoomed too.
    """
    box = axes.get_position()
    found = {
        "frame": [round(part, 5) for part in (box.x0, 1 - box.y1, box.x1, 1 - box.y0)],
        "name": axes.get_xlabel(),
        "x": list(map(float, axes.get_xlim())),
        "at": _rounded(at),
        "difference": difference,
        "values": {str(number): _rounded(own) for number, own in values.items()},
    }
    if y:
        found |= {"y": list(map(float, axes.get_ylim())), "scale": axes.get_yscale()}
    return found


def _rounded(values: np.ndarray) -> list[float | None]:
    """Round to five digits, more than are shown; whole numbers stay exact."""
    return [
        None if not math.isfinite(value) else float(f"{value:.5g}") if value % 1 else int(value)
        for value in values.tolist()
    ]


def mark_entry(label: str, marker: str) -> Line2D:
    """Make a legend entry for a mark that every mode may have."""
    return Line2D([], [], color=INK, linestyle="none", marker=marker, markersize=7, label=label)


def rows_panel(title: str, labels: list[str], xlabel: str, note: str = ""):
    """Make (figure, axes, y): a row per label, of any length, above the row's drawing at `y`."""
    figure, axes = panel(title, 0.43 * len(labels) + 0.08, note=note, left=0.16)
    axes.set(xlabel=xlabel, ylim=(len(labels) + 0.05, -0.1), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    beside = {"transform": axes.get_yaxis_transform(), "va": "center", "zorder": 5}
    for row, label in enumerate(labels):
        axes.text(0.004, row + 0.24, label, **beside)
    return figure, axes, [row + 0.68 for row in range(len(labels))]


def round_multiple(value: float, of: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... times `of` that is not below `value`."""
    power = of * 10.0 ** math.floor(math.log10(value / of))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))


def thousands(value: float, _=None) -> str:
    """Format a tick label with separated thousands."""
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def power_of_two(exponent: int) -> str:
    """Format a power of two as "2⁻³"."""
    return "2" + str(exponent).translate(_SUPERSCRIPT)


def inline_svg(figure: Figure, prefix: str, label: str) -> str:
    """Return the `<svg>` element of a figure, the same every time; call it inside `settings()`.

    prefix: unique in the page; ids are made from it. label: text that is read out for the figure.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": prefix}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    text = _NAMED.sub(_name, buffer.getvalue())
    text = _TAG.sub(_for_page, _NOT_INLINE.sub("", text))
    opening, inside = text.split(">", 1)
    opening = re.sub(r' (width|height|version)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{escape(label)}">{inside.rstrip()}'


def _name(found: re.Match) -> str:
    part, number, axis = found.groups()
    return f' class="{axis}tick"' if axis else f' data-{part}="{number}"'


def _for_page(tag: re.Match) -> str:
    """Use the page's colour and font; round numbers to a tenth of a point, beyond print quality."""
    digits = 2 if tag[0].startswith("<path") else 1  # a path may be enlarged
    text = tag[0].replace(INK, "currentColor")
    # The page's rules set font and line caps for all; a path needs no line breaks.
    for said in ("font-family: 'DejaVu Sans', sans-serif; ", "; stroke-linecap: square", " \n"):
        text = text.replace(said, "")
    return _NUMBER.sub(
        lambda number: f"{float(number[0]):.{digits}f}".rstrip("0").removesuffix("."), text
    )

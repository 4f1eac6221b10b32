"""bench.png: samples per second of every model, mode and contender, as horizontal bars."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mprun.bench.report_cells import significant
from mprun.plots.palette import INK, styles
from mprun.plots.panel import GREY, settings, thousands

_ROW, _HEAD, _FOOT, _GAP = 0.2, 0.34, 0.42, 0.12  # inches
_WIDTH, _LEFT, _RIGHT = 6.4, 2.05, 0.75
_DPI = 160


def write_figure(path: Path, bench: dict) -> bool:
    """Draw what was timed on synthetic data; False, and no file, where nothing was."""
    groups = _groups(bench["rows"])
    if not groups:
        return False
    with settings():
        figure = _figure(groups, bench["device_name"])
        figure.savefig(path, dpi=_DPI)
    return True


def _groups(rows: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for row in rows:
        if row["summary"] is not None and not row["case"]["real_data"]:
            groups.setdefault(row["case"]["label"], []).append(row)
    return groups


def _figure(groups: dict[str, list[dict]], device: str) -> Figure:
    heights = [_HEAD + _ROW * len(rows) + _FOOT for rows in groups.values()]
    total = sum(heights) + _GAP * len(heights) + 0.4
    figure = Figure(figsize=(_WIDTH, total))
    FigureCanvasAgg(figure)
    note = "median of windows, whiskers: quartiles; x: ratio to FP32 of the same contender"
    figure.text(0.1 / _WIDTH, 1 - 0.2 / total, device, fontweight="bold", va="center")
    figure.text(0.1 / _WIDTH, 1 - 0.38 / total, note, fontsize=8, color=GREY, va="center")
    colours = styles([row["case"]["mode"] for rows in groups.values() for row in rows])
    top = total - 0.4
    for (label, rows), height in zip(groups.items(), heights, strict=True):
        top -= _GAP
        plot = height - _HEAD - _FOOT
        bottom = (top - _HEAD - plot) / total
        width = (_WIDTH - _LEFT - _RIGHT) / _WIDTH
        axes = figure.add_axes((_LEFT / _WIDTH, bottom, width, plot / total))
        _bars(axes, label, rows, colours)
        top -= height
    return figure


def _bars(axes, label: str, rows: list[dict], colours: dict) -> None:
    unit = rows[0]["facts"]["build"]["sample"]
    axes.set_title(label, x=(0.1 - _LEFT) / (_WIDTH - _LEFT - _RIGHT), pad=5)
    axes.set_xlabel(f"{unit}s per second", labelpad=2)
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    for position, row in enumerate(rows):
        rate, mode = row["summary"]["rate"], row["case"]["mode"]
        median = rate["median"]
        below, above = median - rate["q1"], rate["q3"] - median
        axes.barh(position, median, height=0.72, color=colours[mode].colour, alpha=0.85)
        axes.errorbar(
            median, position, xerr=[[below], [above]], color=GREY, capsize=2.5, linewidth=1
        )
        versus = row["summary"]["ratios"].get("fp32")
        text = significant(median) + (f"  x{versus['median']:.2f}" if versus else "")
        axes.text(rate["q3"], position, f"  {text}", va="center", fontsize=8, color=INK)
    names = [f"{row['case']['mode']}  {row['case']['contender']}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.18 * max(row["summary"]["rate"]["q3"] for row in rows))

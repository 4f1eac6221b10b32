"""What the probes say, as HTML tables: the numbers of each mode beside what FP16 can hold."""

import math
import re
from html import escape

from mprun.compare.figures_numerics import share_text
from mprun.compare.probed_modes import ProbedMode
from mprun.numerics.probe_record import KINDS, TensorStats
from mprun.plots.palette import INK, Style

_POWER = re.compile(r"\b2\^(-?[\d.]+)")
_TENSOR_HEADS = (
    "values",
    "format",
    "zeros",
    "rounded to 0",
    "subnormal",
    "to infinity",
    "not finite",
    "largest",
    "headroom",
)
_RUN_HEADS = (
    "probes",
    "seed",
    "loss scale",
    "updates lost in FP16",
    "updates lost in BF16",
    "cosine to FP32's gradient",
    "relative error",
)


def numerics_tables(modes: list[ProbedMode], styles: dict[str, Style]) -> str:
    """Both tables with what their words mean; empty without a probe."""
    if not modes:
        return ""
    shown = [mode for mode in modes if mode.damage is None]
    damaged = "".join(
        f'<p class="faint">{escape(m.label)}, seed {m.seed}: {escape(m.damage)}</p>'
        for m in modes
        if m.damage is not None
    )
    tables = _runs(shown, styles) + _tensors(shown, styles) if shown else ""
    return f"<h3>Numerics: one run of each mode</h3>{tables}{damaged}"


def _runs(modes: list[ProbedMode], styles: dict[str, Style]) -> str:
    lines = []
    for mode in modes:
        lost = mode.lost.nonzero > 0
        cells = (
            _probes(mode),
            str(mode.seed),
            _scale(mode),
            share_text(mode.lost.share("fp16")) if lost else "",
            share_text(mode.lost.share("bf16")) if lost else "",
            _decimal(mode.cosine),
            _decimal(mode.relative_error),
        )
        lines.append(f"<tr>{_head(mode, styles, 1)}{_cells(cells)}</tr>")
    return _table(("mode", *_RUN_HEADS), lines) + (
        '<p class="faint">Lost: non-zero updates that would not change the weight if it were '
        "stored in this format. Cosine and relative error: the mode's gradient beside that of the "
        "same batch and weights in FP32, median over the shadow steps.</p>"
    )


def _tensors(modes: list[ProbedMode], styles: dict[str, Style]) -> str:
    lines = []
    for mode in modes:
        kinds = [kind for kind in KINDS if kind in mode.tensors]
        for number, kind in enumerate(kinds):
            head = "" if number else _head(mode, styles, len(kinds))
            cells = (kind.replace("_", " "), *_measured(mode.tensors[kind]))
            lines.append(f"<tr>{head}{_cells(cells)}</tr>")
    if not lines:
        return ""
    return _table(("mode", *_TENSOR_HEADS), lines) + (
        '<p class="faint">As they were in the run, gradients with its loss scale. Zeros: share of '
        "all values. Rounded to 0, subnormal, to infinity: shares of the non-zero finite values "
        "that FP16 would store so (round to nearest even: up to 2⁻²⁵, below 2⁻¹⁴, from 65520 on); "
        "of values that are FP16 already nothing is left to lose, "
        "it is among the zeros. Headroom: powers of two from the largest value to infinity.</p>"
    )


def _measured(stats: TensorStats) -> tuple[str, ...]:
    counts = stats.counts
    shares = counts.shares()
    total = counts.total
    headroom = stats.headroom
    wrong = counts.inf + counts.nan
    return (
        stats.dtype,
        share_text(counts.zeros / total) if total else "",
        share_text(shares.underflow),
        share_text(shares.subnormal),
        share_text(shares.overflow),
        f"{wrong:,}" if wrong else "none",
        f"{stats.amax:.3g}",
        "" if headroom is None else f"2^{headroom}",
    )


def _probes(mode: ProbedMode) -> str:
    text = f"{len(mode.steps)}, steps {mode.steps[0]:,} to {mode.steps[-1]:,}"
    if len(mode.steps) + mode.skipped * (not mode.only_skipped) < mode.recorded:
        text += f", drawn from {mode.recorded:,}"
    if mode.only_skipped:
        return text + ", all of skipped updates"
    return text + (f", without {mode.skipped} of skipped updates" if mode.skipped else "")


def _scale(mode: ProbedMode) -> str:
    if mode.scales is None:
        return ""
    low, high = (f"2^{scale:.4g}" for scale in mode.scales)
    return low if low == high else f"{low} to {high}"


def _decimal(value: float | None) -> str:
    """Six digits, as a cosine may be 0.99999 and an error 0.0001."""
    if value is None:
        return ""
    return f"{value:.5g}" if math.isfinite(value) else str(value)


def _head(mode: ProbedMode, styles: dict[str, Style], rows: int) -> str:
    colour = styles[mode.label].colour.replace(INK, "currentColor")
    swatch = f'<span class="swatch" style="background:{colour}"></span>'
    label = escape(mode.label).replace("_", "_<wbr>")
    return f'<th scope="row" rowspan="{rows}">{swatch}{label}</th>'


def _cells(cells) -> str:
    """The first cell is a text, the others are numbers."""
    first, *others = (_POWER.sub(r"2<sup>\1</sup>", escape(cell)) for cell in cells)
    return f"<td>{first}</td>" + "".join(f'<td class="number">{text}</td>' for text in others)


def _table(heads, lines: list[str]) -> str:
    first = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    return (
        f'<div class="scroll"><table class="seeds"><thead><tr>{first}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )

"""The paper's figures, redrawn from the runs of a row."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from mprun.comparison.report import picture, samples
from mprun.extensions.paper.outcomes import FAILED, NOT_RUN, RowOutcome
from mprun.extensions.paper.rows import PaperFigure
from mprun.numerics.exponent_shares import ratio
from mprun.numerics.probe_record import TensorStats
from mprun.plots.panel import INK, SHIPPED, Drawing, Style, styles
from mprun.record.run_directory import path_safe
from mprun.record.run_record import read_record

_POINTS = 160  # of a curve
_MANTISSA, _LEAST = 10, -24  # bits of FP16, and the exponent of its smallest number
_UPDATE, _HALF_ULP = "|update|", "half an ulp of the weight in FP16"


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

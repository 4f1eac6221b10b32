"""The paper's figures 2 to 6 redrawn from our runs, beside the paper's described in words."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mprun.compare.curves import curves
from mprun.compare.gap_growth import TRAINING, evaluation
from mprun.compare.numerics import exponent_shares, numerics_figures, probed_run, share_text
from mprun.extensions.paper.outcomes import RowOutcome
from mprun.plots.panel import Drawing, styles

_POINTS = 160


class PaperFigure(NamedTuple):
    """A figure of the paper.

    Attributes:
        key: "fig3".
        row: key of the row whose runs redraw it.
        shows: the message of the paper's figure, in words.
        draw: draws the results of the row; returns None if there is nothing to draw.
        kind: kind of the tensors of a histogram; empty: the figure is no histogram.
    """

    key: str
    row: str
    shows: str
    draw: Callable[[RowOutcome], Drawing | None]
    kind: str = ""

    @property
    def title(self) -> str:
        """The title, such as "Figure 3"."""
        return f"Figure {self.key.removeprefix('fig')}"


def _curve(plot: str) -> Callable[[RowOutcome], Drawing | None]:
    def draw(found: RowOutcome) -> Drawing | None:
        if found.group is None:
            return None
        looks = styles(row.arm.label for row in found.group.every_row)
        chosen = TRAINING[0] if plot == "training" else evaluation(found.row.metric or found.metric)
        return curves(found.group, looks, chosen, _POINTS)

    return draw


def _histogram(kind: str) -> Callable[[RowOutcome], Drawing | None]:
    def draw(found: RowOutcome) -> Drawing | None:
        mode = None if found.probes is None else probed_run(found.probes, "fp32", 0)
        if mode is None or mode.damage:
            return None
        name = f"numerics-{kind.replace('_', '-')}"
        drawn = numerics_figures([mode], styles(["fp32"]))
        return next((drawing for drawing in drawn if drawing.name == name), None)

    return draw


def _nothing(found: RowOutcome) -> None:
    return None


FIGURES = (
    PaperFigure(
        "fig2a",
        "mandarin_weights",
        "FP16 weights that are updated directly end 80 % worse than FP32; with FP32 master weights "
        "the curve is FP32's.",
        _curve("evaluation"),
    ),
    PaperFigure(
        "fig2b",
        "mandarin_weights",
        "About 5 % of the weight gradients are smaller than 2^-24: times a learning rate they are "
        "zero in FP16.",
        _histogram("weight_gradients"),
        "weight_gradients",
    ),
    PaperFigure(
        "fig3",
        "ssd",
        "67 % of the activation gradients of SSD are zero, about 2 % lie between 2^-34 and 2^-32 "
        "and 2 % between 2^-24 and 2^-23; much of the upper part of FP16's range is not used.",
        _histogram("activation_gradients"),
        "activation_gradients",
    ),
    PaperFigure(
        "fig4",
        "translation",
        "Three FP32 runs are visibly apart. Mixed precision with a loss scale is among them; "
        "without one it is slightly worse.",
        _curve("training"),
    ),
    PaperFigure(
        "fig5",
        "biglstm",
        "Without a loss scale training follows FP32 and diverges after 300,000 iterations; with a "
        "scale of 128 it is FP32's curve.",
        _curve("training"),
    ),
    PaperFigure("fig6", "dcgan", "Samples of both precisions look alike.", _nothing),
)


def shares_text(probes: Path | None, kind: str) -> str:
    """Return a histogram's message in numbers: zeros, and values that FP16 would make zero."""
    mode = None if probes is None else probed_run(probes, "fp32", 0)
    if mode is None or mode.damage or kind not in mode.gradients:
        return ""
    shares, zeros = exponent_shares(mode.gradients[kind])
    below = sum(share for exponent, share in shares.items() if exponent < -24)
    return (
        f"Ours: {share_text(zeros / 100)} zeros, {share_text(below / 100)} of all values not zero "
        f"and below 2^-24 ({len(mode.steps)} probes of an FP32 run)."
    )

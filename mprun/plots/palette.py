"""One colour, one line style and one mark for everything that a report draws more than once.

Colours: Okabe and Ito's eight, which stay apart for colour-blind readers; their yellow is too pale
for a line on white and gives way to a brown, and a grey is added. FP32 is black. Further ones,
readable on black and on white, are for what is no shipped mode: a mode of the user's own, a mode
with another scaler, a label of a foreign log.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

INK = "#111111"  # text, axes and FP32: black; inline figures show it in the page's own text colour

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
# On and off lengths in units of the line width, as matplotlib takes them.
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
    "not assessed": ("–", "neutral"),
}


@dataclass(frozen=True, slots=True)
class Style:
    """How the lines of one mode are drawn."""

    colour: str
    dashes: tuple[float, ...] = ()

    @property
    def linestyle(self) -> Literal["-"] | tuple[float, tuple[float, ...]]:
        """For matplotlib's `linestyle`."""
        return (0, self.dashes) if self.dashes else "-"


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style per label, the same in every figure: a shipped mode's own, else one by its name.

    Where two names would get the same one, the later of them takes the next that is free: first of
    the further colours, then of those of shipped modes that are not among the labels, then with
    another line style. More than fifty labels can be told apart.
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

"""One colour, one line style and one mark for everything that a report draws more than once.

Colours: Okabe and Ito's eight, which stay apart for colour-blind readers; their yellow is too pale
for a line on white and gives way to a brown, and a grey is added. FP32 is black.
"""

from collections.abc import Iterable
from dataclasses import dataclass

INK = "#111111"  # text, axes and FP32: black; inline figures show it in the page's own text colour

_OF_MODE = {
    "fp32": INK,
    "amp": "#009e73",
    "fp16_master_scaled": "#0072b2",
    "fp16_master": "#e69f00",
    "fp16_naive": "#d55e00",
    "amp_bf16": "#56b4e9",
    "bf16_master": "#cc79a7",
    "bf16_naive": "#8c6d1f",
    "tf32": "#808080",
}
_FREE = tuple(colour for colour in _OF_MODE.values() if colour != INK)
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
    def linestyle(self):
        """For matplotlib's `linestyle`."""
        return (0, self.dashes) if self.dashes else "-"


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style per label: a known mode has its own colour, another label the next free one.

    Free are the colours of known modes that are not among the labels. When none is left the
    colours start again with another line style, so that 33 labels can be told apart.
    """
    labels = list(dict.fromkeys(labels))
    chosen = {label: Style(_OF_MODE[label]) for label in labels if label in _OF_MODE}
    taken = {style.colour for style in chosen.values()}
    free = [Style(colour) for colour in _FREE if colour not in taken]
    free += [Style(colour, dashes) for dashes in _DASHES[1:] for colour in _FREE]
    others = [label for label in labels if label not in chosen]
    for position, label in enumerate(others):
        chosen[label] = free[position % len(free)]
    return chosen

"""A matplotlib figure as SVG that can stand inside a page: small, without ids that could collide.

A figure's ids (clip paths, marks) get the figure's own prefix and unused ones go; page-wide style
rules, fixed size and metadata go; the ink becomes the page's text colour, so that text, axes and
FP32 are black on white and white on black.
"""

import io
import re
from html import escape

from matplotlib.figure import Figure

from mprun.plots.palette import INK

_TAG = re.compile(r"<[^>]*>")
_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_REFERENCE = re.compile(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"")


def inline_svg(figure: Figure, prefix: str, label: str) -> str:
    """The `<svg>` element; `prefix` must be unique in the page, `label` is read out for it.

    Call it inside `canvas.settings()`; the same figure gives the same text every time.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*</defs>", "", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups()
    text = text[text.index(">") + 1 :]
    text = _TAG.sub(lambda tag: _NUMBER.sub(_one_decimal, tag[0]), text)
    text = text.replace(INK, "currentColor").replace("font-family: 'DejaVu Sans', sans-serif; ", "")
    text = re.sub(r"(font: [^;]*?px) 'DejaVu Sans', sans-serif", r"\1 sans-serif", text)
    text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", text)
    text = re.sub(r'<path d="[^"]*" style="fill: none"/>', "", text)  # invisible backgrounds
    text = _without_bare_groups(_prefixed(text, prefix))
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    )
    return opening + re.sub(r"\s*\n\s*", "\n", text).strip()


def _prefixed(text: str, prefix: str) -> str:
    """Ids that are referred to with the prefix, in order of first use; all others without id."""
    used: dict[str, str] = {}
    for match in _REFERENCE.finditer(text):
        used.setdefault(match[1] or match[2], f"{prefix}-{len(used)}")

    def identifier(match: re.Match) -> str:
        return f' id="{used[match[1]]}"' if match[1] in used else ""

    def reference(match: re.Match) -> str:
        return f"url(#{used[match[1]]})" if match[1] else f'href="#{used[match[2]]}"'

    return _REFERENCE.sub(reference, re.sub(r' id="([^"]*)"', identifier, text))


def _without_bare_groups(text: str) -> str:
    """Groups without attributes do nothing, and there are hundreds."""
    kept: list[bool] = []

    def tag(match: re.Match) -> str:
        if match[0] == "</g>":
            return match[0] if kept.pop() else ""
        kept.append(match[0] != "<g>")
        return match[0] if kept[-1] else ""

    return re.sub(r"<g(?: [^>]*)?>|</g>", tag, text)


def _one_decimal(match: re.Match) -> str:
    """A tenth of a point is less than a screen or a printer shows."""
    return f"{float(match[0]):.1f}".removesuffix(".0")

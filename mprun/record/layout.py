"""Text for a given width: paragraphs, and tables that lose neither a number nor a letter.

Lines break at blanks alone, so a number, a name or a path stays whole. A word that is wider than
the line goes beyond it, and a terminal shows it on several lines.
"""

import re
import sys
import textwrap
from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from functools import partial

from mprun.record.console import columns

_GAP = "  "  # between two columns
_INDENT = "    "  # of cells below the first one
_MOST_LINES = 8  # of a cell, before its column becomes as narrow as its longest word


def hanging(text: str, width: int, below: int, start: str = "") -> str:
    """Fill `text` to `width` columns behind `start`, its further lines `below` columns in."""
    return "\n".join(_filled(text, width, start, " " * below))


def _filled(text: str, width: int, start: str = "", below: str = "") -> list[str]:
    lines = textwrap.wrap(
        _joined(text),
        width,
        initial_indent=start,
        subsequent_indent=below,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines] or [start.rstrip()]


def _joined(text: str) -> str:
    """Return `text` with "5 %" and "1 to 2" as words, their blanks as null characters."""
    return re.sub(r"(\d) to ([-+]?\d)", "\\1\0to\0\\2", text.replace(" %", "\0%"))


def aligned(
    lines: Sequence[Sequence[str]],
    left: Container[str] | None = None,
    width: int | None = None,
    key: int = 0,
) -> list[str]:
    """Return lines of columns as wide as their longest cell.

    Where they are wider than `width`, the first of these with the fewest lines: cells continue
    below themselves; the first cell of each row stands alone above the others; the table goes on
    below itself, with its column `key` again. Where none fits, each row is a paragraph of its
    cells, with their heads.

    left: heads of the columns that are justified to the left, the others to the right; None: all
    to the left, and the first row is no header.
    """
    rows = [list(row) for row in lines]
    if not rows:
        return []
    sides = [str.ljust if left is None or head in left else str.rjust for head in rows[0]]
    natural = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is None or _total(natural) <= width:
        return list(_drawn(rows, natural, sides))
    layouts = []
    if (sizes := _narrowed(rows, natural, width)) is not None:
        layouts.append(list(_drawn(rows, sizes, sides)))
    below = [row[1:] for row in rows]
    if (sizes := _narrowed(below, natural[1:], width - len(_INDENT))) is not None and sizes:
        layouts.append(list(_hung(rows, sizes, sides[1:], width)))
    if (blocks := _blocks(natural, width, key)) is not None and left is not None:
        parts = [_drawn(*_of_columns(own, rows, natural, sides)) for own in blocks]
        layouts.append([line for part in parts for line in ["", *part]][1:])
    heads = [""] * len(rows[0]) if left is None else rows.pop(0)
    return min(layouts, key=len) if layouts else list(_paragraphs(heads, rows, width))


def _total(sizes: Sequence[int]) -> int:
    return sum(sizes) + len(_GAP) * (len(sizes) - 1)


def _narrowed(rows: list[list[str]], sizes: list[int], width: int) -> list[int] | None:
    """Return widths of the columns with which a row fits, none below its longest word; or None.

    Step by step, the column is narrowed that costs the fewest lines.
    """
    sizes = list(sizes)
    narrower = [_sizes_below(column) for column in zip(*rows, strict=True)]
    plain = [str.ljust] * len(sizes)
    while _total(sizes) > width:
        found = []
        for place, steps in enumerate(narrower):
            if smaller := [size for size in steps if size < sizes[place]]:
                tried = [*sizes[:place], smaller[0], *sizes[place + 1 :]]
                over = max(0, _total(tried) - width)
                found.append((sum(1 for _ in _drawn(rows, tried, plain)), over, tried))
        if not found:
            return None
        sizes = min(found)[2]
    return sizes


def _sizes_below(cells: Sequence[str]) -> list[int]:
    """Return the widths at which the cells of a column take at most 2, 3, ... lines, falling."""
    words = (word for cell in cells for word in _joined(cell).split())
    least = max(map(len, words), default=0)
    most = max(map(len, cells))
    found = {least}
    for lines in range(2, _MOST_LINES + 1):
        sizes = range(least, most + 1)
        found.add(sizes[bisect_left(sizes, True, key=partial(_takes, cells, lines))])
    return sorted(found, reverse=True)


def _takes(cells: Sequence[str], lines: int, size: int) -> bool:
    return all(len(cell) <= size or len(_filled(cell, size)) <= lines for cell in cells)


def _blocks(sizes: list[int], width: int, key: int) -> list[list[int]] | None:
    """Return the columns of tables that fit, each but the first with `key` in front; or None."""
    blocks: list[list[int]] = [[]]
    for place in range(len(sizes)):
        if _total([sizes[one] for one in (*blocks[-1], place)]) > width and place != key:
            blocks.append([key])
        blocks[-1].append(place)
    fits = (_total([sizes[one] for one in own]) <= width for own in blocks)
    return blocks if all(fits) else None


def _of_columns(own: list[int], rows: list[list[str]], *more: list) -> list[list]:
    return [[[row[one] for one in own] for row in rows], *([m[one] for one in own] for m in more)]


def _drawn(rows: list[list[str]], sizes: list[int], sides: list) -> Iterator[str]:
    """Yield the rows; a cell wider than its column continues below itself."""
    for row in rows:
        cells = [
            _filled(c, size) if len(c) > size else [c] for c, size in zip(row, sizes, strict=True)
        ]
        for place in range(max(map(len, cells), default=0)):
            parts = (
                side(cell[place] if place < len(cell) else "", size)
                for cell, size, side in zip(cells, sizes, sides, strict=True)
            )
            yield _GAP.join(parts).rstrip()


def _hung(rows: list[list[str]], sizes: list[int], sides: list, width: int) -> Iterator[str]:
    """Yield the first cell of each row alone, and its other cells below it."""
    for first, *others in rows:
        yield from _filled(first, width, below=_INDENT)
        yield from (f"{_INDENT}{line}" for line in _drawn([others], sizes, sides))


def _paragraphs(heads: list[str], rows: list[list[str]], width: int) -> Iterator[str]:
    """Yield each row as a paragraph: "first; HEAD: value; HEAD: value"."""
    for row in rows:
        named = zip(heads[1:], row[1:], strict=True)
        cells = [row[0], *(f"{head}: {cell}" if head else cell for head, cell in named if cell)]
        yield from _filled("; ".join(cells), width, below=_INDENT)


def for_terminal(text: str) -> str:
    """Return `text` with tables that fit the terminal of stdout, or as it is without one."""
    return fitted_tables(text, columns(200, sys.stdout) if sys.stdout.isatty() else None)


def fitted_tables(text: str, width: int | None) -> str:
    """Return `text`; Markdown tables wider than `width` (None: any) are `aligned`, without bars."""
    if width is None:
        return text
    found: list[str] = []
    table: list[str] = []
    for line in [*text.split("\n"), ""]:
        if line.startswith("|"):
            table.append(line)
            continue
        if table:
            wide = any(len(row) > width for row in table)
            rows = _cells(table)
            found += aligned(rows, set(rows[0]), width) if wide else table
            table = []
        found.append(line)
    return "\n".join(found[:-1])


def _cells(table: list[str]) -> list[list[str]]:
    """Return header and rows of a `markdown_table`."""
    header, _, *rows = table
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in (header, *rows)
    ]

"""Tables and paragraphs for a width: what never leaves them, and how wide they get."""

import random
import re
from collections import Counter

import pytest

from mprun.record.console import markdown_table
from mprun.record.layout import aligned, fitted_tables, hanging

WORDS = (
    *("", "0", "-0.0002 %", "+23.97 % (+0.64 to +47.30)", "likely worse", "0-2 (not 6)", "nan"),
    *("1,234,567,890", "2^9 to 2^16", "a|b", "fp16_master_scaled (static)", "x" * 64, "y" * 120),
    *("diverged at step 123456", "failed: OSError: no space left on the device", "é" * 20),
)


def words(text: str) -> Counter[str]:
    return Counter(re.sub("[|;:]", " ", text).split())


def drawn(seed: int) -> tuple[list[list[str]], int]:
    """Return a header with rows of hostile cells, and a width."""
    draw = random.Random(seed)
    columns, rows = draw.randint(1, 9), draw.randint(1, 6)
    header = [f"head{place}" for place in range(columns)]
    cells = [[draw.choice(WORDS) for _ in header] for _ in range(rows)]
    return [header, *cells], draw.choice([30, 60, 80, 80, 80, 120])


@pytest.mark.few(38)
@pytest.mark.parametrize("seed", range(200))
def test_a_table_fits_and_loses_no_word(seed):
    (header, *rows), width = drawn(seed)
    text = fitted_tables(f"above\n{markdown_table(header, rows)}\nbelow", width)
    first, *lines, last = text.split("\n")
    assert (first, last) == ("above", "below")
    for line in lines:  # beyond the width is only a word that no line could hold
        longest = max(map(len, line.strip().replace(" %", "_%").split()), default=0)
        assert len(line) <= width or longest > width - 10
    given = [cell.replace("|", "\\|") for row in rows for cell in row]
    if lines[0].startswith("|"):
        assert all(cell in text for cell in given)
    else:
        assert not words(" ".join(cell for row in rows for cell in row)) - words(text)


def test_numbers_stay_in_their_columns_and_beside_their_unit():
    rows = [["mode", "loss", "difference"], ["fp32", "2.779", ""]]
    rows.append(["fp16_naive", "12.8691", "+3.24 % (+3.00 to +3.47)"])
    assert aligned(rows, {"mode", "difference"}, 38) == [
        "mode           loss  difference",
        "fp32          2.779",
        "fp16_naive  12.8691  +3.24 %",
        "                     (+3.00 to +3.47)",
    ]
    wide = aligned(rows, {"mode", "difference"}, 80)
    assert wide[2] == "fp16_naive  12.8691  +3.24 % (+3.00 to +3.47)"
    assert "90\n" not in hanging("within the margin of 90 % of it", 24, 0)


def test_a_name_that_leaves_no_room_stands_above_its_cells():
    name = "outputs/quickstart_underflow/fp16_master_scaled-train.steps=6-s0"
    rows = [["run", "mode", "last"], [name, "fp16_master_scaled", "loss 0.5129 at 650"]]
    assert aligned(rows, set(rows[0]), 70) == [
        "run",
        "    mode                last",
        name,
        "    fp16_master_scaled  loss 0.5129 at 650",
    ]


def test_a_row_that_fits_no_column_is_a_paragraph_with_its_heads():
    rows = [["verdict", "mode", "loss"], ["worse", "m" * 40, "0.25"], ["matches", "fp32", "0.5"]]
    assert aligned(rows, set(rows[0]), 40) == [
        "worse; mode:",
        f"    {'m' * 40};",
        "    loss: 0.25",
        "matches; mode: fp32; loss: 0.5",
    ]
    assert aligned([], None, 40) == []

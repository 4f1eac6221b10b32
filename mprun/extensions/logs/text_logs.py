"""Logs of cells and words: tables, columns of plain numbers, names before their numbers."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from mprun.errors import BadInput, Damaged
from mprun.extensions.logs.wanted import (
    EXPONENT,
    LINE,
    STEPS,
    Log,
    Row,
    Wanted,
    listed,
    number_of,
    part_of,
    splits,
)

# A number in a text, maybe with marks of thousands.
_NUMBER = rf"[-+]?(?:\d+(?:[.,'’]\d+)*\.?{EXPONENT}|[.,]\d+{EXPONENT}|nan|inf(?:inity)?)\b"


def tables_in(entries: list[Path]) -> list[Path]:
    """Return the files that are called as tables or JSON lines are."""
    tables = (".csv", ".tsv", ".jsonl")
    names = ((entry, entry.name.lower().removesuffix(".gz")) for entry in entries)
    return [entry for entry, name in names if name.endswith(tables) and entry.is_file()]


def cells(wanted: Wanted) -> list[Log] | None:
    """Read a table; None if the first line is not a header that names steps or values."""
    path, scalar, first = wanted.path, wanted.scalar, wanted.text.partition("\n")[0]
    between = max(",\t;", key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
    try:
        # ultralytics pads the names with blanks.
        header = [cell.strip() for cell in next(csv.reader([first], delimiter=between), [])]
        known = {*STEPS, scalar.lower(), "value", (wanted.step or scalar).lower()}
        if not any(n.lower() in known or n.endswith(f" - {scalar}") for n in header):
            return None
        steps = wanted.steps(list(filter(None, header)))  # an index has no name
        values = _value_names(wanted, header)
        apart = [name for name in splits(dict.fromkeys(header)) if name not in (steps, *values)]
        places = [header.index(name) for name in (steps, *values, *apart)]
        for name in (steps, *values):
            if header.count(name) > 1:
                several = f"{header.count(name)} columns are called {name!r}"
                raise BadInput(f"{path}: line 1: {several}; rename all but one")
        reader = csv.reader(wanted.lines(), delimiter=between)
        rows: list[Row] = []
        for row in reader:
            # A logger that resumes after an interruption may repeat its header.
            if not row or [cell.strip() for cell in row] == header:
                continue
            if len(row) <= max(places) or "".join(row[len(header) :]).strip():
                wrong = f"{len(row)} cells, the header has {len(header)}"
                raise Damaged(f"{path}: line {reader.line_num}: {wrong}")
            found = {header[place]: row[place].strip() for place in places}
            rows.append((f"line {reader.line_num}", found))
    except csv.Error as error:
        raise Damaged(f"{path}: is not a table ({error})") from None
    if scalar not in values and (told := wanted.told(rows)):
        rows, values = told, {scalar: ("", True)}
    return wanted.of_columns(rows, steps, values)


def _value_names(wanted: Wanted, names: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Return the columns of values as `Wanted.of_columns` takes them."""
    path, scalar = wanted.path, wanted.scalar
    if scalar in names:
        return {scalar: ("", True)}
    # "RUN - TAG" of Weights & Biases, beside "RUN - TAG__MIN" and "RUN - TAG__MAX".
    exported = [name for name in names if name.endswith(f" - {scalar}")]
    if exported:
        return {name: (name.removesuffix(f" - {scalar}"), True) for name in exported}
    if scalar.rpartition("/")[2] in names and splits(dict.fromkeys(names)):
        return {scalar.rpartition("/")[2]: ("", True)}
    if "Value" in names and {*names} <= {"Wall time", "Relative", "Step", "Value", ""}:
        # TensorBoard's export is called run-NAME-tag-TAG.csv, with "/" as "_".
        _, told, rest = path.name.removesuffix(".gz").removesuffix(".csv").partition("-tag-")
        if told and rest != scalar.replace("/", "_"):
            raise BadInput(f"{path}: --scalar {scalar}: the file is an export of the tag {rest}")
        return {"Value": ("", bool(told))}
    raise wanted.no_scalar(name for name in names if name.lower() not in STEPS)


def plain_numbers(wanted: Wanted) -> list[Log] | None:
    """Read "timestamp value step" (MLflow) or "step value" lines; None if it is anything else.

    MLflow adds name and digest of the dataset that a value was measured on, if it knows them.
    """
    scalar, rows = wanted.scalar, []
    columns = {2: ("step", scalar), 3: ("timestamp", scalar, "step")}
    columns[5] = (*columns[3], "dataset", "digest")
    for number, line in enumerate(wanted.lines(), start=1):
        cells = line.split()
        try:
            numbers = [number_of(cell, comma="," in cell) for cell in cells[:3]]
        except ValueError:
            return None
        if cells and len(cells) not in columns:
            return None
        if len(cells) > 2 and numbers[0] < 1e9:  # no time since 1970
            return None
        if cells:
            rows.append((f"line {number}", dict(zip(columns[len(cells)], cells, strict=True))))
    if len({len(row) for _, row in rows}) != 1:
        return None
    datasets = sorted({row.get("dataset", "") for _, row in rows})
    if len(datasets) > 1:
        raise BadInput(
            f"{wanted.path}: has values on several datasets ({listed(datasets)}); give each its "
            f"own metric or file"
        )
    named = str(wanted.path).endswith(f"/{scalar}")
    return wanted.of_columns(rows, "step", {scalar: ("", named)})


def words(wanted: Wanted) -> list[Log] | None:
    """Read lines with names before their numbers; None if none holds the scalar."""
    told, rows = in_words(wanted)
    if rows:
        return wanted.of_records(rows)
    if told:
        names = words_before_numbers("\n".join(told))
        scalar = wanted.scalar.rpartition("/")[2].lower()
        raise wanted.no_steps([name for name in names if name.lower() != scalar])
    return None


def in_words(wanted: Wanted) -> tuple[list[str], list[Row]]:
    """Return the lines with the scalar before a number, and the rows of those with steps, too."""
    # A name follows the line's start, a mark, a number or two blanks: "val loss" is not "loss".
    before = r"(?:^|[|,;:)\]-]\s*|\s{2,}|\d\s+)"
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in wanted.lines()]  # without colours
    told: list[tuple[str, str, re.Match, list[str]]] = []
    for scalar in dict.fromkeys((wanted.scalar, wanted.scalar.rpartition("/")[2])):
        value = re.compile(rf"{before}{re.escape(scalar)}\s*[:=]?\s*({_NUMBER})", re.IGNORECASE)
        for number, line in enumerate(lines, start=1):
            if first := value.search(line):
                told.append((f"line {number}", line, first, value.findall(line)))
        if told:
            break
    rows: list[Row] = []
    for name in (wanted.step,) if wanted.step else STEPS:
        count = re.compile(rf"{before}{re.escape(name)}\s*[:=]?\s*({_NUMBER})", re.IGNORECASE)
        for where, line, first, found in told:
            if at := count.search(line):
                if len(set(found)) > 1:
                    both = " and ".join(found)
                    raise BadInput(
                        f"{wanted.path}: {where}: {wanted.scalar} has the values {both}; must have "
                        "one value"
                    )
                kind = part_of(line[: first.start()])
                rows.append((where, {name: at[1], LINE: kind, scalar: first[1]}))
        if rows:
            break
    return [line for _, line, *_ in told], rows


def words_before_numbers(text: str) -> list[str]:
    """Return the names before the numbers of a text, but for those that count steps."""
    names = re.findall(rf"([A-Za-z][\w/.@ -]*?)\s*[:=]\s*{_NUMBER}", text[:100_000])
    return [name for name in dict.fromkeys(names) if name.lower() not in STEPS]

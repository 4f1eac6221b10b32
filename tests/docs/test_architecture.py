"""docs/architecture.md: its tables name every package, and its figures are those of this tree."""

import re
import runpy
from pathlib import Path

import pytest

from mprun.config.keys import FIELDS, role_of

from ..extensions.test_deleted import EXTENSIONS, OF_THE_HOUSE, with_those_above
from ..synchronisation import test_files_of_a_step as step

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())
# Name -> the other cells of its row.
ROWS = {
    name: cells.split(" | ")
    for names, cells in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", PAGE, re.MULTILINE)
    for name in re.findall(r"\w+", names)
}


def lines_in(*folders):
    files = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def lines_of(extension):
    return lines_in(f"mprun/extensions/{extension}"), lines_in(f"tests/extensions/{extension}")


CORE = lines_in("mprun") - lines_in("mprun/extensions")
CORE_TESTS = lines_in("tests") - lines_in(*(f"tests/{name}" for name in OF_THE_HOUSE))
MOVED = sum(lines_of(name)[0] for name in ("adapters", "bench", "paper"))


def figure(text):
    """Return the number of a text such as 37,200, to hundreds."""
    assert re.fullmatch(r"(\d+,)?\d?\d?00", text), f"{text}: write hundreds, 100 for a few lines"
    return int(text.replace(",", ""))


def holds(text, lines):
    """The next edit must not make a page wrong that was right: a hundred lines more are borne."""
    assert abs(figure(text) - lines) <= 150, f"{text}: now {lines}"


def test_every_package_has_its_row():
    found = {path.parent.name for path in ROOT.glob("mprun/*/__init__.py")}
    found |= {path.stem for path in ROOT.glob("mprun/*.py")} - {"__init__", "__main__"}
    assert found - ROWS.keys() <= {"entry_points"}
    assert ROWS.keys() == found - {"entry_points"} | set(EXTENSIONS)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_row_of_an_extension(extension):
    _, builds_on, code, tests = ROWS[extension]
    below = {other for other in EXTENSIONS if extension in with_those_above(other) - {other}}
    assert set(re.findall(r"\w+", builds_on)) == below
    holds(code, lines_of(extension)[0])
    holds(tests, lines_of(extension)[1])


def test_the_lines_of_the_core():
    (code, tests) = re.findall(r"([\d,]+) lines of code and ([\d,]+) lines of tests\.", WORDS)[0]
    holds(code, CORE)
    holds(tests, CORE_TESTS)
    (larger,) = re.findall(r"`paper`, the project would have ([\d,]+) lines", WORDS)
    holds(larger, lines_in("mprun") - MOVED)


def test_the_files_of_a_step():
    (most,) = re.findall(r"a supervised training step runs through at most (\d+) files", WORDS)
    assert int(most) == max(len(step.SUPERVISED | own) for own in step.CASES.values())


def test_each_role_has_a_name_in_the_reference():
    """Without one the site cannot be built, which the default tests do not do."""
    named = runpy.run_path(str(ROOT / "docs" / "generated.py"))["_ROLES"]
    assert {role_of(key) for key in FIELDS} <= set(named)

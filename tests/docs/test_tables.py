"""Tables that stand in a page as text are those that docs/generated.py makes."""

import json
import re
import runpy

from ..pages import ROOT

GENERATED = runpy.run_path(str(ROOT / "docs" / "generated.py"))
RESULTS = ROOT / "docs" / "results" / "2026-11-27-cpu-paper.json"


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_table_of_modes_is_made_of_their_files():
    table = GENERATED["modes"]()
    assert table.count("\n") == 1 + len(list((ROOT / "conf" / "precision").glob("*.yaml")))
    assert f"\n{table}\n\n" in page("modes.md")


def test_the_number_of_modes():
    count = len(list((ROOT / "conf" / "precision").glob("*.yaml")))
    assert f" has all {count}." in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"each of the {count} modes" in page("modes.md")


def test_the_table_of_the_paper_is_made_of_the_results():
    table, text = GENERATED["paper"](), page("paper.md")
    assert f"\n{table}\n\n" in text
    known = json.loads(RESULTS.read_text(encoding="utf-8"))
    techniques = [one for row in known["rows"].values() for one in row["techniques"]]
    left = sum(bool(row["not_run"]) for row in known["rows"].values())
    assert table.count("\n") == 1 + len(techniques) + left


def test_the_outcomes_told_beside_it_are_those_of_the_results():
    outcomes = json.loads(RESULTS.read_text(encoding="utf-8"))["outcomes"]
    counted = {word: int(count) for count, word in re.findall(r'(\d+) "([^"]+)"', outcomes)}
    found = re.search(
        r"(\d+) of (\d+) outcomes agree .* (\d+) more outcomes agree .* (\d+) outcomes are worse "
        r".* other (\d+) outcomes are",
        page("paper.md").replace("\n", " "),
    )
    words, total = ("yes", "yes, tells nothing", "worse, not diverged"), sum(counted.values())
    agree, more, worse = (counted[word] for word in words)
    expected = [agree, total, more, worse, total - agree - more - worse]
    assert [int(figure) for figure in found.groups()] == expected

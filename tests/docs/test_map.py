"""A reader finds every page in two clicks from README, and its first line says what it is for."""

import re
from functools import cache
from pathlib import Path

import pytest

from ..pages import ROOT
from .test_links import LINK

DOCS = [p for p in (ROOT / "docs").rglob("*") if "_build" not in p.parts]
PAGES = sorted(p for p in DOCS if p.suffix in (".md", ".ipynb"))
# Another file's text, records of a day, and what a program writes.
RECORDS = "docs/results/2"
WRITTEN = ("docs/changelog.md", "docs/contributing.md", "docs/reference/operations.md")
MOST_WORDS = 25


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def outside_of_code(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"`[^`\n]*`|^( *)```.*?^\1```$", "", text, flags=re.M | re.S)


@cache
def leads_to(page: Path) -> set[Path]:
    """The pages that a reader of this one can click on."""
    links = (link.partition("#")[0] for link in LINK.findall(outside_of_code(page)))
    found = {(page.parent / link).resolve() for link in links if ":" not in link}
    if "\n:glob:\n" in (text := page.read_text(encoding="utf-8")):  # the list that the site makes
        for pattern in re.findall(r"^\S+\*$", text, re.MULTILINE):
            found |= {path for path in page.parent.glob(pattern) if path.suffix == ".md"}
    return found & set(PAGES)


def test_every_page_is_two_clicks_from_readme():
    first = leads_to(ROOT / "README.md")
    reached = first.union(*map(leads_to, first))
    assert not [named(page) for page in PAGES if page not in reached]


def test_the_map_leads_to_every_page_that_is_no_record():
    [start] = [page for page in PAGES if named(page) == "docs/index.md"]
    away = {named(page) for page in PAGES if page not in {start, *leads_to(start)}}
    assert all(name.startswith(RECORDS) for name in away), away


@pytest.mark.parametrize(
    "page",
    [p for p in map(named, PAGES) if p.endswith(".md") and not p.startswith((RECORDS, *WRITTEN))],
)
def test_the_first_line_says_what_a_page_is_for(page):
    """A title, then a sentence: no code, list, table or picture, and not too long to be read."""
    text = (ROOT / page).read_text(encoding="utf-8")
    title, _, after = text.partition("\n\n")
    assert re.fullmatch(r"# .+", title), title
    paragraph = " ".join(after.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.?])\s", paragraph)[0]
    assert re.match(r"This page |Page \d of 6: after this page ", sentence), sentence
    plain = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "", sentence))
    assert sentence[-1] in ".:" and len(plain.split()) <= MOST_WORDS, sentence


def test_readme_is_one_screen():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 90 and len(text) <= 5000

"""scripts/sentences: what counts as one, the sample of a date, pages without a long one."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SCRIPTS)
    import sentences as script
PAGE = """# A title is no sentence

The first one
ends here. The `second one` has [a link](of/many/words.md).

- an item
- another

```bash
mprun is no sentence
```

| a cell with at least six words | few |
![a picture](of.png)
"""
# No sentence of theirs is long.
PLAIN = ("README.md", "docs/index.md", "docs/symptoms/", "docs/ci_gate.md", "docs/faq.md")
PLAIN += ("docs/install.md", "docs/loss_scaling.md", "docs/emulation.md", "docs/tutorial/")


def test_paragraphs_items_and_long_cells():
    assert list(script.paragraphs(PAGE)) == [
        (3, "The first one ends here. The `second one` has [a link](of/many/words.md)."),
        (6, "an item"),
        (7, "another"),
        (13, "a cell with at least six words"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The `second one` has [a link](of/many/words.md).", 5),
        ("A dash - and 1.5 % are no words, but 1.5 is.", 10),
    ],
)
def test_words(text, words):
    assert script.Sentence("docs", "x.md:1", text).words == words


def test_a_date_draws_the_same_sentences(capsys, monkeypatch):
    found = [script.Sentence("docs", f"x.md:{n}", f"Sentence {n} of the page.") for n in range(99)]
    monkeypatch.setattr(script, "sentences", lambda: found)
    drawn = []
    for date in ("2026-11-29", "2026-11-29", "2026-11-30"):
        assert script.main([date, "--count", "5"]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].count("x.md:") == 5


def test_long_ones_are_listed_and_counted(capsys, monkeypatch):
    kinds = (("docs", 25), ("docs", 26), ("help", 4))
    found = [script.Sentence(kind, "x:1", "word " * count) for kind, count in kinds]
    monkeypatch.setattr(script, "sentences", lambda: found)
    assert script.main(["--long"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(" 26  x:1  word") and lines[1:] == [
        "docs: 1 of 2 sentences above 25 words",
        "help: 0 of 1 sentences above 25 words",
        "all: 1 of 3",
    ]


@pytest.mark.slow
def test_pages_of_a_new_reader_and_the_help_have_no_long_sentence():
    read = [one for one in script.of_pages() if one.place.startswith(PLAIN)]
    long = [one for one in (*read, *script.of_help()) if one.words > script.MOST_WORDS]
    assert len(read) > 100 and not long, "\n".join(f"{one.place}: {one.text}" for one in long)

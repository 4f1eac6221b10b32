"""Draw random sentences of what users read, or list those with many words.

    scripts/sentences 2026-11-29            100 sentences, the same for the same date
    scripts/sentences 2026-11-29 --count 40
    scripts/sentences --long                those above 25 words, with their place, and a count

Read are README, CONTRIBUTING, the pages of docs (without the dated records in docs/results and
docs/log), the help of `mprun`, error lines, and docstrings of the names in docs/reference/api.md.
Code blocks are left out. A table cell counts if it has six words or more. In an error line <name>
stands for a value, X if the code gives it no name.

A sentence is shown as it is met: behind its place stand the heading and, of a table cell, the head
of its column and the first cell of its row. The sentence before it, in brackets, is not judged.
"""

import argparse
import ast
import inspect
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mprun.config.keys import FIELDS, meanings

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ("docs/results/", "docs/log/", "docs/_build/", "docs/reference/operations.md")
MOST_WORDS = 25
_FEWEST = 4  # words of a sentence that can be judged
_OF_A_CELL = 6
# A sentence ends before a capital, code, a link, emphasis or one of these names, but not behind
# an abbreviation.
_SMALL = r"(?:mprun|torch|torchao|trl|ruff|nanoGPT|cuDNN|uint8|bigLSTM|run\.json)\b"
_END = re.compile(
    r"(?<!e\.g\.)(?<!i\.e\.)(?<!\bal\.)(?<!\bvs\.)(?<=[.!?])[)*\"]*\s+"
    rf"(?=[A-Z0-9`*\[\"(]|{_SMALL})"
)
_HELP = ("help", "description", "epilog")


class Sentence(NamedTuple):
    """One sentence; kind: README, docs, help, error or docstring."""

    kind: str
    place: str
    text: str
    before: str = ""  # the sentence in front of it in its paragraph

    @property
    def words(self) -> int:
        """Count what stands between blanks; `code` is one word, a link's address none."""
        plain = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "", self.text))
        return sum(bool(re.search(r"\w", word)) for word in plain.split())


def sentences() -> list[Sentence]:
    """Return all of them, in a fixed order and each once."""
    found = [*of_pages(), *of_help(), *of_errors(), *of_docstrings()]
    return list({one.text: one for one in found if one.words >= _FEWEST}.values())


def _divided(kind: str, place: str, text: str) -> Iterator[Sentence]:
    before = ""
    for one in _END.split(" ".join(text.split())):
        yield Sentence(kind, place, one, before)
        before = one


def of_pages() -> Iterator[Sentence]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        name = page.relative_to(ROOT).as_posix()
        if not name.startswith(RECORDS):
            kind = "README" if name == "README.md" else "docs"
            text = page.read_text(encoding="utf-8")
            heads, titles = _heads(text), dict(_titles(text))
            for line, paragraph in paragraphs(text):
                title = next((titles[n] for n in range(line, 0, -1) if n in titles), "")
                where = f"{name}:{line} {title}{heads.get((line, paragraph), '')}"
                yield from _divided(kind, where.rstrip(), paragraph)


def _heads(page: str) -> dict[tuple[int, str], str]:
    """Return (line, cell) of a table -> the head of its column and the row's first, in brackets."""
    found, heads = {}, []
    for number, line in enumerate(page.splitlines(), start=1):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())]
        heads = (heads or cells) if line.strip().startswith("|") else []
        for place, (cell, head) in enumerate(zip(cells, heads, strict=False)):
            row = f": {cells[1]}" if place > 1 else ""
            found[number, cell] = f" ({head}{row})"
    return found


def _titles(page: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each heading."""
    for number, line in enumerate(_prose(page).splitlines(), start=1):
        if heading := re.match(r"#+ +(.*)", line):
            yield number, f"[{heading[1]}]"


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of each paragraph, list item and long table cell of Markdown."""
    first, lines = 0, []
    all_lines = [*_prose(page).splitlines(), "", ""]
    for number, (line, after) in enumerate(pairwise(all_lines), start=1):
        stripped = line.strip()
        if re.match(r"\|[-:| ]+$", after.strip()):  # the head of a table
            stripped = ""
        if stripped.startswith("|"):
            cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", stripped))
            yield from ((number, cell) for cell in cells if len(cell.split()) >= _OF_A_CELL)
            stripped = ""
        item = re.match(r"([-*]|\d+\.|:) +", stripped)
        if lines and (item or not stripped or stripped.startswith(("#", "!"))):
            yield first, " ".join(lines)
            lines = []
        if stripped and not stripped.startswith(("#", "!")):
            first = first if lines else number
            lines.append(stripped[item.end() :] if item else stripped)


def _prose(page: str) -> str:
    """Return a page with its code blocks and comments left blank."""
    blocks = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->", re.M | re.S)
    return blocks.sub(lambda block: "\n" * block[0].count("\n"), page)


def of_help() -> Iterator[Sentence]:
    for key in FIELDS:
        for one in meanings(key):
            yield from _divided("help", f"mprun --help {key}", one.doc)
    for place, node in _nodes():
        if isinstance(node, ast.keyword) and node.arg in _HELP and (text := _text(node.value)):
            for paragraph in re.split(r"\n\s*\n", text):
                yield from _divided("help", place, paragraph)


def of_errors() -> Iterator[Sentence]:
    """Yield the texts with which the package raises."""
    for place, node in _nodes():
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                if text := _text(argument):
                    yield from _divided("error", place, text)


def _nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted((ROOT / "mprun").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{name}:{getattr(node, 'lineno', 0)}", node


def _text(node: ast.expr) -> str:
    """Return a text as it is written, a name for each value, or nothing if it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_part, node.values))
    return ""


def _part(node: ast.expr) -> str:
    value = node.value if isinstance(node, ast.FormattedValue) else node
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.Call) and value.args and not isinstance(value.args[0], ast.Starred):
        value = value.args[0]  # printable(path)
    name = {ast.Name: "id", ast.Attribute: "attr"}.get(type(value))
    return f"<{getattr(value, name)}>" if name else "X"


def of_docstrings() -> Iterator[Sentence]:
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    for named in re.findall(r"^\.\. auto\w+:: (\S+)", page, re.MULTILINE):
        module, _, name = named.rpartition(".")
        own = getattr(import_module(module), name)
        documented = {named: own}
        if inspect.isclass(own):
            members = {n: m for n, m in vars(own).items() if not n.startswith("_")}
            documented |= {f"{named}.{n}": m for n, m in members.items()}
        for place, one in documented.items():
            text = inspect.getdoc(one) if callable(one) or isinstance(one, property) else None
            # Indented blocks that begin behind a blank line are code; `name: text` is an item.
            text = re.sub(r"\n\n(    .*\n?)+", "\n\n", text or "")
            text = re.sub(r"^ *(?=[a-z_]\w*(, \w+)*: )", "- ", text, flags=re.MULTILINE)
            for _, paragraph in paragraphs(text):
                yield from _divided("docstring", place, re.sub(r"^\w+:$", "", paragraph))


def main(words: list[str]) -> int:
    """Print a sample, or the long ones; return the exit code."""
    description = (__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(prog="scripts/sentences", description=description)
    parser.add_argument("date", nargs="?", help="seed of the sample, such as 2026-11-29")
    parser.add_argument("--count", type=int, default=100, help="sentences to draw (100)")
    parser.add_argument("--long", action="store_true", help=f"list those above {MOST_WORDS} words")
    asked = parser.parse_args(words)
    if asked.date is None and not asked.long:
        parser.error("a date or --long is needed")
    found = sentences()
    if asked.date is not None:
        drawn = random.Random(asked.date).sample(found, min(asked.count, len(found)))
        for number, one in enumerate(drawn, start=1):
            before = f"     ({one.before})\n" if one.before else ""
            print(f"{number:3}  {one.place}\n{before}     {one.text}\n")
    if asked.long:
        long = [one for one in found if one.words > MOST_WORDS]
        for one in long:
            print(f"{one.words:3}  {one.place}  {one.text}")
        all_of, long_of = (Counter(one.kind for one in some) for some in (found, long))
        for kind, count in all_of.items():
            print(f"{kind}: {long_of[kind]} of {count} sentences above {MOST_WORDS} words")
        print(f"all: {len(long)} of {len(found)}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main(sys.argv[1:]))

"""Links and anchors of README and docs resolve; reference pages name all that there is."""

import json
import re
from pathlib import Path

import pytest

from mprun import errors
from mprun.cli import main
from mprun.record.run_record import RunRecord

from ..helpers import TINY_GAN, TINY_LM, rows_of, run

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and MyST make them."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page):
    text = re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_paths_below_docs_that_the_program_names_exist():
    """In messages, comments and option files."""
    files = [p for folder in ("mprun", "conf", "benchmarks") for p in (ROOT / folder).rglob("*.*")]
    for file in files:
        if file.suffix in (".py", ".yaml", ".html"):
            for path in re.findall(r"\bdocs/[\w/.-]+\.md", file.read_text(encoding="utf-8")):
                assert (ROOT / path).exists(), (file, path)


def test_every_field_of_a_record_has_its_row():
    page = (ROOT / "docs/reference/run_directory.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE))))
    assert RunRecord.__annotations__.keys() <= rows


@pytest.mark.slow
def test_every_field_of_a_runs_files_and_of_a_comparison_is_on_the_page(tmp_path):
    page = (ROOT / "docs/reference/run_directory.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    named = {title: set(re.findall(r"`\.*(\w+)`", text)) for title, text in sections.items()}
    kept = ["train.steps=4", "train.checkpoint_every=4", "train.clip_norm=1"]
    for mode, more in (("fp32", []), ("amp", ["numerics=probes", "numerics.every=2"])):
        folder = tmp_path / "runs" / mode
        assert run(folder, *TINY_LM, *kept, f"precision={mode}", *more) == 0
    for record in rows_of(folder):
        assert record.keys() <= named["metrics.jsonl"]
    gan = tmp_path / "gan"
    assert run(gan, *TINY_GAN, "train.steps=1", "precision=amp") == 0
    written = set().union(*rows_of(folder, "train"), *rows_of(gan, "train"))
    table = re.findall(r"^\| (`.*) \| train", sections["metrics.jsonl"], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(table))) <= written | {"data_wait"}
    probe = json.loads((folder / "numerics" / "step-00000002.json").read_text())
    learner = probe["learners"]["model"]
    histogram = next(iter(learner["tensors"]["weights"].values()))
    assert {*probe, *learner, *histogram} <= named["numerics/"]
    (kept,) = (folder / "checkpoints").iterdir()
    assert json.loads((kept / "manifest.json").read_text()).keys() <= named["checkpoints/"]
    main(["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    (group,) = results["groups"]
    (mode,) = group["modes"]
    fields = {*results, *group, *mode, *mode["verdict"], *mode["outcomes"][0], *mode["gap"]}
    assert fields <= named["compare/results.json"]


def test_every_exit_code_has_its_row():
    page = (ROOT / "docs/reference/exit_codes.md").read_text(encoding="utf-8")
    codes = {code for name, code in vars(errors).items() if name.isupper() and type(code) is int}
    assert codes == {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}

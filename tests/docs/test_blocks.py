"""Every command and Python block of README, CONTRIBUTING and docs runs, or says why it does not.

A comment in front of a block says what is not as usual:

    <!-- not run: REASON -->          its commands are parsed and composed, its Python compiled
    <!-- not run (TEXT): REASON -->   only its lines with TEXT are not run
    <!-- needs: MODULE -->            run where that module is installed
    <!-- after: COMMAND -->           what a reader has done before
    <!-- ends with N: REASON -->      of its last plain run, another exit code than 0

The blocks of a page run one after the other in a folder of its own, with the options of `train` and
the quickstart's experiments shortened to a few steps. In the default run commands are composed, and
Python that needs no run is executed.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from mprun.cli.dispatch import _arguments, verbs
from mprun.cli.help import GROUPS, _options_of
from mprun.config.compose import compose_config, group_options, hydra_session
from mprun.config.keys import FIELDS
from mprun.config.option_files import conf_dir
from mprun.config.overrides import parse_overrides, split_seed_words, sweep_values
from mprun.sweeps.seeds import asked

from ..pages import ROOT, with_programs

# Pages whose blocks a test of their own runs, against what the page shows of their output.
OWN_TESTS = {
    "docs/tutorial/why.md": "tests/extensions/diagnosis/test_failing_run_page.py",
    "docs/own_data.md": "tests/cli/test_own_data_page.py",
    "docs/extend.md": "tests/cli/test_contributing.py",
    # Where the library is installed.
    "docs/script/lightning.md": "tests/extensions/adapters/test_lightning.py",
    "docs/script/huggingface.md": "tests/extensions/adapters/test_transformers.py",
    "docs/script/trl.md": "tests/extensions/adapters/test_trl.py",
}
# Records of what was run, by the programs of that day; and figures that a program writes.
RECORDS = ("docs/results/", "docs/error_rates.md", "docs/reference/operations.md", "docs/log/")
RUN = ("bash", "console", "python")
SHOWN = ("", "text", "yaml", "toml", "{toctree}", "{include}", "{eval-rst}")
# What a reader replaces: such an override is not composed.
PLACEHOLDER = re.compile(r"[<>]|\.\.\.|…|\b[A-Z]{2,}\b|/data/|outputs/")
FENCE = re.compile(
    r"^(?P<marks>(?: *<!-- .*? -->\n)*)(?P<indent> *)```(?P<language>\S*).*\n"
    r"(?P<text>(?:.*\n)*?)(?P=indent)```$",
    re.MULTILINE,
)
MARK = re.compile(r"<!-- (not run|needs|after|ends with)(?: \(?([^):]+)\)?)?: (.+?) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block; marks: (kind, argument, reason)."""

    page: str
    line: int
    language: str
    text: str
    marks: tuple[tuple[str, str, str], ...]

    @property
    def commands(self) -> list[str]:
        """Return the lines behind `$` of a console block, joined and without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        lines = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines]
        return [line for line in lines if line]

    def runs(self, line: str = "") -> bool:
        """Return whether the block, or a line of it, is run."""
        found = [argument for kind, argument, _ in self.marks if kind == "not run"]
        return not any(argument in line if argument else True for argument in found)

    def marked(self, kind: str) -> list[str]:
        return [argument or reason for name, argument, reason in self.marks if name == kind]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _pages() -> list[str]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found += [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return sorted(name for name in names if not name.startswith(RECORDS))


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        body = "".join(f"{line[indent:]}\n" for line in match["text"].splitlines())
        marks = tuple((m[1], m[2] or "", m[3]) for m in MARK.finditer(match["marks"]))
        line = text.count("\n", 0, match.start("indent")) + 1
        found.append(Block(page, line, match["language"], body, marks))
    return tuple(found)


BLOCKS = [block for page in _pages() for block in blocks_of(page)]
OURS = [block for block in BLOCKS if block.page not in OWN_TESTS and block.language in RUN]


def commands() -> list[str]:
    return list(dict.fromkeys(c for b in OURS if b.language != "python" for c in b.commands))


def test_every_block_is_found():
    """None with a language that nobody runs, none that only looks like one, no mark in vain."""
    for page in _pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        fences = len(re.findall(r"^ *```", text, re.MULTILINE))
        assert fences == 2 * len(blocks_of(page)), page
        marks = len(re.findall(r"^ *<!-- (?!generated: )", text, re.MULTILINE))
        assert marks == sum(len(block.marks) for block in blocks_of(page)), page
        assert not re.search(r"^    (mprun|python|scripts/)\b", text, re.MULTILINE), page
    for block in BLOCKS:
        assert block.language in RUN + SHOWN, block
        if block.language in ("", "text"):
            shown = re.search(r"^(\$ .*|mprun [a-z]+=.*)", block.text, re.MULTILINE)
            assert not shown, (block, shown)


def test_a_block_that_is_not_run_says_why():
    for block in BLOCKS:
        for kind, argument, reason in block.marks:
            assert kind == "needs" or len(reason) > 10, (block, kind)
            if kind == "not run" and argument:
                assert any(argument in command for command in block.commands), block


@pytest.mark.parametrize("page", OWN_TESTS)
def test_a_page_with_a_test_of_its_own_has_one(page):
    assert Path(page).name in (ROOT / OWN_TESTS[page]).read_text(encoding="utf-8")
    assert any(block.language in RUN for block in blocks_of(page))


@pytest.mark.parametrize("command", commands())
def test_a_command_can_be_typed(command):
    """Its options exist and its overrides compose; a script or a module is there."""
    words = shlex.split(re.sub(r"^([A-Z_]+=\S+ )+", "", command))
    if words[0] in ("srun", "torchrun"):  # what they start
        words = words[words.index("mprun") :]
    if words[0] == "mprun":
        _check_mprun(words[1:])
    elif words[0].startswith("scripts/"):
        assert os.access(ROOT / words[0], os.X_OK)
    elif words[:2] == ["python", "-m"]:
        assert find_spec(words[2])
    else:
        assert re.match(r"pip|tensorboard|python \w+\.py", command), command


def _check_mprun(words: list[str]) -> None:
    if "--help" in words:
        helped = {word.partition("=")[0] for word in words} - {"--help"}
        assert helped <= {*FIELDS, *GROUPS, *verbs(), "compare"}
        return
    options, verb = [name for a in _arguments()._actions for name in a.option_strings], ""
    if words and not words[0].startswith("-") and "=" not in words[0]:
        verb = words[0]
        assert verb in verbs(), f"{verb} is no verb"
        options = ["--roofline", *_options_of(verbs()[verb], words)]
    for word in words:
        assert not word.startswith("--") or word.partition("=")[0] in options, word
    if verb not in ("", "advise", "bench"):
        return
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    overrides = [word for word in overrides if not PLACEHOLDER.search(word)]
    if "-m" in words:
        seed_words, overrides = split_seed_words(overrides)
        asked(seed_words)
    if verb == "bench":  # it says itself what each rank takes
        overrides = [word for word in overrides if not word.startswith("devices=")]
    single = []
    with hydra_session(None):
        for override in parse_overrides(overrides):
            if override.is_sweep_override():
                assert "-m" in words, f"{override.input_line} without -m"
                single.append(sweep_values(override, group_options(override.key_or_group))[0])
            else:
                single.append(override.input_line)
    if not any(word.startswith("experiment=") and PLACEHOLDER.search(word) for word in words):
        compose_config(single, files=False)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_compiles(block):
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("page", ["docs/reference/api.md"])
def test_python_that_needs_no_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(page):
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> dict[str, str]:
    """The environment in which `mprun` is a copy of it whose runs take a few steps."""
    copy = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "mprun", copy / "mprun", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(conf_dir(), copy / "conf")
    shutil.copy(ROOT / "pyproject.toml", copy)  # names the extensions
    for path in (copy / "conf" / "train").glob("*.yaml"):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if values.get("steps"):
            values |= {"steps": 4, "eval_every": 0}
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
    for path in (copy / "conf" / "experiment").glob("quickstart_*.yaml"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"^  steps: \d+", "  steps: 12", text, flags=re.M), "utf-8")
    return with_programs(copy, copy)


@pytest.mark.slow
@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in OURS if block.runs()))
def test_a_page_runs(page, program, tmp_path):
    """From its first block to its last."""
    before = set()
    for block in blocks_of(page):
        if block.language not in RUN or not block.runs():
            continue
        for command in set(block.marked("after")) - before:
            _run(["bash", "-c", command], tmp_path, program, (0, 3), f"{block}: {command}")
            before.add(command)
        if any(find_spec(module) is None for module in block.marked("needs")):
            continue
        if block.language == "python":
            _run([sys.executable, "-c", block.text], tmp_path, program, (0,), str(block))
            continue
        codes = (0, *(int(code) for code in block.marked("ends with")))
        for command in filter(block.runs, block.commands):
            _run(["bash", "-c", command], tmp_path, program, codes, f"{block}: {command}")


def _run(words, folder, environment, codes, what) -> None:
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    said = (ended.stdout + ended.stderr)[-2000:]
    assert ended.returncode in codes, f"{what}: exit code {ended.returncode}\n{said}"

"""docs/install.md: what it installs is what its commands need; the library needs torch alone."""

import os
import re
import subprocess
import tomllib
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ..helpers import TINY_LM, run
from ..pages import ROOT
from .test_blocks import blocks_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What the page says of the library alone, in a script.
LIBRARY = """
import sys
import torch
import mprun
from mprun.precision import get_policy

network = torch.nn.Linear(4, 2)
network, optimizer = mprun.prepare(
    network, torch.optim.SGD(network.parameters(), 0.1), get_policy("fp16_master_scaled")
)
network(torch.ones(3, 4)).square().mean().backward()
optimizer.step()
print(mprun.load(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Python in an environment of its own: the core's dependencies and theirs, linked, no more."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    wanted, known = list(PROJECT["dependencies"]), set()
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:  # for another system
            continue
        if found.name in known:
            continue
        known.add(found.name)
        wanted += found.requires or []
        for top in {file.parts[0] for file in found.files or ()} - {".."}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
    return folder / "bin" / "python"


def ended(python, *words) -> subprocess.CompletedProcess:
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([str(python), *words], env=own, capture_output=True, text=True)


def test_every_extra_of_the_page_is_there_and_the_command_has_its_own():
    [given] = [block for block in blocks_of("docs/install.md") if "pip install" in block.text]
    lines = [line for line in given.commands if line.startswith("pip")]
    extras = [re.findall(r"\.\[(\w+)\]", line) for line in lines]
    needs = PROJECT["optional-dependencies"]
    for [extra] in filter(None, extras):
        assert extra == "cli" or "mprun[cli]" in needs[extra], extra
    # One line alone installs no command, and says so.
    alone = [line for line, own in zip(lines, extras, strict=True) if not own]
    assert alone == ["pip install -e ."]
    assert "pip install -e .  " in given.text and "the library alone" in given.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [[], ["doctor"], ["doctor", "--json"], ["-m", "seed=1,2"], ["ls"], ["compare", "x"], ["bench"]],
)
def test_the_command_without_its_extra_says_what_to_install(words, alone):
    done = ended(alone, "-m", "mprun", *words)
    assert (done.returncode, done.stdout) == (2, "")
    told = r"pip install 'mprun\[cli\]', in a clone pip install -e '\.\[cli\]'"
    assert re.fullmatch(rf"mprun: \w+: is not installed; {told}\n", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["--version", "--help"])
def test_what_answers_without_it(word, alone):
    done = ended(alone, "-m", "mprun", word)
    assert (done.returncode, done.stderr) == (0, "") and "mprun" in done.stdout


@pytest.mark.slow
def test_the_library_alone_trains_and_reads_runs(alone, tmp_path):
    assert run(tmp_path / "run", *TINY_LM, "train.steps=2") == 0
    done = ended(alone, "-c", LIBRARY, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "done at step 2" in done.stdout

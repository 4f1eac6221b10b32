"""Each extension can be deleted, with those that build on it: the core passes its tests alone."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS = sorted(path.parent.name for path in ROOT.glob("mprun/extensions/*/__init__.py"))
# The other folders of tests are the core's.
OF_THE_HOUSE = ("extensions", "benchmarks", "docs", "fake_cuda", "scripts")
QUICK = ("recipes", "roles", "composition", "help_and_cfg")


def with_those_above(extension):
    """The extension and those that import it as they are imported themselves."""
    found = {extension}
    for other in EXTENSIONS:
        files = (ROOT / "mprun" / "extensions" / other).rglob("*.py")
        text = "\n".join(path.read_text("utf-8") for path in files)
        if other != extension and f"\nfrom mprun.extensions.{extension} import" in text:
            found |= with_those_above(other)
    return found


@pytest.fixture
def copy(tmp_path):
    """Return a copy of the files of a checkout, which is gone after the test."""
    folder = tmp_path / "mprun"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "outputs", "_build", "shared")
    shutil.copytree(ROOT, folder, ignore=ignored)
    yield folder
    shutil.rmtree(folder)


def core_of(copy, *words):
    """How pytest ends on the core's default tests of the copy, and what it said."""
    ignored = [f"--ignore=tests/{name}" for name in OF_THE_HOUSE]
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests", *ignored, *words]
    environment = own | {"PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


def delete(copy, *extensions):
    for name in extensions:
        for folder in ("mprun", "tests"):
            shutil.rmtree(copy / folder / "extensions" / name)


@pytest.mark.slow
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_one_is_deleted(extension, copy):
    """All tests of the core are collected, those of options, keys and pages are run."""
    delete(copy, *with_those_above(extension))
    code, said = core_of(copy, "-k", " or ".join(f"test_{name}" for name in QUICK))
    assert code == 0, said


@pytest.mark.slow
def test_a_core_that_imports_one_is_seen(copy):
    delete(copy, "paper")
    with open(copy / "mprun" / "config" / "compose.py", "a", encoding="utf-8") as file:
        file.write("\nimport mprun.extensions.paper.rows\n")
    code, said = core_of(copy, "--collect-only", "-x")
    assert code and "No module named 'mprun.extensions.paper'" in said, said


@pytest.mark.long
def test_all_are_deleted(copy):
    for folder in ("mprun", "tests"):
        shutil.rmtree(copy / folder / "extensions")
    code, said = core_of(copy, *(["-n", "2"] if find_spec("xdist") else []))
    assert code == 0, said


@pytest.mark.parametrize(
    ("name", "use", "missing"),
    [
        (
            "diagnosis",
            "mprun.explain(None, None)",
            "mprun.explain: needs mprun.extensions.diagnosis.of_script",
        ),
    ],
)
def test_what_misses_one_says_so_in_a_line(name, use, missing, tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", name)
    shutil.copytree(ROOT / "mprun", tmp_path / "mprun", ignore=ignored)
    # What is left where git removed the files.
    (tmp_path / "mprun" / "extensions" / name / "__pycache__").mkdir(parents=True)
    command = [sys.executable, "-c", f"import mprun; {use}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"ModuleNotFoundError: {missing}, which is not installed"


def test_every_table_of_an_extension_is_read():
    """A table that no test of the core asks for would be cases that never run."""
    asked = set()
    for path in (ROOT / "tests").rglob("*.py"):
        asked |= set(re.findall(r'with_extensions\("(\w+)"', path.read_text("utf-8")))
    for path in ROOT.glob("tests/extensions/*/cases.py"):
        text = path.read_text("utf-8")
        tables = set(re.findall(r"^([A-Z_]+) = ", text, re.MULTILINE))
        used = {name for name in tables if len(re.findall(rf"\b{name}\b", text)) > 1}
        assert tables - used <= asked, path

"""scripts/mutants: its list fits this checkout; on a small one, what it says and what it leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
LIST = """
[[mutant]]
name = "{name}"
file = "mprun/one.py"
old = "{old}"
new = "{new}"
tests = ["tests/test_one.py"]
"""
KILLED = {"name": "minus", "old": "a + b", "new": "a - b"}
SURVIVES = {"name": "swapped", "old": "a + b", "new": "b + a"}
HANGS = {"name": "hangs", "old": "return a + b", "new": "import time; time.sleep(60)"}


@pytest.fixture
def checkout(tmp_path):
    """``checkout(defects, *words)``: the started script of a checkout that has these."""

    root = tmp_path / "checkout"

    def start(defects, *words):
        for folder in ("checkout/scripts", "checkout/mprun", "checkout/tests", "tmp"):
            (tmp_path / folder).mkdir(parents=True)
        shutil.copy(SCRIPTS / "mutants.py", root / "scripts")
        text = "\n".join(LIST.format(**defect) for defect in defects)
        (root / "scripts" / "mutants.toml").write_text(text)
        (root / "mprun" / "__init__.py").touch()
        (root / "mprun" / "one.py").write_text("def add(a, b):\n    return a + b\n")
        test = "from mprun.one import add\n\n\ndef test_add():\n    assert add(2, 1) == 3\n"
        (root / "tests" / "test_one.py").write_text(test)
        command = [sys.executable, root / "scripts" / "mutants.py", *words]
        own = {"TMPDIR": str(tmp_path / "tmp"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(command, env=os.environ | own, text=True, **pipes)

    return start


def test_the_list_fits_this_checkout():
    words = [sys.executable, SCRIPTS / "mutants.py", "--list"]
    listed = subprocess.run(words, capture_output=True, text=True)
    assert (listed.returncode, listed.stderr) == (0, "")


@pytest.mark.slow
def test_what_tests_see_and_what_they_do_not(checkout, tmp_path):
    found = tmp_path / "found.json"
    process = checkout([KILLED, SURVIVES], "-j", "2", "--json", found)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    assert printed.endswith("1 of 2 killed, 1 survived\n")
    outcomes = {one["name"]: (one["outcome"], one["by"]) for one in json.loads(found.read_text())}
    assert outcomes["minus"] == ("killed", ["tests/test_one.py::test_add"])
    assert outcomes["swapped"] == ("survived", [])
    assert list((tmp_path / "tmp").iterdir()) == []
    assert "a + b" in (tmp_path / "checkout" / "mprun" / "one.py").read_text()


def test_a_defect_that_does_not_fit_is_refused(checkout):
    process = checkout([KILLED, {"name": "gone", "old": "a * b", "new": "a"}])
    printed, errors = process.communicate(timeout=300)
    assert (process.returncode, printed) == (2, "")
    assert errors == "mutants: gone: `old` is in mprun/one.py 0 times, must be once\n"


def test_ctrl_c_leaves_nothing_behind(checkout, tmp_path):
    process = checkout([HANGS])
    planted = None
    while planted is None:  # the copy of a defect that hangs
        assert process.poll() is None
        time.sleep(0.05)
        copies = (tmp_path / "tmp").glob("*/*/mprun/one.py")
        planted = next((path for path in copies if "sleep" in path.read_text()), None)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130
    assert list((tmp_path / "tmp").iterdir()) == []

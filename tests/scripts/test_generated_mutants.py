"""`scripts/mutants --generated` makes the listed changes and tells which of them tests see."""

import ast
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SCRIPTS)
    import mutations
    import planting
SOURCE = '''"""A text of 3."""
from functools import lru_cache

LIMIT = 3


def unseen(x):
    return x + 1


@lru_cache
def clipped(x):
    """Clip at 2 + 1."""
    if x > LIMIT:
        return LIMIT
    return x


def total(values, start=0):
    found = start
    for value in values:
        found += clipped(value)
    return found
'''
TESTS = """
import pytest
from mprun.precision.one import clipped, total

def test_the_limit():
    assert [clipped(x) for x in (2, 4)] == [2, 3]

@pytest.mark.parametrize("n", [1, 2])
def test_the_total(n):
    assert total([n, 1]) == n + 1
"""

BLIND = """
from mprun.precision.one import clipped

def test_it_runs():
    clipped(1)

def test_elsewhere():
    assert 1 + 1 == 2
"""

METHODS = """
def padded(a, b):
    return -(-a // b) * b

class Own(list):
    def __len__(self):
        return super().__len__()

    def size(self):
        return 1
"""


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("a < b", ["a <= b", "a >= b"]),
        ("a is b", ["a is not b"]),
        ("a + b * c", ["a - b * c", "a + b / c"]),
        ("a + 'text'", []),
        ("-a", ["a"]),
        ("a and b and c", ["a or b or c", "b and c", "a and c", "a and b"]),
        ("True", ["False"]),
        ("x[2]", ["x[3]", "x[1]"]),
        ("0.5", ["0.75"]),
        ("a if b else c", ["c if b else a"]),
        ("max(a, b)", ["min(a, b)", "max(b, a)"]),
        ("f(a, k=b, strict=True)", ["f(a, strict=True)"]),
        ("'text'", []),
    ],
)
def test_a_value_is_changed_in_these_ways(text, others):
    found = mutations.changes(ast.parse(f"def f():\n    x = {text}"))
    made = []
    for place in range(len(found)):
        tree = ast.parse(f"def f():\n    x = {text}")
        mutations.changes(tree)[place].apply()
        made.append(ast.unparse(tree.body[0].body[0].value))
    assert made == others


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("call()", ["pass"]),
        ("a.b = c", ["pass"]),
        ("a -= b", ["a += b", "pass"]),
        ("return a", ["return None"]),
        ("raise E(1 + 2)", ["pass"]),
        ("if a: return", ["if not a:"]),
        ("assert a > b", []),
        ("def g(k=1): return 'a'", ["return None"]),
    ],
)
def test_a_statement_is_changed_in_these_ways(text, others):
    found = mutations.changes(ast.parse(f"def f():\n    {text}"))
    assert [one.new for one in found] == others


def test_a_change_that_cannot_be_planted_is_told(tmp_path):
    """A method whose only super() is left out needs another closure, which it cannot be given."""
    file = tmp_path / "mprun" / "one.py"
    file.parent.mkdir()
    file.write_text(METHODS)
    names = {}
    exec(compile(METHODS, str(file), "exec"), names)
    found = mutations.changes(ast.parse(METHODS))
    planted = {}
    for place, change in enumerate(found):
        if change.kind == "returned":
            loaded = planting.Loaded(tmp_path)
            planted[change.function] = loaded.plant("mprun/one.py", place)
    assert planted == {"padded": True, "Own.__len__": False, "Own.size": True}
    assert names["Own"]().size() is None


@pytest.mark.slow
def test_what_tests_see_of_generated_mutants(tmp_path):
    for name in ("scripts", "mprun/precision", *(f"tests/{o}" for o in ("tasks", "script"))):
        (tmp_path / name).mkdir(parents=True)
    for name in ("mutations.py", "planting.py", "generated_mutants.py", "seeing_tests.py"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts")
    (tmp_path / "mprun" / "__init__.py").touch()
    (tmp_path / "mprun" / "precision" / "one.py").write_text(SOURCE)
    (tmp_path / "tests" / "precision").mkdir()
    (tmp_path / "tests" / "precision" / "test_one.py").write_text(TESTS)

    def run(*words, script="generated_mutants"):
        command = [sys.executable, f"scripts/{script}.py", "precision", *words]
        how = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(tmp_path)}}
        return subprocess.run(command, capture_output=True, text=True, **how)

    assert run("-n", "5").stderr.count("recording") == 1
    done = run("--json", str(tmp_path / "all.json"))
    assert done.returncode == 1, done.stderr
    assert "recording" not in done.stderr
    lines = (tmp_path / "outputs" / "mutants" / "precision.jsonl").read_text().splitlines()
    found = {one["name"].split(":", 1)[1]: one for one in map(json.loads, lines)}
    assert len(found) == len(lines) == 9  # none is judged twice, none of `unseen`
    drawn = sorted(map(json.loads, lines), key=lambda one: random.Random(one["name"]).random())
    assert json.loads((tmp_path / "all.json").read_text()) == drawn
    survived = {name for name, one in found.items() if one["outcome"] == "survived"}
    # The limit itself is returned either way; the test of `total` passes no start.
    assert survived == {"clipped:comparison:x > LIMIT:x >= LIMIT:1"}
    assert found["clipped:comparison:x > LIMIT:x <= LIMIT:1"]["by"].endswith("test_the_limit")
    assert found[":constant:3:4:1"]["outcome"] == "killed"
    assert list((tmp_path / "outputs" / "mutants").glob("tmp-*")) == []

    # The other way round: which tests see no change of what they execute.
    (tmp_path / "tests" / "precision" / "test_two.py").write_text(BLIND)
    asked = run("-n", "3", script="seeing_tests")
    assert asked.returncode == 1, asked.stderr
    assert "sees: 2, sees none: 1, executes none here: 1" in asked.stderr
    assert "sees none: tests/precision/test_two.py::test_it_runs [3 changes]" in asked.stderr
    again = run(script="seeing_tests").stderr.splitlines()
    assert again == asked.stderr.splitlines()[-1:]  # none is asked twice


def test_lines_of_a_template_are_none_of_a_module(tmp_path):
    inside = planting.in_mprun(tmp_path, f"{tmp_path}/mprun/comparison/load.py")
    assert inside == "mprun/comparison/load.py"
    for other in ("mprun/comparison/templates/page.html", "tests/helpers.py"):
        assert planting.in_mprun(tmp_path, f"{tmp_path}/{other}") is None

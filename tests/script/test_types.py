"""A type checker reports the types of a user's script, and they are true."""

import os
import runpy
import subprocess
import sys
import typing
from pathlib import Path
from types import UnionType

import pytest

SCRIPT = Path(__file__).with_name("user_script.py")
ROOT = SCRIPT.parents[2]
# As of an installed package: its own lines are not reported. What takes half of the time and has
# no type that the script sees is left out.
CONFIG = """
[mypy]
strict = True
follow_imports = silent
[mypy-torch._dynamo.*,torch._inductor.*,torch.ao.*,torch.distributed.*,torch.fx.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_mypy_finds_nothing_in_a_users_script(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", tmp_path / "mypy.ini", SCRIPT]
    own = {"MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": os.devnull}
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | own)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_types_of_the_script_are_those_at_run_time(tmp_path, monkeypatch):
    asserted = []

    def assert_type(value, kind):
        kinds = typing.get_args(kind) if isinstance(kind, UnionType) else (kind,)
        asserted.append(kind)
        assert isinstance(value, tuple(typing.get_origin(one) or one for one in kinds)), kind

    pytest.importorskip("mprun.extensions.diagnosis")  # of mprun.explain
    monkeypatch.setattr(typing, "assert_type", assert_type)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert len(asserted) > 40

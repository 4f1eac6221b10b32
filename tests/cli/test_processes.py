"""A few commands as real processes: exit code, streams, and that torch stays out of the way."""

import os
import subprocess
import sys

import pytest

from ..shipped import ALL_MODES
from ..tables import with_extensions


def ended(*words, cwd, **more) -> subprocess.CompletedProcess:
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120, **more)


def mprun(*arguments, **more) -> subprocess.CompletedProcess:
    return ended(sys.executable, "-m", "mprun", *arguments, **more)


@pytest.mark.slow
def test_bad_input_as_a_process(tmp_path):
    done = mprun("-m", "precision=fp32,fp61", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and len(done.stderr) <= 201
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_torch_is_not_imported_before_it_is_needed(tmp_path):
    """By the one interpreter that is asked all this; pages of verbs last, which may take numpy."""
    program = f"""
of_options = {with_extensions("HELP_PAGES", [])}
import sys
from mprun.cli import main
from mprun.cli.dispatch import verbs
pages = [verb + " --help" for verb in (*verbs(), *of_options)]
refused = ["lr=3", "-m precision=fp32,fp61", "doctor --foo"]
for words in ("--help", "--cfg job", "--info defaults", *refused, *pages):
    assert main(words.split()) == (2 if words in refused else 0), words
    heavy = {{"torch"}} if words in pages else {{"torch", "numpy"}}
    assert not heavy & set(sys.modules), words
"""
    done = ended(sys.executable, "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    command = f"{sys.executable} -m mprun --help; echo $? >&2"
    done = ended("bash", "-c", f"({command}) | head -1", cwd=tmp_path)
    assert "Traceback" not in done.stderr and done.stderr.strip() == "0"


@pytest.mark.slow
def test_completion_offers_groups_and_options(tmp_path):
    def ask(line: str) -> set[str]:
        environment = os.environ | {"COMP_LINE": line, "COMP_POINT": str(len(line))}
        done = mprun("-sc", "query=bash", cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split())

    assert ask("mprun precision=") == {f"precision={mode}" for mode in ALL_MODES}
    # Keys are offered beside groups.
    assert {"model=", "model."} <= ask("mprun mod")

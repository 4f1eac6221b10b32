"""Commands as real processes: torch stays out of the way, and a reader may leave early."""

import subprocess
import sys

import pytest

from ..tables import with_extensions


def ended(*words, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120)


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

"""What the verbs of one run have in common: help pages, and bad input found early."""

import subprocess
import sys

import pytest

from mprun.cli import main

OPTIONS = {
    "advise": ["--steps", "--every", "--share", "--check", "--json", "--config-dir"],
    "explain": ["--json", "--no-cures", "--config-dir"],
    "mismatch": ["--tokens", "--window", "--batch", "--pad", "--band", "--log-softmax", "--json"],
    "scaler-replay": ["--scalers", "--json", "--out", "--no-files", "--config-dir"],
}


@pytest.mark.parametrize("verb", OPTIONS)
def test_a_help_page_names_every_option_and_the_exit_codes(verb, capsys):
    assert main([verb, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: mprun {verb}") and "Exit codes: 0 " in page
    for option in OPTIONS[verb]:
        assert f"  {option}" in page, option


SCRIPT = """
import sys
from mprun.cli import main
for words in {commands}:
    assert main(words) == 2, words
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_bad_input_is_found_before_torch_is_imported(tmp_path):
    (tmp_path / "trace.csv").write_text("step,limit\n1,bad\n")
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "run.json").write_text('{"status": "done"}')
    (tmp_path / "done" / "config.yaml").write_text("{}")
    commands = [
        ["advise", "--steps", "0"],
        ["advise", "--stesp", "8"],
        ["advise", "precision=amp", "optim.lr=-1"],
        ["advise", "resume=run"],
        ["advise", "done"],
        ["explain"],
        ["explain", "run", "--json", "--fast"],
        ["explain", "done"],
        ["mismatch", "fp32", "fp16"],
        ["mismatch", "amp", "optim.lr=-1"],
        ["mismatch", "amp", "model=resnet50"],
        ["mismatch", "amp", "done"],
        ["scaler-replay", "trace.csv"],
        ["scaler-replay", "trace.csv", "scaler.bogus=1"],
        ["scaler-replay", "done", "--scalers", "torhc"],
    ]
    script = SCRIPT.format(commands=commands)
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("\n") == len(commands) and ended.stdout == ""

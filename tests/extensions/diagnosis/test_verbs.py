"""The verbs for a single run share help pages, and refuse bad input early."""

import shlex
import subprocess
import sys

import pytest

from mprun.cli import main
from mprun.errors import DIVERGED, DONE
from mprun.extensions.diagnosis.commands import page
from mprun.numerics.post_mortem import read_post_mortem
from mprun.record.run_record import Record, read_record
from mprun.record.seal import BrokenSeal, check_seal

from ...helpers import TINY_LM, record_of, refused, run

OPTIONS = {
    "advise": ["--steps", "--every", "--share", "--check", "--json", "--config-dir"],
    "explain": ["--json", "--no-cures", "--steps", "--config-dir"],
    "logprobs": ["--tokens", "--window", "--batch", "--pad", "--band", "--log-softmax", "--json"],
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
        ["explain", "."],
        ["explain", "run", "--json", "--fast"],
        ["explain", "done"],
        ["logprobs", "fp32", "fp16"],
        ["logprobs", "amp", "optim.lr=-1"],
        ["logprobs", "amp", "model=resnet50"],
        ["logprobs", "amp", "done"],
    ]
    command = [sys.executable, "-c", SCRIPT.format(commands=commands)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    # That a run which ended has no seal is said once a process, beside the errors.
    lines = [line for line in ended.stderr.splitlines() if not line.endswith("(said once)")]
    assert len(lines) == len(commands) and ended.stdout == ""


def test_a_terminal_has_whole_words_and_commands_to_copy(monkeypatch, capsys):
    command = "          mprun model=lstm_lm " + "optim.lr=0.125 " * 8 + '\'a=["*", "!x"]\''
    lines = [f"culprit   {'a long word ' * 9}".rstrip(), f"          {'x' * 50}  result", command]
    page({}, lines, False)
    assert capsys.readouterr().out.splitlines() == lines  # a pipe has a line for each
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    page({}, lines, False)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("culprit   a long word")
    assert all(len(line) <= 62 and line.startswith("          ") for line in printed[1:])
    at = next(number for number, line in enumerate(printed) if line.lstrip().startswith("mprun"))
    assert max(map(len, printed[at:])) <= 60 and len(printed) > at + 2
    assert " ".join(printed[:at]).split() == " ".join(lines[:2]).split()
    page({}, [f"{'x' * 55} +8.12 % more"], False)
    assert capsys.readouterr().out.splitlines() == ["x" * 55, "+8.12 % more"]
    told = "\n".join(printed[at:]).replace("\\\n", "")  # as a shell joins lines
    assert shlex.split(told) == shlex.split(command)


def test_of_an_interrupted_run_it_is_said_how_to_go_on(tmp_path, capsys):
    """Of one that stops before its first probe, when that is due."""
    folder = tmp_path / "run"
    probed = ["numerics=probes", "numerics.every=10", "train.checkpoint_every=4", "train.steps=4"]
    assert run(folder, *TINY_LM, *probed) == 0
    says = f"to go on: mprun resume={folder}"
    for status, cause in (("running", None), ("preempted", "SIGTERM")):
        Record(folder, record_of(folder)).end(status, cause)
        refused(capsys, "explain", folder, says=says)
    refused(capsys, "advise", folder, says=["step 10 would have the first", says])


@pytest.mark.slow
def test_a_post_mortem_that_explain_writes_again_is_sealed(tmp_path):
    """Without the state that the run kept, `explain` trains again and writes anew."""
    folder = tmp_path / "run"
    path = folder / "numerics" / "post-mortem.json"
    bad = [*TINY_LM, "precision=fp16_naive", "optim=adam", "train.steps=6"]  # eps is 0 in FP16
    assert main([*bad, "numerics.keep_failure=false", f"output_dir='{folder}'"]) == DIVERGED
    check_seal(folder)
    before = path.read_bytes()
    assert main(["explain", "--no-cures", str(folder)]) == DONE
    assert path.read_bytes() != before
    check_seal(folder)
    path.write_bytes(before)
    with pytest.raises(BrokenSeal, match=str(path)):
        read_post_mortem(folder)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["advise", "logprobs amp --tokens 24"])
def test_a_verb_says_that_a_run_has_no_end_yet(tmp_path, words, capsys):
    folder = tmp_path / "run"
    run = [*TINY_LM, "precision=amp", "train.steps=2", "train.checkpoint_every=1"]
    run += ["numerics=probes", "numerics.every=1"]
    assert main([*run, f"output_dir='{folder}'"]) == DONE
    read_record(folder).reopen()  # as a kill leaves it
    capsys.readouterr()
    assert main([*words.split(), str(folder)]) == DONE
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mprun: ")]
    says = "status running: goes on or was killed; it is read as far as it goes"
    assert said[0] == f"mprun: {folder}: {says}"
    assert all("tries changes for at most 60 seconds" in line for line in said[1:])

"""Explanation and advice of a run whose network and data are the user's own code."""

import pytest

from mprun.cli import main
from mprun.config.trust import vouched
from mprun.extensions.diagnosis.commands.advise import advise_run

from ...cli.test_own_code_trust import NAMES, RUN, edited, folder, refused
from ...helpers import seal_again

__all__ = ["edited", "folder"]


@pytest.mark.slow
def test_advise_check_does_not_take_names_from_the_recorded_command_line(edited, capsys):
    # The configuration is honest, the overrides that --check would run again are not.
    text = (edited / "config.yaml").read_text()
    (edited / "config.yaml").write_text(text.replace("hostile", "honest"))
    seal_again(edited)
    line = refused(capsys, "advise", "run", "--check", "--steps", "2", *NAMES)
    assert "the run was made with data.factory=hostile:data" in line
    assert not (edited / "check").exists()


@pytest.mark.slow
def test_advise_reads_a_run_of_one_s_own(folder):
    assert main([*RUN, "output_dir=run"]) == 0
    advice = advise_run(folder / "run", given=vouched(NAMES))
    assert advice.overrides and " ".join(NAMES) in advice.command


@pytest.mark.slow
def test_explain_replays_a_run_of_one_s_own(folder, capsys):
    diverging = [o for o in RUN if "precision" not in o]
    assert main([*diverging, "precision=fp16_naive", "optim=adam", "output_dir=run"]) == 3
    assert "names code" in refused(capsys, "explain", "run")
    assert main(["explain", "run", *NAMES]) == 0
    assert "division by zero" in capsys.readouterr().out

"""docs/examples/precision_gate.yml: its own commands, as a job runs them, pass and fail."""

import subprocess

import pytest
import yaml

from ..pages import ROOT, with_programs
from .test_blocks import blocks_of

PAGE = "docs/ci_gate.md"
WORKFLOW = ROOT / "docs" / "examples" / "precision_gate.yml"
[SCRIPT] = [block.text for block in blocks_of(PAGE) if block.language == "python"]


def steps() -> list[dict]:
    [job] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].values()
    return job["steps"]


def done(folder, script: str) -> list[tuple[str, int]]:
    """(command or action, exit code) of each step behind the installation that a job would take.

    An upload is 0 where its file is there.
    """
    environment, taken = with_programs(folder), []
    work = folder / "work"
    work.mkdir()
    (work / "ci_check.py").write_text(script, encoding="utf-8")
    [installs] = [n for n, step in enumerate(steps()) if step.get("name") == "Install"]
    for step in steps()[installs + 1 :]:
        if any(code for _, code in taken) and step.get("if") != "always()":
            continue
        if "run" in step:
            command = ["bash", "-e", "-c", step["run"]]  # as GitHub calls its shell
            ended = subprocess.run(command, cwd=work, env=environment, capture_output=True)
            taken.append((step["run"], ended.returncode))
        else:
            name = step["uses"].partition("@")[0]
            taken.append((name, int(not (work / step["with"]["path"]).is_file())))
    return taken


def test_the_page_shows_the_file_and_its_commands():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert f"```{{include}} examples/{WORKFLOW.name}\n" in text
    [shown] = [block.commands for block in blocks_of(PAGE) if block.language == "bash"]
    run = [step["run"] for step in steps() if "run" in step]
    assert run[0].startswith("pip install -r requirements.txt") and run[1:] == shown
    assert all("@v" in step["uses"] for step in steps() if "uses" in step)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "code"), [("amp", 0), ("bf16_naive", 3)])
def test_its_steps_pass_with_a_mode_that_matches_and_fail_with_another(mode, code, tmp_path):
    changed = SCRIPT.replace('modes=["fp32", "amp"]', f'modes=["fp32", "{mode}"]')
    assert f'"{mode}"' in changed
    assert done(tmp_path, changed) == [
        ("python ci_check.py", 0),
        ("mprun compare outputs/ci --check", code),
        ("actions/upload-artifact", 0),
    ]

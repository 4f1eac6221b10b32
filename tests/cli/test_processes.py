"""A few commands as real processes: exit code, streams, and that torch stays out of the way."""

import os
import subprocess
import sys

import pytest

from ..shipped import MODES


def mprun(*arguments, cwd, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mprun", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        **more,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("model=resnet5",),
        ("optim.lr=nan",),
        ("optim.lr=[1",),
        ("hydra.run.dir=/tmp/x",),
        ("-m", "precision=fp32,fp61"),
        ("--cfg", "job", "seed=-1"),
    ],
)
@pytest.mark.few(3)
def test_bad_input_as_a_process(arguments, tmp_path):
    ended = mprun(*arguments, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1 and len(ended.stderr) <= 201
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--cfg job",
        "--info defaults",
        "lr=3",
        "-m precision=fp32,fp61",
        "doctor --help",
        "doctor --foo",
    ],
)
@pytest.mark.few(3)
def test_torch_is_not_imported_before_it_is_needed(arguments, tmp_path):
    program = (
        "import sys; from mprun.cli import main; main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    command = f"{sys.executable} -m mprun --help; echo $? >&2"
    ended = subprocess.run(
        f"({command}) | head -1",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in ended.stderr and ended.stderr.strip() == "0"


def test_completion_offers_groups_and_options(tmp_path):
    def ask(line: str) -> set[str]:
        environment = os.environ | {"COMP_LINE": line, "COMP_POINT": str(len(line))}
        ended = mprun("-sc", "query=bash", cwd=tmp_path, env=environment)
        assert ended.returncode == 0, ended.stderr
        return set(ended.stdout.split())

    assert ask("mprun precision=") == {f"precision={mode}" for mode in MODES}
    # Keys are offered beside groups.
    assert {"model=", "model."} <= ask("mprun mod")

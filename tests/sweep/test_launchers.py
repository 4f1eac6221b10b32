"""Sweeps through Hydra's launchers: our plan and outcomes, their processes."""

import os
import signal
import subprocess
import sys
import threading
from importlib.metadata import distributions
from pathlib import Path

import pytest

from mprun.cli import main
from mprun.sweeps.plan import plan

from ..helpers import record_of, refused

JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
SUBMITIT = ["hydra/launcher=submitit_local"]
LENGTH = ["train.steps=800", "train.checkpoint_every=100"]


def missing(package: str) -> bool:
    return not [*distributions(name=package)]


with_joblib = pytest.mark.skipif(missing("hydra-joblib-launcher"), reason="needs mprun[joblib]")
with_submitit = pytest.mark.skipif(missing("hydra-submitit-launcher"), reason="needs mprun[slurm]")
each_launcher = pytest.mark.parametrize(
    "launcher",
    [pytest.param(JOBLIB, marks=with_joblib), pytest.param(SUBMITIT, marks=with_submitit)],
    ids=["joblib", "submitit_local"],
)


def records(cells) -> list[dict]:
    return [record_of(cell.directory) for cell in cells]


@pytest.mark.slow
@each_launcher
def test_outcomes_and_places(launcher, tiny, held_at_first_step, same_as_single, tmp_path, capfd):
    arguments = [*tiny, *LENGTH[:1], "optim.lr=0.001,0.002,1e+30"]
    cells = plan(arguments, None).cells

    def kill():
        os.kill(held_at_first_step(cells[0].directory), signal.SIGKILL)

    harm = threading.Thread(target=kill)
    harm.start()
    assert main(["-m", *arguments, *launcher]) == 5
    harm.join()
    assert [r["status"] for r in records(cells)] == ["failed", "done", "diverged"]
    printed = capfd.readouterr()
    assert printed.out.splitlines()[-1] == f"sweep: {cells[0].directory.parent}"
    for words in ("killed by SIGKILL", "done", "diverged at step 2"):
        assert words in printed.out
    same_as_single(cells[1].directory)
    assert (cells[1].directory / "console.log").is_file()
    # Everything of the launcher's is in one hidden folder.
    assert {path.name for path in tmp_path.iterdir()} == {"outputs", "single"}
    names = {cell.directory.name for cell in cells}
    found = {p.name for p in cells[0].directory.parent.iterdir() if not p.match("sweep-*.md")}
    assert found == names | {".launcher", "_summary"}
    [batch] = (cells[0].directory.parent / ".launcher").iterdir()
    assert "leaked" not in (batch / "driver.log").read_text()

    # Again: only the killed one, which is kept.
    assert main(["-m", *arguments, *launcher]) == 0
    assert "2 finished already" in capfd.readouterr().err
    assert [r["status"] for r in records(cells)] == ["done", "done", "diverged"]
    assert cells[0].directory.with_name(f"{cells[0].directory.name}.attempt1").is_dir()
    same_as_single(cells[0].directory)


@pytest.mark.slow
@each_launcher
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_is_continued(
    launcher, number, tiny, start_sweep, wait_for, same_as_single, tmp_path
):
    arguments = [*tiny, *LENGTH, "seed=0,1", *launcher]
    cells = plan(arguments, None).cells
    sweep = start_sweep(arguments, tmp_path)
    wait_for(lambda: (cells[0].directory / "metrics.jsonl").exists())
    sweep.send_signal(number)
    assert sweep.wait() == (130 if number == signal.SIGINT else -9)
    assert start_sweep(arguments, tmp_path).wait() == 0
    for cell in cells:
        same_as_single(cell.directory)
    assert max(record["attempts"] for record in records(cells)) > 1


@pytest.mark.slow
@with_joblib
def test_a_worker_that_dies_takes_no_other_cell_with_it(
    tiny, held_at_first_step, same_as_single, tmp_path, capfd
):
    arguments = [*tiny, *LENGTH, "seed=0,1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]
    cells = plan(arguments, None).cells

    def kill_worker():
        process = held_at_first_step(cells[0].directory)
        stat = Path(f"/proc/{process}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        os.kill(process, signal.SIGCONT)

    harm = threading.Thread(target=kill_worker)
    harm.start()
    # The run itself was asked to end and wrote a checkpoint: resumable.
    assert main(["-m", *arguments]) == 75
    harm.join()
    assert [r["status"] for r in records(cells)] == ["preempted", "done", "done"]
    assert main(["-m", *arguments]) == 0
    for cell in cells:
        same_as_single(cell.directory)


@with_joblib
def test_options_that_do_not_go_together(capsys, tmp_path):
    for arguments, message in (
        (["-m", "seed=0,1", *JOBLIB, "-j", "2"], "-j 2: is not allowed with a launcher"),
        (["-m", *JOBLIB[:1], "hydra.launcher.n_jobs=x"], "hydra.launcher.n_jobs=x: Value 'x'"),
        (["-m", *JOBLIB[:1], "hydra.launcher.n_job=2"], "hydra.launcher.n_job=2: Key 'n_job'"),
        (JOBLIB[:1], "hydra/launcher: only a sweep (-m) has a launcher"),
        (["hydra.launcher.n_jobs=2"], "hydra.launcher.n_jobs: only a sweep (-m)"),
        (["--stall-after", "5"], "--stall-after 5: only a sweep (-m)"),
        (
            ["-m", "seed=0,1", "--stall-after", "-5"],
            "--stall-after -5: must be a number of seconds",
        ),
        (
            ["-m", "seed=0,1", "--stall-after=x"],
            "--stall-after x: must be a number of seconds >= 0",
        ),
    ):
        refused(capsys, *arguments, says=f"mprun: {message}")
    assert list(tmp_path.iterdir()) == []


@with_submitit
def test_slurm_composes_and_needs_sbatch(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm = ["-m", "seed=0,1", "hydra/launcher=submitit_slurm", "hydra.launcher.gpus_per_node=1"]
    no_program = "hydra/launcher=submitit_slurm: no sbatch here"
    refused(capsys, *slurm, "hydra.launcher.partition=a100", says=no_program)
    # Its keys are checked first.
    no_key = "hydra.launcher.partitio=a100: Key 'partitio' not in 'SlurmQueueConf'"
    refused(capsys, *slurm, "hydra.launcher.partitio=a100", says=no_key)


@pytest.mark.slow
def test_a_launcher_that_is_not_installed_names_its_extra(tmp_path):
    program = """
import sys, types
empty = types.ModuleType("hydra_plugins")
empty.__path__ = []
sys.modules["hydra_plugins"] = empty  # as it is without any plugin
from mprun.cli import main
for launcher in ("joblib", "submitit_local"):
    assert main(["-m", "seed=0,1", f"hydra/launcher={launcher}"]) == 2
"""
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    for line, extra in zip(ended.stderr.splitlines(), ("joblib", "slurm"), strict=True):
        assert f"pip install 'mprun[{extra}]'" in line
    assert list(tmp_path.iterdir()) == []

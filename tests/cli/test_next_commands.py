"""Every command that is named for a run works: each cell of the table is made for real, and run."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mprun
from mprun.cli import main
from mprun.comparison.verdict import comparable
from mprun.entry_points import announced
from mprun.record.run_record import Record
from mprun.training.next_commands import TABLE, commands

from ..helpers import TINY_AUTOENCODER, TINY_GPT, record_of
from ..numerics.spoilt_data import RUN as OWN

FOLDER = "small runs; it's (mine)"  # what a shell would take apart
RUN = [*TINY_AUTOENCODER, "train.steps=4", "train.log_every=1"]
KEPT = [*RUN, "train.checkpoint_every=2"]
# Of the runner: name -> overrides, the exit code, and the state that the run is put to.
RUNS = {
    "done": (RUN, 0, None),
    "beside": ([*RUN, "precision=amp"], 0, None),
    "probed": ([*RUN, "seed=1", "numerics=probes", "numerics.every=2"], 0, None),
    "bad_losses": (OWN, 0, None),
    "diverged": ([*RUN, "precision=fp16_naive"], 3, None),
    "preempted": (KEPT, 0, "preempted"),
    "failed": ([*KEPT, "seed=2"], 0, "failed"),
    "killed": ([*KEPT, "seed=3"], 0, "running"),
    "without_checkpoint": ([*RUN, "seed=4"], 0, "preempted"),
    "own": ([*OWN, "train.checkpoint_every=4", "seed=5"], 0, "preempted"),
}
# Of a script: name -> its mode, how it ends, and the step whose loss is spoilt.
SCRIPTS = {
    "done": ("fp32", "done", None),
    "beside": ("amp", "done", None),
    "bad losses": ("amp", "done", 3),
    "diverged": ("fp32", "diverged", 3),
    "preempted": ("fp32", "preempted", None),
    "failed": ("fp32", "failed", None),
}
HAS = {verb: verb in announced("mprun.verbs") for verb in ("explain", "advise")}


def mostly_slow(names, *quick):
    """Parameters of a test: the others than the quick ones take seconds together."""
    return [pytest.param(one, marks=[] if one in quick else [pytest.mark.slow]) for one in names]


def script_run(folder, mode, status, spoil):
    """A run of a script, its step and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = mprun.prepare(model, optimizer, mode)
    run = mprun.Run(folder, optimizer, config={}, seed=0, log_every=1)

    def step(factor=1.0):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), factor)).float().square().sum()
        loss.backward()
        optimizer.step()
        return loss

    with run:
        for number in range(1, 5):
            run.step(step(float("nan") if number == spoil else 1.0))
        run.evaluate(loss=1.0)
        if status not in ("done", "diverged"):
            run.close(status)
    return SimpleNamespace(run=run, step=lambda: step(float("nan")), optimizer=optimizer)


class Made:
    """Runs of every kind and status, each made when it is asked for."""

    def __init__(self):
        self.runs: dict[str, Path] = {}
        self.scripts: dict[str, SimpleNamespace] = {}

    def run(self, name) -> Path:
        """The directory of a run of mprun, of RUNS."""
        if name not in self.runs:
            overrides, code, status = RUNS[name]
            place = "pair" if name in ("done", "beside") else name
            before = {*Path().rglob("run.json")}
            assert main([f'output_root="{FOLDER}/{place}"', *overrides]) == code, name
            [path] = {*Path().rglob("run.json")} - before
            self.runs[name] = path.parent
            if status is not None:
                Record(path.parent, record_of(path.parent)).end(status, None)
        return self.runs[name]

    def script(self, name) -> SimpleNamespace:
        """Return a run of SCRIPTS, made by `script_run`."""
        pytest.importorskip("mprun.prepared")
        if name not in self.scripts:
            mode, status, spoil = SCRIPTS[name]
            place = "pair" if name in ("done", "beside") else name
            self.scripts[name] = script_run(Path(FOLDER, "scripts", place), mode, status, spoil)
        return self.scripts[name]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as changed:
        changed.chdir(tmp_path_factory.mktemp("here"))
        changed.setenv("SPOILT_WITH", "nan")
        yield Made()


def fits(directory) -> list:
    return [*commands(directory, record_of(directory), comparable)]


def shown(directory, capsys) -> list[str]:
    """The commands below "next" of `mprun show`."""
    capsys.readouterr()
    assert main(["show", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.strip() for line in lines[lines.index("next") + 1 :]]


def works(command) -> None:
    """Run a line as a shell takes it apart; TensorBoard, which serves, tells what it reads."""
    words = shlex.split(command)
    if words[0] == "tensorboard":
        words = [sys.executable, "-m", "tensorboard.main", *words[1:], "--inspect"]
        assert subprocess.run(words, capture_output=True).returncode == 0, command
        return
    assert words[0] == "mprun"
    trains = words[1] == "advise" and not Path(words[2]).is_dir()
    shorter = ["--steps", "4"] if trains else []
    shorter += ["--no-cures"] if words[1] == "explain" else []
    # A new run may diverge: a result.
    allowed = (0, 3) if "precision=fp32" in words else (0,)
    assert main([*words[1:], *shorter]) in allowed, command


NEEDED = dict.fromkeys(RUNS, ["mprun 'resume="]) | {
    "done": ["mprun compare", "mprun advise"],
    "beside": ["mprun compare"],
    "probed": ["mprun 'output_root=", "mprun advise"],
    **dict.fromkeys(("bad_losses", "diverged"), ["mprun explain"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(RUNS, "own", "diverged"))
def test_each_command_for_a_run_of_mprun_works(name, made, capsys, monkeypatch):
    monkeypatch.setenv("SPOILT_WITH", "nan")
    if name in ("done", "beside"):
        made.run("done"), made.run("beside")
    directory = made.run(name)
    found = [fit.command for fit in fits(directory)]
    assert shown(directory, capsys) == found
    for start in NEEDED[name]:
        verb = start.split()[1]
        if HAS.get(verb, True):
            assert any(one.startswith(start) for one in found), (start, found)
    before = {*Path().rglob("run.json")}
    for command in reversed(found):  # a resume changes what fits, and comes last
        works(command)
    if any("resume=" in one for one in found):
        assert record_of(directory)["status"] == "done" and {*Path().rglob("run.json")} == before


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(SCRIPTS, "diverged", "bad losses"))
def test_each_command_for_a_run_of_a_script_works(name, made, capsys):
    if name in ("done", "beside"):
        made.script("done"), made.script("beside")
    own = made.script(name)
    directory = own.run.directory
    found = fits(directory)
    itself = shlex.join(["mprun", "show", str(directory)])
    told = [f"{'in the script: ' * fit.in_script}{fit.command}" for fit in found]
    assert itself in told
    assert shown(directory, capsys) == [line for line in told if line != itself]
    for word in ("resume=", "mprun advise", "mprun explain"):
        assert not any(word in line for line in told)
    assert any("mprun compare" in line for line in told) == (name in ("done", "beside"))
    in_script = [fit.command for fit in found if fit.in_script]
    assert bool(in_script) == (name in ("bad losses", "diverged") and HAS["explain"])
    for command in in_script:
        known = {"mprun": mprun, "run": own.run, "step": own.step, "optimizer": own.optimizer}
        first, _, last = command.rpartition("; ")
        exec(first, known)
        assert eval(last, known).reproduced
    for fit in found:
        if not fit.in_script:
            works(fit.command)


@pytest.mark.slow
def test_each_row_of_the_table_has_fitted_a_run(made):
    """A row that nothing here makes is not shown to work; that of casts is below."""
    directories = [*map(made.run, RUNS), *(made.script(name).run.directory for name in SCRIPTS)]
    seen = {fit.purpose for directory in directories for fit in fits(directory)}
    # What these tests have resumed is done by now.
    seen |= {"to go on", "no checkpoint was kept; from step 1"}
    missing = {row.purpose for row in TABLE} - seen
    if HAS["explain"] and HAS["advise"]:
        assert missing == {"to find what its casts cost"}


@pytest.mark.slow
def test_no_command_is_named_that_cannot_work(made, capsys, monkeypatch):
    """Its files, code or torch are not there, another run beside it is damaged: nothing is said."""
    folder = made.run("failed")
    Record(folder, record_of(folder)).end("failed", "ValueError: no")
    record = record_of(folder)
    assert fits(folder)[0].purpose == "to go on"

    def starts(**changes):
        Record(folder, record | changes).seal()
        return [fit.command for fit in fits(folder)]

    old = record["environment"] | {"packages": {"torch": "1.0.0"}}
    assert not any("resume=" in one for one in starts(environment=old))
    assert not any("resume=" in one for one in starts(config_hash="0" * 64))
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        checkpoint.rename(checkpoint.with_name(f"gone-{checkpoint.name}"))
    assert not any("resume=" in one for one in starts(first_checkpoint=2))
    done, _ = made.run("done"), made.run("beside")
    assert any("mprun compare" in fit.command for fit in fits(done))
    damaged = done.parent / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    assert not any("mprun compare" in fit.command for fit in fits(done))
    capsys.readouterr()
    assert main(["ls", str(done.parent)]) == 0
    printed = capsys.readouterr().out
    assert "damaged" in printed and "mprun compare" not in printed


@pytest.mark.slow
def test_ls_names_what_works(made, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    for name in SCRIPTS:
        made.script(name)
    assert main(["ls", f"{FOLDER}/scripts"]) == 0
    table, _, following = capsys.readouterr().out.partition("\n\n")
    named = [line.strip() for line in following.splitlines()[1:]]
    statuses = [line.split()[-3:] for line in table.splitlines()]
    assert len(statuses) == 7 and len(named) == 4  # a comparison, and three that are not done
    for command in named:
        works(command)


@pytest.mark.slow
def test_what_casts_cost_is_asked_of_a_run_that_is_done(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY_GPT, "precision=fp8_tensorwise", "train.steps=2", "output_dir=run"]) == 0
    found = [fit for fit in fits(Path("run")) if fit.purpose == "to find what its casts cost"]
    assert len(found) == HAS["explain"]
    for fit in found:
        works(fit.command)


def test_a_last_line_of_a_run_is_the_first_of_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, "precision=fp16_naive", "output_dir='it is mine'"]) == 3
    best = fits(Path("it is mine"))[0]
    assert f"mprun: {best}\n" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["it is mine"]

"""`mprun ls` and `mprun show`: what they tell of runs, read from the record alone."""

import fcntl
import math
import shlex

import numpy as np
import pytest

from mprun.cli import main
from mprun.cli.dispatch import verbs
from mprun.cli.show import curve

from ..helpers import TINY_AUTOENCODER, record_of, refused, run, seal_again


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run in FP32 that is done, and one in FP16 that has diverged."""
    folder = tmp_path_factory.mktemp("runs")
    few = ("train.steps=6", "train.log_every=1", "train.eval_every=3")
    assert run(folder / "one", *TINY_AUTOENCODER, *few, "train.checkpoint_every=3") == 0
    assert run(folder / "two", *TINY_AUTOENCODER, *few, "precision=fp16_naive", "seed=1") == 3
    return folder


def lines(capsys, *words) -> list[str]:
    capsys.readouterr()
    assert main([*words]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_ls_has_a_line_for_each_run_and_what_to_do_next(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(runs.parent)
    header, one, two, _, counted, *following = lines(capsys, "ls", runs.name)
    assert header.split() == ["run", "mode", "seed", "status", "last"]
    loss = record_of(runs / "one")["final"]["loss"]
    assert one.split() == [f"{runs.name}/one", "fp32", "0", "done", "loss", f"{loss:.4g}"]
    assert two.split()[:4] == [f"{runs.name}/two", "fp16_naive", "1", "diverged"]
    assert counted == "1 done, 1 diverged"
    assert following[0] == f"  mprun compare {runs.name}"
    told = ["mprun", "explain", f"{runs.name}/two"]
    if "explain" not in verbs():  # of an extension
        told = ["tensorboard", "--logdir", f"{runs.name}/two"]
    assert " ".join(following[1:]).split() == told


@pytest.mark.slow
def test_ls_takes_several_folders(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    both = [str(runs / "one"), str(runs / "two")]
    found = lines(capsys, "ls", *both, both[0])
    assert [line.split()[0] for line in found[1:3]] == both and found[4] == "1 done, 1 diverged"
    assert found[5].split() == ["mprun", "compare", *both, both[0]]


def test_another_tools_run_json_is_no_run(tmp_path, capsys):
    (other := tmp_path / "1").mkdir()
    (other / "run.json").write_text('{"status": "COMPLETED", "start_time": "2026-01-01"}')
    refused(capsys, "ls", tmp_path, says="no run")
    for verb in ("show", "compare"):
        refused(capsys, verb, other, says=["not a run of mprun", "no run"][verb != "show"])
    refused(capsys, f"resume={other}", says="not a run of mprun")
    (torn := tmp_path / "2").mkdir()
    (torn / "run.json").write_text('{"config_hash": 3}')
    assert "damaged" in "\n".join(lines(capsys, "ls", str(tmp_path)))


def test_ls_cuts_nothing_and_its_names_are_those_that_show_takes(
    runs, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    record = (runs / "one" / "run.json").read_bytes()
    last = (runs / "one" / "metrics.jsonl").read_bytes()
    names = [f"{'deep/' * 20}fp32-s{seed}" for seed in (0, 1)]  # equal where either end is cut
    names += ["a name  with blanks", "it's; $HOME", "short", "n" * 120]
    for name in names:
        (folder := tmp_path / "all" / name).mkdir(parents=True)
        (folder / "run.json").write_bytes(record)
        (folder / "metrics.jsonl").write_bytes(last)
    (broken := tmp_path / "all" / ("x" * 90)).mkdir()
    (broken / "run.json").write_text("{")
    head, below, *found = lines(capsys, "ls", "all")[: 2 * len(names) + 4]
    assert head == "run" and below.split() == ["mode", "seed", "status", "last"]
    loss = f"loss {record_of(runs / 'one')['final']['loss']:.4g}"
    rows = dict(zip(found[::2], found[1::2], strict=True))
    damaged = rows.pop(str(broken.relative_to(tmp_path)))
    assert "damaged" in damaged and "run.json" in damaged
    assert len(rows) == len(names)
    for name, cells in rows.items():
        assert cells.split("  ")[-1].strip() == loss and len(cells) <= 80
        [path] = shlex.split(name)
        assert main(["show", path]) == 0
        capsys.readouterr()
    assert {shlex.split(name)[0] for name in rows} == {f"all/{name}" for name in names}
    monkeypatch.delenv("COLUMNS")  # what is no terminal gets a line for each run
    assert any("x" * 90 in line and "damaged" in line for line in lines(capsys, "ls", "all"))


def test_show_tells_what_it_was_how_it_ended_and_the_commands(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = "\n".join(lines(capsys, "show", str(runs / "one")))
    for part in ("conv_autoencoder on", "fp32, loss scale: none", "6 of 6 steps, 0 of them"):
        assert part in done
    assert "ended    done" in done and f"mprun compare {runs}" in done and "explain" not in done
    [eval_line] = [line for line in done.splitlines() if line.startswith("  eval loss")]
    assert eval_line.split()[-1] == f"{record_of(runs / 'one')['final']['loss']:.4g}"
    diverged = "\n".join(lines(capsys, "show", str(runs / "two")))
    step = record_of(runs / "two")["last_step"]
    assert f"diverged at step {step}: " in diverged
    assert (f"mprun explain {runs}/two" in diverged) == ("explain" in verbs())


def test_a_stopped_run_and_one_that_goes_on_say_so(runs, capsys):
    before = (runs / "one" / "run.json").read_bytes()
    try:
        seal_again(runs / "one", status="preempted", cause="SIGTERM", last_step=3)
        found = "\n".join(lines(capsys, "show", str(runs / "one")))
        assert "preempted at step 3: SIGTERM" in found and f"mprun resume={runs}/one" in found
        status = before.replace(b'"status": "done"', b'"status": "running"')
        assert status != before
        (runs / "one" / "run.json").write_bytes(status.partition(b',\n "seal"')[0] + b"}")
        assert "killed, at step 6" in "\n".join(lines(capsys, "show", str(runs / "one")))
        with open(runs / "one" / ".lock", "a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "running, at step 6" in "\n".join(lines(capsys, "show", str(runs / "one")))
    finally:
        (runs / "one" / "run.json").write_bytes(before)


def test_an_edited_record_is_refused(runs, capsys):
    before = (runs / "one" / "metrics.jsonl").read_bytes()
    try:
        (runs / "one" / "metrics.jsonl").write_bytes(before.replace(b"1", b"2", 1))
        refused(capsys, "show", str(runs / "one"), code=4, says="changed since the run ended")
    finally:
        (runs / "one" / "metrics.jsonl").write_bytes(before)


def test_no_run_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(capsys, "show", "here", says="here: contains no run (allowed: a run directory")
    refused(capsys, "ls", says="outputs: this folder does not exist here")
    refused(capsys, "ls", str(tmp_path), says="no run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "room", "expected"),
    [
        ([0.0, 7.0], 8, "▁█"),
        (range(8), 8, "▁▂▃▄▅▆▇█"),
        (range(16), 8, "▁▂▃▄▅▆▇█"),  # the last value of each pair
        ([3.0, 3.0], 8, "▁▁"),
        ([1.0, math.inf, 2.0], 8, "▁x█"),
        ([math.nan], 8, "x"),
    ],
)
def test_a_curve_is_drawn_from_its_lowest_to_its_highest_value(values, room, expected):
    assert curve(np.array(values, float), room) == expected

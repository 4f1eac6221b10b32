"""A script's run directory is one that everything takes, and says truly how it ended."""

import copy
import json
import math
import subprocess
import sys
from contextlib import nullcontext
from enum import IntEnum, StrEnum
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional as F

import mprun
from mprun.cli import main
from mprun.comparison.load import load_run
from mprun.entry_points import announced
from mprun.numerics.replay import Snapshot
from mprun.precision import DynamicLossScale, DynamicRule
from mprun.record.run_directory import read_config
from mprun.record.run_record import RunRecord, read_record
from mprun.script.watched import ScriptTask

from ..helpers import assert_same_bits, raises_line, refused, rows_of
from .loops import classified
from .networks import batches, loss_of, net, prepared, stepping, take_step


def recorded(folder, mode="amp", seed=0, steps=30, spoil=None, end=None, lr=0.1, **options):
    """A whole script: the loss of step `spoil` is infinite; `end` is raised at the end."""
    model, optimizer = prepared(mode, net(seed), lr=lr, scaler=options.pop("scaler", None))
    options = {"config": {"lr": lr, "precision": mode, "seed": seed}, "seed": seed} | options
    run = mprun.Run(folder, optimizer, **options)
    with run:
        for step, (images, labels) in enumerate(batches(steps, size=32, seed=seed)):
            optimizer.zero_grad()
            loss = classified(model, images, labels)
            loss = loss * math.inf if step + 1 == spoil else loss
            loss.backward()
            optimizer.step()
            run.step(loss)
        if end is not None:
            raise end("no such file")  # anew: one that lives on would hold the model
        model.eval()
        images, labels = next(batches(1, size=64, seed=99))
        logits = model(images)
        correct = (logits.argmax(1) == labels).float().mean()
        run.evaluate(loss=F.cross_entropy(logits, labels), accuracy=correct)
    return run


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("# trains\n")
    monkeypatch.setattr(sys, "argv", [str(script), "--lr", "0.1"])


def test_the_record_of_a_run(tmp_path):
    run = recorded(tmp_path / "out", "fp16_master_scaled", seed=3, log_every=10)
    assert run.status == "done" and run.directory == tmp_path / "out" / "fp16_master_scaled-s3"
    record = read_record(run.directory, "status", "steps", "environment.device")
    assert record.keys() <= RunRecord.__annotations__.keys()
    assert record["status"] == "done" and record["last_step"] == record["steps"] == 30
    assert record["script"] == {"file": "mine.py", "arguments": ["--lr", "0.1"]}
    assert record["precision"]["half_products"] == "emulated-fp16" and record["emulated"]
    config = read_config(run.directory)
    assert config == record["config"]
    assert config["script"]["lr"] == 0.1 and not {"precision", "seed"} & config["script"].keys()
    assert config["optim"]["model"]["name"] == "SGD"
    assert config["optim"]["model"]["groups"][0]["momentum"] == 0.9
    assert config["precision"]["param_dtype"] == "fp16" and config["scaler"]["kind"] == "dynamic"
    train = rows_of(run.directory, "train")
    pairs = zip(train[1:], train, strict=False)
    skipped = {row["step"] for row, before in pairs if row["skipped"] > before["skipped"]}
    assert {r["step"] for r in train} == {*range(1, 21), 30} | skipped
    assert train[-1]["lr"] == 0.1 and train[-1]["updates"] == 30 - train[-1]["skipped"]
    assert set(record["final"]) == {"loss", "accuracy"}
    # A second one of the same name is another directory.
    again = recorded(tmp_path / "out", "fp16_master_scaled", seed=3, steps=1)
    assert again.directory.name == "fp16_master_scaled-s3.2"


@pytest.mark.parametrize(("mode", "dtype"), [("fp32", "fp32"), ("fp16_master", "fp16")])
def test_the_record_says_what_was_computed(tmp_path, mode, dtype):
    """Three calls and three passes of thirty, each with as many products.

    The first pass is nobody's where a model of another mode, of a test before, was called and not
    propagated: its evaluation has gradients.
    """
    audit = read_record(recorded(tmp_path, mode).directory)["audit"]
    assert audit["watched"] in (5, 6) and audit["optimizers"] == ["SGD"]
    # A convolution and two layers; backward one more for each layer, and none for the images.
    products = {f"forward {dtype}": 3 * 3, f"backward {dtype}": 5 * (audit["watched"] - 3)}
    assert audit["products"] == products  # nothing in another dtype


def test_a_mode_in_a_file_of_one_s_own_is_recorded_by_its_name(tmp_path):
    (tmp_path / "mine.yaml").write_text("# FP16 weights, FP32 masters.\nparam_dtype: fp16\n")
    mine = mprun.precision.get_policy("mine", tmp_path)
    runs = [recorded(tmp_path / "out", mine, steps=2, scaler=own) for own in (None, "torch")]
    assert [run.directory.name for run in runs] == ["mine-s0", "mine-torch-s0"]
    for run, scaler in zip(runs, ("none", "torch"), strict=True):
        found = read_record(run.directory)["precision"]
        assert (found["mode"], found["scaler"]) == ("mine", scaler)
        assert found["usual_scaler"] == "none"


@pytest.mark.slow
def test_runs_of_three_modes_and_three_seeds_are_compared(tmp_path, capsys):
    modes = ("fp32", "fp16_naive", "amp")
    told = {"metric": "accuracy", "margin": 0.4, "higher_is_better": True, "probe_every": 15}
    for mode in modes:
        for seed in range(3):
            recorded(tmp_path / "out", mode, seed, **told)
    assert main(["compare", str(tmp_path / "out"), "--tensorboard"]) == 0
    table = capsys.readouterr().out
    assert "mine" in table and "higher is better" not in table.splitlines()[0]
    results = json.loads((tmp_path / "out" / "compare" / "results.json").read_text())
    (group,) = results["groups"]
    assert group["higher_is_better"] and group["metric"] == "accuracy"
    words = {row["mode"]: row["verdict"]["name"] for row in group["modes"]}
    assert set(words) == set(modes[1:]) and words["amp"] == "matches"
    comparison = mprun.compare(tmp_path / "out")
    assert comparison.to_dict()["groups"][0]["title"] == "mine"
    assert len(mprun.load(tmp_path / "out")) == 9


def test_runs_of_different_scripts_are_not_compared_and_what_differs_is_said(tmp_path):
    recorded(tmp_path / "out", "fp32", steps=1)
    recorded(tmp_path / "out", "amp", steps=1, config={"lr": 0.1, "width": 64})
    with raises_line(mprun.errors.BadInput, "script.width"):
        mprun.compare(tmp_path / "out")


def test_seeds_that_differ_by_name_only_are_told_once(tmp_path, capsys):
    for seed, told in ((0, 7), (1, 7), (2, 7), (0, 7), (3, 3)):
        model, optimizer = prepared("amp", net(told))
        with mprun.Run(tmp_path, optimizer, config={}, seed=seed):
            lines = capsys.readouterr().err.splitlines()
        if seed in (1, 2):
            assert [line.partition(":")[0] for line in lines] == [f"seed={seed}"]
            assert f"{tmp_path / 'amp-s0'} (seed=0); unless" in lines[0]
        capsys.readouterr()


@pytest.mark.parametrize("with_block", [True, False])
def test_steps_after_the_last_evaluation_are_recorded_too(tmp_path, with_block):
    """A record that ends before its run would be taken for damaged."""
    model, optimizer = prepared("fp32")
    run = mprun.Run(tmp_path / "out", optimizer, config={}, seed=0, log_every=50)
    step = stepping(optimizer, lambda: loss_of(model))
    with run if with_block else nullcontext():
        for number in range(33):
            run.step(step())
            if number == 24:
                run.evaluate(loss=1.0)
    run.close()
    recorded = mprun.load(run.directory).one
    last = recorded.columns("train")
    assert (recorded.status, recorded.last_step, last["step"][-1]) == ("done", 33, 33)
    assert last["lr"][-1] == 0.1
    load_run(run.directory, read_record(run.directory))  # raises where it is damaged


@pytest.mark.slow
def test_a_divergence_is_recorded_and_the_script_goes_on(tmp_path, capsys):
    run = recorded(tmp_path, "fp16_master", spoil=17, log_every=5)
    assert run.status == "diverged"
    record = read_record(run.directory)
    assert (record["status"], record["last_step"]) == ("diverged", 17)
    assert "non-finite loss" in record["cause"]
    post_mortem = json.loads((run.directory / "numerics" / "post-mortem.json").read_text())
    assert post_mortem["failure"]["step"] == 17
    assert "diverged at step 17" in capsys.readouterr().err
    assert main(["show", str(run.directory)]) == 0  # found at step 20; nobody says how long it is
    assert "length   17 steps, " in capsys.readouterr().out
    # A skipped step is none.
    run = recorded(tmp_path, "amp", spoil=17, log_every=5)
    record = read_record(run.directory)
    assert (record["status"], record["skipped"]) == ("done", 1)


def test_a_collapsed_scale_is_a_divergence(tmp_path):
    rule = DynamicRule(2.0**60, min_scale=2.0**59, max_scale=2.0**61, max_consecutive_skips=3)
    run = recorded(tmp_path, "amp", scaler=DynamicLossScale(rule), log_every=5)
    assert run.status == "diverged" and "collapsed" in run.cause


@pytest.mark.parametrize(
    "error, status", [(ValueError, "failed"), (KeyboardInterrupt, "preempted")]
)
def test_exceptions_are_recorded_and_go_on(tmp_path, error, status):
    with pytest.raises(error):
        recorded(tmp_path, end=error)
    (directory,) = tmp_path.glob("amp-*")
    record = read_record(directory)
    assert record["status"] == status and record["cause"].startswith(error.__name__)


def test_a_non_finite_evaluation_is_a_divergence(tmp_path):
    model, optimizer = prepared("fp32")
    with mprun.Run(tmp_path, optimizer, config={}, seed=0) as run:
        run.step(take_step(optimizer, loss_of, model))
        run.evaluate(loss=math.nan)
        raise AssertionError("never reached")
    assert run.status == "diverged" and "evaluation" in run.cause


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": "0"}, "seed='0'"),
        ({"log_every": 0}, "log_every=0"),
        ({"margin": 0.7}, "margin=0.7"),
        ({"higher_is_better": True}, "margin=None"),
        ({"pair_sd": 0.0, "pair_sd_source": "x"}, "pair_sd=0.0: must be above 0"),
        ({"pair_sd": 0.1}, "pair_sd=0.1, pair_sd_source=None: must be passed together"),
        ({"pair_sd_source": "x"}, "pair_sd=None, pair_sd_source='x': must be passed together"),
        ({"metric": "iou"}, "metric=iou: if higher values are better, pass higher_is_better=True"),
        ({"modules": ["nothing"], "probe_every": 1}, "matches no module"),
        ({"data": Path("nowhere")}, "no such file"),
        ({"config": {"all": list(range(200_000))}}, "must have at most"),
        ({"optimizer": torch.optim.SGD(net().parameters(), 0.1)}, "that updates no prepared model"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_written(tmp_path, options, says):
    given = {"optimizer": prepared("amp")[1], "config": {}, "seed": 0}
    with raises_line((ValueError, mprun.errors.BadInput), says):
        mprun.Run(tmp_path / "out", **given | options)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("sd", "code"), [(1e-4, 0), (10.0, 3)])
def test_a_scatter_stated_beforehand_tests_one_pair(tmp_path, capsys, sd, code):
    told = {"margin": 0.4, "pair_sd": sd, "pair_sd_source": "my pairs"}
    for mode in ("fp32", "amp"):
        recorded(tmp_path / "out", mode, log_every=1, **told)
    assert main(["compare", str(tmp_path / "out"), "--no-report", "--check"]) == code
    printed = capsys.readouterr().out
    assert ("Inside 40 % at 5 %" if code == 0 else "Not shown inside 40 % if") in printed
    assert "my pairs" in printed


@pytest.mark.slow
def test_a_loss_that_is_itself_not_finite_is_told_with_its_step(tmp_path, capsys):
    """A loss scale skips the update and goes on; that of a GAN is the sum of two losses."""
    run = recorded(tmp_path, "amp", spoil=12)
    assert run.status == "done"
    told = "the loss itself was not finite in 1 of 1 skipped update, step 12: no loss scale cures"
    how = "on the batch of such a step, in the script: mprun.explain(step, optimizer)"
    how = how if "explain" in announced("mprun.verbs") else ""
    printed = capsys.readouterr().err
    assert told in printed and how in printed
    assert main(["show", str(run.directory)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert told in shown and how.partition(", ")[2] in shown
    recorded(tmp_path, "amp", seed=1)
    assert "the loss itself" not in capsys.readouterr().err


@pytest.mark.slow
def test_verbs_that_take_steps_say_that_only_the_script_can(tmp_path, capsys):
    done = recorded(tmp_path, "amp", probe_every=10).directory
    diverged = recorded(tmp_path, "fp16_master", spoil=12).directory
    verbs = {"explain": diverged, "advise": done}
    there = [[verb, run] for verb, run in verbs.items() if verb in announced("mprun.verbs")]
    for words in ([f"resume={done}"], *there):
        refused(capsys, *words, says=("mine.py", "mprun.explain"))


def test_after_a_divergence_the_newest_copy_is_there_to_explain(tmp_path):
    model, optimizer = prepared("fp16_master")
    images, labels = next(batches(1))
    healthy = stepping(optimizer, lambda: classified(model, images, labels))
    broken = stepping(optimizer, lambda: classified(model, images * 1e9, labels))
    with mprun.Run(tmp_path, optimizer, config={}, seed=0, log_every=1) as run:
        for number in range(30):
            run.step(healthy() if number < 10 else broken())
    assert run.status == "diverged"
    assert any(not p.isfinite().all() for p in model.parameters())
    assert 0 <= run.rewind() < 11
    assert all(p.isfinite().all() for p in model.parameters())
    if "explain" in announced("mprun.verbs"):
        assert mprun.explain(broken, optimizer).reproduced
    assert all(p.isfinite().all() for p in model.parameters())  # put back


@pytest.mark.parametrize("mode", ["fp8_delayed", "nvfp4", "bf16_stochastic"])
def test_a_rewound_script_goes_on_with_the_same_bits(mode):
    """Scales of an infinity and of large inputs, and random bits since then, are none of it."""
    model, optimizer = prepared(mode)
    images, labels = next(batches(1))

    def step(factor):
        take_step(optimizer, classified, model, images * factor, labels)

    task = ScriptTask(optimizer)
    before, found = Snapshot(task, task.device), []
    step(1)
    before.take(1, 0)
    for _ in range(2):
        step(1)
        found.append(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))
        step(100)
        step(1e39)
        before.restore()
    assert_same_bits(*found)


# Neither Hydra, nor TensorBoard, nor torchvision, nor matplotlib: the core alone.
SCRIPT = """
import sys
for name in ("hydra", "tensorboard", "torchvision", "matplotlib", "scipy", "PIL", "rich", "pandas",
             "pynvml", "sklearn"):
    sys.modules[name] = None
import torch, mprun
model = torch.nn.Linear(4, 2)
model, optimizer = mprun.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "amp")
def step():
    optimizer.zero_grad()
    loss = model(torch.ones(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss
run = mprun.Run("out", optimizer, config={}, seed=0, probe_every=2)
for _ in range(4):
    run.step(step())
mprun.probe(step, optimizer)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        ("run.evaluate(loss=1.0)", "done", 0),
        ("raise ValueError('no')", "failed", 1),
        ("run.evaluate(loss=1e999)", "diverged", 3),
    ],
)
def test_a_script_needs_no_with_block_nor_what_the_command_needs(tmp_path, end, status, code):
    own = {"PYTHONPATH": str(Path(mprun.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    given = {"cwd": tmp_path, "env": own | {"OMP_NUM_THREADS": "1"}}
    command = [sys.executable, "-c", SCRIPT + end]
    found = subprocess.run(command, **given, capture_output=True, text=True)
    assert found.returncode == code, found.stderr
    record = read_record(tmp_path / "out" / "amp-s0")
    assert (record["status"], record["last_step"]) == (status, 4)


def test_names_of_metrics_and_calls_after_the_end_are_checked(tmp_path):
    model, optimizer = prepared("fp32")
    step = stepping(optimizer, lambda: loss_of(model))
    run = mprun.Run(tmp_path, optimizer, config={"rates": [0.1], 3: "x"}, metric="loss", seed=0)
    with raises_line(RuntimeError, "no optimizer.step()"):
        run.step(1.0)
    with raises_line(ValueError, "not loss"):
        run.evaluate(accuracy=1.0)
    step()
    for call in (
        lambda: run.step(1.0, found_inf=1.0),
        lambda: run.log(step=3.0),
        lambda: run.evaluate(loss=1.0, split=2.0),
        lambda: run.close("nonsense"),
    ):
        with pytest.raises(ValueError):
            call()
    step()
    with raises_line(RuntimeError, "2 calls of optimizer.step"):
        run.step(1.0)
    run.close()
    for call in (lambda: run.step(1.0), lambda: run.evaluate(loss=1.0)):
        with raises_line(RuntimeError, "has ended"):
            call()


class Kind(StrEnum):
    LINEAR = "linear"


class Level(IntEnum):
    HIGH = 3


class Word(str):
    pass


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (Kind.LINEAR, "linear"),
        (Level.HIGH, 3),
        (Word("a"), "a"),
        (np.float64(0.5), 0.5),
        ({Word("a"): [np.float64(1.0)]}, {"a": [1.0]}),
    ],
)
def test_a_value_is_written_as_what_it_stands_for(given, written, tmp_path):
    run = mprun.Run(tmp_path, prepared("fp32")[1], config={"value": given}, seed=0)
    run.close()
    config = yaml.safe_load((run.directory / "config.yaml").read_text(encoding="utf-8"))
    assert config["script"]["value"] == written

"""A script's run directory is one that everything takes, and says truly how it ended."""

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import mprun
from mprun.cli import main
from mprun.compare.load import load_run
from mprun.precision import DynamicLossScale
from mprun.record.metrics import read_metrics
from mprun.record.run_directory import read_config, read_record

from .networks import batches, net


def recorded(folder, mode="amp", seed=0, steps=30, spoil=None, end=None, lr=0.1, **options):
    """A whole script: the loss of step `spoil` is infinite; `end` is raised at the end."""
    model = net(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    model, optimizer = mprun.prepare(model, optimizer, mode, scaler=options.pop("scaler", None))
    options = {"config": {"lr": lr, "precision": mode, "seed": seed}, "seed": seed} | options
    run = mprun.Run(folder, optimizer, **options)
    with run:
        for step, (images, labels) in enumerate(batches(steps, size=32, seed=seed)):
            model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            optimizer.backward(loss * math.inf if step + 1 == spoil else loss)
            optimizer.step()
            run.step(loss * math.inf if step + 1 == spoil else loss)
        if end is not None:
            raise end
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
    assert record["status"] == "done" and record["last_step"] == record["steps"] == 30
    assert record["script"] == {"file": "mine.py", "arguments": ["--lr", "0.1"]}
    assert record["precision"]["half_products"] == "emulated-fp16" and record["emulated"]
    config = read_config(run.directory)
    assert config == record["config"]
    assert config["script"]["lr"] == 0.1 and not {"precision", "seed"} & config["script"].keys()
    assert config["optim"]["model"]["name"] == "SGD"
    assert config["optim"]["model"]["groups"][0]["momentum"] == 0.9
    assert config["precision"]["param_dtype"] == "fp16" and config["scaler"]["kind"] == "dynamic"
    train = [r for r in read_metrics(run.directory / "metrics.jsonl") if r["split"] == "train"]
    skipped = {
        r["step"]
        for r, before in zip(train[1:], train, strict=False)
        if r["skipped"] > before["skipped"]
    }
    assert {r["step"] for r in train} == {*range(1, 21), 30} | skipped
    assert train[-1]["lr"] == 0.1 and train[-1]["updates"] == 30 - train[-1]["skipped"]
    assert set(record["final"]) == {"loss", "accuracy"}
    # A second one of the same name is another directory.
    again = recorded(tmp_path / "out", "fp16_master_scaled", seed=3, steps=1)
    assert again.directory.name == "fp16_master_scaled-s3.2"


def test_runs_of_four_modes_and_three_seeds_are_compared(tmp_path, capsys):
    modes = ("fp32", "fp16_naive", "fp16_master_scaled", "amp")
    for mode in modes:
        for seed in range(3):
            recorded(tmp_path / "out", mode, seed, metric="accuracy", margin=0.4, probe_every=15,
                     higher_is_better=True)  # fmt: skip
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
    runs = mprun.load(tmp_path / "out")
    assert len(runs) == 12
    assert main(["scaler-replay", str(tmp_path / "out" / "amp-s0"), "--no-files"]) == 0


def test_runs_of_different_scripts_are_not_compared_and_what_differs_is_said(tmp_path):
    for seed in range(3):
        recorded(tmp_path / "out", "fp32", seed)
        recorded(tmp_path / "out", "amp", seed, config={"lr": 0.1, "width": 64})
    with pytest.raises(mprun.errors.BadInput, match=r"script\.width"):
        mprun.compare(tmp_path / "out")


@pytest.mark.parametrize("with_block", [True, False])
def test_steps_after_the_last_evaluation_are_recorded_too(tmp_path, with_block):
    """A record that ends before its run would be taken for damaged."""
    model = net()
    model, optimizer = mprun.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "fp32")
    run = mprun.Run(tmp_path / "out", optimizer, config={}, seed=0, log_every=50)

    def train(first, last):
        for images, labels in list(batches(last))[first:]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            optimizer.backward(loss)
            optimizer.step()
            run.step(loss)

    with run if with_block else contextlib.nullcontext():
        train(0, 25)
        run.evaluate(loss=1.0)
        train(25, 33)
    run.close()
    recorded = mprun.load(run.directory)
    last = recorded.columns("train")
    assert (recorded.status, recorded.last_step, last["step"][-1]) == ("done", 33, 33)
    assert last["lr"][-1] == 0.1
    load_run(run.directory, read_record(run.directory))  # raises where it is damaged


def test_a_divergence_is_recorded_and_the_script_goes_on(tmp_path, capsys):
    run = recorded(tmp_path, "fp16_master", spoil=17, log_every=5)
    assert run.status == "diverged"
    record = read_record(run.directory)
    assert (record["status"], record["last_step"]) == ("diverged", 17)
    assert "non-finite loss" in record["cause"]
    post_mortem = json.loads((run.directory / "numerics" / "post-mortem.json").read_text())
    assert post_mortem["failure"]["step"] == 17
    assert "diverged at step 17" in capsys.readouterr().err
    # A skipped step is none.
    run = recorded(tmp_path, "amp", spoil=17, log_every=5)
    record = read_record(run.directory)
    assert (record["status"], record["skipped"]) == ("done", 1)


def test_a_collapsed_scale_is_a_divergence(tmp_path):
    scale = DynamicLossScale(2.0**60, min_scale=2.0**59, max_scale=2.0**61, max_consecutive_skips=3)
    run = recorded(tmp_path, "amp", scaler=scale, log_every=5)
    assert run.status == "diverged" and "collapsed" in run.cause


@pytest.mark.parametrize(
    "error, status",
    [(ValueError("no such file"), "failed"), (KeyboardInterrupt(), "preempted")],
)
def test_exceptions_are_recorded_and_go_on(tmp_path, error, status):
    with pytest.raises(type(error)):
        recorded(tmp_path, end=error)
    (directory,) = tmp_path.glob("amp-*")
    record = read_record(directory)
    assert record["status"] == status and record["cause"].startswith(type(error).__name__)


def test_a_non_finite_evaluation_is_a_divergence(tmp_path):
    model = net()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = mprun.prepare(model, inner, "fp32")
    with mprun.Run(tmp_path, optimizer, config={}, seed=0) as run:
        for images, labels in batches(1):
            loss = F.cross_entropy(model(images), labels)
            optimizer.backward(loss)
            optimizer.step()
            run.step(loss)
        run.evaluate(loss=math.nan)
        raise AssertionError("never reached")
    assert run.status == "diverged" and "evaluation" in run.cause


def test_what_is_wrong_is_said_in_one_line_and_nothing_written(tmp_path):
    model = net()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    _, optimizer = mprun.prepare(model, inner, "amp")
    good = {"config": {}, "seed": 0}
    for options, text in (
        ({"seed": -1}, "seed=-1"),
        ({"seed": "0"}, "seed='0'"),
        ({"log_every": 0}, "log_every=0"),
        ({"margin": 0.7}, "margin=0.7"),
        ({"higher_is_better": True}, "margin=None"),
        ({"modules": ["nothing"], "probe_every": 1}, "matches no module"),
    ):
        with pytest.raises((ValueError, mprun.errors.BadInput), match=text):
            mprun.Run(tmp_path / "out", optimizer, **(good | options))
    with pytest.raises(ValueError, match="what mprun.prepare returned"):
        mprun.Run(tmp_path / "out", inner, **good)
    with pytest.raises(mprun.errors.BadInput, match="no such file"):
        mprun.Run(tmp_path / "out", optimizer, data=Path("nowhere"), **good)
    assert not (tmp_path / "out").exists()
    with mprun.Run(tmp_path / "out", optimizer, metric="accuracy", **good) as run:
        with pytest.raises(RuntimeError, match=r"no optimizer\.step\(\)"):
            run.step(1.0)
        with pytest.raises(ValueError, match="not accuracy"):
            run.evaluate(loss=1.0)


def test_verbs_that_take_steps_say_that_only_the_script_can(tmp_path, capsys):
    done = recorded(tmp_path, "amp", probe_every=10).directory
    diverged = recorded(tmp_path, "fp16_master", spoil=12).directory
    capsys.readouterr()
    for words in ([f"resume={done}"], ["explain", str(diverged)], ["advise", str(done)]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "mine.py" in error and "mprun.explain" in error and len(error.splitlines()) == 1


def test_after_a_divergence_the_newest_copy_is_there_to_explain(tmp_path):
    model = net()
    model, optimizer = mprun.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "fp16_master")
    stream = iter(batches(40))

    def step(factor=1.0):
        images, labels = next(stream)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images * factor), labels)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    with mprun.Run(tmp_path, optimizer, config={}, seed=0, log_every=1) as run:
        for number in range(30):
            run.step(step(1.0 if number < 10 else 1e9))
    assert run.status == "diverged"
    assert any(not p.isfinite().all() for p in model.parameters())
    assert 0 <= run.rewind() < 11
    assert all(p.isfinite().all() for p in model.parameters())
    finding = mprun.explain(lambda: step(1e9), optimizer)
    assert finding.reproduced
    assert all(p.isfinite().all() for p in model.parameters())  # put back


def test_a_script_runs_without_what_the_command_needs(tmp_path):
    """The core alone: neither Hydra, nor TensorBoard, nor torchvision, nor matplotlib."""
    code = """
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
    optimizer.backward(loss)
    optimizer.step()
    return loss
with mprun.Run("out", optimizer, config={}, seed=0, probe_every=2) as run:
    for _ in range(4):
        run.step(step())
    run.evaluate(loss=1.0)
mprun.probe(step, optimizer), mprun.explain(step, optimizer)
assert mprun.load(run.directory).status == "done"
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(mprun.__file__).parents[1]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    "end, status, code",
    [("", "done", 0), ("raise ValueError('no')", "failed", 1), ("run.evaluate(loss=1e999)",
     "diverged", 3)],
)  # fmt: skip
@pytest.mark.few(1)
def test_a_script_without_a_with_block_is_recorded_too(tmp_path, end, status, code):
    script = f"""
import torch, mprun
model = torch.nn.Linear(4, 2)
model, optimizer = mprun.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "fp32")
run = mprun.Run("out", optimizer, config={{}}, seed=0)
optimizer.backward(model(torch.ones(3, 4)).square().mean())
optimizer.step()
run.step(1.0)
{end}
"""
    environment = {"PYTHONPATH": str(Path(mprun.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment)
    assert found.returncode == code
    record = read_record(tmp_path / "out" / "fp32-s0")
    assert record["status"] == status and record["last_step"] == 1


def test_names_of_metrics_and_calls_after_the_end_are_checked(tmp_path):
    model = net()
    model, optimizer = mprun.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "fp32")
    run = mprun.Run(tmp_path, optimizer, config={"rates": [0.1], 3: "x"}, seed=0)

    def step():
        images, labels = next(batches(1))
        optimizer.backward(F.cross_entropy(model(images), labels))
        optimizer.step()

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
    with pytest.raises(RuntimeError, match="2 calls of optimizer.step"):
        run.step(1.0)
    run.close()
    for call in (lambda: run.step(1.0), lambda: run.evaluate(loss=1.0)):
        with pytest.raises(RuntimeError, match="has ended"):
            call()
    with pytest.raises(ValueError, match="must be at most"):
        mprun.Run(tmp_path / "out", optimizer, config={"all": list(range(200_000))}, seed=0)
    assert not (tmp_path / "out").exists()

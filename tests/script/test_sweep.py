"""`mprun.sweep`: what it records beside the same loop written out, and what it refuses."""

import inspect
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

import mprun

from ..helpers import raises_line

MODES = ("fp32", "fp16_naive")


def learned(begin, step, evaluate, scale=1.0):
    """A training with numbers of all three generators."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begin(model, optimizer)
    for _ in range(6):
        inputs = scale * torch.randn(8, 4) * np.random.rand() + random.random()
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        step(loss)
    evaluate(loss=loss.detach() + 1)


def train(run):
    learned(run.prepare, run.step, run.evaluate)


def by_hand(mode: str, seed: int) -> list[float]:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    losses = []

    def keep(loss):
        losses.append(loss.item())

    learned(partial(mprun.prepare, precision=mode), keep, keep)
    return losses


def test_it_records_what_the_loop_written_out_computes_bit_for_bit(tmp_path, capsys):
    comparison = mprun.sweep(train, MODES, seeds=[0, 5], folder=tmp_path, margin=0.3)
    curves = comparison.curves
    for mode in MODES:
        for seed in (0, 5):
            own = curves[(curves["mode"] == mode) & (curves["seed"] == seed)]
            assert own["loss"].tolist() == by_hand(mode, seed)
            assert own["split"].tolist() == ["train"] * 6 + ["eval"]
    assert comparison.verdicts["mode"].tolist() == list(MODES)
    assert comparison.verdicts["runs"].tolist() == [2, 2]
    assert len({path.name for path in tmp_path.iterdir()}) == 4
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("4 of 4 runs; fp16_naive, seed 5: done, loss 1.")


ENDS = {
    "fp32": [0.3, 0.33, 0.28, 0.31, 0.29],
    "amp": [0.3001, 0.33, 0.2799, 0.31, 0.29],  # decided by three seeds
    "bf16_naive": [0.31, 0.32, 0.285, 0.305, 0.295],  # by no five
}


@pytest.mark.slow
def test_seeds_are_added_until_each_mode_is_decided(tmp_path, capsys):
    def train(run):
        end = ENDS[run.precision][run.seed - 7]
        learned(run.prepare, run.step, lambda loss: run.evaluate(loss=end))

    given = {"modes": [*ENDS], "seeds": [7, 8, 9], "until": "decided", "max_seeds": 5}
    comparison = mprun.sweep(train, folder=tmp_path, margin=0.01, **given)
    found = {row.mode: (row.verdict, row.runs) for row in comparison.verdicts.itertuples()}
    expected = [("baseline", 5), ("matches", 3), ("inconclusive", 5)]
    assert found == dict(zip(ENDS, expected, strict=True))
    printed = capsys.readouterr().err
    assert "bf16_naive: open, look at 3 of at most 5 seeds, which may not be enough" in printed
    assert "amp: matches after 3 of at most 5 seeds (planned looks, 5 % over all)" in printed
    assert "bf16_naive: undecided after 5" in printed and "13 of 13 runs" in printed
    for run in mprun.load(tmp_path):
        assert run.config["compare"]["plan"] == [7, 3, 5]
    # What `compare` says of the folder afterwards is the same.
    again = mprun.compare(tmp_path).verdicts
    assert again["verdict"].tolist() == comparison.verdicts["verdict"].tolist()


@pytest.mark.slow
def test_its_figures_are_matplotlibs(tmp_path):
    comparison = mprun.sweep(train, MODES, seeds=1, folder=tmp_path)
    assert comparison.figure().axes[0].get_title(loc="left") == "Training loss over steps"
    with pytest.raises(mprun.errors.BadInput, match="must be one of .*loss-steps"):
        comparison.figure("no such")


@pytest.mark.filterwarnings("ignore:input .* values become infinite in fp16")
def test_a_mode_that_diverges_is_a_result_and_the_others_go_on(tmp_path):
    def train(run):
        scale = 1e6 if run.precision == "fp16_naive" else 1.0
        learned(run.prepare, run.step, run.evaluate, scale)

    comparison = mprun.sweep(train, MODES, folder=tmp_path)
    assert comparison.verdicts["verdict"].tolist() == ["baseline", "diverged"]


def test_an_error_of_the_function_ends_the_sweep_and_its_run_is_failed(tmp_path):
    def train(run):
        learned(run.prepare, lambda loss: 1 / 0, run.evaluate)

    with pytest.raises(ZeroDivisionError):
        mprun.sweep(train, folder=tmp_path)
    (run,) = mprun.load(tmp_path)
    assert run.status == "failed" and "ZeroDivisionError" in run.cause


def unprepared(run):
    pass


def early(run):
    run.step(1.0)


def twice(run):
    run.prepare(model := torch.nn.Linear(4, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    train(run)


def unstepped(run):
    learned(run.prepare, lambda loss: None, run.evaluate)


def unevaluated(run):
    learned(run.prepare, run.step, lambda loss: None)


ENDED = "the function ended without"


@pytest.mark.parametrize(
    "function, given, line",
    [
        (train, {"modes": ["amp"]}, "must contain fp32, the baseline of the comparison"),
        (train, {"modes": ["fp32", "fp61"]}, "fp61"),
        (train, {"seeds": 0}, "seeds=0: must be a number of seeds, or integers of at least 0"),
        (train, {"seeds": [0, -1]}, "must be a number of seeds"),
        (train, {"seeds": "three"}, "must be a number of seeds"),
        (train, {"max_seeds": 5}, "max_seeds=5: is only allowed with until='decided'"),
        (train, {"until": "never"}, "until='never': must be 'decided', or None"),
        (train, {"until": "decided", "seeds": 2}, "at least 3 consecutive seeds"),
        (train, {"until": "decided", "seeds": [0, 1, 3]}, "at least 3 consecutive seeds"),
        (train, {"until": "decided", "max_seeds": 2}, "max_seeds=2: must be from 3 (seeds) to 50"),
        (train, {"until": "decided", "max_seeds": 51}, "max_seeds=51: must be from 3"),
        (train, {"until": "decided", "modes": ["fp32"]}, "needs a mode other than fp32"),
        (unprepared, {}, "unprepared: the function ended without run.prepare(model, optimizer)"),
        (early, {}, "call run.prepare(model, optimizer) before its first step"),
        (twice, {}, "run.prepare: was called twice"),
        (unevaluated, {"metric": "error"}, f"unevaluated: {ENDED} run.evaluate(error=...)"),
        (unstepped, {}, f"unstepped: {ENDED} run.step(loss) after each optimizer.step()"),
        (unevaluated, {"metric": "accuracy"}, "metric=accuracy: if higher values are better, pass"),
    ],
)
def test_a_wrong_argument_or_function_is_one_line(function, given, line, tmp_path):
    with raises_line((ValueError, RuntimeError), line):
        mprun.sweep(function, **{"folder": tmp_path, **given})
    assert function is not train or not list(tmp_path.iterdir())


def test_an_interruption_while_a_run_begins_is_passed_on(tmp_path, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("mprun.script.run.ScriptTask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mprun.sweep(train, folder=tmp_path)


def test_the_name_is_callable_however_the_package_was_imported():
    from mprun.script.sweep import sweep

    assert inspect.signature(mprun.sweep) == inspect.signature(sweep)


@pytest.mark.slow
def test_a_notebook_shows_a_bar_that_fills_and_the_comparison(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    cell = f"""
import torch, mprun
from torch.nn.functional import mse_loss
def train(run):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    for _ in range(5):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        run.step(loss)
    run.evaluate(loss=loss + 1)
mprun.sweep(train, seeds=2, folder={str(tmp_path)!r})
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    NotebookClient(notebook, timeout=120).execute()
    outputs = notebook.cells[0].outputs
    (bar, comparison) = (one["data"]["text/html"] for one in outputs if "data" in one)
    assert '<progress value="4" max="4">' in bar and "amp, seed 1: done" in bar
    assert "mprun-figures" in comparison
    assert not [one for one in outputs if one["output_type"] == "stream"]

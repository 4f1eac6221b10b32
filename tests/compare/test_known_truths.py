"""Real runs whose right verdict is known beforehand (benchmarks/known_truths.py), in full."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mprun.precision import LossScale, StaticLossScale
from mprun.prepared import tensors

from ..helpers import making, mixed, one_step

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "known_truths.py"
specification = importlib.util.spec_from_file_location("known_truths", SCRIPT)
known_truths = importlib.util.module_from_spec(specification)
sys.modules["known_truths"] = known_truths  # its dataclass looks itself up there
specification.loader.exec_module(known_truths)


def trained(scale=None):
    """The weight before a step and after it, and two outputs: before and after the step."""
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(4, 2), torch.ones(3, 4)
    learner = mixed(model, "fp16_master", making(torch.optim.SGD, 0.5, fused=True), scale)
    outputs, weights = [], [model.weight.detach().clone()]
    for _ in range(2):
        one_step(learner, inputs, lambda out: outputs.append(out.detach()) or out.square().mean())
        weights.append(model.weight.detach().clone())
    return *weights[:2], outputs


@pytest.mark.parametrize("defect", ["none", "no_copies"])
def test_masters_are_not_copied_where_that_is_planted(defect, monkeypatch):
    monkeypatch.setattr(tensors, "make_nodes", tensors.make_nodes)
    planted = known_truths.plant(defect)
    before, after, outputs = trained()
    assert not torch.equal(before, after)
    assert torch.equal(*outputs) == (defect == "no_copies")
    assert (planted["acted"] > 0) == (defect == "no_copies")
    with pytest.raises(ValueError, match="no such defect"):
        known_truths.plant("no_copy")


def test_the_loss_scale_stays_where_that_is_planted(monkeypatch):
    moved = {}
    for defect in ("none", "scale_stays"):
        monkeypatch.setattr(LossScale, "inverse", LossScale.inverse)
        planted = known_truths.plant(defect)
        before, after, _ = trained(StaticLossScale(8.0))
        moved[defect] = after - before
        assert (planted["acted"] > 0) == (defect != "none")
        monkeypatch.undo()
    assert torch.allclose(moved["scale_stays"], 8 * moved["none"], rtol=2**-10)


@pytest.mark.slow
def test_no_truth_is_broken(tmp_path):
    # 600 of 1,200 steps and three of five seeds: the verdicts are the same.
    command = [sys.executable, SCRIPT, tmp_path / "runs", "--steps", "600", "--seeds", "3"]
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0 and len(lines) == 7, ended.stdout + ended.stderr
    assert all(line.startswith("ok ") for line in lines)
    said = {line.split(":")[0].removeprefix("ok").strip(): line for line in lines}
    # Correct modes at equal seeds are decided; a planted defect is never passed.
    assert ": matches:" in said["fp16_master_scaled"] and ": matches:" in said["amp"]
    assert not any(line.startswith("masters_not_copied: matches") for line in said)

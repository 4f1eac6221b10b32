"""Real runs whose right verdict is known beforehand (benchmarks/known_truths.py), in full."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mprun.precision import LossScale, MixedPrecisionOptimizer, StaticLossScale

from ..helpers import making, mixed, one_step

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "known_truths.py"
specification = importlib.util.spec_from_file_location("known_truths", SCRIPT)
known_truths = importlib.util.module_from_spec(specification)
sys.modules["known_truths"] = known_truths  # its dataclass looks itself up there
specification.loader.exec_module(known_truths)


def trained(update, scale=None):
    """(the weight before a step, the master before it, the weight, the master, the path)."""
    torch.manual_seed(0)
    sgd = making(torch.optim.SGD, 0.5, fused=True)
    cast, optimizer = mixed(torch.nn.Linear(4, 2), "fp16_master", sgd, scale, update=update)
    weight, master = cast.module.weight, optimizer.masters["weight"]
    before = weight.detach().clone(), master.clone()
    one_step(cast, optimizer, torch.ones(3, 4))
    return *before, weight.detach(), master, optimizer.update_path


@pytest.mark.parametrize("update", ["plain", "auto", "single_pass"])
@pytest.mark.parametrize("defect", ["none", "no_copy_back"])
def test_masters_are_not_copied_where_that_is_planted(update, defect, monkeypatch):
    # Whatever form the update takes: the copies of a single pass are its own.
    monkeypatch.setattr(MixedPrecisionOptimizer, "step", MixedPrecisionOptimizer.step)
    planted = known_truths.plant(defect)
    weight, master, new_weight, new_master, path = trained(update)
    assert path == ("fused" if update == "plain" else "single_pass")
    assert torch.equal(new_weight, weight) == (defect == "no_copy_back")
    assert (planted["acted"] > 0) == (defect == "no_copy_back")
    assert not torch.equal(new_master, master)
    with pytest.raises(ValueError, match="no such defect"):
        known_truths.plant("no_copy")


@pytest.mark.parametrize("update", ["plain", "auto", "single_pass"])
def test_the_loss_scale_stays_where_that_is_planted(update, monkeypatch):
    moved = {}
    for defect in ("none", "scale_stays"):
        monkeypatch.setattr(LossScale, "inverse", LossScale.inverse)
        planted = known_truths.plant(defect)
        _, master, _, new_master, _ = trained(update, StaticLossScale(8.0))
        moved[defect] = new_master - master
        assert (planted["acted"] > 0) == (defect != "none")
        monkeypatch.undo()
    assert torch.allclose(moved["scale_stays"], 8 * moved["none"], rtol=2**-10)


@pytest.mark.slow
def test_no_truth_is_broken(tmp_path):
    # 600 of 1,200 steps and three of five seeds: the verdicts are the same.
    command = [sys.executable, SCRIPT, tmp_path / "runs", "--steps", "600", "--seeds", "3"]
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0 and len(lines) == 9, ended.stdout + ended.stderr
    assert all(line.startswith("ok ") for line in lines)
    said = {line.split(":")[0].removeprefix("ok").strip(): line for line in lines}
    # Correct modes at equal seeds are decided; a planted defect is never passed.
    assert ": matches:" in said["fp16_master_scaled"] and ": matches:" in said["amp"]
    assert all(": diverged:" in said[f"masters_not_copied-{w}"] for w in ("single_pass", "foreach"))

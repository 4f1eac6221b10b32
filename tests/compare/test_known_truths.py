"""Real runs whose right verdict is known beforehand (benchmarks/known_truths.py), in full."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mprun.precision import (
    LossScale,
    MixedPrecisionOptimizer,
    StaticLossScale,
    cast_model,
    get_policy,
)

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "known_truths.py"
specification = importlib.util.spec_from_file_location("known_truths", SCRIPT)
known_truths = importlib.util.module_from_spec(specification)
sys.modules["known_truths"] = known_truths  # its dataclass looks itself up there
specification.loader.exec_module(known_truths)


@pytest.mark.parametrize("update", ["plain", "auto", "single_pass"])
@pytest.mark.parametrize("defect", ["none", "no_copy_back"])
def test_masters_are_not_copied_where_that_is_planted(update, defect, monkeypatch):
    # Whatever form the update takes: the copies of a single pass are its own.
    monkeypatch.setattr(MixedPrecisionOptimizer, "step", MixedPrecisionOptimizer.step)
    planted = known_truths.plant(defect)
    model = torch.nn.Linear(4, 2)
    optimizer = MixedPrecisionOptimizer(
        cast_model(model, get_policy("fp16_master")),
        lambda named: torch.optim.SGD([tensor for _, tensor in named], 0.5, fused=True),
        update=update,
    )
    assert optimizer.update_path == ("fused" if update == "plain" else "single_pass")
    before = model.weight.detach().clone(), optimizer.masters["weight"].clone()
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(3, 4, dtype=torch.float16)).float().square().sum())
    optimizer.step()
    assert torch.equal(model.weight, before[0]) == (defect == "no_copy_back")
    assert (planted["acted"] > 0) == (defect == "no_copy_back")
    assert not torch.equal(optimizer.masters["weight"], before[1])


@pytest.mark.parametrize("update", ["plain", "auto", "single_pass"])
def test_the_loss_scale_stays_where_that_is_planted(update, monkeypatch):
    moved = {}
    for defect in ("none", "scale_stays"):
        monkeypatch.setattr(LossScale, "inverse", LossScale.inverse)
        planted = known_truths.plant(defect)
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = MixedPrecisionOptimizer(
            cast_model(model, get_policy("fp16_master")),
            lambda named: torch.optim.SGD([tensor for _, tensor in named], 0.5, fused=True),
            StaticLossScale(8.0),
            update=update,
        )
        before = optimizer.masters["weight"].clone()
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(3, 4, dtype=torch.float16)).float().square().mean())
        optimizer.step()
        moved[defect] = optimizer.masters["weight"] - before
        assert (planted["acted"] > 0) == (defect != "none")
        monkeypatch.undo()
    assert torch.allclose(moved["scale_stays"], 8 * moved["none"], rtol=2**-10)


def test_a_defect_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no such defect"):
        known_truths.plant("no_copy")


@pytest.mark.slow
def test_no_truth_is_broken(tmp_path):
    # 600 of 1,200 steps and three of five seeds: the verdicts are the same.
    command = [
        sys.executable,
        str(SCRIPT),
        str(tmp_path / "runs"),
        "--steps",
        "600",
        "--seeds",
        "3",
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0 and len(lines) == 9, ended.stdout + ended.stderr
    assert all(line.startswith("ok ") for line in lines)
    said = {line.split(":")[0].removeprefix("ok").strip(): line for line in lines}
    # Correct modes at equal seeds are decided; a planted defect is never passed.
    assert ": matches:" in said["fp16_master_scaled"] and ": matches:" in said["amp"]
    assert all(": diverged:" in said[f"masters_not_copied-{w}"] for w in ("single_pass", "foreach"))

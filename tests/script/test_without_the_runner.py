"""The library judges the runs of a script where nothing of the runner is there."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
(LIBRARY,) = (
    [module.removeprefix("mprun.") for module in contract["source_modules"]]
    for contract in PROJECT["importlinter"]["contracts"]
    if contract["name"] == "The library knows nothing of the runner"
)
TRAIN = """
import sys, torch, mprun
for mode in ("fp32", "fp16_master_scaled", "bf16_naive"):
    for seed in range(3):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = mprun.prepare(model, optimizer, mode)
        with mprun.Run("runs", optimizer, config={"lr": 0.1}, seed=seed, log_every=1) as run:
            for _ in range(12):
                x = torch.randn(8, 4)
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss)
                run.evaluate(loss=loss)
"""
COMPARE = """
import json, sys, mprun
found = mprun.compare("runs", margin=0.5, absolute=True)
print(json.dumps(found.to_dict()))
print(json.dumps(sorted({name.split(".")[1] for name in sys.modules if name.startswith("mprun.")})))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A copy of the library's packages, and of the files of its modes."""
    folder = tmp_path_factory.mktemp("library")
    names = [*LIBRARY, *(path.name for path in (ROOT / "mprun").glob("*.py"))]
    for name in names:
        source, target = ROOT / "mprun" / name, folder / "mprun" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    for group in ("precision", "scaler"):
        shutil.copytree(ROOT / "conf" / group, folder / "conf" / group)
    return folder


def said(program, folder, checkout):
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_it_records_and_compares(alone, tmp_path):
    """Its rows are those that the whole mprun finds; only their order is the runner's."""
    said(TRAIN, tmp_path, alone)
    (own, parts), (whole, more) = (
        map(json.loads, said(COMPARE, tmp_path, checkout).splitlines())
        for checkout in (alone, ROOT)
    )
    assert "config" in more and not {"config", "training"} & set(parts)
    groups = own["groups"][0], whole["groups"][0]
    rows, expected = ({row["label"]: row for row in group["modes"]} for group in groups)
    assert rows == expected and len(rows) == 2

"""Trainers of other libraries train on two processes what one process trains by hand."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

from mprun.prepared import state_of

from ...helpers import assert_same_bits
from .trainer_ranks import CASES, PLANTED, STEPS, Classifier, by_hand

ROOT = Path(__file__).parents[3]
LIBRARIES = ["lightning", "lightning_by_hand", "transformers", "accelerate"]
ROUNDINGS = 8  # of a value and its gradient on the way through the network and back


@pytest.fixture(scope="module", params=LIBRARIES)
def trained(request, tmp_path_factory):
    """(folder, what each of two processes found by case)."""
    if find_spec(request.param.partition("_")[0]) is None:
        pytest.skip(f"needs {request.param}")
    folder, script = tmp_path_factory.mktemp(request.param), Path(__file__).parent
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*launched, script / "trainer_ranks.py", request.param, folder]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "plants"), CASES)
def test_two_processes_are_one(trained, mode, plants):
    """Its weights are those of both, and an overflow in one of them is skipped by both."""
    folder, found = trained
    first, second = (of_rank[mode, plants] for of_rank in found)
    # A NaN is one, whatever its bits.
    assert_same_bits(*(tree_map(torch.nan_to_num, one["state"]) for one in (first, second)))
    assert (first["steps"], first["scale"]) == (second["steps"], second["scale"])
    diverges = mode == "fp32" and plants
    if (folder / "runs").exists():
        run = json.loads((folder / "runs" / f"{mode}-s{plants}" / "run.json").read_text())
        assert run["status"] == ("diverged" if diverges else "done")
        # The first process sees it in its own loss a step later, and both stop.
        assert run["last_step"] == first["steps"] == (PLANTED + 2 if diverges else STEPS)
        assert len([*(folder / "runs").iterdir()]) == len(CASES)
    if diverges:
        assert all(value.isnan().all() for value in first["state"].values())
        return
    assert_as_by_hand(first, mode, plants)


def assert_as_by_hand(found, mode, plants):
    """Weights and scale are those of one process that takes whole batches."""
    model, optimizer, skipped = by_hand(mode, plants)
    assert skipped == plants
    assert found["scale"] == float(state_of(optimizer).scale.scale)
    weights = [
        torch.cat([p.flatten() for p in state.values()])
        for state in (found["state"], model.state_dict(), Classifier().state_dict())
    ]
    # Relative to how far they have moved: each half is rounded by itself on its whole way.
    own, expected, before = weights
    most = ROUNDINGS * 2.0 ** (-24 if mode == "fp32" else -11)
    assert (own - expected).norm() < most * (expected - before).norm()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
def test_processes_that_lightning_spawns_are_one(tmp_path):
    words = ["-W", "ignore", "-m", "tests.extensions.adapters.spawned", "ddp_spawn", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert_same_bits(first, second)
    assert_as_by_hand(first, "fp16_master_scaled", 1)
    [run] = (tmp_path / "runs").iterdir()
    assert json.loads((run / "run.json").read_text())["status"] == "done"

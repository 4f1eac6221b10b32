"""BatchNorm with ReLU as one kernel: the host side of runs, recorded, replayed and resumed."""

import json

import pytest

from .cells import MODELS
from .test_every_mode import assert_sound
from .test_ranks import SCRIPT

MODEL = [*MODELS["resnet50"], "train.channels_last=on", "train.steps=8", "train.eval_every=4"]
ON = "train.fused_norm=on"
LAYERS = 49


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp16_master_scaled", "fp32", "amp", "fp16_naive", "bf16_master"])
@pytest.mark.parametrize("graph", ["on", "off"])
def test_a_run_and_its_continuation(device, tmp_path, mode, graph):
    folder = tmp_path / "run"
    overrides = [*MODEL, ON, f"precision={mode}", f"train.cuda_graph={graph}"]
    found = device.run(folder, [*overrides, "train.checkpoint_every=4"])
    assert_sound(found)
    execution = found["record"]["execution"]
    assert execution["fused_norm"] == "on"
    assert (execution["cuda_graph"] == "on") == (graph == "on")
    taken = 3 + 2 if graph == "on" else 8  # eager, and recorded with and without the gradient norm
    assert found["counts"]["driver_launches"] >= 6 * LAYERS * taken
    resumed = device.ask("command", arguments=[f"resume={folder}", "train.steps=12"])
    assert "error" not in resumed and resumed["code"] == 0, resumed
    record = json.loads((folder / "run.json").read_text())
    assert record["last_step"] == 12 and record["execution"]["fused_norm"] == "on"


@pytest.mark.slow
def test_probes_see_the_modules_one_by_one(device, tmp_path):
    """A probed step has a kernel for each BatchNorm, too, so that its bits are the others'."""
    found = device.run(
        tmp_path / "run", [*MODEL, ON, "precision=amp", "numerics=on", "numerics.every=2"]
    )
    assert_sound(found)
    assert found["counts"]["driver_launches"] >= 6 * LAYERS * 8


def answer_of_auto(folder, faster, again):
    """`auto` in a run whose measurement says `faster`, continued where it says `again`."""
    return f"""
from pathlib import Path
from mprun.cli import main
from mprun.extensions.fused_norm import choice
from mprun.record.run_record import read_record
found = []
more = ["precision=amp", "train.checkpoint_every=4", "output_dir={folder}"]
for faster, words in (({faster}, {MODEL!r} + more), ({again}, ["train.steps=12"])):
    choice.choose = lambda *_: (faster, "measured " + str(faster))
    first = ["train.fused_norm=auto", "device=cuda"] if more else ["resume={folder}"]
    code = main([*first, *words])
    more = None
    found.append([code, read_record(Path("{folder}"))["execution"]["fused_norm"]])
return {{"found": found}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("faster", "expected"), [(True, "on: "), (False, "off: ")])
def test_a_resumed_run_keeps_what_was_measured(script, tmp_path, faster, expected):
    found = script(answer_of_auto(tmp_path / "run", faster, not faster))
    assert "error" not in found, found["trace"]
    assert found["found"] == [[0, f"{expected}measured {faster}"]] * 2


@pytest.mark.slow
def test_a_rank_of_two(device, tmp_path):
    """DistributedDataParallel calls the network, and its hooks are on parameters."""
    path = tmp_path / "script.py"
    overrides = [*MODEL, ON, "precision=amp", "train.accumulate=2"]
    path.write_text(SCRIPT.format(overrides=overrides))
    found = device.ask("script", path=str(path))
    assert "error" not in found, found["trace"]
    assert found["networks"] == ["DistributedDataParallel"]
    assert found["counts"]["driver_launches"] >= 6 * LAYERS * 5


@pytest.mark.slow
def test_a_network_without_the_pair_is_refused(device, tmp_path):
    overrides = [*MODELS["vgg16"], ON, "precision=amp", "train.steps=1"]
    found = device.run(tmp_path / "run", overrides)
    assert "train.fused_norm=on: the network has no nn.BatchNorm2d before an" in found["error"]
    assert not (tmp_path / "run").exists()

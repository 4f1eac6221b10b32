"""Every model in every mode on CUDA, eager and as a graph: the host side, without a GPU."""

import re

import pytest

from mprun.precision import get_policy

from .cells import MODELS, MODES, STEPS, overrides, refusal
from .conftest import assert_sound

LARGE = {"alexnet", "resnet50", "resnet50_preact", "vgg16"}
LARGE |= {"googlenet", "inception_v2", "inception_v3"}
WITH_ADAGRAD = {"lstm_lm_projected", "biglstm"}
# The quickest first. A run with a graph begins with eager steps: without one, each model and mode.
CASES = [(model, mode, "on") for model in sorted(MODELS, key="lstm_lm".__ne__) for mode in MODES]
LONGEST = range(max(len(MODELS), len(MODES)))
CASES += [([*MODELS][n % len(MODELS)], MODES[n % len(MODES)], "off") for n in LONGEST]


@pytest.mark.parametrize(("model", "mode", "graph"), CASES)
@pytest.mark.few(1)
def test_a_run_from_start_to_end(device, tmp_path, model, mode, graph):
    found = device.run(tmp_path / "run", overrides(model, mode, graph))
    refused = refusal(model, mode, graph)
    if refused is not None:
        assert re.search(refused, found["error"]) and not (tmp_path / "run").exists()
        return
    assert_sound(found)
    execution = found["record"]["execution"]
    if graph == "on":
        assert execution["cuda_graph"] == "on" and execution["replayed"] == STEPS - 3
        assert found["counts"]["graph_launches"] == STEPS - 3
        # Logged steps have the gradient norm: another recording.
        assert found["counts"]["graphs"] == 2 and found["counts"]["captured"] > 10
    else:
        assert execution["cuda_graph"] == "off: train.cuda_graph=off"
        assert found["counts"]["captured"] == 0
    paths = {update["path"] for update in found["record"]["precision"]["update"].values()}
    # torch's fused kernel, but where the update itself is in 16 bits or has sparse gradients.
    fused = model != "biglstm" and get_policy(mode).masters != "none"
    fused = fused and not (model in WITH_ADAGRAD and device.lacks_fused_adagrad)
    assert paths == {"fused" if fused else "foreach"}

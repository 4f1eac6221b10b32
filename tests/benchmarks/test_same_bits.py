"""The tool that compares two checkouts sees a difference wherever there is one."""

from copy import deepcopy

import pytest

from benchmarks.same_bits import cell, verdict

from ..helpers import TINY_LM


@pytest.mark.slow
def test_a_difference_anywhere_is_seen(tmp_path):
    spec = {"words": [*TINY_LM, "optim=sgd"], "steps": 4, "resumes": True, "folder": str(tmp_path)}
    found = cell(spec, "fp16_master_scaled")
    assert verdict(found, deepcopy(found)) == "equal"
    assert len(found["rows"]) == 5 and found["rows"] == found["resumed"]["rows"]

    def differing(change):
        other = deepcopy(found)
        change(other)
        return verdict(found, other)

    step = found["rows"][2]["step"]
    assert differing(lambda c: c["rows"][2].update(loss=0.0)) == f"differs at step {step} in loss"
    assert differing(lambda c: c["rows"].pop()) == "differs in the number of rows"
    assert differing(lambda c: c["hashes"].update(weights="")) == "differs in weights"
    assert differing(lambda c: c.update(code=3)) == "differs in exit codes 0, 3"
    resumed = differing(lambda c: c["resumed"]["rows"][3].update(lr=0.5))
    assert resumed == "differs resumed, at step 4 in lr"
    empty = found | {"rows": [], "hashes": {}, "resumed": {"code": 0, "rows": [], "hashes": {}}}
    assert verdict(empty, empty) == "differs nothing was compared"
    refused = cell(spec, "tf32")
    assert refused["code"] == 2 and "tf32" in refused["said"]
    assert verdict(refused, refused) == "refused alike"

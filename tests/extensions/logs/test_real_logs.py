"""Logs of other tools in the form in which their own libraries write them here and now."""

import numpy as np
import pytest

from mprun.extensions.logs.log_formats import read_logs

from .other_tools import STEPS, TOOLS, curve, missing, written


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.filterwarnings("ignore")
def test_every_value_that_a_library_wrote_is_read(tmp_path, name):
    if why := missing(name):
        pytest.skip(why)
    values = curve()
    path = written(name, tmp_path / "run", values)
    if name == "wandb":
        [path] = (path / "latest-run").resolve().glob("*.wandb")
    [log] = read_logs(path, TOOLS[name].scalar)
    steps = log.points[:, 0]
    if log.steps == "epoch" and name.startswith("transformers"):  # a fraction of it
        np.testing.assert_allclose(np.diff(steps), 1 / STEPS, rtol=0, atol=1e-3)
    else:
        assert (np.diff(steps) == 1).all()
    np.testing.assert_allclose(log.points[:, 1], values, rtol=TOOLS[name].error, atol=0)
    assert [note for note in log.notes if "like 0,5" not in note] == []

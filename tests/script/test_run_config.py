"""Settings of a script as its run records them."""

from enum import IntEnum, StrEnum

import numpy as np
import pytest
import torch
import yaml

import mprun


class Kind(StrEnum):
    LINEAR = "linear"


class Level(IntEnum):
    HIGH = 3


class Word(str):
    pass


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (Kind.LINEAR, "linear"),
        (Level.HIGH, 3),
        (Word("a"), "a"),
        (np.float64(0.5), 0.5),
        ({Word("a"): [np.float64(1.0)]}, {"a": [1.0]}),
    ],
)
def test_a_value_is_written_as_what_it_stands_for(given, written, tmp_path):
    model = torch.nn.Linear(2, 2)
    _, optimizer = mprun.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "fp32")
    run = mprun.Run(tmp_path, optimizer, config={"value": given}, seed=0)
    run.close()
    config = yaml.safe_load((run.directory / "config.yaml").read_text(encoding="utf-8"))
    assert config["script"]["value"] == written

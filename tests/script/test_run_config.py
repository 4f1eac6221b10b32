"""Settings of a script as its run records them."""

from enum import IntEnum, StrEnum

import numpy as np
import pytest
import yaml

import mprun

from .networks import prepared


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
    run = mprun.Run(tmp_path, prepared("fp32")[1], config={"value": given}, seed=0)
    run.close()
    config = yaml.safe_load((run.directory / "config.yaml").read_text(encoding="utf-8"))
    assert config["script"]["value"] == written

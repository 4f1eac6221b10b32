"""`mprun explain` of a run that is done: why the loss itself was not finite in skipped updates."""

import math

import pytest

from mprun.cli import main

from ...helpers import rows_of, run
from ...numerics.small_runs import as_json
from ...numerics.spoilt_data import RUN
from .planted import own_code

OUTSIDE = own_code(RUN)


@pytest.fixture
def spoilt(tmp_path, monkeypatch):
    """A run with a spoilt batch in each epoch; a function of what is in it."""

    def make(spoilt_with, *overrides):
        monkeypatch.setenv("SPOILT_WITH", spoilt_with)
        assert run(tmp_path / "run", *RUN, *overrides) == 0
        return tmp_path / "run"

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("value", "kind"), [("nan", "NaN"), ("inf", "infinite")])
def test_data_are_named_without_training_again(spoilt, capsys, value, kind):
    folder = spoilt(value)
    found = as_json(capsys, "explain", folder, *OUTSIDE)
    assert (found["status"], found["verdict"], found["reproduced"]) == ("done", "data", True)
    assert found["details"] == {"inputs": f"3 of 256 values are {kind}"}
    first = next(row["step"] for row in rows_of(folder, "train") if not math.isfinite(row["loss"]))
    assert found["step"] == first and found["tried"] == []


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), ("train.checkpoint_every=1", "train.keep_checkpoints=99")])
def test_an_operation_is_named_where_the_data_are_sound(spoilt, capsys, kept):
    """The square root of a number below zero: the run is trained again up to that step."""
    folder = spoilt("-1", *kept)
    before = sorted(path.name for path in (folder / "numerics").glob("*"))
    found = as_json(capsys, "explain", folder, *OUTSIDE, "--no-cures")
    assert (found["verdict"], found["reproduced"]) == ("operation", True)
    assert (found["culprit"]["module"], found["culprit"]["operation"]) == ("1", "sqrt")
    assert found["ramp"][0]["phase"] == "forward"
    assert sorted(path.name for path in (folder / "numerics").glob("*")) == before
    assert main(["explain", str(folder), *OUTSIDE, "--no-cures"]) == 0
    printed = capsys.readouterr().out
    assert "the loss itself was not finite in 2 of 2" in printed and "casts" not in printed


@pytest.mark.slow
def test_a_scale_that_takes_long_to_find_its_level_is_named(spoilt, capsys):
    """Eight of twelve updates are skipped on the way from 2^24, which costs what they learn."""
    found = as_json(
        capsys, "explain", spoilt("0.5", "scaler.init_scale=16777216"), *OUTSIDE, "--seconds", "600"
    )
    told = "8 of 12 updates were skipped: the loss scale did not settle in time"
    assert (found["classification"][1], found["reasons"]) == (told, [])
    assert found["smallest_cure"][0].startswith("scaler.init_scale=")
    assert found["smallest_cure"][0] in found["command"]


def test_no_change_is_printed_without_a_trial(spoilt, capsys):
    folder = spoilt("0.5", "scaler.init_scale=16777216")
    capsys.readouterr()
    assert main(["explain", str(folder), *OUTSIDE, "--seconds", "0", "--steps", "12"]) == 0
    out, err = capsys.readouterr()
    assert err == "mprun: explain: tries changes for at most 0 seconds (--seconds S)\n"
    assert "mprun model=" not in out and "not tried, the 0 seconds are used up" in out

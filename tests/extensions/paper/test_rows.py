"""What `mprun paper` runs: every row composes, and stands for a result of the paper."""

import json
from collections import Counter
from importlib.resources import files

import pytest

from mprun.config.compose import compose_config
from mprun.extensions.paper.outcomes import NO, UNDECIDED, YES, same_outcome
from mprun.extensions.paper.rows import EQUAL, FAILS, NAIVE, ROWS


def test_every_result_of_the_paper_has_a_row():
    """Nothing that the paper reports is left out: a row may say why it is not run."""
    places = Counter(row.result.place for row in ROWS if row.key != "ssd_control")
    figures = {f"figure {place}": 1 for place in ("2a", "4", "5", "6")}
    assert places == {"table 1": 6, "table 2": 2, "table 3": 2} | figures
    for row in ROWS:
        assert row.overrides or row.why_not, row.key
        assert row.full or row.why_not, row.key
    assert len({row.key for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", [row for row in ROWS if row.overrides], ids=lambda row: row.key)
def test_the_runs_of_a_row_differ_in_nothing_but_precision(row):
    made = {name: compose_config(own).as_dict() for name, own in row.commands().items()}
    for name, config in made.items():
        for group in ("precision", "scaler"):
            del config[group]
        assert config == {**made["FP32"]}, name
    if row.key == "mandarin_weights":  # whose figure has evaluations over steps
        assert made["FP32"]["train"]["eval_every"]
    assert any(arm == NAIVE or arm._replace(outcome="", value="") == NAIVE for arm in row.arms)


@pytest.mark.parametrize("row", [row for row in ROWS if row.full], ids=lambda row: row.key)
def test_a_full_recipe_exists_and_its_hours_were_counted(row):
    config = compose_config([f"experiment={row.full.experiment}"], files=False).config
    assert config.train.steps or row.full.samples
    text = files("mprun.extensions.paper").joinpath("full_scale.json").read_text(encoding="utf-8")
    hours = json.loads(text)["hours"][row.full.experiment]
    assert 0 < hours["amp"] < hours["fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["alexnet", "biglstm", "ssd"])
def test_the_hours_are_those_of_the_roofline(key):
    from benchmarks.paper_full_scale import PATH, hours_of

    (full,) = (row.full for row in ROWS if row.key == key)
    assert hours_of(full) == json.loads(PATH.read_text(encoding="utf-8"))["hours"][full.experiment]


@pytest.mark.parametrize(
    ("published", "verdict", "expected"),
    [
        (EQUAL, "matches", YES),
        (EQUAL, "worse", NO),
        (EQUAL, "likely worse", NO),
        (EQUAL, "diverged", NO),
        (EQUAL, "better", YES),
        (EQUAL, "likely better", YES),
        (FAILS, "better", NO),
        (EQUAL, "inconclusive", UNDECIDED),
        (EQUAL, "invalid baseline", UNDECIDED),
        (FAILS, "diverged", YES),
        (FAILS, "worse", YES),
        (FAILS, "likely worse", YES),
        (FAILS, "matches", NO),
        (FAILS, "not assessed", UNDECIDED),
        ("", "matches", ""),
    ],
)
def test_same_outcome(published, verdict, expected):
    assert same_outcome(published, verdict) == expected


def test_differences_have_the_sign_of_a_comparison():
    """Worse is positive, whether a higher value is better or a lower one."""
    results = {row.key: row.result for row in ROWS}
    assert results["resnet50"].difference("76.04") == "-0.12 points"
    assert results["faster_rcnn"].difference("68.6") == "+0.50 points"
    assert results["speech_mandarin"].difference("15.01") == "-0.81 points"
    assert results["ssd"].difference("diverges") == ""

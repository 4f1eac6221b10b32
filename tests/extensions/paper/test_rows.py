"""Every row that `mprun paper` runs composes, and stands for a result of the paper."""

import json
from collections import Counter
from importlib.resources import files

import msgspec
import pytest
from msgspec.structs import replace

from mprun.config.compose import compose_config
from mprun.errors import BadInput
from mprun.extensions.paper.outcomes import (
    NO,
    NOT_DIVERGED,
    UNDECIDED,
    WORSE_SIDE,
    YES,
    Line,
    RowOutcome,
    _remark,
    control,
    counted,
    same_outcome,
)
from mprun.extensions.paper.rows import (
    DIVERGES,
    EQUAL,
    FAILS,
    NAIVE,
    ROWS,
    TECHNIQUES,
    PaperArm,
    held_out,
    seeds_of,
    settings,
    told,
)


def test_every_result_of_the_paper_has_a_row():
    """Nothing that the paper reports is left out: a row may say why it is not run."""
    places = Counter(row.result.place for row in ROWS if row.key != "ssd_control")
    figures = {f"figure {place}": 1 for place in ("2a", "4", "5", "6")}
    assert places == {"table 1": 6, "table 2": 2, "table 3": 2} | figures
    for row in ROWS:
        assert (row.overrides and row.full) or row.why_not, row.key
    assert len({row.key for row in ROWS}) == len(ROWS)


WRONG = [({"outcom": "equal"}, "unknown field `outcom`"), ({"outcome": "equals"}, "enum")]


@pytest.mark.parametrize(("given", "wrong"), [*WRONG, ({}, "array")])
def test_a_row_with_a_field_of_another_name_or_value_is_refused(given, wrong):
    overrides = ["precision=amp"] if given else "precision=amp"
    arm = {"technique": "AMP", "overrides": overrides, **given}
    with pytest.raises(msgspec.ValidationError, match=wrong):
        msgspec.convert(arm, PaperArm)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.overrides], ids=lambda row: row.key)
def test_the_runs_of_a_row_differ_in_nothing_but_precision(row):
    made = {name: compose_config(own).as_dict() for name, own in row.commands().items()}
    for name, config in made.items():
        for group in ("precision", "scaler"):
            del config[group]
        assert config == {**made["FP32"]}, name
    if row.key == "mandarin_weights":  # whose figure has evaluations over steps
        assert made["FP32"]["train"]["eval_every"]
    assert any(arm == NAIVE or replace(arm, outcome="", value="") == NAIVE for arm in row.arms)


@pytest.mark.few(3)
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


SAME = {
    EQUAL: dict.fromkeys(("matches", "better", "likely better"), YES)
    | dict.fromkeys(("worse", "likely worse", "diverged"), NO)
    | dict.fromkeys(("inconclusive", "invalid baseline"), UNDECIDED),
    FAILS: dict.fromkeys(("diverged", "worse", "likely worse"), YES)
    | {"matches": NO, "better": NO, "not assessed": UNDECIDED},
    DIVERGES: {"diverged": YES, "matches": NO, "inconclusive": UNDECIDED}
    | {worse: f"{worse}, not diverged" for worse in ("worse", "likely worse")},
    "": {"matches": ""},
}


@pytest.mark.parametrize("published", SAME, ids=lambda published: published or "unknown")
def test_same_outcome(published):
    naive = Line("FP16 weights, no masters", NAIVE.overrides, "", "", "worse")
    found = {told: same_outcome(published, told, lesser=naive) for told in SAME[published]}
    assert found == SAME[published]


def test_what_qualifies_an_outcome_stands_beside_it():
    (ssd,) = (row for row in ROWS if row.key == "ssd")
    assert ssd.constructed and not ssd.without_small().constructed
    worse = Line("FP32 masters, no scale", (), "diverges", NOT_DIVERGED, "worse")
    _remark(worse, DIVERGES, ssd)
    assert worse.same_outcome == "worse, not diverged (constructed setting)"
    scaled = Line("scale 8", (), "77.1", YES, "matches", beside="inconclusive, +0.1 points")
    _remark(scaled, EQUAL, ssd)
    assert scaled.same_outcome == "yes (by map inconclusive)"
    told = Line("scale 9", (), "77.1", "yes, tells nothing (unscaled FP16 matches too)", "matches")
    told.beside = "matches, 0 (identical)"
    _remark(told, EQUAL, ssd)
    assert told.same_outcome == "yes, tells nothing (unscaled FP16 matches too; by map matches)"
    ending = '1 "worse, not diverged"; 1 "yes"; 1 "yes, tells nothing".'
    assert counted([RowOutcome(ssd, lines=[worse, scaled, told])]).endswith(ending)


ARMS = [TECHNIQUES[name] for name in ("unscaled", "dynamic", "naive")]


def ended(verdicts):
    """The lines of `ARMS` with these verdicts."""
    pairs = zip(ARMS, verdicts, strict=True)
    return [Line(arm.technique, arm.overrides, "", "", told) for arm, told in pairs]


@pytest.mark.parametrize(
    ("low", "unscaled", "naive", "expected", "discriminates"),
    [
        (-0.1, "matches", "matches", "unscaled FP16 matches too", "no (naive FP16 matches too)"),
        # Masters are needed, the scale is not.
        (-0.1, "matches", "worse", "unscaled FP16 matches too", "yes (naive FP16 worse)"),
        (-0.1, "worse", "matches", YES, "yes (unscaled FP16 worse)"),
        (-0.1, "not run", "inconclusive", "naive FP16 inconclusive", "not known (naive FP16 inc"),
        (-0.1, "not run", "better", "naive FP16 better", "no (naive FP16 better)"),
        (-0.1, "not run", "not run", "naive FP16 was not run", "not known (naive FP16 was"),
        (0.01, "diverged", "worse", WORSE_SIDE, "yes (unscaled FP16 diverged; naive FP16 worse)"),
        (0.0, "likely worse", "not run", YES, "yes (unscaled FP16 likely worse)"),
    ],
)
def test_a_match_is_a_plain_yes_only_if_what_lacks_the_technique_fails(
    low, unscaled, naive, expected, discriminates
):
    lines = ended((unscaled, "matches", naive))
    found = same_outcome(EQUAL, "matches", low, control(lines[1], lines))
    plain = expected in (YES, WORSE_SIDE)
    assert found == (expected if plain else f"yes, tells nothing ({expected})")
    assert RowOutcome(ROWS[0], lines=lines).discriminates.startswith(discriminates)


def test_a_technique_that_fails_does_not_discriminate():
    lines = ended(("worse", "not run", "matches"))
    assert RowOutcome(ROWS[0], lines=lines).discriminates == "no (naive FP16 matches too)"


def test_runs_that_two_rows_share_count_once():
    mine, other = (row for row in ROWS if row.key in ("speech_english", "mandarin_weights"))
    given = [RowOutcome(row, lines=_matching(row), slug="g") for row in (mine, other)]
    assert counted(given) == '2 outcomes of the paper were judged: 2 "yes".'
    own = [RowOutcome(row, lines=_matching(row)) for row in (mine, other)]
    assert counted(own) == '3 outcomes of the paper were judged: 3 "yes".'
    assert counted([RowOutcome(mine)]) == ""


def _matching(row):
    return [
        Line(arm.technique, arm.overrides, arm.value, YES if arm.outcome else "", "matches")
        for arm in row.arms
    ]


@pytest.mark.parametrize("row", [row for row in ROWS if row.overrides], ids=lambda row: row.key)
@pytest.mark.few(3)
def test_a_row_runs_what_was_settled_before(row):
    """Margin, length and rate of an experiment are those of settings.yaml, each with a reason."""
    config, own = compose_config(list(row.overrides)).config, settings()[row.key]
    assert (own.metric, own.margin) == (config.compare.metric, config.compare.margin)
    assert (own.steps, own.lr) == (config.train.steps, config.optim.lr)
    assert own.why.keys() == {"margin", "steps", "lr"} and all(own.why.values())
    assert own.chosen >= "2026-11-20" and own.seconds > 0
    assert own.seeds and not {*own.seeds} & {*held_out()}


def test_every_row_that_runs_was_settled():
    assert settings().keys() == {row.key for row in ROWS if row.overrides}


def test_seeds():
    assert seeds_of("100-104") == (100, 101, 102, 103, 104)
    assert seeds_of("7, 0-2,1") == (0, 1, 2, 7)
    for text in ("", "a", "3-1", "-1", "1-", "0-99999", "1.5"):
        with pytest.raises(BadInput, match="--seeds"):
            seeds_of(text)
    assert told(["ssd"], held_out()).startswith("Seeds 100-104: no margin")
    assert told(["ssd"], [0, 100]).startswith("Seeds 0 are among those")

"""The last steps of a diverged run, in numbers and words; values made by hand."""

import math

import pytest

from mprun.errors import Damaged
from mprun.numerics.post_mortem import (
    LAST,
    History,
    StepRow,
    _steps,
    classify,
    explosion,
    nonfinite_metric,
    power,
    read_post_mortem,
    write_post_mortem,
)

KEPT = {"kind": "loss", "step": 4, "replayed_from": 0, "replayed": 4, "compared": 4}
KEPT |= {"first_difference": None, "folder": "numerics/failure/step-00000003", "reason": None}


def rows_of(*values):
    """Rows from (loss, scale, skipped or not), numbered from step 1."""
    rows, skipped = [], 0
    for step, (loss, scale, inf) in enumerate(values, start=1):
        skipped += inf
        row = {"step": step, "loss": loss, "loss_scale": float(scale), "found_inf": bool(inf)}
        rows.append(row | {"skipped": skipped})
    return rows


def test_a_non_finite_loss_at_an_applied_step_and_what_spoilt_the_weights():
    rows = rows_of((2.3, 1, 0), (2.2, 1, 0), (math.nan, 1, 0))
    applied = "non-finite loss at an applied step"
    assert classify("non-finite loss", rows, "none", 3) == [applied]
    assert classify("non-finite loss", rows, "none", 2) == [f"{applied} (3); the cause is step 2"]
    evaluation = ["non-finite loss in an evaluation"]
    assert classify("non-finite evaluation loss", rows_of((2.3, 1, 0)), "none", 1) == evaluation
    for values, why in (
        ({"f9": math.nan, "loss": 2.3}, ["an evaluation returned f9 = nan; the loss is finite"]),
        ({"f9": math.nan, "loss": math.inf}, evaluation),
    ):
        assert classify(nonfinite_metric(values), rows_of((2.3, 1, 0)), "none", 1) == why
    assert nonfinite_metric({"loss": 2.3, "f9": 0.0}) is None


def test_an_explosion_has_a_factor_and_a_length():
    # 2 is the lowest; the last loss within twice that is at step 4; 64 / 2 = 32, 3 steps later.
    losses = [2.5, 2.0, 2.2, 3.9, 8.0, 20.0, 64.0, math.inf]
    rows = rows_of(*((loss, 1, 0) for loss in losses))
    assert explosion(rows) == (32.0, 3)
    assert classify("non-finite loss", rows, "none", 8) == [
        "non-finite loss at an applied step",
        "exploding loss: grew by 32 in 3 steps before",
    ]
    assert explosion(rows[:6]) == (10.0, 2)
    assert explosion(rows[:5]) is None  # four times is no explosion
    assert explosion([]) is None
    # Losses of skipped steps are none.
    rows = rows_of((2.0, 8, 0), (1e6, 8, 1), (2.1, 4, 0), (math.nan, 4, 0))
    assert explosion(rows) is None


@pytest.mark.parametrize(
    ("scaler", "values", "said"),
    [
        (
            "dynamic",
            [(2.3, 65536, 1), (2.3, 32768, 1), (2.2, 16384, 0), (math.nan, 16384, 0)],
            "2 skipped updates before: warm-up skips of dynamic scaling: normal",
        ),
        (
            "dynamic",
            [(2.3, 8, 0), (2.3, 16, 0), (2.2, 16, 1), (math.nan, 8, 0)],
            "1 skipped update before: dynamic scaling looking for the largest scale: normal",
        ),
        (
            "static",
            [(2.3, 8, 0), (2.3, 8, 1), (math.nan, 8, 0)],
            "1 skipped update before: the static loss scale is too large for some batches",
        ),
    ],
)
def test_skips_are_normal_or_not(scaler, values, said):
    assert classify("non-finite loss", rows_of(*values), scaler, len(values))[1:] == [said]


def test_a_collapse_is_called_a_collapse():
    cause = "loss_scale collapsed: 3 skipped updates in a row at its floor"
    rows = rows_of((2.3, 2, 1), (2.3, 1, 0), (2.2, 1, 1), (2.2, 0.5, 1), (2.2, 0.5, 1))
    assert classify(cause, rows, "dynamic", 4) == [
        "collapse: 3 skips in a row at the floor (loss scale 2^-1)",
        "1 skipped update before: warm-up skips of dynamic scaling: normal",
    ]


def test_the_history_holds_the_last_steps_and_their_gradient_norms():
    history = History()
    for step in range(1, 71, 10):
        rows = [StepRow(step + i, float(step + i), 1.0, False, 0) for i in range(10)]
        history.add(rows, {"loss": 1.0, "grad_norm": 0.5, "g_grad_norm": 0.25})
    ends = [(math.nan, False), (math.nan, True), (2.0, False), (2.0, True)]
    assert [StepRow(1, loss, 1.0, skips, 0).diverged for loss, skips in ends] == [1, 0, 0, 0]
    rows = history.up_to(70)
    assert [row["step"] for row in rows] == list(range(21, 71))
    assert len(rows) == LAST
    assert rows[-1]["grad_norm"] == 0.5 and rows[-1]["g_grad_norm"] == 0.25
    assert "grad_norm" not in rows[-2] and "loss" in rows[-2]
    assert [row["step"] for row in history.up_to(22)] == [21, 22]


def test_the_files_hold_what_was_given(tmp_path):
    rows = rows_of((2.5, 8, 1), (2.25, 4, 0), (math.inf, 4, 0), (math.nan, 4, 0))
    rows[1]["grad_norm"] = 0.125
    lines = write_post_mortem(tmp_path, "non-finite loss", 4, rows, "dynamic", KEPT)
    content = read_post_mortem(tmp_path)
    assert content["classification"] == lines and content["failure"] == KEPT
    assert [row["loss"] for row in content["rows"][:3]] == [2.5, 2.25, math.inf]
    assert math.isnan(content["rows"][3]["loss"])
    text = (tmp_path / "numerics" / "post-mortem.md").read_text()
    assert text.startswith("# Post-mortem: non-finite loss (step 4)")
    assert "numerics/failure/step-00000003" in text and "bit for bit" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 4
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:4]]
    assert cells == [["1", "2.5", "2^3", "skipped", ""], ["2", "2.25", "2^2", "", "0.125"]]


def test_what_was_not_kept_or_not_reproduced_is_said(tmp_path):
    rows = rows_of((2.5, 1, 0), (math.nan, 1, 0))
    for changes, said in (
        ({"folder": None, "reason": "no room"}, "not kept (no room)"),
        ({"first_difference": 2}, "another loss from step 2 on"),
    ):
        write_post_mortem(tmp_path, "non-finite loss", 2, rows, "none", KEPT | changes)
        assert said in (tmp_path / "numerics" / "post-mortem.md").read_text()


def test_a_run_without_one_and_a_torn_one(tmp_path):
    assert read_post_mortem(tmp_path) is None
    (tmp_path / "numerics").mkdir()
    for text in ("", "{", "[]", '{"rows": []}', '{"rows": 3}'):
        (tmp_path / "numerics" / "post-mortem.json").write_text(text)
        with pytest.raises(Damaged):
            read_post_mortem(tmp_path)


def test_a_sentence_names_five_steps():
    assert (_steps([4]), _steps(["4", "5"])) == ("step 4", "steps 4, 5")
    assert _steps(range(1, 8)) == "steps 1, 2, 3, 4, 5, ... 7"


@pytest.mark.parametrize(
    ("value", "text"),
    [(65536.0, "2^16"), (65504.0, "2^16.0"), (0.5, "2^-1"), (0.0, "0"), (3.0, "2^1.6")],
)
def test_powers_of_two(value, text):
    assert power(value) == text
    assert (power(math.inf), power(math.nan)) == ("inf", "nan")

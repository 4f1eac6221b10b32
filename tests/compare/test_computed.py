"""Beside the verdict stands what was computed, from the audit in the records."""

import pytest

from mprun.cli import main
from mprun.comparison.grouping import group_runs
from mprun.comparison.load import audit_notes, audit_of, load_runs, products_text
from mprun.comparison.verdict import assess

from .run_folders import change_record, compared, write_study

FP32 = {"watched": 3, "products": {"forward fp32": 6, "backward fp32": 9}, "optimizers": ["SGD"]}
AMP = {"watched": 3, "products": {"forward fp16": 6, "backward fp16": 6, "backward fp32": 3}}


@pytest.fixture
def study(tmp_path):
    write_study(tmp_path, {"fp32": [1.0, 1.01, 0.99], "amp": [1.0, 1.012, 0.991]})
    for run in tmp_path.iterdir():
        change_record(run, audit=AMP if run.name.startswith("amp") else FP32)
    return tmp_path


def amp_of(folder):
    runs, _ = load_runs([folder])
    return sorted((run for run in runs if run.mode == "amp"), key=lambda run: run.seed)


def said(capsys, folder, *words) -> str:
    assert main(["compare", str(folder), *words]) == 0
    return capsys.readouterr().out


def test_the_terminal_says_it_in_a_line_and_its_table_stays_as_wide(study, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with_audit = said(capsys, study, "--no-report")
    line = "Products computed in, by calls: fp32: fp32 100 %; amp: fp16 80 %, fp32 20 %."
    assert line in " ".join(with_audit.split())
    for run in study.iterdir():
        change_record(run, audit=None)
    without = said(capsys, study, "--no-report")
    assert "Products" not in without
    # All else is as without, the table too; the new lines are as wide as a terminal at most.
    new = set(with_audit.splitlines()) - set(without.splitlines())
    assert new and all(len(line) <= 80 for line in new)
    assert not set(without.splitlines()) - set(with_audit.splitlines())


def test_a_mode_of_an_earlier_mprun_is_not_watched(study, capsys):
    for run in study.glob("amp-*"):
        change_record(run, audit=None)
    assert "amp: not watched." in " ".join(said(capsys, study, "--no-report").split())
    [mode] = compared(capsys, study)["groups"][0]["modes"]
    assert mode["audit"] is None


@pytest.mark.slow
def test_the_reports_have_a_column(study, capsys):
    said(capsys, study, "--out", str(study / "report"))
    page = (study / "report" / "report.html").read_text()
    assert 'data-label="products"><span class="value">fp16 80 %<br>' in page
    table = (study / "report" / "report.md").read_text()
    [row] = [line for line in table.splitlines() if "| amp " in line]
    assert "| fp16 80 % (fp32 20 %) |" in row


def test_results_hold_shares_and_names(study, capsys):
    change_record(study / "amp-s1", audit=AMP | {"left_the_model": ["block.features"]})
    change_record(study / "amp-s2", audit=AMP | {"not_watched": "compiled steps"})
    [group] = compared(capsys, study)["groups"]
    [mode], baseline = group["modes"], group["baseline"]["audit"]
    assert baseline["products"] == {"fp32": 1.0} and baseline["optimizers"] == ["SGD"]
    nothing = ("written_in_a_call", "rounded_in_a_call", "destroyed_by_a_cast", "optimizers")
    assert mode["audit"] == {
        "watched": 9,
        "products": {"fp16": 0.8, "fp32": 0.2},
        "left_the_model": ["block.features"],
        "not_watched": ["compiled steps"],
        **dict.fromkeys(nothing, []),
    }
    assert "tensors left the model beside its outputs: block.features" in mode["notes"]


def test_what_a_model_wrote_is_a_note_everywhere(study, capsys):
    names = [f"layer{number}.weight" for number in range(7)]
    change_record(study / "amp-s0", audit=AMP | {"written_in_a_call": names})
    text = f"parameters written by the model itself: {', '.join(names[:5])} and 2 more"
    [proto], _ = group_runs(load_runs([study])[0])
    assert text in assess(proto).rows[0].every_note
    assert f"amp: {text}" in " ".join(said(capsys, study, "--no-report").split())


def test_seeds_that_disagree_are_named(study):
    change_record(study / "amp-s2", audit=FP32)
    amp = amp_of(study)
    [note] = audit_notes(amp)
    assert note == (
        "the seeds computed their products differently: fp16 80 %, fp32 20 % (seeds 0, 1); "
        "fp32 100 % (seed 2)"
    )
    assert audit_notes(amp[:2]) == []
    # One of the dtypes tells: 1 of 100 products more in FP32, with BF16 as often as before.
    shares = {"fp16": 90, "fp32": 5, "bf16": 5}, {"fp16": 89, "fp32": 6, "bf16": 5}
    for run, products in zip(amp, shares, strict=False):
        run.audit = AMP | {"products": products}
    assert "differently" in audit_notes(amp[:2])[0]


def test_a_resumed_seed_with_more_watched_steps_agrees(study):
    more = {"watched": 6, "products": {name: 2 * n for name, n in AMP["products"].items()}}
    change_record(study / "amp-s2", audit=more)
    amp = amp_of(study)
    assert audit_notes(amp) == [] and audit_of(amp)["watched"] == 12


@pytest.mark.parametrize(
    ("products", "text"),
    [
        ({"forward fp32": 7}, "fp32 100 %"),
        ({"forward fp16": 999, "backward fp32": 1}, "fp16 >99 %, fp32 <1 %"),
        (
            {"backward e5m2": 2, "forward e4m3": 1, "forward bf16": 1},
            "e5m2 50 %, e4m3 25 %, bf16 25 %",
        ),
        ({}, "none"),
    ],
)
def test_shares_are_whole_per_cent(study, products, text):
    change_record(study / "amp-s0", audit={"watched": 1, "products": products})
    assert products_text(audit_of(amp_of(study / "amp-s0"))) == text

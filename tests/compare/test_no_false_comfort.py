"""Ways to get a match, or to lose a file, that must not work."""

import json

import pytest

from mprun.cli import main

from ..helpers import refused
from .run_folders import change_record, compared, write_metrics, write_run, write_study

FINAL = (2.00, 2.02, 1.99)
FALLING = [3.0 - step / 40 for step in range(40)]


@pytest.fixture
def study(tmp_path, monkeypatch):
    """runs/: three seeds of FP32 and of an amp that equals them."""
    monkeypatch.chdir(tmp_path)
    return write_study(tmp_path / "runs", {"fp32": FINAL, "amp": FINAL})


def row_of_amp(capsys) -> dict:
    [group] = compared(capsys, "runs")["groups"]
    [row] = group["modes"]
    return row


def said(capsys, *words, code=3) -> str:
    """What `mprun compare runs --no-report` prints, in one line."""
    capsys.readouterr()
    assert main(["compare", "runs", "--no-report", *words]) == code
    return " ".join(capsys.readouterr().out.split())


def test_seeds_with_equal_records_are_one_run(study, capsys):
    """A script that seeds nothing, or always alike, repeats one run under several seeds."""
    for mode in ("fp32", "amp"):
        first = (study / f"{mode}-s0" / "metrics.jsonl").read_bytes()
        for seed in (1, 2):
            (study / f"{mode}-s{seed}" / "metrics.jsonl").write_bytes(first)
    row = row_of_amp(capsys)
    sentence = row["verdict"]["sentence"]
    assert row["verdict"]["name"] == "one pair" and len(row["runs"]) == 1
    for mode in ("amp", "fp32"):
        told = f"seeds 1-2 of {mode}, which recorded what seed 0 did, bit for bit: one run"
        assert told in sentence
    said(capsys, "--check")
    # A run that diverged is never one that did not.
    change_record(study / "amp-s1", status="diverged", cause="non-finite loss")
    assert row_of_amp(capsys)["verdict"]["name"] == "diverged"
    change_record(study / "amp-s1", status="done")
    # One digit at one step is enough to be another run.
    path = study / "amp-s2" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 2.025, ', '"loss": 2.0250000000000004, '))
    row = row_of_amp(capsys)
    assert len(row["runs"]) == 2
    assert "seed 1 of amp, which recorded what seed 0 did" in row["verdict"]["sentence"]


def test_runs_with_few_losses_may_be_equal_by_chance(study, capsys):
    for path in study.iterdir():
        write_metrics(path / "metrics.jsonl", 1.5, losses=[2.0, 1.5])
        change_record(path, last_step=2)
    row = row_of_amp(capsys)
    assert row["verdict"]["name"] == "matches" and len(row["runs"]) == 3


def test_the_study_matches_as_it_stands(study, capsys):
    assert row_of_amp(capsys)["verdict"]["name"] == "matches"
    said(capsys, "--check", code=0)


@pytest.mark.parametrize(
    "losses",
    [
        [2.0] * 40,
        [2.0 + step / 20 for step in range(40)],
        # Noise of sd 0.41 around a fall of 0.01.
        [2.0 - step / 4000 + 0.5 * (-1) ** step for step in range(40)],
    ],
    ids=["flat", "rising", "noise"],
)
def test_equal_to_a_baseline_that_learned_nothing_is_no_match(study, capsys, losses):
    for path in study.iterdir():
        write_metrics(path / "metrics.jsonl", 2.0, losses=losses)
    verdict = row_of_amp(capsys)["verdict"]
    assert verdict["name"] == "invalid baseline"
    assert "learned next to nothing" in verdict["sentence"]


def test_other_data_under_the_same_name_is_refused(study, capsys):
    for path in study.iterdir():
        change_record(path, data={"sha256": path.name[:3]})
    refused(capsys, "compare", "runs", says="data.sha256 (fp3, here amp)")


def test_a_missing_seed_fails_the_check(study, capsys):
    write_run(study / "fp32-s3", "fp32", 3, final=2.01)
    write_run(study / "amp-s3", "amp", 3, final=2.01, status="failed", cause="killed by SIGKILL")
    row = row_of_amp(capsys)
    assert row["verdict"]["name"] == "matches" and row["verdict"]["seeds"] == [0, 1, 2]
    assert any("seed 3: failed (killed by SIGKILL)" in note for note in row["notes"])
    said(capsys, "--check")


def test_a_skipped_warm_up_is_no_warning(study, capsys):
    for path in study.glob("amp*/metrics.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record |= {"skipped": 1, "updates": record["step"] - 1}
            if record["split"] == "train":
                record["loss"] *= 1.5
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    row = row_of_amp(capsys)
    assert row["first_steps"] is None
    assert not any("first 20 steps" in note for note in row["notes"])


def test_one_bad_group_does_not_stop_the_others(study, capsys):
    write_study(study / "other", {"fp32": FINAL, "amp": FINAL}, overrides={"optim.lr": 0.7})
    evaluation = study / "other/amp-s1/metrics.jsonl"
    lines = evaluation.read_text().splitlines()
    evaluation.write_text("\n".join(lines[:-1]) + "\n")
    found = compared(capsys, "runs")
    assert len(found["groups"]) == 1 and "amp-s1" in found["not_compared"][0]


def test_a_truncated_record_is_damaged(study, capsys):
    path = study / "amp-s1/metrics.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:5]) + "\n")
    refused(capsys, "compare", "runs", says="ends at step 5, but the run ended at step 40", code=4)


@pytest.mark.slow
def test_of_figures_beside_the_report_only_its_own_are_replaced(study):
    assert main(["compare", "runs", "--out", "ours"]) == 0
    (study.parent / "ours/precious.png").write_text("P")
    assert main(["compare", "runs", "--out", "ours"]) == 0
    assert (study.parent / "ours/precious.png").read_text() == "P"


def test_a_seed_without_a_partner_fails_the_check_and_is_said_first(study, capsys):
    """Seeds 0 to 2 alike, and the mode's seed 3 at eleven times: what is left out is no comfort."""
    write_run(study / "amp-s3", "amp", 3)
    write_metrics(study / "amp-s3/metrics.jsonl", 22.0, losses=FALLING)
    printed = said(capsys, "--check")
    assert "left out of amp: having no partner: seed 3 of this mode" in printed[:250]
    assert "Over all, unpaired: inconclusive, difference +2" in printed
    assert "0-2 (not 3)" in printed
    left_out = row_of_amp(capsys)["verdict"]["left_out"]
    assert left_out == ["having no partner: seed 3 of this mode"]


def test_a_stopped_cell_is_named_with_configuration_and_reason(study, capsys):
    write_run(study / "fp32-s3", "fp32", 3)
    write_run(study / "amp-s3", "amp", 3, status="preempted", cause="SIGTERM")
    printed = said(capsys, code=0)
    title = printed.partition(": left out of amp: having no partner: seed 3 of FP32 (amp, ")[0]
    assert title.startswith("Not the comparison ") and len(title) < 80
    assert "seed 3 of FP32 (amp, seed 3: preempted at step 40 (SIGTERM))" in printed


def test_means_are_over_the_seeds_that_are_compared(study, capsys):
    write_run(study / "fp32-s7", "fp32", 7, final=9.0)
    [group] = compared(capsys, "runs")["groups"]
    for row in (group["baseline"], *group["modes"]):
        assert row["mean"] == pytest.approx(sum(FINAL) / 3)
    assert "2.003 (seeds 0-2)" in said(capsys, "--markdown", code=0)


def test_a_seed_of_its_own_sort_is_named(study, capsys):
    for seed, loss in ((3, 2.01), (4, 1.98)):
        write_run(study / f"fp32-s{seed}", "fp32", seed, final=loss)
        write_run(study / f"amp-s{seed}", "amp", seed, final=loss + 1e-3)
    write_metrics(study / "amp-s3/metrics.jsonl", 2.01 + 7.9, losses=FALLING)
    verdict = row_of_amp(capsys)["verdict"]
    assert verdict["name"] == "inconclusive"
    assert "One stands out: seed 3 of this mode differs by 7.9," in verdict["sentence"]


def test_a_repeat_that_is_left_out_fails_the_check(study, capsys):
    write_run(study / "again", "amp", 1, final=9.0, created="2026-11-21T10:00:00+00:00")
    assert "left out of amp: a repeat of seed 1: runs/again" in said(capsys, "--check")

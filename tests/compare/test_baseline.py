"""The margin and the baseline as values of the configuration: what they do to a comparison."""

import json

import pytest

import mprun
from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.errors import BadInput

from ..helpers import raises_line, refused
from .run_folders import write_run, write_study

# Losses of three seeds; those of a mode lie 0.1 % above, those of another 0.5 %.
BASE = (2.0000, 2.0201, 1.9802)
ABOVE = {"fp32": 0.0, "amp_bf16": 0.002, "amp": 0.010}


def study(folder, modes=ABOVE, **overrides):
    """A run of each mode and seed."""
    finals = {mode: [loss + ABOVE[mode] for loss in BASE] for mode in modes}
    return write_study(folder, finals, overrides=overrides)


def labels(group):
    return [row.arm.label for row in group.every_row]


def test_the_margin_of_an_experiment_file_arrives_in_the_verdict(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: lstm_lm\ncompare:\n  margin: 0.0025\n"
    )
    set_up = compose_config(["experiment=mine"], str(tmp_path)).as_dict()["compare"]
    known = {"metric": "loss", "margin": 0.0025, "window": 1, "baseline": "fp32"}
    others = ("higher_is_better", "plan", "pair_sd", "pair_sd_source")
    assert set_up == known | dict.fromkeys(others)
    folder = study(tmp_path / "runs", **{f"compare.{key}": set_up[key] for key in set_up})
    found = mprun.compare(folder)
    [group] = found.groups
    # 0.5 % above is inside the default of 1 %.
    verdicts = {row.arm.label: row.verdict.name for row in group.rows}
    assert verdicts == {"amp": "worse", "amp_bf16": "matches"}
    # 0.25 % of the mean of the baseline, (2 + 2.0201 + 1.9802) / 3.
    assert group.rows[0].verdict.margin == pytest.approx(0.0025 * 2.0001, rel=1e-12)
    assert found.stamps == [] and "±0.25 % of FP32" in repr(found)


def test_runs_of_several_margins_are_told_apart(tmp_path):
    study(tmp_path / "a", ["fp32"])
    study(tmp_path / "b", ["amp"], **{"compare.margin": 0.0025})
    margins = "compare.margin (0.01, here 0.0025): not as in the nearest"
    with raises_line(BadInput, margins, "run it with precision=fp32, or --margin X"):
        mprun.compare(tmp_path)
    with raises_line(BadInput, "compare.margin: the runs have different values; pass --margin"):
        mprun.compare(tmp_path, allow="compare.margin")
    found = mprun.compare(tmp_path, margin=0.0025)
    assert found.groups[0].rows[0].verdict.name == "worse"
    assert found.stamps == ["--margin 0.0025: chosen after the runs, which say 0.0025, 0.01"]


@pytest.mark.slow
def test_the_configuration_names_the_baseline(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study(tmp_path / "outputs", **{"compare.baseline": "amp_bf16"})
    assert main(["compare", "outputs"]) == 0
    printed = capsys.readouterr().out
    assert "Judged: loss, baseline amp_bf16, margin ±1 % of amp_bf16's mean" in printed
    assert "Not the comparison" not in printed
    results = json.loads((tmp_path / "outputs/compare/results.json").read_text())
    [group] = results["groups"]
    assert results["stamps"] == [] and group["baseline"]["mode"] == "amp_bf16"
    # FP32 stands beside the others, 0.1 % below the baseline.
    assert [row["label"] for row in group["modes"]] == ["fp32", "amp"]
    fp32 = group["modes"][0]["verdict"]
    assert fp32["name"] == "matches" and fp32["sentence"].startswith("matches amp_bf16: ")
    assert fp32["difference"] == pytest.approx(-0.002, rel=1e-9)
    page = (tmp_path / "outputs/compare/report.html").read_text()
    assert "does each mode match amp_bf16?" in page
    assert "<dt>Baseline</dt><dd>amp_bf16</dd>" in page
    report = (tmp_path / "outputs/compare/report.md").read_text()
    assert report.startswith("# Does each mode match amp_bf16?")


def test_the_command_line_wins_and_is_stamped_only_where_it_says_something_else(tmp_path, capsys):
    folder = study(tmp_path, **{"compare.baseline": "amp_bf16"})
    found = mprun.compare(folder, baseline="amp_bf16")
    assert labels(found.groups[0]) == ["amp_bf16", "fp32", "amp"] and found.stamps == []
    found = mprun.compare(folder, baseline="fp32")
    assert labels(found.groups[0]) == ["fp32", "amp", "amp_bf16"]
    assert found.stamps == ["--baseline fp32: chosen after the runs, which say amp_bf16"]
    found = mprun.compare(folder / "amp-s0", baseline=folder / "fp32-s0")
    assert labels(found.groups[0]) == ["fp32", "amp"]
    assert found.stamps == [f"--baseline {folder / 'fp32-s0'}: chosen on the command line"]
    assert main(["compare", str(folder), "--baseline", "amp", "--no-report"]) == 0
    assert "baseline amp, margin" in capsys.readouterr().out


def test_a_folder_of_a_modes_name_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study(tmp_path / "runs")
    study(tmp_path / "amp_bf16", ["fp32"])
    [group] = mprun.compare("runs", baseline="amp_bf16").groups
    assert labels(group) == ["fp32", "fp32 (other)", "amp", "amp_bf16"]


def test_no_run_of_the_baseline_is_told_in_one_line(tmp_path, capsys):
    folder = study(tmp_path / "a", ["fp32", "amp"], **{"compare.baseline": "amp_bf16"})
    told = "compare.baseline=amp_bf16: no run of that mode, so not compared: "
    refused(capsys, "compare", folder, says=(told, "lstm_lm-docs_words: ", "amp, fp32 (6 runs"))


def test_the_usual_scaler_makes_the_baseline_and_two_of_it_are_refused(tmp_path):
    overrides = {"compare.baseline": "amp"}
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", "amp", seed, overrides=overrides)
        write_run(tmp_path / f"b{seed}", "amp", seed, scaler="static", overrides=overrides)
    assert labels(mprun.compare(tmp_path).groups[0]) == ["amp", "amp (static)"]
    write_run(tmp_path / "c", "amp", 0, overrides=overrides | {"scaler.init_scale": 8.0})
    with raises_line(BadInput, "baseline amp: ", "scaler.init_scale (65536, here 8)"):
        mprun.compare(tmp_path)

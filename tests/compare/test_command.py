"""`mprun compare` from the command line on run directories made by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mprun
from mprun.cli import main
from mprun.record.run_directory import write_json

from ..helpers import refused
from .run_folders import compared, write_run, write_study

# FP32 losses of five seeds and, 0.1 % above with a scatter of 0.05 %, those of a mode.
BASE = (2.00, 2.02, 1.99, 2.01, 1.98)
AMP = (2.002, 2.021, 1.993, 2.012, 1.982)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """outputs/study: fp32, an amp that matches, a fp16_naive 5 % worse and one that diverged."""
    monkeypatch.chdir(tmp_path)
    study = tmp_path / "outputs" / "study"
    naive = [1.05 * loss for loss in AMP]
    write_study(study, {"fp32": BASE, "amp": AMP, "fp16_naive": naive, "bf16_naive": BASE[:4]})
    write_run(study / "bf16_naive-s4", "bf16_naive", 4, status="diverged", last_step=12)
    return study


@pytest.mark.slow
def test_verdicts_of_a_study_are_printed_and_left(runs, capsys):
    assert main(["compare", "outputs/study", "--tensorboard"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "report: outputs/study/compare/report.html"
    assert "diverged in 1 of 5 runs (first at step 12" in printed
    folder = runs / "compare"
    assert {"report.html", "report.md", "results.json"} <= {p.name for p in folder.iterdir()}
    assert list(folder.glob("*.png")) and list((runs / "_summary").rglob("events.*"))
    [group] = json.loads((folder / "results.json").read_text())["groups"]
    rows = {row["label"]: row for row in group["modes"]}
    verdicts = {label: row["verdict"]["name"] for label, row in rows.items()}
    assert verdicts == {"amp": "matches", "fp16_naive": "worse", "bf16_naive": "diverged"}
    # Mean of the differences 0.002; s = sqrt(2e-6 / 4); t(0.95, 4) = 2.1318; h = t s / sqrt(5). The
    # scatter of FP32's mean moves the ends by less than a hundredth.
    amp = rows["amp"]["verdict"]
    half = 2.131847 * (2e-6 / 4) ** 0.5 / 5**0.5
    assert amp["difference"] == pytest.approx(0.002, rel=1e-9)
    assert (amp["low"], amp["high"]) == pytest.approx((0.002 - half, 0.002 + half), rel=0.01)
    assert amp["margin"] == pytest.approx(0.01 * 2.00, rel=1e-12)
    # Again: what it wrote itself is no run.
    assert compared(capsys, "outputs")["groups"][0]["modes"] == group["modes"]


def test_check_tells_whether_every_mode_matches(runs, capsys):
    check = ["compare", "outputs", "--no-report", "--check"]
    assert main(check) == 3
    for path in (*runs.glob("fp16*"), *runs.glob("bf16*")):
        path.rename(runs.parent.parent / path.name)
    assert main(check) == 0
    # A mode without a baseline has not matched.
    write_run(runs / "other", "amp", 7, overrides={"optim.lr": 0.3})
    assert main(check) == 3
    assert not (runs / "compare").exists()


def test_another_learning_rate_is_refused_unless_told(runs, capsys):
    for seed in range(3):
        write_run(runs.parent / f"lr/fp32-{seed}", seed=seed, overrides={"optim.lr": 0.3})
        write_run(runs.parent / f"lr/x-{seed}", "amp", seed, overrides={"optim.lr": 0.2})
    only = list((runs.parent / "lr").iterdir())
    refused(capsys, "compare", *only, says=("optim.lr", "0.2", "0.3", "--allow"))
    assert not (runs.parent / "compare").exists() and not (runs.parent / "lr/compare").exists()
    found = compared(capsys, *only, "--allow", "optim.lr")
    assert "optim.lr=0.2" in found["groups"][0]["modes"][0]["label"]
    assert any("optim.lr" in stamp for stamp in found["stamps"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "PATH"),
        (["nowhere"], "nowhere"),
        (["outputs", "--looks", "5,3"], "--looks 5,3"),
        (["outputs", "--looks", "2,5"], "--looks 2,5"),
        (["outputs", "--looks", "3"], "--looks 3"),
        (["outputs", "--looks", "a,b"], "--looks a,b"),
        (["outputs", "--margin", "-1"], "--margin -1"),
        (["outputs", "--margin", "nan"], "--margin nan"),
        (["outputs", "--margin", "1"], "0.01 means 1 %"),
        (["outputs", "--metric", "top1"], "top1"),
        (["outputs", "--json", "--markdown"], "--json"),
        (["outputs", "--frobnicate"], "--frobnicate"),
        (["outputs", "--higher-is-better"], "--higher-is-better: needs --margin"),
        (["outputs", "--paired"], "--paired: is only allowed with --scalar"),
        (["outputs", "--step", "epoch"], "--step: is only allowed with --scalar"),
        (["outputs", "--absolute"], "--absolute: needs --margin"),
        (["--tag", "loss", "fp32=a", "amp=b"], "compare: --tag: unknown option; now --scalar"),
        (["outputs", "--scalar", "a", "--metric", "a"], "--metric: is not allowed with --scalar"),
        (["outputs", "--allow", "optim.rate"], "optim.rate"),
        (["outputs", "--baseline", "nowhere"], "there are runs of amp, fp32"),
        (["outputs", "--out", "notes"], "notes"),
        (["outputs", "--out", "file.txt"], "file.txt"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, words, named):
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "outputs", {"fp32": [1.0], "amp": [1.0]})
    (tmp_path / "notes").mkdir()
    for name in ("notes/mine.txt", "file.txt"):
        (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    refused(capsys, "compare", *words, says=named)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_is_told_of_a_margin_too_wide_before_it_begins(capsys):
    refused(capsys, "compare.margin=1", says="0.01 means 1 %")


@pytest.mark.slow
def test_without_its_extension_a_scalar_names_what_is_missing(tmp_path):
    package = tmp_path / "mprun"
    package.mkdir()
    for path in Path(mprun.__file__).parent.iterdir():
        if path.name != "extensions":
            (package / path.name).symlink_to(path)
    command = [sys.executable, "-m", "mprun", "compare", "--scalar", "loss", "fp32=a", "amp=b"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    told = "mprun: --scalar loss: needs mprun.extensions.logs, which is missing here\n"
    assert (ended.returncode, ended.stderr, ended.stdout) == (2, told, "")
    assert list(tmp_path.iterdir()) == [package]


@pytest.mark.slow
def test_a_record_cannot_command_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "runs", {"fp32": BASE})
    hostile = {"mode": "amp\x1b]0;X\x07", "scaler": "none", "flags": {}}
    for seed, loss in enumerate(BASE):
        write_run(tmp_path / "runs" / f"x\x1b[2J{seed}", "amp", seed, final=loss, precision=hostile)
    for how in (["--out", "report"], ["--markdown"], ["--json"]):
        assert main(["compare", "runs", *how]) == 0
        printed = capsys.readouterr()
        assert "\x1b" not in printed.out + printed.err and "\x07" not in printed.out
        assert r"amp\x1b]0;X\x07" in printed.out or "--json" in how
    assert "amp\x1b]0;X\x07" in repr(json.loads(printed.out)).encode().decode("unicode_escape")


@pytest.mark.slow
def test_a_comparison_that_was_stopped_is_replaced_by_the_next_one(tmp_path, monkeypatch):
    """Ctrl-C comes while the figures are drawn, or while a file is written."""
    write_study(tmp_path / "study", {"fp32": BASE[:1], "amp": BASE[:1]})
    for place in (
        "mprun.comparison.report.write_json",
        "mprun.comparison.report._Report.fitting_page",
    ):
        calls = []

        def stopped(*given, place=place, calls=calls, **options):
            calls.append(place)
            if place.endswith("write_json") and len(calls) == 1:  # the note that it has begun
                return write_json(*given, **options)
            raise KeyboardInterrupt("SIGINT")

        with monkeypatch.context() as patch:
            patch.setattr(place, stopped)
            assert main(["compare", str(tmp_path / "study")]) == 130
        assert main(["compare", str(tmp_path / "study")]) == 0
    assert not [*(tmp_path / "study" / "compare").glob(".*")]
